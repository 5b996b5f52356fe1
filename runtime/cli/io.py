"""The two streams of a command: results on stdout, everything else on stderr, and neither ends in a traceback.

stdout is written as UTF-8 bytes at once, whatever the console's code page is. When its reader is gone (`| head`, a
closed terminal) or its disk is full, `OutputError` says so in one line. stderr never fails a command. Progress bars
need a terminal; a redirected stderr gets plain lines without carriage returns or escape sequences.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable
from enum import IntEnum
from types import TracebackType
from typing import BinaryIO, Protocol, Self, TextIO

INPUT, INTERRUPTED = 1, 130
NAME_WIDTH = 26
"""Columns of the names in summary rows."""
REDRAW_SECONDS = 0.1
MAX_COLUMNS = 120

_GONE = (errno.EPIPE, errno.EINVAL, errno.EBADF, errno.ESHUTDOWN, errno.ENOTCONN)
"""How a missing reader shows: EPIPE on POSIX, EINVAL on Windows, EBADF where the descriptor was never open."""


class OutputError(OSError):
    """stdout cannot be written any more; the message is one line."""


class Output:
    """Results of a command, streamed. `ended` is False after text that lacks its final newline."""

    def __init__(self, stream: BinaryIO | None = None) -> None:
        """stream: where the bytes go; default: the process's stdout."""
        standard: TextIO | None = sys.stdout  # None without a console, e.g. under pythonw
        self._stream = stream if stream is not None else getattr(standard, "buffer", None)
        self.ended = True

    def write(self, text: str) -> None:
        """Writes and flushes text as UTF-8. Raises OutputError."""
        if not text:
            return
        if self._stream is None:
            raise OutputError("stdout is closed; results need an open stdout")
        data = text.encode("utf-8", "replace")
        try:
            self._stream.write(data)
            self._stream.flush()
        except (OSError, ValueError) as error:
            stream, self._stream = self._stream, None
            silence(stream)
            raise OutputError(_reason(error)) from None
        self.ended = text.endswith("\n")

    def end_line(self) -> None:
        """One newline if the text so far lacks it. Raises OutputError."""
        if not self.ended:
            self.write("\n")


def _reason(error: OSError | ValueError) -> str:
    if isinstance(error, ValueError) or error.errno in _GONE:
        return "stdout was closed by its reader; the rest of the output is lost"
    return f"stdout: {error.strerror or error}"


class _HasFileno(Protocol):
    def fileno(self) -> int: ...


def silence(stream: _HasFileno) -> None:
    """Points a broken stream at the null device: the interpreter's own flush at exit then has nothing to complain of."""
    try:
        descriptor = stream.fileno()
        null = os.open(os.devnull, os.O_WRONLY)
        if null != descriptor:  # equal when the descriptor was closed: the null device took its number
            os.dup2(null, descriptor)
            os.close(null)
    except (OSError, ValueError):  # no descriptor at all, or none left
        pass


class Level(IntEnum):
    """How much goes to stderr (``--log-level``): what is said at a level shows at it and at those before it.

    The error line that ends a command is no diagnostic: it shows at every level, alone at ERROR and OFF.
    """

    TRACE = 0  # every kernel, every step
    DEBUG = 1  # where time and memory went
    INFO = 2  # summary rows, reasoning, bars
    WARNING = 3  # what the user may not expect
    ERROR = 4
    OFF = 5


class Diagnostics:
    """stderr: lines, reasoning text, summary rows, and at most one progress bar at a time.

    `interactive` tells whether bars are drawn: stderr is a terminal that moves its cursor, and the level allows them.
    """

    def __init__(self, stream: TextIO | None = None, *, level: Level = Level.INFO,
                 clock: Callable[[], float] = time.monotonic) -> None:  # fmt: skip
        """stream: default the process's stderr; None there (no console) discards everything."""
        self._stream: TextIO | None = stream if stream is not None else sys.stderr
        self.level = level
        self.interactive = self.says(Level.INFO) and _is_terminal(self._stream)
        self._clock = clock
        self._bar: ProgressBar | None = None
        self._ended = True

    def says(self, level: Level) -> bool:
        """Whether something of this level shows."""
        return level >= self.level

    def line(self, text: str, level: Level = Level.INFO) -> None:
        """One line, below any streamed text and above the progress bar."""
        if not self.says(level):
            return
        if level < Level.INFO:
            text = f"{level.name.lower()} {text}"
        if self._bar is not None:
            self._bar.erase()
        self._put(("" if self._ended else "\n") + text.rstrip("\n") + "\n")
        if self._bar is not None:
            self._bar.draw()

    def stream(self, text: str) -> None:
        """Text as it comes, such as reasoning; the next line starts below it."""
        if not self.says(Level.INFO):
            return
        if self._bar is not None:
            self._bar.erase()
        self._put(text)

    def summary(self, name: str, value: object) -> None:
        """A row `summary <name> <value>`, names padded to a column."""
        self.line(f"summary {name:<{NAME_WIDTH}} {' '.join(str(value).split())}")

    def progress(self, label: str, total: int, unit: str = "") -> ProgressBar:
        """A bar from 0 to `total`; use it as a context manager. Nothing is drawn on a redirected stderr."""
        self._bar = ProgressBar(self, label, total, unit)
        return self._bar

    def _put(self, text: str) -> None:
        if self._stream is None or not text:
            return
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):  # nobody reads diagnostics: the command goes on
            silence(self._stream)
            self._stream = None
        self._ended = text.endswith("\n") or text.endswith("\r")


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:  # closed
        return False


def _columns(stream: TextIO | None) -> int:
    """Width for one line; the last column stays free, since writing there wraps on some consoles."""
    try:
        width = os.get_terminal_size(stream.fileno()).columns if stream is not None else 80
    except (OSError, ValueError, AttributeError):
        width = 80
    return min(max(width, 20), MAX_COLUMNS) - 1


class ProgressBar:
    """Progress of one task on the terminal's last line; erased at the end. Made by `Diagnostics.progress`."""

    def __init__(self, owner: Diagnostics, label: str, total: int, unit: str) -> None:
        self._owner = owner
        self.label = label
        self.total = max(total, 0)
        self.unit = unit
        self.done = 0
        self._shown = 0  # characters on the line
        self._next = float("-inf")

    def __enter__(self) -> Self:
        self.draw()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.erase()
        if self._owner._bar is self:
            self._owner._bar = None

    def advance(self, count: int = 1) -> None:
        """`count` more units are done; redraws at most ten times a second."""
        self.done += count
        now = self._owner._clock()
        if now >= self._next:
            self._next = now + REDRAW_SECONDS
            self.draw()

    def text(self, columns: int) -> str:
        """The line as drawn, at most `columns` characters."""
        part = min(self.done / self.total, 1.0) if self.total else 1.0
        tail = f" {part:4.0%} {_amount(self.done, self.unit)} of {_amount(self.total, self.unit)}"
        room = columns - len(self.label) - len(tail) - 3
        if room < 8:
            return f"{self.label}{tail}"[:columns]
        filled = round(part * room)
        return f"{self.label} [{'#' * filled}{'.' * (room - filled)}]{tail}"

    def draw(self) -> None:
        """Draws the bar now, on a terminal only."""
        if not self._owner.interactive:
            return
        if not self._owner._ended:
            self._owner._put("\n")
        line = self.text(_columns(self._owner._stream))
        self._owner._put("\r" + line + " " * (self._shown - len(line)) + "\r")
        self._shown = len(line)

    def erase(self) -> None:
        """Leaves the line empty and the cursor at its start."""
        if self._shown:
            self._owner._put("\r" + " " * self._shown + "\r")
            self._shown = 0


def _amount(count: int, unit: str) -> str:
    if unit != "B":
        return f"{count} {unit}".rstrip()
    size = float(count)
    for prefix in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {prefix}"
        size /= 1024
    return f"{size:.1f} GiB"


def run_main(function: Callable[[], int | None], guard: Callable[[Callable[[], int | None]], int]) -> int:
    """Runs a command to an exit code, with nothing left that could still fail while the interpreter shuts down.

    guard: turns the exceptions of `function` into one line and an exit code (runtime.cli.errors.guard). A second
    interrupt while that happens still gives 130, output that cannot be flushed 1.
    """
    try:
        code = guard(function)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except (OSError, ValueError) as error:  # most likely the error was reported to a stderr that is gone
        Diagnostics().line(f"ninferc: {' '.join(str(error).split())}")
        code = INPUT
    for stream in (sys.stdout, sys.stderr):
        if stream is None or stream.closed:
            continue
        try:
            stream.flush()
        except OSError as error:
            silence(stream)
            if stream is sys.stdout:
                Diagnostics().line(f"ninferc: {_reason(error)}")
                code = code or INPUT
    return code
