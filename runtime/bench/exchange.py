"""``ninferc bench exchange``: latency of the exchanges between two devices, per transport and payload.

A chain of exchanges in one graph on both ranks, with the kernels that programs use. The cost is that of the whole graph
over the number of exchanges, median over replays; with products around it ("fused") the difference to the same graph without
its exchanges.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from compiler.emit.cache import Job, compile_all
from compiler.emit.render import kernel_source
from compiler.ir.op import Array, Attr, Op
from compiler.ir.types import Ref, TensorType
from compiler.kernels.control import rmsnorm_spec
from compiler.kernels.exchange import Mail, Tiles, begin_spec, residual_spec, tiles_of
from compiler.kernels.linear_columns import Product, choose, spec_of
from compiler.kernels.linear_rows import linear_rows
from compiler.kernels.spec import DeviceCaps, KernelSpec
from compiler.ops.exchange_residual import PUSH_COLUMNS
from compiler.program.model import KernelImage, Phase
from runtime.cuda.chain import Chain, Links, bf16_bits, make_call
from runtime.cuda.device import Device, rank_caps
from runtime.cuda.driver import DeviceError
from runtime.cuda.graph import GraphPhase
from runtime.cuda.modules import Modules, PackedArgs
from runtime.cuda.transport import HOST, PEER, STAGED, TRANSPORTS, Staging, peer_access

DELAY_NS = 4000
WIDTH = 5120  # hidden width of the 27B models: a column is 20 KiB of FP32 partial sums
INNER = 3072  # half of their attention width: K of the products around fused exchanges
CHUNK = 1024  # columns of a chunk of prefill, which sends BF16
EPS = 1e-6


@dataclass(frozen=True)
class ExchangeRow:
    """One measurement. ``microseconds`` per exchange, ``launch`` of the launch call, ``digest`` of every value that both ranks
    computed."""

    case: str
    transport: str
    nbytes: int
    microseconds: float
    digest: str
    launch: float = 0.0


def _case(transport: str, nbytes: int, exchanges: int, kind: str, devices: Sequence[int]) -> str:
    return f"exchange {transport} {nbytes // 1024} KiB x{exchanges} {kind} devices {devices[0]},{devices[1]}"


def _open(devices: Sequence[int], transport: str) -> tuple[list[Device], DeviceCaps]:
    """The pair and what its kernels are chosen for: as much of a device as a rank has. Raises DeviceError."""
    pair = [Device(index) for index in devices]
    try:
        caps = rank_caps(pair)
        if transport == PEER and (reason := peer_access(pair)):
            raise DeviceError(f"transport peer: {reason}")
    except DeviceError:
        for device in pair:
            device.close()
        raise
    return pair, caps


def _load(specs: Sequence[KernelSpec], pair: list[Device], caps: DeviceCaps) -> Modules:
    named = {spec.entry: spec for spec in specs}
    sources = {entry: kernel_source(spec, caps) for entry, spec in named.items()}
    cubins = compile_all([Job(entry, source, caps.arch) for entry, source in sources.items()], None, None, None)
    return Modules({e: KernelImage(named[e], sources[e], cubins[e].image, cubins[e].resources) for e in named}, pair)


def _types(columns: int, wire: str) -> dict[str, TensorType]:
    partial, row = TensorType((columns, WIDTH), wire), TensorType((columns, WIDTH), "bf16")
    return {"partial": partial, "peer_1": partial, "residual": row, "y": row}


def _op(rank: int, wire: str, pushed: bool, tiles: bool = False) -> Op:
    refs = {name: Ref(name) for name in ("partial", "peer_1", "residual", "sequence", "step")}
    attrs: dict[str, Attr] = {"ordinal": 0, "wire": wire, "pushed": pushed, "tiles": tiles}
    return Op("exchange_residual", refs, {"y": Ref("y")}, attrs=attrs, rank=rank)


def _begin(caps: DeviceCaps, exchanges: int) -> KernelSpec:
    return begin_spec(Op("exchange_begin", {}, {}, {"sequence": Ref("sequence")}, {"count": exchanges}), caps)


def bench(devices: Sequence[int], columns: int = 1, wire: str = "f32", transport: str = PEER, exchanges: int = 128,
          replays: int = 20, delays: bool = False, seed: int = 1) -> ExchangeRow:  # fmt: skip
    """Measure ``exchanges`` exchanges of ``columns`` columns in one graph, and check every value of each replay.

    ``delays`` puts a kernel of random duration in front of each rank's exchange. Raises DeviceError for a wrong value, a lost
    peer, or a transport that the pair does not have."""
    pair, caps = _open(devices, transport)
    modules: Modules | None = None
    chain: Chain | None = None
    try:
        types = _types(columns, wire)
        specs = [residual_spec(_op(rank, wire, False), types, caps) for rank in (0, 1)]
        delay = KernelSpec(f"exchange_delay_{caps.arch.replace('_', '')}", "exchange_delay.cu.j2", {}, (1, 1, 1), 32, 0,
                           ("sequence", "ordinal", "seed", "most")) if delays else None  # fmt: skip
        begin = _begin(caps, exchanges)
        modules = _load([begin, *specs, *([delay] if delay else [])], pair, caps)
        mail = Mail.of((_op(rank, wire, False), types, spec) for rank, spec in enumerate(specs))
        chain = Chain(pair, modules, Links(begin, specs, delay, DELAY_NS), WIDTH, columns, wire, transport, mail, exchanges,
                      caps.programmatic_edges, seed)  # fmt: skip
        digest, times, launches = hashlib.sha256(), [], []
        for _ in range(replays):
            seconds, launch = chain.replay()
            times.append(seconds)
            launches.append(launch)
            found = chain.results()
            if problem := chain.problem(found):
                raise DeviceError(f"transport {transport}: {problem}")
            for raw in found:
                digest.update(raw.tobytes())
        nbytes = types["partial"].nbytes
        return ExchangeRow(_case(transport, nbytes, exchanges, "unfused", devices), transport, nbytes,
                           statistics.median(times) / exchanges * 1e6, digest.hexdigest(), statistics.median(launches) * 1e6)
    finally:
        if chain is not None:
            chain.close()
        if modules is not None:
            modules.close()
        for device in pair:
            device.close()


class _Products:
    """A chain of ``count`` links product, exchange and residual, norm on both ranks; ``how``: fused (the product sends its
    sums), unfused, or without (the product adds the residual, as one rank alone does). More columns than send words are a
    chunk of prefill: products of many rows, whose sums travel as BF16."""

    def __init__(self, columns: int, count: int, caps: DeviceCaps) -> None:
        self.columns, self.count, self.caps = columns, count, caps
        self.chunk = columns > PUSH_COLUMNS
        self.wire = "bf16" if self.chunk else "f32"
        self._packed: list[PackedArgs] = []

    def place(self, chain: Chain, specs: Sequence[KernelSpec]) -> None:
        """Weights, activations and scratch beside what ``chain`` holds already; its graph is not used."""
        self.chain, columns = chain, self.columns
        rng = np.random.default_rng(5)
        row = np.zeros((columns, WIDTH), np.uint16)
        for rank in (0, 1):
            w = bf16_bits(rng.standard_normal((WIDTH, INNER), dtype=np.float32) / 8)
            x, wide = bf16_bits(np.ones((columns, WIDTH), np.float32)), np.zeros((columns, WIDTH), np.float32)
            data: dict[str, Array] = {"w_codes": w, "start": x, "n": x, "partial": wide, "r": row, "s": row}
            data |= {f"{spec.entry}.{name}": np.zeros(nbytes, np.uint8) for spec in specs
                     for name, nbytes in spec.scratch.items()}  # fmt: skip
            chain.places[rank] |= {name: chain.allocate(rank, array) for name, array in data.items()}

    def specs(self, how: str) -> list[tuple[KernelSpec, ...]]:
        """Per rank: the product, and what stands behind it."""
        tiles: Tiles | None = None
        if self.chunk:
            store, push = "residual" if how == "without" else "bf16", 0 if how == "fused" else None
            first = linear_rows("BF16", store, WIDTH, INNER, self.columns, self.caps, push=push)
            if how == "fused":
                tiles = tiles_of(first)
        else:
            epilogue = {"fused": "push_f32", "unfused": "store_f32", "without": "residual"}[how]
            product = Product("BF16", WIDTH, INNER, self.columns, 1, epilogue)
            first = spec_of(product, choose(product, self.caps), self.caps)
        row = TensorType((self.columns, WIDTH), "bf16")
        norm = Op("rmsnorm", {"x": Ref("x"), "w": Ref("w")}, {"y": Ref("y")}, attrs={"eps": EPS})
        if how == "without":
            return [(first, rmsnorm_spec(norm, {"x": row, "y": row}, self.caps))] * 2
        types, words = _types(self.columns, self.wire), how == "fused" and not self.chunk
        return [(first, residual_spec(_op(rank, self.wire, words, tiles is not None), types, self.caps, norm, tiles,
                                      settled=not self.chunk))
                for rank in (0, 1)]  # fmt: skip

    def mail(self, links: Mapping[str, list[tuple[KernelSpec, ...]]]) -> Mail:
        """Room for what the exchanges of ``links`` and those without a product send."""
        types = _types(self.columns, self.wire)
        words, tiles = not self.chunk, self.chunk
        return Mail.of((_op(rank, self.wire, how == "fused" and words, how == "fused" and tiles), types, links[how][rank][1])
                       for how in ("unfused", "fused") for rank in (0, 1))  # fmt: skip

    def graph(self, how: str, specs: list[tuple[KernelSpec, ...]], begin: KernelSpec, modules: Modules) -> GraphPhase:
        channel, places = self.chain.exchange, self.chain.places
        calls = [make_call(rank, rank, begin, 0, places[rank], {"count": self.count}, channel, "exchange_begin")
                 for rank in (0, 1)]  # fmt: skip
        for i in range(self.count):
            odd = i % 2
            for step in (0, 1):
                for rank in (0, 1):
                    mine = places[rank]
                    old, new = mine["s" if odd else "r"], mine["r" if odd else "s"]
                    product = {"x": mine["n"], "w_codes": mine["w_codes"], "residual": old, "rows": mine["rows"],
                               "y": new if how == "without" else mine["partial"]}  # fmt: skip
                    behind = {"x": new, "w": mine["norm_w"], "y": mine["n"]} if how == "without" else {
                        "partial": mine["partial"], "residual": old, "y": new, "normed": mine["n"]}  # fmt: skip
                    own = {name: mine[name] for name in ("sequence", "step", "norm_w")}
                    spec = specs[rank][step]
                    scratch = {name: mine[f"{spec.entry}.{name}"] for name in spec.scratch}
                    numbers: dict[str, int | float] = {name: WIDTH for name in spec.args if name.endswith("_stride")}
                    numbers |= {"columns": self.columns, "ordinal": i, "eps": EPS}
                    kind = "exchange_residual" if step and how != "without" else "linear"
                    calls.append(make_call(len(calls), rank, spec, i, own | scratch | (behind if step else product), numbers,
                                           channel, kind))  # fmt: skip
        phase = Phase("fused exchange benchmark", "decode", 1, self.columns, tuple(calls), {}, {})
        packed = [PackedArgs(item.args, self.chain.address) for item in calls]
        self._packed += packed
        nbytes = _types(self.columns, self.wire)["partial"].nbytes
        staging = Staging(channel, self.chain.address, lambda op: nbytes) if channel.transport == STAGED else None
        return GraphPhase(phase, modules, packed, self.chain.devices, self.caps.programmatic_edges, staging)

    def reset(self) -> None:
        """The same start for every replay."""
        for rank, device in enumerate(self.chain.devices):
            nbytes = 2 * WIDTH * self.columns
            device.upload(self.chain.places[rank]["n"], device.download(self.chain.places[rank]["start"], nbytes))
            device.upload(self.chain.places[rank]["r"], np.zeros(nbytes, np.uint8))

    def results(self) -> list[Array]:
        last = "s" if self.count % 2 else "r"
        return [device.download(self.chain.places[rank][last], 2 * WIDTH * self.columns)
                for rank, device in enumerate(self.chain.devices)]  # fmt: skip


def bench_fused(devices: Sequence[int], columns: int = 1, transport: str = PEER, exchanges: int = 128,
                replays: int = 20) -> list[ExchangeRow]:  # fmt: skip
    """What an exchange of ``columns`` columns adds to a graph of products [5120, 3072], residual and norm: sent by the product
    (fused: words of few columns, tiles of many) and by a kernel of its own. Over transports that carry no words or tiles of
    products (runtime/cuda/transport.py) the kernels of the fused graph leave them to the exchange, as in programs. Both give
    the same bits on both ranks, or DeviceError is raised."""
    import time

    pair, caps = _open(devices, transport)
    modules: Modules | None = None
    chain: Chain | None = None
    graphs: list[GraphPhase] = []
    try:
        products, begin = _Products(columns, exchanges, caps), _begin(caps, exchanges)
        types = _types(columns, products.wire)
        bare = [residual_spec(_op(rank, products.wire, False), types, caps) for rank in (0, 1)]
        links = {how: products.specs(how) for how in ("without", "unfused", "fused")}
        every = [spec for ranks in links.values() for both in ranks for spec in both]
        modules = _load([begin, *bare, *every], pair, caps)
        chain = Chain(pair, modules, Links(begin, bare), WIDTH, columns, products.wire, transport, products.mail(links), 1,
                      caps.programmatic_edges, tiles=None)  # fmt: skip
        products.place(chain, every)
        seconds, digests = {}, {}
        for how, specs in links.items():
            graph = products.graph(how, specs, begin, modules)
            graphs.append(graph)
            times, digest = [], hashlib.sha256()
            for _ in range(replays):
                products.reset()
                start = time.perf_counter()
                graph.launch(pair[0])
                for device in pair:
                    device.synchronize()
                times.append(time.perf_counter() - start)
                if chain.exchange.lost():
                    raise DeviceError(f"transport {transport}: a rank gave up waiting for the other")
                first, second = products.results()
                if how != "without" and not np.array_equal(first, second):
                    raise DeviceError(f"transport {transport}: the ranks differ in {int((first != second).sum())} bytes")
                digest.update(first.tobytes())
            seconds[how], digests[how] = statistics.median(times), digest.hexdigest()
        if digests["fused"] != digests["unfused"]:
            raise DeviceError(f"transport {transport}: sums sent by the product differ from those sent by the exchange")
        nbytes = types["partial"].nbytes
        return [ExchangeRow(_case(transport, nbytes, exchanges, label, devices), transport, nbytes,
                            (seconds[how] - seconds["without"]) / exchanges * 1e6, digests[how])
                for how, label in (("fused", "fused"), ("unfused", "unfused behind a product"))]  # fmt: skip
    finally:
        for graph in graphs:
            graph.close()
        if chain is not None:
            chain.close()
        if modules is not None:
            modules.close()
        for device in pair:
            device.close()


def run(devices: Sequence[int], columns: Sequence[int] = (1, 4, 8, 64), transports: Sequence[str] = TRANSPORTS,
        exchanges: int = 128) -> Iterator[ExchangeRow]:  # fmt: skip
    """Rows of ``ninferc bench exchange --devices A,B``: every transport the pair has; both wires, fused and not, and the
    payload of a chunk of prefill (1024 columns of BF16)."""
    for transport in transports:
        if transport == PEER:
            try:
                pair, _ = _open(devices, PEER)
            except DeviceError as error:
                if transports == TRANSPORTS and "cannot reach" in str(error):
                    continue
                raise
            for device in pair:
                device.close()
        for count in columns:
            for wire in ("f32", "bf16"):
                yield bench(devices, count, wire, transport, exchanges)
            if count <= PUSH_COLUMNS:
                yield from bench_fused(devices, count, transport, exchanges)
        yield bench(devices, CHUNK, "bf16", transport, max(2, exchanges // 8), replays=5)
        yield from bench_fused(devices, CHUNK, transport, max(2, exchanges // 8))


__all__ = ["HOST", "ExchangeRow", "bench", "bench_fused", "run"]
