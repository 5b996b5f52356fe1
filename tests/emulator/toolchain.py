"""Finding a host C++20 compiler and turning kernel sources into cached shared objects."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TEMPLATE_INCLUDE = ROOT / "templates" / "include"
# Contraction, wrapping and type punning as CUDA compilers do them.  No unique symbols: function-local shared memory of
# two kernels must never be merged by the loader.
COMMON_FLAGS = ("-std=c++20", "-O2", "-g0", "-fPIC", "-w", "-march=native", "-ffp-contract=fast", "-fno-math-errno",
                "-fno-strict-aliasing", "-fwrapv", "-fno-exceptions", "-fno-rtti", "-fno-threadsafe-statics",
                *(("-mno-outline-atomics",) if platform.machine() == "aarch64" else ()))  # fmt: skip
KERNEL_FLAGS = ("-fno-plt", "-fvisibility=hidden", "-fvisibility-inlines-hidden")


class CompileError(Exception):
    """The host compiler rejected a source; the message holds its first diagnostics."""


class NoCompiler(CompileError):
    """There is no host C++20 compiler: a test that needs one is skipped (tests/conftest.py)."""


@functools.cache
def find_compiler() -> tuple[str, ...] | None:
    """The command of a host C++20 compiler, or None when there is none.

    NINFERC_EMULATOR_CXX overrides the search: g++, clang++, then the ziglang package.
    """
    override = os.environ.get("NINFERC_EMULATOR_CXX")
    if override:
        return tuple(override.split())
    for name in ("g++", "clang++"):
        path = shutil.which(name)
        if path:
            return (path,)
    found = importlib.util.find_spec("ziglang")
    if found is not None and found.origin is not None:
        program = Path(found.origin).with_name("zig")
        return (str(program), "c++") if program.exists() else (sys.executable, "-m", "ziglang", "c++")
    return None


def _linker(compiler: Sequence[str]) -> list[str]:
    """The command that makes a shared object of one object. Zig's own would first build C and C++ libraries, a minute of one
    core, of which nothing here needs a line: what is undefined is found in the process. So its linker is called directly."""
    if compiler[-1] == "c++" and any("zig" in Path(part).name for part in compiler[:-1]):
        return [*compiler[:-1], "ld.lld", "-shared"]
    return [*compiler, "-shared"]


def missing_reason() -> str | None:
    """Why kernels cannot be emulated here (for pytest.skip), or None when they can."""
    if os.name != "posix" or not sys.platform.startswith("linux"):
        return "the kernel emulator needs Linux"
    if platform.machine() not in ("x86_64", "aarch64"):
        return f"the kernel emulator does not know this processor ({platform.machine()})"
    if find_compiler() is None:
        return "no host C++20 compiler: install g++ or clang++, or the ziglang package"
    return None


@functools.cache
def _identity() -> str:
    compiler = find_compiler()
    if compiler is None:
        raise NoCompiler(str(missing_reason()))
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]
    # Objects are built for the processor at hand.
    return f"{compiler}|{version}|{platform.machine()}|{_processor()}"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    except OSError:
        pass
    return platform.processor()


@functools.cache
def cache_folder() -> Path:
    """A private folder for compiled objects (NINFERC_EMULATOR_CACHE, else under the temporary folder)."""
    chosen = os.environ.get("NINFERC_EMULATOR_CACHE")
    folder = Path(chosen) if chosen else Path(tempfile.gettempdir()) / f"ninferc-emulator-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CompileError(f"emulator cache {folder} is not private to this user")
    return folder


def _digest(paths: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.encode() + b"\0")
        digest.update(hashlib.sha256(Path(path).read_bytes()).digest())
    return digest.hexdigest()[:24]


def _parse_dependencies(text: str) -> list[str]:
    names = text.replace("\\\n", " ").split(":", 1)[1].replace("\\ ", "\0").split()
    return sorted({name.replace("\0", " ") for name in names})


def _run(command: Sequence[str]) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        raise CompileError("the host compiler failed:\n" + "\n".join(lines[:40]))


def build(source: str, flags: Sequence[str], include_dirs: Sequence[Path], links: Sequence[Path] = ()) -> Path:
    """Compiles one source text into a shared object and returns its path.

    The cache key is the text, the flags, the compiler and the content of every file the text included, so an edited
    header rebuilds and nothing else does.
    """
    folder = cache_folder()
    command = [*COMMON_FLAGS, *flags, *(f"-I{path}" for path in include_dirs)]
    key = hashlib.sha256("\0".join([_identity(), source, *command, *map(str, links)]).encode()).hexdigest()[:32]
    dependencies = folder / f"{key}.deps"
    try:
        paths = dependencies.read_text().splitlines()
        existing = folder / f"{key}-{_digest(paths)}.so"
        if existing.exists():
            return existing
    except OSError:
        pass  # never built, or one of the headers has gone
    compiler = find_compiler()
    if compiler is None:
        raise NoCompiler(str(missing_reason()))
    extra = [] if "zig" in " ".join(compiler) or "clang" in compiler[0] else ["-fno-gnu-unique"]
    with tempfile.TemporaryDirectory(dir=folder, prefix="build-") as name:
        work = Path(name)
        main = work / "kernel.cpp"
        main.write_text(source)
        output = work / "kernel.so"
        depfile = work / "kernel.d"
        objects = str(work / "kernel.o")
        _run([*compiler, *command, *extra, "-MMD", "-MF", str(depfile), "-c", str(main), "-o", objects])
        # Linking without the compile flags: a checked kernel finds the sanitizer's functions in the engine.
        _run([*_linker(compiler), objects, *map(str, links), "-o", str(output)])
        paths = [path for path in _parse_dependencies(depfile.read_text()) if not path.startswith(str(work))]
        final = folder / f"{key}-{_digest(paths)}.so"
        temporary = work / "deps"
        temporary.write_text("\n".join(paths))
        os.replace(output, final)
        os.replace(temporary, dependencies)
    return final


@functools.cache
def runtime_library() -> Path:
    """The emulator's engine as a shared object (NINFERC_EMULATOR_UCONTEXT=1: with the portable context switch)."""
    # One translation unit, so that the hot paths are inlined.
    parts = ("schedule", "faults", "blocks", "launch", "warp", "memory", "copies", "order", "hazards", "checks")
    text = "".join(f'#include "{part}.cpp"\n' for part in parts)
    flags = ["-fno-semantic-interposition", "-fno-plt"]
    if os.environ.get("NINFERC_EMULATOR_UCONTEXT") == "1":
        flags.append("-DNINFERC_EMULATOR_UCONTEXT")
    return build(text, flags, (HERE / "engine", HERE / "include"))


def build_kernels(source: str, defines: Mapping[str, object], include_dirs: Sequence[Path], arch: int,
                  checked: bool) -> Path:
    """Compiles kernel source text; `arch` is the architecture number the headers see (900 for sm_90a)."""
    flags = [*KERNEL_FLAGS, "-include", "ninferc_emulator.h", "-DNINFERC_EMULATOR=1", f"-DNINFERC_EMULATOR_ARCH={arch}"]
    if checked:
        flags += ["-fsanitize=thread", "-g1"]  # lines, for the places of hazards
    flags += [f"-D{name}={value}" for name, value in sorted(defines.items())]
    return build(source, flags, (*include_dirs, TEMPLATE_INCLUDE, HERE / "include"), (runtime_library(),))
