"""`PayloadReader`: the bytes that the mapping shows, read into memory of the caller; files that change meanwhile."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import artifacts
from artifacts.container.payload import MappedFile, PayloadReader
from artifacts.errors import FramingError, GeometryError, PartError, PayloadError
from tests.container.samples import write_v2, write_v3


@pytest.fixture
def split(tmp_path: Path) -> Path:
    """A version 3 artifact of several files."""
    return write_v3(tmp_path / "v3.ninfer", write_v2(tmp_path / "v2.ninfer"), limit=65536)


def read(reader: PayloadReader, offset: int, length: int) -> np.ndarray[Any, Any]:
    out = np.full(length, 0xA5, np.uint8)
    reader.read_into(offset, out)
    return out


@pytest.mark.parametrize("most", [None, 7, 4093])
def test_same_bytes_as_the_mapping(split: Path, most: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Across the joints of files, in any order, also where the system gives fewer bytes than asked for."""
    if most is not None:
        plain = io.FileIO.readinto

        class Short(io.FileIO):
            def readinto(self, buffer: Any) -> int | None:
                return plain(self, memoryview(buffer)[:most])

        monkeypatch.setattr("artifacts.container.payload.io.FileIO", Short)
    with artifacts.open(split) as artifact:
        whole = artifact.read(0, artifact.payload_bytes)
        reader = artifact.reader()
        joints = np.cumsum([file.payload_bytes for file in artifact.files])[:-1]
        assert len(joints) > 1
        cuts = [(0, whole.size), (whole.size, 0), (0, 1), (whole.size - 1, 1), (5000, 3), (5003, 9), (300, 7)]
        cuts += [(int(joint) - 11, 23) for joint in joints] + [(int(joints[0]) - 3, int(joints[1] - joints[0]) + 9)]
        for offset, length in cuts:
            assert np.array_equal(read(reader, offset, length), whole[offset : offset + length]), (offset, length)
            reader.check(offset, length)
        with pytest.raises(GeometryError, match="leaves the"):
            read(reader, whole.size - 1, 2)
        reader.close()


@pytest.mark.skipif(os.name == "nt", reason="Windows does not cut files that are mapped")
def test_a_file_that_is_cut_while_it_is_open(split: Path) -> None:
    with artifacts.open(split) as artifact:
        reader = artifact.reader()
        start = artifact.files[0].payload_bytes
        part = split.with_name(str(artifact.files[1].path))
        size = part.stat().st_size
        assert read(reader, start + 10, 4).size == 4
        os.truncate(part, size - 100)
        message = rf"part-0001': the file ends at byte {size - 100}, {size} are required; it was cut"
        for broken in (reader.check, lambda offset, length: read(reader, offset, length)):
            with pytest.raises(PayloadError, match=message):
                broken(start, artifact.files[1].payload_bytes)
        assert read(reader, start + 10, 4).size == 4  # a reader that failed still knows where it stands
        assert np.array_equal(read(reader, 50, 4), artifact.read(50, 4))
        reader.close()


@pytest.mark.skipif(os.name == "nt", reason="Windows does not replace files that are mapped")
def test_a_file_that_is_replaced_while_it_is_open(split: Path, tmp_path: Path) -> None:
    with artifacts.open(split) as artifact:
        shutil.copy(split, tmp_path / "new")
        os.replace(tmp_path / "new", split)
        with pytest.raises(FramingError, match=r"v3.ninfer': the file was replaced while it was open"):
            read(artifact.reader(), 0, 1)
        split.unlink()
        with pytest.raises(FramingError, match=r"v3.ninfer': No such file"):
            read(artifact.reader(), 0, 1)


def test_a_device_that_cannot_be_read(split: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names the file, and the next read begins where it was asked to."""
    with artifacts.open(split) as artifact:
        reader = artifact.reader()
        read(reader, 100, 10)
        handle = reader._handles[0]
        failing = type("Failing", (), {"seek": handle.seek, "fileno": handle.fileno, "close": handle.close,
                                       "readinto": lambda self, view: os.fstat(-1)})()  # fmt: skip
        reader._handles[0] = failing
        with pytest.raises(PayloadError, match=r"v3.ninfer': Bad file descriptor"):
            read(reader, 7000, 10)
        reader._handles[0] = handle
        assert np.array_equal(read(reader, 110, 10), artifact.read(110, 10))
        reader.close()
        assert handle.closed


def test_a_missing_part_and_a_closed_artifact(split: Path) -> None:
    with artifacts.open(split) as artifact:
        split.with_name(str(artifact.files[1].path)).unlink()
        reader = artifact.reader()
        with pytest.raises(PartError, match="part-0001"):
            read(reader, artifact.files[0].payload_bytes, 1)
        reader.close()
    with pytest.raises(ValueError, match="closed"):
        read(reader, 0, 1)


def test_handles_of_one_file_are_independent(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(range(200)))
    mapped = MappedFile(tmp_path / "file")
    one, two = mapped.reopen(), mapped.reopen()
    one.seek(50)
    assert (one.read(2), two.read(2)) == (b"23", b"\0\1")
    for handle in (one, two):
        handle.close()
    mapped.close()
