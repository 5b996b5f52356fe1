"""Product added to the residual stream: y = bf(residual + x Wᵀ), one rounding (spec/model-dense.md §3, §7)."""

from __future__ import annotations

from collections.abc import Mapping

from compiler.ir.op import Context, Cost, Op, OpDef, register, require
from compiler.ir.types import TensorType, Value
from compiler.ops.linear import check_product, check_segments, product, product_cost


@register
class LinearResidual(OpDef):
    """The segments are added first, in order, then the residual."""

    kind = "linear_residual"
    inputs = ("x", "w", "residual")
    outputs = ("y",)
    attrs = {"segments": int}

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        check_product(op, types, types["w"].shape[0])
        check_segments(op, types)
        require(types["residual"] == types["y"], op, f"residual is {types['residual']}, {types['y']} is needed")

    def reference(self, op: Op, ctx: Context) -> None:
        residual = ctx.get("residual")
        ctx.put("y", product(ctx, residual.shape[1], op.int_attr("segments")) + residual)

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        return product_cost(op, types, values)
