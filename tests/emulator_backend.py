"""A session backend that executes a program's kernels on the CPU emulator: the real sources, arguments and memory plan,
without a GPU. Slow: for tiny models and few steps."""

from __future__ import annotations

from typing import Any

import numpy as np

from compiler.control import egress_extent
from compiler.emit.arch import capability
from compiler.emit.render import render
from compiler.ir.op import Op
from compiler.ir.types import Kind
from compiler.kernels.arrange import unit_weights
from compiler.kernels.exchange import KINDS, Mail, in_slices, payload, tiles_of
from compiler.ops.exchange_begin import BASE, number
from compiler.passes.halves import PREFILL
from compiler.passes.schedule import CHANNEL
from compiler.passes.shard import at
from compiler.program.model import CONTROL, DEVICE_REGIONS, EGRESS, RING, WORK, Arg, Call, Phase, Placement, Program
from runtime.control import Ingress
from runtime.cuda.transport import TILES_OVER, TRANSPORTS, mail_of, operand_types, prefill_phase
from runtime.vm.weights import WeightStore
from tests.emulator.emulator import compile_kernel, launch
from tests.emulator.hazards import Hazard
from tests.kernels.encoded_weights import on_device

Array = np.ndarray[Any, Any]


class EmulatorBackend:
    """Phases run call by call at launch. Activations and scratch hold ``unwritten`` bytes, NaN, until a kernel writes them.

    Of two ranks one waits for what the other one sends only later: over ``peer`` and ``host`` its mail is filled beforehand
    with what the protocol says (docs/tensor-parallel.md); every kernel that sends must leave just that in the other mail. All
    calls of the ``silent`` rank that send are left out, nothing is delivered then: set the hang word, or waits take 0.8 s of
    the emulated clock.

    ``hazards`` takes what the race checker finds in each kernel's first launch of a phase."""

    def __init__(self, program: Program, weights: WeightStore, seed: int = 1, transport: str = "staged",
                 tiles: bool | None = None, hazards: list[Hazard] | None = None) -> None:  # fmt: skip
        self.program, self.seed, self.transport = program, seed, transport
        self.tiles = transport in TILES_OVER if tiles is None else tiles
        self.prefill = PREFILL if self.tiles or program.tp == 1 else prefill_phase(transport)
        self.mail = mail_of(program) if program.tp > 1 else Mail(0, 0, 0)
        self.boxes = [np.zeros(max(self.mail.size, 8), np.uint8) for _ in range(program.tp)]
        self.hang = np.zeros(64, np.uint8)
        self.silent: int | None = None
        self.unwritten = 0xFF
        self.hazards = hazards
        self.checked: set[tuple[str, str]] = set()
        host = {name: np.zeros(max(program.regions[0].get(name, 0), 256), np.uint8) for name in (RING, EGRESS)}
        self.memory: list[dict[str, Array]] = [
            {name: np.zeros(max(sizes.get(name, 0), 256), np.uint8) for name in DEVICE_REGIONS} | host
            for sizes in program.regions
        ]
        self.regions = self.memory[0]
        self.ring = self.regions[RING].view(np.uint32)
        self.egress = self.rank_egress(0)
        self.ingress = Ingress(self.ring, program.limits)
        self._kernels: dict[tuple[str, bool], Any] = {}
        self._ends: dict[str, dict[int, int]] = {}
        ops = (op for phase in program.phases.values() for op in phase.ops())
        in_units = {weight.value.name for weight in unit_weights(program.values, ops)}
        for name, value in program.values.items():
            place = program.placements[name]
            if value.kind is Kind.WEIGHT:
                data = weights.encoded(value)
                assert value.source is not None
                if name in in_units or value.source.format == "NVFP4":
                    n, k = value.type.shape
                    data = on_device(value.source.format, (n, k), data, name in in_units)
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

    def _kernel(self, entry: str, checked: bool = False) -> Any:
        if (entry, checked) not in self._kernels:
            spec = self.program.kernels[entry].spec
            target = self.program.caps
            self._kernels[entry, checked] = compile_kernel(render(spec.template, entry, spec.params), name=entry,
                                                           arch=target.code_arch or 10 * capability(target),
                                                           checked=checked or None)  # fmt: skip
        return self._kernels[entry, checked]

    def launch(self, phase: str) -> None:
        item = self.program.phases[phase]
        for regions in self.memory:
            regions[WORK][:] = self.unwritten
        for call in item.calls:
            if call.rank == self.silent and any("ordinal" in op.attrs for op in call.ops):
                continue
            arguments: list[Any] = []
            for arg in call.args:
                if arg.kind == "null":
                    arguments.append(None)
                elif arg.kind == "pointer":
                    if arg.region in CHANNEL:
                        boxes = {"hang": self.hang, "inbox": self.boxes[arg.rank], "outbox": self.boxes[1 - arg.rank]}
                        arguments.append(boxes[arg.region])
                        continue
                    place = self._extent(phase, call, arg)
                    arguments.append(self.memory[arg.rank][arg.region][arg.offset : place.end])
                else:
                    late = {"transport": TRANSPORTS.index(self.transport), "slot_words": self.mail.words,
                            "slot_slices": self.mail.slices, "slot_bytes": self.mail.nbytes,
                            "apart": 1, "tiles": 2 * self.tiles}  # fmt: skip
                    arguments.append(late.get(arg.name, arg.number))
            if self.silent is None:
                self._deliver(item, call)
            for place in call.scratch.values():
                self.memory[place.rank][WORK][place.offset : place.end] = self.unwritten
            try:
                options: dict[str, Any] = {"cluster": call.cluster[0]} if call.cluster[0] > 1 else {}
                if checked := self.hazards is not None and (phase, call.entry) not in self.checked:
                    self.checked.add((phase, call.entry))
                    options["hazards"] = self.hazards
                kernel = self._kernel(call.entry, checked)
                launch(kernel, call.grid, call.block, arguments, call.smem, self.seed, limit_seconds=300, **options)
            except Exception as error:
                layer = call.ops[0].layer
                raise RuntimeError(f"phase {phase}, call {call.index} {call.entry} (layer {layer}): {error}") from error
            if self.silent is None:
                self._check_sent(item, call)

    def _message(self, phase: Phase, op: Op, rank: int) -> list[tuple[int, Array]]:
        """(offset, bytes) that ``rank`` leaves in the other rank's mail for an exchange; prefill sends active rows only."""
        name = "peer_1" if rank != op.rank else "candidates" if op.kind == "sample_merge" else "partial"
        types, place = operand_types(self.program, phase, op), self.program.placement(phase, op.inputs[name].value)
        nbytes, half = payload(op, types), op.half
        raw = self.memory[place.rank][place.region][place.offset : place.end][nbytes * (half or 0) :][:nbytes]
        rows = types[name].shape[0]
        if "rows" in op.inputs:
            total = int(self.read("pf_lane_ncols", rank)[0])
            rows = total if half is None else min(max(total - half * rows, 0), rows)
        raw = raw[: raw.size * rows // types[name].shape[0]].copy()
        base = int(self.read("exchange_sequence", rank).view(np.uint32)[BASE])
        stamp = np.uint64(number(base, op.int_attr("ordinal")) << 32)
        slot, mail = int(stamp >> np.uint64(32)) % 2, self.mail
        if self.transport == "staged":
            return [(mail.copied_to, raw)]
        item = next(call for call in phase.calls if op in call.ops and call.rank == op.rank)
        tiles = tiles_of(self.program.kernels[item.entry].spec) if self.tiles else None
        if tiles is None and not in_slices(op, types, self.transport):
            words = raw.view(np.uint32).astype(np.uint64) | stamp
            return [(8 * slot * mail.words, words.view(np.uint8))]
        lines = rows * item.grid[0] if tiles is None else tiles.count(rows, types[name].shape[1])
        line = np.array([stamp]).view(np.uint8)
        first = 16 * mail.words + 64 * slot * mail.slices
        return [(mail.copied_to + slot * mail.nbytes, raw), *((first + 64 * i, line) for i in range(lines))]

    def _deliver(self, phase: Phase, call: Call) -> None:
        """Before a call that waits: what the other rank sends. What its product pushed must be there already."""
        for op in call.ops:
            if op.kind not in KINDS:
                continue
            for offset, data in self._message(phase, op, 1 - call.rank):
                there = self.boxes[call.rank][offset : offset + data.size]
                sent = op.attrs.get("pushed") or (op.attrs.get("tiles") and self.tiles)
                if sent and self.transport != "staged":
                    assert np.array_equal(there, data), f"{call.entry}: rank {1 - call.rank}'s product pushed something else"
                there[:] = data

    def _check_sent(self, phase: Phase, call: Call) -> None:
        for op in call.ops:
            if op.kind not in KINDS or self.transport == "staged":
                continue
            for offset, data in self._message(phase, op, call.rank):
                sent = self.boxes[1 - call.rank][offset : offset + data.size]
                assert np.array_equal(sent, data), f"{call.entry}: rank {call.rank} sent something else"

    def wait(self) -> None:
        return None

    def check(self) -> None:
        return None

    def rank_egress(self, rank: int) -> Array:
        words = egress_extent(self.program.limits)
        return self.regions[EGRESS].view(np.int32)[rank * words : (rank + 1) * words]

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
