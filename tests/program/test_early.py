"""Which kernels fuse a GDN layer, and what kernels may take before their dependency wait."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from compiler.build import PhaseRequest, TextBuilder
from compiler.driver import CompileOptions, limits_of, model_of
from compiler.emit.arch import caps
from compiler.ir.graph import OpGraph, check
from compiler.ir.types import IRError
from compiler.kernels.attention_decode import row_limit, work_items
from compiler.kernels.spec import KernelSpec
from compiler.model import bind
from compiler.passes.early import check_early, settled
from compiler.passes.lower import lower
from compiler.passes.schedule import Group
from compiler.passes.select import select
from tests import models

LAYER = ["gdn_gates", "conv", "gdn", "gated_norm"]


def schedule(arch: str = "sm_90a", phase: str = "decode", name: str = "dense-small",
             width: int = 1) -> tuple[OpGraph, list[Group]]:  # fmt: skip
    """The graph of one phase on one rank and its kernels."""
    artifact, target = models.artifact(name), caps(arch)
    spec = model_of(artifact)
    limits = limits_of(spec, CompileOptions(max_context=256, prefill_chunk=128, pairs=((1, 1), (1, width))))
    items = work_items(1, width, spec.heads, spec.kv_heads, row_limit(spec.head_dim, target))
    builder = TextBuilder(spec, bind(artifact, spec), limits, items)
    request = PhaseRequest("graph", phase, 1, limits.chunk if phase == "prefill" else width)
    graph = lower(check(builder.build(request)), target)
    return graph, select(graph, target)


def layers(groups: list[Group]) -> list[KernelSpec]:
    return [group.spec for group in groups if [op.kind for op in group.ops] == LAYER]


@pytest.mark.parametrize(("arch", "blocks"), [("sm_90a", 2), ("sm_120a", 1), ("sm_86", 1)])
def test_a_layer_is_one_call(arch: str, blocks: int) -> None:
    """In decode, with the state and the hidden rows taken early, on every kind of target; prefill keeps its kernels."""
    graph, groups = schedule(arch)
    found = layers(groups)
    wanted = sum(op.kind == "gdn" for _, op in graph.ops())
    assert len(found) == wanted > 0 and not any(op.kind == "gdn" and len(g.ops) != 4 for g in groups for op in g.ops)
    assert all(spec.cluster == (blocks, 1, 1) and spec.params["settled"] == "hidden" for spec in found)
    assert all(set(group.internal) for group in groups if [op.kind for op in group.ops] == LAYER)
    prefill, rest = schedule(arch, "prefill")
    assert not layers(rest) and any(op.kind == "conv" for _, op in prefill.ops())


def test_attention_takes_tables_early() -> None:
    _, groups = schedule()
    early = {op.kind: set(group.spec.early) for group in groups for op in group.ops if op.kind.startswith("att")}
    assert early.keys() == {"attn_prepare", "attention_partial", "attention_merge"} and all(early.values())
    assert not early["attn_prepare"] & {"q", "k", "v"} and not early["attention_partial"] & {"qr", "kv"}
    assert not early["attention_merge"] & {"gate", "partial_o", "partial_ml"}


def changed(groups: list[Group], **fields: Any) -> list[Group]:
    """The same kernels with other fields, those that take something early left alone."""
    return [group if group.spec.early else replace(group, spec=replace(group.spec, **fields)) for group in groups]


def layer_behind(groups: list[Group]) -> int:
    """Index of a GDN layer's call that is not the first one."""
    return [i for i, group in enumerate(groups) if [op.kind for op in group.ops] == LAYER][1]


def test_the_rule_of_early_accesses() -> None:
    """A kernel that lets go at once settles nothing."""
    graph, groups = schedule()
    check_early(graph, groups, True)
    at = layer_behind(groups)
    operands = groups[at].operands
    state, hidden, x, tables = ({operands[name].value} for name in ("recurrent", "h", "x", "lane_slot"))

    def may(before: list[Group], reads: set[str], writes: set[str]) -> bool:
        return settled(graph, before[:at], 0, reads, writes, True)

    assert may(groups, state | hidden | tables, state) and not may(groups, x, set())
    eager = changed(groups, waits_first=False)
    assert may(eager, set(), state), "no other kernel of the step is at this layer's state"
    assert not may(eager, tables, set()) and not may(eager, hidden, set())
    assert settled(graph, eager[:at], 0, x | tables, state, False), "behind ordinary edges everything is complete"
    with pytest.raises(IRError, match="before its wait"):
        check_early(graph, eager, True)


def test_what_a_projection_writes_is_settled_only_if_published() -> None:
    """Here it writes the hidden rows too, as a product does that has the norm in its prologue."""
    graph, groups = schedule()
    at = layer_behind(groups)
    hidden = groups[at].operands["h"]
    norm = next(op for _, op in graph.ops() if op.kind == "rmsnorm" and op.outputs["y"] == hidden)
    last = groups[at - 1]
    assert last.spec.waits_first
    for published in (("normed",), ()):
        spec = replace(last.spec, published=published)
        product = replace(last, spec=spec, ops=(norm, *last.ops), operands={**last.operands, "normed": hidden})
        before = [*groups[: at - 1], product]
        assert settled(graph, before, 0, {hidden.value}, set(), True) == bool(published)
        whole = [*before, *groups[at:]]
        if published:
            check_early(graph, whole, True)
        else:
            with pytest.raises(IRError, match="before its wait"):
                check_early(graph, whole, True)


def test_an_earlier_reader_forbids_an_early_store() -> None:
    graph, groups = schedule()
    at = layer_behind(groups)
    state = {groups[at].operands["recurrent"].value}
    before = groups[:at]
    assert settled(graph, before, 0, set(), state, True)
    reader = replace(groups[at].ops[2], inputs={"x": groups[at].operands["recurrent"]}, outputs={}, state={})
    before[-1] = replace(before[-1], ops=(*before[-1].ops, reader))
    assert not settled(graph, before, 0, set(), state, True)


def test_what_cannot_be_fused_keeps_its_kernels() -> None:
    """A value between the ops that something else reads: here as an output of the graph."""
    graph, groups = schedule()
    inner = next(group for group in groups if [op.kind for op in group.ops] == LAYER)
    graph.outputs.add(inner.ops[2].outputs["o"].value)
    again = select(graph, caps("sm_90a"))
    assert len(layers(again)) == len(layers(groups)) - 1
    kinds = [op.kind for group in again for op in group.ops if group.rank == 0 and op.layer == inner.ops[0].layer]
    assert [kind for kind in kinds if kind in LAYER] == LAYER
