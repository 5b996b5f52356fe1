"""The VM's memory: every byte offset of the program's plan, kept as floating-point elements.

A value of dtype bf16 or f32 at byte offset o lies at o·factor of a shadow buffer whose elements are float32 (engine
numerics, factor 2: values are rounded to their dtype when stored) or float64 (exact numerics, factor 4: nothing is
rounded). Since 2 bytes become one element, ranges that are disjoint in the plan are disjoint in the shadow, and ranges
that share bytes share elements: a wrong plan shows as NaN or foreign values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from compiler.ir.op import Array
from compiler.ir.types import TensorType
from compiler.program.model import CONTROL, EGRESS, RING, STATE, WORK, Placement


@dataclass
class RankMemory:
    """Regions of one rank. CONTROL is plain i32, STATE and WORK are shadows."""

    exact: bool
    sizes: dict[str, int]
    host: dict[str, Array]
    regions: dict[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.regions[CONTROL] = np.zeros(self.sizes.get(CONTROL, 0) // 4, dtype=np.int32)
        for region in (STATE, WORK):
            self.regions[region] = np.zeros(self.sizes.get(region, 0) * self.factor, dtype=np.uint8)
            self.regions[region].view(self.float_type)[:] = np.nan

    @property
    def factor(self) -> int:
        return 4 if self.exact else 2

    @property
    def float_type(self) -> Any:
        return np.float64 if self.exact else np.float32

    def view(self, place: Placement, kind: TensorType) -> Array:
        """Writable array of the value's shape. Integers are int32, the rest the shadow's float type."""
        if place.region in (RING, EGRESS):
            flat: Array = self.host[place.region].reshape(-1)
            return flat[place.offset // 4 : place.offset // 4 + kind.elements].reshape(kind.shape)
        if place.region == CONTROL:
            flat = self.regions[CONTROL]
            return flat[place.offset // 4 : place.offset // 4 + kind.elements].reshape(kind.shape)
        start = place.offset * self.factor
        dtype = np.dtype(np.int32 if kind.dtype == "i32" else np.uint8 if kind.dtype == "u8" else self.float_type)
        raw = self.regions[place.region][start : start + kind.elements * dtype.itemsize]
        return raw.view(dtype).reshape(kind.shape)

    def poison(self, place: Placement) -> None:
        """Fill a WORK range with NaN: reading it before writing it must show."""
        start, end = place.offset * self.factor, place.end * self.factor
        length = (end - start) // np.dtype(self.float_type).itemsize
        self.regions[place.region][start:].view(np.uint8)[: length * np.dtype(self.float_type).itemsize].view(
            self.float_type
        )[:] = np.nan
