"""Output files that appear complete under their name or not at all, and input files with a size limit."""

from __future__ import annotations

import os
import secrets
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

from runtime.cli.errors import InputError


class AtomicFile:
    """A file under construction beside ``path``, as a context manager.

    It replaces ``path`` when the block ends well and vanishes when it does not, or when an interrupt comes before the block
    has begun. Raises InputError naming ``path``: missing folder, no rights, full disk, not a regular file.
    """

    def __init__(self, path: Path) -> None:
        if os.path.lexists(path) and not path.is_file():
            raise InputError(f"{path} is not a regular file; name another one with the option")
        self.path = path
        self._temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
        self._remove = weakref.finalize(self, self._temporary.unlink, missing_ok=True)  # before there is a file to be left
        try:
            self._file = open(self._temporary, "xb", opener=_private)  # noqa: SIM115  closed by __exit__
        except OSError as error:
            raise self._error(error) from error

    def _error(self, error: OSError) -> InputError:
        return InputError(f"{self.path}: {error.strerror or error}; nothing was written")

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``. Raises InputError when it does not fit the disk."""
        try:
            self._file.write(data)
        except OSError as error:
            raise self._error(error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            try:
                if kind is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            finally:
                self._file.close()
            if kind is None:
                os.chmod(self._temporary, 0o666 & ~_umask())
                os.replace(self._temporary, self.path)
        except OSError as problem:
            if kind is None:  # else the error on its way out says more
                raise self._error(problem) from problem
        finally:
            self._remove()


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current


def read_bytes(path: Path, limit: int, option: str) -> bytes:
    """The bytes of a regular file of at most ``limit`` bytes. Raises InputError naming the option and the file."""
    try:
        if not path.is_file():
            raise InputError(f"{option} {path}: {'not a regular file' if path.exists() else 'no such file'}")
        size = path.stat().st_size
        if size > limit:
            raise InputError(f"{option} {path}: {size} bytes; at most {limit} are allowed")
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{option} {path}: {error.strerror or error}") from error
