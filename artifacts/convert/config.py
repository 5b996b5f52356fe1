"""The dimensions of a checkpoint from its config.json, and the normalised configuration that an artifact carries.

Flat (`qwen3_5_text`) and composite (`qwen3_5` with text_config, vision_config) configurations are read. Only the
members of artifact-container-v3.md section 6 are kept, so no free text of the source reaches an artifact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from artifacts.errors import ConfigError, quoted
from artifacts.identities import TextDims, VisionDims
from artifacts.identities.dims import ARCHITECTURES, FULL, LINEAR, MAX_LAYERS

# What the published 27B checkpoints say beyond dimensions (conversion.md section 1), where they say it.
PUBLISHED_ROOT: Mapping[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "language_model_only": False,
    "tie_word_embeddings": False,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
    "image_token_id": 248056,
    "video_token_id": 248057,
}
PUBLISHED_TEXT: Mapping[str, Any] = {
    "full_attention_interval": 4,
    "mamba_ssm_dtype": "float32",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
}
TOKEN_IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def text_dimensions(config: Mapping[str, Any]) -> TextDims:
    """Dimensions of the text decoder of a Hugging Face configuration.

    Accepts older spellings (rope_theta and partial_rotary_factor beside rope_scaling, full_attention_interval instead
    of layer_types, no model_type inside text_config). Errors: ConfigError naming the member and what is allowed.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ConfigError("config.json: text_config is not an object")
    normal = dict(text)
    if text is not config and "model_type" not in normal and config.get("model_type") == "qwen3_5":
        normal["model_type"] = "qwen3_5_text"
    kind = normal.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        allowed = ", ".join(ARCHITECTURES)
        raise ConfigError(f"config.json: model_type {quoted(kind)} is not supported; {allowed} are")
    normal.setdefault("tie_word_embeddings", config.get("tie_word_embeddings", False))
    normal["rope_parameters"] = _rope(normal)
    if "layer_types" not in normal:
        normal["layer_types"] = _layer_types(normal)
    # A projection with a bias or attention without its gate is another architecture with the same tensor names.
    if normal.get("attention_bias"):
        raise ConfigError("config.json: attention_bias must be false; no projection of this family has a bias")
    if normal.get("attn_output_gate") is False:
        raise ConfigError("config.json: attn_output_gate must be true; attention of this family is gated")
    return TextDims.from_config(normal)


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    rope = text.get("rope_parameters", text.get("rope_scaling"))
    if not isinstance(rope, Mapping):
        raise ConfigError("config.json: rope_parameters is missing")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "mrope"):
        raise ConfigError(f"config.json: rope_type {quoted(kind)} is not supported; 'default' is")
    beside = {name: text[name] for name in ("rope_theta", "partial_rotary_factor") if name in text}
    return {"partial_rotary_factor": 1.0, **beside, **rope}


def _layer_types(text: Mapping[str, Any]) -> list[str]:
    count, interval = text.get("num_hidden_layers"), text.get("full_attention_interval")
    if type(count) is not int or not 1 <= count <= MAX_LAYERS or type(interval) is not int or interval < 1:
        raise ConfigError("config.json: layer_types, or num_hidden_layers and full_attention_interval, are needed")
    return [FULL if index % interval == interval - 1 else LINEAR for index in range(count)]


def vision_dimensions(config: Mapping[str, Any]) -> VisionDims:
    """Dimensions of the vision tower. Errors: ConfigError when there is none or the merger is of another kind."""
    vision = config.get("vision_config")
    if not isinstance(vision, Mapping):
        raise ConfigError("config.json: vision objects were asked for, but there is no vision_config")
    if vision.get("deepstack_visual_indexes") or vision.get("in_channels", 3) != 3:
        raise ConfigError("config.json: vision_config needs in_channels 3 and no deepstack_visual_indexes")
    return VisionDims.from_config(dict(vision))


def model_config(config: Mapping[str, Any], text: TextDims, vision: VisionDims | None) -> dict[str, Any]:
    """Content of the resource `model/config.json`: the text members, and those of vision when it is kept."""
    normal = text.to_config()
    if vision is not None:
        normal["vision_config"] = vision.to_config()
        for name in TOKEN_IDS:
            if type(config.get(name)) is int:
                normal[name] = config[name]
    return normal


def published_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Members of a configuration that differ from those of the published checkpoints; absent ones are not missed."""
    for where, members in ((config, PUBLISHED_ROOT), (config.get("text_config"), PUBLISHED_TEXT)):
        if not isinstance(where, Mapping):
            continue
        for name, value in members.items():
            if name in where and (where[name] != value or type(where[name]) is not type(value)):
                yield f"config.json: {name} is {quoted(where[name])}; the published checkpoints have {quoted(value)}"
