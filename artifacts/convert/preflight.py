"""What a checkpoint is and whether it is whole, found out from its headers before any weight is read.

Published layouts (conversion.md sections 3, 5, 6 and 9):

| layout | quantization_config | linears |
|---|---|---|
| unquantized | none | BF16 (F16, F32) |
| compressed-tensors | quant_method compressed-tensors, groups of 4-bit and 8-bit floats | NVFP4, FP8 rows, BF16 |
| ModelOpt | quant_method modelopt | NVFP4, FP8 with one scale, BF16 |

The tensors decide; a configuration that says otherwise is an error. Every tensor that the objects of the artifact need
is looked up, and everything that is missing, superfluous or of another type or shape is listed at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from artifacts.container.directory_v2 import Identity
from artifacts.container.schema import ObjectPlan
from artifacts.convert.checkpoint import Checkpoint, SourceTensor, read_json
from artifacts.convert.config import published_problems
from artifacts.convert.linear import COMPRESSED, IGNORED, KINDS, MODELOPT, PLAIN, Linear, Notes, kind_of, part_problems, wrong
from artifacts.convert.manifest import MANIFEST, MAX_MANIFEST_BYTES, PUBLISHED, manifest_problems
from artifacts.convert.sources import TOWERS, Source
from artifacts.errors import ConfigError, quoted
from artifacts.identities import TextDims

UNQUANTIZED = "unquantized"
SHOWN_PROBLEMS = 20
QUANTIZED_TYPES = ("U8", "F8_E4M3")
FIRST_ROW = np.zeros(1, np.int32)  # of a draft head: its rows are rows of the output head
FORMATS_OF_COMPRESSED = ("nvfp4-pack-quantized", "float-quantized", "mixed-precision")


@dataclass
class Layout:
    """What was recognised: the name of the layout and how many linears of each kind the artifact takes from it."""

    name: str
    linears: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        if self.name == UNQUANTIZED:
            return f"{self.name} ({self.linears[PLAIN.name]} linears)"
        counts = [f"{self.linears[kind.name]} {kind.title}" for kind in KINDS if self.linears[kind.name]]
        return f"{self.name} ({', '.join(counts) or 'no'} linears)"


class Survey(Source):
    """A source that looks at headers only and collects what is wrong instead of raising."""

    def __init__(self, checkpoint: Checkpoint, dims: TextDims, types: tuple[str, ...] | None = None) -> None:
        super().__init__(checkpoint, dims, Notes())
        self.problems: dict[str, None] = {}  # in order, once each
        self.kinds: dict[str, str] = {}
        self.types = types

    def note(self, *problems: str) -> None:
        self.problems.update(dict.fromkeys(problems))

    def linear(self, name: str, rows: int, columns: int) -> Linear:
        kind = kind_of(self.checkpoint, name)
        self.kinds[name] = kind.name
        self.note(*part_problems(self.checkpoint, name, kind, rows, columns))
        self.use_linear(name)
        weight = self.checkpoint.tensors.get(name + ".weight")
        if self.types is not None and kind is PLAIN and weight is not None and weight.dtype not in self.types:
            self.note(wrong(weight, self.types, ()))
        return Linear(name, self.checkpoint, "plain", rows, columns, next(iter(self.checkpoint.tensors.values())))

    def tensor(self, name: str, shape: tuple[int, ...]) -> SourceTensor:
        tensor = super().tensor(name, shape)
        if self.types is not None and tensor.dtype not in self.types:
            self.note(wrong(tensor, self.types, ()))
        return tensor

    def look_up(self, plan: ObjectPlan, is_matrix: bool) -> None:
        """Note what object `plan` needs and does not find."""
        try:
            if is_matrix:
                self.stack(plan.name, plan.shape, FIRST_ROW)
            else:
                self.array(plan.name, plan.shape, plan.format or "BF16")
        except ConfigError as error:
            self.note(str(error))

    def superfluous(self, base: Survey | None) -> None:
        """Note tensors of the text layers and the head that no object is made of. Those that `base` supplies instead are
        the quantized checkpoint's own copies and may stay."""
        known = {n.removeprefix(base.trunk) for n in base.used} if base is not None else set()
        head = tuple(f"{name}." for name in (self.trunk + "layers", "lm_head"))
        for name in sorted(n for n in self.checkpoint if n not in self.used and n.startswith(head)):
            copied = name.removeprefix(self.trunk) in known and self.checkpoint.tensors[name].dtype not in QUANTIZED_TYPES
            if not copied and not IGNORED.search(name):
                self.note(f"tensor {quoted(name)} is not part of a model with these dimensions")

    def manifest(self, identity: Identity | None, log: Callable[[str], None]) -> None:
        """Note what the manifest of a PrismaQuant export, where there is one, says that the tensors contradict."""
        path = self.checkpoint.directory / MANIFEST
        if not path.exists():
            if identity in PUBLISHED:
                log(f"the checkpoint has no {MANIFEST}; its formats are taken from the tensors alone")
            return
        found = read_json(path, MAX_MANIFEST_BYTES)
        problems = list(manifest_problems(found, self.checkpoint.tensors, self.trunk, TOWERS, identity))
        self.note(*problems)
        if not problems:
            log(f"{MANIFEST}: nothing in it contradicts the tensors")

    def layout(self) -> Layout:
        """The layout by the tensors that were looked up. Notes a configuration that contradicts it."""
        counts = Counter(self.kinds.values())
        quantized = [kind for kind in KINDS if kind.form != "plain" and counts[kind.name]]
        method = _method(self.checkpoint.config)
        found = {kind.layout for kind in quantized} - {None}
        if len(found) > 1:
            self.note("linears are packed in the spelling of compressed-tensors and in that of ModelOpt")
        if quantized:
            by_tensors = found.pop() if found else None
            name = by_tensors or {"compressed-tensors": COMPRESSED, "modelopt": MODELOPT}.get(method or "", "FP8")
            if method is not None and by_tensors is not None and method != by_tensors.lower():
                self.note(f"quantization_config says {quoted(method)}, but the weights are stored as by {by_tensors}")
            if method == COMPRESSED:
                self.note(*_group_problems(_quantization(self.checkpoint.config) or {}, {kind.form for kind in quantized}))
        else:
            name = UNQUANTIZED
            if method is not None:
                self.note(f"quantization_config says {quoted(method)}, but no weight of the text layers is quantized")
        return Layout(name, counts)


def _quantization(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization_config of a configuration, which may stand beside or inside text_config."""
    text = config.get("text_config")
    found = config.get("quantization_config", text.get("quantization_config") if isinstance(text, dict) else None)
    if found is not None and not isinstance(found, dict):
        raise ConfigError("config.json: quantization_config is not an object")
    return found


def _method(config: Mapping[str, Any]) -> str | None:
    """`quant_method` of a configuration, None when it has no quantization. Errors: ConfigError for other methods."""
    quantization = _quantization(config)
    if quantization is None:
        return None
    method = quantization.get("quant_method")
    if method not in ("compressed-tensors", "modelopt"):
        raise ConfigError(f"config.json: quant_method {quoted(method)} is not supported; compressed-tensors and modelopt are")
    return str(method)


def _group_problems(quantization: Mapping[str, Any], kinds: set[str]) -> Iterable[str]:
    """Whether the groups of a compressed-tensors configuration are of the supported kinds."""
    what = "quantization_config"
    format = quantization.get("format", "mixed-precision")
    if format not in FORMATS_OF_COMPRESSED:
        yield f"{what}: format {quoted(format)} is not supported; {', '.join(FORMATS_OF_COMPRESSED)} are"
    if quantization.get("quantization_status", "compressed") != "compressed":
        yield f"{what}: quantization_status must be 'compressed', not {quoted(quantization['quantization_status'])}"
    groups = quantization.get("config_groups", {})
    if not isinstance(groups, dict):
        yield f"{what}: config_groups is not an object"
        return
    bits: set[str] = set()
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            yield f"{what}: group {quoted(name)} has no weights"
            continue
        bits.add(str(weights.get("num_bits")))
        wanted: dict[str, tuple[Any, ...]] = {"type": ("float",), "symmetric": (True,)}
        if weights.get("num_bits") == 4:
            wanted |= {"strategy": ("tensor_group",), "group_size": (16,)}
        elif weights.get("num_bits") == 8:
            wanted |= {"strategy": ("channel", "tensor")}
        else:
            yield f"{what}: group {quoted(name)}: num_bits must be 4 or 8, not {quoted(weights.get('num_bits'))}"
        for member, allowed in wanted.items():
            if member in weights and weights[member] not in allowed:
                choices = " or ".join(map(str, allowed))
                yield f"{what}: group {quoted(name)}: {member} must be {choices}, not {quoted(weights[member])}"
    for kind, needed in (("nvfp4", "4"), ("fp8", "8")):
        if bits and kind in kinds and needed not in bits:
            yield f"{what}: no group of {needed}-bit floats, but there are such weights"


@dataclass(frozen=True)
class Need:
    """An object, whether it is a matrix, and whether it is read from the `main` or the `base` checkpoint."""

    plan: ObjectPlan
    is_matrix: bool
    source: str


def preflight(
    main: Checkpoint,
    base: Checkpoint | None,
    dims: TextDims,
    needs: Iterable[Need],
    log: Callable[[str], None],
    published: Identity | None = None,
) -> Layout:
    """Check both checkpoints against the objects that will be made of them; no weight is read.

    published: the artifact gets the name of this published one, so unquantized matrices must be BF16, configurations and
    manifest must have the published members and no stray file may lie beside the shards. Returns the layout of `main`.
    Errors: ConfigError that names the first problem and counts them; `log` gets the others, one line each.
    """
    types = ("BF16",) if published is not None else None
    surveys = {"main": Survey(main, dims, types)}
    if base is not None:
        surveys["base"] = Survey(base, dims, types)
    for need in needs:
        surveys.get(need.source, surveys["main"]).look_up(need.plan, need.is_matrix)
    surveys["main"].superfluous(surveys.get("base"))
    layout = surveys["main"].layout()
    if base is not None and (surveys["base"].layout().name != UNQUANTIZED or surveys["base"].quantized_kinds()):
        surveys["base"].note("it must be an unquantized checkpoint")
    log(f"source layout: {layout}")
    surveys["main"].manifest(published, log)
    for survey in surveys.values():
        if published is not None:
            survey.note(*published_problems(survey.checkpoint.config))
        for stray in survey.checkpoint.strays:
            if published is not None:
                survey.note(f"{quoted(stray)} is not in the index of shards")
            else:
                log(f"{quoted(stray)} is not in the index of shards and is not read")
    _raise(surveys, log)
    return layout


def _raise(surveys: Mapping[str, Survey], log: Callable[[str], None]) -> None:
    problems = [p if name == "main" else f"--base: {p}" for name, survey in surveys.items() for p in survey.problems]
    if not problems:
        return
    for problem in problems[1:SHOWN_PROBLEMS]:
        log(problem)
    if len(problems) > SHOWN_PROBLEMS:
        log(f"… and {len(problems) - SHOWN_PROBLEMS} more")
    more = f" (the first of {len(problems)} problems)" if len(problems) > 1 else ""
    raise ConfigError(f"{problems[0]}{more}")
