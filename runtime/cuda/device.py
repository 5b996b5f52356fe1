"""One device: context, stream, properties, memory."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from compiler.emit.arch import ArchError, caps, native_arch
from compiler.ir.op import Array
from compiler.kernels.spec import DeviceCaps
from runtime.cuda.driver import DeviceError, api, call, device_count


@dataclass(frozen=True)
class DeviceInfo:
    """What ``doctor`` and ``plan`` print of a device. Memory in bytes."""

    index: int
    name: str
    capability: tuple[int, int]
    sms: int
    l2_bytes: int
    smem_block: int
    free: int
    total: int
    pci: str


def _attribute(handle: Any, name: str) -> int:
    driver = api()
    attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
    return int(call(driver.cuDeviceGetAttribute(attribute, handle), f"device attribute {name}"))


class Device:
    """A device with its primary context and one non-blocking stream. All memory of a program is taken here."""

    def __init__(self, index: int) -> None:
        driver = api()
        count = device_count()
        if not 0 <= index < count:
            raise DeviceError(f"device {index} does not exist; {count} device(s) are visible")
        self.index = index
        self.handle = call(driver.cuDeviceGet(index), f"device {index}")
        self.context = call(driver.cuDevicePrimaryCtxRetain(self.handle), f"device {index}: context")
        self.activate()
        flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
        self.stream = call(driver.cuStreamCreate(flags), f"device {index}: stream")
        self._allocations: list[int] = []

    def activate(self) -> None:
        """Make this device's context current in the calling thread."""
        call(api().cuCtxSetCurrent(self.context), f"device {self.index}: set context")

    def info(self) -> DeviceInfo:
        driver = api()
        self.activate()
        name = call(driver.cuDeviceGetName(128, self.handle), "device name")
        free, total = call(driver.cuMemGetInfo(), f"device {self.index}: memory")
        pci = call(driver.cuDeviceGetPCIBusId(32, self.handle), "device PCI id")
        return DeviceInfo(
            self.index,
            bytes(name).split(b"\0")[0].decode(),
            (_attribute(self.handle, "COMPUTE_CAPABILITY_MAJOR"), _attribute(self.handle, "COMPUTE_CAPABILITY_MINOR")),
            _attribute(self.handle, "MULTIPROCESSOR_COUNT"),
            _attribute(self.handle, "L2_CACHE_SIZE"),
            _attribute(self.handle, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            int(free),
            int(total),
            bytes(pci).split(b"\0")[0].decode(),
        )

    def caps(self) -> DeviceCaps:
        """Capabilities for kernel choice, with the multiprocessors and L2 of this card. Raises DeviceError when it is
        older than what is supported."""
        info = self.info()
        try:
            return caps(native_arch(*info.capability), info.sms, info.l2_bytes)
        except ArchError as error:
            raise DeviceError(f"device {self.index} ({info.name}): {error}") from error

    def allocate(self, nbytes: int, what: str) -> int:
        """Device memory, zeroed. Raises DeviceError naming what is needed and what is free."""
        driver = api()
        self.activate()
        free, _ = call(driver.cuMemGetInfo(), f"device {self.index}: memory")
        status, pointer = driver.cuMemAlloc(max(nbytes, 256))
        if status == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise DeviceError(
                f"device {self.index}: {what} needs {nbytes / 2**30:.2f} GiB, {free / 2**30:.2f} GiB are free; "
                "lower --max-context or --max-concurrency"
            )
        address = int(call((status, pointer), f"device {self.index}: allocate {what}"))
        self._allocations.append(address)
        call(driver.cuMemsetD8Async(address, 0, max(nbytes, 256), self.stream), f"device {self.index}: clear {what}")
        return address

    def release(self, address: int) -> None:
        """Free memory of ``allocate`` once the stream's work is done."""
        self.synchronize()
        self._allocations.remove(address)
        call(api().cuMemFree(address), f"device {self.index}: free")

    def upload(self, address: int, data: Array) -> None:
        """Copy host bytes to the device, ordered on the stream; returns when the host array may change."""
        flat = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        self.activate()
        call(api().cuMemcpyHtoDAsync(address, flat.ctypes.data, flat.nbytes, self.stream), "copy to the device")
        self.synchronize()

    def download(self, address: int, nbytes: int) -> Array:
        """Bytes of device memory after everything queued on the stream."""
        out = np.empty(nbytes, dtype=np.uint8)
        self.activate()
        call(api().cuMemcpyDtoHAsync(out.ctypes.data, address, nbytes, self.stream), "copy from the device")
        self.synchronize()
        return out

    def synchronize(self) -> None:
        self.activate()
        call(api().cuStreamSynchronize(self.stream), f"device {self.index}")

    def close(self) -> None:
        """Release memory, stream and context; errors of a lost device are ignored here (it was reported before)."""
        driver = api()
        driver.cuCtxSetCurrent(self.context)
        for address in self._allocations:
            driver.cuMemFree(address)
        self._allocations.clear()
        driver.cuStreamDestroy(self.stream)
        driver.cuDevicePrimaryCtxRelease(self.handle)


def rank_caps(devices: Sequence[Device]) -> DeviceCaps:
    """Capabilities to compile ranks on ``devices`` for: those of all of them, with the multiprocessors that every rank has. Of
    a device with several ranks (a test mode) each has an equal share. Raises DeviceError."""
    found = [(device, device.caps()) for device in devices]
    first = found[0][1]
    for device, other in found:
        if other.arch != first.arch:
            raise DeviceError(f"device {devices[0].index} is {first.arch}, device {device.index} is {other.arch}; the ranks of "
                              "a program need one architecture")  # fmt: skip
    indices = [device.index for device in devices]
    share = min(other.sms // indices.count(device.index) for device, other in found)
    return replace(first, sms=share, l2_bytes=min(other.l2_bytes for _, other in found))


class PinnedBuffer:
    """Page-locked host memory that every device can read and write at the same address, zeroed unless ``clear`` is off."""

    def __init__(self, nbytes: int, clear: bool = True) -> None:
        driver = api()
        flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
        self.address = int(call(driver.cuMemHostAlloc(nbytes, flags), "page-locked host memory"))
        self.nbytes = nbytes
        raw = (ctypes.c_uint8 * nbytes).from_address(self.address)
        self.array: Array = np.ctypeslib.as_array(raw)
        if clear:
            self.array[:] = 0

    def close(self) -> None:
        api().cuMemFreeHost(self.address)


HUGE_PAGE = 2 << 20  # of x86-64, and of 64-bit Arm with 4 KiB pages; only a matter of speed


class RegisteredBuffer:
    """Page-locked memory for copies to any device, undefined at first: the process's own pages, huge ones where the system
    has them, given to the driver. Unlike ``PinnedBuffer`` the pages are made here, beside other threads. Raises DeviceError,
    also where memory cannot be registered (``CU_MEMHOSTREGISTER_*``).
    """

    def __init__(self, nbytes: int) -> None:
        driver = api()
        private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
        try:
            block = mmap.mmap(-1, nbytes + HUGE_PAGE, **private)
        except OSError as error:
            raise DeviceError(f"page-locked host memory: {nbytes} bytes: {error.strerror or error}") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                block.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # a kernel without them: plain pages do as well
        whole = np.frombuffer(block, np.uint8)  # holds the mapping
        begin = -whole.ctypes.data % HUGE_PAGE
        self.array: Array = whole[begin : begin + nbytes]
        self.address, self.nbytes = int(self.array.ctypes.data), nbytes
        self.array[:: mmap.PAGESIZE] = 0  # makes the pages, without the driver's locks
        call(driver.cuMemHostRegister(self.address, nbytes, driver.CU_MEMHOSTREGISTER_PORTABLE), "page-locked host memory")

    def close(self) -> None:
        api().cuMemHostUnregister(self.address)
