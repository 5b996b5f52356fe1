"""Norm of the GDN output per value head, gated: y = bf(N(o; w) ⊙ silu(z)) with a plain (not offset) RMSNorm.

One shared weight of Dv values serves all heads; the product is rounded once (spec/model-dense.md §6.3).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compiler.ir.op import Array, Context, Cost, Op, OpDef, register, require
from compiler.ir.types import TensorType, Value
from compiler.ops.rmsnorm import rms_normalise


def silu(x: Array) -> Array:
    """x·σ(x) in float64, without overflow at either end."""
    wide = np.asarray(x, dtype=np.float64)
    small = np.exp(-np.abs(wide))
    result: Array = wide * np.where(wide >= 0, 1.0, small) / (1.0 + small)
    return result


@register
class GatedNorm(OpDef):
    kind = "gated_norm"
    inputs = ("o", "z", "w")
    outputs = ("y",)
    attrs = {"eps": float, "heads": int, "dim": int}

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        o, w = types["o"], types["w"]
        require(len(o.shape) == 2 and o.dtype == "bf16", op, f"o is {o}, bf16 [columns, heads * head width] is needed")
        heads, dim = op.int_attr("heads"), op.int_attr("dim")
        require(w == TensorType((dim,), "bf16"), op, f"w is {w}, bf16 [{dim}] is needed")
        require(o.shape[1] == heads * dim, op, f"o has {o.shape[1]} values, {heads} heads of {dim} are needed")
        for name in ("z", "y"):
            require(types[name] == o, op, f"{name} is {types[name]}, {o} is needed")

    def reference(self, op: Op, ctx: Context) -> None:
        weight = ctx.weight("w").astype(np.float64)
        o, z = ctx.get("o"), ctx.get("z")
        heads = o.reshape(o.shape[0], -1, weight.size)
        normed = rms_normalise(heads, op.float_attr("eps")) * weight
        ctx.put("y", normed.reshape(o.shape) * silu(z))

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        o = types["o"]
        return Cost(2 * o.nbytes + types["w"].nbytes, o.nbytes, 10 * o.elements)
