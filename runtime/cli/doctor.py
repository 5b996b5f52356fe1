"""``ninferc doctor``: what this machine offers and what stands in the way, each finding with its fix."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version

import typer

from compiler.emit import nvrtc
from compiler.emit.arch import ArchError, native_arch
from compiler.emit.cache import CacheError, default_cache_dir, ensure_private_dir
from compiler.emit.render import INCLUDE_DIR
from compiler.explain.memory import amount
from runtime.cli.errors import DEVICE
from runtime.cli.io import Output
from runtime.cli.pcie import read_link
from runtime.cli.target import CPU_ARCH, count_devices
from runtime.cuda.driver import DeviceError, api, call

OK, WARNING, FAILED = "ok", "warn", "fail"
LITTLE_SPACE = 2 << 30
_MODES = {0: "shared", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}


@dataclass(frozen=True)
class Finding:
    """One row: how it stands, what was looked at, what was found, and what to do about it."""

    state: str
    name: str
    value: str
    fix: str = ""


def packages() -> Iterator[Finding]:
    """Installed versions against the exact pins of this project."""
    try:
        needs = [item.split(";")[0] for item in requires("ninferc") or () if "extra ==" not in item]
    except PackageNotFoundError:
        yield Finding(WARNING, "packages", "ninferc is not installed as a package", "pip install -e . in the project's folder")
        return
    pins = [item.replace(" ", "").split("==") for item in needs if "==" in item]
    wrong = []
    for name, wanted in pins:
        try:
            have = version(name)
        except PackageNotFoundError:
            have = "absent"
        if have != wanted:
            wrong.append((f"{name} {have}", f"{name}=={wanted}"))
    if wrong:
        yield Finding(FAILED, "packages", ", ".join(have for have, _ in wrong),
                      "pip install " + " ".join(pin for _, pin in wrong))  # fmt: skip
    else:
        yield Finding(OK, "packages", f"{len(pins)} pinned packages have their versions")


def driver() -> Iterator[Finding]:
    """The driver and the number of GPUs."""
    try:
        number = int(call(api().cuDriverGetVersion(), "driver version"))
        count = count_devices()
    except DeviceError as error:
        found, _, fix = str(error).partition("; ")
        if fix in ("", "use --device cpu"):
            fix = "install NVIDIA driver 580 or newer; without a GPU use --device cpu"
        yield Finding(FAILED, "driver", found, fix)
        return
    yield Finding(OK, "driver", f"CUDA {number // 1000}.{number % 1000 // 10}, {count} GPU(s)")
    for index in range(count):
        yield from gpu(index)
    yield from peers(count)


def gpu(index: int) -> Iterator[Finding]:
    """One GPU: capability, compute mode, memory, link."""
    from runtime.cuda.device import Device

    name = f"gpu {index}"
    try:
        device = Device(index)
    except DeviceError as error:
        found, _, fix = str(error).partition("; ")
        yield Finding(FAILED, name, found, fix or "look at nvidia-smi for what holds it")
        return
    try:
        info = device.info()
        capability = f"{info.name}, compute capability {info.capability[0]}.{info.capability[1]}, {info.sms} multiprocessors"
        try:
            yield Finding(OK, name, f"{capability}, target {native_arch(*info.capability)}")
        except ArchError as error:
            yield Finding(FAILED, name, capability, str(error))
        mode = int(call(api().cuDeviceGetAttribute(api().CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_MODE, device.handle),
                        f"device {index}: compute mode"))  # fmt: skip
        yield Finding(OK if mode == 0 else WARNING, f"{name} mode", _MODES.get(mode, str(mode)),
                      "" if mode == 0 else f"nvidia-smi -i {index} -c DEFAULT lets several processes share it")  # fmt: skip
        tight = info.free < info.total // 2
        yield Finding(WARNING if tight else OK, f"{name} memory", f"{amount(info.free)} free of {amount(info.total)}",
                      "end what holds it (nvidia-smi lists processes)" if tight else "")  # fmt: skip
        yield link(name, info.pci)
    finally:
        device.close()


def link(name: str, pci: str) -> Finding:
    """The GPU's PCIe link."""
    found = read_link(pci)
    if found is None:
        return Finding(WARNING, f"{name} link", "unknown", "install the driver's NVML library to see it")
    text = f"PCIe {found.generation} x{found.width} (at most {found.max_generation} x{found.max_width})"
    if found.width < found.max_width:
        return Finding(WARNING, f"{name} link", text, "reseat the card or use a slot with more lanes")
    return Finding(OK, f"{name} link", text)


def peers(count: int) -> Iterator[Finding]:
    """Direct access between each pair of GPUs."""
    for one in range(count):
        for other in range(one + 1, count):
            handles = [call(api().cuDeviceGet(index), f"device {index}") for index in (one, other)]
            both = all(
                call(api().cuDeviceCanAccessPeer(a, b), f"peer access {one}-{other}") for a, b in (handles, handles[::-1])
            )
            yield Finding(OK if both else WARNING, f"peer access {one}-{other}", "yes" if both else "no",
                          "" if both else "exchanges go through page-locked host memory; no fix is needed")  # fmt: skip


def compiler() -> Iterator[Finding]:
    """NVRTC, the device headers, and a test compile of all base headers."""
    try:
        found = nvrtc.version()
    except nvrtc.CompileError as error:
        text, _, fix = str(error).partition("; ")
        yield Finding(FAILED, "nvrtc", text, fix or "pip install nvidia-cuda-nvrtc==13.0.88")
        return
    yield Finding(OK, "nvrtc", found)
    headers = sorted(INCLUDE_DIR.rglob("*.cuh"))
    reinstall = "install the project again; its template files are package data"
    if not headers:
        yield Finding(FAILED, "headers", f"none in {INCLUDE_DIR}", reinstall)
        return
    includes = [f'#include "{path.relative_to(INCLUDE_DIR).as_posix()}"' for path in headers if path.parent.name == "base"]
    source = "\n".join([*includes, 'extern "C" __global__ void probe() {}\n'])
    try:
        nvrtc.compile_source("probe", source, CPU_ARCH)
    except nvrtc.CompileError as error:
        yield Finding(FAILED, "headers", str(error).splitlines()[0], reinstall)
        return
    yield Finding(OK, "headers", f"{len(headers)} device headers, base compiles for {CPU_ARCH}")


def cache() -> Iterator[Finding]:
    """The user's cache: rights and space."""
    folder = default_cache_dir()
    try:
        ensure_private_dir(folder)
    except CacheError as error:
        text, _, fix = str(error).partition("; ")
        yield Finding(FAILED, "cache", text, fix)
        return
    if sys.platform != "win32" and folder.stat().st_mode & 0o022:
        yield Finding(WARNING, "cache", f"{folder} can be written by others", f"chmod go-w {folder}")
    elif sys.platform != "win32" and folder.stat().st_uid != os.getuid():
        yield Finding(WARNING, "cache", f"{folder} belongs to another user", "set NINFERC_CACHE to a folder of your own")
    else:
        yield Finding(OK, "cache", f"{folder} can be written")
    free = shutil.disk_usage(folder).free
    yield Finding(OK if free >= LITTLE_SPACE else WARNING, "cache space", f"{amount(free)} free",
                  "" if free >= LITTLE_SPACE else "free some space or set NINFERC_CACHE to another disk")  # fmt: skip


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (packages, driver, compiler, cache)


def doctor() -> None:
    """Check packages, driver, GPUs, links, memory, compiler, headers and cache. Exit code 3 when something fails."""
    output, failed = Output(), 0
    for check in CHECKS:
        for finding in check():
            output.write(f"{finding.state:5}{finding.name:18} {finding.value}\n")
            if finding.fix:
                output.write(f"{'':5}{'':18} fix: {finding.fix}\n")
            failed += finding.state == FAILED
    if failed:
        raise typer.Exit(DEVICE)
