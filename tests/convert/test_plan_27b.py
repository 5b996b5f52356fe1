"""The 27B identities: headers alone must plan exactly the registered object list, every object with its source."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from artifacts.container.directory_v2 import Identity
from artifacts.convert import Options
from artifacts.convert.checkpoint import Checkpoint, SourceTensor
from artifacts.convert.convert import plan_conversion
from artifacts.convert.plan import ConversionPlan
from artifacts.errors import ConfigError, FormatError, IdentityError
from artifacts.formats import Array
from artifacts.identities.plan import RESOURCES
from artifacts.identities.registry import registered
from tests.convert.headers_27b import TRUNK, WORDS, Headers, base_headers, config, layer_headers


class HeaderCheckpoint(Checkpoint):
    """A checkpoint without bytes: names, types and shapes; every value reads as one."""

    def __init__(self, directory: Path, tensors: Headers) -> None:
        self.directory = directory
        self.strays = []
        self.config = config()
        self.tensors = {}
        for name, (dtype, shape) in tensors.items():
            nbytes = int(np.prod(shape, dtype=np.int64)) * WORDS[dtype]
            self.tensors[name] = SourceTensor(name, dtype, shape, 0, 0, nbytes)

    def read(self, tensor: SourceTensor) -> Array:
        return np.ones(tensor.shape, np.float32)


def to_nvfp4(tensors: Headers, name: str) -> None:
    rows, columns = tensors.pop(name + ".weight")[1]
    tensors[name + ".weight_packed"] = ("U8", (rows, columns // 2))
    tensors[name + ".weight_scale"] = ("F8_E4M3", (rows, columns // 16))
    tensors[name + ".weight_global_scale"] = tensors[name + ".input_global_scale"] = ("F32", (1,))


def to_fp8(tensors: Headers, name: str) -> None:
    shape = tensors[name + ".weight"][1]
    tensors[name + ".weight"] = ("F8_E4M3", shape)
    tensors[name + ".weight_scale"] = ("BF16", (shape[0], 1))


def packed_headers() -> Headers:
    """Native NVFP4 with the BF16 exceptions of conversion.md section 5, MTP in NVFP4 too."""
    tensors = base_headers()
    for index in range(64):
        for name in layer_headers(f"{TRUNK}layers.{index}.", index % 4 == 3):
            leaf = name.rsplit(".", 1)[1]
            early = leaf in ("q_proj", "k_proj", "v_proj") and index < 24
            if not early and not (leaf == "o_proj" and index in (3, 7)) and not (leaf == "out_proj" and index == 4):
                to_nvfp4(tensors, name)
    for name in layer_headers("mtp.layers.0.", True):
        to_nvfp4(tensors, name)
    return tensors


def mixed_headers() -> Headers:
    """FP8 and NVFP4 as in conversion.md section 6."""
    tensors = base_headers()
    for index in range(64):
        for name in layer_headers(f"{TRUNK}layers.{index}.", index % 4 == 3):
            (to_nvfp4 if ".mlp." in name and index < 56 else to_fp8)(tensors, name)
    to_fp8(tensors, "lm_head")
    return tensors


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tokens = '"vocab": {' + ", ".join(f'"t{i}": {i}' for i in range(131080)) + "}"
    for name in RESOURCES:
        text = '{"model": {' + tokens + "}}" if name.endswith("/tokenizer.json") else "{}"
        (tmp_path / name.removeprefix("frontend/")).write_text(text)
    np.arange(248320, dtype="<i8").tofile(tmp_path / "counts.i64")
    return tmp_path


def plan(directory: Path, main: Headers, base: Headers | None = None, **options: Any) -> ConversionPlan:
    other = HeaderCheckpoint(directory, base) if base is not None else None
    chosen = Options(ranking=directory / "counts.i64", **options)
    return plan_conversion(HeaderCheckpoint(directory, main), other, chosen, lambda _: None)[0]


def test_there_are_1199_official_tensors() -> None:
    assert len(base_headers()) == 1199


@pytest.mark.parametrize(
    ("model_id", "weights", "schema", "main", "base"),
    [
        ("qwen3.6-27b", "groupwise-int", "groupwise-int", base_headers, None),
        ("qwen3.8-27b", "groupwise-int", "groupwise-int", base_headers, None),
        ("qwen3.6-27b", "nvfp4", "nvfp4", packed_headers, base_headers),
        ("qwen3.8-27b", "nvfp4", "nvfp4", mixed_headers, base_headers),
    ],
)
def test_registered_identities(directory: Path, model_id: str, weights: str, schema: str, main, base) -> None:  # type: ignore[no-untyped-def]
    result = plan(directory, main(), base() if base else None, weights=weights, model_id=model_id)
    entry = registered(Identity(model_id, schema))
    assert result.registered and result.identity == entry.identity
    lengths = {job.plan.name: job.plan.bytes for job in result.jobs if job.plan.format is None}
    assert [job.plan for job in result.jobs] == entry.plan(lengths)  # names, shapes, formats and order
    actions = {job.action for job in result.jobs if "/layers/" in job.plan.name and job.plan.format == "NVFP4"}
    assert actions <= {"copy"}
    assert "model/config.json" not in lengths


def test_every_official_tensor_is_used(directory: Path) -> None:
    checkpoint = HeaderCheckpoint(directory, base_headers())
    options = Options(model_id="qwen3.8-27b", ranking=directory / "counts.i64")
    _, _, _, sources = plan_conversion(checkpoint, None, options, lambda _: None)
    assert sources[0].unused() == []


def test_a_registered_id_refuses_other_objects(directory: Path) -> None:
    overrides = {"text/layers/5/mlp/down": "Q6G64_F16S"}
    with pytest.raises(IdentityError, match="another --model-id"):
        plan(directory, base_headers(), model_id="qwen3.6-27b", overrides=overrides)
    free = plan(directory, base_headers(), model_id="mine", overrides=overrides)
    formats = {job.plan.name: job.plan.format for job in free.jobs}
    assert formats["text/layers/5/mlp/down"] == "Q6G64_F16S" and formats["text/layers/6/mlp/down"] == "Q5G64_F16S"
    assert not free.registered and "model/config.json" in formats
    with pytest.raises(IdentityError, match="prescribes other objects"):
        plan(directory, base_headers(), model_id="qwen3.6-27b", vocabulary="W8")
    (directory / "preprocessor_config.json").unlink()
    with pytest.raises(IdentityError, match="preprocessor_config.json"):
        plan(directory, base_headers(), model_id="qwen3.6-27b")


def test_wrong_tensors_are_named(directory: Path) -> None:
    wrong = base_headers()
    wrong["mtp.fc.weight"] = ("BF16", (5120, 5120))
    with pytest.raises(ConfigError, match=r"'mtp.fc.weight' is BF16 \[5120, 5120\]; .*\[5120, 10240\]"):
        plan(directory, wrong)
    missing = base_headers()
    del missing[TRUNK + "layers.9.linear_attn.A_log"]
    with pytest.raises(ConfigError, match="layers.9.linear_attn.A_log"):
        plan(directory, missing)
    extra = base_headers()
    extra[TRUNK + "layers.64.input_layernorm.weight"] = ("BF16", (5120,))
    with pytest.raises(ConfigError, match="layers.64.input_layernorm.weight"):
        plan(directory, extra)
    both = packed_headers()
    both[TRUNK + "layers.0.mlp.up_proj.weight"] = ("BF16", (17408, 5120))
    with pytest.raises(ConfigError, match="packed form"):
        plan(directory, both, weights="nvfp4")
    block = base_headers()
    block[TRUNK + "layers.0.mlp.up_proj.weight"] = ("F8_E4M3", (17408, 5120))
    block[TRUNK + "layers.0.mlp.up_proj.weight_scale_inv"] = ("BF16", (136, 40))
    with pytest.raises(ConfigError, match="weight_scale_inv"):
        plan(directory, block, weights="nvfp4")
    uneven = mixed_headers()
    del uneven[TRUNK + "layers.3.self_attn.k_proj.weight_scale"]
    uneven[TRUNK + "layers.3.self_attn.k_proj.weight"] = ("BF16", (1024, 5120))
    with pytest.raises(FormatError, match="no common format"):
        plan(directory, uneven, weights="nvfp4")
