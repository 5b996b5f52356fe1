"""Dimensions of the model family, and the configuration members that spell them (artifact-container-v3.md section 6).

A configuration is hostile input: every member is checked for type and range before anything is sized by it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from artifacts.errors import ConfigError, quoted

FULL, LINEAR, SLIDING = "full_attention", "linear_attention", "sliding_attention"
DENSE_TYPE, MOE_TYPE = "qwen3_5_text", "qwen3_5_moe_text"
ARCHITECTURES = {DENSE_TYPE: "Qwen3_5ForCausalLM", MOE_TYPE: "Qwen3_5MoeForCausalLM"}
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20
MAX_VOCABULARY = 1 << 24
MAX_EXPERTS = 4096
SMALLEST_REAL, LARGEST_REAL = 2.0**-149, 2.0**128 - 2.0**104  # numbers are stored as binary32


def binary32(value: float) -> float:
    """The binary32 nearest to `value`, as version 3 files print real numbers (1e-6 -> 9.999999974752427e-07)."""
    return float(np.float32(value))


def _member(config: Mapping[str, Any], name: str, scope: str) -> Any:
    if name not in config:
        raise ConfigError(f"{scope} configuration: missing member {name}")
    return config[name]


def _integer(config: Mapping[str, Any], name: str, scope: str, maximum: int = MAX_WIDTH) -> int:
    value = _member(config, name, scope)
    if type(value) is not int or not 1 <= value <= maximum:
        raise ConfigError(f"{scope} configuration: {name} must be an integer from 1 to {maximum}, not {quoted(value)}")
    return value


def _real(config: Mapping[str, Any], name: str, scope: str) -> float:
    value = _member(config, name, scope)
    if type(value) not in (int, float) or not SMALLEST_REAL <= value <= LARGEST_REAL:
        raise ConfigError(f"{scope} configuration: {name} must be a positive binary32 number, not {quoted(value)}")
    return float(value)


def _layer_types(config: Mapping[str, Any], allowed: tuple[str, ...], scope: str) -> tuple[str, ...]:
    count = _integer(config, "num_hidden_layers", scope, MAX_LAYERS)
    types = _member(config, "layer_types", scope)
    if type(types) is not list or len(types) != count or any(kind not in allowed for kind in types):
        raise ConfigError(f"{scope} configuration: layer_types must list {count} times one of {', '.join(allowed)}")
    return tuple(types)


@dataclass(frozen=True)
class TextDims:
    """The text decoder. A dense model has `intermediate`, a mixture of experts has the four expert members instead.

    Widths are rows of projections; `layer_types` holds `full_attention` or `linear_attention` per layer.
    """

    hidden: int
    vocabulary: int
    layer_types: tuple[str, ...]
    heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int
    max_position: int
    rope_theta: float
    partial_rotary_factor: float
    mrope_section: tuple[int, int, int]
    rms_norm_eps: float
    intermediate: int = 0
    experts: int = 0
    experts_per_token: int = 0
    moe_intermediate: int = 0
    shared_intermediate: int = 0
    tied: bool = False

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_width + self.value_width

    @property
    def is_moe(self) -> bool:
        return self.experts > 0

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> "TextDims":
        """Dimensions from a text configuration, or from a composite one with a `text_config` member.

        Errors: ConfigError naming the member, or an unknown model_type.
        """
        scope = "text"
        if type(config.get("text_config")) is dict:
            config = config["text_config"]
        kind = _member(config, "model_type", scope)
        if type(kind) is not str or kind not in ARCHITECTURES:
            raise ConfigError(f"unknown model architecture {quoted(kind)}; known: {', '.join(ARCHITECTURES)}")
        rope = _member(config, "rope_parameters", scope)
        if type(rope) is not dict:
            raise ConfigError(f"{scope} configuration: rope_parameters must be an object")
        sections = _member(rope, "mrope_section", scope)
        if type(sections) is not list or len(sections) != 3 or any(type(s) is not int or s < 0 for s in sections):
            raise ConfigError(f"{scope} configuration: mrope_section must be three integers, not {quoted(sections)}")
        dims = TextDims(
            hidden=_integer(config, "hidden_size", scope),
            vocabulary=_integer(config, "vocab_size", scope, MAX_VOCABULARY),
            layer_types=_layer_types(config, (FULL, LINEAR), scope),
            heads=_integer(config, "num_attention_heads", scope),
            kv_heads=_integer(config, "num_key_value_heads", scope),
            head_dim=_integer(config, "head_dim", scope),
            key_heads=_integer(config, "linear_num_key_heads", scope),
            value_heads=_integer(config, "linear_num_value_heads", scope),
            key_dim=_integer(config, "linear_key_head_dim", scope),
            value_dim=_integer(config, "linear_value_head_dim", scope),
            conv_taps=_integer(config, "linear_conv_kernel_dim", scope, 64),
            max_position=_integer(config, "max_position_embeddings", scope, 1 << 31),
            rope_theta=_real(rope, "rope_theta", scope),
            partial_rotary_factor=_real(rope, "partial_rotary_factor", scope),
            mrope_section=(sections[0], sections[1], sections[2]),
            rms_norm_eps=_real(config, "rms_norm_eps", scope),
            tied=config.get("tie_word_embeddings", False) is True,
            **_mlp_members(config, kind, scope),
        )
        dims._check()
        return dims

    def _check(self) -> None:
        if self.heads % self.kv_heads or self.value_heads % self.key_heads:
            raise ConfigError("text configuration: query heads must be a multiple of KV heads, value heads of key heads")
        if self.partial_rotary_factor > 1:
            raise ConfigError("text configuration: partial_rotary_factor must be at most 1")
        pairs, odd = divmod(int(self.head_dim * self.partial_rotary_factor), 2)
        if odd or sum(self.mrope_section) != pairs:
            raise ConfigError(
                f"text configuration: mrope_section {list(self.mrope_section)} must add up to half the even rotary width"
            )
        for axis in (1, 2):  # pair r turns by axis r % 3 while r < 3 * section; the last one must exist
            section = self.mrope_section[axis]
            if section and 3 * (section - 1) + axis >= pairs:
                raise ConfigError(f"text configuration: mrope_section {list(self.mrope_section)} does not interleave")

    def to_config(self) -> dict[str, Any]:
        """The configuration in version 3 spelling; `from_config` of it gives equal dimensions up to binary32 reals."""
        config: dict[str, Any] = {
            "architectures": [ARCHITECTURES[MOE_TYPE if self.is_moe else DENSE_TYPE]],
            "model_type": MOE_TYPE if self.is_moe else DENSE_TYPE,
            "hidden_size": self.hidden,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
            "num_hidden_layers": len(self.layer_types),
            "layer_types": list(self.layer_types),
            "max_position_embeddings": self.max_position,
            "rms_norm_eps": binary32(self.rms_norm_eps),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "rope_parameters": {
                "rope_theta": binary32(self.rope_theta),
                "partial_rotary_factor": binary32(self.partial_rotary_factor),
                "mrope_section": list(self.mrope_section),
            },
            "linear_num_key_heads": self.key_heads,
            "linear_key_head_dim": self.key_dim,
            "linear_num_value_heads": self.value_heads,
            "linear_value_head_dim": self.value_dim,
            "linear_conv_kernel_dim": self.conv_taps,
        }
        if self.is_moe:
            config["num_experts"] = self.experts
            config["num_experts_per_tok"] = self.experts_per_token
            config["moe_intermediate_size"] = self.moe_intermediate
            config["shared_expert_intermediate_size"] = self.shared_intermediate
        else:
            config["intermediate_size"] = self.intermediate
        return config


def _mlp_members(config: Mapping[str, Any], kind: str, scope: str) -> dict[str, int]:
    if kind == DENSE_TYPE:
        return {"intermediate": _integer(config, "intermediate_size", scope)}
    members = {
        "experts": _integer(config, "num_experts", scope, MAX_EXPERTS),
        "experts_per_token": _integer(config, "num_experts_per_tok", scope, MAX_EXPERTS),
        "moe_intermediate": _integer(config, "moe_intermediate_size", scope),
        "shared_intermediate": _integer(config, "shared_expert_intermediate_size", scope),
    }
    if members["experts_per_token"] > members["experts"]:
        raise ConfigError(f"{scope} configuration: num_experts_per_tok exceeds num_experts")
    return members


@dataclass(frozen=True)
class VisionDims:
    """The vision tower; its merger ends at the text width."""

    depth: int
    hidden: int
    intermediate: int
    heads: int
    patch: int
    temporal_patch: int
    merge: int
    positions: int
    moe: bool = False

    @property
    def patch_input(self) -> int:
        return 3 * self.temporal_patch * self.patch * self.patch

    @property
    def merger_width(self) -> int:
        return self.hidden * self.merge * self.merge

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> "VisionDims":
        """Dimensions from a vision configuration, or a composite one with `vision_config`. Errors: ConfigError."""
        scope = "vision"
        if type(config.get("vision_config")) is dict:
            config = config["vision_config"]
        dims = VisionDims(
            depth=_integer(config, "depth", scope, MAX_LAYERS),
            hidden=_integer(config, "hidden_size", scope),
            intermediate=_integer(config, "intermediate_size", scope),
            heads=_integer(config, "num_heads", scope),
            patch=_integer(config, "patch_size", scope, 1024),
            temporal_patch=_integer(config, "temporal_patch_size", scope, 64),
            merge=_integer(config, "spatial_merge_size", scope, 64),
            positions=_integer(config, "num_position_embeddings", scope, MAX_VOCABULARY),
            moe=config.get("model_type") == "qwen3_5_moe_vision",
        )
        if dims.hidden % dims.heads or dims.hidden // dims.heads % 4:
            raise ConfigError("vision configuration: hidden_size must give each head a multiple of 4")
        if math.isqrt(dims.positions) ** 2 != dims.positions:
            raise ConfigError("vision configuration: num_position_embeddings must be a perfect square")
        return dims

    def to_config(self) -> dict[str, Any]:
        """The configuration in version 3 spelling."""
        return {
            "model_type": "qwen3_5_moe_vision" if self.moe else "qwen3_5_vision",
            "depth": self.depth,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_heads": self.heads,
            "patch_size": self.patch,
            "temporal_patch_size": self.temporal_patch,
            "spatial_merge_size": self.merge,
            "num_position_embeddings": self.positions,
        }


@dataclass(frozen=True)
class DraftDims:
    """A block-diffusion drafter: DFlash, or DFlash2 when `conv_taps` is not 0 (dflash.md)."""

    layer_types: tuple[str, ...]
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    target_layers: tuple[int, ...]
    mask_token: int
    window: int
    max_position: int
    rope_theta: float
    rms_norm_eps: float
    conv_taps: int = 0
    conv_group: int = 0
    selector_rank: int = 0
    selector_top_k: int = 0

    @property
    def component(self) -> str:
        """The component and parameter prefix: `dflash` or `dflash2`."""
        return "dflash2" if self.conv_taps else "dflash"

    @property
    def query_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> "DraftDims":
        """Dimensions from a version 3 drafter configuration. Errors: ConfigError."""
        scope = "drafter"
        rope, draft = _member(config, "rope_parameters", scope), _member(config, "dflash_config", scope)
        if type(rope) is not dict or type(draft) is not dict:
            raise ConfigError("drafter configuration: rope_parameters and dflash_config must be objects")
        taps = _member(draft, "target_layer_ids", scope)
        if type(taps) is not list or not taps or any(type(t) is not int or not 0 <= t < MAX_LAYERS for t in taps):
            raise ConfigError("drafter configuration: target_layer_ids must list layer indices")
        second = config.get("architectures") == ["DFlash2DraftModel"]
        return DraftDims(
            layer_types=_layer_types(config, (SLIDING, FULL), scope),
            intermediate=_integer(config, "intermediate_size", scope),
            heads=_integer(config, "num_attention_heads", scope),
            kv_heads=_integer(config, "num_key_value_heads", scope),
            head_dim=_integer(config, "head_dim", scope),
            target_layers=tuple(taps),
            mask_token=_integer(draft, "mask_token_id", scope, MAX_VOCABULARY),
            window=_integer(config, "sliding_window", scope, 1 << 31),
            max_position=_integer(config, "max_position_embeddings", scope, 1 << 31),
            rope_theta=_real(rope, "rope_theta", scope),
            rms_norm_eps=_real(config, "rms_norm_eps", scope),
            conv_taps=_integer(draft, "conv_kernel_size", scope) if second else 0,
            conv_group=_integer(draft, "conv_group_size", scope) if second else 0,
            selector_rank=_integer(draft, "selector_rank", scope) if second else 0,
            selector_top_k=_integer(draft, "selector_top_k", scope) if second else 0,
        )

    def to_config(self) -> dict[str, Any]:
        """The configuration in version 3 spelling."""
        draft: dict[str, Any] = {"target_layer_ids": list(self.target_layers), "mask_token_id": self.mask_token}
        if self.conv_taps:
            draft["conv_kernel_size"] = self.conv_taps
            draft["conv_group_size"] = self.conv_group
            draft["selector_rank"] = self.selector_rank
            draft["selector_top_k"] = self.selector_top_k
        return {
            "architectures": ["DFlash2DraftModel" if self.conv_taps else "DFlashDraftModel"],
            "model_type": "qwen3",
            "intermediate_size": self.intermediate,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_hidden_layers": len(self.layer_types),
            "rms_norm_eps": binary32(self.rms_norm_eps),
            "rope_parameters": {"rope_theta": binary32(self.rope_theta)},
            "max_position_embeddings": self.max_position,
            "layer_types": list(self.layer_types),
            "sliding_window": self.window,
            "dflash_config": draft,
        }
