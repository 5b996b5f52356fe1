"""Reading payload bytes: one mapped file, or an entry and parts that together hold one logical payload.

Bytes come straight from the mapping, so nothing is read before it is used, or are read into memory of the caller
(`PayloadReader`). Continuation parts are opened and checked when a range first touches them (artifact-container-v3.md
section 2).
"""

import io
import mmap
import os
import stat
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from artifacts.container.schema import METADATA_ALIGNMENT
from artifacts.errors import FramingError, GeometryError, PartError, PayloadError, quoted, quoted_path

PART_MAGIC = b"NINPRT\x00\x03"
PART_HEADER_BYTES = METADATA_ALIGNMENT

Bytes = NDArray[np.uint8]


class MappedFile:
    """A read-only mapping of a regular file. Errors: FramingError when the path is missing, special or empty."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            # The kind is checked before opening: opening a pipe would wait for a writer.
            if not stat.S_ISREG(path.stat().st_mode):
                raise FramingError(f"{quoted_path(path)} is not a regular file")
            with open(path, "rb") as file:
                status = os.fstat(file.fileno())
                self.size, self._identity = status.st_size, (status.st_dev, status.st_ino)
                if self.size == 0:
                    raise FramingError(f"{quoted_path(path)} is empty")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise FramingError(f"{quoted_path(path)}: {reason}") from None
        self.data: Bytes = np.frombuffer(self._map, np.uint8)

    def reopen(self) -> io.FileIO:
        """A handle of its own to the file. Errors: FramingError when it is gone or another file has its name."""
        try:
            file = io.FileIO(self.path)
        except OSError as error:
            raise FramingError(f"{quoted_path(self.path)}: {error.strerror or error}") from None
        status = os.fstat(file.fileno())
        if (status.st_dev, status.st_ino) != self._identity:
            file.close()
            raise FramingError(f"{quoted_path(self.path)}: the file was replaced while it was open")
        return file

    def close(self) -> None:
        """Release the mapping, or leave it to the last array that still shows its bytes."""
        del self.data
        try:
            self._map.close()
        except BufferError:  # someone still holds a view
            pass


class Segment(NamedTuple):
    """A share of the payload: `bytes` of it lie at `start` of the file at `path` (None: the entry)."""

    path: Path | None
    start: int
    bytes: int


class Payload:
    """The logical payload: `read` takes offsets that run through all segments."""

    def __init__(self, entry: MappedFile, segments: Sequence[Segment], artifact_id: bytes = b"") -> None:
        self._files: list[MappedFile | None] = [entry] + [None] * (len(segments) - 1)
        self._segments = segments
        self._artifact_id = artifact_id
        self._starts = [0]
        for segment in segments[:-1]:
            self._starts.append(self._starts[-1] + segment.bytes)
        self.bytes = self._starts[-1] + segments[-1].bytes

    def read(self, offset: int, length: int) -> Bytes:
        """`length` bytes at `offset` as a read-only uint8 array: a view of the mapping, a copy where files join.

        Errors: GeometryError outside the payload, PartError for a part that is missing or not this artifact's.
        """
        pieces = [self._file(i).data[start : start + count] for i, start, count in self.extents(offset, length)]
        if len(pieces) == 1:
            return pieces[0]
        joined = np.concatenate(pieces)
        joined.flags.writeable = False
        return joined

    def extents(self, offset: int, length: int) -> list[tuple[int, int, int]]:
        """(segment, offset in its file, length) of the shares that hold `length` bytes at `offset`, at least one.

        Errors: GeometryError outside the payload.
        """
        if not self._files:
            raise ValueError("the artifact is closed")
        if offset < 0 or length < 0 or offset + length > self.bytes:
            raise GeometryError(f"read of [{offset}, {offset + length}) leaves the {self.bytes} payload bytes")
        found: list[tuple[int, int, int]] = []
        index = min(bisect_right(self._starts, offset) - 1, len(self._segments) - 1)
        end = offset + length
        while True:
            segment, start = self._segments[index], self._starts[index]
            stop = min(end, start + segment.bytes)
            if stop > offset or end == offset:
                found.append((index, segment.start + offset - start, stop - offset))
            offset = stop
            if offset >= end:
                return found
            index += 1

    def reopen(self, index: int) -> io.FileIO:
        """A handle of its own to the file of a segment. Errors: PartError, FramingError."""
        return self._file(index).reopen()

    def path(self, index: int) -> Path:
        """The file of a segment."""
        return self._file(index).path

    def _file(self, index: int) -> MappedFile:
        file = self._files[index]
        if file is None:
            file = self._files[index] = self._open_part(index)
        return file

    def _open_part(self, index: int) -> MappedFile:
        segment = self._segments[index]
        assert segment.path is not None
        what = f"part {index} ({quoted(segment.path.name)})"
        try:
            file = MappedFile(segment.path)
        except FramingError as error:
            raise PartError(f"{what}: {error}") from None
        try:
            if file.size < 32:
                raise PartError(f"{what}: {file.size} bytes; a part has at least 32")
            header = file.data[:32].tobytes()
            if header[:8] != PART_MAGIC:
                raise PartError(f"{what}: not a continuation part (magic {header[:8].hex()})")
            if int.from_bytes(header[8:16], "little") != index:
                raise PartError(f"{what}: the file says it is part {int.from_bytes(header[8:16], 'little')}")
            if header[16:32] != self._artifact_id:
                raise PartError(f"{what}: belongs to artifact {header[16:32].hex()}, not {self._artifact_id.hex()}")
            if file.size != segment.start + segment.bytes:
                raise PartError(f"{what}: {file.size} bytes; {segment.start + segment.bytes} are required")
        except PartError:
            file.close()
            raise
        return file

    def open_all(self) -> None:
        """Open and check every part now. Errors: PartError."""
        for index in range(len(self._segments)):
            self._file(index)

    def close(self) -> None:
        """Release every mapping. Arrays that were handed out stay valid."""
        for file in self._files:
            if file is not None:
                file.close()
        self._files = []


class PayloadReader:
    """Reads payload bytes into memory of the caller, through file handles of its own: one reader per thread.

    A copy out of the page cache needs no page of a mapping to be faulted in, and a file that is cut short or cannot be
    read is an error here, where touching its mapping ends the process.
    """

    def __init__(self, payload: Payload) -> None:
        self._payload = payload
        self._handles: dict[int, io.FileIO] = {}
        self._at: dict[int, int] = {}

    def read_into(self, offset: int, out: Bytes) -> None:
        """Fill the flat uint8 array `out` with payload bytes from `offset`.

        Errors: GeometryError outside the payload, PartError, FramingError when a file was replaced, PayloadError when
        one has become too short or cannot be read.
        """
        view, done = out.data, 0
        for index, start, count in self._payload.extents(offset, out.size):
            try:
                self._fill(index, start, view[done : done + count])
            except OSError as error:
                raise PayloadError(f"{quoted_path(self._payload.path(index))}: {error.strerror or error}") from None
            done += count

    def check(self, offset: int, length: int) -> None:
        """Raise as `read_into` would when files have become too short to hold these bytes."""
        for index, start, count in self._payload.extents(offset, length):
            if os.fstat(self._handle(index).fileno()).st_size < start + count:
                raise self._short(index, start + count)

    def _fill(self, index: int, start: int, view: memoryview) -> None:
        handle = self._handle(index)
        if self._at[index] != start:
            self._at[index] = handle.seek(start)
        while view:
            count = handle.readinto(view) or 0  # without the interpreter's lock; may be less than asked for
            if not count:
                raise self._short(index, start + len(view))
            view, start = view[count:], start + count
            self._at[index] = start

    def _short(self, index: int, needed: int) -> PayloadError:
        path, size = quoted_path(self._payload.path(index)), os.fstat(self._handle(index).fileno()).st_size
        return PayloadError(f"{path}: the file ends at byte {size}, {needed} are required; it was cut while it was open")

    def _handle(self, index: int) -> io.FileIO:
        if index not in self._handles:
            self._handles[index], self._at[index] = self._payload.reopen(index), 0
        return self._handles[index]

    def close(self) -> None:
        """Close the handles."""
        for handle in self._handles.values():
            handle.close()
        self._handles.clear()
