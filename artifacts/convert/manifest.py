"""`mixed_native_manifest.json`: what PrismaQuant says it wrote, compared with the tensors that are there.

Its exporter (RobTand/prismaquant, export_native_compressed.py) leaves the file beside every checkpoint; PrismaSCOUT is one
of them. The tensors decide what an artifact holds. The manifest has no list of tensors, only these members:

| member | meaning | compared with |
|---|---|---|
| format_histogram | "category/FORMAT" -> count | tensors of text layers, of MTP, and of embedding, final norm, head |
| n_assignment_entries | linears with a chosen format | at least the quantized ones of the histogram |
| ignore | names that stay unquantized | no quantized tensor under them |
| prune | removed experts, or null | null: a dense model has none |
| corrected_norm_passthrough_tensors | norms put back to their source type | at most the norms that are there |
| source_model, source_recipe | paths on the exporter's machine | not read |

Formats carry notes of how they were made (NVFP4_PRODUCTION_CACHE, MXFP8_E4M3), so they count by family. Other categories
(packed experts, buffers) name tensors that a dense model does not have and are not compared.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from artifacts.container.directory_v2 import Identity
from artifacts.convert.checkpoint import SourceTensor
from artifacts.convert.linear import IGNORED
from artifacts.errors import quoted

MANIFEST = "mixed_native_manifest.json"
MAX_MANIFEST_BYTES = 4 << 20  # a pruned model lists every layer; without it the file has some hundred bytes

# The members that upstream's converter demands of a published checkpoint (conversion.md section 5).
PUBLISHED: Mapping[Identity, Mapping[str, Any]] = {
    Identity("qwen3.6-27b", "nvfp4"): {
        "format_histogram": {
            "head_passthrough/BF16": 3,
            "linear/BF16": 117,
            "linear/NVFP4": 379,
            "layer_passthrough/BF16": 352,
            "mtp_linear/NVFP4": 7,
            "mtp_passthrough/BF16": 8,
        },
        "n_assignment_entries": 614,
        "ignore": ["lm_head"],
        "prune": None,
        "passthrough_dtype_policy": "source_dtype_preserved; corrected from silent norm fp32 upcast",
        "corrected_norm_passthrough_tensors": 216,
    }
}

LAYERS, MTP, ENDS = "the text layers", "MTP", "embedding, final norm and output head"
CATEGORIES = {  # category -> where its tensors are, whether they are linears
    "linear": (LAYERS, True),
    "layer_passthrough": (LAYERS, False),
    "mtp_linear": (MTP, True),
    "mtp_passthrough": (MTP, False),
    "head": (ENDS, True),
    "head_passthrough": (ENDS, False),
}
UNQUANTIZED = "unquantized"
DESCRIBING = re.compile(rf"\.weight_(scale(_2|_inv)?|global_scale)$|{IGNORED.pattern}")  # parts of quantized linears
NORM = re.compile(r"norm(_embedding|_hidden)?\.weight$")


def manifest_problems(
    manifest: Any, tensors: Mapping[str, SourceTensor], trunk: str, towers: tuple[str, ...], identity: Identity | None
) -> Iterator[str]:
    """What the manifest of a checkpoint says that its `tensors` contradict, one line each.

    trunk: prefix of the text model; `towers`: prefixes of vision tensors, which the manifest does not count.
    identity: the published one that the artifact gets, if any.
    """
    if not isinstance(manifest, dict):
        yield f"{MANIFEST}: not a JSON object"
        return
    for name, value in PUBLISHED.get(identity, {}).items() if identity is not None else ():
        if name not in manifest or manifest[name] != value or type(manifest[name]) is not type(value):
            given = quoted(manifest[name]) if name in manifest else "missing"
            yield f"{MANIFEST}: {name} is {given}; the published checkpoint has {quoted(value, 200)}"
    tensors = {name: tensor for name, tensor in tensors.items() if not DESCRIBING.search(name)}
    quantized = 0
    histogram = manifest.get("format_histogram")
    if histogram is not None:
        counts = histogram.items() if isinstance(histogram, dict) else ()
        if not isinstance(histogram, dict) or any(type(count) is not int or count < 0 for _, count in counts):
            yield f"{MANIFEST}: format_histogram must be an object of counts"
        else:
            stated, quantized = _stated(histogram)
            yield from _differences(histogram, stated, _stored(tensors, trunk, towers))
    yield from _numbers(manifest, quantized, sum(NORM.search(name) is not None for name in tensors))
    yield from _ignored(manifest.get("ignore"), tensors, trunk)
    if manifest.get("prune") is not None:
        yield f"{MANIFEST}: prune must be null; a dense model has no experts that could be removed"


def _family(format: str) -> str:
    if format.startswith("NVFP4"):
        return "NVFP4"
    if "FP8" in format:
        return "FP8"
    return UNQUANTIZED if format in ("BF16", "FP16", "F16", "FP32", "F32") else quoted(format, 30)


def _label(where: str, family: str, linear: bool) -> str:
    """What a count is of. Outside the layers, an unquantized linear and another tensor are told apart by nobody."""
    if where == LAYERS and family == UNQUANTIZED:
        return f"unquantized linears of {where}" if linear else f"other tensors of {where}"
    return f"{family} {'tensors' if family == UNQUANTIZED else 'linears'} of {where}"


def _stated(histogram: Mapping[str, int]) -> tuple[Counter[str], int]:
    """Counts by label, and how many linears are said to be quantized."""
    stated: Counter[str] = Counter()
    quantized = 0
    for key, count in histogram.items():
        category, _, format = key.partition("/")
        where, linear = CATEGORIES.get(category, ("", False))
        if where:
            family = _family(format)
            stated[_label(where, family, linear)] += count
            quantized += count if family != UNQUANTIZED else 0
    return stated, quantized


def _stored(tensors: Mapping[str, SourceTensor], trunk: str, towers: tuple[str, ...]) -> Counter[str]:
    stored: Counter[str] = Counter()
    for name, tensor in tensors.items():
        if name.startswith(towers):
            continue
        where = LAYERS if name.startswith(trunk + "layers.") else MTP if name.startswith("mtp.") else ENDS
        suffix, family = name.rpartition(".")[2], UNQUANTIZED
        if suffix == "weight_packed" or (suffix == "weight" and tensor.dtype == "U8"):
            family = "NVFP4"
        elif tensor.dtype == "F8_E4M3":
            family = "FP8"
        stored[_label(where, family, family != UNQUANTIZED or (suffix == "weight" and len(tensor.shape) == 2))] += 1
    return stored


def _differences(histogram: Iterable[str], stated: Counter[str], stored: Counter[str]) -> Iterator[str]:
    """Unquantized tensors count only where the exporter counted them: MTP may be copied without being counted."""
    categories = {key.partition("/")[0] for key in histogram}
    counted = {where for category, (where, linear) in CATEGORIES.items() if not linear and category in categories}
    for label in sorted(stated.keys() | stored.keys()):
        silent = label.startswith((UNQUANTIZED, "other")) and label.rpartition(" of ")[2] not in counted
        if stated[label] != stored[label] and not silent:
            yield f"{MANIFEST}: format_histogram counts {stated[label]} {label}, but there are {stored[label]}"


def _numbers(manifest: Mapping[str, Any], quantized: int, norms: int) -> Iterator[str]:
    for name, least, most, why in (
        ("n_assignment_entries", quantized, None, f"{quantized} linears are quantized"),
        ("corrected_norm_passthrough_tensors", 0, norms, f"there are {norms} norms"),
    ):
        value = manifest.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 0:
            yield f"{MANIFEST}: {name} must be an integer >= 0, not {quoted(value)}"
        elif value < least or (most is not None and value > most):
            yield f"{MANIFEST}: {name} is {value}, but {why}"


def _ignored(ignore: Any, tensors: Mapping[str, SourceTensor], trunk: str) -> Iterator[str]:
    if ignore is None:
        return
    if not isinstance(ignore, list) or any(not isinstance(name, str) for name in ignore):
        yield f"{MANIFEST}: ignore must be a list of names"
        return
    for name in ignore:  # names as in the exporter's recipe, where the text model is called "model."
        for full in dict.fromkeys((name, trunk + name.removeprefix("model."))):
            weight = tensors.get(full + ".weight")
            if full + ".weight_packed" in tensors or (weight is not None and weight.dtype in ("U8", "F8_E4M3")):
                yield f"{MANIFEST}: ignore names {quoted(name)}, but {quoted(full)} is quantized"
