"""Stands in for the CUDA driver where an error of it must be seen: real enumerations, made-up devices, no kernels."""

from __future__ import annotations

import ctypes
import traceback
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from cuda.bindings import driver

from runtime.cuda.driver import api

GIB = 1 << 30
Result = driver.CUresult
OK = Result.CUDA_SUCCESS
ADDRESSED = {"cuMemcpyHtoDAsync": (ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p),
             "cuStreamQuery": (ctypes.c_void_p,), "cuStreamSynchronize": (ctypes.c_void_p,)}  # fmt: skip


@cache
def _addressed(name: str) -> Any:
    """A function that C may call and that does what the driver's of that name does by then. A test's own error there fails
    the call."""

    def function(*args: int) -> int:
        try:
            return int(getattr(driver, name)(*args)[0])
        except BaseException:
            traceback.print_exc()
            return int(Result.CUDA_ERROR_UNKNOWN)

    return ctypes.CFUNCTYPE(ctypes.c_int, *ADDRESSED[name])(function)


def address_of(name: str) -> int:
    return int(ctypes.cast(_addressed(name), ctypes.c_void_p).value or 0)


@dataclass
class FakeDriver:
    """Driver calls as far as loading a program makes them; launched graphs do nothing. ``fail`` maps a call to the status it
    returns; ``graph_bytes`` is what the device has less of for each graph."""

    version: int = 13000
    count: int = 1
    capability: tuple[int, int] = (9, 0)
    free: int = 100 * GIB
    total: int = 140 * GIB
    peers: int = 1
    mode: int = 0
    graph_bytes: int = 0
    fail: dict[str, Any] = field(default_factory=dict)
    allocated: int = 0
    names: list[str] = field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch) -> FakeDriver:
        answers: dict[str, Any] = {
            "cuInit": lambda flags: (),
            "cuDriverGetVersion": lambda: (self.version,),
            "cuDeviceGetCount": lambda: (self.count,),
            "cuDeviceGet": lambda index: (driver.CUdevice(index),),
            "cuDevicePrimaryCtxRetain": lambda handle: (driver.CUcontext(1),),
            "cuDevicePrimaryCtxRelease": lambda handle: (),
            "cuCtxSetCurrent": lambda context: (),
            "cuCtxGetStreamPriorityRange": lambda: (0, -5),
            "cuStreamCreate": lambda flags: (driver.CUstream(1),),
            "cuStreamDestroy": lambda stream: (),
            "cuStreamQuery": lambda stream: (),
            "cuStreamSynchronize": lambda stream: (),
            "cuDeviceGetName": lambda size, handle: (b"Made-up GPU\0",),
            "cuDeviceGetPCIBusId": lambda size, handle: (b"0000ffff:00:00.0\0",),
            "cuMemGetInfo": lambda: (self.free - self._taken(), self.total),
            "cuMemAlloc": self._allocate,
            "cuMemFree": lambda address: (),
            "cuMemsetD8Async": lambda *args: (),
            "cuMemcpyHtoDAsync": lambda *args: (),
            "cuGetProcAddress": lambda name, version, flags: (address_of(name.decode()), 0),
            "cuMemHostRegister": lambda address, nbytes, flags: (),
            "cuMemHostUnregister": lambda address: (),
            "cuDeviceGetAttribute": self._attribute,
            "cuDeviceCanAccessPeer": lambda one, other: (self.peers,),
            "cuLibraryLoadData": lambda *args: (driver.CUlibrary(1),),
            "cuLibraryUnload": lambda library: (),
            "cuLibraryGetKernel": lambda library, name: (driver.CUkernel(1),),
            "cuKernelGetFunction": lambda kernel: (driver.CUfunction(1),),
            "cuKernelSetAttribute": lambda *args: (),
            "cuGraphCreate": lambda flags: (driver.CUgraph(1),),
            "cuGraphAddKernelNode": lambda *args: (driver.CUgraphNode(1),),
            "cuGraphKernelNodeSetAttribute": lambda *args: (),
            "cuGraphAddDependencies": lambda *args: (),
            "cuGraphInstantiate": lambda *args: (driver.CUgraphExec(1),),
            "cuGraphLaunch": lambda *args: (),
            "cuLaunchKernelEx": lambda *args: (),
            "cuGraphExecDestroy": lambda graph: (),
            "cuGraphDestroy": lambda graph: (),
        }
        for name, answer in answers.items():
            patch.setattr(driver, name, self._call(name, answer))
        api.cache_clear()
        for module in ("device", "backend", "upload", "transport"):
            patch.setattr(f"runtime.cuda.{module}.PinnedBuffer", _Pinned)
        return self

    def _call(self, name: str, answer: Any) -> Any:
        def call(*args: Any) -> tuple[Any, ...]:
            self.names.append(name)
            status = self.fail.get(name, OK)
            return (status, *answer(*args))

        return call

    def _taken(self) -> int:
        """Bytes that a program has taken; none where the test does not ask for it."""
        graphs = self.names.count("cuGraphInstantiate")
        return self.allocated + graphs * self.graph_bytes if self.graph_bytes else 0

    def _allocate(self, nbytes: int) -> tuple[Any, ...]:
        self.allocated += nbytes
        return (driver.CUdeviceptr(1 << 20),)

    def _attribute(self, attribute: Any, handle: Any) -> tuple[int]:
        values = {"COMPUTE_CAPABILITY_MAJOR": self.capability[0], "COMPUTE_CAPABILITY_MINOR": self.capability[1],
                  "MULTIPROCESSOR_COUNT": 132, "L2_CACHE_SIZE": 50 << 20, "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 227 << 10,
                  "COMPUTE_MODE": self.mode}  # fmt: skip
        return (values.get(attribute.name.removeprefix("CU_DEVICE_ATTRIBUTE_"), 0),)


class _Pinned:
    """Page-locked memory is plain memory here."""

    def __init__(self, nbytes: int, clear: bool = True) -> None:
        import numpy as np

        self.array, self.address, self.nbytes = np.zeros(nbytes, np.uint8), 1 << 20, nbytes

    def close(self) -> None:
        return None
