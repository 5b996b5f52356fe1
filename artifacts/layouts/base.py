"""What every storage layout shares: planes, byte spans of shards, and the layout interface (storage-layouts.md).

A layout fixes where the words of a tensor lie inside the tensor's bytes. Each layout is a list of *planes*; a plane is
a matrix of row units by column units, so that one routine serves sizes, row blocks and shards of all layouts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts.errors import LayoutError, PayloadError
from artifacts.formats import Array, EncodedTensor, Fields, NumericFormat, get_format

Bytes = NDArray[np.uint8]
Range = tuple[int, int]


def align_up(value: int, alignment: int) -> int:
    """The least multiple of `alignment` that is at least `value`."""
    return -(-value // alignment) * alignment


def as_bytes(buffer: Any) -> Bytes:
    """A bytes-like object or uint8 array as a flat uint8 array, without a copy."""
    if isinstance(buffer, np.ndarray):
        if buffer.dtype != np.uint8 or buffer.ndim != 1:
            raise LayoutError(f"encoded bytes must be a flat uint8 array, not {buffer.dtype}{list(buffer.shape)}")
        return buffer
    return np.frombuffer(buffer, np.uint8)


@dataclass(frozen=True)
class Plane:
    """One matrix of bytes inside an encoded tensor.

    `rows` row units of `row_bytes` bytes lie one after the other from `offset`; a row unit covers `unit_rows` logical
    rows. Within it each `unit_columns` logical columns take `column_bytes` bytes; `unit_columns` 0 marks a plane that
    does not depend on columns (it is copied whole by a column cut), `unit_rows` 0 one that is copied by every cut.
    """

    name: str
    offset: int
    rows: int
    row_bytes: int
    unit_rows: int
    unit_columns: int
    column_bytes: int

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Span:
    """`count` pieces of `width` bytes: piece i goes from `source + i*source_stride` to `target + i*target_stride`."""

    source: int
    target: int
    width: int
    count: int = 1
    source_stride: int = 0
    target_stride: int = 0

    def ranges(self) -> Iterator[tuple[int, int, int]]:
        """(source offset, target offset, length) of every piece."""
        for i in range(self.count):
            yield self.source + i * self.source_stride, self.target + i * self.target_stride, self.width

    def part(self, begin: int, end: int) -> Iterator[Span]:
        """What of the span lies in target bytes [begin, end), targets counted from `begin`: its whole pieces as one span,
        a piece that begins before or ends after as one of its own."""
        step = self.target_stride if self.count > 1 else max(self.width, 1)
        first = max(0, (begin - self.target - self.width) // step + 1)
        last = min(self.count, -(-(end - self.target) // step))
        head = first if first < last and self.target + first * step < begin else None
        tail = last - 1 if first < last and self.target + (last - 1) * step + self.width > end else None
        for i in dict.fromkeys(x for x in (head, tail) if x is not None):
            at = self.target + i * step
            lo, hi = max(begin, at), min(end, at + self.width)
            yield Span(self.source + i * self.source_stride + lo - at, lo - begin, hi - lo)
        first, last = first + (head is not None), last - (tail is not None)
        if first < last:
            source, target = self.source + first * self.source_stride, self.target + first * step - begin
            yield replace(self, source=source, target=target, count=last - first)

    def copy(self, source: Bytes, out: Bytes) -> None:
        """Copy all pieces. Errors: LayoutError where they leave either array (strided views are not bounds-checked)."""
        reach = self.width + (self.count - 1) * self.source_stride, self.width + (self.count - 1) * self.target_stride
        if self.source + reach[0] > source.size or self.target + reach[1] > out.size:
            raise LayoutError(f"a span leaves the {source.size} bytes it is copied from, or the {out.size} it is copied to")
        view, shape = np.lib.stride_tricks.as_strided, (self.count, self.width)
        view(out[self.target :], shape, (self.target_stride, 1))[...] = view(
            source[self.source :], shape, (self.source_stride, 1), writeable=False
        )


@dataclass(frozen=True)
class Shard:
    """A stand-alone encoded tensor cut from a parent: shape, size in bytes, spans to copy; the rest is zero."""

    shape: tuple[int, ...]
    nbytes: int
    parent_nbytes: int
    spans: tuple[Span, ...]

    def copy(self, parent: Any) -> Bytes:
        """The shard's bytes, cut from the parent's encoded bytes."""
        source, out = as_bytes(parent), np.zeros(self.nbytes, np.uint8)
        if source.size != self.parent_nbytes:
            raise LayoutError(f"the shard's parent has {self.parent_nbytes} bytes, not {source.size}")
        for span in self.spans:
            span.copy(source, out)
        return out

    def parts(self, begin: int, end: int) -> list[Span]:
        """The spans that make up bytes [begin, end) of the shard, targets counted from `begin`; the rest is zero."""
        return [part for span in self.spans for part in span.part(begin, end)]


class Layout(ABC):
    """One closed layout identity: `name` (v2) and `v3_name` spelling, object `alignment` in bytes, `formats`."""

    name: str
    v3_name: str
    alignment = 256
    formats: tuple[str, ...]
    row_unit = 1  # row cuts and row blocks begin and end at multiples of this
    column_unit = 1  # the same for columns (the last column of the matrix is always a legal end)
    several_column_ranges = False

    @abstractmethod
    def _planes(self, fmt: NumericFormat, shape: tuple[int, ...]) -> tuple[Plane, ...]: ...

    @abstractmethod
    def _pack(self, fmt: NumericFormat, shape: tuple[int, ...], fields: Mapping[str, Array]) -> list[Array]:
        """Bytes of each per-row plane for a block of rows, in plane order; scalars follow."""

    @abstractmethod
    def _unpack(self, fmt: NumericFormat, shape: tuple[int, ...], planes: list[Bytes]) -> Fields:
        """Fields of a block of rows from the bytes of its planes; `shape` is that of the block."""

    def resolve(self, format: str, shape: Sequence[int]) -> tuple[NumericFormat, tuple[int, ...]]:
        """Format object and checked shape; raises when this layout does not hold the format or the shape is illegal."""
        fmt = get_format(format)
        if fmt.name not in self.formats:
            raise LayoutError(f"layout {self.name} does not hold format {fmt.name}; it holds {', '.join(self.formats)}")
        return fmt, fmt.check_shape(shape)

    def planes(self, format: str, shape: Sequence[int]) -> tuple[Plane, ...]:
        """The planes of a tensor, in order of offset."""
        return self._planes(*self.resolve(format, shape))

    def encoded_size(self, format: str, shape: Sequence[int]) -> int:
        """Bytes of the whole encoded tensor, padding between planes included."""
        return self.planes(format, shape)[-1].end

    def gaps(self, format: str, shape: Sequence[int]) -> list[tuple[int, int]]:
        """(offset, length) of the zero bytes between planes."""
        planes = self.planes(format, shape)
        pairs = zip(planes[:-1], planes[1:], strict=True)
        return [(a.end, b.offset - a.end) for a, b in pairs if b.offset > a.end]

    # -- whole tensors and row blocks

    def pack_rows(
        self, format: str, shape: Sequence[int], r0: int, fields: Mapping[str, Array]
    ) -> list[tuple[int, Bytes]]:
        """(offset, bytes) pieces that hold rows r0 .. r0+n of a tensor of `shape`, `fields` being those n rows.

        Blocks may come in any order; blocks that cover all rows write every byte but the gaps. r0 and n are multiples
        of `row_unit` (n may end at the last row). NVFP4's divisor is repeated by every block.
        """
        fmt, dims = self.resolve(format, shape)
        first = next(iter(fields.values()))
        rows = first.shape[0] if dims else 1
        r1 = r0 + rows
        self._check_rows(dims, r0, r1)
        block = (rows, *dims[1:]) if dims else ()
        for key, (want, dtype) in fmt.field_shapes(block).items():
            if key not in fields or fields[key].shape != want or fields[key].dtype != dtype:
                raise LayoutError(f"{fmt.name}: field {key} of a block of {rows} rows must be {dtype}{list(want)}")
        pieces = []
        for plane, data in zip(self._planes(fmt, dims), self._pack(fmt, block, fields), strict=True):
            start = r0 // plane.unit_rows * plane.row_bytes if plane.unit_rows else 0
            pieces.append((plane.offset + start, np.ascontiguousarray(data).view(np.uint8).reshape(-1)))
        return pieces

    def unpack_rows(self, format: str, shape: Sequence[int], buffer: Any, r0: int, r1: int) -> Fields:
        """Fields of rows [r0, r1), any rows, from the encoded bytes of the whole tensor (copies, not views).

        Words are not checked: FORMATS[format].check_words does that.
        """
        fmt, dims = self.resolve(format, shape)
        data = self._sized(fmt, dims, buffer)
        rows = dims[0] if dims else 1
        if not 0 <= r0 < r1 <= rows:
            raise LayoutError(f"rows [{r0},{r1}) are not inside [0,{rows})")
        a, b = r0 // self.row_unit * self.row_unit, align_up(r1, self.row_unit)
        planes = [data[slice(*self._row_bytes(p, a, b))] for p in self._planes(fmt, dims)]
        fields = self._unpack(fmt, (b - a, *dims[1:]) if dims else (), planes)
        if (a, b) != (r0, r1):
            fields = {k: v if v.ndim == 0 else v[r0 - a : r1 - a] for k, v in fields.items()}
        return fields

    def pack(self, tensor: EncodedTensor) -> Bytes:
        """Encoded bytes of a whole tensor. The words are not checked (FORMATS[name].check does that)."""
        out = np.zeros(self.encoded_size(tensor.format, tensor.shape), np.uint8)
        for offset, data in self.pack_rows(tensor.format, tensor.shape, 0, tensor.fields):
            out[offset : offset + data.size] = data
        return out

    def unpack(self, format: str, shape: Sequence[int], buffer: Any) -> EncodedTensor:
        """The tensor whose encoded bytes are `buffer`; padding and gaps are not looked at (see check_padding)."""
        dims = tuple(shape)
        fields = self.unpack_rows(format, dims, buffer, 0, dims[0] if dims else 1)
        return EncodedTensor(format, dims, fields)

    def check_padding(self, format: str, shape: Sequence[int], buffer: Any, r0: int, r1: int) -> None:
        """Raise PayloadError when padding inside rows [r0, r1), or (with r0 = 0) a gap between planes, is not zero."""
        fmt, dims = self.resolve(format, shape)
        data = self._sized(fmt, dims, buffer)
        if r0 == 0:
            for offset, length in self.gaps(format, dims):
                if data[offset : offset + length].any():
                    raise PayloadError(f"layout {self.name}: bytes between planes at offset {offset} are not zero")
        planes = [data[slice(*self._row_bytes(p, r0, r1))] for p in self._planes(fmt, dims)]
        self._check_row_padding(fmt, dims, planes, r1 - r0)

    def _check_row_padding(self, fmt: NumericFormat, dims: tuple[int, ...], planes: list[Bytes], rows: int) -> None:
        return  # only row-split-k128-v1 pads its rows

    # -- shards

    def shard(
        self,
        format: str,
        shape: Sequence[int],
        rows: Sequence[Range] | None = None,
        columns: Sequence[Range] | None = None,
    ) -> Shard:
        """The stand-alone tensor of the given row ranges and column ranges, concatenated in order (None: all).

        Bytes are copied, never repacked. Illegal cuts raise LayoutError naming the rule (tp2.md section 4,
        artifact-container-v3.md section 13).
        """
        fmt, dims = self.resolve(format, shape)
        if not dims:
            raise LayoutError("a scalar cannot be cut")
        row_ranges = [(0, dims[0])] if rows is None else list(rows)
        if not row_ranges:
            raise LayoutError("a cut needs at least one row range")
        for a, b in row_ranges:
            self._check_rows(dims, a, b)
        column_ranges = self._check_columns(dims, columns)
        count = sum(b - a for a, b in row_ranges)
        narrowed = (count, *dims[1:])
        if column_ranges is not None:
            narrowed = (count, sum(b - a for a, b in column_ranges))
        spans: list[Span] = []
        for source, target in zip(self._planes(fmt, dims), self.planes(format, narrowed), strict=True):
            spans += _plane_spans(source, target, dims, row_ranges, column_ranges)
        size = self.encoded_size(format, narrowed)
        return Shard(narrowed, size, self.encoded_size(format, dims), tuple(spans))

    def slice(
        self,
        format: str,
        shape: Sequence[int],
        buffer: Any,
        rows: Sequence[Range] | None = None,
        columns: Sequence[Range] | None = None,
    ) -> tuple[tuple[int, ...], Bytes]:
        """Shape and bytes of `shard(...)` cut from the parent's encoded bytes."""
        fmt, dims = self.resolve(format, shape)
        shard = self.shard(format, dims, rows, columns)
        return shard.shape, shard.copy(self._sized(fmt, dims, buffer))

    # -- checks

    def _sized(self, fmt: NumericFormat, dims: tuple[int, ...], buffer: Any) -> Bytes:
        data, want = as_bytes(buffer), self._planes(fmt, dims)[-1].end
        if data.size != want:
            raise LayoutError(f"{fmt.name} {list(dims)} in {self.name} takes {want} bytes, not {data.size}")
        return data

    @staticmethod
    def _row_bytes(plane: Plane, r0: int, r1: int) -> Range:
        if not plane.unit_rows:
            return plane.offset, plane.end
        a, b = r0 // plane.unit_rows, -(-r1 // plane.unit_rows)
        return plane.offset + a * plane.row_bytes, plane.offset + b * plane.row_bytes

    def _check_rows(self, dims: tuple[int, ...], r0: int, r1: int) -> None:
        total = dims[0] if dims else 1
        if not 0 <= r0 < r1 <= total:
            raise LayoutError(f"rows [{r0},{r1}) are not a non-empty range inside [0,{total})")
        if r0 % self.row_unit or r1 % self.row_unit:
            raise LayoutError(f"layout {self.name} is cut at multiples of {self.row_unit} rows, not [{r0},{r1})")

    def _check_columns(self, dims: tuple[int, ...], columns: Sequence[Range] | None) -> list[Range] | None:
        if columns is None:
            return None
        if len(dims) != 2:
            raise LayoutError(f"only [N,K] tensors are cut by columns, not shape {list(dims)}")
        ranges = list(columns)
        if not ranges or (len(ranges) > 1 and not self.several_column_ranges):
            raise LayoutError(f"layout {self.name} takes one column range, not {len(ranges)}")
        for a, b in ranges:
            if not 0 <= a < b <= dims[1]:
                raise LayoutError(f"columns [{a},{b}) are not a non-empty range inside [0,{dims[1]})")
            if a % self.column_unit or (b % self.column_unit and b != dims[1]):
                unit = self.column_unit
                raise LayoutError(f"layout {self.name} is cut at multiples of {unit} columns, not [{a},{b})")
        return ranges


def _plane_spans(
    source: Plane, target: Plane, dims: tuple[int, ...], rows: Sequence[Range], columns: Sequence[Range] | None
) -> list[Span]:
    if not source.unit_rows:
        return [Span(source.offset, target.offset, source.nbytes)]
    spans, row = [], 0
    for a, b in rows:
        first, count = a // source.unit_rows, -(-(b - a) // source.unit_rows)
        src, dst = source.offset + first * source.row_bytes, target.offset + row * target.row_bytes
        if columns is None or not source.unit_columns:
            spans.append(Span(src, dst, count * source.row_bytes))
        else:
            at = 0
            for c, d in columns:
                begin = c // source.unit_columns * source.column_bytes
                # a range that ends at K takes the padding columns of the row with it
                end = source.row_bytes if d == dims[1] else d // source.unit_columns * source.column_bytes
                width = end - begin
                spans.append(Span(src + begin, dst + at, width, count, source.row_bytes, target.row_bytes))
                at += width
        row += count
    return spans
