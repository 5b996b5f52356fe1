"""Where the time of one step goes: per kernel, alone and inside the graph.

*Isolated* is a graph of that kernel's calls between the control nodes, less the control nodes; *in graph* the time the
whole graph loses when these calls are left out: the difference is what
overlaps with neighbours (programmatic edges) or waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from compiler.explain.cost import call_cost
from compiler.program.model import Phase
from runtime.bench.measure import Bench


@dataclass(frozen=True)
class KernelProfile:
    """One kernel of a phase. Times in seconds for all its ``calls`` of one step, ``nbytes`` for the same."""

    entry: str
    kinds: str
    calls: int
    isolated: float
    in_graph: float
    nbytes: int


class Profiler:
    """Profiles decode phases of a loaded backend. Leaving calls out makes the values of a step meaningless, never its
    control: ``begin`` and ``advance`` always run."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._backend = bench.backend

    def _time(self, phase: Phase, keep: list[int], context: int, steps: int) -> float:
        backend = self._backend
        kept = replace(phase, calls=tuple(phase.calls[i] for i in keep))
        return self._bench.replay(kept, backend.modules, backend.argument_address, context, steps)

    def run(self, lanes: int, width: int, context: int, steps: int = 20) -> tuple[float, list[KernelProfile]]:
        """Seconds of the whole step, and its kernels by their share in the graph, largest first."""
        phase = self._backend.program.phases[f"decode{lanes}x{width}"]
        everything = list(range(len(phase.calls)))
        whole = self._time(phase, everything, context, steps)
        ends = [everything[0], everything[-1]]
        empty = self._time(phase, ends, context, steps)
        out = []
        for entry in dict.fromkeys(item.entry for item in phase.calls):
            mine = [item.index for item in phase.calls if item.entry == entry]
            control = phase.calls[mine[0]].ops[0].kind in ("begin", "advance")
            rest = [i for i in everything if phase.calls[i].entry != entry]
            alone = [ends[0], *mine, ends[1]]  # begin lays out the tokens and the work list that kernels read
            isolated = self._time(phase, alone, context, steps) - empty if not control else empty
            without = whole if control else self._time(phase, rest, context, steps)
            costs = [call_cost(self._backend.program, phase, phase.calls[i], context) for i in mine]
            kinds = "+".join(op.kind for op in phase.calls[mine[0]].ops)
            out.append(KernelProfile(entry, kinds, len(mine), isolated, whole - without,
                                     sum(cost.read + cost.written for cost in costs)))  # fmt: skip
        return whole, sorted(out, key=lambda item: -item.in_graph)
