"""How the words of an exchange travel between two ranks: buffers, choice and self-test of a transport.

``peer``: kernels store into the other device's memory. ``host``: into page-locked host memory. ``staged``: copies inside the
graph, ordered by its edges. The faster ones are tried on the very pair with the program's own exchange kernels; one that
gives a wrong byte, hangs or is not allowed is left out with a reason.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from compiler.ir.op import Array, Op
from compiler.kernels.exchange import KINDS, words
from compiler.program.model import Arg, Call, Phase, Program
from runtime.cuda.device import Device, PinnedBuffer
from runtime.cuda.driver import DeviceError, api, call
from runtime.cuda.graph import GraphPhase
from runtime.cuda.modules import Modules, PackedArgs

PEER, HOST, STAGED = "peer", "host", "staged"
TRANSPORTS = (PEER, HOST, STAGED)  # in order of preference; the position is the number that kernels know
SCRUB = 1 << 31  # exchanges after which old words are cleared, so that no number of the last round stands anywhere
TEST_EXCHANGES = 16
TEST_LIMIT_MS = 50.0  # a self-test slower than this is no use
_log = logging.getLogger("ninferc")


def exchange_op(item: Call) -> Op | None:
    """The exchange that a call performs, None for any other call."""
    return next((op for op in item.ops if op.kind in KINDS), None)


def own_operand(op: Op) -> str:
    return "candidates" if op.kind == "sample_merge" else "partial"


def op_words(program: Program, phase: Phase, op: Op) -> int:
    return words(op, {name: program.value(phase, ref.value).type for name, ref in op.refs()})


def payload_bytes(program: Program, phase: Phase, op: Op) -> int:
    """Bytes of one rank's contribution as it lies in memory (FP32)."""
    return program.value(phase, op.inputs[own_operand(op)].value).type.nbytes


def slot_words(program: Program) -> int:
    """Words of the largest exchange of a program."""
    sizes = [op_words(program, phase, op) for phase in program.phases.values() for item in phase.calls
             if (op := exchange_op(item)) is not None]  # fmt: skip
    return max(sizes, default=2)


def peer_access(devices: list[Device]) -> str | None:
    """Enable direct access both ways. Returns why there is none, or None."""
    driver = api()
    if devices[0].index == devices[1].index:
        return None
    for device, other in ((devices[0], devices[1]), (devices[1], devices[0])):
        if not call(driver.cuDeviceCanAccessPeer(device.handle, other.handle), "peer access"):
            return f"device {device.index} cannot reach the memory of device {other.index}"
    for device, other in ((devices[0], devices[1]), (devices[1], devices[0])):
        device.activate()
        (status,) = driver.cuCtxEnablePeerAccess(other.context, 0)
        if status not in (driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED):
            return f"peer access of device {device.index} to {other.index}: {status.name}"
    return None


class Exchange:
    """Buffers of one transport between the two ranks of a program. ``words`` per slot, two slots each way."""

    def __init__(self, devices: list[Device], words: int, transport: str) -> None:
        self.transport, self.words, self.devices = transport, words, devices
        nbytes = 16 * words
        self._pinned = [PinnedBuffer(256)]
        self.hang = self._pinned[0].array.view(np.uint32)
        self._inbox = [device.allocate(nbytes, "exchange") for device in devices]
        self._relay = [0, 0]
        self._mail: list[PinnedBuffer] = []
        if transport == HOST:
            self._relay = self._inbox
            self._mail = [PinnedBuffer(nbytes) for _ in devices]  # read by rank r
            self._pinned += self._mail
        self._since_scrub = 0
        for device in devices:
            device.synchronize()

    def address(self, arg: Arg) -> int:
        """Where a channel argument of a kernel of ``arg.rank`` points."""
        own, other = arg.rank, 1 - arg.rank
        if arg.region == "hang":
            return self._pinned[0].address
        if arg.region == "relay":
            return self._relay[own]
        reader = own if arg.region == "inbox" else other
        return self._mail[reader].address if self.transport == HOST else self._inbox[reader]

    def complete(self, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
        """Arguments with the numbers that depend on the transport."""
        late = {"transport": TRANSPORTS.index(self.transport), "slot_words": self.words}
        return tuple(replace(arg, number=late[arg.name]) if arg.name in late else arg for arg in args)

    def lost(self) -> bool:
        """Whether a rank gave up waiting for the other since the last ``resynchronise``."""
        return bool(self.hang[0])

    def clear(self) -> None:
        """Forget every word sent so far. Nothing may be running."""
        for device, inbox in zip(self.devices, self._inbox, strict=True):
            device.activate()
            call(api().cuMemsetD8Async(inbox, 0, 16 * self.words, device.stream), "clear the exchange")
            device.synchronize()
        for buffer in self._mail:
            buffer.array[:] = 0
        self.hang[:] = 0

    def launched(self, count: int, settle: Callable[[], None]) -> None:
        """Count exchanges of a launch about to be made; clears old words in time, after ``settle`` has waited."""
        self._since_scrub += count
        if self._since_scrub >= SCRUB:
            settle()
            self.clear()
            self._since_scrub = count

    def copies(self, sources: dict[int, int], nbytes: int) -> list[tuple[int, int, int, int]]:
        """Staged: (rank, destination, source, bytes) of the pulls, from the ranks' own contributions."""
        return [(rank, self._inbox[rank], sources[1 - rank], nbytes) for rank in (0, 1)]

    def close(self) -> None:
        for device, inbox in zip(self.devices, self._inbox, strict=True):
            with suppress(DeviceError):  # of a lost device, which was reported before
                device.release(inbox)
        for buffer in self._pinned:
            buffer.close()


@dataclass(frozen=True)
class Trial:
    """Result of a self-test: microseconds per exchange, or why the transport is not used."""

    transport: str
    microseconds: float = 0.0
    problem: str = ""


def _test_calls(program: Program) -> tuple[list[Call], int]:
    """The first exchange of the residual stream of each rank in the narrowest decode phase, and its width."""
    phases = [p for p in program.phases.values() if p.phase == "decode"]
    phase = min(phases, key=lambda p: p.columns)
    found: dict[int, Call] = {}
    width = 0
    for item in phase.calls:
        op = exchange_op(item)
        if op is not None and op.kind == "exchange_residual" and item.rank not in found:
            found[item.rank] = item
            width = program.value(phase, op.inputs["partial"].value).type.elements
    return [found[rank] for rank in sorted(found)], width


def self_test(program: Program, modules: Modules, devices: list[Device], transport: str, corrupt: bool = False) -> Trial:
    """Send known payloads both ways inside a graph, compare every value, measure. ``corrupt`` spoils a received byte
    (tests)."""
    if transport == PEER and (reason := peer_access(devices)):
        return Trial(transport, problem=reason)
    calls, width = _test_calls(program)
    begin = next(item for item in next(iter(program.phases.values())).calls if item.ops[0].kind == "exchange_begin")
    exchange = Exchange(devices, width, transport)
    rng = np.random.default_rng(20)
    partials = [rng.standard_normal(width).astype(np.float32) for _ in devices]
    graph: GraphPhase | None = None
    memory: list[tuple[Device, int]] = []

    def allocate(device: Device, data: Array) -> int:
        address = device.allocate(data.nbytes, "transport test")
        memory.append((device, address))
        device.upload(address, data)
        return address

    try:
        named: list[dict[str, int]] = []
        for rank, device in enumerate(devices):
            room = np.zeros(2 * width, np.uint8)
            words16 = np.zeros(4, np.uint32)
            data: dict[str, Array] = {"partial": partials[rank], "residual": room, "y": room, "normed": room, "norm_w": room,
                    "sequence": words16, "step": words16}  # fmt: skip
            named.append({name: allocate(device, array) for name, array in data.items()})

        def absolute(item: Call, index: int, ordinal: int) -> Call:
            fixed = {"ordinal": ordinal, "count": TEST_EXCHANGES}
            args = []
            for arg in exchange.complete(item.args):
                if arg.name in named[item.rank]:
                    args.append(replace(arg, region="absolute", offset=named[item.rank][arg.name]))
                else:
                    args.append(replace(arg, number=fixed[arg.name]) if arg.name in fixed else arg)
            op = item.ops[0]
            ops = (replace(op, attrs=dict(op.attrs) | {"ordinal": ordinal}), *item.ops[1:])
            return replace(item, index=index, args=tuple(args), ops=ops, deps=(), scratch={})

        sequence = [absolute(replace(begin, rank=rank), rank, 0) for rank in range(2)]
        for ordinal in range(TEST_EXCHANGES):
            sequence += [absolute(item, len(sequence) + i, ordinal) for i, item in enumerate(calls)]
        phase = Phase("transport test", "decode", 1, 1, tuple(sequence), {}, {})

        def address(arg: Arg) -> int:
            return arg.offset if arg.region == "absolute" else exchange.address(arg)

        packed = [PackedArgs(item.args, address) for item in sequence]
        graph = GraphPhase(phase, modules, packed, devices, program.caps.programmatic_edges,
                           Staging(exchange, address, lambda op: 4 * width) if transport == STAGED else None)  # fmt: skip
        best = float("inf")
        for _ in range(3):
            start = time.perf_counter()
            graph.launch(devices[0])
            for device in devices:
                device.synchronize()
            best = min(best, time.perf_counter() - start)
        if exchange.lost():
            return Trial(transport, problem="the other rank's words did not arrive")
        half = calls[0].ops[0].attrs["wire"] == "bf16"
        shown = [_bf16(p) if half else p for p in partials]
        want = _bf16(shown[0] + shown[1])
        for rank, device in enumerate(devices):
            raw = device.download(named[rank]["y"], 2 * width)
            if corrupt:
                raw = raw.copy()
                raw[1] ^= 0x10
            got = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
            if not np.array_equal(got, want):
                return Trial(transport, problem=f"{int((got != want).sum())} of {width} values arrived wrong at rank {rank}")
        if best * 1e3 > TEST_LIMIT_MS:
            return Trial(transport, problem=f"{TEST_EXCHANGES} exchanges took {best * 1e3:.0f} ms")
        return Trial(transport, best / TEST_EXCHANGES * 1e6)
    except DeviceError as error:
        return Trial(transport, problem=str(error))
    finally:
        if graph is not None:
            graph.close()
        for device, address_ in memory:
            device.release(address_)
        exchange.close()


def _bf16(values: Array) -> Array:
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded: Array = ((bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)).view(np.float32)
    return rounded


def choose(program: Program, modules: Modules, devices: list[Device], wanted: str = "auto",
           corrupt: frozenset[str] = frozenset()) -> str:  # fmt: skip
    """The transport to use: the one asked for if it works, else (``auto``) the fastest that passes its self-test.

    Every rejected transport is logged with the reason. Raises DeviceError when the one asked for, or every one, fails."""
    if wanted not in ("auto", *TRANSPORTS):
        raise DeviceError(f"--transport {wanted!r}: allowed are auto, {', '.join(TRANSPORTS)}")
    reasons = []
    for transport in TRANSPORTS if wanted == "auto" else (wanted,):
        trial = self_test(program, modules, devices, transport, transport in corrupt)
        if not trial.problem:
            _log.info("transport %s: %.1f µs per exchange", transport, trial.microseconds)
            return transport
        reasons.append(f"{transport}: {trial.problem}")
        _log.warning("transport %s is not used: %s", transport, trial.problem)
    raise DeviceError(f"no transport between devices {devices[0].index} and {devices[1].index} works ({'; '.join(reasons)})")


@dataclass
class Staging:
    """What a graph or an eager launch needs to copy contributions: ``nbytes`` of an exchange op's payload."""

    exchange: Exchange
    address: Callable[[Arg], int]
    nbytes: Callable[[Op], int]

    def pulls(self, phase: Phase, item: Call) -> list[tuple[int, int, int, int]] | None:
        """Copies to make in front of an exchange call, None when this is no exchange or its pair's copies are made."""
        op = exchange_op(item)
        if op is None or item.rank != 0:
            return None
        sources: dict[int, int] = {}
        for other in phase.calls:
            twin = exchange_op(other)
            if twin is not None and twin.attrs["ordinal"] == op.attrs["ordinal"]:
                name = own_operand(twin)
                sources[other.rank] = self.address(next(arg for arg in other.args if arg.name == name))
        return self.exchange.copies(sources, self.nbytes(op))

    @staticmethod
    def is_exchange(item: Call) -> bool:
        return exchange_op(item) is not None


__all__ = ["HOST", "PEER", "STAGED", "TRANSPORTS", "Exchange", "Staging", "Trial", "choose", "self_test", "slot_words"]
