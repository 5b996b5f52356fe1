"""An rmsnorm in the prologue of the product behind it: one node less where every block can afford to read the whole rows."""

from __future__ import annotations

from compiler.ir.graph import OpGraph
from compiler.ir.types import IRError
from compiler.kernels import linear_columns
from compiler.kernels.linear_columns import problem, product_of
from compiler.kernels.spec import DeviceCaps
from compiler.passes.schedule import Group

PRODUCTS = ("linear", "linear_swiglu", "linear_residual")
# With more columns the norm in every block costs more than a kernel of its own.
MAX_COLUMNS = 4


def norm_prologue_at(graph: OpGraph, node: int, caps: DeviceCaps) -> Group | None:
    """The kernel that computes the rmsnorm at ``node`` and the first product that takes it, or None where each needs its
    own. The normalised rows are stored when anything else takes them."""
    norm = graph.op(node)
    if graph.phase != "decode" or graph.columns > MAX_COLUMNS:
        return None
    normed = norm.outputs["y"]
    after = sorted({int(v) for _, v, value in graph.dag.out_edges(node, data="value") if value == normed.value})
    first = next((n for n in after if graph.op(n).kind in PRODUCTS and graph.op(n).inputs["x"] == normed), None)
    if first is None or graph.op(first).rank != norm.rank:
        return None
    op = graph.op(first)
    source = graph.values[op.inputs["w"].value].source
    assert source is not None
    keep = len(after) > 1 or normed.value in graph.outputs | graph.kept
    if keep and first != min(after):  # the rows are there once the product runs; what takes them must stand behind it
        return None
    types = graph.types(op)
    if problem(product_of(op, types, source.format, True, keep)):
        return None
    row = graph.values[norm.inputs["x"].value].type.shape[-1]
    try:
        spec = linear_columns.linear_spec(op, types, source.format, row, caps, norm, keep)
    except IRError:  # no tile holds the rows resident
        return None
    operands = dict(op.refs()) | {"x": norm.inputs["x"], "norm_w": norm.inputs["w"], "normed": normed}
    internal = frozenset() if keep else frozenset({normed.value})
    return Group(spec, (norm, op), (node, first), operands, internal, norm.rank)
