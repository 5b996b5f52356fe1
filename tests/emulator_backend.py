"""A session backend that executes a program's kernels on the CPU emulator: the real sources, arguments and memory plan,
without a GPU. Slow: for tiny models and few steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from compiler.control import egress_extent
from compiler.emit.render import render
from compiler.ir.types import Kind
from compiler.kernels.exchange import KINDS
from compiler.passes.schedule import CHANNEL
from compiler.passes.shard import at
from compiler.program.model import CONTROL, DEVICE_REGIONS, EGRESS, RING, WORK, Arg, Call, Phase, Placement, Program
from runtime.control import Ingress
from runtime.cuda.transport import TRANSPORTS
from runtime.vm.weights import WeightStore
from tests.emulator.emulator import compile_kernel, launch

Array = np.ndarray[Any, Any]


class EmulatorBackend:
    """Phases run call by call at launch. Activations and scratch hold NaN bytes until a kernel writes them."""

    def __init__(self, program: Program, weights: WeightStore, seed: int = 1, check_programmatic: bool = True) -> None:
        self.program, self.seed = program, seed
        self.check_programmatic = check_programmatic
        host = {name: np.zeros(max(program.regions[0].get(name, 0), 256), np.uint8) for name in (RING, EGRESS)}
        self.memory: list[dict[str, Array]] = [
            {name: np.zeros(max(sizes.get(name, 0), 256), np.uint8) for name in DEVICE_REGIONS} | host
            for sizes in program.regions
        ]
        self.regions = self.memory[0]
        self.ring = self.regions[RING].view(np.uint32)
        self.egress = self.regions[EGRESS].view(np.int32)[: egress_extent(program.limits)]
        self.ingress = Ingress(self.ring, program.limits)
        self._kernels: dict[str, Any] = {}
        self._ends: dict[str, dict[int, int]] = {}
        for name, value in program.values.items():
            place = program.placements[name]
            if value.kind is Kind.WEIGHT:
                data = weights.encoded(value)
                self.memory[place.rank][place.region][place.offset : place.offset + data.size] = data
            elif value.kind is Kind.STATE and value.type.dtype != "i32":
                self.memory[place.rank][place.region][place.offset : place.end] = 0xFF  # states of a fresh slot are never read
        for name, words in program.constants.items():
            place = program.placements[name]
            table = np.array(words, np.int64).astype(np.int32).view(np.uint8)
            self.memory[place.rank][place.region][place.offset : place.end] = table

    def _extent(self, phase: str, call: Call, arg: Arg) -> Placement:
        """The smallest placement that holds the argument's first byte."""
        named = self.program.placements.get(arg.name)
        if named and (named.region, named.offset) == (arg.region, arg.offset) and arg.region == CONTROL:
            return named  # "block" begins where its first table does
        item = self.program.phases[phase]
        for op in call.ops:
            for name, ref in op.refs():
                if name == arg.name and ref.value not in call.internal:
                    operand = self.program.placement(item, ref.value)
                    if operand.region == arg.region == WORK and operand.offset <= arg.offset < operand.end:
                        return operand
        places = [*self.program.placements.values(), *item.placements.values(), *call.scratch.values()]
        holding = [p for p in places if (p.region, p.rank) == (arg.region, arg.rank) and p.offset <= arg.offset < p.end]
        if not holding:  # a counter
            return Placement(arg.region, arg.offset, 256)
        live = [p for p in holding if p.offset == arg.offset] or holding
        return min(live, key=lambda p: p.nbytes) if arg.region != WORK else max(live, key=lambda p: p.nbytes)

    def _kernel(self, entry: str) -> Any:
        if entry not in self._kernels:
            spec = self.program.kernels[entry].spec
            self._kernels[entry] = compile_kernel(render(spec.template, entry, spec.params), name=entry)
        return self._kernels[entry]

    def launch(self, phase: str) -> None:
        item = self.program.phases[phase]
        for regions in self.memory:
            regions[WORK][:] = 0xFF
        for call in item.calls:
            arguments: list[Any] = []
            for arg in call.args:
                if arg.kind == "null":
                    arguments.append(None)
                elif arg.kind == "pointer":
                    if arg.region in CHANNEL:
                        arguments.append(self._contribution(item, call) if arg.name == "inbox" else np.zeros(64, np.uint8))
                        continue
                    place = self._extent(phase, call, arg)
                    arguments.append(self.memory[arg.rank][arg.region][arg.offset : place.end])
                else:
                    arguments.append(TRANSPORTS.index("staged") if arg.name == "transport" else arg.number)
            for place in call.scratch.values():
                self.memory[place.rank][WORK][place.offset : place.end] = 0xFF
            try:
                launch(self._kernel(call.entry), call.grid, call.block, arguments, call.smem, self.seed, limit_seconds=300)
            except Exception as error:
                layer = call.ops[0].layer
                raise RuntimeError(f"phase {phase}, call {call.index} {call.entry} (layer {layer}): {error}") from error

    def _contribution(self, phase: Phase, call: Call) -> Array:
        """A copy of what the other rank sends: ranks are interleaved, so its producer has run (the staged transport)."""
        op = next(op for op in call.ops if op.kind in KINDS)
        place = self.program.placement(phase, op.inputs["peer_1"].value)
        return self.memory[place.rank][place.region][place.offset : place.end].copy()

    def wait(self) -> None:
        return None

    def check(self) -> None:
        return None

    def _decode(self, place: Placement, dtype: str, shape: tuple[int, ...]) -> Array:
        count = int(np.prod(shape))
        size = {"bf16": 2, "f32": 4, "i32": 4, "u8": 1}[dtype]
        raw = self.memory[place.rank][place.region][place.offset : place.offset + count * size]
        if dtype == "bf16":
            return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(shape)
        return raw.view({"f32": np.float32, "i32": np.int32, "u8": np.uint8}[dtype]).reshape(shape).copy()

    def read(self, name: str, rank: int = 0) -> Array:
        name = at(name, rank)
        value = self.program.values[name]
        return self._decode(self.program.placements[name], value.type.dtype, value.type.shape)

    def read_activation(self, phase: str, name: str, rows: int) -> Array:
        value = self.program.phases[phase].values[name]
        return self._decode(self.program.phases[phase].placements[name], value.type.dtype, (rows, *value.type.shape[1:]))

    def close(self) -> None:
        return None
