"""Files that appear complete or not at all: temporary beside the target, published under the final name at the end."""

import errno
import os
import secrets
import shutil
import threading
from pathlib import Path

from artifacts.errors import OutputError, quoted_path


def output_error(path: Path, error: OSError) -> OutputError:
    """One line for an operating system error on an output path."""
    return OutputError(f"{quoted_path(path)}: {error.strerror or error}")


def require_space(directory: Path, needed: int) -> None:
    """Errors: OutputError when the directory is missing or its file system has fewer than `needed` bytes free."""
    try:
        free = shutil.disk_usage(directory).free
    except OSError as error:
        raise output_error(directory, error) from None
    if free < needed:
        raise OutputError(f"{quoted_path(directory)}: {needed} bytes are needed, {free} are free")


def sync_directory(directory: Path) -> None:
    """Make a rename durable. Windows has no directory handles to flush; its file system journals the rename."""
    if os.name == "nt":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_all(handle: int, offset: int, data: memoryview) -> None:
    """Write all of `data` (bytes, flat) at an offset of an open file. Where writes share one file position (Windows), the
    caller keeps them apart. Errors: OSError."""
    while data:
        if hasattr(os, "pwrite"):
            written = os.pwrite(handle, data, offset)
        else:
            os.lseek(handle, offset, os.SEEK_SET)
            written = os.write(handle, data)
        data = data[written:]
        offset += written


class OutputFile:
    """A file under construction beside `path`. `write_at` may be called from several threads.

    `publish` gives it its final name and never replaces an existing file unless `overwrite`; `discard` removes it.
    """

    def __init__(self, path: Path, size: int, overwrite: bool = False) -> None:
        self.path = path
        self.size = size
        self.overwrite = overwrite
        if not overwrite and os.path.lexists(path):
            raise OutputError(f"{quoted_path(path)} exists already")
        self._lock = threading.Lock()
        self._flusher: threading.Thread | None = None
        self._temporary = path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial"
        flags = os.O_CREAT | os.O_EXCL | os.O_RDWR | getattr(os, "O_BINARY", 0)
        try:
            self._handle = os.open(self._temporary, flags, 0o666)
        except OSError as error:
            raise output_error(path, error) from None
        self._open = True
        self.published = False
        try:
            os.truncate(self._handle if os.truncate in os.supports_fd else self._temporary, size)
        except OSError as error:
            self.discard()
            raise output_error(path, error) from None

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of `data` (bytes, flat) at a file offset. Errors: OutputError (disk full, outside the file)."""
        if offset < 0 or offset + len(data) > self.size:
            span = f"[{offset}, {offset + len(data)})"
            raise OutputError(f"{quoted_path(self.path)}: write of {span} leaves the planned {self.size} bytes")
        try:
            if hasattr(os, "pwrite"):
                write_all(self._handle, offset, data)
            else:
                with self._lock:
                    write_all(self._handle, offset, data)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise OutputError(f"{quoted_path(self.path)}: no space left on the device") from None
            raise output_error(self.path, error) from None

    @property
    def temporary(self) -> Path:
        """Where the bytes lie until the file is published, for other processes that write some of them."""
        return self._temporary

    def start_flushing(self) -> None:
        """Let the device begin with what was written so far, in the background; `flush` waits for everything."""
        if self._open and (self._flusher is None or not self._flusher.is_alive()):
            self._flusher = threading.Thread(target=self._sync, daemon=True)
            self._flusher.start()

    def _sync(self) -> None:
        try:
            os.fsync(self._handle)
        except OSError:
            pass  # `flush` meets it again and reports it

    def flush(self) -> None:
        """Force the bytes to the device and close the handle; the file keeps its temporary name."""
        if self._open:
            if self._flusher is not None:
                self._flusher.join()
            try:
                os.fsync(self._handle)
            except OSError as error:
                raise output_error(self.path, error) from None
            finally:
                os.close(self._handle)
                self._open = False

    def publish(self) -> None:
        """Give the file its final name. Errors: OutputError when the name is taken."""
        self.flush()
        try:
            if self.overwrite:
                os.replace(self._temporary, self.path)
            else:
                self._link()
            self.published = True
            sync_directory(self.path.parent)
        except FileExistsError:
            raise OutputError(f"{quoted_path(self.path)} exists already") from None
        except OSError as error:
            raise output_error(self.path, error) from None

    def _link(self) -> None:
        try:
            os.link(self._temporary, self.path)
        except FileExistsError:
            raise
        except OSError:  # a file system without hard links
            if os.path.lexists(self.path):
                raise FileExistsError from None
            os.rename(self._temporary, self.path)
        else:
            os.unlink(self._temporary)

    def discard(self) -> None:
        """Remove the file, under its final name too when this object published it."""
        if self._open:
            if self._flusher is not None:
                self._flusher.join()
            os.close(self._handle)
            self._open = False
        (self.path if self.published else self._temporary).unlink(missing_ok=True)
