"""First exchange node of a rank's replay: advance the sequence numbers of its exchanges.

Sequence numbers are 32 bits, owned by the device and never reset. Exchange i of a replay has ``number(base, i)``; the slot
of its words is the number's parity. 0 stands in cleared memory, so the count goes from 2^32 − 1 to 2: parities alternate
across the wrap too, which keeps the rule that a slot is reused only when the peer has read what was there.
"""

from __future__ import annotations

from collections.abc import Mapping

from compiler.ir.op import Context, Cost, Op, OpDef, register, require
from compiler.ir.types import TensorType, Value

# Number of this replay's first exchange, of the next replay's; active columns in each half of a prefill chunk.
SEQUENCE_WORDS = 4
BASE, NEXT, SHARES = 0, 1, 2
_MASK = (1 << 32) - 1


def number(base: int, ordinal: int) -> int:
    """Sequence number of the exchange ``ordinal`` places after ``base`` (≥ 1), as the kernels compute it."""
    total = base + ordinal
    return (total & _MASK) + 2 if total > _MASK else total


def signed(word: int) -> int:
    """A u32 as the i32 that a table holds."""
    return word - (1 << 32) if word >> 31 else word


@register
class ExchangeBegin(OpDef):
    """``count``: exchanges of this phase. A fresh rank starts at number 2. With ``rows``, the active columns of a chunk that
    runs in halves of ``columns`` each, their share in either half is noted too."""

    kind = "exchange_begin"
    inputs = ("rows",)
    outputs = ()
    state = ("sequence",)
    optional = frozenset({"rows"})
    attrs = {"count": int}

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        require(types["sequence"] == TensorType((SEQUENCE_WORDS,), "i32"), op, f"sequence is {types['sequence']}")
        require(op.int_attr("count") >= 0, op, "count is negative")
        require("rows" not in op.inputs or op.int_attr("columns") > 0, op, "rows are of halves with columns")

    def reference(self, op: Op, ctx: Context) -> None:
        sequence = ctx.whole("sequence")
        base = max(int(sequence[NEXT]) & _MASK, 2)
        sequence[BASE] = signed(base)
        sequence[NEXT] = signed(number(base, op.int_attr("count")))
        if "rows" in op.inputs:
            rows, columns = int(ctx.whole("rows")[0]), op.int_attr("columns")
            sequence[SHARES : SHARES + 2] = min(rows, columns), max(rows - columns, 0)

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        return Cost(4 * SEQUENCE_WORDS, 4 * SEQUENCE_WORDS, 0)
