"""Last node of every graph: commit lengths and pending columns, emit a token, freeze on a stop, write the egress.

A lane emits only when its prompt is consumed (length ≥ prompt length); before that its next input is already queued.
An emitted token that does not end the lane is queued as its next input, so the host may launch ahead of reading it.
A token outside of the vocabulary, which only a failed exchange can leave, sets the fault word and goes nowhere.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compiler.control import (
    EGRESS_ENTRIES,
    EGRESS_HEADER,
    EGRESS_LANE,
    FAULT,
    PF_FINAL,
    PF_LANE,
    STEP_NUMBER,
    DeviceFault,
    Finish,
    egress_words,
)
from compiler.ir.op import Context, Cost, Op, OpDef, register, require
from compiler.ir.types import TensorType, Value


@register
class Advance(OpDef):
    kind = "advance"
    inputs = ("sampled", "run_ncols", "run_len", "run_slot", "pf_control")
    outputs = ()
    state = ("step", "lane_len", "lane_prompt_len", "lane_limit", "lane_generated", "lane_frozen", "lane_stops",
             "queue", "queue_head", "queue_tail", "slot_pending", "slot_parity", "token_counts", "egress")  # fmt: skip
    optional = frozenset({"pf_control", "sampled"})
    attrs = {"phase": str, "max_context": int}

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        require(all(t.dtype == "i32" for t in types.values()), op, "every operand is a table of i32")
        require(("pf_control" in op.inputs) == (op.attrs["phase"] == "prefill"), op, "pf_control goes with prefill")
        lanes = types["lane_len"].shape[0]
        require(types["egress"].shape == (EGRESS_ENTRIES, egress_words(lanes)), op, f"egress is {types['egress']}")

    def reference(self, op: Op, ctx: Context) -> None:
        step, egress = ctx.whole("step"), ctx.whole("egress")
        lengths, head = ctx.whole("lane_len"), ctx.whole("queue_head")
        pending, parity = ctx.whole("slot_pending"), ctx.whole("slot_parity")
        entry = egress[int(step[STEP_NUMBER]) % EGRESS_ENTRIES]
        entry[:] = 0
        run_ncols, run_slot = ctx.whole("run_ncols"), ctx.whole("run_slot")
        if op.attrs["phase"] == "prefill":
            pf = ctx.whole("pf_control")
            count, lane, slot = int(run_ncols[0]), int(pf[PF_LANE]), int(run_slot[0])
            if count > 0:
                lengths[lane] = int(ctx.whole("run_len")[0]) + count
                pending[slot] = 0
                if pf[PF_FINAL] and "sampled" in op.inputs:
                    self._emit(op, ctx, lane, slot, int(ctx.whole("sampled")[0]), entry)
        else:
            for lane in range(ctx.lanes):
                count, slot = int(run_ncols[lane]), int(run_slot[lane])
                if count == 0:
                    continue
                lengths[lane] += count
                head[lane] += count
                pending[slot] = count
                parity[slot] ^= 1
                if lengths[lane] >= ctx.whole("lane_prompt_len")[lane]:
                    self._emit(op, ctx, lane, slot, int(ctx.whole("sampled")[lane * ctx.width + count - 1]), entry)
        entry[1] = step[FAULT]
        entry[2] = lengths.size
        for lane in range(lengths.size):
            entry[EGRESS_HEADER + EGRESS_LANE * lane + 3] = lengths[lane]
        step[STEP_NUMBER] += 1
        entry[0] = step[STEP_NUMBER]

    @staticmethod
    def _emit(op: Op, ctx: Context, lane: int, slot: int, token: int, entry: np.ndarray) -> None:
        """Count the token, decide whether the lane ends, queue it otherwise."""
        if not 0 <= token < ctx.whole("token_counts").shape[1]:
            step = ctx.whole("step")
            step[FAULT] = step[FAULT] or DeviceFault.TOKEN_RANGE
            return
        generated, frozen = ctx.whole("lane_generated"), ctx.whole("lane_frozen")
        queue, tail = ctx.whole("queue"), ctx.whole("queue_tail")
        generated[lane] += 1
        ctx.whole("token_counts")[slot, token] += 1
        reason = Finish.NONE
        if token in ctx.whole("lane_stops")[lane]:
            reason = Finish.STOP_TOKEN
        elif generated[lane] >= ctx.whole("lane_limit")[lane]:
            reason = Finish.LIMIT
        elif ctx.whole("lane_len")[lane] >= op.int_attr("max_context"):
            reason = Finish.CAPACITY
        if reason:
            frozen[lane] = 1
        else:
            queue[lane, int(tail[lane]) % queue.shape[1]] = token
            tail[lane] += 1
        at = EGRESS_HEADER + EGRESS_LANE * lane
        entry[at : at + 3] = (1, token, int(reason))

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        return Cost(types["run_ncols"].nbytes, types["egress"].nbytes // EGRESS_ENTRIES, 0)
