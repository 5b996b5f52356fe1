"""Two products of the same activations in one kernel: a node less, where the formats of their weights want the same
activations. Weights of 4 and of 5 bits stand side by side in every layer of the groupwise-int recipe."""

from __future__ import annotations

from compiler.ir.graph import OpGraph
from compiler.ir.op import Op
from compiler.ir.types import IRError, Ref
from compiler.kernels import linear_columns
from compiler.kernels.spec import DeviceCaps
from compiler.passes.schedule import Group


def weight_format(graph: OpGraph, op: Op, operand: str = "w") -> str:
    """The artifact's name of the format of an op's weight. Raises IRError for an operand that is none."""
    source = graph.values[op.inputs[operand].value].source
    if source is None:
        raise IRError(f"op {op.kind}: {operand} is no weight")
    return source.format


def second_of(graph: OpGraph, node: int) -> int | None:
    """The product behind that at ``node`` which takes the same activations and, like it, only stores its result as it is."""
    op = graph.op(node)
    if graph.phase != "decode" or not _plain(op):
        return None
    x = op.inputs["x"]
    makers = [u for u, _, value in graph.dag.in_edges(node, data="value") if value == x.value]
    readers = {int(v) for u in makers for _, v, value in graph.dag.out_edges(u, data="value") if value == x.value}
    for other in sorted(reader for reader in readers if reader > node):
        candidate = graph.op(other)
        if candidate.rank == op.rank and _plain(candidate) and candidate.inputs["x"] == x:
            return other
    return None


def _plain(op: Op) -> bool:
    return op.kind == "linear" and "sequence" not in op.inputs and not op.attrs.get("f32") and op.int_attr("segments") == 1


def second_weight(graph: OpGraph, op: Op) -> tuple[str, int]:
    """Format and rows of the weight of the product ``op``, as ``linear_columns.Product.second`` has them."""
    return weight_format(graph, op), graph.values[op.inputs["w"].value].type.shape[0]


def operands_of_two(op: Op, second: Op) -> dict[str, Ref]:
    """The kernel's operands: the second product's weight and result have names of their own."""
    return dict(op.refs()) | {"w2": second.inputs["w"], "y2": second.outputs["y"]}


def input_pair_at(graph: OpGraph, node: int, caps: DeviceCaps) -> Group | None:
    """The kernel for the product at ``node`` and the one behind it of the same activations; None where each needs its own."""
    other = second_of(graph, node) if graph.op(node).kind == "linear" else None
    if other is None:
        return None
    op, second = graph.op(node), graph.op(other)
    row = graph.values[op.inputs["x"].value].type.shape[-1]
    try:
        spec = linear_columns.linear_spec(op, graph.types(op), weight_format(graph, op), row, caps,
                                          second=second_weight(graph, second))  # fmt: skip
    except IRError:  # formats that want other activations, or no tile holds these resident
        return None
    return Group(spec, (op, second), (node, other), operands_of_two(op, second), frozenset(), op.rank)
