"""Streaming writers: the object list is planned first, payload bytes may then come in any order and from any thread.

    with ArtifactWriter(path, Identity("tiny", "bf16"), plans) as writer:
        writer.write("text/final_norm", data)
        writer.write_rows("text/output_head", 0, fields)

Leaving the block without an error checks that every object byte was written exactly once and publishes the file;
an error, or a byte missing, removes it (artifact-container.md section 4).
"""

import os
import threading
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from artifacts.container.artifact import HEADER_BYTES, MAGICS
from artifacts.container.directory_v2 import Identity, check_geometry, encode_directory
from artifacts.container.json_reader import MAX_DIRECTORY_BYTES
from artifacts.container.output import OutputFile, require_space
from artifacts.container.schema import (
    METADATA_ALIGNMENT,
    ObjectPlan,
    StoredObject,
    TensorObject,
    place,
)
from artifacts.errors import FormatError, LayoutError, OutputError, quoted
from artifacts.formats import Array
from artifacts.layouts import LAYOUTS, align_up

FLUSH_BYTES = 2 << 30
MAGIC_OF_VERSION = {version: magic for magic, version in MAGICS.items()}


class Coverage:
    """Which bytes of one object were written: disjoint intervals, merged where they touch."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def add(self, begin: int, end: int) -> bool:
        """Record [begin, end); False, and nothing recorded, when a byte of it was written before."""
        at = bisect_right(self._starts, begin)
        if (at > 0 and self._ends[at - 1] > begin) or (at < len(self._starts) and self._starts[at] < end):
            return False
        joins_left = at > 0 and self._ends[at - 1] == begin
        joins_right = at < len(self._starts) and self._starts[at] == end
        if joins_left and joins_right:
            self._ends[at - 1] = self._ends.pop(at)
            self._starts.pop(at)
        elif joins_left:
            self._ends[at - 1] = end
        elif joins_right:
            self._starts[at] = begin
        else:
            self._starts.insert(at, begin)
            self._ends.insert(at, end)
        return True

    def first_missing(self, size: int) -> int | None:
        """The first byte below `size` that was not written."""
        if not self._starts or self._starts[0] > 0:
            return 0
        return self._ends[0] if self._ends[0] < size else None


class PayloadWriter:
    """Planned objects over the payload segments of one or more files under construction.

    `segments`: (file, file offset, bytes) in payload order. `sparse`: objects need not be written; what is missing
    stays a hole that reads as zeros.
    """

    def __init__(
        self, objects: Sequence[StoredObject], segments: Sequence[tuple[OutputFile, int, int]], sparse: bool
    ) -> None:
        self.objects: Mapping[str, StoredObject] = {entry.name: entry for entry in objects}
        self._order = list(objects)
        self._offsets = [entry.offset for entry in objects]
        self._segments = segments
        self._starts = [0]
        for _, _, length in segments:
            self._starts.append(self._starts[-1] + length)
        self._coverage = {name: Coverage() for name in self.objects}
        self._lock = threading.Lock()
        self._unflushed = 0
        self._sparse = sparse
        self._open = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.commit()
        else:
            self.abort()

    def write_at(self, name: str, offset: int, data: Any) -> None:
        """Write bytes-like `data` at `offset` inside object `name`.

        Errors: OutputError for an unknown object, bytes outside the object or written twice, a full disk.
        """
        entry = self._entry(name)
        view = memoryview(data).cast("B")
        if not view:
            return
        self._record(entry, offset, offset + len(view))
        self._write(entry.offset + offset, view)

    def write(self, name: str, data: Any) -> None:
        """Write a whole object; the length must be the planned one."""
        entry = self._entry(name)
        view = memoryview(data).cast("B")
        if len(view) != entry.bytes:
            raise OutputError(f"object {quoted(name)}: {len(view)} bytes given, {entry.bytes} are planned")
        self.write_at(name, 0, view)

    def write_rows(self, name: str, r0: int, fields: Mapping[str, Array]) -> None:
        """Write logical rows r0 .. r0+n of a tensor from the arrays of its format (see Layout.pack_rows).

        Blocks may come in any order. Gaps between planes, which are zero, and what every block repeats (the NVFP4
        divisor) belong to the block with r0 = 0. Errors: as write_at, LayoutError for fields of the wrong shape.
        """
        entry = self._entry(name)
        if not isinstance(entry, TensorObject):
            raise OutputError(f"object {quoted(name)} is a resource; it has no rows")
        layout = LAYOUTS[entry.layout]
        try:
            planes = layout.planes(entry.format, entry.shape)
            pieces = layout.pack_rows(entry.format, entry.shape, r0, fields)
        except (FormatError, LayoutError) as error:
            raise type(error)(f"object {quoted(name)}: {error}") from None
        if r0 == 0:
            for offset, length in layout.gaps(entry.format, entry.shape):
                self._record(entry, offset, offset + length)
        for plane, (offset, data) in zip(planes, pieces, strict=True):
            if plane.unit_rows or r0 == 0:
                self.write_at(name, offset, data)

    def hand_out(self, name: str, begin: int, end: int) -> tuple[Path, int]:
        """Count bytes [begin, end) of an object as written, and say where another process has to write them: a file and
        the offset of `begin` in it. Errors: as write_at, OutputError when the bytes lie in two files.
        """
        entry = self._entry(name)
        offset = entry.offset + begin
        index = bisect_right(self._starts, offset) - 1
        file, base, length = self._segments[index]
        within = offset - self._starts[index]
        if within + end - begin > length:
            raise OutputError(f"object {quoted(name)}: bytes [{begin}, {end}) lie in two files")
        self._record(entry, begin, end)
        return file.temporary, base + within

    def write_payload(self, offset: int, data: Any) -> None:
        """Write raw payload bytes, gaps included; the parts of objects that they hold count as written.

        Errors: as write_at.
        """
        self._check_open()
        view = memoryview(data).cast("B")
        end = offset + len(view)
        for entry in self._order[max(0, bisect_right(self._offsets, offset) - 1) :]:
            if entry.offset >= end:
                break
            begin, stop = max(offset, entry.offset), min(end, entry.offset + entry.bytes)
            if begin < stop:
                self._record(entry, begin - entry.offset, stop - entry.offset)
        self._write(offset, view)

    def _check_open(self) -> None:
        if not self._open:
            raise OutputError("the writer is closed")

    def _entry(self, name: str) -> StoredObject:
        self._check_open()
        entry = self.objects.get(name)
        if entry is None:
            raise OutputError(f"object {quoted(name)} is not in the plan")
        return entry

    def _record(self, entry: StoredObject, begin: int, end: int) -> None:
        what = f"object {quoted(entry.name)}"
        if begin < 0 or end > entry.bytes:
            raise OutputError(f"{what}: bytes [{begin}, {end}) leave its {entry.bytes} planned bytes")
        with self._lock:
            if not self._coverage[entry.name].add(begin, end):
                raise OutputError(f"{what}: bytes [{begin}, {end}) overlap bytes that were written before")
            self._unflushed += end - begin
            if self._unflushed >= FLUSH_BYTES:  # the device works while the next bytes are made
                self._unflushed = 0
                for file, _, _ in self._segments:
                    file.start_flushing()

    def _write(self, offset: int, view: memoryview) -> None:
        """Write at a logical payload offset, across files where needed."""
        index = bisect_right(self._starts, offset) - 1
        while view:
            file, base, length = self._segments[index]
            within = offset - self._starts[index]
            piece = view[: length - within]
            file.write_at(base + within, piece)
            view = view[len(piece) :]
            offset += len(piece)
            index += 1

    def commit(self) -> None:
        """Check coverage, flush, publish continuation parts first and the entry last. A second call does nothing."""
        if not self._open:
            return
        try:
            if not self._sparse:
                for name, entry in self.objects.items():
                    missing = self._coverage[name].first_missing(entry.bytes)
                    if missing is not None:
                        raise OutputError(f"object {quoted(name)}: byte {missing} of {entry.bytes} was never written")
            for file, _, _ in self._segments:
                file.flush()
            for file, _, _ in reversed(self._segments):
                file.publish()
        except BaseException:
            self.abort()
            raise
        self._open = False

    def abort(self) -> None:
        """Remove everything that was written. Does nothing after a commit."""
        if self._open:
            self._open = False
            for file, _, _ in self._segments:
                file.discard()


class ArtifactWriter(PayloadWriter):
    """Writes a version 2 artifact (version 1 when `identity.weights_id` is None) of planned or already placed objects.

    Errors: OutputError when `path` exists and `overwrite` is false, when the disk is too small, or for an empty plan;
    DirectoryError, FormatError, LayoutError, GeometryError when the plan itself breaks a rule.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        identity: Identity,
        objects: Iterable[ObjectPlan | StoredObject],
        *,
        overwrite: bool = False,
        sparse: bool = False,
    ) -> None:
        placed = _placed(objects)
        if not placed:
            raise OutputError("an artifact needs at least one object")
        span = placed[-1].offset + placed[-1].bytes
        check_geometry(placed, span)
        raw = encode_directory(identity, placed)
        if len(raw) > MAX_DIRECTORY_BYTES:
            raise OutputError(f"the directory takes {len(raw)} bytes; at most {MAX_DIRECTORY_BYTES} are allowed")
        version = 1 if identity.weights_id is None else 2
        start = HEADER_BYTES[version]
        payload_start = align_up(start + len(raw), METADATA_ALIGNMENT)
        target = Path(path)
        if not sparse:
            require_space(target.parent, payload_start + span)
        file = OutputFile(target, payload_start + span, overwrite)
        super().__init__(placed, [(file, payload_start, span)], sparse)
        try:
            file.write_at(0, memoryview(MAGIC_OF_VERSION[version] + len(raw).to_bytes(8, "little") + raw))
        except BaseException:
            self.abort()
            raise


def _placed(objects: Iterable[ObjectPlan | StoredObject]) -> list[StoredObject]:
    plans: list[ObjectPlan] = []
    placed: list[StoredObject] = []
    for entry in objects:
        if isinstance(entry, ObjectPlan):
            plans.append(entry)
        else:
            placed.append(entry)
    if plans and placed:
        raise OutputError("objects are either all planned or all placed")
    return place(plans) if plans else placed


__all__ = ["ArtifactWriter", "Coverage", "Identity", "PayloadWriter"]
