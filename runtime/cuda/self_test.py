"""Which transport a pair of devices uses: each is tried on the very pair with the program's own kernels, inside a graph, on
known payloads both ways. One that gives a wrong byte, hangs, is slow or not allowed is left out with a reason."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from compiler.ir.types import TensorType
from compiler.kernels.exchange import Mail, in_slices, probe_specs
from compiler.kernels.spec import KernelSpec
from compiler.program.model import Program
from runtime.cuda.chain import Chain, Links
from runtime.cuda.device import Device
from runtime.cuda.driver import DeviceError
from runtime.cuda.modules import Modules
from runtime.cuda.transport import HOST, PEER, STAGED, TRANSPORTS, exchange_op, operand_types, peer_access

TEST_EXCHANGES = 16
TEST_LIMIT_MS = 50.0  # a self-test slower than this is no use
TEST_COLUMNS = 64  # of a chunk of prefill: as many as show what its kernels do
REPLAYS = 3
_log = logging.getLogger("ninferc")


@dataclass(frozen=True)
class Trial:
    """Result of a self-test: microseconds per exchange of one column, or why the transport is not used."""

    transport: str
    microseconds: float = 0.0
    problem: str = ""


@dataclass(frozen=True)
class _Case:
    columns: int
    width: int
    wire: str
    specs: tuple[KernelSpec, ...]
    sliced: bool


def _cases(program: Program, transport: str) -> Iterator[_Case]:
    """One column in words by the kernels that programs carry for this test, and the widest exchange that travels as slices."""
    yield _Case(1, program.spec.hidden, "f32", probe_specs(program.spec.hidden, program.caps), False)
    widest: dict[int, _Case] = {}
    for phase in program.phases.values():
        for item in phase.calls:
            op = exchange_op(item)
            if op is None or transport == STAGED:
                continue
            types = operand_types(program, phase, op)
            if not in_slices(op, types, transport) or program.kernels[item.entry].spec.early:
                continue  # in a chain of exchanges nothing is settled
            columns, width = types["y"].shape
            if item.rank not in widest or widest[item.rank].columns < columns:
                spec = program.kernels[item.entry].spec
                widest[item.rank] = _Case(columns, width, str(op.attrs["wire"]), (spec,), True)
    if widest:
        first = widest[0]
        specs = tuple(widest[rank].specs[0] for rank in sorted(widest))
        yield _Case(min(first.columns, TEST_COLUMNS), first.width, first.wire, specs, True)


def _mail(case: _Case) -> Mail:
    """Memory for the test alone: the kernels take its extents as numbers."""
    nbytes = TensorType((case.columns, case.width), case.wire).nbytes
    slices = case.columns * int(case.specs[0].params["parts"])
    return Mail(-(-nbytes // 64) * 16, slices, -(-nbytes // 256) * 256)


def self_test(program: Program, modules: Modules, devices: list[Device], transport: str, corrupt: bool = False) -> Trial:
    """Send known payloads both ways inside a graph, compare every value, measure. ``corrupt`` spoils a received byte
    (tests)."""
    if transport == PEER and (reason := peer_access(devices)):
        return Trial(transport, problem=reason)
    begin = next(program.kernels[item.entry].spec for phase in program.phases.values() for item in phase.calls
                 if item.ops[0].kind == "exchange_begin")  # fmt: skip
    result = Trial(transport)
    try:
        for case in _cases(program, transport):
            chain = Chain(devices, modules, Links(begin, case.specs), case.width, case.columns, case.wire, transport,
                          _mail(case), TEST_EXCHANGES, program.caps.programmatic_edges)  # fmt: skip
            try:
                best = float("inf")
                for _ in range(REPLAYS):
                    best = min(best, chain.replay()[0])
                    found = [raw.copy() for raw in chain.results()]
                    if corrupt:
                        found[0][1] ^= 0x10
                    what = f"{'slices' if case.sliced else 'words'}: "
                    if problem := chain.problem(found):
                        return Trial(transport, problem=what + problem)
            finally:
                chain.close()
            if best * 1e3 > TEST_LIMIT_MS:
                return Trial(transport, problem=f"{what}{TEST_EXCHANGES} exchanges took {best * 1e3:.0f} ms")
            if not case.sliced:
                result = Trial(transport, best / TEST_EXCHANGES * 1e6)
    except DeviceError as error:
        return Trial(transport, problem=str(error))
    return result


def choose(program: Program, modules: Modules, devices: list[Device], wanted: str = "auto",
           corrupt: frozenset[str] = frozenset()) -> str:  # fmt: skip
    """The transport to use: the one asked for if it works, else (``auto``) the faster of peer and host memory; staged copies,
    which cost a launch of their own per exchange, when neither works.

    Every rejected transport is logged with the reason. Raises DeviceError when the one asked for, or every one, fails."""
    if wanted not in ("auto", *TRANSPORTS):
        raise DeviceError(f"--transport {wanted!r}: allowed are auto, {', '.join(TRANSPORTS)}")
    reasons: list[str] = []

    def passing(transports: tuple[str, ...]) -> list[Trial]:
        passed = []
        for transport in transports:
            trial = self_test(program, modules, devices, transport, transport in corrupt)
            if trial.problem:
                reasons.append(f"{transport}: {trial.problem}")
                _log.warning("transport %s is not used: %s", transport, trial.problem)
            else:
                _log.info("transport %s: %.1f µs per exchange", transport, trial.microseconds)
                passed.append(trial)
        return passed

    passed = passing((PEER, HOST)) or passing((STAGED,)) if wanted == "auto" else passing((wanted,))
    if not passed:
        pair = f"devices {devices[0].index} and {devices[1].index}"
        raise DeviceError(f"no transport between {pair} works ({'; '.join(reasons)})")
    best = min(passed, key=lambda trial: trial.microseconds)
    for trial in passed:
        if trial is not best:
            _log.info("transport %s is not used: %.1f µs, %s takes %.1f", trial.transport, trial.microseconds, best.transport,
                      best.microseconds)  # fmt: skip
    return best.transport


__all__ = ["HOST", "PEER", "STAGED", "Trial", "choose", "self_test"]
