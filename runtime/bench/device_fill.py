"""Kernels that only measurements need: synthetic weights in place, and a read kernel for the roofline."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import artifacts
from artifacts.container.schema import TensorObject
from artifacts.tools.synth import tensor_bytes
from artifacts.tools.synth_bits import plane_bits, plane_key, row_masks
from compiler.emit.cache import Job, compile_all
from compiler.emit.render import render
from compiler.ir.op import Array
from compiler.ir.types import Value
from compiler.kernels.spec import KernelSpec
from compiler.program.model import Arg, KernelImage
from runtime.cuda.device import Device
from runtime.cuda.driver import api, call
from runtime.cuda.modules import Modules, PackedArgs, launch_kernel
from runtime.vm.weights import MadeObjects, WeightStore

BULK_BYTES = 12 * 16384  # shared memory of read_bulk: bulk_stages x bulk_piece of templates/include/ninferc/synth/fill.cuh
MINIMUM_READ_RATE = 4.3e12  # bytes/s of an H200 below which a run is void (design.md)


class ToolKernels:
    """The measurement kernels, loaded on one device."""

    ENTRIES = {"synth_fill": "synth_fill.cu.j2", "read_all": "read_all.cu.j2"}

    def __init__(self, device: Device) -> None:
        self.device = device
        arch = device.caps().arch
        entries = self.ENTRIES | ({"read_bulk": "read_bulk.cu.j2"} if device.caps().bulk_copy else {})
        sources = {entry: render(template, entry, {}) for entry, template in entries.items()}
        cubins = compile_all([Job(entry, source, arch) for entry, source in sources.items()])
        images = {}
        for entry, source in sources.items():
            spec = KernelSpec(entry, entries[entry], {}, (1, 1, 1), 256, BULK_BYTES if entry == "read_bulk" else 0, ())
            images[entry] = KernelImage(spec, source, cubins[entry].image, cubins[entry].resources)
        self._modules = Modules(images, [device])
        self._sms = device.info().sms

    def _launch(self, entry: str, blocks: int, threads: int, words: list[int], smem: int = 0) -> None:
        args = PackedArgs(tuple(Arg(str(i), "pointer", "absolute", word) for i, word in enumerate(words)), lambda a: a.offset)
        launch_kernel(self._modules.kernels[entry], self.device.stream, (blocks, 1, 1), threads, smem, args, f"kernel {entry}")

    def fill(self, address: int, nbytes: int, key: int, mask: int, add: int) -> None:
        """Words of the synthetic generator to device memory (asynchronous)."""
        self._launch("synth_fill", 8 * self._sms, 256, [address, nbytes, key, mask, add])

    def read_rates(self, address: int, nbytes: int, repeats: int = 5) -> dict[str, float]:
        """Bytes/s of reading ``nbytes`` (several times the L2) once, median of ``repeats``, by kernel: plain loads and, where
        the device has them, bulk copies."""
        sink = self.device.allocate(256, "measurement")
        shapes = {"read_all": (2 * self._sms, 512, 0), "read_bulk": (self._sms, 32, BULK_BYTES)}
        rates = {}
        for entry, (blocks, threads, smem) in shapes.items():
            if entry not in self._modules.kernels:
                continue
            times = []
            for _ in range(repeats + 1):
                start, stop = Event(self.device), Event(self.device)
                start.record()
                self._launch(entry, blocks, threads, [address, nbytes, sink], smem)
                stop.record()
                times.append(start.seconds_to(stop))
            rates[entry] = nbytes / float(np.median(times[1:]))
        self.device.release(sink)
        return rates


class Event:
    """A timing event on a device's stream."""

    def __init__(self, device: Device) -> None:
        self._device = device
        device.activate()
        self._event = call(api().cuEventCreate(0), "event")

    def record(self) -> None:
        self._device.activate()
        call(api().cuEventRecord(self._event, self._device.stream), "event")

    def seconds_to(self, later: Event) -> float:
        """Seconds between two recorded events; waits for the later one."""
        call(api().cuEventSynchronize(later._event), "event")
        return float(call(api().cuEventElapsedTime(self._event, later._event), "event")) / 1e3


class SynthWeights(WeightStore):
    """Fills the weights of a (header-only) artifact on the device with the bytes that ``ninferc synth`` would write.

    Large matrices without padding columns are filled by the device (whole ones with exactly those bytes), small
    objects and their slices are made on the CPU.
    """

    def __init__(self, artifact: artifacts.Artifact, seed: int) -> None:
        super().__init__(_CpuObjects(artifact, seed))
        self._objects: list[Any] = list(artifact.objects.values())
        self._seed = seed
        self._tools: dict[int, ToolKernels] = {}

    def fill(self, value: Value, device: Any, address: int) -> bool:
        source = value.source
        assert source is not None
        tensor, whole = self._objects[source.object_index], self.whole(value)
        if value.nbytes < 1 << 20 or row_masks(tensor) is not None:
            return False
        if not whole:
            # a large shard is filled on its own: valid words of the same magnitude, not those of the whole object's shard
            tensor = replace(tensor, shape=value.type.shape)
        if device.index not in self._tools:
            self._tools[device.index] = ToolKernels(device)
        tools = self._tools[device.index]
        for plane in plane_bits(tensor):
            key = plane_key(self._seed + (0 if whole else 1 + value.rank), source.object_index, plane.index)
            tools.fill(address + plane.offset, plane.bytes, key, plane.mask, plane.add)
        return True


class _CpuObjects:
    def __init__(self, artifact: artifacts.Artifact, seed: int) -> None:
        self._objects = list(artifact.objects.values())
        self._seed = seed

    def object_bytes(self, index: int) -> Array:
        tensor = self._objects[index]
        assert isinstance(tensor, TensorObject)
        made: Array = tensor_bytes(tensor, index, self._seed)
        return made

    def reader(self) -> MadeObjects:
        return MadeObjects(self)


