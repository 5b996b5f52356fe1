"""ModelSpec: the dimensions of a dense Qwen3.5-family text decoder (spec/model-dense.md §1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

ATTENTION, GDN = "full_attention", "linear_attention"
MAX_LAYERS = 1024
MAX_WIDTH = 1 << 20


class ModelError(Exception):
    """The artifact's configuration or weights do not make a model this compiler knows; names the member."""


@dataclass(frozen=True)
class ModelSpec:
    """Dimensions. ``vocab_rows`` are the rows of the embedding, ``vocab_ids`` the ids that may be sampled."""

    hidden: int
    layer_types: tuple[str, ...]
    intermediate: int
    vocab_rows: int
    vocab_ids: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    mrope_section: tuple[int, int, int]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int
    eps: float
    max_position: int

    @property
    def conv_channels(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == ATTENTION)

    @property
    def gdn_layers(self) -> tuple[int, ...]:
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == GDN)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> ModelSpec:
        fields = dict(data)
        fields["layer_types"] = tuple(fields["layer_types"])
        fields["mrope_section"] = tuple(fields["mrope_section"])
        return ModelSpec(**fields)


def _integer(config: Mapping[str, Any], name: str, low: int = 1, high: int = MAX_WIDTH) -> int:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ModelError(f"model configuration: {name} is {value!r}; an integer in {low}…{high} is needed")
    return value


def _number(config: Mapping[str, Any], name: str) -> float:
    value = config.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise ModelError(f"model configuration: {name} is {value!r}; a positive number is needed")
    return float(value)


def spec_from_config(config: Mapping[str, Any], vocab_ids: int | None = None) -> ModelSpec:
    """ModelSpec of a text configuration (Hugging Face ``qwen3_5_text`` members or the same inside ``text_config``).

    ``vocab_ids`` is the sampling domain; None means every row. Raises ModelError naming the member and what is
    allowed.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ModelError("model configuration: text_config is not an object")
    architectures = config.get("architectures") or text.get("architectures") or []
    kind = text.get("model_type")
    if kind != "qwen3_5_text":
        raise ModelError(f"model configuration: model_type {kind!r} is not supported; allowed: 'qwen3_5_text' (dense), "
                         f"architectures {architectures!r}")  # fmt: skip
    types = text.get("layer_types")
    if not isinstance(types, list) or not 1 <= len(types) <= MAX_LAYERS or any(t not in (ATTENTION, GDN) for t in types):
        raise ModelError(f"model configuration: layer_types must list 1…{MAX_LAYERS} of {ATTENTION!r}, {GDN!r}")
    if _integer(text, "num_hidden_layers", 1, MAX_LAYERS) != len(types):
        raise ModelError(f"model configuration: num_hidden_layers differs from the {len(types)} entries of layer_types")
    rope = text.get("rope_parameters")
    if not isinstance(rope, Mapping):
        raise ModelError("model configuration: rope_parameters is missing")
    if rope.get("rope_type", "default") != "default":
        raise ModelError(f"model configuration: rope_type {rope.get('rope_type')!r} is not supported; allowed: 'default'")
    head_dim = _integer(text, "head_dim")
    factor = rope.get("partial_rotary_factor", text.get("partial_rotary_factor", 1.0))
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor <= 1:
        raise ModelError(f"model configuration: partial_rotary_factor is {factor!r}; a number in (0, 1] is needed")
    rotary = int(head_dim * factor)
    section = rope.get("mrope_section")
    if (not isinstance(section, list) or len(section) != 3
            or any(isinstance(s, bool) or not isinstance(s, int) or s < 0 for s in section)
            or 2 * sum(section) != rotary):  # fmt: skip
        raise ModelError(f"model configuration: mrope_section {section!r} must be three integers that sum to {rotary // 2}")
    for axis in (1, 2):
        # pair i of axis 1 or 2 is i ≡ axis (mod 3) below 3·section (spec/artifact-container-v3.md §6)
        if section[axis] and 3 * (section[axis] - 1) + axis >= rotary // 2:
            raise ModelError(f"model configuration: mrope_section {section!r} does not fit {rotary // 2} pairs")
    spec = ModelSpec(
        hidden=_integer(text, "hidden_size"),
        layer_types=tuple(types),
        intermediate=_integer(text, "intermediate_size"),
        vocab_rows=_integer(text, "vocab_size", 2, 1 << 22),
        vocab_ids=vocab_ids or _integer(text, "vocab_size", 2, 1 << 22),
        heads=_integer(text, "num_attention_heads", 1, 1024),
        kv_heads=_integer(text, "num_key_value_heads", 1, 1024),
        head_dim=head_dim,
        rotary_dim=rotary,
        rope_theta=_number(rope, "rope_theta"),
        mrope_section=(section[0], section[1], section[2]),
        key_heads=_integer(text, "linear_num_key_heads", 1, 1024),
        value_heads=_integer(text, "linear_num_value_heads", 1, 1024),
        key_dim=_integer(text, "linear_key_head_dim", 1, 1024),
        value_dim=_integer(text, "linear_value_head_dim", 1, 1024),
        conv_taps=_integer(text, "linear_conv_kernel_dim", 2, 8),
        eps=_number(text, "rms_norm_eps"),
        max_position=_integer(text, "max_position_embeddings", 1, 1 << 30),
    )
    if spec.heads % spec.kv_heads:
        raise ModelError(f"model configuration: {spec.heads} query heads are not a multiple of {spec.kv_heads} KV heads")
    if spec.value_heads % spec.key_heads:
        raise ModelError(f"model configuration: {spec.value_heads} value heads are not a multiple of {spec.key_heads}")
    if spec.conv_taps != 4:
        raise ModelError(f"model configuration: linear_conv_kernel_dim is {spec.conv_taps}; only 4 taps are supported")
    if spec.vocab_ids > spec.vocab_rows:
        raise ModelError(f"tokenizer has {spec.vocab_ids} ids, the embedding only {spec.vocab_rows} rows")
    return spec
