"""A chain of exchanges in one graph of both ranks whose end shows a wrong bit anywhere in it: what self-tests and measurements
run.

The result of an exchange is the residual of the next, so each one shows at the end. The ranks' partial sums nearly cancel: a
few units in their last place remain, which bf16 holds exactly, so that a flipped bit of any received value changes a result.
Three sets of partial sums take turns, so that what an exchange left in its slot two exchanges ago does not belong there now.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compiler.ir.op import Array, Op
from compiler.kernels.exchange import Mail
from compiler.kernels.spec import KernelSpec
from compiler.passes.schedule import CHANNEL, LATE
from compiler.program.model import Arg, Call, Phase
from runtime.cuda.device import Device
from runtime.cuda.graph import GraphPhase
from runtime.cuda.modules import Modules, PackedArgs
from runtime.cuda.transport import STAGED, Exchange, Staging


def bf16_bits(values: Array) -> Array:
    """uint16 bits of float32 values that bf16 holds exactly."""
    return (np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)


def from_bits(bits: Array) -> Array:
    return (np.ascontiguousarray(bits).view(np.uint16).astype(np.uint32) << 16).view(np.float32)


SETS = 3
UNITS = {"f32": 23, "bf16": 7}  # bits of a mantissa


def payloads(rng: np.random.Generator, shape: tuple[int, int], wire: str) -> tuple[list[tuple[Array, Array]], list[Array]]:
    """Partial sums of both ranks, and what they add up to, of each set: float32, exact in ``wire`` and bf16; all sets add up to
    zero."""
    bits = UNITS[wire]
    rest = [rng.integers(1, 61, shape) * rng.choice((-1, 1), shape) for _ in range(SETS - 1)]
    rest.append(-sum(rest, np.zeros(shape, np.int64)))
    parts = []
    for units in rest:
        sign = rng.choice((-1, 1), shape)
        first = np.maximum(sign * units, 0) + rng.integers(0, (1 << bits) - np.abs(units))
        second = first - sign * units
        own, other = (sign * (1 + mantissa / (1 << bits)) for mantissa in (first, second))
        parts.append((own.astype(np.float32), -other.astype(np.float32)))
    return parts, [(units / (1 << bits)).astype(np.float32) for units in rest]


@dataclass(frozen=True)
class Links:
    """Kernels of a chain: ``begin`` advances the sequence, ``exchange`` by rank, ``delay`` a producer of random duration up to
    ``most`` nanoseconds, None for none."""

    begin: KernelSpec
    exchange: Sequence[KernelSpec]
    delay: KernelSpec | None = None
    most: int = 0


def make_call(index: int, rank: int, spec: KernelSpec, ordinal: int, addresses: Mapping[str, int],
              numbers: Mapping[str, int | float], exchange: Exchange, kind: str = "exchange_residual") -> Call:  # fmt: skip
    """A call at absolute ``addresses``; ``numbers`` go before those of the spec, a stride that neither names is null's."""
    args = []
    for name in spec.args:
        if name in addresses:
            args.append(Arg(name, "pointer", "absolute", addresses[name], rank=rank))
        elif name in CHANNEL:
            args.append(Arg(name, "pointer", name, rank=rank))
        elif name in numbers or name in spec.scalars:
            number = numbers.get(name, spec.scalars.get(name, 0))
            args.append(Arg(name, "float" if isinstance(number, float) else "int", number=number, rank=rank))
        elif name in LATE:
            args.append(Arg(name, "int", rank=rank))
        else:
            args.append(Arg(name, "null", rank=rank))
    op = Op(kind, {}, {}, attrs={"ordinal": ordinal}, rank=rank)
    return Call(index, rank, spec.entry, exchange.complete(tuple(args)), spec.grid, spec.block, spec.smem, spec.cluster, (op,),
                (), programmatic=True)  # fmt: skip


class Chain:
    """``count`` exchanges of ``columns`` × ``width``, ``wire`` f32 or bf16, over ``transport``; ``tiles`` as of
    Exchange, its own graph has no products that could send any. Raises DeviceError."""

    def __init__(self, devices: list[Device], modules: Modules, links: Links, width: int, columns: int, wire: str,
                 transport: str, mail: Mail, count: int, programmatic: bool, seed: int = 1,
                 tiles: bool | None = False) -> None:  # fmt: skip
        self.devices, self.wire, self.count, self.shape = devices, wire, count, (columns, width)
        self._opened: list[tuple[Device, int]] = []
        self._graph: GraphPhase | None = None
        self.exchange = Exchange(devices, mail, transport, tiles)
        try:
            parts, totals = payloads(np.random.default_rng(seed), self.shape, wire)
            self.want = sum(totals[: count % SETS], np.zeros(self.shape, np.float32))
            self.places = [self._place(rank, [part[rank] for part in parts], width) for rank in range(2)]
            self._build(modules, links, programmatic)
        except BaseException:
            self.close()
            raise

    def _place(self, rank: int, parts: Sequence[Array], width: int) -> dict[str, int]:
        rows, words = np.zeros(self.shape, np.uint16), np.zeros(4, np.uint32)
        data: dict[str, Array] = {"a": rows, "b": rows, "normed": rows, "sequence": words, "step": words,
                                  "norm_w": np.zeros(width, np.uint16),
                                  "rows": np.array([self.shape[0]], np.int32)}  # fmt: skip
        data |= {f"set{i}": bf16_bits(part) if self.wire == "bf16" else part for i, part in enumerate(parts)}
        return {name: self.allocate(rank, array) for name, array in data.items()}

    def allocate(self, rank: int, data: Array) -> int:
        """Device memory of ``rank`` that lives as long as the chain."""
        device = self.devices[rank]
        address = device.allocate(data.nbytes, "exchange test")
        self._opened.append((device, address))
        device.upload(address, data)
        return address

    def _build(self, modules: Modules, links: Links, programmatic: bool) -> None:
        strides = {f"{name}_stride": self.shape[1] for name in ("partial", "residual", "y", "normed")}
        calls = [make_call(rank, rank, links.begin, 0, self.places[rank], {"count": self.count}, self.exchange,
                           "exchange_begin") for rank in (0, 1)]  # fmt: skip
        for i in range(self.count):
            if links.delay is not None:
                calls += [make_call(len(calls) + rank, rank, links.delay, i, self.places[rank],
                                    {"ordinal": i, "seed": rank + 1, "most": links.most}, self.exchange, "delay")
                          for rank in (0, 1)]  # fmt: skip
            odd = i % 2
            for rank in (0, 1):
                mine = self.places[rank]
                turn = {"partial": mine[f"set{i % SETS}"], "residual": mine["b" if odd else "a"],
                        "y": mine["a" if odd else "b"]}  # fmt: skip
                numbers = strides | {"columns": self.shape[0], "ordinal": i}
                calls.append(make_call(len(calls), rank, links.exchange[rank], i, mine | turn, numbers, self.exchange))
        phase = Phase("exchange test", "decode", 1, self.shape[0], tuple(calls), {}, {})
        self._packed = [PackedArgs(item.args, self.address) for item in calls]
        nbytes = self.shape[0] * self.shape[1] * (2 if self.wire == "bf16" else 4)
        staging = Staging(self.exchange, self.address, lambda op: nbytes) if self.exchange.transport == STAGED else None
        self._graph = GraphPhase(phase, modules, self._packed, self.devices, programmatic, staging)

    def address(self, arg: Arg) -> int:
        return arg.offset if arg.region == "absolute" else self.exchange.address(arg)

    def replay(self) -> tuple[float, float]:
        """Run once from a residual of zero; seconds of the whole, and of the launch call alone."""
        assert self._graph is not None
        for rank, device in enumerate(self.devices):
            device.upload(self.places[rank]["a"], np.zeros(self.shape, np.uint16))
        begin = time.perf_counter()
        self._graph.launch(self.devices[0])
        launched = time.perf_counter()
        for device in self.devices:
            device.synchronize()
        return time.perf_counter() - begin, launched - begin

    def results(self) -> list[Array]:
        """Bytes that each rank computed in the replay before."""
        last = "b" if self.count % 2 else "a"
        nbytes = 2 * self.shape[0] * self.shape[1]
        return [device.download(self.places[rank][last], nbytes) for rank, device in enumerate(self.devices)]

    def problem(self, found: Sequence[Array]) -> str:
        """What is wrong with the results of a replay; empty when every value is right."""
        if self.exchange.lost():
            return "what the other rank sent did not arrive"
        for rank, raw in enumerate(found):
            wrong = int((from_bits(raw) != self.want.reshape(-1)).sum())
            if wrong:
                return f"{wrong} of {self.want.size} values arrived wrong at rank {rank}"
        return ""

    def close(self) -> None:
        if self._graph is not None:
            self._graph.close()
        for device, address in self._opened:
            device.release(address)
        self._opened.clear()
        self.exchange.close()
