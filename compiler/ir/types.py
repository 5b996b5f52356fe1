"""Values of the op graph: what an op reads and writes, without saying where it lies.

A column is one token of one lane: in a graph of B lanes × T columns, column ``c = lane * T + t``. Activations are
row-major ``[columns, width]``, so a slice of the width of one buffer is a view with the buffer's own row stride.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import prod

DTYPE_BYTES = {"bf16": 2, "f16": 2, "f32": 4, "i32": 4, "u8": 1}


class IRError(Exception):
    """A graph breaks a rule of the IR; the message names the op or value and the rule."""


class Kind(StrEnum):
    """Where a value's bytes come from and how long they live."""

    ACTIVATION = "activation"  # lives from its producer to its last reader; its range is reused
    SCRATCH = "scratch"  # lives inside one kernel call
    STATE = "state"  # persists across replays; named by layer
    TABLE = "table"  # control block: persists, written by ingress records and by the device
    WEIGHT = "weight"  # read-only, uploaded from the artifact


@dataclass(frozen=True)
class TensorType:
    """Logical shape and storage dtype of a value. ``shape`` is row-major, all extents positive."""

    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise IRError(f"dtype {self.dtype!r} is none of {', '.join(DTYPE_BYTES)}")
        if any(extent <= 0 for extent in self.shape):
            raise IRError(f"shape {self.shape} has an extent below 1")

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True)
class WeightSource:
    """Which bytes of the artifact a weight value holds.

    ``object_index`` counts the artifact's objects in directory order (artifact text never enters a program).
    ``rows`` are half-open row ranges of the object, concatenated in order; ``cols`` half-open column ranges, of
    which only a vector or contiguous object may have several. The value is the stand-alone encoding (same format and
    layout) of that narrowed matrix, as a shard is in spec/tp2.md §4.
    """

    object_index: int
    format: str
    layout: str
    object_shape: tuple[int, ...]
    rows: tuple[tuple[int, int], ...]
    cols: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Value:
    """One named buffer of one rank. ``source`` is set exactly for weights, ``nbytes`` is then the encoded size."""

    name: str
    type: TensorType
    kind: Kind
    rank: int = 0
    source: WeightSource | None = None
    encoded_bytes: int = 0

    @property
    def nbytes(self) -> int:
        return self.encoded_bytes if self.kind is Kind.WEIGHT else self.type.nbytes


@dataclass(frozen=True)
class Ref:
    """A use of a value: all of it, or the columns ``[offset, offset + width)`` of its last axis."""

    value: str
    offset: int = 0
    width: int = 0  # 0: the whole last axis

    def to_json(self) -> list[str | int]:
        return [self.value, self.offset, self.width]
