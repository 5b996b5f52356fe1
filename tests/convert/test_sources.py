"""Checkpoints in every source layout convert to the expected words."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import artifacts.container.artifact as container
from artifacts.convert import Options, convert
from artifacts.errors import ConfigError, FormatError, PayloadError
from artifacts.formats import FORMATS, EncodedTensor, Fields, bf16_to_f32, f32_to_bf16
from artifacts.layouts import LAYOUTS, decode
from artifacts.tools.verify import verify
from tests.convert import checkpoints as make

Q, G = make.QUERY_ROWS, make.DIM


def run(tmp_path: Path, directory: Path, options: Options | None = None) -> tuple[Path, dict[str, Any]]:
    out = tmp_path / "out.ninfer"
    return out, convert(directory, out, options)


class Reader:
    """Fields and values of the objects of an artifact."""

    def __init__(self, path: Path) -> None:
        self.artifact = container.open(path)

    def fields(self, name: str) -> Fields:
        t = self.artifact.tensor(name)
        return dict(LAYOUTS[t.layout].unpack(t.format, t.shape, self.artifact.tensor_bytes(name)).fields)

    def values(self, name: str) -> np.ndarray:
        t = self.artifact.tensor(name)
        return decode(t.format, t.layout, t.shape, self.artifact.tensor_bytes(name))

    def format(self, name: str) -> str:
        return self.artifact.tensor(name).format

    def names(self) -> list[str]:
        return list(self.artifact.objects)


def split_q(q: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Query and gate rows of a q_proj matrix, head by head."""
    heads = q.reshape(make.HEADS, 2, make.DIM, *q.shape[1:])
    return heads[:, 0].reshape(-1, *q.shape[1:]), heads[:, 1].reshape(-1, *q.shape[1:])


def fused_attention(arrays: dict[str, np.ndarray]) -> np.ndarray:
    query, gate = split_q(arrays["q"])
    return np.concatenate([query, arrays["k"], gate, arrays["v"]])


def word_oracle(tensors: make.Tensors, trunk: str = "model.") -> dict[str, np.ndarray]:
    """BF16 words that the objects must hold, written out by hand for layers 0 and 3 and MTP."""

    def w(name: str) -> np.ndarray:
        return tensors[name][1]

    gdn, attention, mtp = f"{trunk}layers.0.", f"{trunk}layers.3.", "mtp.layers.0."
    qkv, k = w(gdn + "linear_attn.in_proj_qkv.weight"), make.KEY_ROWS
    query, gate = split_q(w(attention + "self_attn.q_proj.weight"))
    key, value = w(attention + "self_attn.k_proj.weight"), w(attention + "self_attn.v_proj.weight")
    m_query, m_gate = split_q(w(mtp + "self_attn.q_proj.weight"))
    want = {
        "text/token_embedding": w(trunk + "embed_tokens.weight"),
        "text/final_norm": w(trunk + "norm.weight"),
        "text/layers/0/input_norm": w(gdn + "input_layernorm.weight"),
        "text/layers/0/post_attention_norm": w(gdn + "post_attention_layernorm.weight"),
        "text/layers/0/gdn/convolution": w(gdn + "linear_attn.conv1d.weight")[:, 0, :].T,
        "text/layers/0/gdn/norm": w(gdn + "linear_attn.norm.weight"),
        "text/layers/0/gdn/a_projection": w(gdn + "linear_attn.in_proj_a.weight"),
        "text/layers/0/gdn/b_projection": w(gdn + "linear_attn.in_proj_b.weight"),
        "text/layers/0/gdn/query_key": qkv[: 2 * k],
        "text/layers/0/gdn/value_z": np.concatenate([qkv[2 * k :], w(gdn + "linear_attn.in_proj_z.weight")]),
        "text/layers/0/gdn/output": w(gdn + "linear_attn.out_proj.weight"),
        "text/layers/0/mlp/gate_up": np.concatenate([w(gdn + "mlp.gate_proj.weight"), w(gdn + "mlp.up_proj.weight")]),
        "text/layers/0/mlp/down": w(gdn + "mlp.down_proj.weight"),
        "text/layers/3/attention/query_key": np.concatenate([query, key]),
        "text/layers/3/attention/gate_value": np.concatenate([gate, value]),
        "text/layers/3/attention/query_norm": w(attention + "self_attn.q_norm.weight"),
        "text/layers/3/attention/key_norm": w(attention + "self_attn.k_norm.weight"),
        "text/layers/3/attention/output": w(attention + "self_attn.o_proj.weight"),
        "mtp/input_projection": w("mtp.fc.weight"),
        "mtp/embedding_norm": w("mtp.pre_fc_norm_embedding.weight"),
        "mtp/hidden_norm": w("mtp.pre_fc_norm_hidden.weight"),
        "mtp/final_norm": w("mtp.norm.weight"),
        "mtp/layer/attention/query_key_gate_value": np.concatenate(
            [m_query, w(mtp + "self_attn.k_proj.weight"), m_gate, w(mtp + "self_attn.v_proj.weight")]
        ),
        "mtp/layer/mlp/down": w(mtp + "mlp.down_proj.weight"),
    }
    for layer in (0, 3):
        p = f"text/layers/{layer}/"
        joined = [(p + "attention/query_key_gate_value", ("query_key", "gate_value")),
                  (p + "gdn/query_key_value_z", ("query_key", "value_z")),
                  (p + "gdn/a_b_projection", ("a_projection", "b_projection"))]  # fmt: skip
        for name, parts in joined:
            site = name.rsplit("/", 1)[0] + "/"
            if site + parts[0] in want:
                want[name] = np.concatenate([want[site + part] for part in parts])
    want["text/layers/3/attention/query_key_gate_value"] = np.concatenate([query, key, gate, value])
    return want


GATES = {"text/layers/0/gdn/a_log": "A_log", "text/layers/0/gdn/dt_bias": "dt_bias"}


@pytest.mark.parametrize("trunk", ["model.", "model.language_model."])
def test_bf16_words_are_copied(tmp_path: Path, trunk: str) -> None:
    tensors = make.text_tensors(trunk)
    config = make.TEXT_CONFIG if trunk == "model." else {"model_type": "qwen3_5", "text_config": make.TEXT_CONFIG}
    out, report = run(tmp_path, make.write_checkpoint(tmp_path / "Tiny Model!", tensors, config), Options("bf16"))
    reader = Reader(out)
    assert report["identity"] == {"model_id": "tiny-model", "weights_id": "bf16"} and not report["unused_tensors"]
    checked = 0
    for name, words in word_oracle(tensors, trunk).items():
        if name in reader.names():
            assert np.array_equal(reader.fields(name)["words"], words), name
            checked += 1
    assert checked >= 18
    assert np.array_equal(reader.fields("text/output_head")["words"], tensors["lm_head.weight"][1])
    for name, source in GATES.items():
        exact = bf16_to_f32(tensors[f"{trunk}layers.0.linear_attn.{source}"][1])
        assert reader.format(name) == "FP32" and np.array_equal(reader.values(name), exact)


def test_groupwise_int_is_the_encoding_of_the_same_rows(tmp_path: Path) -> None:
    tensors = make.text_tensors()
    out, _ = run(tmp_path, make.write_checkpoint(tmp_path / "m", tensors, shards=3))
    reader = Reader(out)
    formats = {
        "text/token_embedding": "W8G32_F16S",
        "text/layers/0/gdn/query_key": "Q4G64_F16S",
        "text/layers/0/gdn/value_z": "Q5G64_F16S",
        "text/layers/0/gdn/output": "Q5G64_F16S",
        "text/layers/0/mlp/gate_up": "Q4G64_F16S",
        "text/layers/0/mlp/down": "Q5G64_F16S",
        "text/layers/3/attention/query_key": "Q4G64_F16S",
        "text/layers/3/attention/gate_value": "Q5G64_F16S",
        "text/layers/3/attention/output": "Q5G64_F16S",
        "mtp/input_projection": "W8G32_F16S",
        "mtp/layer/attention/query_key_gate_value": "W8G32_F16S",
        "mtp/layer/mlp/down": "W8G32_F16S",
        "text/layers/0/gdn/a_projection": "BF16",
        "text/layers/0/gdn/convolution": "BF16",
    }
    oracle = word_oracle(tensors)
    for name, format in formats.items():
        assert reader.format(name) == format, name
        want = FORMATS[format].encode(np.ascontiguousarray(oracle[name])).fields
        got = reader.fields(name)
        assert all(np.array_equal(got[k], want[k]) for k in want), name


def test_tied_embeddings_and_missing_parts(tmp_path: Path) -> None:
    tensors = make.text_tensors(tied=True, mtp=False)
    directory = make.write_checkpoint(tmp_path / "m", tensors, {**make.TEXT_CONFIG, "tie_word_embeddings": True})
    out, _ = run(tmp_path, directory, Options("bf16"))
    reader = Reader(out)
    assert np.array_equal(reader.fields("text/output_head")["words"], tensors["model.embed_tokens.weight"][1])
    assert not any(name.startswith(("mtp/", "vision/", "text/draft")) for name in reader.names())
    untied = make.write_checkpoint(tmp_path / "n", tensors)
    with pytest.raises(ConfigError, match="lm_head"):
        convert(untied, tmp_path / "x.ninfer")


@pytest.mark.parametrize("scale", ["absmax", "mse"])
def test_nvfp4_from_bf16(tmp_path: Path, scale: str) -> None:
    tensors = make.text_tensors()
    out, report = run(tmp_path, make.write_checkpoint(tmp_path / "m", tensors), Options("nvfp4", scale=scale))
    reader, oracle = Reader(out), word_oracle(tensors)
    assert report["identity"]["weights_id"] == "nvfp4" and report["recipe"]["scale"] == scale
    for name in ("text/layers/0/gdn/query_key_value_z", "text/layers/3/attention/query_key_gate_value",
                 "text/layers/0/mlp/gate_up", "text/layers/0/mlp/down", "text/layers/0/gdn/output"):  # fmt: skip
        want = FORMATS["NVFP4"].encode(np.ascontiguousarray(oracle[name]), scale=scale).fields  # type: ignore[call-arg]
        got = reader.fields(name)
        assert all(np.array_equal(got[k], want[k]) for k in want), name
    # nothing measured the activations, so no divisor is made up for them
    assert not any(name.endswith("input_scale_divisor") for name in reader.names())


def nvfp4_value(name: str, tensors: make.Tensors, divisor: float) -> np.ndarray:
    rows, half = tensors[name + ".weight_packed" if name + ".weight_packed" in tensors else name + ".weight"][1].shape
    codes, scales = make.random_nvfp4(name, rows, 2 * half)
    fields = {"codes": codes, "scales": scales, "divisor": np.asarray(np.float32(divisor))}
    return FORMATS["NVFP4"].decode_rows(fields)


PROJECTIONS = {
    0: ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z", "linear_attn.out_proj", "mlp.gate_proj", "mlp.up_proj",
        "mlp.down_proj"),
    3: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
        "mlp.up_proj", "mlp.down_proj"),
}  # fmt: skip


def packed_checkpoint() -> make.Tensors:
    """Compressed-tensors NVFP4 for all text products except layer 2's GDN output, which stays BF16."""
    tensors = make.text_tensors("model.language_model.")
    for index in range(4):
        for name in PROJECTIONS[3 if index == 3 else 0]:
            if (index, name) != (2, "linear_attn.out_proj"):
                make.compressed_nvfp4(tensors, f"model.language_model.layers.{index}.{name}", 1000.5, 37.25)
    return tensors


def test_compressed_tensors_nvfp4(tmp_path: Path) -> None:
    base = make.text_tensors("model.language_model.")
    tensors = packed_checkpoint()
    # the quantized checkpoint's own norms and embedding must not be used when a base is given
    for name in ("model.language_model.embed_tokens.weight", "model.language_model.layers.0.input_layernorm.weight"):
        tensors[name] = ("BF16", np.zeros_like(tensors[name][1]))
    config = {"model_type": "qwen3_5", "text_config": make.TEXT_CONFIG}
    quantized = make.write_checkpoint(tmp_path / "quantized", tensors, config)
    plain = make.write_checkpoint(tmp_path / "base", base, config, files={"generation_config.json": '{"a": 1}'})
    out, report = run(tmp_path, quantized, Options("nvfp4", base=plain, model_id="x"))
    reader, oracle = Reader(out), word_oracle(base, "model.language_model.")
    assert report["recipe"]["name"] == "nvfp4-packed" and report["identity"]["weights_id"] == "nvfp4"

    p = "model.language_model.layers.3.self_attn."
    parts = {x: nvfp4_value(p + x + "_proj", tensors, 1000.5) for x in "qkv"}
    name = "text/layers/3/attention/query_key_gate_value"
    assert np.array_equal(reader.values(name), fused_attention(parts))
    query_codes = split_q(make.random_nvfp4(p + "q_proj", 2 * Q, make.HIDDEN)[0])[0]
    assert np.array_equal(reader.fields(name)["codes"][:Q], query_codes)  # words, not only values
    assert reader.fields(name)["divisor"] == np.float32(1000.5)
    scalar = "text/layers/3/attention/input_projection/input_scale_divisor"
    assert reader.values(scalar) == np.float32(37.25) and reader.artifact.tensor(scalar).shape == ()
    assert reader.names().index(scalar) == reader.names().index(name) + 1

    g = "model.language_model.layers.0.linear_attn."
    want = np.concatenate([nvfp4_value(g + x, tensors, 1000.5) for x in ("in_proj_qkv", "in_proj_z")])
    assert np.array_equal(reader.values("text/layers/0/gdn/query_key_value_z"), want)
    # the BF16 exception keeps its words and has no scalar
    assert reader.format("text/layers/2/gdn/output") == "BF16"
    assert "text/layers/2/gdn/output_projection/input_scale_divisor" not in reader.names()
    # everything else is the base checkpoint's
    assert reader.format("text/token_embedding") == "W8G32_F16S"
    assert np.abs(reader.values("text/token_embedding") - bf16_to_f32(oracle["text/token_embedding"])).max() < 0.02
    assert np.array_equal(reader.fields("text/layers/0/input_norm")["words"], oracle["text/layers/0/input_norm"])
    assert np.array_equal(
        reader.fields("text/layers/0/gdn/a_projection")["words"], oracle["text/layers/0/gdn/a_projection"]
    )
    assert reader.artifact.resource("frontend/generation_config.json") == b'{"a": 1}'


def mixed_checkpoint() -> make.Tensors:
    """FP8 attention, GDN, head and last layer's MLP; NVFP4 for the other MLPs; BF16 the rest."""
    tensors = make.text_tensors("model.language_model.")
    for index in range(4):
        for name in PROJECTIONS[3 if index == 3 else 0]:
            full = f"model.language_model.layers.{index}.{name}"
            if name.startswith("mlp") and index < 3:
                make.compressed_nvfp4(tensors, full, 800 + index, 12.5)
            else:
                make.fp8(tensors, full)
    make.fp8(tensors, "lm_head")
    return tensors


def fp8_value(tensors: make.Tensors, name: str) -> np.ndarray:
    codes, scales = tensors[name + ".weight"][1], tensors[name + ".weight_scale"][1].reshape(-1)
    if scales.dtype != np.uint16:
        scales = np.repeat(f32_to_bf16(scales), len(codes))
    return FORMATS["FP8_E4M3FN_ROW_BF16S"].decode_rows({"codes": codes, "scales": scales})


def test_mixed_fp8_and_nvfp4(tmp_path: Path) -> None:
    base, tensors = make.text_tensors("model.language_model."), mixed_checkpoint()
    norm = "model.language_model.layers.0.input_layernorm.weight"
    tensors[norm] = ("BF16", tensors[norm][1] ^ 1)  # norms come from the quantized checkpoint in this recipe
    config = {"model_type": "qwen3_5", "text_config": make.TEXT_CONFIG}
    quantized = make.write_checkpoint(tmp_path / "quantized", tensors, config)
    plain = make.write_checkpoint(tmp_path / "base", base, config)
    out, report = run(tmp_path, quantized, Options("nvfp4", base=plain, model_id="x"))
    reader = Reader(out)
    assert report["recipe"]["name"] == "nvfp4-mixed" and report["identity"]["weights_id"] == "nvfp4-fp8"
    p = "model.language_model.layers.3.self_attn."
    parts = {x: fp8_value(tensors, p + x + "_proj") for x in "qkv"}
    assert np.array_equal(reader.values("text/layers/3/attention/query_key_gate_value"), fused_attention(parts))
    assert np.array_equal(reader.values("text/output_head"), fp8_value(tensors, "lm_head"))
    assert reader.format("text/layers/0/mlp/gate_up") == "NVFP4"
    assert reader.fields("text/layers/1/mlp/down")["divisor"] == 801
    assert reader.values("text/layers/1/mlp/down_projection/input_scale_divisor") == 12.5
    assert reader.format("text/layers/3/mlp/gate_up") == "FP8_E4M3FN_ROW_BF16S"
    assert "text/layers/3/mlp/gate_up_projection/input_scale_divisor" not in reader.names()
    want = FORMATS["FP8_E4M3FN_ROW_BF16S"].encode(base["model.language_model.embed_tokens.weight"][1]).fields
    got = reader.fields("text/token_embedding")
    assert all(np.array_equal(got[k], want[k]) for k in want)
    assert np.array_equal(reader.fields("text/layers/0/input_norm")["words"], tensors[norm][1])
    a, b = (base[f"model.language_model.layers.0.linear_attn.in_proj_{x}.weight"][1] for x in "ab")
    assert np.array_equal(reader.fields("text/layers/0/gdn/a_b_projection")["words"], np.concatenate([a, b]))
    assert reader.format("mtp/input_projection") == "W8G32_F16S"


def test_modelopt(tmp_path: Path) -> None:
    """Per-tensor FP8 attention, NVFP4 MLPs and head, multipliers instead of divisors, no base checkpoint."""
    tensors = make.text_tensors()
    exact, rounded = 2.0**-9, float(np.float32(0.0031))
    for index in range(4):
        for name in PROJECTIONS[3 if index == 3 else 0]:
            full = f"model.layers.{index}.{name}"
            if name.startswith("mlp"):
                make.modelopt_nvfp4(tensors, full, exact if index else rounded, 0.03125)
            else:
                make.fp8(tensors, full, per_row=False, scale=0.0078125 if index else 0.0123)
    make.modelopt_nvfp4(tensors, "lm_head", exact, 0.25)
    tensors["model.layers.3.self_attn.k_proj.k_scale"] = ("F32", np.array(1, np.float32))
    out, report = run(tmp_path, make.write_checkpoint(tmp_path / "m", tensors), Options("nvfp4"))
    reader = Reader(out)
    assert report["recipe"]["name"] == "nvfp4-mixed"
    # a power of two has an exact reciprocal, another multiplier is inverted and rounded once
    down = reader.fields("text/layers/1/mlp/down")
    assert down["divisor"] == 512.0
    assert np.array_equal(
        reader.values("text/layers/1/mlp/down"), nvfp4_value("model.layers.1.mlp.down_proj", tensors, 512)
    )
    first = reader.fields("text/layers/0/mlp/down")["divisor"]
    assert first == np.float32(1) / np.float32(rounded)
    assert reader.values("text/layers/1/mlp/down_projection/input_scale_divisor") == 32
    assert sorted(report["inexact_divisors"]) == [
        f"model.layers.0.mlp.{x}_proj.weight_scale_2" for x in ("down", "gate", "up")
    ]
    # FP8: codes stay, one scale for all rows, rounded to BF16 where it is none
    p = "model.layers.3.self_attn."
    parts = {x: fp8_value(tensors, p + x + "_proj") for x in "qkv"}
    assert np.array_equal(reader.values("text/layers/3/attention/query_key_gate_value"), fused_attention(parts))
    scales = reader.fields("text/layers/0/gdn/output")["scales"]
    assert (scales == f32_to_bf16(np.array([0.0123], np.float32))[0]).all()
    assert all(".layers.0." in name for name in report["rounded_scales"]) and len(report["rounded_scales"]) == 3
    assert reader.format("text/output_head") == "NVFP4" and reader.format("text/token_embedding").startswith("FP8")
    assert "model.layers.3.self_attn.k_proj.k_scale" in report["unused_tensors"]


def test_quantized_source_can_be_encoded_anew(tmp_path: Path) -> None:
    tensors = packed_checkpoint()
    directory = make.write_checkpoint(
        tmp_path / "m", tensors, {"model_type": "qwen3_5", "text_config": make.TEXT_CONFIG}
    )
    out, report = run(tmp_path, directory, Options("nvfp4", overrides={"text/layers/1/mlp/down": "W8G32_F16S"}))
    name = "model.language_model.layers.1.mlp.down_proj"
    want = FORMATS["W8G32_F16S"].encode(nvfp4_value(name, tensors, 1000.5)).fields
    got = Reader(out).fields("text/layers/1/mlp/down")
    assert all(np.array_equal(got[k], want[k]) for k in want)
    assert report["requantized"] == ["text/layers/1/mlp/down"]
    with pytest.raises(FormatError, match="BF16 was asked for"):
        convert(directory, tmp_path / "b.ninfer", Options("bf16"))


def test_parts_of_one_object_must_share_their_divisors(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_5", "text_config": make.TEXT_CONFIG}
    for suffix, word in ((".weight_global_scale", "divisor"), (".input_global_scale", "input_divisor")):
        tensors = packed_checkpoint()
        tensors["model.language_model.layers.1.mlp.up_proj" + suffix] = ("F32", np.array([999], np.float32))
        directory = make.write_checkpoint(tmp_path / word, tensors, config)
        with pytest.raises(PayloadError, match=rf"gate_proj.*up_proj.*one {word}"):
            convert(directory, tmp_path / "x.ninfer", Options("nvfp4"))


@pytest.mark.parametrize("bad", [0.0, -1.0, np.nan, np.inf])
def test_divisors_must_be_finite_and_positive(tmp_path: Path, bad: float) -> None:
    tensors = packed_checkpoint()
    tensors["model.language_model.layers.0.mlp.down_proj.weight_global_scale"] = ("F32", np.array([bad], np.float32))
    config = {"model_type": "qwen3_5", "text_config": make.TEXT_CONFIG}
    with pytest.raises(PayloadError, match="down_proj.weight_global_scale"):
        convert(make.write_checkpoint(tmp_path / "m", tensors, config), tmp_path / "x.ninfer", Options("nvfp4"))


@pytest.mark.parametrize(
    ("suffix", "word"), [(".weight_scale", 0x7F), (".weight_scale", 0x80)], ids=["nan", "negative"]
)
def test_illegal_source_words_name_the_object_and_leave_no_file(tmp_path: Path, suffix: str, word: int) -> None:
    tensors = packed_checkpoint()
    array = tensors["model.language_model.layers.0.mlp.down_proj" + suffix][1]
    array[5, 3] = word
    config = {"model_type": "qwen3_5", "text_config": make.TEXT_CONFIG}
    target = tmp_path / "deep" / "x.ninfer"
    target.parent.mkdir()
    with pytest.raises(PayloadError, match="text/layers/0/mlp/down"):
        convert(make.write_checkpoint(tmp_path / "m", tensors, config), target, Options("nvfp4"))
    assert not list(target.parent.iterdir())


def test_vision_is_kept_on_request_only(tmp_path: Path) -> None:
    tensors = {**make.text_tensors("model.language_model."), **make.vision_tensors()}
    config = {"model_type": "qwen3_5", "text_config": make.TEXT_CONFIG, "vision_config": make.VISION_CONFIG,
              "image_token_id": 250}  # fmt: skip
    directory = make.write_checkpoint(tmp_path / "m", tensors, config)
    remarks: list[str] = []
    report = convert(directory, tmp_path / "a.ninfer", log=remarks.append)
    assert any("vision" in r for r in remarks) and len(report["unused_tensors"]) == len(make.vision_tensors())
    convert(directory, tmp_path / "b.ninfer", Options(vision=True, weights="bf16"))
    reader = Reader(tmp_path / "b.ninfer")
    v = "model.visual."
    expected = {
        "vision/patch_embedding": tensors[v + "patch_embed.proj.weight"][1].reshape(32, 96),
        "vision/patch_embedding_bias": tensors[v + "patch_embed.proj.bias"][1],
        "vision/position_embedding": tensors[v + "pos_embed.weight"][1],
        "vision/layers/0/attention/qkv": tensors[v + "blocks.0.attn.qkv.weight"][1],
        "vision/layers/0/attention/output_bias": tensors[v + "blocks.0.attn.proj.bias"][1],
        "vision/layers/0/mlp/fc2": tensors[v + "blocks.0.mlp.linear_fc2.weight"][1],
        "vision/layers/0/norm2/bias": tensors[v + "blocks.0.norm2.bias"][1],
        "vision/merger/fc1_bias": tensors[v + "merger.linear_fc1.bias"][1],
        "vision/merger/norm/weight": tensors[v + "merger.norm.weight"][1],
    }
    for name, words in expected.items():
        assert np.array_equal(reader.fields(name)["words"], words), name
    stored = json.loads(reader.artifact.resource("model/config.json"))
    assert stored["vision_config"]["depth"] == 1 and stored["image_token_id"] == 250
    bare = make.write_checkpoint(tmp_path / "n", make.text_tensors("model.language_model."), config)
    with pytest.raises(ConfigError, match="no vision tensors"):
        convert(bare, tmp_path / "c.ninfer", Options(vision=True))


def test_artifacts_pass_verification(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_5", "text_config": make.TEXT_CONFIG}
    for name, tensors in (("packed", packed_checkpoint()), ("mixed", mixed_checkpoint())):
        directory = make.write_checkpoint(tmp_path / name, tensors, config)
        convert(directory, tmp_path / f"{name}.ninfer", Options("nvfp4"))
        assert verify(container.open(tmp_path / f"{name}.ninfer"), deep=True) == []
    plain = make.write_checkpoint(tmp_path / "plain", make.text_tensors())
    convert(plain, tmp_path / "plain.ninfer")
    assert verify(container.open(tmp_path / "plain.ninfer"), deep=True) == []


def test_encoded_tensors_of_an_artifact_are_legal(tmp_path: Path) -> None:
    for weights in ("groupwise-int", "nvfp4", "bf16"):
        out = tmp_path / f"{weights}.ninfer"
        convert(make.write_checkpoint(tmp_path / "m", make.text_tensors()), out, Options(weights))
        artifact = container.open(out)
        for name in artifact.objects:
            if not name.startswith(("frontend/", "model/")):
                t = artifact.tensor(name)
                data = artifact.tensor_bytes(name)
                layout = LAYOUTS[t.layout]
                fields = layout.unpack(t.format, t.shape, data).fields
                FORMATS[t.format].check(EncodedTensor(t.format, t.shape, fields))
                layout.check_padding(t.format, t.shape, data, 0, t.shape[0] if t.shape else 1)
