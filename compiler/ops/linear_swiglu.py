"""Gated product of the MLP: y = bf(silu(W_gate x) ⊙ W_up x), one rounding (spec/model-dense.md §3, §7)."""

from __future__ import annotations

from collections.abc import Mapping

from compiler.ir.op import Context, Cost, Op, OpDef, register, require
from compiler.ir.types import TensorType, Value
from compiler.ops.gated_norm import silu
from compiler.ops.linear import check_product, product, product_cost


@register
class LinearSwiglu(OpDef):
    """``w`` holds the I gate rows, then the I up rows."""

    kind = "linear_swiglu"
    inputs = ("x", "w")
    outputs = ("y",)

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        rows = types["w"].shape[0]
        require(rows % 2 == 0, op, f"w has {rows} rows, as many gate as up rows are needed")
        check_product(op, types, rows // 2)

    def reference(self, op: Op, ctx: Context) -> None:
        both = product(ctx, 2 * int(ctx.whole("y").shape[-1]), 1)
        gate, up = both[:, : both.shape[1] // 2], both[:, both.shape[1] // 2 :]
        ctx.put("y", silu(gate) * up)

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        return product_cost(op, types, values)
