"""CUDA backend of a session: one process, one arena per device, phases as graphs or eager launches."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from compiler.control import FAULT, egress_extent
from compiler.ir.op import Array
from compiler.ir.types import DTYPE_BYTES, Kind, Value
from compiler.kernels.arrange import UnitWeight, arrange_entry, arranged_weights, unit_weights, units_entry
from compiler.passes.halves import PREFILL, PREFILL_HALVES
from compiler.passes.schedule import CHANNEL
from compiler.passes.shard import at
from compiler.program.model import DEVICE_REGIONS, EGRESS, EXCHANGE, RING, Arg, Phase, Placement, Program
from runtime.control import Ingress
from runtime.cuda.device import Device, PinnedBuffer
from runtime.cuda.driver import DeviceError
from runtime.cuda.graph import EagerPhase, GraphPhase
from runtime.cuda.modules import Modules, PackedArgs, launch_kernel
from runtime.cuda.pointers import Span, check_pointers
from runtime.cuda.self_test import choose
from runtime.cuda.transport import STAGED, Exchange, Staging, mail_of, payload_bytes, prefill_phase
from runtime.cuda.upload import upload
from runtime.vm.weights import WeightStore

Progress = Callable[[int, int], None]
_log = logging.getLogger("ninferc")


class CudaBackend:
    """Loads a program and its weights on ``devices`` (one index per rank) and launches its phases.

    ``eager`` uses stream launches instead of graphs. ``progress(done, total)`` reports uploaded bytes.
    Raises DeviceError (absent, too small, another architecture) before any weight is read where it can be known.
    """

    def __init__(self, program: Program, weights: WeightStore, devices: list[int], eager: bool = False,
                 progress: Progress | None = None, transport: str = "auto") -> None:  # fmt: skip
        self.program = program
        if len(devices) != program.tp:
            raise DeviceError(f"the program needs {program.tp} device(s), {len(devices)} are given")
        self.devices = [Device(index) for index in devices]
        self._buffers: list[PinnedBuffer] = []
        self.exchange: Exchange | None = None
        self._phases: dict[str, GraphPhase | EagerPhase] = {}
        in_units = unit_weights(program.values, (op for phase in program.phases.values() for op in phase.ops()))
        self._in_units = [[weight for weight in in_units if weight.value.rank == rank] for rank in range(program.tp)]
        try:
            self.free_at_start = [self._check(device) for device in self.devices]
            began = time.perf_counter()
            self._regions = [
                {name: device.allocate(program.regions[rank].get(name, 0), name) for name in DEVICE_REGIONS}
                for rank, device in enumerate(self.devices)
            ]
            self._host = {name: self._pinned(program.regions[0][name]) for name in (RING, EGRESS)}
            self.ring = self._host[RING].array.view(np.uint32)
            self.egress = self.rank_egress(0)
            self.ingress = Ingress(self.ring, program.limits)
            self.modules = Modules(program.kernels, self.devices)
            _log.info("memory and %d kernels: %.3f s", len(program.kernels), time.perf_counter() - began)
            self._upload(weights, progress)
            for name, words in program.constants.items():
                place = program.placements[name]
                self.devices[place.rank].upload(self._regions[place.rank][place.region] + place.offset,
                                                np.array(words, dtype=np.int64).astype(np.int32))  # fmt: skip
            for device in self.devices:
                device.synchronize()
            if program.tp > 1:
                chosen = choose(program, self.modules, self.devices, transport)
                self.exchange = Exchange(self.devices, mail_of(program), chosen)
            self.prefill = prefill_phase(self.exchange.transport if self.exchange else None)
            began = time.perf_counter()
            spans = [self._spans(rank) for rank in range(program.tp)]
            self._args: list[PackedArgs] = []
            for name, phase in program.phases.items():
                if name in (PREFILL, PREFILL_HALVES) and name != self.prefill:
                    continue
                check_pointers(phase, spans, self.argument_address)
                packed = [PackedArgs(self._complete(item.args), self.argument_address) for item in phase.calls]
                self._args.extend(packed)
                staging = self._staging(phase)
                if eager:
                    self._phases[name] = EagerPhase(phase, self.modules, packed, self.devices, staging)
                else:
                    self._phases[name] = GraphPhase(phase, self.modules, packed, self.devices,
                                                    program.caps.programmatic_edges, staging)  # fmt: skip
            _log.info("%d %s: %.3f s", len(self._phases), "phases, launched eagerly" if eager else "graphs",
                      time.perf_counter() - began)  # fmt: skip
        except BaseException:
            self.close()
            raise

    def _check(self, device: Device) -> int:
        """Free bytes of a device that can run its part of the program. Raises DeviceError."""
        info = device.info()
        have, want = device.caps().arch, self.program.caps.arch
        if want.rstrip("a") != have.rstrip("a"):
            raise DeviceError(f"device {device.index} ({info.name}) is {have}, the program was compiled for {want}; "
                              "compile again with --arch native")  # fmt: skip
        ranks = [rank for rank, other in enumerate(self.devices) if other.index == device.index]
        if len(ranks) > 1 and self.program.caps.sms * len(ranks) > info.sms:
            raise DeviceError(f"device {device.index} is to run {len(ranks)} ranks: a test mode, for programs compiled for "
                              f"{info.sms // len(ranks)} multiprocessors (this one: {self.program.caps.sms})")  # fmt: skip
        need = sum(self.program.regions[rank].get(name, 0) for name in (*DEVICE_REGIONS, EXCHANGE) for rank in ranks)
        need += sum(self._scratch_bytes(rank) for rank in ranks)  # while loading
        if need > info.free:
            raise DeviceError(f"device {device.index} ({info.name}): {need / 2**30:.2f} GiB are needed, "
                              f"{info.free / 2**30:.2f} GiB are free; lower --max-context or --max-concurrency")  # fmt: skip
        return info.free

    def _pinned(self, nbytes: int) -> PinnedBuffer:
        buffer = PinnedBuffer(nbytes)
        self._buffers.append(buffer)
        return buffer

    def _complete(self, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
        return args if self.exchange is None else self.exchange.complete(args)

    def _staging(self, phase: Phase) -> Staging | None:
        if self.exchange is None or self.exchange.transport != STAGED:
            return None
        return Staging(self.exchange, self.argument_address, lambda op: payload_bytes(self.program, phase, op))

    def graph(self, phase: Phase, modules: Modules, address_of: Callable[[Arg], int]) -> GraphPhase:
        """A graph of a phase whose calls a measurement changed. ``address_of`` resolves their pointers."""
        packed = [PackedArgs(self._complete(item.args), address_of) for item in phase.calls]
        return GraphPhase(phase, modules, packed, self.devices, self.program.caps.programmatic_edges, self._staging(phase))

    def _spans(self, rank: int) -> dict[str, Span]:
        """Memory that kernels of a rank may point into, by region."""
        spans = {name: (base, base + self.program.regions[rank].get(name, 0)) for name, base in self._regions[rank].items()}
        spans |= {name: (buffer.address, buffer.address + buffer.nbytes) for name, buffer in self._host.items()}
        return spans | (self.exchange.spans(rank) if self.exchange is not None else {})

    def check(self) -> None:
        """Raise DeviceError when a rank gave up waiting for the other: nothing that was computed since may be used."""
        if self.exchange is not None and self.exchange.lost():
            raise DeviceError("the two devices lost touch inside a step (an exchange did not arrive in time); the process must "
                              "end")  # fmt: skip

    def rank_egress(self, rank: int) -> Array:
        words = egress_extent(self.program.limits)
        ring: Array = self._host[EGRESS].array.view(np.int32)[rank * words : (rank + 1) * words]
        return ring

    def resynchronise(self) -> None:
        """After a lost exchange: agree on the next sequence number, forget old words and the fault. Nothing may be running."""
        if self.exchange is None:
            return
        self.wait()
        places = [self.program.placements[at("exchange_sequence", rank)] for rank in range(self.program.tp)]
        numbers = [self.devices[p.rank].download(self.address(p), 16).view(np.uint32) for p in places]
        following = max(int(n[1]) for n in numbers)
        self.exchange.clear()
        for rank, (place, words) in enumerate(zip(places, numbers, strict=True)):
            self.devices[rank].upload(self.address(place), np.array([following, following, *words[2:]], np.uint32))
            step = self.program.placements[at("step", rank)]
            self.devices[rank].upload(self.address(step) + 4 * FAULT, np.zeros(1, np.int32))

    def address(self, place: Placement) -> int:
        """Device address of a placement (host address for the rings)."""
        if place.region in self._host:
            return self._host[place.region].address + place.offset
        return int(self._regions[place.rank][place.region]) + place.offset

    def argument_address(self, arg: Arg) -> int:
        """Address that a pointer argument stands for."""
        if arg.region in self._host:
            return self._host[arg.region].address + arg.offset
        if arg.region in CHANNEL and self.exchange is not None:
            return self.exchange.address(arg)
        return int(self._regions[arg.rank][arg.region]) + arg.offset

    def _upload(self, weights: WeightStore, progress: Progress | None) -> None:
        values = [v for v in self.program.values.values() if v.kind is Kind.WEIGHT]
        total, done, began = sum(v.nbytes for v in values), 0, time.perf_counter()

        def arrived(count: int) -> None:
            nonlocal done
            done += count
            if progress:
                progress(done, total)

        self.wait()  # memory is cleared on another stream than the copies take
        scratch = {rank: device.allocate(nbytes, "rearranging weights") for rank, device in enumerate(self.devices)
                   if (nbytes := self._scratch_bytes(rank))}  # fmt: skip
        codes = {value.name: nbytes for value, nbytes in arranged_weights(values)}
        in_units = {weight.value.name: weight for of_rank in self._in_units for weight in of_rank}

        def arrange(value: Value) -> None:
            """Bring a weight into the order in which the program's kernels read it, while others are on their way."""
            if value.name in codes:
                words = {"words": self.address(self.program.placements[value.name])}
                self._launch(arrange_entry(self.program.caps.arch), value.rank, words, {"pieces": codes[value.name] // 16})
            if value.name in in_units:
                self._arrange_units(in_units[value.name], scratch[value.rank])

        self.upload_times = upload([(v, v.rank, self.address(self.program.placements[v.name])) for v in values], weights,
                                   self.devices, arrived, complete=arrange)  # fmt: skip
        for rank, memory in scratch.items():
            self.devices[rank].release(memory)  # waits
        self.wait()
        self.uploaded = (total, time.perf_counter() - began)

    def _scratch_bytes(self, rank: int) -> int:
        """Device memory that bringing a rank's weights into units takes."""
        return max((weight.scratch for weight in self._in_units[rank]), default=0)

    def _arrange_units(self, weight: UnitWeight, scratch: int) -> None:
        entry, at = units_entry(weight.format, self.program.caps.arch), self.address(self.program.placements[weight.value.name])
        pointers = {name: at + weight.planes[name] if name in weight.planes else None for name in
                    ("w_codes", "w_high", "w_scales")}  # fmt: skip
        self._launch(entry, weight.value.rank, {**pointers, "scratch": scratch}, {"rows": weight.rows, "chunks": weight.chunks},
                     weight.blocks)  # fmt: skip

    def _launch(self, entry: str, rank: int, pointers: Mapping[str, int | None], numbers: Mapping[str, int],
                most_blocks: int = 1 << 30) -> None:  # fmt: skip
        """One kernel of loading, with at most ``most_blocks`` blocks."""
        device, spec = self.devices[rank], self.program.kernels[entry].spec
        args = [Arg(name, "null") if at is None else Arg(name, "pointer", "absolute", at) for name, at in pointers.items()]
        args += [Arg(name, "int", number=number) for name, number in numbers.items()]
        packed = PackedArgs(tuple(args), lambda arg: arg.offset)
        device.activate()
        grid = (min(spec.grid[0], most_blocks), 1, 1)
        launch_kernel(self.modules.kernels[entry], device.stream, grid, spec.block, spec.smem, packed, f"kernel {entry}")

    def launch(self, phase: str) -> None:
        if self.exchange is not None:
            self.exchange.launched(self._exchanges(phase), self.wait)
        self._phases[phase].launch(self.devices[0])

    def _exchanges(self, phase: str) -> int:
        return sum(op.int_attr("count") for item in self.program.phases[phase].calls for op in item.ops
                   if op.kind == "exchange_begin" and item.rank == 0)  # fmt: skip

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
        name = at(name, rank)
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
        if self.exchange is not None:
            self.exchange.close()
            self.exchange = None
        if hasattr(self, "modules"):
            self.modules.close()
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()
        for device in self.devices:
            device.close()
        self.devices = []
