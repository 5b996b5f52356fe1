"""Embedding: a plain row lookup without a scale, rounded to bf16 once (spec/model-dense.md §3)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compiler.ir.op import Context, Cost, Op, OpDef, register, require
from compiler.ir.types import IRError, TensorType, Value


@register
class Embed(OpDef):
    """x[c] = w[tokens[c]]; inactive columns hold token 0."""

    kind = "embed"
    inputs = ("tokens", "w")
    outputs = ("x",)

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        tokens, w, x = types["tokens"], types["w"], types["x"]
        require(len(tokens.shape) == 1 and tokens.dtype == "i32", op, f"tokens is {tokens}, i32 [columns] is needed")
        require(len(w.shape) == 2, op, f"w has shape {w.shape}, [vocabulary, width] is needed")
        require(len(x.shape) == 2 and x.dtype == "bf16", op, f"x is {x}, bf16 [columns, width] is needed")
        require(x.shape[1] == w.shape[1], op, f"x has width {x.shape[1]}, that of w is {w.shape[1]}")
        require(x.shape[0] <= tokens.shape[0], op, f"x has {x.shape[0]} columns, tokens {tokens.shape[0]}")

    def reference(self, op: Op, ctx: Context) -> None:
        tokens = ctx.get("tokens").astype(np.int64)
        ids, place = np.unique(tokens, return_inverse=True)
        if ids.size and ids[0] < 0:
            raise IRError(f"op embed: token {ids[0]} is negative")
        width = ctx.whole("x").shape[-1]
        rows = [ctx.weight("w", (int(i), int(i) + 1)).reshape(width) for i in ids]
        ctx.put("x", np.stack(rows)[place] if rows else np.empty((0, width)))

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        w, x = types["w"], types["x"]
        row = values[op.inputs["w"].value].nbytes // w.shape[0]
        return Cost(x.shape[0] * (row + 4), x.nbytes, x.elements)
