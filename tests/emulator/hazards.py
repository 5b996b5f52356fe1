"""What the engine's race checker found, with the lines of the kernel's source."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOM = 1024  # of the engine's list
AGENT = 0xFFFFFFFF
# Headers whose functions are the accesses themselves: their callers' lines are what a reader looks for.
ACCESSES = ("vec.cuh", "async.cuh", "mma.cuh", "ninferc_emulator.h", "??")


class _Record(ctypes.Structure):  # Hazard in engine/runtime.h
    _fields_ = [(name, ctypes.c_uint) for name in ("kind", "byte", "thread", "other", "place", "other_place", "count")] + [
        (name, ctypes.c_bool) for name in ("dynamic", "same_warp", "equal")]  # fmt: skip


@dataclass(frozen=True)
class Hazard:
    """Two accesses of shared memory that nothing orders, found ``count`` times (in words) at these places.

    ``kind``: RAW (a load after a store), WAR, WAW; ``equal``: the stores are of the same values. ``byte`` of the static or the
    dynamic shared memory. ``thread`` accesses after ``other``, which is "mbarrier" for what completes on one. Places are lines,
    innermost first, then those that call it."""

    kernel: str
    kind: str
    equal: bool
    same_warp: bool
    memory: str
    byte: int
    thread: int
    other: int | str
    place: str
    other_place: str
    count: int

    def __str__(self) -> str:
        kind = f"{self.kind}{' of equal values' if self.equal else ''} {'in a warp' if self.same_warp else 'across warps'}"
        return (f"{self.kernel}: {kind}, byte {self.byte} of {self.memory} shared memory, {self.count} times: "
                f"thread {self.thread} at {self.place} after {self.other} at {self.other_place}")  # fmt: skip


@cache
def _place(path: Path, offset: int) -> str:
    """The line of an offset in a kernel's object and its callers' lines; the offset where nothing reads line tables."""
    program = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if program is None:
        return f"offset {offset:#x}"
    command = [program, "-s", "-i", "-e", str(path), hex(offset)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return " < ".join(line.split(" (")[0] for line in lines if not line.startswith(ACCESSES)) or f"offset {offset:#x}"


def of_last_launch(engine: ctypes.CDLL, kernel: str, path: Path) -> list[Hazard]:
    """What the last launch has found in a kernel, whose object is at ``path``."""
    records = (_Record * ROOM)()
    count = min(engine.ninferc_emulator_hazards(records, ROOM), ROOM)
    return [
        Hazard(kernel, ("RAW", "WAR", "WAW")[r.kind], r.equal, r.same_warp, "dynamic" if r.dynamic else "static",
               r.byte, r.thread, "mbarrier" if r.other == AGENT else r.other, _place(path, r.place),
               _place(path, r.other_place), r.count)
        for r in records[:count]
    ]  # fmt: skip
