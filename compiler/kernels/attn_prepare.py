"""Kernel of attn_prepare: one warp per head and column."""

from __future__ import annotations

from collections.abc import Mapping

from compiler.control import MAX_CONTEXT, PAGE
from compiler.ir.op import Op, require
from compiler.ir.types import TensorType
from compiler.kernels.spec import DeviceCaps, KernelSpec

WARPS = 4  # prepare_warps in prepare.cuh
EARLY = ("inv_freq", "positions", "lane_ncols", "lane_len", "lane_page_row", "page_table")


def prepare_spec(op: Op, types: Mapping[str, TensorType], width: int, caps: DeviceCaps, early: bool = False) -> KernelSpec:
    """Kernel of an ``attn_prepare`` op for ``width`` columns per lane. ``early``: the operands ``EARLY`` are settled before
    the dependency wait."""
    heads, kv_heads, dim, rotary = (op.int_attr(name) for name in ("heads", "kv_heads", "dim", "rotary"))
    row_pages, columns = types["page_table"].shape[1], types["q"].shape[0]
    require(row_pages * PAGE <= MAX_CONTEXT, op, f"{row_pages} pages per sequence; at most {MAX_CONTEXT // PAGE}")
    require(columns % width == 0 and columns <= 65535, op, f"{columns} columns in lanes of {width}; at most 65535")
    return KernelSpec(
        entry=f"attn_prepare_bf16_h{heads}x{kv_heads}_d{dim}_r{rotary}_t{width}_p{row_pages}"
        f"{'_early' if early else ''}_{caps.arch.replace('_', '')}",
        template="attn_prepare.cu.j2",
        params={"key_codec": "Bf16", "value_codec": "Bf16", "kv_heads": kv_heads, "dim": dim, "heads": heads,
                "rotary": rotary, "section_h": op.int_attr("section_h"), "section_w": op.int_attr("section_w"),
                "lane_columns": width, "row_pages": row_pages, "early": early},  # fmt: skip
        grid=(-(-(heads + 2 * kv_heads) // WARPS), columns, 1),
        block=32 * WARPS,
        smem=0,
        args=("q", "q_stride", "k", "k_stride", "v", "v_stride", "wq", "wk", "inv_freq", "positions", "lane_ncols",
              "lane_len", "lane_page_row", "page_table", "kv", "qr", "qr_stride", "eps", "mscale"),  # fmt: skip
        scalars={"eps": op.float_attr("eps"), "mscale": op.float_attr("mscale")},
        early=EARLY if early else (),
        reason="one warp per head and column" + ("; places and angles before the wait" if early else ""),
    )
