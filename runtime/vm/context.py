"""What an op's reference sees in the VM (compiler.ir.op.Context)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from compiler.ir.op import Array, Op, bf16_round
from compiler.ir.types import Ref, TensorType

Resolve = Callable[[str], Array]


@dataclass
class VMContext:
    """Operands of one op. ``resolve`` gives the whole writable array of a value, ``weights`` decodes a weight."""

    op: Op
    exact: bool
    lanes: int
    width: int
    ncols: Array
    resolve: Resolve
    type_of: Callable[[str], TensorType]
    weights: Callable[[str, tuple[int, int] | None], Array]
    columns: list[tuple[int, int]] = field(init=False)

    def __post_init__(self) -> None:
        half = self.width // 2 if self.op.half is not None else self.width
        first = half * (self.op.half or 0)
        self.columns = [(lane, t) for lane in range(self.lanes)
                        for t in range(first, min(first + half, int(self.ncols[lane])))]  # fmt: skip

    def _ref(self, name: str) -> Ref:
        for group in (self.op.inputs, self.op.state, self.op.outputs):
            if name in group:
                return group[name]
        raise KeyError(f"op {self.op.kind} has no operand {name}")

    def _per_lane(self, name: str) -> bool:
        """One row per lane instead of one per column."""
        return self.width > 1 and self.type_of(self._ref(name).value).shape[0] == self.lanes

    def rows(self, name: str) -> list[tuple[int, int]]:
        if self._per_lane(name):
            return [(lane, int(self.ncols[lane]) - 1) for lane in range(self.lanes) if self.ncols[lane] > 0]
        return self.columns

    def _select(self, name: str) -> tuple[Array, list[int]]:
        ref = self._ref(name)
        array = self.resolve(ref.value)
        if ref.width:
            array = array[..., ref.offset : ref.offset + ref.width]
        per_lane = self._per_lane(name)
        return array, [lane if per_lane else lane * self.width + t for lane, t in self.rows(name)]

    def get(self, name: str) -> Array:
        array, rows = self._select(name)
        picked: Array = array[rows]
        return picked

    def put(self, name: str, value: Array) -> None:
        array, rows = self._select(name)
        array[rows] = self.round(value, self.type_of(self._ref(name).value).dtype)

    def whole(self, name: str) -> Array:
        ref = self._ref(name)
        array = self.resolve(ref.value)
        return array[..., ref.offset : ref.offset + ref.width] if ref.width else array

    def store(self, name: str, value: Array) -> None:
        array = self.whole(name)
        array[...] = self.round(value, self.type_of(self._ref(name).value).dtype)

    def weight(self, name: str, rows: tuple[int, int] | None = None) -> Array:
        return self.weights(self._ref(name).value, rows)

    def round(self, value: Array, dtype: str = "bf16") -> Array:
        if self.exact or dtype in ("i32", "u8"):
            return value
        if dtype == "bf16":
            return bf16_round(np.asarray(value, dtype=np.float64).astype(np.float32))
        if dtype == "f16":
            return np.asarray(value, dtype=np.float16).astype(np.float32)
        return np.asarray(value, dtype=np.float32)
