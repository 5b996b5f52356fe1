"""Run phases of a program on the CPU."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from compiler.ir.op import Array, Op, definition
from compiler.ir.types import TensorType, Value
from compiler.program.model import EGRESS, RING, WORK, Call, Phase, Placement, Program
from runtime.vm.context import VMContext
from runtime.vm.memory import RankMemory
from runtime.vm.weights import WeightStore


@dataclass
class Machine:
    """A program loaded into VM memory.

    ``numerics``: ``exact`` (float64, nothing rounded) or ``engine`` (rounds where the kernels round).
    ``shuffle``: seed for a random topological order of each run's calls, None for the schedule's own order.
    """

    program: Program
    weights: WeightStore
    numerics: str = "engine"
    shuffle: int | None = None
    observer: Callable[[Op, VMContext], None] | None = None  # called after each op (tests)
    ranks: list[RankMemory] = field(init=False)

    def __post_init__(self) -> None:
        if self.numerics not in ("exact", "engine"):
            raise ValueError(f"numerics {self.numerics!r}: allowed are exact, engine")
        regions = self.program.regions
        self.ring = np.zeros(regions[0][RING] // 4, dtype=np.uint32)
        self.egress = np.zeros(regions[0][EGRESS] // 4, dtype=np.int32)
        host = {RING: self.ring, EGRESS: self.egress}
        self.ranks = [RankMemory(self.numerics == "exact", sizes, host) for sizes in regions]
        for name, value in self.program.values.items():
            # states start unset (a new sequence counts as zero by its length); integer states and counters at zero
            if value.source is None and value.type.dtype == "i32":
                place = self.program.placements[name]
                if place.region not in (RING, EGRESS):
                    self.ranks[value.rank].view(place, value.type)[...] = 0
        for name, words in self.program.constants.items():
            shape = self.program.values[name].type.shape
            self.read(name)[...] = np.array(words, dtype=np.int64).astype(np.int32).reshape(shape)
        self._random = random.Random(self.shuffle)
        self._births = {name: _lifetimes(phase) for name, phase in self.program.phases.items()}

    def read(self, name: str, rank: int = 0) -> Array:
        """The array of a shared value (state or table), a live view."""
        if rank:
            name = f"{name}@{rank}"
        value = self.program.values[name]
        return self.ranks[value.rank].view(self.program.placements[name], value.type)

    def run(self, phase_name: str) -> None:
        """Execute every call of a phase once. Raises KeyError for a phase the program does not hold."""
        phase = self.program.phases[phase_name]
        births, deaths = self._births[phase_name]
        order = self._order(phase)
        keep_dead = self.shuffle is not None  # in another order a range may already have its next owner
        for index in order:
            call = phase.calls[index]
            memory = self.ranks[call.rank]
            for name in births.get(index, ()):
                self.ranks[phase.values[name].rank].poison(phase.placements[name])
            for place in call.scratch.values():
                memory.poison(place)
            self._execute(phase, call)
            if not keep_dead:
                for name in deaths.get(index, ()):
                    self.ranks[phase.values[name].rank].poison(phase.placements[name])
            for place in call.scratch.values():
                memory.poison(place)

    def activation(self, phase_name: str, name: str) -> Array:
        """An activation of the last run that nothing has overwritten since (the last values of a phase)."""
        phase = self.program.phases[phase_name]
        value = phase.values[name]
        return self.ranks[value.rank].view(phase.placements[name], value.type)

    def _order(self, phase: Phase) -> Sequence[int]:
        if self.shuffle is None:
            return range(len(phase.calls))
        waiting = {call.index: set(call.deps) for call in phase.calls}
        order: list[int] = []
        while waiting:
            ready = [index for index, deps in waiting.items() if not deps]
            chosen = self._random.choice(ready)
            order.append(chosen)
            del waiting[chosen]
            for deps in waiting.values():
                deps.discard(chosen)
        return order

    def _execute(self, phase: Phase, call: Call) -> None:
        memory = self.ranks[call.rank]
        internal: dict[str, Array] = {
            name: np.full(kind.shape, np.nan, dtype=memory.float_type) for name, kind in call.internal.items()
        }

        def type_of(name: str) -> TensorType:
            return call.internal[name] if name in internal else self.program.value(phase, name).type

        def resolve(name: str) -> Array:
            if name in internal:
                return internal[name]
            value: Value = self.program.value(phase, name)
            place: Placement = self.program.placement(phase, name)
            return self.ranks[value.rank].view(place, value.type)

        def decode(name: str, rows: tuple[int, int] | None) -> Array:
            return self.weights.decode(self.program.values[name], rows, np.float64)

        suffix = f"@{call.rank}" if call.rank else ""
        table = ("pf_lane_ncols" if phase.phase == "prefill" else "lane_ncols") + suffix
        for op in call.ops:
            ncols = self.ranks[call.rank].view(self.program.placements[table], self.program.values[table].type)
            context = VMContext(op, memory.exact, phase.lanes, phase.width, ncols, resolve, type_of, decode)
            if op.kind not in ("begin", "advance", "exchange_begin") and not context.columns:
                continue
            definition(op.kind).reference(op, context)
            if self.observer is not None:
                self.observer(op, context)


def _lifetimes(phase: Phase) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """Activations by the call that first touches them and by the call that last does."""
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    for call in phase.calls:
        for op in call.ops:
            for _, ref in op.refs():
                if ref.value in phase.placements and phase.placements[ref.value].region == WORK:
                    first.setdefault(ref.value, call.index)
                    last[ref.value] = call.index
    births: dict[int, list[str]] = {}
    deaths: dict[int, list[str]] = {}
    for name, index in first.items():
        births.setdefault(index, []).append(name)
    for name, index in last.items():
        if index != len(phase.calls) - 1 and name not in (*phase.outputs, *phase.kept):
            deaths.setdefault(index, []).append(name)
    return births, deaths
