"""The kernel family of each op kind."""

from __future__ import annotations

from compiler.kernels import attention_decode, attn_prepare, control
from compiler.kernels.spec import KernelSpec
from compiler.passes.select import Site, family


@family("begin")
def _begin(site: Site) -> KernelSpec:
    heads = next((op.int_attr("heads") for _, op in site.graph.ops() if op.kind.startswith("attention")), 1)
    return control.begin_spec(site.op, site.types, site.graph.lanes, site.graph.width, heads, site.caps)


@family("advance")
def _advance(site: Site) -> KernelSpec:
    return control.advance_spec(site.op, site.types, site.graph.lanes, site.graph.width, site.caps)


@family("rmsnorm")
def _rmsnorm(site: Site) -> KernelSpec:
    return control.rmsnorm_spec(site.op, site.types, site.caps)


@family("select_last")
def _select_last(site: Site) -> KernelSpec:
    return control.select_last_spec(site.op, site.types, site.graph.width, site.caps)


@family("sample")
def _sample(site: Site) -> KernelSpec:
    return control.sample_spec(site.op, site.types, site.graph.lanes, site.graph.width, site.caps)


@family("attn_prepare")
def _attn_prepare(site: Site) -> KernelSpec:
    return attn_prepare.prepare_spec(site.op, site.types, site.graph.width, site.caps)


@family("attention_partial")
def _attention_partial(site: Site) -> KernelSpec:
    return attention_decode.partial_spec(site.op, site.types, site.graph.width, site.caps)


@family("attention_merge")
def _attention_merge(site: Site) -> KernelSpec:
    return attention_decode.merge_spec(site.op, site.types, site.graph.width, site.caps)
