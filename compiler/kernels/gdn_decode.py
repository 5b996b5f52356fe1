"""Kernel of the delta rule as a recurrence: decode with lazy commit, or prefill that commits."""

from __future__ import annotations

from collections.abc import Mapping

from compiler.ir.op import Op, require
from compiler.ir.types import TensorType
from compiler.kernels.spec import DeviceCaps, KernelSpec


def head_shape(op: Op) -> tuple[int, int, int, int]:
    """key heads, value heads, dk, dv, checked against what the kernels can hold."""
    hk, hv, dk, dv = (op.int_attr(name) for name in ("key_heads", "value_heads", "dk", "dv"))
    for name, dim in (("dk", dk), ("dv", dv)):
        require(16 <= dim <= 128 and dim % 16 == 0, op, f"{name} is {dim}; allowed: 16, 32, … 128")
    for name, ref in (*op.inputs.items(), *op.outputs.items()):
        require(ref.offset % 8 == 0, op, f"{name} begins at column {ref.offset}; 16-byte loads need a multiple of 8")
    return hk, hv, dk, dv


def recurrent_spec(op: Op, types: Mapping[str, TensorType], lanes: int, width: int, caps: DeviceCaps) -> KernelSpec:
    """Kernel of a ``gdn`` op for ``lanes`` × ``width`` columns; phase prefill commits the state and records nothing.

    A block holds one or two state rows per group of lanes: one while blocks are few, so that a single sequence fills the
    device; two later, so that fewer blocks normalise the same q and k. The bits do not depend on it."""
    hk, hv, dk, dv = head_shape(op)
    slots, records = types["rec_k"].shape[1:3]
    commit = op.attrs["phase"] == "prefill"
    require(commit or width <= records, op, f"{width} columns per lane, but records hold {records}")
    require(not commit or lanes == 1, op, f"prefill runs one lane, not {lanes}")
    row_lanes = 8 if dk % 32 == 0 else 4
    pass_rows = 32 // row_lanes
    warps = next(w for w in (4, 2, 1) if dv % (w * pass_rows) == 0)
    rows = 2 if dv % (2 * warps * pass_rows) == 0 and lanes * hv * dv // (warps * pass_rows) > 6 * caps.sms else 1
    blocks = hv * dv // (warps * pass_rows * rows)
    name = "commit" if commit else "decode"
    return KernelSpec(
        entry=f"gdn_{name}_h{hk}x{hv}_d{dk}x{dv}_w{warps}r{rows}_{caps.arch.replace('_', '')}",
        template="gdn_recurrent.cu.j2",
        params={"block": 32 * warps, "min_blocks": 4, "dk": dk, "dv": dv, "key_heads": hk,
                "value_heads": hv, "warps": warps, "rows": rows, "commit": commit},
        grid=(blocks, lanes, 1),
        block=32 * warps,
        smem=0,
        args=("y", "y_stride", "gates", "gates_stride", "lane_slot", "lane_ncols", "lane_len", "slot_pending",
              "slot_parity", "recurrent", "rec_k", "rec_u", "rec_alpha", "o", "o_stride", "width", "slots", "records"),
        scalars={"width": width, "slots": slots, "records": records},
        reason=f"{warps * pass_rows * rows} state rows per block, {blocks * lanes} blocks",
    )  # fmt: skip
