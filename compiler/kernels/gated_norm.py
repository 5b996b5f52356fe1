"""Kernel of the gated norm of the GDN output."""

from __future__ import annotations

from collections.abc import Mapping

from compiler.ir.op import Op, require
from compiler.ir.types import TensorType
from compiler.kernels.spec import DeviceCaps, KernelSpec

BLOCK = 128


def gated_norm_spec(op: Op, types: Mapping[str, TensorType], caps: DeviceCaps) -> KernelSpec:
    """Kernel of a ``gated_norm`` op: neighbouring lanes share one head of one column, eight values each."""
    columns, heads, dim = types["o"].shape[0], op.int_attr("heads"), op.int_attr("dim")
    for name, ref in (*op.inputs.items(), *op.outputs.items()):
        require(ref.offset % 8 == 0, op, f"{name} begins at column {ref.offset}; 16-byte loads need a multiple of 8")
    require(dim % 8 == 0 and dim <= 256, op, f"dim is {dim}; allowed: multiples of 8 up to 256")
    lanes = 1 << max(0, (dim // 8 - 1).bit_length())
    return KernelSpec(
        entry=f"gated_norm_h{heads}_d{dim}_{caps.arch.replace('_', '')}",
        template="gated_norm.cu.j2",
        params={"block": BLOCK, "heads": heads, "dim": dim},
        grid=(-(-columns * heads * lanes // BLOCK), 1, 1),
        block=BLOCK,
        smem=0,
        args=("o", "o_stride", "z", "z_stride", "w", "y", "y_stride", "columns", "eps"),
        scalars={"columns": columns, "eps": op.float_attr("eps")},
        reason=f"{lanes} lanes per head",
    )
