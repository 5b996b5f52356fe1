"""Kernels of the causal convolution: decode (lazy commit) and prefill (direct commit)."""

from __future__ import annotations

from collections.abc import Mapping

from compiler.ir.op import Op, require
from compiler.ir.types import TensorType
from compiler.kernels.spec import DeviceCaps, KernelSpec

BLOCK = 128
PREFILL_ROWS = 16  # columns one thread walks


def conv_spec(op: Op, types: Mapping[str, TensorType], lanes: int, width: int, caps: DeviceCaps) -> KernelSpec:
    """Kernel of a ``conv`` op for ``lanes`` × ``width`` columns.

    Decode: two channels per thread, so that one lane fills many multiprocessors. Prefill: eight channels (16 bytes) per
    thread where every boundary allows it."""
    channels, split = types["y"].shape[1], types["x"].shape[1]
    slots, records = types["record"].shape[1:3]
    decode = op.attrs["phase"] == "decode"
    require(not decode or width <= records, op, f"{width} columns per lane, but records hold {records}")
    require(decode or lanes == 1, op, f"prefill runs one lane, not {lanes}")
    bounds = (channels, split, op.outputs["y"].offset, *(op.inputs[x].offset for x in ("x", "x2") if x in op.inputs))
    vector = 2 if decode else next((v for v in (8, 4) if all(bound % v == 0 for bound in bounds)), 2)
    require(all(bound % vector == 0 for bound in bounds), op, f"channel ranges {bounds} are not multiples of {vector}")
    second = "x2" in op.inputs
    threads = min(BLOCK, -(-channels // vector // 32) * 32)
    rows = 0 if decode else PREFILL_ROWS
    return KernelSpec(
        entry=f"conv_{'decode' if decode else 'prefill'}_c{channels}_s{split}_v{vector}_{caps.arch.replace('_', '')}",
        template="conv.cu.j2",
        params={"block": threads, "vector": vector, "rows": rows, "second": second, "split": split, "channels": channels},
        grid=(-(-channels // (vector * threads)), lanes if decode else -(-width // PREFILL_ROWS), 1),
        block=threads,
        smem=0,
        args=("x", "x_stride", *(("x2", "x2_stride") if second else ()), "w", "lane_slot", "lane_ncols", "lane_len",
              "slot_pending", "slot_parity", "window", "record", "y", "y_stride", "width", "slots", "records"),
        scalars={"width": width, "slots": slots, "records": records},
        reason=f"{vector} channels per thread" + ("" if decode else f", {PREFILL_ROWS} columns each"),
    )  # fmt: skip
