"""Sum of the ranks' partial products and the residual: y = bf(((p₀ + p₁) + …) + residual), FP32, ranks in order, one rounding.

One device adds the same segments in the same order (compiler/ops/linear_residual.py), so the bits do not depend on the
number of ranks as long as each rank holds one segment. ``wire``: dtype of the partial sums, which products store as what
travels; bf16 rounds every one first (half the bytes).
"""

from __future__ import annotations

from collections.abc import Mapping

from compiler.ir.graph import OpGraph, rule
from compiler.ir.op import Array, Context, Cost, Op, OpDef, register, require
from compiler.ir.types import TensorType, Value

MAX_RANKS = 8
PUSH_COLUMNS = 8  # columns up to which a product sends its partial sums itself
PEERS = tuple(f"peer_{i}" for i in range(1, MAX_RANKS))


def peers_of(op: Op) -> list[str]:
    """Names of the op's peer operands, in rank order."""
    return [name for name in PEERS if name in op.inputs]


def in_rank_order(op: Op, own: str) -> list[str]:
    """Operand names of all ranks' contributions in rank order: the own one stands at the op's rank."""
    names = peers_of(op)
    names.insert(op.rank, own)
    return names


@rule("sent sums are awaited")
def _sent(graph: OpGraph) -> None:
    """An exchange awaits what products send exactly where the products of all its ranks send, under its number, and nothing is
    sent that none awaits."""
    sent = {op.outputs["y"].value: op for _, op in graph.ops() if op.kind == "linear" and "sequence" in op.inputs}
    awaited: set[str] = set()
    for _, op in graph.ops():
        if op.kind != "exchange_residual":
            continue
        wanted = op.int_attr("ordinal") if op.attrs["pushed"] or op.attrs["tiles"] else None
        for name in ("partial", *peers_of(op)):
            value = op.inputs[name].value
            number = sent[value].int_attr("ordinal") if value in sent else None
            require(number == wanted, op, f"{name} is sent as exchange {number}, awaited as {wanted}")
            awaited.add(value)
    for value, op in sent.items():
        require(value in awaited, op, f"{value} is sent, but no exchange takes it")


@register
class ExchangeResidual(OpDef):
    """``peer_i`` are the other ranks' partial sums in rank order. ``sequence``, ``step`` (whose fault word a lost peer sets)
    and ``ordinal`` steer the protocol; ``pushed``: the products send their partial sums themselves, as words; ``tiles``: the
    products of a prefill chunk can send theirs tile by tile, which the transport decides; ``rows`` bounds the columns of a
    prefill chunk."""

    kind = "exchange_residual"
    inputs = ("partial", *PEERS, "residual", "sequence", "step", "rows")
    outputs = ("y",)
    optional = frozenset({*PEERS, "rows"})
    attrs = {"ordinal": int, "wire": str, "pushed": bool, "tiles": bool}

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        y = types["y"]
        require(len(y.shape) == 2 and y.dtype == "bf16", op, f"y is {y}, bf16 [columns, width] is needed")
        require(types["residual"] == y, op, f"residual is {types['residual']}, {y} is needed")
        require(op.attrs["wire"] in ("f32", "bf16"), op, f"wire is {op.attrs['wire']!r}; allowed: f32, bf16")
        require(op.attrs["wire"] == "f32" or not op.attrs["pushed"], op, "words that products push are FP32 partial sums")
        require(not (op.attrs["pushed"] and op.attrs["tiles"]), op, "products send words or tiles, not both")
        want = TensorType(y.shape, str(op.attrs["wire"]))
        for name in ("partial", *peers_of(op)):
            require(types[name] == want, op, f"{name} is {types[name]}, {want} is needed")
        require(op.rank <= len(peers_of(op)) >= 1, op, f"rank {op.rank} has {len(peers_of(op))} peers")
        require(op.int_attr("ordinal") >= 0, op, "ordinal is negative")

    def reference(self, op: Op, ctx: Context) -> None:
        total: Array | None = None
        for name in in_rank_order(op, "partial"):
            part = ctx.get(name)
            total = part if total is None else total + part
        ctx.put("y", total + ctx.get("residual"))

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        contributions = 1 + len(peers_of(op))
        return Cost(contributions * types["partial"].nbytes + types["y"].nbytes, types["partial"].nbytes + types["y"].nbytes,
                    contributions * types["y"].elements)  # fmt: skip
