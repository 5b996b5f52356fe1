"""Names, types and shapes of the tensors of the official 27B checkpoint (model-dense.md, vision.md, mtp.md)."""

import json
from pathlib import Path

from artifacts.identities.registry import DENSE_27B, TOWER

TRUNK, WORDS = "model.language_model.", {"BF16": 2, "U8": 1, "F8_E4M3": 1, "F32": 4}
Headers = dict[str, tuple[str, tuple[int, ...]]]


def layer_headers(prefix: str, full: bool) -> dict[str, tuple[int, ...]]:
    """Linears of a layer (without `.weight`)."""
    mlp = {"mlp.gate_proj": (17408, 5120), "mlp.up_proj": (17408, 5120), "mlp.down_proj": (5120, 17408)}
    if full:
        mixer = {"self_attn.q_proj": (12288, 5120), "self_attn.k_proj": (1024, 5120), "self_attn.v_proj": (1024, 5120),
                 "self_attn.o_proj": (5120, 6144)}  # fmt: skip
    else:
        mixer = {"linear_attn.in_proj_qkv": (10240, 5120), "linear_attn.in_proj_z": (6144, 5120),
                 "linear_attn.out_proj": (5120, 6144)}  # fmt: skip
    return {prefix + name: shape for name, shape in {**mlp, **mixer}.items()}


def base_headers(layers: int = 64) -> Headers:
    """The 1199 BF16 tensors of the official checkpoint, or of a model with fewer layers."""
    shapes: dict[str, tuple[int, ...]] = {
        TRUNK + "embed_tokens.weight": (248320, 5120), TRUNK + "norm.weight": (5120,), "lm_head.weight": (248320, 5120),
        "mtp.fc.weight": (5120, 10240), "mtp.pre_fc_norm_embedding.weight": (5120,),
        "mtp.pre_fc_norm_hidden.weight": (5120,), "mtp.norm.weight": (5120,),
    }  # fmt: skip
    prefixes = [(f"{TRUNK}layers.{i}.", i % 4 == 3) for i in range(layers)] + [("mtp.layers.0.", True)]
    for prefix, full in prefixes:
        shapes.update({n + ".weight": s for n, s in layer_headers(prefix, full).items()})
        shapes[prefix + "input_layernorm.weight"] = shapes[prefix + "post_attention_layernorm.weight"] = (5120,)
        if full:
            shapes[prefix + "self_attn.q_norm.weight"] = shapes[prefix + "self_attn.k_norm.weight"] = (256,)
        else:
            g = prefix + "linear_attn."
            shapes[g + "A_log"] = shapes[g + "dt_bias"] = (48,)
            shapes[g + "in_proj_a.weight"] = shapes[g + "in_proj_b.weight"] = (48, 5120)
            shapes[g + "conv1d.weight"], shapes[g + "norm.weight"] = (10240, 1, 4), (128,)
    v = "model.visual."
    shapes[v + "patch_embed.proj.weight"], shapes[v + "patch_embed.proj.bias"] = (1152, 3, 2, 16, 16), (1152,)
    shapes[v + "pos_embed.weight"] = (2304, 1152)
    vision = {"attn.qkv": (3456, 1152), "attn.proj": (1152, 1152), "mlp.linear_fc1": (4304, 1152),
              "mlp.linear_fc2": (1152, 4304)}  # fmt: skip
    pairs = {f"blocks.{b}.{n}": s for b in range(27) for n, s in vision.items()}
    pairs.update({f"blocks.{b}.{n}": (1152,) for b in range(27) for n in ("norm1", "norm2")})
    pairs.update({"merger.norm": (1152,), "merger.linear_fc1": (4608, 4608), "merger.linear_fc2": (5120, 4608)})
    for name, shape in pairs.items():
        shapes[f"{v}{name}.weight"], shapes[f"{v}{name}.bias"] = shape, shape[:1]
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def config(layers: int = 64) -> dict[str, object]:
    """A config.json for these tensors."""
    text = DENSE_27B.to_config()
    text |= {"num_hidden_layers": layers, "layer_types": list(DENSE_27B.layer_types[:layers])}
    return {"model_type": "qwen3_5", "text_config": text, "vision_config": {**TOWER.to_config(), "out_hidden_size": 5120}}


def write_sparse(directory: Path, layers: int) -> Path:
    """The checkpoint as one sparse file of zeros: full size, no disk space."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config(layers)))
    header, offset = {}, 0
    for name, (dtype, shape) in base_headers(layers).items():
        size = WORDS[dtype]
        for dimension in shape:
            size *= dimension
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    raw = json.dumps(header).encode()
    with open(directory / "model.safetensors", "wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        file.truncate(8 + len(raw) + offset)
    return directory
