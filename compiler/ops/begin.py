"""First node of every graph: apply ingress records, then decide which columns run.

Decode, per lane: a frozen lane runs no column, another runs min(T, queued input tokens) of them; their ids and rope
positions are laid out and the attention work list is built. Prefill: the host wrote the chunk into the pf_ tables.
Records of a later step than the device's are left for later, so that a host that runs ahead changes nothing early.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compiler.control import (
    FAULT,
    MAX_PAYLOAD,
    RECORD_HEADER,
    RING_CURSOR,
    RING_SEQUENCE,
    RING_WORDS,
    STEP_NUMBER,
    DeviceFault,
    Opcode,
)
from compiler.ir.op import Array, Context, Cost, Op, OpDef, register, require
from compiler.ir.types import TensorType, Value


def apply_records(ring: Array, block: Array, step: Array, counts: Array) -> None:
    """Apply the ingress records due at ``step[STEP_NUMBER]``.

    ``ring`` u32[RING_WORDS], ``block`` i32 view of the whole control block, ``step`` the i32[4] table inside it,
    ``counts`` [slots, vocabulary]. A record that points outside sets the fault word and is skipped.
    """
    while True:
        at = int(step[RING_CURSOR])
        sequence, due, code, destination = (int(word) for word in ring[at : at + RECORD_HEADER])
        if sequence != (int(step[RING_SEQUENCE]) + 1) % (1 << 32) or due > int(step[STEP_NUMBER]):
            return
        opcode, count = code & 0xFF, code >> 8
        if opcode == Opcode.WRITE:
            fits = count <= MAX_PAYLOAD and destination + count <= block.size
            if fits and at + RECORD_HEADER + count <= RING_WORDS:
                start = at + RECORD_HEADER
                block[destination : destination + count] = ring[start : start + count].astype(np.int64)
            else:
                step[FAULT] = DeviceFault.RECORD_RANGE
                count = 0
        elif opcode == Opcode.CLEAR_COUNTS and destination < counts.shape[0]:
            counts[destination] = 0
        elif opcode != Opcode.WRAP:
            step[FAULT] = DeviceFault.RECORD_RANGE
        step[RING_SEQUENCE] = sequence
        following = at + RECORD_HEADER + count
        step[RING_CURSOR] = 0 if opcode == Opcode.WRAP or following + RECORD_HEADER > RING_WORDS else following


@register
class Begin(OpDef):
    kind = "begin"
    inputs = ("ring", "lane_page_row")
    outputs = ()
    state = ("block", "token_counts", "step", "lane_ncols", "lane_len", "tokens", "positions", "work", "work_count",
             "lane_frozen", "lane_rope_delta", "lane_prompt_len", "queue", "queue_head", "queue_tail")  # fmt: skip
    optional = frozenset({"lane_page_row", "work", "work_count", "lane_frozen", "lane_rope_delta", "lane_prompt_len", "queue",
                          "queue_head", "queue_tail"})  # fmt: skip
    attrs = {"phase": str, "kv_heads": int, "max_context": int, "vocab": int}

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        require(all(t.dtype == "i32" for t in types.values()), op, "every operand is a table of i32")
        require(types["ring"].shape == (RING_WORDS,), op, f"ring has shape {types['ring'].shape}")
        lanes = types["positions"].shape[1]
        require(types["tokens"].shape == (lanes,), op, f"tokens {types['tokens'].shape} and positions disagree")
        if op.attrs["phase"] == "decode":
            missing = [name for name in self.optional if name not in op.state and name not in op.inputs]
            require(not missing, op, f"decode needs {', '.join(sorted(missing))}")

    def reference(self, op: Op, ctx: Context) -> None:
        block = ctx.whole("block")  # every table below is a view of it
        step, counts = ctx.whole("step"), ctx.whole("token_counts")
        apply_records(ctx.whole("ring"), block, step, counts)
        ncols, lengths = ctx.whole("lane_ncols"), ctx.whole("lane_len")
        tokens, positions = ctx.whole("tokens"), ctx.whole("positions")
        vocab, capacity = op.int_attr("vocab"), op.int_attr("max_context")
        if op.attrs["phase"] == "prefill":
            count = int(ncols[0])
            bad = count < 0 or count > tokens.size or int(lengths[0]) + count > capacity
            if bad or np.any((tokens[:count] < 0) | (tokens[:count] >= vocab)):
                step[FAULT] = DeviceFault.CAPACITY if bad else DeviceFault.TOKEN_RANGE
                ncols[0] = 0
            return
        width = ctx.width
        head, tail, queue = ctx.whole("queue_head"), ctx.whole("queue_tail"), ctx.whole("queue")
        frozen, delta = ctx.whole("lane_frozen"), ctx.whole("lane_rope_delta")
        for lane in range(ctx.lanes):
            count = 0 if frozen[lane] else min(width, int(tail[lane] - head[lane]))
            if int(lengths[lane]) + count > capacity:
                step[FAULT], count = DeviceFault.CAPACITY, 0
            picked = [int(queue[lane, (int(head[lane]) + t) % queue.shape[1]]) for t in range(count)]
            if any(not 0 <= token < vocab for token in picked):
                step[FAULT], count, picked = DeviceFault.TOKEN_RANGE, 0, []
            ncols[lane] = count
            at = lane * width
            tokens[at : at + width] = 0
            tokens[at : at + count] = picked
            place = int(lengths[lane]) + int(delta[lane]) + np.arange(width)
            positions[:, at : at + width] = place
        for lane in range(ctx.lanes, ncols.size):  # lanes beyond this graph's B do not run
            ncols[lane] = 0

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        touched = sum(types[name].nbytes for name in ("tokens", "positions", "lane_ncols"))
        return Cost(touched, touched, 0)
