"""Object lists as rules: what a file of a schema holds, in file order (conversion.md sections 2 to 8).

A schema says how weights are grouped into parents and which format each group gets by default; a format rule may
change the format of any object, which also decides where NVFP4 input divisors stand.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from artifacts.container.schema import ObjectPlan
from artifacts.errors import IdentityError, quoted
from artifacts.identities.dims import FULL, DraftDims, TextDims, VisionDims

RESOURCES = (
    "frontend/tokenizer.json",
    "frontend/tokenizer_config.json",
    "frontend/chat_template.jinja",
    "frontend/generation_config.json",
    "frontend/preprocessor_config.json",
    "frontend/video_preprocessor_config.json",
)
CONFIG_RESOURCE = "model/config.json"  # unregistered version 2 models carry their configuration here

FormatRule = Callable[[str, str], str]
"""(object name, default format) -> format."""


@dataclass(frozen=True)
class Schema:
    """Grouping and default formats of the text decoder.

    `fused_inputs`: one parent for all input projections of a mixer, else one for query and key (format `query_key`)
    and one for the rest (format `inputs`). `fused_controls`: GDN a and b rows in one parent.
    """

    embedding: str
    head: str
    fused_inputs: bool
    fused_controls: bool
    inputs: str
    query_key: str
    outputs: str
    gate_up: str
    down: str
    expert_gate_up: str = ""
    expert_down: str = ""
    shared: str = ""


BF16, FP32, I32 = "BF16", "FP32", "I32"
Q4, Q5, Q6, W8 = "Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S"
NVFP4, FP8 = "NVFP4", "FP8_E4M3FN_ROW_BF16S"

SCHEMAS = {
    "bf16": Schema(BF16, BF16, True, True, BF16, BF16, BF16, BF16, BF16, BF16, BF16, BF16),
    "groupwise-int": Schema(W8, W8, False, False, Q5, Q4, Q5, Q4, Q5),
    "groupwise-int-moe": Schema(W8, Q6, True, True, W8, W8, W8, "", "", Q4, Q5, W8),
    "nvfp4": Schema(W8, W8, True, False, NVFP4, NVFP4, NVFP4, NVFP4, NVFP4),
    "nvfp4-fp8": Schema(FP8, FP8, True, True, FP8, FP8, FP8, NVFP4, NVFP4),
}
MTP_SCHEMA = Schema(W8, W8, True, True, W8, W8, W8, W8, W8, W8, W8, W8)


def schema_name(config: TextDims, weights_id: str) -> str:
    """The schema of a weights id for a model of these dimensions. Errors: IdentityError for an unknown one."""
    name = f"{weights_id}-moe" if config.is_moe and f"{weights_id}-moe" in SCHEMAS else weights_id
    schema = SCHEMAS.get(name)
    if schema is None:
        raise IdentityError(f"unknown weights id {quoted(weights_id)}; known: {', '.join(SCHEMAS)}")
    if not (schema.expert_gate_up if config.is_moe else schema.gate_up):
        kind = "mixture-of-experts" if config.is_moe else "dense"
        raise IdentityError(f"weights id {quoted(weights_id)} has no rule for {kind} models")
    return name


def plan_objects(
    config: TextDims,
    weights_id: str,
    with_mtp: bool = False,
    with_vision: VisionDims | None = None,
    vocabulary_format: str | None = None,
    draft_rows: int = 0,
    *,
    drafter: DraftDims | None = None,
    resources: Mapping[str, int] | None = None,
    format_rule: FormatRule | None = None,
) -> list[ObjectPlan]:
    """All objects of a version 2 file, in file order; `artifacts.container.schema.place` gives them offsets.

    weights_id: `bf16`, `groupwise-int`, `nvfp4` (all text products NVFP4, integer vocabulary) or `nvfp4-fp8`
    (attention and GDN in row-scaled FP8). vocabulary_format: format of embedding and head, None for the schema's.
    draft_rows: rows of the reduced proposal head, 0 for none. resources: name -> byte length in file order.
    format_rule: may replace the default format of any tensor. Errors: IdentityError, FormatError, LayoutError.
    """
    schema = SCHEMAS[schema_name(config, weights_id)]

    def choose(name: str, format: str) -> str:
        return format_rule(name, format) if format_rule is not None else format

    def tensors() -> Iterator[tuple[str, tuple[int, ...], str]]:
        yield "text/token_embedding", (config.vocabulary, config.hidden), vocabulary_format or schema.embedding
        for index, kind in enumerate(config.layer_types):
            yield from _layer(config, schema, f"text/layers/{index}/", kind == FULL)
        yield "text/final_norm", (config.hidden,), BF16
        yield "text/output_head", (config.vocabulary, config.hidden), vocabulary_format or schema.head
        if draft_rows:
            yield "text/draft_head", (draft_rows, config.hidden), Q4
            yield "text/draft_head_token_ids", (draft_rows,), I32
        if with_mtp:
            yield from _mtp(config, MTP_SCHEMA)
        if with_vision is not None:
            yield from _vision(with_vision, config.hidden)
        if drafter is not None:
            yield from _drafter(drafter, config)

    plans = [ObjectPlan(name, bytes=length) for name, length in (resources or {}).items()]
    for name, shape, default in tensors():
        format = choose(name, default)
        plans.append(ObjectPlan(name, shape, format))
        if format == NVFP4:
            plans.append(ObjectPlan(divisor_name(name), (), FP32))
    return plans


def divisor_name(parent: str) -> str:
    """The input divisor scalar that follows an NVFP4 parent, e.g. `…/mlp/gate_up_projection/input_scale_divisor`."""
    site, slash, leaf = parent.rpartition("/")
    kind = {"output": "output", "gate_up": "gate_up", "down": "down"}.get(leaf, "input")
    return f"{site}{slash}{kind}_projection/input_scale_divisor"


def _layer(dims: TextDims, schema: Schema, prefix: str, full: bool) -> Iterator[tuple[str, tuple[int, ...], str]]:
    hidden, query, kv, key, value = dims.hidden, dims.query_width, dims.kv_width, dims.key_width, dims.value_width
    yield prefix + "input_norm", (hidden,), BF16
    if full:
        mixer = prefix + "attention/"
        if schema.fused_inputs:
            yield mixer + "query_key_gate_value", (2 * query + 2 * kv, hidden), schema.inputs
        else:
            yield mixer + "query_key", (query + kv, hidden), schema.query_key
            yield mixer + "gate_value", (query + kv, hidden), schema.inputs
        yield mixer + "query_norm", (dims.head_dim,), BF16
        yield mixer + "key_norm", (dims.head_dim,), BF16
        yield mixer + "output", (hidden, query), schema.outputs
    else:
        mixer = prefix + "gdn/"
        yield mixer + "a_log", (dims.value_heads,), FP32
        yield mixer + "dt_bias", (dims.value_heads,), FP32
        yield mixer + "convolution", (dims.conv_taps, dims.conv_channels), BF16
        if schema.fused_controls:
            yield mixer + "a_b_projection", (2 * dims.value_heads, hidden), BF16
        else:
            yield mixer + "a_projection", (dims.value_heads, hidden), BF16
            yield mixer + "b_projection", (dims.value_heads, hidden), BF16
        if schema.fused_inputs:
            yield mixer + "query_key_value_z", (2 * key + 2 * value, hidden), schema.inputs
        else:
            yield mixer + "query_key", (2 * key, hidden), schema.query_key
            yield mixer + "value_z", (2 * value, hidden), schema.inputs
        yield mixer + "norm", (dims.value_dim,), BF16
        yield mixer + "output", (hidden, value), schema.outputs
    yield prefix + "post_attention_norm", (hidden,), BF16
    if not dims.is_moe:
        yield prefix + "mlp/gate_up", (2 * dims.intermediate, hidden), schema.gate_up
        yield prefix + "mlp/down", (hidden, dims.intermediate), schema.down
        return
    rows, shared = dims.moe_intermediate, dims.shared_intermediate
    yield prefix + "moe/router_shared_gate", (dims.experts + 1, hidden), BF16
    yield prefix + "moe/routed_gate_up", (dims.experts * 2 * rows, hidden), schema.expert_gate_up
    yield prefix + "moe/routed_down", (dims.experts * hidden, rows), schema.expert_down
    yield prefix + "moe/shared_gate_up", (2 * shared, hidden), schema.shared
    yield prefix + "moe/shared_down", (hidden, shared), schema.shared


def _mtp(dims: TextDims, schema: Schema) -> Iterator[tuple[str, tuple[int, ...], str]]:
    yield "mtp/input_projection", (dims.hidden, 2 * dims.hidden), schema.inputs
    yield "mtp/embedding_norm", (dims.hidden,), BF16
    yield "mtp/hidden_norm", (dims.hidden,), BF16
    yield from _layer(dims, schema, "mtp/layer/", full=True)
    yield "mtp/final_norm", (dims.hidden,), BF16


def _vision(dims: VisionDims, text_hidden: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
    width, inner, merged = dims.hidden, dims.intermediate, dims.merger_width
    yield "vision/patch_embedding", (width, dims.patch_input), Q6
    yield "vision/patch_embedding_bias", (width,), BF16
    yield "vision/position_embedding", (dims.positions, width), BF16
    for block in range(dims.depth):
        prefix = f"vision/layers/{block}/"
        for name, shape, format in (
            ("attention/qkv", (3 * width, width), Q4),
            ("attention/output", (width, width), Q5),
            ("mlp/fc1", (inner, width), Q4),
            ("mlp/fc2", (width, inner), Q5),
        ):
            yield prefix + name, shape, format
            yield prefix + name + "_bias", shape[:1], BF16
        for norm in ("norm1", "norm2"):
            yield f"{prefix}{norm}/weight", (width,), BF16
            yield f"{prefix}{norm}/bias", (width,), BF16
    for name, shape in (("fc1", (merged, merged)), ("fc2", (text_hidden, merged))):
        yield f"vision/merger/{name}", shape, W8
        yield f"vision/merger/{name}_bias", shape[:1], BF16
    yield "vision/merger/norm/weight", (width,), BF16
    yield "vision/merger/norm/bias", (width,), BF16


def _drafter(dims: DraftDims, text: TextDims) -> Iterator[tuple[str, tuple[int, ...], str]]:
    hidden, root = text.hidden, dims.component + "/"
    yield root + "feature_projection", (hidden, len(dims.target_layers) * hidden), W8
    yield root + "context_norm", (hidden,), BF16
    for index in range(len(dims.layer_types)):
        prefix = f"{root}layers/{index}/"
        yield prefix + "input_norm", (hidden,), BF16
        yield prefix + "attention/query_key_value", (dims.query_width + 2 * dims.kv_width, hidden), W8
        yield prefix + "attention/query_norm", (dims.head_dim,), BF16
        yield prefix + "attention/key_norm", (dims.head_dim,), BF16
        yield prefix + "attention/output", (hidden, dims.query_width), W8
        yield prefix + "post_attention_norm", (hidden,), BF16
        yield prefix + "mlp/gate_up", (2 * dims.intermediate, hidden), W8
        yield prefix + "mlp/down", (hidden, dims.intermediate), W8
        if dims.conv_taps:
            for branch in ("attention_conv", "mlp_conv"):
                yield f"{prefix}{branch}/base_kernel", (2, dims.conv_taps, hidden), BF16
                rows = 2 * dims.conv_taps * hidden // dims.conv_group
                yield f"{prefix}{branch}/kernel_projection", (rows, hidden), W8
    yield root + "final_norm", (hidden,), BF16
    if dims.conv_taps:
        selector = root + "candidate_selector/"
        yield selector + "hidden_projection", (dims.selector_rank, hidden), W8
        yield selector + "predecessor_codebook", (text.vocabulary, dims.selector_rank), BF16
        yield selector + "successor_codebook", (text.vocabulary, dims.selector_rank), BF16
