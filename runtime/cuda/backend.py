"""CUDA backend of a session: one process, one arena per device, phases as graphs or eager launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from compiler.ir.op import Array
from compiler.ir.types import DTYPE_BYTES, Kind
from compiler.program.model import CONTROL, DEVICE_REGIONS, EGRESS, RING, WEIGHTS, Arg, Placement, Program
from runtime.control import Ingress
from runtime.cuda.device import Device, PinnedBuffer
from runtime.cuda.driver import DeviceError
from runtime.cuda.graph import EagerPhase, GraphPhase
from runtime.cuda.modules import Modules, PackedArgs
from runtime.vm.weights import WeightStore

Progress = Callable[[int, int], None]


class CudaBackend:
    """Loads a program and its weights on ``devices`` (one index per rank) and launches its phases.

    ``eager`` uses stream launches instead of graphs. ``progress(done, total)`` reports uploaded bytes.
    Raises DeviceError (absent, too small, another architecture) before any weight is read where it can be known.
    """

    def __init__(self, program: Program, weights: WeightStore, devices: list[int], eager: bool = False,
                 progress: Progress | None = None) -> None:  # fmt: skip
        self.program = program
        if len(devices) != program.tp:
            raise DeviceError(f"the program needs {program.tp} device(s), {len(devices)} are given")
        self.devices = [Device(index) for index in devices]
        self._buffers: list[PinnedBuffer] = []
        self._phases: dict[str, GraphPhase | EagerPhase] = {}
        try:
            for device in self.devices:
                self._check(device)
            self._regions = [
                {name: device.allocate(program.regions[rank].get(name, 0), name) for name in DEVICE_REGIONS}
                for rank, device in enumerate(self.devices)
            ]
            self._host = {name: self._pinned(program.regions[0][name]) for name in (RING, EGRESS)}
            self.ring = self._host[RING].array.view(np.uint32)
            self.egress = self._host[EGRESS].array.view(np.int32)
            self.ingress = Ingress(self.ring, program.limits)
            self.modules = Modules(program.kernels, self.devices)
            self._upload(weights, progress)
            for name, words in program.constants.items():
                place = program.placements[name]
                self.devices[place.rank].upload(self._regions[place.rank][place.region] + place.offset,
                                                np.array(words, dtype=np.int64).astype(np.int32))  # fmt: skip
            for device in self.devices:
                device.synchronize()
            self._args: list[PackedArgs] = []
            for name, phase in program.phases.items():
                packed = [PackedArgs(item.args, self.argument_address) for item in phase.calls]
                self._args.extend(packed)
                if eager:
                    self._phases[name] = EagerPhase(phase, self.modules, packed, self.devices)
                else:
                    self._phases[name] = GraphPhase(phase, self.modules, packed, self.devices,
                                                    program.caps.programmatic_edges)  # fmt: skip
        except BaseException:
            self.close()
            raise

    def _check(self, device: Device) -> None:
        info = device.info()
        have, want = device.caps().arch, self.program.caps.arch
        if want.rstrip("a") != have.rstrip("a"):
            raise DeviceError(f"device {device.index} ({info.name}) is {have}, the program was compiled for {want}; "
                              "compile again with --arch native")  # fmt: skip
        rank = self.devices.index(device)
        need = sum(self.program.regions[rank].get(name, 0) for name in DEVICE_REGIONS)
        if need > info.free:
            raise DeviceError(f"device {device.index} ({info.name}): {need / 2**30:.2f} GiB are needed, "
                              f"{info.free / 2**30:.2f} GiB are free; lower --max-context or --max-concurrency")  # fmt: skip

    def _pinned(self, nbytes: int) -> PinnedBuffer:
        buffer = PinnedBuffer(nbytes)
        self._buffers.append(buffer)
        return buffer

    def address(self, place: Placement) -> int:
        """Device address of a placement (host address for the rings)."""
        if place.region in self._host:
            return self._host[place.region].address + place.offset
        return int(self._regions[place.rank][place.region]) + place.offset

    def argument_address(self, arg: Arg) -> int:
        """Address that a pointer argument stands for."""
        if arg.region in self._host:
            return self._host[arg.region].address + arg.offset
        return int(self._regions[arg.rank][arg.region]) + arg.offset

    def _upload(self, weights: WeightStore, progress: Progress | None) -> None:
        values = [v for v in self.program.values.values() if v.kind is Kind.WEIGHT]
        total, done = sum(v.nbytes for v in values), 0
        for value in values:
            place = self.program.placements[value.name]
            device = self.devices[value.rank]
            base = self._regions[value.rank][WEIGHTS] + place.offset
            for count in weights.upload(value, device, base):
                done += count
                if progress:
                    progress(done, total)

    def launch(self, phase: str) -> None:
        self._phases[phase].launch(self.devices[0])

    def wait(self) -> None:
        for device in self.devices:
            device.synchronize()

    def _read(self, place: Placement, dtype: str, shape: tuple[int, ...]) -> Array:
        if place.region in self._host:
            raw: Array = self._host[place.region].array[place.offset : place.offset + place.nbytes]
        else:
            address = self._regions[place.rank][place.region] + place.offset
            raw = self.devices[place.rank].download(address, int(np.prod(shape)) * DTYPE_BYTES[dtype])
        if dtype == "bf16":
            wide: Array = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
            return wide
        kind: Any = {"f32": np.float32, "i32": np.int32, "u8": np.uint8, "f16": np.float16}[dtype]
        typed: Array = raw.view(kind).reshape(shape)
        return typed

    def read(self, name: str, rank: int = 0) -> Array:
        self.wait()
        value = self.program.values[name]
        return self._read(self.program.placements[name], value.type.dtype, value.type.shape)

    def read_activation(self, phase: str, name: str, rows: int) -> Array:
        self.wait()
        value = self.program.phases[phase].values[name]
        place = self.program.phases[phase].placements[name]
        return self._read(place, value.type.dtype, (rows, *value.type.shape[1:]))

    def close(self) -> None:
        for phase in self._phases.values():
            phase.close()
        self._phases.clear()
        if hasattr(self, "modules"):
            self.modules.close()
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()
        for device in self.devices:
            device.close()
        self.devices = []


__all__ = ["CONTROL", "CudaBackend"]
