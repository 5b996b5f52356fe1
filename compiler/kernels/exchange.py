"""Kernels of the exchanges between two ranks (templates/include/ninferc/exchange/)."""

from __future__ import annotations

from collections.abc import Mapping

from compiler.ir.op import Op, require
from compiler.ir.types import IRError, TensorType
from compiler.kernels.control import SAMPLE_CANDIDATES, SAMPLE_SLICE
from compiler.kernels.spec import DeviceCaps, KernelSpec
from compiler.ops.exchange_residual import peers_of

THREADS = 256
MERGE_THREADS = 64
PART_VALUES = 1024  # values of a column that one block takes, where columns are few
PROTOCOL = ("sequence", "step", "ordinal", "outbox", "inbox", "relay", "hang", "transport", "slot_words")
KINDS = frozenset({"exchange_residual", "sample_merge"})


def _arch(caps: DeviceCaps) -> str:
    return caps.arch.replace("_", "")


def _two_ranks(op: Op) -> None:
    if len(peers_of(op)) != 1:
        raise IRError(f"op {op.kind}: {len(peers_of(op)) + 1} ranks; kernels exchange between 2, the VM runs any number")


def begin_spec(op: Op, caps: DeviceCaps) -> KernelSpec:
    """One thread advances the sequence numbers."""
    return KernelSpec(f"exchange_begin_{_arch(caps)}", "exchange_begin.cu.j2", {}, (1, 1, 1), 32, 0, ("sequence", "count"),
                      {"count": op.int_attr("count")}, reason="sequence numbers of the replay")  # fmt: skip


def words(op: Op, types: Mapping[str, TensorType]) -> int:
    """8-byte words that an exchange op sends: one per FP32 value, one per two of bf16."""
    if op.kind == "sample_merge":
        return types["candidates"].elements
    return types["partial"].elements // (2 if op.attrs["wire"] == "bf16" else 1)


def residual_spec(op: Op, types: Mapping[str, TensorType], caps: DeviceCaps, norm: Op | None = None) -> KernelSpec:
    """Exchange, sum and residual, with ``norm`` (an rmsnorm of the result) in the same kernel.

    All blocks are resident at once (at most one per multiprocessor): each waits for the peer. Raises IRError."""
    _two_ranks(op)
    columns, width = types["y"].shape
    require(width % 4 == 0, op, f"width {width} is no multiple of 4")
    parts = 1
    if norm is None:
        allowed = [p for p in range(1, caps.sms + 1) if width // 4 % p == 0 and (p == 1 or width // p >= PART_VALUES)]
        parts = max(p for p in allowed if p * columns <= max(caps.sms, columns))
    rows = max(1, min(columns, caps.sms // parts))
    half = op.attrs["wire"] == "bf16"
    arguments = ["partial", "partial_stride", "residual", "residual_stride", "y", "y_stride"]
    scalars: dict[str, int | float] = {"columns": columns, "ordinal": op.int_attr("ordinal")}
    if norm is not None:
        arguments += ["norm_w", "normed", "normed_stride", "eps"]
        scalars["eps"] = norm.float_attr("eps")
    return KernelSpec(
        entry=f"exchange_residual_h{width}_{op.attrs['wire']}_p{parts}_r{op.rank}{'_norm' if norm else ''}_{_arch(caps)}",
        template="exchange_residual.cu.j2",
        params={"width": width, "parts": parts, "half": half, "first_rank": op.rank == 0, "norm": norm is not None},
        grid=(parts, rows, 1), block=THREADS, smem=0, args=(*arguments, "rows", "columns", *PROTOCOL), scalars=scalars,
        reason=f"{op.attrs['wire']} partial sums, {parts * rows} resident blocks{', norm behind it' if norm else ''}",
    )  # fmt: skip


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
    """Candidates of both ranks to a token, one block per row."""
    _two_ranks(op)
    rows = types["candidates"].shape[0]
    require(rows <= caps.sms, op, f"{rows} rows; at most {caps.sms} blocks are resident at once")
    last, per_lane, label = _rows(rows, lanes, width)
    return KernelSpec(
        f"sample_merge_t{label}_{_arch(caps)}", "sample_merge.cu.j2", {"width": per_lane, "last_rows": last}, (1, rows, 1),
        MERGE_THREADS, 0,
        ("candidates", "lane_sampling", "run_len", "run_ncols", "lane_prompt_len", "pf_control", "token", *PROTOCOL),
        scalars={"ordinal": op.int_attr("ordinal")}, reason="top 20 of both ranks, the same draw on each",
    )  # fmt: skip
