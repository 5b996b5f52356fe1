"""Offset RMSNorm over the hidden width: y = x · (mean(x²) + ε)^(-1/2) · (1 + w), one rounding (spec/model-dense.md §2)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compiler.ir.op import Array, Context, Cost, Op, OpDef, register, require
from compiler.ir.types import TensorType, Value


def rms_normalise(x: Array, eps: float) -> Array:
    """x · (mean(x², last axis) + eps)^(-1/2) in float64."""
    wide = np.asarray(x, dtype=np.float64)
    normalised: Array = wide / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normalised


@register
class RmsNorm(OpDef):
    kind = "rmsnorm"
    inputs = ("x", "w")
    outputs = ("y",)
    attrs = {"eps": float}

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        x, w, y = types["x"], types["w"], types["y"]
        require(len(x.shape) == 2 and x.dtype == "bf16", op, f"x is {x}, bf16 [columns, width] is needed")
        require(w.shape == x.shape[1:], op, f"w has shape {w.shape}, {x.shape[1:]} is needed")
        require(y == x, op, f"y is {y}, {x} is needed")

    def reference(self, op: Op, ctx: Context) -> None:
        ctx.put("y", rms_normalise(ctx.get("x"), op.float_attr("eps")) * (1.0 + ctx.weight("w").astype(np.float64)))

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        x = types["x"]
        return Cost(x.nbytes + types["w"].nbytes, x.nbytes, 4 * x.elements)
