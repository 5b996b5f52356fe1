"""Launch one kernel on a real GPU with NumPy arguments, for tests that also run on the emulator."""

from __future__ import annotations

import os
import sys
from typing import Any

import numpy as np

from compiler.emit.nvrtc import compile_source
from compiler.kernels.spec import KernelSpec
from compiler.program.model import Arg, KernelImage
from runtime.cuda.device import Device
from runtime.cuda.driver import DeviceError, api, call
from runtime.cuda.modules import Modules, PackedArgs

GUARD = 256
STICKY = ("ILLEGAL_ADDRESS", "LAUNCH_FAILED", "MISALIGNED", "ILLEGAL_INSTRUCTION", "LAUNCH_TIMEOUT", "HARDWARE_STACK")


def _root(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class GpuLauncher:
    """Keeps one device and the compiled kernels. Arrays that share memory alias on the device too."""

    def __init__(self, index: int = 0) -> None:
        self.device = Device(index)
        self.arch = self.device.caps().arch
        self._modules: dict[str, Modules] = {}

    def launch(self, spec: KernelSpec, source: str, args: list[Any], repeats: int = 1) -> None:
        """Upload the arrays, launch, synchronise, copy every writable array back. Guard bytes behind each array must
        survive."""
        if source not in self._modules:
            cubin = compile_source(spec.entry, source, self.arch)
            image = KernelImage(spec, source, cubin.image, cubin.resources)
            self._modules[source] = Modules({spec.entry: image}, [self.device])
        driver = api()
        self.device.activate()
        roots: dict[int, tuple[np.ndarray[Any, Any], int]] = {}
        try:
            packed = []
            for i, value in enumerate(args):
                if isinstance(value, np.ndarray):
                    root = _root(value)
                    key = root.ctypes.data
                    if key not in roots:
                        address = int(call(driver.cuMemAlloc(root.nbytes + GUARD), "test memory"))
                        roots[key] = (root, address)
                        self.device.upload(address, np.ascontiguousarray(root).view(np.uint8).reshape(-1))
                        self.device.upload(address + root.nbytes, np.full(GUARD, 0xA5, np.uint8))
                    offset = roots[key][1] + value.ctypes.data - key
                    packed.append(Arg(str(i), "pointer", "absolute", offset))
                elif value is None:
                    packed.append(Arg(str(i), "null"))
                elif isinstance(value, (float, np.floating)):
                    packed.append(Arg(str(i), "float", number=float(value)))
                else:
                    packed.append(Arg(str(i), "int", number=int(value)))
            arguments = PackedArgs(tuple(packed), lambda arg: arg.offset)
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = spec.grid
            config.blockDimX, config.blockDimY, config.blockDimZ = spec.block, 1, 1
            config.sharedMemBytes = spec.smem
            config.hStream = self.device.stream
            config.numAttrs = 0
            if spec.cluster != (1, 1, 1):
                attribute = driver.CUlaunchAttribute()
                attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
                attribute.value.clusterDim.x, attribute.value.clusterDim.y, attribute.value.clusterDim.z = spec.cluster
                config.attrs, config.numAttrs = [attribute], 1
            kernel = driver.CUfunction(int(self._modules[source].kernels[spec.entry]))
            for _ in range(repeats):
                call(driver.cuLaunchKernelEx(config, kernel, arguments.address, 0), spec.entry)
            for root, address in roots.values():
                raw = self.device.download(address, root.nbytes + GUARD)
                assert np.all(raw[root.nbytes :] == 0xA5), f"{spec.entry} wrote behind an array"
                if root.flags.writeable:
                    root.view(np.uint8).reshape(-1)[:] = raw[: root.nbytes]
        except DeviceError as error:
            if any(name in str(error) for name in STICKY):
                # the context is dead: end this worker, so that pytest-xdist starts the next test in a fresh one
                print(f"{spec.entry}: {error}", file=sys.stderr, flush=True)
                os._exit(70)
            raise
        finally:
            for _, address in roots.values():
                driver.cuMemFree(address)


class EmulatorLauncher:
    """The same interface on the CPU emulator. ``seed`` picks the schedule of threads and asynchronous copies."""

    arch = "sm_90a"

    def __init__(self, seed: int = 1) -> None:
        self.seed = seed

    def launch(self, spec: KernelSpec, source: str, args: list[Any], repeats: int = 1) -> None:
        from tests.emulator.emulator import compile_kernel, launch

        kernel = compile_kernel(source, name=spec.entry)
        for _ in range(repeats):
            launch(kernel, spec.grid, spec.block, args, spec.smem, self.seed)
