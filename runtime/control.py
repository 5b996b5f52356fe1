"""Host side of the control block: compose ingress records, read egress entries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from compiler.control import (
    EGRESS_ENTRIES,
    EGRESS_HEADER,
    EGRESS_LANE,
    MAX_PAYLOAD,
    RECORD_HEADER,
    RING_WORDS,
    ControlLimits,
    Opcode,
    control_tables,
    egress_words,
    table_offsets,
)
from compiler.ir.op import Array

_U32 = (1 << 32) - 1


class RingFull(Exception):
    """More ingress words are outstanding than the ring holds: replay before writing more."""


class Ingress:
    """Writer of the ingress ring. ``ring`` is the pinned u32 array that the device reads.

    A record becomes visible when its sequence word is written, which is last; the device applies it in the first
    replay whose step number is at least the record's. ``consumed`` must be told how many steps have completed.
    """

    def __init__(self, ring: Array, limits: ControlLimits) -> None:
        if ring.shape != (RING_WORDS,) or ring.dtype != np.uint32:
            raise ValueError(f"ring is {ring.dtype} {ring.shape}, uint32 ({RING_WORDS},) is needed")
        self._ring = ring
        self._offsets, self._words = table_offsets(control_tables(limits))
        self._shapes = {name: value.type.shape for name, value in control_tables(limits).items()}
        self._cursor = 0
        self._sequence = 0
        self.step = 0  # number of the next launch; the device counts along
        self._outstanding: list[tuple[int, int]] = []  # (step, words)

    @property
    def outstanding_words(self) -> int:
        """Ring words of records that no completed step has consumed."""
        return sum(words for _, words in self._outstanding)

    def consumed(self, step: int) -> None:
        """Steps below ``step`` have completed: their records' words are free."""
        self._outstanding = [(due, words) for due, words in self._outstanding if due >= step]

    def write(self, step: int, table: str, values: Iterable[int] | Array, index: tuple[int, ...] = ()) -> None:
        """Record: at ``step`` write ``values`` (i32 words) to ``table`` from element ``index`` on.

        Raises KeyError for an unknown table, ValueError outside its extent, RingFull.
        """
        words = np.asarray(list(values) if not isinstance(values, np.ndarray) else values, dtype=np.int64).reshape(-1)
        shape = self._shapes[table]
        start = int(np.ravel_multi_index(index + (0,) * (len(shape) - len(index)), shape)) if index else 0
        if start + words.size > int(np.prod(shape)):
            raise ValueError(f"table {table} of shape {shape}: {words.size} words from {index} reach outside")
        for at in range(0, words.size, MAX_PAYLOAD):
            piece = words[at : at + MAX_PAYLOAD]
            self._record(step, Opcode.WRITE, self._offsets[table] + start + at, piece)

    def clear_counts(self, step: int, slot: int) -> None:
        """Record: at ``step`` zero the token counts of ``slot``."""
        self._record(step, Opcode.CLEAR_COUNTS, slot, np.zeros(0, dtype=np.int64))

    def _record(self, step: int, opcode: Opcode, destination: int, payload: Array) -> None:
        need = RECORD_HEADER + payload.size
        if self._cursor + need > RING_WORDS:
            self._place(step, Opcode.WRAP, 0, np.zeros(0, dtype=np.int64))
        self._place(step, opcode, destination, payload)

    def _place(self, step: int, opcode: Opcode, destination: int, payload: Array) -> None:
        need = RECORD_HEADER + payload.size
        used = need if opcode != Opcode.WRAP else RING_WORDS - self._cursor
        if self.outstanding_words + used + RECORD_HEADER > RING_WORDS:
            raise RingFull(f"{used} words do not fit the ingress ring of {RING_WORDS}")
        at = self._cursor
        self._sequence = (self._sequence + 1) & _U32
        self._ring[at + 1] = step
        self._ring[at + 2] = int(opcode) | payload.size << 8
        self._ring[at + 3] = destination
        self._ring[at + RECORD_HEADER : at + need] = (payload & _U32).astype(np.uint32)
        self._ring[at] = self._sequence  # last: the record is complete once its number stands
        self._outstanding.append((step, used))
        following = at + need
        self._cursor = 0 if opcode == Opcode.WRAP or following + RECORD_HEADER > RING_WORDS else following


@dataclass(frozen=True)
class LaneResult:
    """What one step did to a lane: ``emitted`` token or None, finish reason (compiler.control.Finish), length."""

    emitted: int | None
    reason: int
    length: int


@dataclass(frozen=True)
class StepResult:
    step: int
    fault: int
    lanes: tuple[LaneResult, ...]


def read_egress(egress: Array, lanes: int, step: int) -> StepResult | None:
    """The entry of ``step`` (0-based), or None while the device has not completed it."""
    entry = egress.reshape(EGRESS_ENTRIES, egress_words(lanes))[step % EGRESS_ENTRIES]
    if int(entry[0]) != step + 1:
        return None
    results = []
    for lane in range(lanes):
        count, token, reason, length = (int(w) for w in entry[EGRESS_HEADER + EGRESS_LANE * lane :][:EGRESS_LANE])
        results.append(LaneResult(token if count else None, reason, length))
    return StepResult(step, int(entry[1]), tuple(results))


def float_bits(value: float) -> int:
    """i32 word of an f32 parameter."""
    return int(np.float32(value).view(np.int32))


def sampling_words(params: Mapping[str, float | int]) -> list[int]:
    """The eight words of ``lane_sampling`` from temperature, top_p, min_p, presence, frequency, top_k, seed."""
    seed = int(params["seed"])
    return [
        float_bits(params["temperature"]),
        float_bits(params["top_p"]),
        float_bits(params["min_p"]),
        float_bits(params["presence"]),
        float_bits(params["frequency"]),
        int(params["top_k"]),
        seed & _U32,
        seed >> 32 & _U32,
    ]
