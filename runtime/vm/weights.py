"""Weights for the VM: decoded from the artifact's bytes, cut as the program's shards say, cached within a budget."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol

import numpy as np

from artifacts.layouts import decode_rows, get_layout
from compiler.ir.op import Array
from compiler.ir.types import IRError, Value, WeightSource


class Source(Protocol):
    """The part of ``artifacts.Artifact`` that reading weights needs."""

    def object_bytes(self, index: int) -> Array:
        """Encoded bytes of the object at ``index`` of the directory, uint8."""


class WeightStore:
    """Decoded weights by their source. ``budget`` bounds the cache in bytes; larger weights are decoded at each use."""

    def __init__(self, source: Source, budget: int = 2 << 30) -> None:
        self._source = source
        self._budget = budget
        self._held = 0
        self._cache: OrderedDict[tuple[WeightSource, str], Array] = OrderedDict()

    def whole(self, value: Value) -> bool:
        """Whether the value is an object of the artifact as it lies there, not a shard to be cut from one."""
        source = value.source
        if source is None:
            raise IRError(f"value {value.name} is no weight")
        return source.rows == ((0, source.object_shape[0]),) and source.cols == ((0, source.object_shape[-1]),)

    def raw(self, value: Value) -> Array:
        """Encoded bytes of the object that the value is, or is cut from."""
        if value.source is None:
            raise IRError(f"value {value.name} is no weight")
        return self._source.object_bytes(value.source.object_index)

    def cut(self, value: Value, raw: Array) -> Array:
        """The value's encoded bytes out of those of its object: all of them, or a stand-alone shard."""
        source = value.source
        if source is None or self.whole(value):
            return raw
        shape = source.object_shape
        rows = None if source.rows == ((0, shape[0]),) else list(source.rows)
        cols = None if source.cols == ((0, shape[-1]),) else list(source.cols)
        _, shard = get_layout(source.layout).slice(source.format, shape, raw, rows, cols)
        return np.asarray(shard)

    def encoded(self, value: Value) -> Array:
        """Encoded bytes of the value."""
        return self.cut(value, self.raw(value))

    def fill(self, value: Value, device: Any, address: int) -> bool:
        """Make the value's bytes in device memory, where the store can; False: they have to be copied from ``encoded``."""
        return False

    def decode(self, value: Value, rows: tuple[int, int] | None, dtype: Any) -> Array:
        """Rows of the weight as ``dtype`` (float32 or float64), not to be written."""
        source = value.source
        if source is None:
            raise IRError(f"value {value.name} is no weight")
        key = (source, np.dtype(dtype).name)
        if key not in self._cache:
            size = value.type.elements * np.dtype(dtype).itemsize
            shape = value.type.shape
            begin, end = rows or (0, shape[0])
            if self._held + size > self._budget:
                return decode_rows(source.format, source.layout, shape, self.encoded(value), begin, end, dtype)
            whole = decode_rows(source.format, source.layout, shape, self.encoded(value), 0, shape[0], dtype)
            whole.setflags(write=False)
            self._cache[key] = whole
            self._held += size
        found = self._cache[key]
        return found if rows is None else found[rows[0] : rows[1]]
