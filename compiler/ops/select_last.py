"""The last active column of each lane: y[b] = x[b·T + ncols[b] − 1]. Only it needs the head after a prompt chunk."""

from __future__ import annotations

from collections.abc import Mapping

from compiler.ir.op import Context, Cost, Op, OpDef, register, require
from compiler.ir.types import TensorType, Value


@register
class SelectLast(OpDef):
    kind = "select_last"
    inputs = ("x", "lane_ncols")
    outputs = ("y",)

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        x, y, ncols = types["x"], types["y"], types["lane_ncols"]
        require(x.dtype == y.dtype == "bf16" and x.shape[1] == y.shape[1], op, f"x {x} and y {y} differ in width")
        require(x.shape[0] % y.shape[0] == 0, op, f"{x.shape[0]} columns are not a multiple of {y.shape[0]} lanes")
        require(ncols.shape[0] >= y.shape[0], op, f"lane_ncols {ncols.shape} is shorter than {y.shape[0]} lanes")

    def reference(self, op: Op, ctx: Context) -> None:
        last = {lane: row for row, (lane, _) in enumerate(ctx.columns)}  # columns are in order: the last one stays
        ctx.put("y", ctx.get("x")[[last[lane] for lane in sorted(last)]])

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        return Cost(types["y"].nbytes, types["y"].nbytes, 0)
