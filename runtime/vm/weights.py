"""Weights for the VM: decoded from the artifact's bytes, cut as the program's shards say, cached within a budget."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np

from artifacts.layouts import decode_rows, get_layout
from compiler.ir.op import Array
from compiler.ir.types import IRError, Value, WeightSource

PIECE = 64 << 20


class Device(Protocol):
    """The part of a device that an upload needs."""

    def upload(self, address: int, data: Array) -> None: ...


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

    def encoded(self, value: Value) -> Array:
        """Encoded bytes of the value: the object's own, or the stand-alone shard cut from it."""
        source = value.source
        if source is None:
            raise IRError(f"value {value.name} is no weight")
        raw = self._source.object_bytes(source.object_index)
        shape = source.object_shape
        whole_rows = source.rows == ((0, shape[0]),)
        whole_cols = source.cols == ((0, shape[-1]),)
        if whole_rows and whole_cols:
            return raw
        layout = get_layout(source.layout)
        rows = None if whole_rows else list(source.rows)
        cols = None if whole_cols else list(source.cols)
        _, cut = layout.slice(source.format, shape, raw, rows, cols)
        return np.asarray(cut)

    def upload(self, value: Value, device: Device, address: int) -> Iterator[int]:
        """Copy the encoded bytes to device memory, in pieces that keep Ctrl-C and a progress bar alive; yields the bytes
        of each piece."""
        data = self.encoded(value)
        for start in range(0, data.size, PIECE):
            piece = data[start : start + PIECE]
            device.upload(address + start, piece)
            yield int(piece.size)

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
