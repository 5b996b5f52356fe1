"""Second half of the chunked delta rule: folds pending records into the state, carries it across the chunks, commits it
and writes the outputs (spec/model-dense.md §6.2; ``gdn_intra`` is the first half)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compiler.ir.op import Context, Cost, Op, OpDef, register
from compiler.ir.types import TensorType, Value
from compiler.ops.conv import TABLES, lane_rows
from compiler.ops.gdn import (
    CHUNK,
    MATRIX_WIDTH,
    check_columns,
    check_state,
    chunk_step,
    folded_state,
    per_value_head,
    split_columns,
)
from compiler.ops.gdn_intra import check_passed


@register
class GdnCarry(OpDef):
    kind = "gdn_carry"
    inputs = ("y", "matrices", "rows", *TABLES)
    outputs = ("o",)
    state = ("recurrent", "rec_k", "rec_u", "rec_alpha")
    attrs = {"key_heads": int, "value_heads": int, "dk": int, "dv": int}

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        check_columns(op, types)
        check_passed(op, types)
        check_state(op, types)

    def reference(self, op: Op, ctx: Context) -> None:
        heads, dk = op.int_attr("value_heads"), op.int_attr("dk")
        q, _, v = split_columns(op, ctx.get("y").astype(np.float64))
        n = v.shape[0]
        k = ctx.get("rows").astype(np.float64).reshape(n, -1, dk)
        matrices = ctx.get("matrices").astype(np.float64).reshape(n, heads, MATRIX_WIDTH)
        q, k = (per_value_head(x, heads).transpose(1, 0, 2) for x in (q, k))
        v = v.transpose(1, 0, 2)
        o = np.empty(v.shape)
        for lane in lane_rows(ctx):  # one lane
            slot = int(ctx.whole("lane_slot")[lane])
            state = folded_state(ctx, slot, int(ctx.whole("lane_len")[lane]))
            for begin in range(0, n, CHUNK):
                at = slice(begin, min(begin + CHUNK, n))
                count = at.stop - begin
                solved, gamma = matrices[at, :, :count].transpose(1, 0, 2), matrices[at, :, CHUNK].T
                o[:, at], state = chunk_step(q[:, at], k[:, at], v[:, at], solved, gamma, state)
            ctx.whole("recurrent")[slot] = state
        ctx.put("o", o.transpose(1, 0, 2).reshape(n, -1))

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        hv, dk, dv = (op.int_attr(name) for name in ("value_heads", "dk", "dv"))
        columns, state = types["y"].shape[0], hv * dv * dk * 4
        read = state + types["matrices"].nbytes + types["rows"].nbytes + columns * hv * dv * 2
        return Cost(read, state + types["o"].nbytes, columns * hv * dv * (6 * dk + 4 * CHUNK))
