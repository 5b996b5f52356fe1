"""The four ops of a GDN layer between its projections, as one kernel in a decode step."""

from __future__ import annotations

from collections.abc import Sequence

from compiler.ir.graph import OpGraph
from compiler.kernels import gdn_layer
from compiler.kernels.gdn_layer import LayerOps
from compiler.kernels.spec import DeviceCaps
from compiler.ops.conv import TABLES
from compiler.passes.early import settled
from compiler.passes.schedule import Group


def _neighbour(graph: OpGraph, nodes: Sequence[int], kind: str, role: str, name: str, value: str) -> int | None:
    """The one of ``nodes`` of this kind whose operand ``name`` is ``value``."""
    found = [n for n in nodes if (op := graph.op(n)).kind == kind and getattr(op, role)[name].value == value]
    return found[0] if len(found) == 1 else None


def _match(graph: OpGraph, node: int) -> tuple[int, int, int, int] | None:
    """Nodes of gates (``node``), convolution, recurrence and norm, when nothing else uses what passes between them."""
    gates = graph.op(node)
    after = sorted(int(v) for _, v in graph.dag.out_edges(node))
    gdn = _neighbour(graph, after, "gdn", "inputs", "gates", gates.outputs["gates"].value)
    if gdn is None:
        return None
    recurrence = graph.op(gdn)
    conv = _neighbour(graph, sorted(int(u) for u, _ in graph.dag.in_edges(gdn)), "conv", "outputs", "y",
                      recurrence.inputs["y"].value)  # fmt: skip
    norm = _neighbour(graph, sorted(int(v) for _, v in graph.dag.out_edges(gdn)), "gated_norm", "inputs", "o",
                      recurrence.outputs["o"].value)  # fmt: skip
    if conv is None or norm is None:
        return None
    nodes = (node, conv, gdn, norm)
    inner = {gates.outputs["gates"].value, graph.op(conv).outputs["y"].value, recurrence.outputs["o"].value}
    outside = {int(v) for n in nodes[:3] for _, v, value in graph.dag.out_edges(n, data="value") if value in inner}
    return None if outside - set(nodes) or inner & graph.outputs else nodes


def gdn_layer_at(graph: OpGraph, node: int, caps: DeviceCaps, before: Sequence[Group]) -> Group | None:
    """The kernel for the layer whose gates stand at ``node``, behind the groups ``before``; None where the single kernels
    have to serve it."""
    if graph.phase != "decode" or (nodes := _match(graph, node)) is None:
        return None
    ops = LayerOps(*(graph.op(n) for n in nodes))
    types = {op.kind: graph.types(op) for op in ops.all()}
    if gdn_layer.obstacle(ops, types, graph.width):
        return None
    operands = ops.operands()
    states = {operands[name].value for name in gdn_layer.STATES}
    committed = states | {operands[name].value for name in TABLES}
    level = "nothing"
    for name, reads in (("state", committed), ("hidden", committed | {operands["h"].value})):
        if settled(graph, before, ops.gdn.rank, reads, states, caps.programmatic_edges):
            level = name
    spec = gdn_layer.layer_spec(ops, types, graph.lanes, graph.width, level, caps)
    return Group(spec, ops.all(), nodes, operands, ops.internal(), ops.gdn.rank)
