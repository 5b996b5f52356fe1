"""The control block: every table that steers a replay, and the two rings between host and device.

Decision 4 of the design: nothing in a graph changes between replays. The host writes numbered ingress records into a
pinned ring; the first node applies them; whatever advances is owned by the device. This module fixes names, shapes,
word encodings and limits; ``ops/begin.py`` and ``ops/advance.py`` give the meaning.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from compiler.ir.types import Kind, TensorType, Value

PAGE = 64  # tokens per KV page
MAX_CONTEXT = 1 << 20  # one named ceiling for every table sized by context (spec/kv-cache.md §5)
MAX_CHUNKS = 64  # decode attention splits a column's keys into at most this many chunks
MAX_STOPS = 16
RING_WORDS = 1 << 16  # ingress ring, u32 words
EGRESS_ENTRIES = 64
EGRESS_HEADER = 4  # step + 1 (written last), error word, lanes, reserved
EGRESS_LANE = 4  # count, token, finish reason, length
RECORD_HEADER = 4  # sequence, step, opcode | count << 8, destination
MAX_PAYLOAD = 4096  # words of one record
SEGMENT = 4  # control tables are aligned to this many words


class Opcode(IntEnum):
    """What an ingress record does."""

    WRITE = 0  # copy the payload to a word offset of the control block
    CLEAR_COUNTS = 1  # zero the token counts of slot ``destination``
    WRAP = 2  # continue at the start of the ring


class Finish(IntEnum):
    """Why a lane froze; 0 while it runs."""

    NONE = 0
    STOP_TOKEN = 1
    LIMIT = 2
    CAPACITY = 3


class DeviceFault(IntEnum):
    """Error word: set once by the device, reported by the host before any output is used."""

    NONE = 0
    RECORD_RANGE = 1  # an ingress record points outside the control block
    TOKEN_RANGE = 2  # a queued or sampled token id is outside the vocabulary
    CAPACITY = 3  # a lane was given more tokens than its pages hold
    EXCHANGE = 4  # the other rank did not send its part in time


# lane_sampling words
SAMPLING_WORDS = 8
TEMPERATURE, TOP_P, MIN_P, PRESENCE, FREQUENCY, TOP_K, SEED_LOW, SEED_HIGH = range(8)
# step words
STEP_NUMBER, RING_SEQUENCE, RING_CURSOR, FAULT = range(4)
# pf_control words
PF_LANE, PF_FINAL = range(2)
PF_WORDS = 4


@dataclass(frozen=True)
class ControlLimits:
    """Extents of the control block. ``chunk`` and ``score_chunk`` are the columns of the prefill and the scoring phase,
    ``records`` those of the widest decode step. ``pages_per_row`` = ceil(max_context / 64)."""

    lanes: int
    slots: int
    max_context: int
    pages: int
    chunk: int
    score_chunk: int
    records: int
    vocab_rows: int
    vocab_ids: int
    kv_heads: int
    rotary_pairs: int
    queue: int = 4096

    @property
    def pages_per_row(self) -> int:
        return -(-self.max_context // PAGE)


def control_tables(limits: ControlLimits, rank: int = 0) -> dict[str, Value]:
    """Tables of the control block (all i32; float parameters as bits), in the order in which they lie in memory."""
    b = limits.lanes
    shapes: dict[str, tuple[int, ...]] = {
        "step": (4,),
        "lane_slot": (b,),
        "lane_page_row": (b,),
        "lane_ncols": (b,),
        "lane_len": (b,),
        "lane_prompt_len": (b,),
        "lane_limit": (b,),
        "lane_generated": (b,),
        "lane_frozen": (b,),
        "lane_rope_delta": (b,),
        "lane_stops": (b, MAX_STOPS),
        "lane_sampling": (b, SAMPLING_WORDS),
        "queue_head": (b,),
        "queue_tail": (b,),
        "slot_pending": (limits.slots,),
        "slot_parity": (limits.slots,),
        "pf_control": (PF_WORDS,),
        "pf_lane_slot": (1,),
        "pf_lane_page_row": (1,),
        "pf_lane_ncols": (1,),
        "pf_lane_len": (1,),
        "pf_tokens": (limits.chunk,),
        "pf_positions": (3, limits.chunk),
        "sc_tokens": (limits.score_chunk,),
        "sc_positions": (3, limits.score_chunk),
        "inv_freq": (2, limits.rotary_pairs),
        "queue": (b, limits.queue),
        "page_table": (b, limits.pages_per_row),
    }
    suffix = f"@{rank}" if rank else ""
    return {name: Value(name + suffix, TensorType(shape, "i32"), Kind.TABLE, rank) for name, shape in shapes.items()}


def table_offsets(tables: dict[str, Value]) -> tuple[dict[str, int], int]:
    """Word offset of each table in the control block, and the block's size in words."""
    offsets: dict[str, int] = {}
    cursor = 0
    for name, value in tables.items():
        offsets[name] = cursor
        cursor += -(-value.type.elements // SEGMENT) * SEGMENT
    return offsets, cursor


def egress_words(lanes: int) -> int:
    """Words of one egress entry."""
    return EGRESS_HEADER + EGRESS_LANE * lanes


def egress_extent(limits: ControlLimits) -> int:
    """Words of one rank's egress ring."""
    return EGRESS_ENTRIES * egress_words(limits.lanes)


def chunk_keys(length: int) -> int:
    """Keys per attention chunk of a column that sees ``length`` keys: the smallest 64·2^i with at most MAX_CHUNKS
    chunks. A pure function of the column's own length, so the split never depends on its neighbours."""
    size = PAGE
    while -(-length // size) > MAX_CHUNKS:
        size *= 2
    return size
