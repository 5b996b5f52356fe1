"""Lowering: ops that need several kernels are replaced by the ops of these kernels, as the target's capabilities say."""

from __future__ import annotations

from compiler.ir.graph import OpGraph
from compiler.ir.op import Op
from compiler.ir.types import Value
from compiler.kernels.gdn_prefill import chunked_fits
from compiler.kernels.spec import DeviceCaps
from compiler.ops.attention import lower_decode
from compiler.ops.gdn import lower_prefill


def _pieces(graph: OpGraph, op: Op, caps: DeviceCaps) -> tuple[tuple[Value, ...], tuple[Op, ...]]:
    rank = f"r{op.rank}" if op.rank else ""
    if op.kind == "attention" and op.attrs["phase"] == "decode":
        return lower_decode(op, graph.types(op), f"attn{op.layer}{rank}")
    if op.kind == "gdn" and op.attrs["phase"] == "prefill" and chunked_fits(op, graph.types(op), caps):
        return lower_prefill(op, graph.types(op), f"gdn{op.layer}{rank}")
    return (), (op,)


def lower(graph: OpGraph, caps: DeviceCaps) -> OpGraph:
    """A new graph in which decode attention is split into partial results per chunk of keys and their merge, and
    prefill GDN into work inside the chunks and the carry across them."""
    out = OpGraph(graph.name, graph.phase, graph.lanes, graph.width, set(graph.outputs), dict(graph.values),
                  set(graph.kept))
    for node, op in graph.ops():
        values, ops = _pieces(graph, op, caps)
        for value in values:
            out.add_value(value)
        for piece in ops:
            out.append(piece, graph.also_writes(node))
    return out
