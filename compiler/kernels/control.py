"""Kernels of the control nodes, the plain norm, the last-column copy and the sampler."""

from __future__ import annotations

from collections.abc import Mapping

from compiler.ir.op import Op, require
from compiler.ir.types import TensorType
from compiler.kernels.attention_decode import group_columns, row_limit
from compiler.kernels.spec import DeviceCaps, KernelSpec

SAMPLE_SLICE = 4096  # logits per block (sample.cuh: threads * per_thread)
SAMPLE_CANDIDATES = 20


def _arch(caps: DeviceCaps) -> str:
    return caps.arch.replace("_", "")


def begin_spec(op: Op, types: Mapping[str, TensorType], lanes: int, width: int, heads: int, dim: int,
               caps: DeviceCaps) -> KernelSpec:  # fmt: skip
    """First node. ``heads`` and ``dim`` of the queries fix how columns are grouped in the attention work list."""
    prefill = op.attrs["phase"] == "prefill"
    params: dict[str, int | str | bool] = {
        "prefill": prefill,
        "control_words": types["block"].elements,
        "slots": types["token_counts"].shape[0],
        "vocab": types["token_counts"].shape[1],
        "width": width,
        "max_context": op.int_attr("max_context"),
    }
    args = ["ring", "block", "step", "token_counts", "lane_ncols", "lane_len", "tokens"]
    if not prefill:
        params |= {
            "lanes": lanes,
            "all_lanes": types["lane_ncols"].shape[0],
            "queue_size": types["queue"].shape[1],
            "kv_heads": op.int_attr("kv_heads"),
            "group": group_columns(width, heads, op.int_attr("kv_heads"), row_limit(dim, caps)),
        }
        args += ["positions", "lane_page_row", "lane_frozen", "lane_rope_delta", "queue", "queue_head", "queue_tail", "work",
                 "work_count"]  # fmt: skip
    entry = f"begin_{op.attrs['phase']}_b{lanes}_t{width}_{_arch(caps)}"
    return KernelSpec(entry, "begin.cu.j2", params, (1, 1, 1), 256, 0, tuple(args), waits_first=True,
                      reason="one block: control only")  # fmt: skip


def advance_spec(op: Op, types: Mapping[str, TensorType], lanes: int, width: int, caps: DeviceCaps) -> KernelSpec:
    """Last node, one thread per lane."""
    all_lanes = types["lane_len"].shape[0]
    require(all_lanes <= 64, op, f"{all_lanes} lanes; at most 64 are supported")
    prefill, sampling = op.attrs["phase"] == "prefill", "sampled" in op.inputs
    params: dict[str, int | str | bool] = {
        "prefill": prefill,
        "sampling": sampling,
        "lanes": lanes,
        "all_lanes": all_lanes,
        "width": width,
        "queue_size": types["queue"].shape[1],
        "max_context": op.int_attr("max_context"),
        "vocab": types["token_counts"].shape[1],
    }
    args = ("sampled", "run_ncols", "run_len", "run_slot", "pf_control", "step", "lane_len", "lane_prompt_len", "lane_limit",
            "lane_generated", "lane_frozen", "lane_stops", "queue", "queue_head", "queue_tail", "slot_pending", "slot_parity",
            "token_counts", "egress")  # fmt: skip
    entry = f"advance_{op.attrs['phase']}{'' if sampling else '_score'}_b{lanes}_t{width}_{_arch(caps)}"
    return KernelSpec(entry, "advance.cu.j2", params, (1, 1, 1), 64, 0, args, reason="one block: control only")


def rmsnorm_spec(op: Op, types: Mapping[str, TensorType], caps: DeviceCaps) -> KernelSpec:
    """Offset RMSNorm, one block of 256 threads per column."""
    columns, width = types["x"].shape
    require(width % 2 == 0, op, f"width {width} is odd; an even width is needed")
    return KernelSpec(f"rmsnorm_h{width}_{_arch(caps)}", "rmsnorm.cu.j2", {"width": width}, (columns, 1, 1), 256, 0,
                      ("x", "x_stride", "w", "y", "y_stride", "eps"), {"eps": op.float_attr("eps")},
                      reason="stand-alone norm: its consumer has no norm prologue")  # fmt: skip


def select_last_spec(op: Op, types: Mapping[str, TensorType], width: int, caps: DeviceCaps) -> KernelSpec:
    """Copy of each lane's last active row."""
    lanes, hidden = types["y"].shape
    require(hidden % 2 == 0, op, f"width {hidden} is odd; an even width is needed")
    return KernelSpec(f"select_last_h{hidden}_t{width}_{_arch(caps)}", "select_last.cu.j2",
                      {"columns_per_lane": width, "width": hidden}, (lanes, 1, 1), 256, 0,
                      ("x", "x_stride", "lane_ncols", "y", "y_stride"), reason="one block per lane")  # fmt: skip


def sample_spec(op: Op, types: Mapping[str, TensorType], lanes: int, width: int, caps: DeviceCaps) -> KernelSpec:
    """Argmax or sampled token per row: slices of the vocabulary in parallel, merged by the block that arrives last."""
    rows, vocab = types["logits"].shape[0], op.int_attr("vocab")
    last_rows = rows == lanes and width > 1
    slices = -(-vocab // SAMPLE_SLICE)
    params: dict[str, int | str | bool] = {
        "vocab": vocab,
        "count_stride": types["token_counts"].shape[1],
        "width": 1 if last_rows else width,
        "last_rows": last_rows,
    }
    entry = f"sample_v{vocab}_t{'last' if last_rows else width}_{_arch(caps)}"
    return KernelSpec(
        entry, "sample.cu.j2", params, (slices, rows, 1), 256, 0,
        ("logits", "logits_stride", "lane_sampling", "run_slot", "run_len", "run_ncols", "lane_prompt_len", "token_counts",
         "pf_control", "token", "candidates", "arrivals"),
        scratch={"candidates": rows * slices * SAMPLE_CANDIDATES * 8, "arrivals": rows * 4}, zeroed=frozenset({"arrivals"}),
        reason=f"{slices} slices of {SAMPLE_SLICE} logits per row",
    )  # fmt: skip
