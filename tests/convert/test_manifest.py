"""`mixed_native_manifest.json` is compared with the tensors, and decides nothing itself."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from artifacts.convert import Options, convert
from artifacts.convert.checkpoint import Checkpoint
from artifacts.convert.convert import plan_conversion
from artifacts.convert.manifest import MANIFEST, MAX_MANIFEST_BYTES, PUBLISHED, manifest_problems
from artifacts.convert.sources import TOWERS
from artifacts.errors import ConfigError
from tests.convert import checkpoints as make
from tests.convert.headers_27b import TRUNK, Headers, base_headers
from tests.convert.test_plan_27b import HeaderCheckpoint, directory, packed_headers, to_fp8, to_nvfp4  # noqa: F401
from tests.convert.test_preflight import LAYOUTS, no_reading, options, write
from tests.hostile.test_checkpoints import mutate_json

# The packed miniature: 26 products and 6 gate matrices in 4 layers, of which one product stays BF16.
STATED: dict[str, Any] = {
    "source_model": "/somewhere/model",
    "source_recipe": "/somewhere/layer_config.json",
    "format_histogram": {
        "linear/NVFP4": 24,
        "linear/BF16": 7,
        "layer_passthrough/BF16": 22,
        "head_passthrough/BF16": 3,
        "mtp_linear/BF16": 7,
        "mtp_passthrough/BF16": 8,
    },
    "n_assignment_entries": 38,
    "ignore": ["lm_head"],
    "prune": None,
}


def stated(**members: Any) -> dict[str, Any]:
    return {**STATED, **members}


def histogram(**counts: int | None) -> dict[str, Any]:
    """The manifest with other counts; names have two underscores for the stroke, None removes one."""
    changed = {**STATED["format_histogram"], **{name.replace("__", "/"): count for name, count in counts.items()}}
    return stated(format_histogram={name: count for name, count in changed.items() if count is not None})


def packed(path: Path, manifest: object) -> Path:
    made = write(path, LAYOUTS["packed"][0](), LAYOUTS["packed"][1])
    (made / MANIFEST).write_text(manifest if isinstance(manifest, str) else json.dumps(manifest))
    return made


def test_an_agreeing_manifest_changes_nothing(tmp_path: Path) -> None:
    remarks: list[str] = []
    report = convert(packed(tmp_path / "m", STATED), tmp_path / "x.ninfer", options("packed"), log=remarks.append)
    assert f"{MANIFEST}: nothing in it contradicts the tensors" in remarks and report["remarks"] == remarks
    assert "somewhere" not in json.dumps(report)
    convert(write(tmp_path / "n", LAYOUTS["packed"][0](), LAYOUTS["packed"][1]), tmp_path / "y.ninfer", options("packed"))
    assert (tmp_path / "x.ninfer").read_bytes() == (tmp_path / "y.ninfer").read_bytes()


@pytest.mark.parametrize(
    "manifest",
    [
        {},
        {"formats": {"NVFP4": 24}, "n_targets": {"group_0": 24}, "curve": "pareto"},  # an older exporter
        histogram(linear__NVFP4=None, linear__NVFP4_PRODUCTION_CACHE=20, linear__NVFP4_block_match=4),
        histogram(mtp_linear__BF16=None, mtp_passthrough__BF16=None),  # MTP copied, not counted
        histogram(mtp_linear__BF16=8, mtp_passthrough__BF16=7),  # mtp.fc on either side
        histogram(layer_buffer__BF16=3),
        stated(ignore=["lm_head", "model.layers.2.linear_attn.out_proj", "nowhere"]),
        stated(corrected_norm_passthrough_tensors=21),
        stated(passthrough_dtype_policy="anything"),
    ],
)
def test_what_is_no_contradiction(tmp_path: Path, manifest: dict[str, Any]) -> None:
    convert(packed(tmp_path / "m", manifest), tmp_path / "x.ninfer", options("packed", dry_run=True))


@pytest.mark.parametrize(
    ("manifest", "match"),
    [
        (histogram(linear__NVFP4=25), "counts 25 NVFP4 linears of the text layers, but there are 24"),
        (histogram(linear__NVFP4=None), "counts 0 NVFP4 linears of the text layers, but there are 24"),
        (histogram(linear__BF16=8), "counts 8 unquantized linears of the text layers, but there are 7"),
        (histogram(layer_passthrough__BF16=23), "counts 23 other tensors of the text layers, but there are 22"),
        (histogram(linear__MXFP8_E4M3=1), "counts 1 FP8 linears of the text layers, but there are 0"),
        (histogram(linear__INT4=1), "counts 1 'INT4' linears of the text layers, but there are 0"),
        (histogram(mtp_linear__NVFP4=7), "counts 7 NVFP4 linears of MTP, but there are 0"),
        (histogram(mtp_passthrough__BF16=9), "counts 16 unquantized tensors of MTP, but there are 15"),
        (histogram(head__NVFP4=1), "counts 1 NVFP4 linears of embedding, final norm and output head"),
        (histogram(head_passthrough__BF16=2), "counts 2 unquantized tensors of embedding, .* but there are 3"),
        (histogram(linear__NVFP4=-1), "format_histogram must be an object of counts"),
        (stated(format_histogram={"linear/NVFP4": True}), "format_histogram must be an object of counts"),
        (stated(format_histogram=[24]), "format_histogram must be an object of counts"),
        (stated(n_assignment_entries=23), "n_assignment_entries is 23, but 24 linears are quantized"),
        (stated(n_assignment_entries="38"), "n_assignment_entries must be an integer >= 0, not '38'"),
        (stated(corrected_norm_passthrough_tensors=22), "tensors is 22, but there are 21 norms"),
        (stated(ignore=["model.layers.0.mlp.up_proj"]), "ignore names '.*', but '.*layers.0.mlp.up_proj' is quantized"),
        (stated(ignore="lm_head"), "ignore must be a list of names"),
        (stated(prune={"n_layers_pruned": 4}), "prune must be null"),
        ([], "not a JSON object"),
        ("{", "not valid JSON"),
        (" " * (MAX_MANIFEST_BYTES + 1), "at most 4194304 are allowed"),
    ],
)  # fmt: skip
def test_contradictions(tmp_path: Path, manifest: object, match: str, monkeypatch: pytest.MonkeyPatch) -> None:
    no_reading(monkeypatch)
    with pytest.raises(ConfigError, match=match) as caught:
        convert(packed(tmp_path / "m", manifest), tmp_path / "x.ninfer", options("packed"))
    assert "\n" not in str(caught.value) and MANIFEST in str(caught.value)
    assert not (tmp_path / "x.ninfer").exists()


def test_random_manifests(tmp_path: Path) -> None:
    """Whatever the file holds, there is a result or one line."""
    rng = random.Random(11)
    made = packed(tmp_path / "m", STATED)
    refused = 0
    with Checkpoint(made) as checkpoint:
        for _ in range(3000):
            changed = json.loads(json.dumps(STATED))
            mutate_json(rng, changed)
            said = list(manifest_problems(changed, checkpoint.tensors, "model.language_model.", TOWERS, None))
            assert all("\n" not in line and line.isascii() and len(line) < 400 for line in said)
            refused += bool(said)
    assert 500 < refused < 2900


def plan(directory: Path, tensors: Headers, manifest: object, model_id: str = "qwen3.6-27b", remarks: Any = None) -> Any:  # noqa: F811
    remarks = [] if remarks is None else remarks
    (directory / MANIFEST).write_text(json.dumps(manifest))
    main, base = HeaderCheckpoint(directory, tensors), HeaderCheckpoint(directory, base_headers())
    chosen = Options("nvfp4", model_id=model_id, ranking=directory / "counts.i64")
    plan_conversion(main, base, chosen, remarks.append)
    return remarks


def test_the_published_checkpoint(directory: Path) -> None:  # noqa: F811
    """The published counts are those of the tensors that conversion.md lists, and under the published name no others do."""
    (published,) = PUBLISHED.values()
    assert f"{MANIFEST}: nothing in it contradicts the tensors" in plan(directory, packed_headers(), published)
    for name, value in (("n_assignment_entries", 615), ("passthrough_dtype_policy", "other"), ("prune", {}), ("ignore", [])):
        with pytest.raises(ConfigError, match=f"{name} is .*; the published checkpoint has "):
            plan(directory, packed_headers(), {**published, name: value})
    with pytest.raises(ConfigError, match="ignore is missing; the published checkpoint has "):
        plan(directory, packed_headers(), {name: value for name, value in published.items() if name != "ignore"})
    plan(directory, packed_headers(), {**published, "n_assignment_entries": 615}, model_id="mine")
    (directory / MANIFEST).unlink()
    chosen = Options("nvfp4", model_id="qwen3.6-27b", ranking=directory / "counts.i64")
    remarks: list[str] = []
    base = HeaderCheckpoint(directory, base_headers())
    plan_conversion(HeaderCheckpoint(directory, packed_headers()), base, chosen, remarks.append)
    assert f"the checkpoint has no {MANIFEST}; its formats are taken from the tensors alone" in remarks


@pytest.mark.parametrize("kind", [to_nvfp4, to_fp8])
@pytest.mark.parametrize("name", [TRUNK + "layers.0.linear_attn.in_proj_a", "mtp.fc", "lm_head"])
def test_one_more_quantized_linear(directory: Path, kind: Any, name: str) -> None:  # noqa: F811
    (published,) = PUBLISHED.values()
    tensors = packed_headers()
    kind(tensors, name)
    remarks: list[str] = []
    with pytest.raises(ConfigError) as caught:
        plan(directory, tensors, published, model_id="mine", remarks=remarks)
    said = [line for line in (str(caught.value), *remarks) if MANIFEST in line]
    assert said and all("linears of" in line or "tensors of" in line or "ignore names" in line for line in said)


def test_a_copy_in_bf16_with_the_manifest_of_the_quantized_one(tmp_path: Path) -> None:
    tensors: make.Tensors = make.text_tensors("model.language_model.")
    made = write(tmp_path / "m", tensors)
    (made / MANIFEST).write_text(json.dumps(STATED))
    with pytest.raises(ConfigError, match="counts 24 NVFP4 linears of the text layers, but there are 0"):
        convert(made, tmp_path / "x.ninfer", options("unquantized"))
