"""The card that all tests stand for: ``NINFERC_TEST_AS=rtx4090`` gives kernels that card's capability set, on whatever runs
them (a GPU under ``-m gpu``, else the emulator). Without it, the device's own."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from artifacts import Artifact
from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import CARDS, caps, card_as
from compiler.emit.cache import default_cache_dir, ensure_private_dir
from compiler.kernels.spec import DeviceCaps
from compiler.program.model import Program

CARD = os.environ.get("NINFERC_TEST_AS", "")
STALE = 300  # seconds after which a lock belongs to a process that was killed
CONSUMER = ("rtx5090", "rtx4090", "rtx3090", "rtx2080ti", "rtx5060ti")


def target(physical: DeviceCaps, sms: int | None = None) -> DeviceCaps:
    """Capabilities to choose kernels by on a ``physical`` device; ``sms`` replaces the number of multiprocessors."""
    found = card_as(CARD, physical) if CARD else physical
    return found if sms is None else replace(found, sms=sms)


def emulated(sms: int | None = None) -> DeviceCaps:
    """The same where no device is: the card itself, an sm_90a one by default."""
    return target(caps(CARDS[CARD][0] if CARD else "sm_90a"), sms)


def _ended(process: int) -> bool:
    """Whether a process that held the lock was killed; where that cannot be asked without harm, STALE decides."""
    if os.name == "nt":
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


@contextmanager
def alone() -> Iterator[None]:
    """One test process at a time: compiling takes all cores, and what one has compiled the others find in the cache."""
    path = ensure_private_dir(default_cache_dir()) / "tests.lock"
    while True:
        try:
            with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY), "w") as file:
                file.write(str(os.getpid()))
            break
        except FileExistsError:
            with suppress(OSError, ValueError):  # it is gone, or not written yet
                if time.time() - path.stat().st_mtime > STALE or _ended(int(path.read_text())):
                    path.unlink()
            time.sleep(0.05)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def compiled(artifact: Artifact, physical: DeviceCaps, options: CompileOptions, sms: int | None = None) -> Program:
    """A program for the GPU at hand, as the card that the tests stand for."""
    with alone():
        return compile_program(artifact, target(physical, sms), options)
