"""Kernels of prefill attention: one lane, a device-side row count, persistent blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from compiler.control import MAX_CONTEXT, PAGE
from compiler.ir.op import Op, require
from compiler.ir.types import IRError, TensorType
from compiler.kernels.spec import DeviceCaps, KernelSpec

WARPGROUP_DIMS = (64, 128, 256)  # whole panels of 64 values
STATIC = 1024  # static shared memory, rounded up to the alignment of the dynamic part


def prefill_spec(op: Op, types: Mapping[str, TensorType], caps: DeviceCaps) -> KernelSpec:
    """Kernel of a prefill ``attention`` op: warpgroup products where the target has them, else mma.sync.

    Raises IRError when no kernel fits ``caps``."""
    if caps.wgmma and op.int_attr("dim") in WARPGROUP_DIMS:
        return wgmma_spec(op, types, caps)
    return mma_spec(op, types, caps)


def _common(op: Op, types: Mapping[str, TensorType], caps: DeviceCaps, rows: int) -> KernelSpec:
    """What the variants share; ``rows`` tokens make a tile. Entry, template, block and shared memory are still to be set."""
    heads, kv_heads, dim = op.int_attr("heads"), op.int_attr("kv_heads"), op.int_attr("dim")
    columns, row_pages = types["qr"].shape[0], types["page_table"].shape[1]
    require(row_pages * PAGE <= MAX_CONTEXT, op, f"{row_pages} pages per sequence; at most {MAX_CONTEXT // PAGE}")
    tiles = -(-columns // rows) * heads
    # Key ranges are cut at most so far that two partial results per tile of a full chunk fit, and so that a single
    # tile of rows can still occupy every multiprocessor.
    partials = max(2 * tiles, min(16 * heads, 2 * caps.sms))
    return KernelSpec(
        entry=f"h{heads}x{kv_heads}_d{dim}_n{columns}_p{row_pages}_{caps.arch.replace('_', '')}",
        template="",
        params={"key_codec": "Bf16", "value_codec": "Bf16", "kv_heads": kv_heads, "dim": dim, "heads": heads,
                "partials": partials, "row_pages": row_pages},  # fmt: skip
        grid=(min(caps.sms, tiles * 16), 1, 1),
        block=0,
        smem=0,
        args=("qr", "qr_stride", "kv", "gate", "gate_stride", "lane_ncols", "lane_len", "lane_page_row", "page_table",
              "partial_o", "partial_ml", "counters", "o", "o_stride", "scale"),  # fmt: skip
        scalars={"scale": math.log2(math.e) * dim**-0.5},
        scratch={"partial_o": partials * rows * dim * 4, "partial_ml": partials * rows * 8, "counters": tiles * 4},
        zeroed=frozenset({"counters"}),
    )


def mma_spec(op: Op, types: Mapping[str, TensorType], caps: DeviceCaps) -> KernelSpec:
    """The mma.sync variant: 128 rows of a head per block where shared memory allows, else 64."""
    dim = op.int_attr("dim")
    for warps, tile, slots in ((8, 64, 4), (8, 64, 3), (8, 32, 2), (4, 32, 2), (4, 16, 2)):
        smem = 16 * warps * dim * 2 + slots * tile * dim * 2
        if smem + STATIC <= caps.smem_block:
            break
    else:
        raise IRError(f"op {op.kind} (layer {op.layer}): {caps.smem_block} bytes of shared memory hold no tile of dim {dim}")
    common = _common(op, types, caps, 16 * warps)
    return replace(
        common,
        entry=f"attn_prefill_mma_bf16_m{16 * warps}k{tile}s{slots}_{common.entry}",
        template="attn_prefill_mma.cu.j2",
        params={**common.params, "warps": warps, "tile": tile, "slots": slots, "smem": smem},
        block=32 * warps,
        smem=smem,
        reason=f"mma.sync, {16 * warps} rows per block, {slots} tiles of {tile} keys in flight",
    )


def wgmma_spec(op: Op, types: Mapping[str, TensorType], caps: DeviceCaps) -> KernelSpec:
    """The warpgroup variant: 128 rows of a head per block, two warpgroups computing and one loading. Needs sm_90a."""
    dim = op.int_attr("dim")
    tile_bytes = PAGE * dim * 2
    slots = min(6, (caps.smem_block - STATIC) // tile_bytes - 2)
    if not (caps.wgmma and dim in WARPGROUP_DIMS and slots >= 4):
        raise IRError(f"op {op.kind} (layer {op.layer}): warpgroup products need sm_90a and dim 64, 128 or 256")
    common, smem = _common(op, types, caps, 128), (2 + slots) * tile_bytes
    return replace(
        common,
        entry=f"attn_prefill_wgmma_bf16_s{slots}_{common.entry}",
        template="attn_prefill_wgmma.cu.j2",
        params={**common.params, "slots": slots, "smem": smem},
        block=384,
        smem=smem,
        reason=f"wgmma, 128 rows per block, {slots} tiles of {PAGE} keys in flight",
    )
