"""Replacing the metadata of a large artifact in place, so that a crash at any write can be recovered from.

Only `[0, P)` changes; payload bytes are never touched and the file keeps its length. Before the first write the old
`[0, P)` is saved beside the file under a complete backup. The writes are ordered so that until the last one the file
does not read as an artifact: nobody mistakes a torn file for a sound one. Until then `artifacts.open` reads the saved
directory instead, so that the file is at every moment the old one or the new one; `recover` puts the old bytes back.
"""

import os
from pathlib import Path

from artifacts.container.artifact import read_backup
from artifacts.container.output import output_error, sync_directory
from artifacts.errors import ArtifactError, FramingError, OutputError, quoted, quoted_path

PREFIX_BYTES = 16


class Disk:
    """The operations that change the disk, one method each, every one durable when it returns.

    Tests replace it to stop after any operation, or in the middle of one.
    """

    def create(self, path: Path, data: bytes) -> None:
        """A new file with exactly these bytes; an existing file of that name is replaced."""
        with open(path, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def rename(self, old: Path, new: Path) -> None:
        """Atomic rename onto a name that is free."""
        os.rename(old, new)
        sync_directory(new.parent)

    def overwrite(self, path: Path, offset: int, data: bytes) -> None:
        """Replace bytes inside an existing file."""
        with open(path, "r+b") as file:
            file.seek(offset)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def remove(self, path: Path) -> None:
        path.unlink()
        sync_directory(path.parent)


def read_range(path: Path, offset: int, length: int) -> bytes:
    """Bytes of a file, fewer at its end. Errors: FramingError when it cannot be read."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(length)
    except OSError as error:
        raise FramingError(f"{quoted_path(path)}: {error.strerror or error}") from None


class Rewrite:
    """One in-place rewrite of the metadata of `path`, with the backup `path + suffix`."""

    def __init__(self, path: Path, suffix: str, disk: Disk | None = None) -> None:
        self.path = path
        self.backup = path.with_name(path.name + suffix)
        self._partial = path.with_name(path.name + suffix + ".partial")
        self._disk = Disk() if disk is None else disk

    def backup_version(self) -> int | None:
        """The container version that a complete backup of this file holds; None when there is none.

        Errors: OutputError when something else has the backup's name.
        """
        if not os.path.lexists(self.backup):
            return None
        try:
            return read_backup(self.backup, self.path.stat().st_size)[0].version
        except ArtifactError as error:
            what = f"{quoted_path(self.backup)} is not a backup of {quoted(self.path.name)}"
            raise OutputError(f"{what} ({error}); move it away") from None

    def recover(self) -> None:
        """Put the saved bytes back and remove the backup."""
        saved = read_range(self.backup, 0, self.backup.stat().st_size)
        self._replace(saved)
        self._disk.remove(self.backup)

    def discard_backup(self) -> None:
        """Remove a backup that is no longer needed."""
        self._disk.remove(self.backup)

    def apply(self, header: bytes) -> None:
        """Replace `[0, P)`; `header` must be exactly as long. Keeps the backup until `discard_backup`.

        Errors: OutputError for the operating system's refusal; the backup then stays and `recover` works.
        """
        try:
            old = read_range(self.path, 0, len(header))
            self._disk.create(self._partial, old)
            self._disk.rename(self._partial, self.backup)
            self._replace(header)
        except OSError as error:
            raise output_error(self.path, error) from None

    def _replace(self, header: bytes) -> None:
        """The prefix is made unreadable first and becomes valid last, in one sector, after everything behind it."""
        prefix, rest = header[:PREFIX_BYTES], header[PREFIX_BYTES:]
        self._disk.overwrite(self.path, 8, bytes(8))  # a directory of length 0 is an error in every version
        self._disk.overwrite(self.path, PREFIX_BYTES, rest)
        self._disk.overwrite(self.path, 0, prefix)


def header_bytes(magic: bytes, directory: bytes, payload_start: int) -> bytes:
    """`[0, P)` of a version 1 or 2 file: prefix, JSON and zeros."""
    return (magic + len(directory).to_bytes(8, "little") + directory).ljust(payload_start, b"\0")
