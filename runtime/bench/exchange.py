"""``ninferc bench exchange``: latency of the exchanges between two devices, per transport and payload.

A chain of exchanges in one graph on both ranks, with the kernels that programs use. The cost is that of the whole graph
over the number of exchanges, median over replays.
"""

from __future__ import annotations

import hashlib
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from compiler.emit.cache import Job, compile_all
from compiler.emit.render import render
from compiler.ir.op import Array, Op, bf16_round
from compiler.ir.types import Ref, TensorType
from compiler.kernels.exchange import begin_spec, residual_spec
from compiler.kernels.spec import KernelSpec
from compiler.program.model import Arg, Call, KernelImage, Phase
from runtime.cuda.device import Device
from runtime.cuda.driver import DeviceError
from runtime.cuda.graph import GraphPhase
from runtime.cuda.modules import Modules, PackedArgs
from runtime.cuda.transport import PEER, STAGED, TRANSPORTS, Exchange, Staging, peer_access

DELAY_NS = 4000
WIDTH = 5120  # hidden width of the 27B models: a column is 20 KiB of FP32 partial sums


@dataclass(frozen=True)
class ExchangeRow:
    """One measurement. ``microseconds`` per exchange, ``digest`` of every value that both ranks computed."""

    case: str
    transport: str
    nbytes: int
    microseconds: float
    digest: str


def _call(index: int, rank: int, spec: KernelSpec, op: Op, args: tuple[Arg, ...]) -> Call:
    return Call(index, rank, spec.entry, args, spec.grid, spec.block, spec.smem, spec.cluster, (op,), (), programmatic=True)


def bench(devices: Sequence[int], columns: int = 1, wire: str = "f32", transport: str = PEER, exchanges: int = 128,
          replays: int = 20, delays: bool = False, seed: int = 1) -> ExchangeRow:  # fmt: skip
    """Measure ``exchanges`` exchanges of ``columns`` columns in one graph, and check every value of the last of each replay.

    The result of an exchange is the residual of the next, whose partial sums are the negatives, so a wrong word anywhere
    shows at the end. ``delays`` puts a kernel of random duration in front of each rank's exchange. Raises DeviceError for a
    wrong value, a lost peer, or a transport that the pair does not have.
    """
    pair = [Device(index) for index in devices]
    opened: list[tuple[Device, int]] = []
    exchange: Exchange | None = None
    graph: GraphPhase | None = None
    modules: Modules | None = None
    try:
        if transport == PEER and (reason := peer_access(pair)):
            raise DeviceError(f"transport peer: {reason}")
        caps = pair[0].caps()
        shared = devices[0] == devices[1]
        if shared:
            caps = replace(caps, sms=caps.sms // 2)
        wide, narrow = TensorType((columns, WIDTH), "f32"), TensorType((columns, WIDTH), "bf16")
        types = {"partial": wide, "peer_1": wide, "residual": narrow, "y": narrow}

        def op_of(rank: int, ordinal: int) -> Op:
            refs = {name: Ref(name) for name in ("partial", "peer_1", "residual", "sequence", "step")}
            return Op("exchange_residual", refs, {"y": Ref("y")}, attrs={"ordinal": ordinal, "wire": wire}, rank=rank)

        start_op = Op("exchange_begin", {}, {}, {"sequence": Ref("sequence")}, {"count": exchanges})
        start = begin_spec(start_op, caps)
        delay = KernelSpec(f"exchange_delay_{caps.arch.replace('_', '')}", "exchange_delay.cu.j2", {}, (1, 1, 1), 32, 0,
                           ("sequence", "ordinal", "seed", "most"))  # fmt: skip
        specs = {start.entry: start, delay.entry: delay}
        chain = [[residual_spec(op_of(rank, i), types, caps) for i in range(exchanges)] for rank in (0, 1)]
        for ranked in chain:
            specs[ranked[0].entry] = ranked[0]
        sources = {entry: render(spec.template, entry, spec.params) for entry, spec in specs.items()}
        cubins = compile_all([Job(entry, source, caps.arch) for entry, source in sources.items()], None, None, None)
        modules = Modules({e: KernelImage(specs[e], sources[e], cubins[e].image, cubins[e].resources) for e in specs}, pair)
        words = columns * WIDTH
        exchange = Exchange(pair, words, transport)
        rng = np.random.default_rng(seed)
        partials = [rng.standard_normal((columns, WIDTH)).astype(np.float32) for _ in pair]
        places: list[dict[str, int]] = []

        def place(device: Device, data: Array) -> int:
            address = device.allocate(data.nbytes, "exchange benchmark")
            opened.append((device, address))
            device.upload(address, data)
            return address

        for rank, device in enumerate(pair):
            rows = np.zeros((columns, WIDTH), np.uint16)
            words4 = np.zeros(4, np.uint32)
            data: dict[str, Array] = {"plus": partials[rank], "minus": -partials[rank], "a": rows, "b": rows,
                                      "sequence": words4, "step": words4}  # fmt: skip
            places.append({name: place(device, array) for name, array in data.items()})

        def arguments(rank: int, spec: KernelSpec, ordinal: int) -> tuple[Arg, ...]:
            mine = places[rank]
            names = {"partial": mine["minus" if ordinal % 2 else "plus"], "residual": mine["b" if ordinal % 2 else "a"],
                     "y": mine["a" if ordinal % 2 else "b"], "sequence": mine["sequence"], "step": mine["step"]}  # fmt: skip
            out = []
            for name in spec.args:
                if name in names:
                    out.append(Arg(name, "pointer", "absolute", names[name], rank=rank))
                elif name in spec.scalars:
                    out.append(Arg(name, "int", number=spec.scalars[name], rank=rank))
                elif name.endswith("_stride"):
                    out.append(Arg(name, "int", number=WIDTH, rank=rank))
                elif name == "rows":
                    out.append(Arg(name, "null"))
                elif name in ("transport", "slot_words"):
                    out.append(Arg(name, "int", rank=rank))
                else:
                    out.append(Arg(name, "pointer", name, rank=rank))
            return exchange.complete(tuple(out)) if exchange else tuple(out)

        calls = [_call(rank, rank, start, start_op, arguments(rank, start, 0)) for rank in (0, 1)]
        for i in range(exchanges):
            if delays:
                for rank in (0, 1):
                    numbers = {"ordinal": i, "seed": rank + 1, "most": DELAY_NS}
                    held = [Arg(name, "int", number=number) for name, number in numbers.items()]
                    counter = Arg("sequence", "pointer", "absolute", places[rank]["sequence"], rank=rank)
                    calls.append(_call(len(calls), rank, delay, start_op, (counter, *held)))
            calls += [_call(len(calls) + rank, rank, chain[rank][i], op_of(rank, i), arguments(rank, chain[rank][i], i))
                      for rank in (0, 1)]  # fmt: skip
        phase = Phase("exchange benchmark", "decode", 1, columns, tuple(calls), {}, {})
        channel = exchange

        def address(arg: Arg) -> int:
            return arg.offset if arg.region == "absolute" else channel.address(arg)

        packed = [PackedArgs(item.args, address) for item in calls]
        staging = Staging(channel, address, lambda op: 4 * words) if transport == STAGED else None
        graph = GraphPhase(phase, modules, packed, pair, caps.programmatic_edges, staging)
        want = np.zeros((columns, WIDTH), np.float32)
        shown = [bf16_round(p) if wire == "bf16" else p for p in partials]
        total = shown[0] + shown[1]
        digest, times = hashlib.sha256(), []
        for _ in range(replays):
            begin = time.perf_counter()
            graph.launch(pair[0])
            for device in pair:
                device.synchronize()
            times.append(time.perf_counter() - begin)
            if exchange.lost():
                raise DeviceError(f"transport {transport}: a rank gave up waiting for the other")
            for i in range(exchanges):
                want = bf16_round((-total if i % 2 else total) + want)
            for rank, device in enumerate(pair):
                raw = device.download(places[rank]["b" if exchanges % 2 else "a"], 2 * words)
                digest.update(raw.tobytes())
                if not np.array_equal((raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32), want.reshape(-1)):
                    raise DeviceError(f"transport {transport}: rank {rank} computed a wrong value")
            if exchanges % 2:  # the next replay starts from buffer a
                for rank, device in enumerate(pair):
                    device.upload(places[rank]["a"], (np.ascontiguousarray(want).view(np.uint32) >> 16).astype(np.uint16))
        nbytes = columns * WIDTH * (2 if wire == "bf16" else 4)
        case = f"exchange {transport} {nbytes // 1024} KiB x{exchanges} unfused devices {devices[0]},{devices[1]}"
        return ExchangeRow(case, transport, nbytes, statistics.median(times) / exchanges * 1e6, digest.hexdigest())
    finally:
        if graph is not None:
            graph.close()
        for device, address_ in opened:
            device.release(address_)
        if exchange is not None:
            exchange.close()
        if modules is not None:
            modules.close()
        for device in pair:
            device.close()


def run(devices: Sequence[int], columns: Sequence[int] = (1, 4, 8, 64)) -> Iterator[ExchangeRow]:
    """Rows of ``ninferc bench exchange --devices A,B``: every transport the pair has, both wires."""
    for transport in TRANSPORTS:
        for wire in ("f32", "bf16"):
            for count in columns:
                try:
                    yield bench(devices, count, wire, transport)
                except DeviceError as error:
                    if transport != PEER or "cannot reach" not in str(error):
                        raise
