"""Tiny checkpoints of the family in every source layout, written by the tests themselves."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from artifacts.formats import bf16_to_f32, f32_to_bf16

TYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4", "F8_E4M3": "u1", "U8": "u1", "I64": "<i8"}
Tensors = dict[str, tuple[str, np.ndarray]]

HIDDEN, INNER, VOCABULARY = 128, 128, 256
HEADS, KV, DIM = 2, 1, 64
KEY_HEADS, VALUE_HEADS, KEY_DIM = 1, 2, 64
QUERY_ROWS, KV_ROWS = HEADS * DIM, KV * DIM
KEY_ROWS, VALUE_ROWS = KEY_HEADS * KEY_DIM, VALUE_HEADS * KEY_DIM

TEXT_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": False,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-06,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "head_dim": DIM,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
    "linear_num_key_heads": KEY_HEADS,
    "linear_key_head_dim": KEY_DIM,
    "linear_num_value_heads": VALUE_HEADS,
    "linear_value_head_dim": KEY_DIM,
    "linear_conv_kernel_dim": 4,
}
VISION_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_5_vision",
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "in_channels": 3,
    "patch_size": 4,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 16,
    "out_hidden_size": HIDDEN,
    "deepstack_visual_indexes": [],
}


class Maker:
    """Random BF16 tensors by name; every tensor has its own stream, so order does not matter."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.tensors: Tensors = {}

    def bf16(self, name: str, *shape: int, scale: float = 1.0) -> np.ndarray:
        rng = np.random.default_rng([self.seed, *name.encode()])
        words = f32_to_bf16((rng.standard_normal(shape) * scale).astype(np.float32))
        self.tensors[name] = ("BF16", words)
        return words


def layer(make: Maker, prefix: str, full: bool, hidden: int = HIDDEN, inner: int = INNER) -> None:
    make.bf16(prefix + "input_layernorm.weight", hidden)
    make.bf16(prefix + "post_attention_layernorm.weight", hidden)
    make.bf16(prefix + "mlp.gate_proj.weight", inner, hidden)
    make.bf16(prefix + "mlp.up_proj.weight", inner, hidden)
    make.bf16(prefix + "mlp.down_proj.weight", hidden, inner)
    if full:
        make.bf16(prefix + "self_attn.q_proj.weight", 2 * QUERY_ROWS, hidden)
        make.bf16(prefix + "self_attn.k_proj.weight", KV_ROWS, hidden)
        make.bf16(prefix + "self_attn.v_proj.weight", KV_ROWS, hidden)
        make.bf16(prefix + "self_attn.o_proj.weight", hidden, QUERY_ROWS)
        make.bf16(prefix + "self_attn.q_norm.weight", DIM)
        make.bf16(prefix + "self_attn.k_norm.weight", DIM)
        return
    linear = prefix + "linear_attn."
    make.bf16(linear + "in_proj_qkv.weight", 2 * KEY_ROWS + VALUE_ROWS, hidden)
    make.bf16(linear + "in_proj_z.weight", VALUE_ROWS, hidden)
    make.bf16(linear + "in_proj_a.weight", VALUE_HEADS, hidden)
    make.bf16(linear + "in_proj_b.weight", VALUE_HEADS, hidden)
    make.bf16(linear + "out_proj.weight", hidden, VALUE_ROWS)
    make.bf16(linear + "conv1d.weight", 2 * KEY_ROWS + VALUE_ROWS, 1, 4)
    make.bf16(linear + "A_log", VALUE_HEADS)
    make.bf16(linear + "dt_bias", VALUE_HEADS)
    make.bf16(linear + "norm.weight", KEY_DIM)


def text_tensors(
    trunk: str = "model.", *, tied: bool = False, mtp: bool = True, hidden: int = HIDDEN, vocabulary: int = VOCABULARY
) -> Tensors:
    make = Maker()
    make.bf16(trunk + "embed_tokens.weight", vocabulary, hidden)
    make.bf16(trunk + "norm.weight", hidden)
    if not tied:
        make.bf16("lm_head.weight", vocabulary, hidden)
    for index in range(4):
        layer(make, f"{trunk}layers.{index}.", index == 3, hidden)
    if mtp:
        make.bf16("mtp.fc.weight", hidden, 2 * hidden)
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            make.bf16(f"mtp.{name}.weight", hidden)
        layer(make, "mtp.layers.0.", True, hidden)
    return make.tensors


def vision_tensors() -> Tensors:
    make, v = Maker(), "model.visual."
    width, inner, merged = 32, 48, 128
    make.bf16(v + "patch_embed.proj.weight", width, 3, 2, 4, 4)
    make.bf16(v + "patch_embed.proj.bias", width)
    make.bf16(v + "pos_embed.weight", 16, width)
    for name, rows, columns in (
        ("attn.qkv", 3 * width, width), ("attn.proj", width, width), ("mlp.linear_fc1", inner, width),
        ("mlp.linear_fc2", width, inner),
    ):  # fmt: skip
        make.bf16(f"{v}blocks.0.{name}.weight", rows, columns)
        make.bf16(f"{v}blocks.0.{name}.bias", rows)
    for norm in ("blocks.0.norm1", "blocks.0.norm2", "merger.norm"):
        make.bf16(f"{v}{norm}.weight", width)
        make.bf16(f"{v}{norm}.bias", width)
    for name, rows in (("linear_fc1", merged), ("linear_fc2", HIDDEN)):
        make.bf16(f"{v}merger.{name}.weight", rows, merged)
        make.bf16(f"{v}merger.{name}.bias", rows)
    return make.tensors


def safetensors_bytes(tensors: Tensors, header: dict[str, Any] | None = None) -> bytes:
    """A safetensors file; `header` replaces the directory for hostile tests."""
    directory: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, offset = [], 0
    for name, (dtype, array) in tensors.items():
        blob = np.ascontiguousarray(array).astype(TYPES[dtype], copy=False).tobytes()
        directory[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    raw = json.dumps(directory if header is None else header).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + b"".join(blobs)


def write_checkpoint(
    path: Path,
    tensors: Tensors,
    config: dict[str, Any] | None = None,
    *,
    shards: int = 1,
    files: dict[str, str] | None = None,
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(TEXT_CONFIG if config is None else config))
    if shards == 1:
        (path / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    else:
        weight_map = {}
        names = list(tensors)
        for index in range(shards):
            file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
            part = {n: tensors[n] for n in names[index::shards]}
            (path / file).write_bytes(safetensors_bytes(part))
            weight_map.update(dict.fromkeys(part, file))
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for name, text in (files or {}).items():
        (path / name).write_text(text, "utf-8")
    return path


def values(tensors: Tensors, name: str) -> np.ndarray:
    dtype, array = tensors[name]
    return bf16_to_f32(array) if dtype == "BF16" else array.astype(np.float32)


# --- quantized source layouts


def random_nvfp4(name: str, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes [rows, columns] 0..15 and natural scale words [rows, columns/16]."""
    rng = np.random.default_rng(list(name.encode()))
    return rng.integers(0, 16, (rows, columns), np.uint8), rng.integers(0x10, 0x7F, (rows, columns // 16), np.uint8)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """Two codes a byte, the even column in the low nibble."""
    return codes[:, 0::2] | (codes[:, 1::2] << 4)


def compressed_nvfp4(tensors: Tensors, name: str, divisor: float, input_divisor: float | None) -> None:
    """Replace a BF16 linear by the four tensors of compressed-tensors."""
    rows, columns = tensors.pop(name + ".weight")[1].shape
    codes, scales = random_nvfp4(name, rows, columns)
    tensors[name + ".weight_packed"] = ("U8", pack_nibbles(codes))
    tensors[name + ".weight_scale"] = ("F8_E4M3", scales)
    tensors[name + ".weight_global_scale"] = ("F32", np.array([divisor], np.float32))
    if input_divisor is not None:
        tensors[name + ".input_global_scale"] = ("F32", np.array([input_divisor], np.float32))


def modelopt_nvfp4(tensors: Tensors, name: str, multiplier: float, input_multiplier: float) -> None:
    """Replace a BF16 linear by the four tensors of a ModelOpt export."""
    rows, columns = tensors.pop(name + ".weight")[1].shape
    codes, scales = random_nvfp4(name, rows, columns)
    tensors[name + ".weight"] = ("U8", pack_nibbles(codes))
    tensors[name + ".weight_scale"] = ("F8_E4M3", scales)
    tensors[name + ".weight_scale_2"] = ("F32", np.array(multiplier, np.float32))
    tensors[name + ".input_scale"] = ("F32", np.array(input_multiplier, np.float32))


def fp8(tensors: Tensors, name: str, per_row: bool = True, scale: float | None = None) -> None:
    """Replace a BF16 linear by FP8 codes with BF16 row scales, or with one FP32 scale (ModelOpt)."""
    rows, columns = tensors.pop(name + ".weight")[1].shape
    rng = np.random.default_rng(list(name.encode()))
    codes = rng.integers(0, 0x7F, (rows, columns), np.uint8) | (rng.integers(0, 2, (rows, columns), np.uint8) << 7)
    tensors[name + ".weight"] = ("F8_E4M3", codes)
    if per_row:
        words = f32_to_bf16(rng.uniform(0.001, 0.1, (rows, 1)).astype(np.float32))
        tensors[name + ".weight_scale"] = ("BF16", words)
    else:
        tensors[name + ".weight_scale"] = ("F32", np.array(scale, np.float32))
        tensors[name + ".input_scale"] = ("F32", np.array(0.5, np.float32))
