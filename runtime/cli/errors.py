"""Exit codes and the one place where exceptions become one line on stderr (decision 13 of the design)."""

from __future__ import annotations

import sys
import traceback
from typing import Any

from artifacts.errors import ArtifactError
from compiler.driver import CompileOptionError
from compiler.emit.arch import ArchError
from compiler.emit.cache import CacheError
from compiler.emit.nvrtc import CompileError
from compiler.emit.render import RenderError
from compiler.ir.types import IRError
from compiler.model import ModelError
from compiler.program.io import ProgramError
from runtime.cuda.driver import DeviceError
from runtime.session import EngineFault, RequestError

OK, INPUT, USAGE, DEVICE, INTERRUPTED = 0, 1, 2, 3, 130


class InputError(ValueError):
    """A file or value that the user gave cannot be used; the message is one line."""


class UsageError(ValueError):
    """Options that do not fit together or lie outside what is allowed; the message is one line."""


_CODES: list[tuple[type[BaseException] | tuple[type[BaseException], ...], int]] = [
    (KeyboardInterrupt, INTERRUPTED),
    ((UsageError, CompileOptionError, ArchError), USAGE),
    ((DeviceError, EngineFault), DEVICE),
    ((InputError, ArtifactError, ModelError, ProgramError, RequestError, CacheError, CompileError, RenderError, IRError), INPUT),
    ((OSError, MemoryError), INPUT),
]


def exit_code(error: BaseException) -> int | None:
    """Exit code of a known error, None for a defect of the program itself."""
    for kinds, code in _CODES:
        if isinstance(error, kinds):
            return code
    return None


def message(error: BaseException) -> str:
    """One line for stderr."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, MemoryError):
        return "out of host memory"
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror or error}"
    return " ".join(str(error).splitlines()[:1]) or type(error).__name__


def report(error: BaseException) -> int:
    """Print the error as one line on stderr and return the exit code. A defect keeps its traceback."""
    code = exit_code(error)
    if code is None:
        traceback.print_exception(error)
        return INPUT
    print(f"ninferc: {message(error)}", file=sys.stderr)
    return code


def guard(function: Any) -> Any:
    """Run ``function()``; returns its exit code or that of its error."""
    try:
        return function() or OK
    except (Exception, KeyboardInterrupt) as error:
        return report(error)
