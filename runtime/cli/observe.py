"""What ``--log-level`` shows besides the rows: log records of the runtime, time of compiling, memory, graphs, steps."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from compiler.explain.memory import amount
from compiler.program.model import WORK, Phase, Program
from runtime.backend import Backend, BackendAround
from runtime.cli.io import Diagnostics, Level

LOGGER = "ninferc"
LEVEL_OF = {logging.DEBUG: Level.TRACE, logging.INFO: Level.DEBUG, logging.WARNING: Level.WARNING, logging.ERROR: Level.ERROR}
"""Levels of log records: what the runtime notes in passing is a level deeper than the rows of a command."""


class _Records(logging.Handler):
    """Log records as lines on stderr."""

    def __init__(self, say: Diagnostics) -> None:
        super().__init__()
        self._say = say

    def emit(self, record: logging.LogRecord) -> None:
        self._say.line(" ".join(record.getMessage().split()), LEVEL_OF.get(record.levelno, Level.ERROR))


def open_diagnostics(name: str | None) -> Diagnostics:
    """stderr at the level of ``--log-level`` (None: info). Log records of the runtime go there too, and nowhere else."""
    say = Diagnostics(level=Level[(name or "info").upper()])
    logger = logging.getLogger(LOGGER)
    logger.handlers[:] = [_Records(say)]
    logger.propagate = False
    logger.setLevel(min((record for record, level in LEVEL_OF.items() if say.says(level)), default=logging.CRITICAL))
    return say


@contextmanager
def timed(say: Diagnostics, what: str) -> Iterator[None]:
    """A debug line with the seconds that a part of the command took."""
    started = time.monotonic()
    yield
    say.line(f"{what}: {time.monotonic() - started:.3f} s", Level.DEBUG)


@contextmanager
def compile_progress(say: Diagnostics, arch: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress callback of compiling: a bar on a terminal, and one line in any case. Nothing shows when every kernel
    comes from the cache. Debug: how long each part took, and how many kernels were compiled; trace: each of them."""
    began = time.monotonic()
    kernels: float | None = None
    cached = total = 0
    last = began
    with say.progress("compiling kernels", 0) as bar:

        def report(done: int, count: int, entry: str) -> None:
            nonlocal kernels, cached, total, last
            now = time.monotonic()
            bar.total = total = count
            if kernels is None:
                kernels, cached = now, done
                say.line(f"graphs, passes and sources: {now - began:.3f} s", Level.DEBUG)
                if done < count:
                    say.line(f"compiling {count - done} kernels for {arch}")
            if entry and done > cached:
                say.line(f"kernel {entry} compiled after {now - kernels:.3f} s, {done} of {count}", Level.TRACE)
            bar.advance(done - bar.done)
            last = now

        yield report
    if kernels is None:
        say.line("no kernel was asked for: the whole program is in the cache", Level.DEBUG)
    else:
        say.line(f"kernels: {total - cached} compiled, {cached} from the cache: {last - kernels:.3f} s", Level.DEBUG)
        say.line(f"program written: {time.monotonic() - last:.3f} s", Level.DEBUG)


def workspace(phase: Phase, rank: int) -> int:
    """Bytes that the activations and scratch of a phase take of a rank's workspace."""
    places = [*phase.placements.values(), *(place for item in phase.calls for place in item.scratch.values())]
    return max((place.end for place in places if place.region == WORK and place.rank == rank), default=0)


def describe(say: Diagnostics, program: Program) -> None:
    """Debug: memory by region, nodes of every graph; trace: resources of every kernel."""
    for rank, regions in enumerate(program.regions):
        sizes = ", ".join(f"{name} {amount(nbytes)}" for name, nbytes in regions.items() if nbytes)
        say.line(f"regions of rank {rank}: {sizes}", Level.DEBUG)
    for phase in program.phases.values():
        edges = sum(item.programmatic for item in phase.calls)
        needs = " / ".join(amount(workspace(phase, rank)) for rank in range(program.tp))
        say.line(f"graph {phase.name}: {len(phase.calls)} nodes of {len({item.entry for item in phase.calls})} kernels, "
                 f"{edges} may start early, workspace {needs}", Level.DEBUG)  # fmt: skip
    for entry, image in program.kernels.items():
        found = image.resources
        say.line(f"kernel {entry}: {found.registers} registers, {image.spec.smem} bytes of dynamic shared memory, cubin of "
                 f"{amount(len(image.image))}", Level.TRACE)  # fmt: skip


class ObservedBackend(BackendAround):
    """``inner``, with its launches counted, and at trace level each of them said."""

    def __init__(self, inner: Backend, say: Diagnostics) -> None:
        super().__init__(inner)
        self._say = say
        self.launches: Counter[str] = Counter()
        self._last = time.monotonic()

    def launch(self, phase: str) -> None:
        step, started = self.ingress.step, time.monotonic()
        self.inner.launch(phase)
        self.launches[phase] += 1
        if self._say.says(Level.TRACE):
            self._say.line(f"step {step}: {phase}, {(started - self._last) * 1e3:.3f} ms after the last, "
                           f"{(time.monotonic() - started) * 1e3:.3f} ms to launch", Level.TRACE)  # fmt: skip
        self._last = started

    def said(self) -> str:
        """How often each graph was launched."""
        return ", ".join(f"{count} {phase}" for phase, count in self.launches.items()) or "none"
