"""Weights for the VM: decoded from the artifact's bytes, cut as the program's shards say, cached within a budget."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, Protocol

import numpy as np

from artifacts.layouts import Shard, decode_rows, get_layout
from compiler.ir.op import Array
from compiler.ir.types import IRError, Value, WeightSource

WIDE = 256 << 10  # bytes of a piece of a shard from which on a read of its own is cheaper than the pages of a mapping


class Source(Protocol):
    """The part of ``artifacts.Artifact`` that reading weights needs."""

    def object_bytes(self, index: int) -> Array:
        """Encoded bytes of the object at ``index`` of the directory, uint8."""

    def reader(self) -> ObjectReader:
        """Reads objects into memory of the caller; for one thread."""


class ObjectReader(Protocol):
    """Encoded bytes of objects for one thread."""

    def read_into(self, index: int, begin: int, out: Array) -> None:
        """Bytes of the object at ``index`` from ``begin`` into ``out``, flat uint8."""

    def view(self, index: int) -> Array:
        """All bytes of the object, uint8, for pieces that are too narrow to be read one by one."""

    def close(self) -> None:
        """Give back what the reader holds."""


class MadeObjects:
    """An ``ObjectReader`` of a source whose objects are made, not read: it keeps the last one."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._last: tuple[int, Array] | None = None

    def view(self, index: int) -> Array:
        if self._last is None or self._last[0] != index:
            self._last = index, self._source.object_bytes(index)
        return self._last[1]

    def read_into(self, index: int, begin: int, out: Array) -> None:
        np.copyto(out, self.view(index)[begin : begin + out.size])

    def close(self) -> None:
        self._last = None


class WeightReader:
    """Encoded bytes of weights, whole objects and shards, into memory of the caller; for one thread."""

    def __init__(self, weights: WeightStore, objects: ObjectReader) -> None:
        self._weights, self._objects = weights, objects
        self._shard: tuple[WeightSource, Shard] | None = None

    def read_into(self, value: Value, begin: int, out: Array) -> None:
        """Bytes of the value from ``begin`` into ``out``, flat uint8. Raises what reading the artifact raises.

        A shard's wide pieces are read where they belong; narrow ones are gathered from the object's mapping, once, without
        the shard ever being made.
        """
        source = value.source
        if source is None:
            raise IRError(f"value {value.name} is no weight")
        if self._weights.whole(value):
            self._objects.read_into(source.object_index, begin, out)
            return
        if self._shard is None or self._shard[0] != source:
            self._shard = source, shard_of(source)
        spans = self._shard[1].parts(begin, begin + out.size)
        if sum(span.width * span.count for span in spans) < out.size:
            out[:] = 0  # padding between planes
        for span in spans:
            if span.width < WIDE:
                span.copy(self._objects.view(source.object_index), out)
                continue
            for start, target, width in span.ranges():
                self._objects.read_into(source.object_index, start, out[target : target + width])

    def close(self) -> None:
        self._objects.close()


def shard_of(source: WeightSource) -> Shard:
    """The cut that a weight is of its object."""
    shape = source.object_shape
    rows = None if source.rows == ((0, shape[0]),) else list(source.rows)
    cols = None if source.cols == ((0, shape[-1]),) else list(source.cols)
    return get_layout(source.layout).shard(source.format, shape, rows, cols)


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

    def encoded(self, value: Value) -> Array:
        """Encoded bytes of the value: its object's, or a stand-alone shard cut from them."""
        source = value.source
        if source is None:
            raise IRError(f"value {value.name} is no weight")
        raw = self._source.object_bytes(source.object_index)
        return raw if self.whole(value) else shard_of(source).copy(raw)

    def reader(self) -> WeightReader:
        """Reads encoded bytes of values into memory of the caller; for one thread. To be closed."""
        return WeightReader(self, self._source.reader())

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
