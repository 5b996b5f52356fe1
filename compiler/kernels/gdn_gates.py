"""Kernel of the GDN gates: both small products and their activations in one launch."""

from __future__ import annotations

from collections.abc import Mapping

from compiler.ir.op import Op, require
from compiler.ir.types import TensorType
from compiler.kernels.spec import DeviceCaps, KernelSpec
from compiler.ops.gdn_gates import is_fused

WARPS = 8  # each sums a fixed eighth of K (gate_warps in gates.cuh)
COLUMN_TILE = 16


def gates_spec(op: Op, types: Mapping[str, TensorType], caps: DeviceCaps) -> KernelSpec:
    """Kernel of a ``gdn_gates`` op.

    Few columns: two weight rows per block, so that the weights come in over many multiprocessors. Many columns: up to
    48 rows per block, so that the hidden rows are read few times. A column's bits are the same either way."""
    columns, hidden = types["x"].shape
    heads = types["a_log"].shape[0]
    for name, ref in (*op.inputs.items(), *op.outputs.items()):
        require(ref.offset % 8 == 0, op, f"{name} begins at column {ref.offset}; 16-byte loads need a multiple of 8")
    require(hidden % 8 == 0, op, f"hidden width {hidden} is not a multiple of 8")
    rows = 2 if columns <= 2 * COLUMN_TILE else min(48, -(-2 * heads // 8) * 8)
    tiles = -(-rows // 8)
    fused = is_fused(op)
    return KernelSpec(
        entry=f"gdn_gates_bf16_h{heads}_k{hidden}_r{rows}{'_ab' if fused else ''}_{caps.arch.replace('_', '')}",
        template="gdn_gates.cu.j2",
        params={"block": 32 * WARPS, "hidden": hidden, "heads": heads, "tiles": tiles, "rows": rows, "fused": fused},
        grid=(-(-2 * heads // rows), -(-columns // COLUMN_TILE), 1),
        block=32 * WARPS,
        smem=0,
        args=("x", "x_stride", "wa", "wb", "a_log", "dt_bias", "gates", "gates_stride", "columns"),
        scalars={"columns": columns},
        reason=f"{rows} weight rows and {COLUMN_TILE} columns per block, K over {WARPS} warps",
    )
