"""An rmsnorm in the prologue of the product behind it, or of two (input_pair.py): one node less where every block can afford
to read the whole rows."""

from __future__ import annotations

from compiler.ir.graph import OpGraph
from compiler.ir.types import IRError
from compiler.kernels import linear_columns
from compiler.kernels.spec import DeviceCaps
from compiler.passes.input_pair import operands_of_two, second_of, second_weight, weight_format
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
    if (other := second_of(graph, first)) is not None:
        if (both := _fused(graph, node, (first, other), after, caps)) is not None:
            return both
    return _fused(graph, node, (first,), after, caps)


def _fused(graph: OpGraph, node: int, products: tuple[int, ...], after: list[int], caps: DeviceCaps) -> Group | None:
    """The kernel of the norm and of one or two products of its result, which the ops ``after`` take."""
    norm, ops = graph.op(node), tuple(graph.op(product) for product in products)
    normed, op = norm.outputs["y"], ops[0]
    keep = bool(set(after) - set(products)) or normed.value in graph.outputs | graph.kept
    if keep and products[0] != min(after):  # the rows are there once the product runs; what takes them must stand behind it
        return None
    row = graph.values[norm.inputs["x"].value].type.shape[-1]
    second = second_weight(graph, ops[1]) if len(ops) > 1 else None
    try:
        spec = linear_columns.linear_spec(op, graph.types(op), weight_format(graph, op), row, caps, norm, keep, second)
    except IRError:  # no tile holds the rows resident, or two formats want other activations
        return None
    operands = dict(op.refs()) if second is None else operands_of_two(op, ops[1])
    operands |= {"x": norm.inputs["x"], "norm_w": norm.inputs["w"], "normed": normed}
    internal = frozenset() if keep else frozenset({normed.value})
    return Group(spec, (norm, *ops), (node, *products), operands, internal, norm.rank)
