"""Lowering: ops that need several kernels are replaced by the ops of these kernels."""

from __future__ import annotations

from compiler.ir.graph import OpGraph
from compiler.ops.attention import lower_decode


def lower(graph: OpGraph) -> OpGraph:
    """A new graph in which decode attention is split into partial results per chunk of keys and their merge."""
    out = OpGraph(graph.name, graph.phase, graph.lanes, graph.width, set(graph.outputs), dict(graph.values))
    for node, op in graph.ops():
        if op.kind == "attention" and op.attrs["phase"] == "decode":
            values, ops = lower_decode(op, graph.types(op), f"attn{op.layer}")
            for value in values:
                out.add_value(value)
            for piece in ops:
                out.append(piece)
        else:
            out.append(op, graph.also_writes(node))
    return out
