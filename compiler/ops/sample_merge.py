"""The token of every row from all ranks' candidates: each rank draws the same one from the same numbers.

The union of the ranks' best 20 holds the global best 20, ties to the lowest id included, since ranks hold ascending ranges
of ids and each list is in order. What follows is the draw of compiler/ops/sample.py.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compiler.control import TEMPERATURE
from compiler.ir.op import Context, Cost, Op, OpDef, register, require
from compiler.ir.types import TensorType, Value
from compiler.ops.exchange_residual import PEERS, in_rank_order, peers_of
from compiler.ops.sample import MAX_CANDIDATES, distribution, draw, kept_candidates


@register
class SampleMerge(OpDef):
    kind = "sample_merge"
    inputs = ("candidates", *PEERS, "sequence", "step", "lane_sampling", "run_len", "run_ncols", "lane_prompt_len",
              "pf_control")  # fmt: skip
    outputs = ("token",)
    optional = frozenset({*PEERS, "pf_control"})
    attrs = {"ordinal": int}

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        token = types["token"]
        require(token.dtype == "i32" and len(token.shape) == 1, op, f"token is {token}, i32 [rows] is needed")
        want = TensorType((token.shape[0], 2 * MAX_CANDIDATES), "f32")
        for name in ("candidates", *peers_of(op)):
            require(types[name] == want, op, f"{name} is {types[name]}, {want} is needed")
        require(op.rank <= len(peers_of(op)) >= 1, op, f"rank {op.rank} has {len(peers_of(op))} peers")

    def reference(self, op: Op, ctx: Context) -> None:
        lists = [ctx.get(name) for name in in_rank_order(op, "candidates")]
        values = np.concatenate([part[:, :MAX_CANDIDATES] for part in lists], axis=1).astype(np.float64)
        places = np.concatenate([part[:, MAX_CANDIDATES:] for part in lists], axis=1).astype(np.float64)
        lengths, prompt, words = ctx.whole("run_len"), ctx.whole("lane_prompt_len"), ctx.whole("lane_sampling")
        picked = np.zeros(len(values), dtype=np.int64)
        for row, (run_lane, t) in enumerate(ctx.rows("candidates")):
            lane = int(ctx.whole("pf_control")[0]) if "pf_control" in op.inputs else run_lane
            params = words[lane]
            there = ~np.isnan(values[row])
            x, ids = values[row][there], places[row][there].astype(np.int64)
            order = np.lexsort((ids, -x))
            if not order.size:
                continue
            if float(params[TEMPERATURE : TEMPERATURE + 1].astype(np.int32).view(np.float32)[0]) <= 0:
                picked[row] = ids[order[0]]
                continue
            chosen = order[: kept_candidates(params)]
            count, weights = distribution(x[chosen], params)
            picked[row] = ids[chosen[draw(weights[:count], params, int(lengths[run_lane]) + t, int(prompt[lane]))]]
        ctx.put("token", picked)

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        return Cost((1 + len(peers_of(op))) * types["candidates"].nbytes, types["token"].nbytes, 0)
