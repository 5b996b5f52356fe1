"""A checkpoint is recognised and found incomplete from its headers, before any weight is read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from artifacts.convert import Options, convert
from artifacts.convert.checkpoint import Checkpoint, SourceTensor
from artifacts.errors import ArtifactError, ConfigError, PayloadError
from tests.convert import checkpoints as make
from tests.convert.test_sources import PROJECTIONS, mixed_checkpoint, packed_checkpoint

FP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, "symmetric": True, "dynamic": False}
FP8 = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
MIXED = {
    "quant_method": "compressed-tensors", "quantization_status": "compressed", "format": "mixed-precision",
    "config_groups": {"group_0": {"format": "float-quantized", "weights": FP8},
                      "group_1": {"format": "nvfp4-pack-quantized", "weights": FP4}},
}  # fmt: skip
PACKED = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
          "config_groups": {"group_0": {"weights": FP4}}}  # fmt: skip
MODELOPT = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}


def modelopt_checkpoint() -> make.Tensors:
    tensors = make.text_tensors("model.language_model.")
    for index in range(4):
        for name in PROJECTIONS[3 if index == 3 else 0]:
            full = f"model.language_model.layers.{index}.{name}"
            if name.startswith("mlp"):
                make.modelopt_nvfp4(tensors, full, 0.25, 0.5)
            else:
                make.fp8(tensors, full, per_row=False, scale=0.5)
    make.modelopt_nvfp4(tensors, "lm_head", 0.25, 0.5)
    return tensors


def plain_checkpoint() -> make.Tensors:
    return make.text_tensors("model.language_model.")


LAYOUTS: dict[str, tuple[Callable[[], make.Tensors], Any, str]] = {
    "unquantized": (plain_checkpoint, None, "unquantized (41 linears)"),
    "packed": (packed_checkpoint, PACKED, "compressed-tensors (24 NVFP4, 17 unquantized linears)"),
    "mixed": (mixed_checkpoint, MIXED, "compressed-tensors (9 NVFP4, 17 FP8, 15 unquantized linears)"),
    "modelopt": (modelopt_checkpoint, MODELOPT, "ModelOpt (13 NVFP4, 13 FP8, 15 unquantized linears)"),
}


def write(path: Path, tensors: make.Tensors, quantization: Any = None, **members: Any) -> Path:
    config = {"model_type": "qwen3_5", "text_config": make.TEXT_CONFIG, **members}
    if quantization is not None:
        config["quantization_config"] = quantization
    return make.write_checkpoint(path, tensors, config)


def options(layout: str, **more: Any) -> Options:
    return Options("groupwise-int" if layout == "unquantized" else "nvfp4", model_id="m", threads=1, **more)


def no_reading(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Checkpoint, tensor: SourceTensor, *rows: int) -> Any:
        raise AssertionError(f"{tensor.name} was read")

    monkeypatch.setattr(Checkpoint, "read", refuse)
    monkeypatch.setattr(Checkpoint, "rows", refuse)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_recognised(tmp_path: Path, layout: str) -> None:
    tensors, quantization, title = LAYOUTS[layout][0](), *LAYOUTS[layout][1:]
    remarks: list[str] = []
    directory = write(tmp_path / "m", tensors, quantization)
    report = convert(directory, tmp_path / "x.ninfer", options(layout), log=remarks.append)
    assert report["source_layout"] == title and f"source layout: {title}" in remarks
    convert(write(tmp_path / "n", tensors), tmp_path / "y.ninfer", options(layout))  # the tensors decide without a config
    assert (tmp_path / "x.ninfer").read_bytes() == (tmp_path / "y.ninfer").read_bytes()


def broken_parts(tensors: make.Tensors) -> list[tuple[str, str, make.Tensors]]:
    """(tensor, what the error must say, checkpoint) for every tensor of layers 0 and 3 missing, mistyped, misshapen."""
    found = []
    for name, (dtype, array) in tensors.items():
        if ".layers.0." not in name and ".layers.3." not in name and "lm_head" not in name and not name.startswith("mtp."):
            continue
        other = ("I64", np.zeros(array.shape, np.int64))
        larger = (dtype, np.zeros((*array.shape[:-1], 2 * array.shape[-1]) if array.ndim else (3,), array.dtype))
        if not name.endswith(("input_global_scale", "input_scale")):  # without it activations are not quantized
            found.append((name, "no tensor|no lm_head", {n: t for n, t in tensors.items() if n != name}))
        found.append((name, "I64", {**tensors, name: other}))
        found.append((name, "is needed|has shape", {**tensors, name: larger}))
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_part_is_checked_before_anything_is_read(
    tmp_path: Path, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_reading(monkeypatch)
    tensors, quantization, _ = LAYOUTS[layout][0](), *LAYOUTS[layout][1:]
    cases = broken_parts(tensors)
    assert len(cases) > 100
    for name, match, broken in cases:
        if name.endswith(".input_scale") and ".mlp." not in name and "lm_head" not in name:
            continue  # activation scale of an FP8 linear: the artifact has no place for it
        remarks: list[str] = []
        with pytest.raises(ConfigError, match=match) as caught:
            convert(write(tmp_path / "m", broken, quantization), tmp_path / "x.ninfer", options(layout), log=remarks.append)
        said = "\n".join([str(caught.value), *remarks])
        assert name.rpartition(".")[0] in said, (name, said)
        assert "\n" not in str(caught.value)
    assert not (tmp_path / "x.ninfer").exists()


def test_all_problems_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_reading(monkeypatch)
    tensors = mixed_checkpoint()
    p = "model.language_model.layers."
    del tensors[p + "1.mlp.up_proj.weight_scale"], tensors[p + "1.mlp.up_proj.weight_global_scale"]
    del tensors[p + "2.linear_attn.A_log"]
    tensors[p + "3.self_attn.k_proj.weight"] = ("BF16", np.zeros((make.KV_ROWS, make.HIDDEN), np.uint16))
    tensors[p + "4.input_layernorm.weight"] = ("BF16", np.zeros(make.HIDDEN, np.uint16))
    tensors[p + "3.mlp.down_proj.weight_global_scale"] = ("F32", np.ones(1, np.float32))
    remarks: list[str] = []
    with pytest.raises(ConfigError) as caught:
        convert(write(tmp_path / "m", tensors, MIXED), tmp_path / "x.ninfer", options("mixed"), log=remarks.append)
    assert str(caught.value) == (
        "checkpoint has no tensor 'model.language_model.layers.1.mlp.up_proj.weight_scale' (the first of 6 problems)"
    )
    assert remarks[-5:] == [
        "checkpoint has no tensor 'model.language_model.layers.1.mlp.up_proj.weight_global_scale'",
        "checkpoint has no tensor 'model.language_model.layers.2.linear_attn.A_log'",
        "'model.language_model.layers.3.self_attn.k_proj.weight': a BF16 weight must not have weight_scale",
        "'model.language_model.layers.3.mlp.down_proj.weight': a FP8 weight must not have weight_global_scale",
        "tensor 'model.language_model.layers.4.input_layernorm.weight' is not part of a model with these dimensions",
    ]


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    tensors = {n: t for n, t in plain_checkpoint().items() if ".mlp." not in n and ".self_attn." not in n}
    tensors |= {f"model.language_model.layers.9.x{i}": ("BF16", np.zeros(1, np.uint16)) for i in range(40)}
    remarks: list[str] = []
    with pytest.raises(ConfigError, match=r"the first of \d+ problems"):
        convert(write(tmp_path / "m", tensors), tmp_path / "x.ninfer", options("unquantized"), log=remarks.append)
    assert len(remarks) < 30 and remarks[-1].startswith("… and ")


@pytest.mark.parametrize("extra", ["k_scale", "v_scale", "q_scale", "output_scale"])
def test_numbers_about_caches_are_left_out(tmp_path: Path, extra: str) -> None:
    tensors = mixed_checkpoint()
    name = f"model.language_model.layers.3.self_attn.{extra}"
    tensors[name] = ("F32", np.ones(1, np.float32))
    report = convert(write(tmp_path / "m", tensors, MIXED), tmp_path / "x.ninfer", options("mixed"))
    assert name in report["unused_tensors"]


def test_extra_quantized_tensors_are_errors_even_with_a_base(tmp_path: Path) -> None:
    """With a base, the quantized checkpoint may keep its own unquantized copies, but no quantized ones."""
    base = write(tmp_path / "base", plain_checkpoint())
    tensors = packed_checkpoint()
    convert(write(tmp_path / "m", tensors, PACKED), tmp_path / "x.ninfer", options("packed", base=base))
    make.fp8(tensors, "model.language_model.layers.0.linear_attn.in_proj_a")
    with pytest.raises(ConfigError, match=r"linear_attn.in_proj_a.weight.*not part of"):
        convert(write(tmp_path / "n", tensors, PACKED), tmp_path / "y.ninfer", Options("nvfp4-packed", base=base))


def changed(quantization: dict[str, Any], **members: Any) -> dict[str, Any]:
    return {**quantization, **members}


def group(**members: Any) -> dict[str, Any]:
    return changed(PACKED, config_groups={"group_0": {"weights": {**FP4, **members}}})


@pytest.mark.parametrize(
    ("quantization", "match"),
    [
        (changed(PACKED, quant_method="gptq"), "quant_method 'gptq' is not supported"),
        (changed(PACKED, quant_method=["modelopt"]), "is not supported"),
        ({}, "quant_method 'None' is not supported"),
        ([], "quantization_config is not an object"),
        (MODELOPT, "says 'modelopt', but the weights are stored as by compressed-tensors"),
        (changed(PACKED, format="pack-quantized"), "format 'pack-quantized' is not supported"),
        (changed(PACKED, quantization_status="frozen"), "quantization_status must be 'compressed'"),
        (changed(PACKED, config_groups=[1]), "config_groups is not an object"),
        (changed(PACKED, config_groups={"group_0": 4}), "group 'group_0' has no weights"),
        (changed(PACKED, config_groups={"group_0": {"weights": []}}), "group 'group_0' has no weights"),
        (changed(PACKED, config_groups={"group_0": {"weights": FP8}}), "no group of 4-bit floats"),
        (group(num_bits=5), "num_bits must be 4 or 8, not '5'"),
        (group(num_bits=[4]), "num_bits must be 4 or 8"),
        (group(type="int"), "type must be float, not 'int'"),
        (group(group_size=32), "group_size must be 16, not '32'"),
        (group(strategy="group"), "strategy must be tensor_group"),
        (group(strategy={"a": 1}), "strategy must be tensor_group"),
        (group(symmetric=False), "symmetric must be True"),
    ],
)
def test_configurations_that_say_otherwise(
    tmp_path: Path, quantization: Any, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_reading(monkeypatch)
    with pytest.raises(ConfigError, match=match) as caught:
        convert(write(tmp_path / "m", packed_checkpoint(), quantization), tmp_path / "x.ninfer", options("packed"))
    assert "\n" not in str(caught.value)


def test_quantized_by_name_only(tmp_path: Path) -> None:
    for quantization in (PACKED, MODELOPT):
        with pytest.raises(ConfigError, match="no weight of the text layers is quantized"):
            convert(write(tmp_path / "m", plain_checkpoint(), quantization), tmp_path / "x.ninfer", options("unquantized"))
    base = write(tmp_path / "base", plain_checkpoint(), PACKED)
    with pytest.raises(ConfigError, match="--base: quantization_config says 'compressed-tensors'"):
        convert(write(tmp_path / "q", packed_checkpoint(), PACKED), tmp_path / "x.ninfer", options("packed", base=base))
    base = write(tmp_path / "base", packed_checkpoint())
    with pytest.raises(ConfigError, match="--base: it must be an unquantized checkpoint"):
        convert(write(tmp_path / "q", packed_checkpoint(), PACKED), tmp_path / "x.ninfer", options("packed", base=base))


def test_two_spellings_in_one_checkpoint(tmp_path: Path) -> None:
    tensors = packed_checkpoint()
    name = "model.language_model.layers.1.mlp.down_proj"
    for suffix in (".weight_packed", ".weight_scale", ".weight_global_scale", ".input_global_scale"):
        del tensors[name + suffix]
    tensors[name + ".weight"] = ("BF16", np.zeros((make.HIDDEN, make.INNER), np.uint16))
    make.modelopt_nvfp4(tensors, name, 0.5, 0.5)
    with pytest.raises(ConfigError, match="spelling of compressed-tensors and in that of ModelOpt"):
        convert(write(tmp_path / "m", tensors), tmp_path / "x.ninfer", options("packed"))


def test_left_in_bf16_means_equal_to_the_base(tmp_path: Path) -> None:
    base = write(tmp_path / "base", plain_checkpoint())
    for name in ("2.linear_attn.out_proj", "1.linear_attn.in_proj_a"):  # one is taken from the quantized one, one is not
        tensors = packed_checkpoint()
        full = f"model.language_model.layers.{name}.weight"
        words = tensors[full][1].copy()
        words[1, 3] ^= 1
        tensors[full] = ("BF16", words)
        with pytest.raises(PayloadError, match=rf"'{full}': row 1 differs from that of --base"):
            convert(write(tmp_path / "m", tensors, PACKED), tmp_path / "x.ninfer", options("packed", base=base))
        assert not (tmp_path / "x.ninfer").exists()
    totals, done = [], []

    def progress(total: int) -> Callable[[int], None]:
        totals.append(total)
        return done.append

    directory = write(tmp_path / "m", packed_checkpoint(), PACKED)
    convert(directory, tmp_path / "x.ninfer", options("packed", base=base), progress=progress)
    assert totals == [sum(done)]


def test_files_beside_the_shards(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_5", "text_config": make.TEXT_CONFIG}
    directory = make.write_checkpoint(tmp_path / "m", plain_checkpoint(), config, shards=3)
    (directory / "old.safetensors").write_bytes(b"anything")
    remarks: list[str] = []
    convert(directory, tmp_path / "x.ninfer", options("unquantized"), log=remarks.append)
    assert "'old.safetensors' is not in the index of shards and is not read" in remarks


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("container", [2, 3])
def test_dry_run(tmp_path: Path, layout: str, container: int) -> None:
    directory = write(tmp_path / "m", LAYOUTS[layout][0](), LAYOUTS[layout][1])
    (tmp_path / "out").mkdir()
    target = tmp_path / "out" / "x.ninfer"
    planned = convert(directory, target, options(layout, container=container, dry_run=True, file_limit=1 << 19))
    assert list(target.parent.iterdir()) == []
    report = convert(directory, target, options(layout, container=container, file_limit=1 << 19))
    assert planned == report
    sizes = [path.stat().st_size for path in target.parent.iterdir() if path.suffix != ".json"]
    assert report["file"]["bytes"] == sum(sizes)
    (directory / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ArtifactError):
        convert(directory, tmp_path / "y.ninfer", options(layout, dry_run=True))


def test_published_configurations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a published name the members that upstream checks must have the published values."""
    from artifacts.convert.convert import plan_conversion
    from tests.convert.test_plan_27b import HeaderCheckpoint, base_headers

    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    for where, member, value in (
        ("root", "image_token_id", 248055), ("root", "language_model_only", 0), ("root", "model_type", "qwen3_5"),
        ("text_config", "mamba_ssm_dtype", "bfloat16"),
    ):  # fmt: skip
        checkpoint = HeaderCheckpoint(tmp_path, base_headers())
        target = checkpoint.config if where == "root" else checkpoint.config[where]
        target[member] = value
        said = f"{member} is '{value}'" if value != "qwen3_5" else "prescribes other objects"  # no draft head: later
        with pytest.raises(ArtifactError, match=said):
            plan_conversion(checkpoint, None, Options(model_id="qwen3.6-27b"), lambda _: None)
    checkpoint = HeaderCheckpoint(tmp_path, base_headers() | {"lm_head.weight": ("F32", (248320, 5120))})
    with pytest.raises(ConfigError, match="'lm_head.weight' is F32 .* BF16 is needed"):
        plan_conversion(checkpoint, None, Options(model_id="qwen3.6-27b"), lambda _: None)
    checkpoint.strays = ["model-00016.safetensors"]
    checkpoint.tensors |= HeaderCheckpoint(tmp_path, base_headers()).tensors
    with pytest.raises(ConfigError, match="'model-00016.safetensors' is not in the index"):
        plan_conversion(checkpoint, None, Options(model_id="qwen3.6-27b"), lambda _: None)
