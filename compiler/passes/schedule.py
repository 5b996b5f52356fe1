"""Linear schedule: kernel calls in build order, their memory, arguments and dependencies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from artifacts.layouts import get_layout
from compiler.ir.graph import OpGraph
from compiler.ir.op import Op, definition
from compiler.ir.types import DTYPE_BYTES, IRError, Kind, Ref, Value
from compiler.kernels.spec import KernelSpec
from compiler.passes import memory
from compiler.program.model import WORK, Arg, Call, Phase, Placement

CHANNEL = ("outbox", "inbox", "hang")  # of an exchange: the runtime knows where they lie
# Numbers of the transport that the runtime chooses
LATE = ("transport", "slot_words", "slot_slices", "slot_bytes", "apart", "tiles")
PLANES = ("codes", "high", "scales", "divisor")


@dataclass(frozen=True)
class Group:
    """Ops that one kernel executes. ``operands`` maps the kernel's argument names to uses of values."""

    spec: KernelSpec
    ops: tuple[Op, ...]
    nodes: tuple[int, ...]
    operands: Mapping[str, Ref]
    internal: frozenset[str] = frozenset()
    rank: int = 0

    @property
    def beside(self) -> bool:
        """Whether the kernel runs beside the chain of its rank: exchanges between halves of a chunk."""
        return self.ops[0].kind == "exchange_residual" and self.ops[0].half is not None


def weight_planes(value: Value) -> dict[str, int]:
    """Byte offset of each plane inside an encoded weight, by argument suffix (absent planes are left out)."""
    if value.source is None:
        raise IRError(f"value {value.name} is no weight")
    planes = get_layout(value.source.layout).planes(value.source.format, value.type.shape)
    names = {"codes": "codes", "words": "codes", "values": "codes", "base": "codes", "high": "high", "scales": "scales",
             "scale": "scales", "divisor": "divisor"}  # fmt: skip
    return {names[plane.name]: plane.offset for plane in planes}


@dataclass
class Scheduler:
    """Turns groups of one phase into calls. ``shared`` are placements of weights, states and tables."""

    graph: OpGraph
    groups: Sequence[Group]
    shared: Mapping[str, Placement]
    programmatic: bool
    counters: dict[str, Placement] = field(default_factory=dict)  # zeroed scratch by entry and name, kept for good
    lifetimes: list[memory.Lifetime] = field(default_factory=list)
    accesses: dict[str, list[int]] = field(default_factory=dict)

    def run(self) -> tuple[Phase, list[int]]:
        """The phase and the size of region WORK per rank."""
        self._liveness()
        placements, sizes = memory.plan(self.lifetimes, WORK)
        edges = memory.reuse_edges(placements, self.lifetimes, self.accesses) | self._hazards()
        deps: list[list[int]] = [[] for _ in self.groups]
        for before, after in sorted(edges):
            deps[after].append(before)
        calls = []
        for index, group in enumerate(self.groups):
            scratch = {name: placements[f"call{index}.{name}"] for name in group.spec.scratch if name not in group.spec.zeroed}
            calls.append(
                Call(
                    index=index,
                    rank=group.rank,
                    entry=group.spec.entry,
                    args=tuple(self._args(group, placements, scratch | self._counters(group))),
                    grid=group.spec.grid,
                    block=group.spec.block,
                    smem=group.spec.smem,
                    cluster=group.spec.cluster,
                    ops=group.ops,
                    deps=tuple(deps[index]),
                    scratch=scratch,
                    internal={name: self.graph.values[name].type for name in sorted(group.internal)},
                    programmatic=self.programmatic and not group.beside,
                    beside=group.beside,
                )
            )
        kept = {name: p for name, p in placements.items() if not name.startswith("call")}
        values = {name: v for name, v in self.graph.values.items() if v.kind is Kind.ACTIVATION}
        phase = Phase(self.graph.name, self.graph.phase, self.graph.lanes, self.graph.width, tuple(calls), values, kept,
                      tuple(sorted(self.graph.outputs)), tuple(sorted(self.graph.kept)))
        return phase, sizes

    def _counters(self, group: Group) -> dict[str, Placement]:
        """Zeroed scratch of a kernel lies outside the arena that calls share: it must still be zero at the next launch."""
        return {name: self.counters[f"{group.spec.entry}.{name}@{group.rank}"] for name in group.spec.zeroed}

    def _flights(self) -> dict[int, int]:
        """Of calls beside the chain: the last call during which each may still run, that in front of the first one of its
        rank's chain that needs it."""
        ends = {index: len(self.groups) for index, group in enumerate(self.groups) if group.beside}
        for before, after in self._hazards() if ends else ():
            if before in ends and after not in ends and self.groups[before].rank == self.groups[after].rank:
                ends[before] = min(ends[before], after)
        return {index: end - 1 for index, end in ends.items()}

    def _liveness(self) -> None:
        flights = self._flights()
        first: dict[str, int] = {}
        for index, group in enumerate(self.groups):
            for op in group.ops:
                for _, ref in op.refs():
                    value = self.graph.values[ref.value]
                    if value.kind is not Kind.ACTIVATION or ref.value in group.internal:
                        continue
                    first.setdefault(ref.value, index)
                    if index not in self.accesses.setdefault(ref.value, []):
                        self.accesses[ref.value].append(index)
            for name, nbytes in group.spec.scratch.items():
                if name in group.spec.zeroed:
                    continue
                buffer = f"call{index}.{name}"
                self.accesses[buffer] = [index]
                self.lifetimes.append(memory.Lifetime(buffer, nbytes, index, flights.get(index, index), group.rank))
        for name, start in first.items():
            value = self.graph.values[name]
            last = len(self.groups) - 1 if name in self.graph.outputs | self.graph.kept else self.accesses[name][-1]
            last = max([last, *(flights[index] for index in self.accesses[name] if index in flights)])
            self.lifetimes.append(memory.Lifetime(name, value.nbytes, start, last, value.rank))

    def _hazards(self) -> set[tuple[int, int]]:
        owner = {node: index for index, group in enumerate(self.groups) for node in group.nodes}
        edges = {(owner[u], owner[v]) for u, v in self.graph.dag.edges if owner[u] != owner[v]}
        for before, after in edges:
            if before > after:
                raise IRError(f"graph {self.graph.name}: call {after} is scheduled before call {before} that it needs")
        return edges

    def _args(self, group: Group, placements: Mapping[str, Placement], scratch: Mapping[str, Placement]) -> list[Arg]:
        out = []
        absent = {name for op in group.ops for name in definition(op.kind).optional} - set(group.operands)
        for name in group.spec.args:
            if name in group.spec.scalars:
                number = group.spec.scalars[name]
                out.append(Arg(name, "float" if isinstance(number, float) else "int", number=number))
            elif name in scratch:
                place = scratch[name]
                out.append(Arg(name, "pointer", place.region, place.offset, rank=place.rank))
            elif name in group.operands:
                out.append(self._pointer(name, group.operands[name], placements, group.ops[0].half))
            elif name.endswith("_stride") and name[: -len("_stride")] in group.operands:
                ref = group.operands[name[: -len("_stride")]]
                out.append(Arg(name, "int", number=self.graph.values[ref.value].type.shape[-1]))
            elif name in absent:
                out.append(Arg(name, "null"))
            elif name in CHANNEL:
                out.append(Arg(name, "pointer", name, rank=group.rank))
            elif name in LATE:
                out.append(Arg(name, "int"))
            elif name.endswith("_stride") and name[: -len("_stride")] in absent:
                out.append(Arg(name, "int"))
            else:
                base, _, plane = name.rpartition("_")
                if plane not in PLANES or base not in group.operands:
                    raise IRError(f"kernel {group.spec.entry}: argument {name} is no operand, scalar or scratch")
                value = self.graph.values[group.operands[base].value]
                offsets = weight_planes(value)
                if plane not in offsets:
                    out.append(Arg(name, "null"))
                else:
                    place = self.shared[value.name]
                    out.append(Arg(name, "pointer", place.region, place.offset + offsets[plane], rank=place.rank))
        return out

    def _pointer(self, name: str, ref: Ref, placements: Mapping[str, Placement], half: int | None) -> Arg:
        value = self.graph.values[ref.value]
        place = placements[ref.value] if ref.value in placements else self.shared[ref.value]
        first = half * value.type.elements // 2 if half and value.kind is Kind.ACTIVATION else 0
        return Arg(name, "pointer", place.region, place.offset + (first + ref.offset) * DTYPE_BYTES[value.type.dtype],
                   rank=place.rank)  # fmt: skip
