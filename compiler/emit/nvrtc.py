"""Compile one CUDA C++ source to a cubin with NVRTC and read the resource report.

Options: CUDA Toolkit documentation, NVRTC "Supported Compile Options". No toolkit is needed: the device headers are
ours and need no system header.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from compiler.emit.render import INCLUDE_DIR


class CompileError(Exception):
    """NVRTC refused a source; the message names the kernel and NVRTC's first error line."""


@dataclass(frozen=True)
class Resources:
    """Per-thread and per-block resources of a kernel, from the ``--ptxas-options=-v`` log. Bytes, but registers."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    static_smem: int
    local: int = 0


@dataclass(frozen=True)
class Cubin:
    image: bytes
    resources: Resources
    log: str


@cache
def version() -> str:
    """NVRTC version as ``13.0``; raises CompileError when the library cannot be loaded."""
    try:
        from cuda.bindings import nvrtc
        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError, OSError) as error:
        raise CompileError(f"NVRTC cannot be loaded ({error}); pip install nvidia-cuda-nvrtc==13.0.88") from error
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"NVRTC gives no version: {status.name}")
    return f"{major}.{minor}"


def options(arch: str) -> tuple[str, ...]:
    """Compile options; part of the cache key. The include directory is passed apart, its content is hashed."""
    return (f"--gpu-architecture={arch}", "--std=c++20", "-default-device", "--ptxas-options=-v")


def _number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    return int(found[1]) if found else 0


def parse_resources(log: str) -> Resources:
    """Read registers, stack frame, spills and static shared memory from ptxas' verbose report."""
    return Resources(
        registers=_number(r"Used (\d+) registers", log),
        stack=_number(r"(\d+) bytes stack frame", log),
        spill_stores=_number(r"(\d+) bytes spill stores", log),
        spill_loads=_number(r"(\d+) bytes spill loads", log),
        static_smem=_number(r"(\d+) bytes smem", log),
        local=_number(r"(\d+) bytes lmem", log),
    )


def compile_source(entry: str, source: str, arch: str) -> Cubin:
    """Compile ``source`` (one extern "C" kernel ``entry``) for ``arch``. Raises CompileError."""
    version()
    from cuda.bindings import nvrtc

    status, program = nvrtc.nvrtcCreateProgram(source.encode(), f"{entry}.cu".encode(), 0, [], [])
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise CompileError(f"kernel {entry}: NVRTC cannot create a program: {status.name}")
    try:
        flags = [option.encode() for option in (*options(arch), f"-I{INCLUDE_DIR}")]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)
        _, size = nvrtc.nvrtcGetProgramLogSize(program)
        buffer = bytearray(size)
        nvrtc.nvrtcGetProgramLog(program, buffer)
        log = bytes(buffer).rstrip(b"\0").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            lines = [line for line in log.splitlines() if "error" in line]
            raise CompileError(f"kernel {entry} for {arch}: {lines[0] if lines else status.name}\n{log}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        image = bytearray(size)
        nvrtc.nvrtcGetCUBIN(program, image)
        return Cubin(bytes(image), parse_resources(log), log)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
