"""Runs CUDA C++ kernels on the CPU with CUDA's execution rules.

Each CUDA thread is a fiber; warp collectives, barriers, asynchronous copies and memory bounds are checked.  See
``compile_kernel`` and ``launch``.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import struct
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.emulator import hazards as findings
from tests.emulator import toolchain
from tests.emulator.hazards import Hazard
from tests.emulator.toolchain import CompileError, missing_reason

__all__ = ["CompileError", "DeviceArray", "EmulatorError", "Kernel", "compile_kernel", "compile_module", "launch",
           "missing_reason"]

# Shared memory a block may use, static and dynamic together, in bytes (CUDA C++ Programming Guide, compute capabilities).
SHARED_LIMIT = {750: 65536, 800: 166912, 860: 101376, 870: 166912, 890: 101376, 900: 232448, 1000: 232448, 1030: 232448,
                1100: 232448, 1200: 101376, 1210: 101376}
STATIC_SHARED_LIMIT = 49152


class EmulatorError(Exception):
    """The kernel broke a rule (bounds, barrier, divergence, ...); the message names block, thread and cause."""


class _Launch(ctypes.Structure):
    _fields_ = [("entry", ctypes.c_void_p), ("touch_shared", ctypes.c_void_p), ("arguments", ctypes.c_void_p),
                ("grid", ctypes.c_uint * 3), ("block", ctypes.c_uint * 3), ("dynamic_bytes", ctypes.c_uint),
                ("shared_limit", ctypes.c_uint), ("static_limit", ctypes.c_uint), ("resident", ctypes.c_uint),
                ("require_grid_wait", ctypes.c_uint), ("checked", ctypes.c_uint), ("region_count", ctypes.c_uint),
                ("cluster", ctypes.c_uint),
                ("seed", ctypes.c_ulonglong), ("regions", ctypes.c_void_p), ("limit_seconds", ctypes.c_double)]


class _Region(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_ulonglong), ("end", ctypes.c_ulonglong), ("argument", ctypes.c_int),
                ("flags", ctypes.c_int)]


class _Allocation(ctypes.Structure):
    _fields_ = [("pages", ctypes.c_void_p), ("begin", ctypes.c_void_p), ("page_bytes", ctypes.c_ulonglong)]


@functools.cache
def _engine() -> ctypes.CDLL:
    library = ctypes.CDLL(str(toolchain.runtime_library()), mode=ctypes.RTLD_GLOBAL)
    library.ninferc_emulator_message.restype = ctypes.c_char_p
    library.ninferc_emulator_check_guards.restype = ctypes.c_longlong
    return library


_lock = threading.Lock()  # the engine has one set of state


class DeviceArray:
    """Emulated global memory holding a copy of ``array``, between guard zones.

    Use it when memory must outlive one launch or when kernels read addresses from memory (``address``).  Arrays passed to
    ``launch`` directly are wrapped in one for the time of the launch.
    """

    def __init__(self, array: np.ndarray[Any, Any], *, read_only: bool = False) -> None:
        self.shape, self.dtype, self.nbytes = array.shape, array.dtype, array.nbytes
        self.read_only = read_only
        self._allocation = _Allocation()
        if _engine().ninferc_emulator_allocate(ctypes.c_ulonglong(self.nbytes), ctypes.byref(self._allocation)):
            raise MemoryError(f"cannot allocate {self.nbytes} bytes of emulated memory")
        self.address: int = self._allocation.begin or 0
        contiguous = np.ascontiguousarray(array)
        ctypes.memmove(self.address, contiguous.ctypes.data, self.nbytes)
        if read_only:
            _engine().ninferc_emulator_protect(ctypes.byref(self._allocation))

    def get(self) -> np.ndarray[Any, Any]:
        """A copy of the current content."""
        result = np.empty(self.shape, self.dtype)
        ctypes.memmove(result.ctypes.data, self.address, self.nbytes)
        return result

    def check_guards(self, name: str, argument: int) -> None:
        """Raises EmulatorError when something was written just outside this memory."""
        offset = _engine().ninferc_emulator_check_guards(ctypes.byref(self._allocation), ctypes.c_ulonglong(self.nbytes))
        if offset != -(2**63):
            raise EmulatorError(f"{name}: store out of bounds: byte {offset} of argument {argument}, which has "
                                f"{self.nbytes} bytes")

    def __del__(self) -> None:
        if getattr(self, "address", 0):
            _engine().ninferc_emulator_release(ctypes.byref(self._allocation))
            self.address = 0


@dataclass(frozen=True)
class Kernel:
    """One compiled kernel.  ``parameters``: (code, bytes) each; code is p(ointer), i(nt), u(nsigned), f(loat), s(truct)."""

    name: str
    parameters: tuple[tuple[str, int], ...]
    max_threads: int
    arch: int
    checked: bool
    library: ctypes.CDLL
    path: Path


_KERNEL = re.compile(
    r"NINFERC_KERNEL\s*\(\s*(\w+)\s*,"
    r"|extern\s+\"C\"\s+__global__\s+void\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\("
)


@functools.lru_cache(maxsize=512)
def _load(path: Path) -> ctypes.CDLL:
    _engine()
    return ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)


def compile_module(source: str, defines: Mapping[str, object] | None = None, include_dirs: Sequence[str | Path] = (),
                   *, arch: int = 900, checked: bool | None = None) -> dict[str, Kernel]:
    """Compiles kernel source text; returns its kernels by name.

    Kernels are found by ``NINFERC_KERNEL(name, threads, min_blocks)`` or ``extern "C" __global__ void name(``.  ``arch``
    is what ``NINFERC_ARCH`` reads (750, 800, 860, 890, 900, 1000, 1200).  templates/include is always searched.
    ``checked`` kernels run about ten times slower and report every out-of-bounds access and every race, on shared and on
    global memory, whatever the schedule; the default is the environment variable NINFERC_EMULATOR_CHECKED (0 or 1).
    Raises CompileError.
    """
    if checked is None:
        checked = os.environ.get("NINFERC_EMULATOR_CHECKED", "0") == "1"
    if arch not in SHARED_LIMIT:
        raise ValueError(f"arch {arch} is not one of {sorted(SHARED_LIMIT)}")
    found: dict[str, bool] = {}
    for match in _KERNEL.finditer(re.sub(r"//[^\n]*", "", source)):
        found[match[1] or match[2]] = match[1] is not None
    if not found:
        raise CompileError('the source has no kernel: use NINFERC_KERNEL(name, threads, min_blocks)(...)')
    export = 'extern "C" __attribute__((visibility("default")))'
    text = [f'#line 1 "kernel.cu"\n{source}\n#line 1 "emulator entry"']
    for name, bounded in found.items():
        bounds = f"ninferc_emulator_bounds_{name}()" if bounded else "1024"
        text += [
            f'{export} __attribute__((no_sanitize("thread"))) '
            f"void ninferc_emulator_entry_{name}(void** a) {{ ninferc_emulator::invoke(&{name}, a); }}",
            f"{export} int ninferc_emulator_describe_{name}(char* codes, int* sizes, unsigned* threads) "
            f"{{ *threads = {bounds}; return ninferc_emulator::describe(&{name}, codes, sizes); }}",
        ]
    # Its address makes the loader allocate the thread's copy of the shared variables.
    text.append(f"{export} void* ninferc_emulator_touch() {{ static thread_local char anchor; return &anchor; }}\n")
    path = toolchain.build_kernels("\n".join(text), defines or {}, [Path(p) for p in include_dirs], arch,
                                   checked)
    library = _load(path)
    kernels = {}
    for name in found:
        codes, sizes, threads = ctypes.create_string_buffer(256), (ctypes.c_int * 256)(), ctypes.c_uint()
        count = library[f"ninferc_emulator_describe_{name}"](codes, sizes, ctypes.byref(threads))
        parameters = tuple((chr(codes.raw[i]), sizes[i]) for i in range(count))
        kernels[name] = Kernel(name, parameters, threads.value, arch, checked, library, path)
    return kernels


def compile_kernel(source: str, defines: Mapping[str, object] | None = None, include_dirs: Sequence[str | Path] = (), *,
                   name: str | None = None, arch: int = 900, checked: bool | None = None) -> Kernel:
    """As compile_module, for the one kernel of the source (or the one called ``name``)."""
    kernels = compile_module(source, defines, include_dirs, arch=arch, checked=checked)
    if name is None and len(kernels) == 1:
        return next(iter(kernels.values()))
    if name not in kernels:
        raise CompileError(f"kernel {name!r} is not one of {sorted(kernels)}")
    return kernels[name]


def _scalar(value: Any, code: str, size: int, where: str) -> bytes:
    if isinstance(value, ctypes._SimpleCData):
        value = value.value
    if code == "s":
        if not isinstance(value, bytes) or len(value) != size:
            raise TypeError(f"{where} is a structure: pass {size} bytes")
        return value
    if isinstance(value, np.generic):
        value = value.item()
    if not isinstance(value, (int, float)):
        raise TypeError(f"{where} is a number of {size} bytes, got {type(value).__name__}")
    letters = {"f": {4: "f", 8: "d"}, "i": {1: "b", 2: "h", 4: "i", 8: "q"}, "u": {1: "B", 2: "H", 4: "I", 8: "Q"}}
    if code != "f" and not isinstance(value, int):
        raise TypeError(f"{where} is an integer, got {value!r}")
    try:
        return struct.pack("<" + letters[code][size], value)
    except struct.error as error:
        raise ValueError(f"{where}: {value} does not fit {size} bytes ({code})") from error


class _Memory:
    """The arrays of one launch: arrays that share memory get one allocation, so that aliasing is kept."""

    def __init__(self, arrays: Sequence[tuple[int, np.ndarray[Any, Any]]]) -> None:
        spans = []
        for argument, array in arrays:
            if not array.flags.c_contiguous:
                raise ValueError(f"argument {argument}: arrays must be C-contiguous")
            start = array.ctypes.data
            spans.append((start, start + array.nbytes, argument, array.flags.writeable))
        spans.sort(key=lambda span: (span[0], -span[1]))
        groups: list[list[Any]] = []  # start, end, argument, writable
        for start, end, argument, writable in spans:
            if groups and start < groups[-1][1]:
                group = groups[-1]
                group[1], group[3] = max(group[1], end), group[3] or writable
                group[2] = min(group[2], argument)
            else:
                groups.append([start, end, argument, writable])
        self.groups = []
        for start, end, argument, writable in groups:
            host = np.ctypeslib.as_array(ctypes.cast(start, ctypes.POINTER(ctypes.c_uint8)), shape=(end - start,)) \
                if end > start else np.empty(0, np.uint8)
            self.groups.append((start, end, argument, writable, DeviceArray(host, read_only=not writable)))

    def address(self, array: np.ndarray[Any, Any]) -> int:
        start = int(array.ctypes.data)
        for begin, end, _, _, device in self.groups:
            if begin <= start and start + array.nbytes <= end:
                return device.address + start - int(begin)
        raise AssertionError("array was not registered")

    def copy_back(self) -> None:
        for begin, _, _, writable, device in self.groups:
            if writable:
                ctypes.memmove(begin, device.address, device.nbytes)


def _three(value: int | Sequence[int]) -> tuple[int, int, int]:
    parts = (value,) if isinstance(value, int) else tuple(value)
    if not 1 <= len(parts) <= 3 or any(p < 1 for p in parts):
        raise ValueError(f"grid and block are 1 to 3 positive numbers, got {value!r}")
    x, y, z = (*parts, 1, 1)[:3]
    return x, y, z


def launch(kernel: Kernel, grid: int | Sequence[int], block: int | Sequence[int], args: Sequence[Any],
           smem_bytes: int = 0, schedule_seed: int = 0, *, concurrency: int | str = 1, cluster: int = 1,
           programmatic: bool = False, constants: Sequence[int] = (),
           memory: Sequence[DeviceArray | np.ndarray[Any, Any]] = (),
           limit_seconds: float = 60.0, hazards: list[Hazard] | None = None) -> None:
    """Runs a kernel; writable array arguments are updated in place.

    args           per parameter: a C-contiguous numpy array or DeviceArray or None (pointers), a number, or bytes (structs).
                   Arrays that share memory alias in the kernel too.  A read-only array may not be written.
    smem_bytes     dynamic shared memory
    schedule_seed  0: threads in ascending order, asynchronous copies land at their wait.  Others: random order of blocks,
                   warps and lanes; copies land late (seed % 3 == 0), at once (1) or mixed (2).
    concurrency    blocks alive at once; "grid" for all (kernels whose blocks wait for each other)
    cluster        blocks of a cluster, neighbours in x: they run together
    programmatic   checks the rule of programmatic edges: every block executes grid_dependency_wait, and checked accesses
                   before it touch only the arguments listed (by position) in ``constants``
    memory         further memory the kernel reaches through addresses stored in memory, or that array arguments view
    limit_seconds  processor time after which the launch is stopped
    hazards        takes all hazards of shared memory in a checked kernel, the first of which ends the launch otherwise

    Raises EmulatorError naming block, thread and cause: bounds, misalignment, deadlock, divergence, missing wait.
    """
    grid3, block3 = _three(grid), _three(block)
    threads = block3[0] * block3[1] * block3[2]
    if threads > min(kernel.max_threads, 1024):
        raise EmulatorError(f"kernel {kernel.name}: {threads} threads per block, {kernel.max_threads} are allowed")
    if grid3[1] > 65535 or grid3[2] > 65535:
        raise EmulatorError(f"kernel {kernel.name}: grid {grid3} exceeds 65535 in y or z")
    if not 1 <= cluster <= 16 or grid3[0] % cluster:
        raise EmulatorError(f"kernel {kernel.name}: grid {grid3} does not consist of clusters of {cluster} blocks (at most 16)")
    if len(args) != len(kernel.parameters):
        raise TypeError(f"kernel {kernel.name} takes {len(kernel.parameters)} arguments, got {len(args)}")
    arrays = [(i, a) for i, a in enumerate(args) if isinstance(a, np.ndarray)]
    arrays += [(1000 + i, a) for i, a in enumerate(memory) if isinstance(a, np.ndarray)]
    host = _Memory(arrays)
    devices: list[tuple[int, DeviceArray]] = [(argument, device) for _, _, argument, _, device in host.groups]
    seen: set[int] = set()
    for i, item in [*enumerate(args), *((1000 + j, m) for j, m in enumerate(memory))]:
        if isinstance(item, DeviceArray) and id(item) not in seen:
            seen.add(id(item))
            devices.append((i, item))
    storage = []
    for i, (value, (code, size)) in enumerate(zip(args, kernel.parameters, strict=True)):
        where = f"kernel {kernel.name}, argument {i}"
        if code == "p":
            if value is None:
                address = 0
            elif isinstance(value, np.ndarray):
                address = host.address(value)
            elif isinstance(value, DeviceArray):
                address = value.address
            else:
                raise TypeError(f"{where} is a pointer: pass an array, a DeviceArray or None")
            storage.append(ctypes.create_string_buffer(struct.pack("<Q", address), 8))
        else:
            storage.append(ctypes.create_string_buffer(_scalar(value, code, size, where), max(size, 1)))
    pointers = (ctypes.c_void_p * max(1, len(storage)))(*(ctypes.addressof(s) for s in storage))
    regions = (_Region * max(1, len(devices)))()
    for k, (argument, device) in enumerate(devices):
        flags = (0 if device.read_only else 1) | (2 if argument in constants else 0)
        regions[k] = _Region(device.address, device.address + device.nbytes, argument, flags)
    collect = kernel.checked and hazards is not None
    blocks = grid3[0] * grid3[1] * grid3[2]
    resident = blocks if concurrency == "grid" else int(concurrency)
    request = _Launch(
        ctypes.cast(kernel.library[f"ninferc_emulator_entry_{kernel.name}"], ctypes.c_void_p).value,
        ctypes.cast(kernel.library["ninferc_emulator_touch"], ctypes.c_void_p).value,
        ctypes.addressof(pointers), (ctypes.c_uint * 3)(*grid3), (ctypes.c_uint * 3)(*block3), smem_bytes,
        SHARED_LIMIT[kernel.arch], STATIC_SHARED_LIMIT, max(1, resident), int(programmatic), int(kernel.checked) + int(collect),
        len(devices), cluster,
        schedule_seed, ctypes.addressof(regions), limit_seconds)
    with _lock:
        failed = _engine().ninferc_emulator_run(ctypes.byref(request))
        message = _engine().ninferc_emulator_message().decode(errors="replace") if failed else ""
        found = findings.of_last_launch(_engine(), kernel.name, kernel.path) if collect else []
    host.copy_back()
    if hazards is not None:
        hazards.extend(found)
    if failed:
        raise EmulatorError(f"kernel {kernel.name} (seed {schedule_seed}): {message}")
    for argument, device in devices:
        device.check_guards(f"kernel {kernel.name} (seed {schedule_seed})", argument)
