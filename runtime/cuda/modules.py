"""Load a program's cubins and pack kernel arguments."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any

from compiler.program.model import Arg, Call, KernelImage
from runtime.cuda.driver import api, call


class Modules:
    """Every kernel of a program as a CUkernel, loaded before any graph is instantiated (lazy loading behind a polling
    kernel hangs)."""

    def __init__(self, kernels: Mapping[str, KernelImage], devices: list[Any]) -> None:
        driver = api()
        self._libraries: list[Any] = []
        self.kernels: dict[str, Any] = {}
        for entry, kernel in kernels.items():
            library = call(driver.cuLibraryLoadData(kernel.image, [], [], 0, [], [], 0), f"kernel {entry}: load")
            self._libraries.append(library)
            handle = call(driver.cuLibraryGetKernel(library, entry.encode()), f"kernel {entry}")
            self.kernels[entry] = handle
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            for device in devices:
                device.activate()
                if kernel.spec.smem > 0:  # static and dynamic together may pass 48 KiB
                    call(driver.cuKernelSetAttribute(attribute, kernel.spec.smem, handle, device.handle),
                         f"kernel {entry}: {kernel.spec.smem} bytes of shared memory")  # fmt: skip
                call(driver.cuKernelGetFunction(handle), f"kernel {entry}: function")

    def close(self) -> None:
        for library in self._libraries:
            api().cuLibraryUnload(library)


class PackedArgs:
    """Kernel arguments in memory that stays alive with this object: an array of pointers to the values."""

    def __init__(self, args: tuple[Arg, ...], address_of: Callable[[Arg], int]) -> None:
        self._cells: list[Any] = []
        for arg in args:
            if arg.kind == "pointer":
                self._cells.append(ctypes.c_uint64(address_of(arg)))
            elif arg.kind == "null":
                self._cells.append(ctypes.c_uint64(0))
            elif arg.kind == "int":
                self._cells.append(ctypes.c_int32(int(arg.number)))
            else:
                self._cells.append(ctypes.c_float(float(arg.number)))
        self._pointers = (ctypes.c_void_p * max(len(self._cells), 1))(*(ctypes.addressof(cell) for cell in self._cells))

    @property
    def address(self) -> int:
        return ctypes.addressof(self._pointers)


def launch_kernel(kernel: Any, stream: Any, grid: tuple[int, int, int], block: int, smem: int, args: PackedArgs, what: str,
                  cluster: tuple[int, int, int] = (1, 1, 1)) -> None:  # fmt: skip
    """Launch ``kernel`` (a CUkernel of Modules) on a stream of the current context, outside of any graph. Raises DeviceError
    that names ``what``."""
    driver = api()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes = smem
    config.hStream = stream
    config.numAttrs = 0
    if cluster != (1, 1, 1):
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = cluster
        config.attrs, config.numAttrs = [attribute], 1
    call(driver.cuLaunchKernelEx(config, driver.CUfunction(int(kernel)), args.address, 0), what)


def describe(item: Call) -> str:
    """A call for error messages: kernel and, where it has one, layer."""
    layer = item.ops[0].layer if item.ops else -1
    return f"kernel {item.entry}" + (f" (layer {layer})" if layer >= 0 else "")
