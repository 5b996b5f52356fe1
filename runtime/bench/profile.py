"""Where the time of one decode step goes: every kernel alone, what the step loses without it, and when each node ran.

*Isolated* is a graph of a kernel's calls and the control nodes, less a graph of the control nodes alone; *in graph* the
time that the whole step loses when these calls are left out. The difference is the *overlap*: what runs while neighbours
drain or start (programmatic edges); negative where a kernel makes its neighbours wait longer than it runs alone.

The *timeline* comes from a graph of the same kernels with two more stores each (``compiler/emit/stamp.py``): the device's
timer at the first block's start and at the last warp's end. A node starts early under a programmatic edge, then waits for
the end of the node before.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from compiler.emit.cache import Job, compile_all
from compiler.emit.nvrtc import CompileError
from compiler.emit.stamp import ARGUMENT, STAMP_BYTES, SUFFIX, stamped
from compiler.explain.cost import call_cost
from compiler.ir.op import Array
from compiler.kernels.exchange import KINDS
from compiler.program.io import ProgramError
from compiler.program.model import Arg, Call, KernelImage, Phase
from runtime.bench.measure import Bench
from runtime.cuda.driver import DeviceError
from runtime.cuda.modules import Modules

CONTROL = frozenset({"begin", "advance", "exchange_begin"})
PLAIN_BEFORE = 3  # plain replays in front of each stamped one: caches and clocks as in a running session


@dataclass(frozen=True)
class KernelProfile:
    """One kernel of a step, per device, with the calls that only wait for what it sends. Times in seconds for all its
    ``calls`` of one step, ``nbytes`` for the same. Of the control calls, which cannot be left out, ``in_graph`` is what the
    timeline says."""

    entry: str
    kinds: str
    calls: int
    isolated: float
    in_graph: float
    nbytes: int

    @property
    def overlap(self) -> float:
        return self.isolated - self.in_graph

    @property
    def rate(self) -> float:
        """Bytes/s inside the step; 0 where leaving the kernel out saves nothing."""
        return self.nbytes / self.in_graph if self.in_graph > 0 else 0.0


@dataclass(frozen=True)
class Span:
    """One node in the graph. Seconds since the first node of the step started, on any device."""

    index: int
    rank: int
    entry: str
    kinds: str
    layer: int
    start: float
    end: float
    nbytes: int


@dataclass(frozen=True)
class StepProfile:
    """A step of ``lanes`` × ``width`` columns at ``context`` tokens. ``seconds`` of a plain replay, ``stamped_seconds`` of
    one whose kernels note their times; ``devices`` are names by rank."""

    model: str
    phase: str
    lanes: int
    width: int
    context: int
    devices: tuple[str, ...]
    seconds: float
    stamped_seconds: float
    kernels: tuple[KernelProfile, ...]
    spans: tuple[Span, ...]


def kinds(item: Call) -> str:
    return "+".join(op.kind for op in item.ops)


def is_control(item: Call) -> bool:
    """Calls without which no step can run: they stay in every graph that is measured."""
    return item.ops[0].kind in CONTROL


def groups_of(phase: Phase) -> dict[int, str]:
    """The kernel that each call counts as, by call index: of the n-th call of every rank that of rank 0, so that the ranks'
    shares of one op are left out together; a call that waits for words which products send counts as that product. An
    exchange without its counterpart would wait for good."""
    by_rank: dict[int, list[Call]] = {}
    for item in phase.calls:
        by_rank.setdefault(item.rank, []).append(item)
    first = by_rank[0]
    for rank, calls in by_rank.items():
        if [kinds(item) for item in calls] != [kinds(item) for item in first]:
            raise DeviceError(f"profile: rank {rank} of {phase.name} runs other ops than rank 0")
    sender = {op.attrs["ordinal"]: item.entry for item in first for op in item.ops
              if "ordinal" in op.attrs and op.kind not in KINDS}  # fmt: skip
    names = [next((sender[o] for op in item.ops if (o := op.attrs.get("ordinal")) in sender), item.entry) for item in first]
    return {item.index: names[n] for calls in by_rank.values() for n, item in enumerate(calls)}


def working(spans: Sequence[Span], index: int) -> float:
    """Seconds that node ``index`` adds after the node before it on its device has ended."""
    own = spans[index]
    before = [span.end for span in spans[:index] if span.rank == own.rank]
    return own.end - max(own.start, before[-1] if before else own.start)


def align(spans: Sequence[Span]) -> list[Span]:
    """Bring all devices to one clock, 0 at the earliest start. Device timers are set apart from each other; the two ends of
    an exchange lie within the time of one word's way, so the median of their differences is the offset."""
    ends: dict[int, list[float]] = {}
    for span in sorted(spans, key=lambda s: s.index):
        times = ends.setdefault(span.rank, [])
        if any(kind in KINDS for kind in span.kinds.split("+")):
            times.append(span.end)
    starts = {rank: min(s.start for s in spans if s.rank == rank) for rank in ends}
    base = min(ends)
    offset = {rank: statistics.median(np.subtract(times, ends[base]).tolist()) if times else starts[rank] - starts[base]
              for rank, times in ends.items()}  # fmt: skip
    zero = min(starts[rank] - offset[rank] for rank in ends)
    return [replace(s, start=s.start - offset[s.rank] - zero, end=s.end - offset[s.rank] - zero) for s in spans]


def read_stamps(stamps: Array) -> tuple[Array, Array]:
    """Starts and ends in seconds from the words of ``Stamp``, uint64 [nodes, 2]. Raises DeviceError when one did not run."""
    if not stamps.all():
        raise DeviceError(f"profile: node {int(np.argmin(stamps.all(axis=1)))} of the step left no time stamp")
    start, end = ~stamps[:, 0], stamps[:, 1]
    origin = start.min()
    return (start - origin).astype(np.float64) * 1e-9, (end - origin).astype(np.float64) * 1e-9


class Profiler:
    """Profiles decode phases of a loaded backend. Leaving calls out makes the values of a step meaningless, never its
    control, which always runs."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._backend = bench.backend

    def _time(self, phase: Phase, keep: Sequence[Call], context: int, steps: int) -> float:
        kept = replace(phase, calls=tuple(keep))
        return self._bench.replay(kept, self._backend.modules, self._backend.argument_address, context, steps)

    def run(self, lanes: int, width: int, context: int, steps: int = 20, samples: int = 9) -> StepProfile:
        """Measure one phase: kernels by their share, largest first, and the timeline."""
        program = self._backend.program
        phase = program.phases[f"decode{lanes}x{width}"]
        cost = [call_cost(program, phase, item, context) for item in phase.calls]
        nbytes = [one.read + one.written for one in cost]
        whole = self._time(phase, phase.calls, context, steps)
        control = [item for item in phase.calls if is_control(item)]
        empty = self._time(phase, control, context, steps)
        kernels = []
        group_of = groups_of(phase)
        for group in dict.fromkeys(group_of[item.index] for item in phase.calls if not is_control(item)):
            mine = [item for item in phase.calls if group_of[item.index] == group]
            rest = [item for item in phase.calls if group_of[item.index] != group]
            alone = [item for item in phase.calls if group_of[item.index] == group or is_control(item)]
            isolated = self._time(phase, alone, context, steps) - empty
            without = self._time(phase, rest, context, steps)
            own = [[item for item in mine if item.rank == rank] for rank in range(program.tp)]
            moved = max(sum(nbytes[item.index] for item in part) for part in own)
            kernels.append(KernelProfile(group, ", ".join(dict.fromkeys(kinds(item) for item in mine)),
                                         sum(item.entry == group for item in own[0]), isolated, whole - without, moved))
        spans, seconds = self._timeline(phase, nbytes, context, samples)
        steady = [item for item in control if item.rank == 0]
        kernels.append(KernelProfile("control", ", ".join(map(kinds, steady)), len(steady), empty,
                                     sum(working(spans, item.index) for item in steady),
                                     sum(nbytes[item.index] for item in steady)))  # fmt: skip
        identity = program.artifact
        return StepProfile(f"{identity.model_id}/{identity.weights_id}", phase.name, lanes, width, context,
                           tuple(device.info().name for device in self._backend.devices), whole, seconds,
                           tuple(sorted(kernels, key=lambda item: -item.in_graph)), tuple(spans))  # fmt: skip

    def _timeline(self, phase: Phase, nbytes: Sequence[int], context: int, samples: int) -> tuple[list[Span], float]:
        """Medians over ``samples`` replays of every node's start and end, and the median seconds of such a replay."""
        backend = self._backend
        arch = backend.program.caps.arch
        images = {entry: backend.program.kernels[entry] for entry in {item.entry for item in phase.calls}}
        sources = {entry + SUFFIX: stamped(entry, image.source) for entry, image in images.items()}
        try:
            cubins = compile_all([Job(entry, source, arch) for entry, source in sources.items()])
        except CompileError as error:  # its message is the compiler's, of many lines
            first = str(error).splitlines()[0]
            raise ProgramError("profile compiles the program's sources again, and they do not fit the headers of this version: "
                               f"compile the program again ({first[:120]})") from error  # fmt: skip
        modules = Modules({entry + SUFFIX: KernelImage(image.spec, sources[entry + SUFFIX], cubins[entry + SUFFIX].image,
                                                       cubins[entry + SUFFIX].resources) for entry, image in images.items()},
                          backend.devices)  # fmt: skip
        size = STAMP_BYTES * len(phase.calls)
        memory = [device.allocate(size, "time stamps") for device in backend.devices]

        def noting(item: Call) -> Call:
            stamp = Arg(ARGUMENT, "pointer", "absolute", memory[item.rank] + STAMP_BYTES * item.index)
            return replace(item, entry=item.entry + SUFFIX, args=(*item.args, stamp))

        noted = replace(phase, calls=tuple(noting(item) for item in phase.calls))
        starts, ends = np.empty((samples, len(phase.calls))), np.empty((samples, len(phase.calls)))

        def address(arg: Arg) -> int:
            return arg.offset if arg.region == "absolute" else backend.argument_address(arg)

        def collect(sample: int) -> None:
            """Read the stamps of the replay just done and clear them for the next."""
            for rank, device in enumerate(backend.devices):
                mine = [item.index for item in phase.calls if item.rank == rank]
                words = device.download(memory[rank], size).view(np.uint64).reshape(-1, 2)
                starts[sample, mine], ends[sample, mine] = read_stamps(words[mine])
                device.upload(memory[rank], np.zeros(size, np.uint8))

        try:
            seconds = self._bench.replay(noted, modules, address, context, PLAIN_BEFORE)
            for rank, device in enumerate(backend.devices):
                device.upload(memory[rank], np.zeros(size, np.uint8))
            self._bench.replay_after(phase, noted, modules, address, context, PLAIN_BEFORE, samples, collect)
        finally:
            for rank, device in enumerate(backend.devices):
                device.release(memory[rank])
            modules.close()
        start, end = np.median(starts, axis=0), np.median(ends, axis=0)
        spans = [Span(item.index, item.rank, item.entry, kinds(item), item.ops[0].layer, float(start[i]), float(end[i]),
                      nbytes[i]) for i, item in enumerate(phase.calls)]  # fmt: skip
        return align(spans), seconds
