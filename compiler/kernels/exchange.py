"""Kernels of the exchanges between two ranks (templates/include/ninferc/exchange/)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from compiler.ir.op import Op, require
from compiler.ir.types import IRError, Ref, TensorType
from compiler.kernels.control import SAMPLE_CANDIDATES, SAMPLE_SLICE
from compiler.kernels.spec import DeviceCaps, KernelSpec
from compiler.ops.exchange_residual import peers_of

RANKS = 2  # that kernels exchange between; graphs, shards and the ops' references know any number
THREADS = 256
MERGE_THREADS = 64
PART_VALUES = 1024  # values of a column that one block takes, where columns are few
PROTOCOL = ("sequence", "step", "ordinal", "outbox", "inbox", "hang", "transport", "slot_words", "slot_slices", "slot_bytes")
KINDS = frozenset({"exchange_residual", "sample_merge"})
LINE = 64  # bytes of a slice's number
SETTLED = ("residual", "sequence", "step")  # what a kernel can take before its dependency wait


@dataclass(frozen=True)
class Tiles:
    """Tiles that a row product sends as it finishes them: ``tokens`` columns by ``rows`` values of a column each."""

    tokens: int
    rows: int

    def count(self, columns: int, width: int) -> int:
        """Tiles of ``columns`` × ``width`` values."""
        return -(-columns // self.tokens) * -(-width // self.rows)


# Payloads up to these many bytes travel as words (a number beside every 4 bytes), larger ones as slices (plain bytes, then a
# number). Words need one way where slices need three (bytes, fence, number), but they double the bytes.
# Host: a way is about 1.5 µs and PCIe 5 moves 50 KiB in 1 µs, so words lose from about 32 KiB on (a probe measured equal times
# at 40 KiB: 9.3 and 9.2 µs), and a chunk of prefill (10 MiB) is bound by the link's rate, which kernels reach with reads of
# all blocks in flight; copy engines would move it no faster and need edges across the devices (8 µs each).
# Peer: a fence costs 1.5 µs and NVLink moves 400 KiB in 1 µs; 64 columns (1.25 MiB) as words took 15.6 µs of which the bytes
# account for 10.
WORDS_UP_TO = {"host": 32 << 10, "peer": 256 << 10}
# Failed probes of this many bytes of words would hold up the host link for longer than one way.
SPARING_FROM = 64 << 10
SHARED_WIDTH = 6144
# Columns that an exchange beside products receives at once, a block each, and as many send; at most a sixth of the
# multiprocessors. Such a block and one of a product do not fit a multiprocessor together, so each may take one from them. On
# 132, products of half a chunk of a 27B model make as many rounds on 92 as on 100; a column of 10 KiB takes a block about 5 µs,
# so that 20 keep up with a link of 35 GB/s each way.
BESIDE, BESIDE_SHARE = 20, 6


def _arch(caps: DeviceCaps) -> str:
    return caps.arch.replace("_", "")


def _two_ranks(op: Op) -> None:
    if len(peers_of(op)) != RANKS - 1:
        raise IRError(f"op {op.kind}: {len(peers_of(op)) + 1} ranks; kernels exchange between {RANKS}")


def begin_spec(op: Op, caps: DeviceCaps) -> KernelSpec:
    """One thread advances the sequence numbers, and shares out the rows of a chunk that runs in halves."""
    scalars: dict[str, int | float] = {"count": op.int_attr("count")}
    if not (halves := "rows" in op.inputs):
        return KernelSpec(f"exchange_begin_{_arch(caps)}", "exchange_begin.cu.j2", {}, (1, 1, 1), 32, 0, ("sequence", "count"),
                          scalars, waits_first=True, reason="sequence numbers of the replay")  # fmt: skip
    return KernelSpec(f"exchange_begin_halves_{_arch(caps)}", "exchange_begin.cu.j2", {"halves": halves}, (1, 1, 1), 32, 0,
                      ("sequence", "count", "rows", "columns"), scalars | {"columns": op.int_attr("columns")}, waits_first=True,
                      reason="sequence numbers of the replay, rows of each half")  # fmt: skip


def tiles_of(spec: KernelSpec) -> Tiles | None:
    """The tiles of a row product, or those that an exchange kernel can take from products: None when it takes none."""
    tokens, rows = int(spec.params.get("tile_tokens", 0)), int(spec.params.get("tile_rows", 0))
    return Tiles(tokens, rows) if rows else None


def payload(op: Op, types: Mapping[str, TensorType]) -> int:
    """Bytes of one rank's contribution to an exchange op, as it lies in memory."""
    return types["candidates" if op.kind == "sample_merge" else "partial"].nbytes


def in_slices(op: Op, types: Mapping[str, TensorType], transport: str) -> bool:
    """Whether an exchange op's payload travels as slices over ``transport`` (host, peer) when no product sends tiles."""
    return op.kind == "exchange_residual" and not op.attrs["pushed"] and payload(op, types) > WORDS_UP_TO[transport]


@dataclass(frozen=True)
class Mail:
    """Memory that a rank is written to by the other one: two slots each of ``words`` 8-byte words, of ``slices`` lines and of
    ``nbytes`` bytes (the payload of slices, or of a staged copy). Layout: channel.cuh."""

    words: int
    slices: int
    nbytes: int

    @property
    def size(self) -> int:
        """Bytes in all."""
        return 2 * (8 * self.words + LINE * self.slices + self.nbytes)

    @property
    def copied_to(self) -> int:
        """Offset of what staged copies write."""
        return 2 * (8 * self.words + LINE * self.slices)

    @staticmethod
    def of(exchanges: Iterable[tuple[Op, Mapping[str, TensorType], KernelSpec]]) -> Mail:
        """Room for the largest of the exchanges (op, types of its operands, kernel), on every transport."""
        words = slices = nbytes = 0
        for op, types, spec in exchanges:
            size = payload(op, types)
            nbytes = max(nbytes, size)
            if not in_slices(op, types, "peer"):
                words = max(words, size // 4)
            if in_slices(op, types, "host"):
                slices = max(slices, types["y"].shape[0] * int(spec.params["parts"]))
            if tiles := tiles_of(spec):
                slices = max(slices, tiles.count(*types["y"].shape))
        return Mail(-(-words // 16) * 16, slices, -(-nbytes // 256) * 256)


def columns_beside(caps: DeviceCaps) -> int:
    """Columns that an exchange beside products receives at once."""
    return max(1, min(BESIDE, caps.sms // BESIDE_SHARE))


def caps_beside(caps: DeviceCaps) -> DeviceCaps:
    """What such an exchange leaves to products."""
    return replace(caps, sms=max(1, caps.sms - 2 * columns_beside(caps)))


def _parts(columns: int, width: int, sms: int) -> int:
    """Blocks per column: as many as have PART_VALUES values each, all columns resident."""
    allowed = [p for p in range(1, sms + 1) if width // 2 % p == 0 and (p == 1 or width // p >= PART_VALUES)]
    return max(p for p in allowed if p * columns <= max(sms, columns))


def residual_spec(op: Op, types: Mapping[str, TensorType], caps: DeviceCaps, norm: Op | None = None,
                  tiles: Tiles | None = None, settled: bool = False) -> KernelSpec:  # fmt: skip
    """Exchange, sum and residual, with ``norm`` (an rmsnorm of the result) in the same kernel. ``tiles``: those that the
    products of both ranks send over some transports (argument ``tiles`` nonzero); over others the kernel sends all itself.
    ``settled``: SETTLED are complete before a block can start (compiler/passes/early.py).

    All blocks that wait are resident at once (at most one per multiprocessor). Raises IRError."""
    _two_ranks(op)
    require(bool(op.attrs.get("tiles")) == (tiles is not None), op, "tiles are sent by products of many rows, and only by them")
    require(not op.attrs["pushed"] or (op.attrs["wire"] == "f32" and tiles is None), op, "words are pushed of FP32 sums")
    columns, width = types["y"].shape
    require(width % 4 == 0, op, f"width {width} is no multiple of 4")
    parts = 1 if norm is not None else _parts(columns, width, caps.sms)
    beside = op.half is not None  # products run meanwhile: few blocks, but two on a multiprocessor if need be
    rows = max(1, min(columns, caps.sms // parts, columns_beside(caps) if beside else columns))
    wire, pushed = op.attrs["wire"], bool(op.attrs["pushed"])
    host, peer = in_slices(op, types, "host"), in_slices(op, types, "peer")
    sparing = not host and 2 * payload(op, types) > SPARING_FROM
    arguments = ["partial", "partial_stride", "residual", "residual_stride", "y", "y_stride"]
    scalars: dict[str, int | float] = {"columns": columns, "ordinal": op.int_attr("ordinal")}
    if norm is not None:
        arguments += ["norm_w", "normed", "normed_stride", "eps"]
        scalars["eps"] = norm.float_attr("eps")
    how = "pushed by the product" if pushed else " and ".join(
        f"{'slices' if sliced else 'words'} over {name}" for name, sliced in (("peer", peer), ("host", host)))  # fmt: skip
    if tiles is not None:
        how = f"tiles of {tiles.tokens} columns x {tiles.rows} values sent by the product, where it does not {how}"
    senders = host or peer
    # Senders and receivers of many columns share multiprocessors, so that both directions of the link are busy; wider rows do
    # not fit half the registers.
    min_blocks = 2 if senders and (beside or 2 * parts * rows > caps.sms) and width // parts <= SHARED_WIDTH else 1
    flags = "".join(letter for letter, on in zip("hpxsm", (host, peer, pushed, sparing, min_blocks > 1), strict=True) if on)
    return KernelSpec(
        entry=f"exchange_residual_h{width}_{wire}_p{parts}{flags}_r{op.rank}{'_norm' if norm else ''}"
        f"{f'_m{tiles.rows}t{tiles.tokens}' if tiles else ''}{'_early' if settled else ''}_{_arch(caps)}",
        template="exchange_residual.cu.j2",
        params={"width": width, "parts": parts, "half": wire == "bf16", "first_rank": op.rank == 0, "norm": norm is not None,
                "pushed": pushed, "host_slices": host, "peer_slices": peer, "sparing": sparing,
                "settled": settled, "min_blocks": min_blocks, "tile_tokens": tiles.tokens if tiles else 0,
                "tile_rows": tiles.rows if tiles else 0},
        grid=(parts, rows, 2 if senders else 1), block=THREADS, smem=0,
        args=(*arguments, "rows", "columns", *PROTOCOL, "apart", *(["tiles"] if tiles else [])),
        scalars=scalars, waits_first=True, early=SETTLED if settled else (),
        reason=f"{wire} partial sums, {how}; {parts * rows} blocks wait{', norm behind it' if norm else ''}",
    )  # fmt: skip


def probe_specs(width: int, caps: DeviceCaps) -> tuple[KernelSpec, KernelSpec]:
    """Kernels of both ranks that exchange one column of ``width`` FP32 values as words: programs carry them for the self-test
    of a transport, since their own wait for what products push."""
    wide, narrow = TensorType((1, width), "f32"), TensorType((1, width), "bf16")
    types = {"partial": wide, "peer_1": wide, "residual": narrow, "y": narrow}
    refs = {name: Ref(name) for name in ("partial", "peer_1", "residual", "sequence", "step")}
    first, second = (residual_spec(Op("exchange_residual", refs, {"y": Ref("y")}, rank=rank, attrs={
        "ordinal": 0, "wire": "f32", "pushed": False}), types, caps) for rank in (0, 1))  # fmt: skip
    return first, second


def _rows(rows: int, lanes: int, width: int) -> tuple[bool, int, str]:
    """Whether rows are lanes' last columns, columns per lane among the rows, and how a name says it."""
    last = rows == lanes and width > 1
    return last, 1 if last else width, "last" if last else str(width)


def candidates_spec(op: Op, types: Mapping[str, TensorType], lanes: int, width: int, caps: DeviceCaps) -> KernelSpec:
    """The best of a rank's share of the vocabulary: the sampler's scan, without the draw."""
    rows, share = types["logits"].shape
    first = op.int_attr("first")
    vocab = max(0, min(share, op.int_attr("vocab") - first))
    last, per_lane, label = _rows(rows, lanes, width)
    slices = max(1, -(-vocab // SAMPLE_SLICE))
    return KernelSpec(
        f"sample_candidates_v{first}_{vocab}_t{label}_{_arch(caps)}", "sample_candidates.cu.j2",
        {"vocab": vocab, "count_stride": types["token_counts"].shape[1], "width": per_lane, "last_rows": last, "first": first},
        (slices, rows, 1), 256, 0,
        ("logits", "logits_stride", "lane_sampling", "run_slot", "run_ncols", "token_counts", "pf_control", "candidates",
         "keys", "arrivals"),
        scratch={"keys": rows * slices * SAMPLE_CANDIDATES * 8, "arrivals": rows * 4}, zeroed=frozenset({"arrivals"}),
        reason=f"{slices} slices of {SAMPLE_SLICE} logits per row",
    )  # fmt: skip


def merge_spec(op: Op, types: Mapping[str, TensorType], lanes: int, width: int, caps: DeviceCaps) -> KernelSpec:
    """Candidates of both ranks to a token, one block per row or, of many rows, per multiprocessor."""
    _two_ranks(op)
    rows = types["candidates"].shape[0]
    last, per_lane, label = _rows(rows, lanes, width)
    return KernelSpec(
        f"sample_merge_t{label}_{_arch(caps)}", "sample_merge.cu.j2", {"width": per_lane, "last_rows": last},
        (1, min(rows, caps.sms), 1), MERGE_THREADS, 0,
        ("candidates", "lane_sampling", "run_len", "run_ncols", "lane_prompt_len", "pf_control", "token", "rows", *PROTOCOL),
        scalars={"ordinal": op.int_attr("ordinal"), "rows": rows}, waits_first=True,
        reason="top 20 of both ranks, the same draw on each",
    )  # fmt: skip
