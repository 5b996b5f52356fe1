"""The kernel family of each op kind."""

from __future__ import annotations

from compiler.ir.op import require
from compiler.kernels import (
    attention_decode,
    attention_prefill,
    attn_prepare,
    control,
    conv,
    embed,
    exchange,
    gated_norm,
    gdn_decode,
    gdn_gates,
    gdn_prefill,
    linear_columns,
    linear_rows,
)
from compiler.kernels.spec import KernelSpec
from compiler.passes.select import Site, exchange_spec, family

_STORE = {"linear": "bf16", "linear_swiglu": "swiglu", "linear_residual": "residual"}


@family("begin")
def _begin(site: Site) -> KernelSpec:
    attention = next((op for _, op in site.graph.ops() if op.kind.startswith("attention")), None)
    heads, dim = (attention.int_attr("heads"), attention.int_attr("dim")) if attention else (1, 32)
    return control.begin_spec(site.op, site.types, site.graph.lanes, site.graph.width, heads, dim, site.caps)


@family("advance")
def _advance(site: Site) -> KernelSpec:
    return control.advance_spec(site.op, site.types, site.graph.lanes, site.graph.width, site.caps)


@family("embed")
def _embed(site: Site) -> KernelSpec:
    return embed.embed_spec(site.op, site.types, site.format(), site.caps)


@family("rmsnorm")
def _rmsnorm(site: Site) -> KernelSpec:
    return control.rmsnorm_spec(site.op, site.types, site.caps)


@family("select_last")
def _select_last(site: Site) -> KernelSpec:
    return control.select_last_spec(site.op, site.types, site.graph.width, site.caps)


@family("sample")
def _sample(site: Site) -> KernelSpec:
    return control.sample_spec(site.op, site.types, site.graph.lanes, site.graph.width, site.caps)


def product(site: Site) -> KernelSpec:
    """Decode and short prompts: the column kernel, whose bits do not depend on the number of columns. Prefill chunks:
    the row kernel with a device-side row count."""
    types = site.types
    columns = types["x"].shape[0]
    if site.prefill and columns > 1:
        store = "f32" if site.op.attrs.get("f32") else _STORE[site.op.kind]
        n, k = types["w"].shape
        push = site.op.int_attr("ordinal") if "sequence" in site.op.inputs else None
        caps = site.caps if site.op.half is None else exchange.caps_beside(site.caps)
        return linear_rows.linear_rows(site.format(), store, n, k, columns, caps, push=push)
    require("sequence" not in site.op.inputs or bool(site.op.attrs["f32"]), site.op, "products of few columns send FP32 words")
    row = site.graph.values[site.op.inputs["x"].value].type.shape[-1]
    return linear_columns.linear_spec(site.op, types, site.format(), row, site.caps)


for _kind in _STORE:
    family(_kind)(product)


@family("gdn_gates")
def _gdn_gates(site: Site) -> KernelSpec:
    return gdn_gates.gates_spec(site.op, site.types, site.caps)


@family("conv")
def _conv(site: Site) -> KernelSpec:
    return conv.conv_spec(site.op, site.types, site.graph.lanes, site.graph.width, site.caps)


@family("gdn")
def _gdn(site: Site) -> KernelSpec:
    return gdn_decode.recurrent_spec(site.op, site.types, site.graph.lanes, site.graph.width, site.caps)


@family("gdn_intra")
def _gdn_intra(site: Site) -> KernelSpec:
    return gdn_prefill.intra_spec(site.op, site.types, site.caps)


@family("gdn_carry")
def _gdn_carry(site: Site) -> KernelSpec:
    return gdn_prefill.carry_spec(site.op, site.types, site.caps)


@family("gated_norm")
def _gated_norm(site: Site) -> KernelSpec:
    return gated_norm.gated_norm_spec(site.op, site.types, site.caps)


@family("attn_prepare")
def _attn_prepare(site: Site) -> KernelSpec:
    early = site.settled(*attn_prepare.EARLY)
    return attn_prepare.prepare_spec(site.op, site.types, site.graph.width, site.caps, early)


@family("attention")
def _attention(site: Site) -> KernelSpec:
    return attention_prefill.prefill_spec(site.op, site.types, site.caps)


@family("attention_partial")
def _attention_partial(site: Site) -> KernelSpec:
    early = site.settled(*attention_decode.PARTIAL_EARLY)
    return attention_decode.partial_spec(site.op, site.types, site.graph.width, site.caps, early)


@family("attention_merge")
def _attention_merge(site: Site) -> KernelSpec:
    early = site.settled(*attention_decode.MERGE_EARLY)
    return attention_decode.merge_spec(site.op, site.types, site.graph.width, site.caps, early)


@family("exchange_begin")
def _exchange_begin(site: Site) -> KernelSpec:
    return exchange.begin_spec(site.op, site.caps)


@family("exchange_residual")
def _exchange_residual(site: Site) -> KernelSpec:
    return exchange_spec(site)


@family("sample_candidates")
def _sample_candidates(site: Site) -> KernelSpec:
    return exchange.candidates_spec(site.op, site.types, site.graph.lanes, site.graph.width, site.caps)


@family("sample_merge")
def _sample_merge(site: Site) -> KernelSpec:
    return exchange.merge_spec(site.op, site.types, site.graph.lanes, site.graph.width, site.caps)
