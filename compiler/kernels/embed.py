"""Embedding lookup kernel: one thread per eight columns of a row (templates/include/ninferc/codec/embed.cuh)."""

from __future__ import annotations

from collections.abc import Mapping

from compiler.ir.op import Op, require
from compiler.ir.types import TensorType
from compiler.kernels.arrange import in_units
from compiler.kernels.linear_columns import FORMATS
from compiler.kernels.spec import DeviceCaps, KernelSpec

THREADS = 128  # embed_threads in embed.cuh


def embed_spec(op: Op, types: Mapping[str, TensorType], format: str, caps: DeviceCaps) -> KernelSpec:
    """Kernel of an ``embed`` op whose table has the artifact's ``format``. Raises IRError naming what is not supported."""
    (vocabulary, width), columns = types["w"].shape, types["x"].shape[0]
    require(format in FORMATS, op, f"the table is in {format}; an embedding takes {', '.join(FORMATS)}")
    require(width % 8 == 0, op, f"the table has {width} columns, a multiple of 8 is needed")
    require(format != "NVFP4" or width % 64 == 0, op, f"the table has {width} columns, NVFP4 needs a multiple of 64")
    require(op.outputs["x"].offset % 8 == 0, op, f"x begins at column {op.outputs['x'].offset}, a multiple of 8 is needed")
    require(columns <= 65535, op, f"{columns} columns; at most 65535 are supported")
    name = FORMATS[format][0]
    return KernelSpec(
        entry=f"embed_{name}_k{width}_{caps.arch.replace('_', '')}",
        template="embed.cu.j2",
        params={"format": name, "width": width, "in_units": in_units(format, vocabulary, width)},
        grid=(-(-width // (8 * THREADS)), columns, 1),
        block=THREADS,
        smem=0,
        args=("tokens", "w_codes", "w_high", "w_scales", "w_divisor", "x", "x_stride"),
        reason=f"{vocabulary} rows of {width}, eight columns per thread",
    )
