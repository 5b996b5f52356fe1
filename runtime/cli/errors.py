"""Exit codes and the one place where exceptions become one line on stderr (decision 13 of the design).

Classes are looked up by name, so that reporting an error imports nothing and start-up stays fast.
"""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Callable

from runtime.cli.io import silence

OK, INPUT, USAGE, DEVICE, INTERRUPTED = 0, 1, 2, 3, 130


class InputError(Exception):
    """A file or value that the user gave cannot be used; the message is one line."""


class UsageError(Exception):
    """Options that do not fit together or lie outside what is allowed; the message is one line."""


CODES: dict[str, int] = {
    "runtime.cli.errors.InputError": INPUT,
    "runtime.cli.errors.UsageError": USAGE,
    "artifacts.errors.ArtifactError": INPUT,
    "compiler.driver.CompileOptionError": USAGE,
    "compiler.emit.arch.ArchError": USAGE,
    "compiler.emit.cache.CacheError": INPUT,
    "compiler.emit.nvrtc.CompileError": INPUT,
    "compiler.emit.render.RenderError": INPUT,
    "compiler.ir.types.IRError": INPUT,
    "compiler.model.spec.ModelError": INPUT,
    "compiler.profiles.ProfileError": INPUT,
    "compiler.program.io.ProgramError": INPUT,
    "runtime.frontend.errors.OptionError": USAGE,
    "runtime.frontend.errors.FrontendError": INPUT,
    "runtime.session.RequestError": INPUT,
    "runtime.session.EngineFault": DEVICE,
    "runtime.cuda.driver.DeviceError": DEVICE,
    "runtime.lockstep.RankMismatch": DEVICE,
    "builtins.KeyboardInterrupt": INTERRUPTED,
    "builtins.OSError": INPUT,
    "builtins.MemoryError": INPUT,
}
"""Exit code by the full name of an error class; of several that fit, the most derived one counts."""


def exit_code(error: BaseException) -> int | None:
    """Exit code of a known error, None for a defect of the program itself."""
    for kind in type(error).__mro__:
        code = CODES.get(f"{kind.__module__}.{kind.__qualname__}")
        if code is not None:
            return code
    return None


def message(error: BaseException) -> str:
    """One line for stderr."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    if isinstance(error, MemoryError):
        return "out of host memory"
    if isinstance(error, BrokenPipeError) and error.filename is None:
        return "stdout was closed by its reader; the rest of the output is lost"
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        if error.filename is not None:
            return f"{error.filename}: {reason}"
        return f"stdout: {reason}" if error.errno == errno.ENOSPC else reason  # files name themselves, print does not
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def report(error: BaseException) -> int:
    """Print the error as one line on stderr and return the exit code. A defect keeps its traceback."""
    code = exit_code(error)
    if code is None:
        traceback.print_exception(error)
        return INPUT
    if isinstance(error, OSError) and error.errno in (errno.EPIPE, errno.ENOSPC) and sys.stdout is not None:
        silence(sys.stdout)  # what is still buffered can only fail again
    print(f"ninferc: {message(error)}", file=sys.stderr)
    return code


def guard(function: Callable[[], int | None]) -> int:
    """Run ``function()``; returns its exit code or that of its error."""
    try:
        return function() or OK
    except (Exception, KeyboardInterrupt) as error:
        return report(error)
