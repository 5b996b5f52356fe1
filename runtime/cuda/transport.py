"""How an exchange travels between two ranks: the memory it goes through, and the copies of the staged transport.

``peer``: kernels store into the other device's memory. ``host``: into page-locked host memory. ``staged``: copies inside the
graph, ordered by its edges. Which one a pair of devices uses: self_test.py.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from compiler.ir.op import Op, operand_type
from compiler.ir.types import TensorType
from compiler.kernels.exchange import KINDS, Mail
from compiler.passes.halves import PREFILL, PREFILL_HALVES
from compiler.program.model import Arg, Call, Phase, Program
from runtime.cuda.device import Device, PinnedBuffer
from runtime.cuda.driver import DeviceError, api, call

PEER, HOST, STAGED = "peer", "host", "staged"
TRANSPORTS = (PEER, HOST, STAGED)  # in order of preference; the position is the number that kernels know
# Where products of a prefill chunk send their tiles themselves. Not over the host: what they would save is the way into its
# memory, while the way out of it, which takes as long, could begin only when the last of them is done; an exchange that sends
# has both at once.
TILES_OVER = frozenset({PEER})
# Where exchanges of a prefill chunk run beside its products, half by half (compiler/passes/halves.py). Staged copies stay in
# the chain: they join both ranks.
HALVES_OVER = frozenset({HOST})
SCRUB = 1 << 31  # exchanges after which old words are cleared, so that no number of the last round stands anywhere
HANG_BYTES = 256


def exchange_op(item: Call) -> Op | None:
    """The exchange that a call completes, None for any other call (a product that pushes among them)."""
    return next((op for op in item.ops if op.kind in KINDS), None)


def own_operand(op: Op) -> str:
    return "candidates" if op.kind == "sample_merge" else "partial"


def operand_types(program: Program, phase: Phase, op: Op) -> dict[str, TensorType]:
    return {name: operand_type(op, ref, program.value(phase, ref.value)) for name, ref in op.refs()}


def payload_bytes(program: Program, phase: Phase, op: Op) -> int:
    """Bytes of one rank's contribution as it lies in memory."""
    return program.value(phase, op.inputs[own_operand(op)].value).type.nbytes


def mail_of(program: Program) -> Mail:
    """What each rank of a program is written to by the other one."""
    return Mail.of((op, operand_types(program, phase, op), program.kernels[item.entry].spec)
                   for phase in program.phases.values() for item in phase.calls
                   if (op := exchange_op(item)) is not None)  # fmt: skip


def prefill_phase(transport: str | None) -> str:
    """Name of the phase that runs a prefill chunk where exchanges go over ``transport`` (None: there are none)."""
    return PREFILL_HALVES if transport in HALVES_OVER else PREFILL


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
    """Mail of both ranks over one transport. ``tiles``: whether products of a prefill chunk send their tiles; by default
    what is best for the transport. The attribute is what kernels know: 0, 1, or 2 where each rank has a device, so that blocks
    of exchanges which then need not send may wait as well (compiler/passes/coresident.py counts them for one device)."""

    def __init__(self, devices: list[Device], mail: Mail, transport: str, tiles: bool | None = None) -> None:
        self.transport, self.mail, self.devices = transport, mail, devices
        sent = transport in TILES_OVER if tiles is None else tiles
        self.apart = devices[0].index != devices[1].index
        self.tiles = (2 if self.apart else 1) if sent else 0
        self._hang = PinnedBuffer(HANG_BYTES)
        self.hang = self._hang.array.view(np.uint32)
        self._pinned: list[PinnedBuffer] = []  # read by rank r
        self._memory: list[int] = []
        if transport == HOST:
            self._pinned = [PinnedBuffer(mail.size) for _ in devices]
        else:
            self._memory = [device.allocate(mail.size, "exchange") for device in devices]
        self._since_scrub = 0
        for device in devices:
            device.synchronize()

    def inbox(self, rank: int) -> int:
        """Address of what ``rank`` reads and the other rank writes."""
        return self._pinned[rank].address if self.transport == HOST else self._memory[rank]

    def address(self, arg: Arg) -> int:
        """Where a channel argument of a kernel of ``arg.rank`` points."""
        if arg.region == "hang":
            return self._hang.address
        return self.inbox(arg.rank if arg.region == "inbox" else 1 - arg.rank)

    def spans(self, rank: int) -> dict[str, tuple[int, int]]:
        """Address ranges behind the channel arguments of ``rank``."""
        mail = {"inbox": self.inbox(rank), "outbox": self.inbox(1 - rank)}
        return {"hang": (self._hang.address, self._hang.address + HANG_BYTES),
                **{name: (base, base + self.mail.size) for name, base in mail.items()}}  # fmt: skip

    def complete(self, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
        """Arguments with the numbers that depend on the transport and its memory."""
        late = {"transport": TRANSPORTS.index(self.transport), "slot_words": self.mail.words,
                "slot_slices": self.mail.slices, "slot_bytes": self.mail.nbytes,
                "apart": int(self.apart), "tiles": self.tiles}  # fmt: skip
        return tuple(replace(arg, number=late[arg.name]) if arg.name in late else arg for arg in args)

    def lost(self) -> bool:
        """Whether a rank gave up waiting for the other since the last ``clear``."""
        return bool(self.hang[0])

    def clear(self) -> None:
        """Forget everything sent so far. Nothing may be running."""
        for device, memory in zip(self.devices, self._memory, strict=False):
            device.activate()
            call(api().cuMemsetD8Async(memory, 0, self.mail.size, device.stream), "clear the exchange")
            device.synchronize()
        for buffer in self._pinned:
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
        return [(rank, self.inbox(rank) + self.mail.copied_to, sources[1 - rank], nbytes) for rank in (0, 1)]

    def close(self) -> None:
        for device, memory in zip(self.devices, self._memory, strict=False):
            with suppress(DeviceError):  # of a lost device, which was reported before
                device.release(memory)
        for buffer in (self._hang, *self._pinned):
            buffer.close()


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


__all__ = ["HOST", "PEER", "STAGED", "TILES_OVER", "TRANSPORTS", "Exchange", "Staging", "exchange_op", "mail_of", "peer_access"]
