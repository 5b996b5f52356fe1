"""Launch one kernel on a real GPU with NumPy arguments, for tests that also run on the emulator."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from compiler.emit.arch import capability
from compiler.emit.cache import Job, compile_all, write_atomic
from compiler.emit.render import code_paths
from compiler.kernels.spec import DeviceCaps, KernelSpec
from compiler.program.model import Arg, KernelImage
from runtime.cuda.device import Device
from runtime.cuda.driver import DeviceError, api, call
from runtime.cuda.modules import Modules, PackedArgs
from tests import card

GUARD = 256
STICKY = ("ILLEGAL_ADDRESS", "LAUNCH_FAILED", "MISALIGNED", "ILLEGAL_INSTRUCTION", "LAUNCH_TIMEOUT", "HARDWARE_STACK")


def _root(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


class GpuLauncher:
    """Keeps one device and the compiled kernels, which come from the user's cache (NINFERC_CACHE) or go there: test
    processes share them, and so do runs. Arrays that share memory alias on the device too."""

    def __init__(self, index: int = 0) -> None:
        self.device = Device(index)
        self._physical = self.device.caps()
        self.arch = self._physical.arch
        self._modules: dict[str, Modules] = {}

    def caps(self, sms: int | None = None) -> DeviceCaps:
        """Capabilities to choose kernels by, ``sms`` in place of the device's multiprocessors."""
        return card.target(self._physical, sms)

    def launch(self, spec: KernelSpec, source: str, args: list[Any], repeats: int = 1) -> None:
        """Upload the arrays, launch, synchronise, copy every writable array back. Guard bytes behind each array must
        survive."""
        if source not in self._modules:
            (cubin,) = compile_all([Job(spec.entry, code_paths(self.caps()) + source, self.arch)]).values()
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
    """The same interface on the CPU emulator. ``seed`` picks the schedule of threads and asynchronous copies; ``checked``
    kernels end at their first hazard."""

    def __init__(self, seed: int = 1, checked: bool = False) -> None:
        self.seed, self.checked = seed, checked
        self.arch = self.caps().arch

    def caps(self, sms: int | None = None) -> DeviceCaps:
        return card.emulated(sms)

    def launch(self, spec: KernelSpec, source: str, args: list[Any], repeats: int = 1) -> None:
        from tests.emulator.emulator import compile_kernel, launch

        if RECORD:
            record(Path(RECORD), spec, source)
        kernel = compile_kernel(source, name=spec.entry, arch=10 * capability(self.caps()), checked=self.checked or None)
        for _ in range(repeats):
            launch(kernel, spec.grid, spec.block, args, spec.smem, self.seed, cluster=spec.cluster[0])


RECORD = os.environ.get("NINFERC_TEST_RECORD", "")  # a folder for every kernel that the emulator launches


def record(folder: Path, spec: KernelSpec, source: str) -> None:
    """Note a kernel for tests/compile/test_cards.py: once per source, whichever process comes first."""
    data = {"entry": spec.entry, "source": source, "template": spec.template, "smem": spec.smem, "block": spec.block,
            "cluster": spec.cluster}  # fmt: skip
    text = json.dumps(data)
    write_atomic(folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json", text.encode())
