"""Decay and write strength of Gated DeltaNet per value head: g = −exp(A_log)·softplus(a + dt_bias), β = σ(b).

a and b are products with the hidden row and stay in FP32 (spec/model-dense.md §6, §7).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compiler.ir.op import Array, Context, Cost, Op, OpDef, register, require
from compiler.ir.types import TensorType, Value


def gates(a: Array, b: Array, a_log: Array, dt_bias: Array) -> tuple[Array, Array]:
    """(g, β) in float64 from a, b [columns, value heads] and the per-head a_log, dt_bias [value heads]."""
    pre = np.asarray(a, dtype=np.float64) + dt_bias
    g: Array = -np.exp(np.asarray(a_log, dtype=np.float64)) * np.logaddexp(0.0, pre)
    wide = np.asarray(b, dtype=np.float64)
    # exp of a non-positive argument on either side, so nothing overflows
    small = np.exp(-np.abs(wide))
    beta: Array = np.where(wide >= 0, 1.0, small) / (1.0 + small)
    return g, beta


def is_fused(op: Op) -> bool:
    """Whether one stored matrix holds the rows of both a and b."""
    return op.inputs["wa"] == op.inputs["wb"]


@register
class GdnGates(OpDef):
    """``gates`` holds g in its first Hv columns and β in the last Hv. ``wa`` and ``wb`` are two matrices [Hv, H], or one
    and the same [2·Hv, H] that holds the rows of a, then those of b."""

    kind = "gdn_gates"
    inputs = ("x", "wa", "wb", "a_log", "dt_bias")
    outputs = ("gates",)

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        x, wa, wb, out = types["x"], types["wa"], types["wb"], types["gates"]
        require(len(x.shape) == 2 and x.dtype == "bf16", op, f"x is {x}, bf16 [columns, hidden] is needed")
        require(len(out.shape) == 2 and out.shape[1] % 2 == 0, op, f"gates is {out}, [columns, 2 * value heads] is needed")
        heads = out.shape[1] // 2
        rows = 2 * heads if is_fused(op) else heads
        for name, weight in (("wa", wa), ("wb", wb)):
            require(weight == TensorType((rows, x.shape[1]), "bf16"), op,
                    f"{name} is {weight}, bf16 [{rows}, {x.shape[1]}] is needed")  # fmt: skip
        for name in ("a_log", "dt_bias"):
            require(types[name] == TensorType((heads,), "f32"), op, f"{name} is {types[name]}, f32 [{heads}] is needed")
        require(out == TensorType((x.shape[0], 2 * heads), "f32"), op, f"gates is {out}, f32 [{x.shape[0]}, {2 * heads}]")

    def reference(self, op: Op, ctx: Context) -> None:
        x = ctx.get("x").astype(np.float64)
        a_log = ctx.weight("a_log")
        heads = a_log.size
        wa, wb = ctx.weight("wa"), ctx.weight("wb")
        if is_fused(op):
            wa, wb = wa[:heads], wb[heads:]
        g, beta = gates(x @ wa.astype(np.float64).T, x @ wb.astype(np.float64).T, a_log, ctx.weight("dt_bias"))
        ctx.put("gates", np.concatenate([g, beta], axis=1))

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        x, out = types["x"], types["gates"]
        weights = out.shape[1] * x.shape[1]
        read = x.nbytes + 2 * weights + types["a_log"].nbytes + types["dt_bias"].nbytes
        return Cost(read, out.nbytes, 2 * x.shape[0] * weights)
