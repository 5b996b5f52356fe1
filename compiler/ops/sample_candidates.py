"""A rank's candidates for the next token: the best of its share of the vocabulary, penalties applied.

``candidates`` f32 [rows, 40]: up to 20 values in order (value descending, id ascending), then their ids (exact in FP32:
a vocabulary has at most 2^22 rows). At temperature 0 only the first counts: the largest logit, without penalties. Places
that are not filled hold NaN.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compiler.control import TEMPERATURE
from compiler.ir.op import Context, Cost, Op, OpDef, register, require
from compiler.ir.types import TensorType, Value
from compiler.ops.sample import MAX_CANDIDATES, best, penalised


@register
class SampleCandidates(OpDef):
    """``first`` is the global id of the first column of ``logits``; ``vocab`` the sampling domain over all ranks."""

    kind = "sample_candidates"
    inputs = ("logits", "lane_sampling", "run_slot", "run_ncols", "token_counts", "pf_control")
    outputs = ("candidates",)
    optional = frozenset({"pf_control"})
    attrs = {"first": int, "vocab": int}

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        logits = types["logits"]
        require(logits.dtype == "bf16" and len(logits.shape) == 2, op, f"logits is {logits}, bf16 [rows, share] is needed")
        want = TensorType((logits.shape[0], 2 * MAX_CANDIDATES), "f32")
        require(types["candidates"] == want, op, f"candidates is {types['candidates']}, {want} is needed")
        first, vocab = op.int_attr("first"), op.int_attr("vocab")
        require(0 <= first and 0 < vocab < 1 << 24, op, f"first {first}, vocab {vocab}: ids must be exact in FP32")
        require(first + logits.shape[1] <= types["token_counts"].shape[1], op, "the share lies outside the token counts")

    def reference(self, op: Op, ctx: Context) -> None:
        first = op.int_attr("first")
        logits = ctx.get("logits")[:, : max(0, op.int_attr("vocab") - first)]
        counts, words, slots = ctx.whole("token_counts"), ctx.whole("lane_sampling"), ctx.whole("run_slot")
        out = np.full((len(logits), 2 * MAX_CANDIDATES), np.nan)
        for row, (run_lane, _) in enumerate(ctx.rows("logits")):
            params = words[int(ctx.whole("pf_control")[0]) if "pf_control" in op.inputs else run_lane]
            x, kept = logits[row].astype(np.float64), MAX_CANDIDATES
            if float(params[TEMPERATURE : TEMPERATURE + 1].astype(np.int32).view(np.float32)[0]) <= 0:
                kept = 1
            else:
                x = ctx.round(penalised(x, counts[slots[run_lane]][first : first + x.size], params), "f32")
            ids = best(x, kept)
            out[row, : ids.size] = x[ids]
            out[row, MAX_CANDIDATES : MAX_CANDIDATES + ids.size] = ids + first
        ctx.put("candidates", out)

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        return Cost(types["logits"].nbytes, types["candidates"].nbytes, types["logits"].elements)
