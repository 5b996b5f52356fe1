"""Kernels of decode attention: partial results over a device-built work list, then their merge."""

from __future__ import annotations

import math
from collections.abc import Mapping

from compiler.control import MAX_CHUNKS, MAX_CONTEXT, PAGE
from compiler.ir.op import Op, require
from compiler.ir.types import TensorType
from compiler.kernels.spec import BLOCK_RESERVED, DeviceCaps, KernelSpec, smem_alone

TILE = 32  # keys of one shared-memory tile (decode.cuh)
ROW_LIMIT = 48  # (column, query head) rows of one pass at most: three matrix tiles, by registers
MAX_COLUMNS = 32  # of one lane: bits of a column mask (worklist.cuh)
MAX_SLOTS = 8  # tiles in flight; more adds nothing once latency times bandwidth is covered
MERGE_SPAN = 16  # chunks that a group of threads adds up (merge_span in decode.cuh)
PARTIAL_EARLY = ("lane_len", "page_table", "work", "work_count")
MERGE_EARLY = ("lane_ncols", "lane_len")


def row_limit(dim: int, caps: DeviceCaps) -> int:
    """Rows of one pass: ROW_LIMIT, less where shared memory would not hold two tiles of keys beside them."""
    return next((rows for rows in (ROW_LIMIT, 32) if shared_bytes(dim, rows, 2) <= _room(caps, 1)), 16)


def group_columns(width: int, heads: int, kv_heads: int, rows: int) -> int:
    """Columns of one lane that share a pass of ``row_limit`` rows over the keys; `begin` builds the work list with it."""
    return max(1, min(width, rows // (heads // kv_heads)))


def work_items(lanes: int, width: int, heads: int, kv_heads: int, rows: int, chunks: int = MAX_CHUNKS) -> int:
    """Upper bound of the work list's items. A lane's columns form groups; chunk sizes change at most once in 32 columns."""
    groups = -(-width // group_columns(width, heads, kv_heads, rows))
    return lanes * kv_heads * chunks * (groups + (1 if width > 1 else 0))


def shared_bytes(dim: int, rows: int, slots: int) -> int:
    """Shared memory of one block of the partial kernel (mirrors Decode<…>::shared_bytes, which checks it)."""
    warps = dim // 32
    dim_parts = max(1, warps // 4)
    return slots * TILE * dim * 2 + rows * dim * 2 + dim_parts * rows * (TILE + 8) * 4 + rows * (TILE * 2 + 16) + rows * 4


def _room(caps: DeviceCaps, blocks: int) -> int:
    """Shared memory of one of ``blocks`` blocks of a multiprocessor."""
    return min(caps.smem_block, caps.smem_sm // blocks - BLOCK_RESERVED)


def _arch(caps: DeviceCaps) -> str:
    return caps.arch.replace("_", "")


def _geometry(op: Op, width: int, caps: DeviceCaps) -> tuple[int, int, int, int]:
    """heads, kv heads, dim, columns per group."""
    heads, kv_heads, dim = op.int_attr("heads"), op.int_attr("kv_heads"), op.int_attr("dim")
    require(1 <= width <= MAX_COLUMNS, op, f"{width} columns per lane; allowed in decode: 1…{MAX_COLUMNS}")
    require(kv_heads < PAGE, op, f"{kv_heads} KV heads; at most {PAGE - 1} fit a work item")
    rows = row_limit(dim, caps)
    require(heads // kv_heads <= rows, op, f"{heads // kv_heads} query heads per KV head; at most {rows}")
    return heads, kv_heads, dim, group_columns(width, heads, kv_heads, rows)


def partial_spec(op: Op, types: Mapping[str, TensorType], width: int, caps: DeviceCaps, early: bool = False) -> KernelSpec:
    """Kernel of an ``attention_partial`` op for ``width`` columns per lane. ``early``: the operands ``PARTIAL_EARLY`` are
    settled before the dependency wait. Raises IRError when none fits ``caps``."""
    heads, kv_heads, dim, group = _geometry(op, width, caps)
    row_pages, lanes = types["page_table"].shape[1], types["qr"].shape[0] // width
    require(row_pages * PAGE <= MAX_CONTEXT, op, f"{row_pages} pages per sequence; at most {MAX_CONTEXT // PAGE}")
    items = work_items(lanes, width, heads, kv_heads, row_limit(dim, caps), op.int_attr("chunks"))
    listed = types["work"].shape[0]
    require(listed >= items, op, f"the work table has {listed} items, {items} may be needed")
    rows = -(-group * (heads // kv_heads) // 16) * 16

    def slots_for(blocks: int) -> int:
        return min(MAX_SLOTS, (_room(caps, blocks) - shared_bytes(dim, rows, 0)) // (TILE * dim * 2))

    # Two blocks per multiprocessor hide each other's phases; wide passes need the registers of one.
    blocks = 2 if rows <= 16 and slots_for(2) >= 4 else 1
    slots = slots_for(blocks)
    require(slots >= 2, op, f"{caps.smem_block} bytes of shared memory do not hold two tiles of {TILE} keys")
    smem = shared_bytes(dim, rows, slots)
    return KernelSpec(
        entry=f"attn_decode_bf16_h{heads}x{kv_heads}_d{dim}_t{width}_p{row_pages}_s{slots}{'_early' if early else ''}"
        f"_{_arch(caps)}",
        template="attn_decode.cu.j2",
        params={"key_codec": "Bf16", "value_codec": "Bf16", "kv_heads": kv_heads, "dim": dim, "heads": heads,
                "lane_columns": width, "group": group, "row_pages": row_pages, "chunks": op.int_attr("chunks"),
                "slots": slots, "smem": smem, "threads": dim, "blocks_per_sm": blocks, "early": early},  # fmt: skip
        grid=(min(caps.sms * blocks, items), 1, 1),
        block=dim,
        smem=smem_alone(smem, caps) if blocks == 1 else smem,
        args=("qr", "qr_stride", "kv", "lane_len", "page_table", "work", "work_count", "partial_o", "partial_ml", "scale"),
        scalars={"scale": math.log2(math.e) * dim**-0.5},
        early=PARTIAL_EARLY if early else (),
        reason=f"{rows} rows, {slots} tiles of {TILE} keys in flight, {blocks} blocks per multiprocessor"
        + ("; old tiles before the wait" if early else ""),
    )


def merge_spec(op: Op, types: Mapping[str, TensorType], width: int, caps: DeviceCaps, early: bool = False) -> KernelSpec:
    """Kernel of an ``attention_merge`` op for ``width`` columns per lane. ``early``: the operands ``MERGE_EARLY`` are settled
    before the dependency wait."""
    heads, _, dim, _ = _geometry(op, width, caps)
    chunks = op.int_attr("chunks")
    groups = -(-chunks // MERGE_SPAN)
    threads = groups * max(32, dim // 4)
    return KernelSpec(
        entry=f"attn_merge_h{heads}_d{dim}_t{width}_n{chunks}{'_early' if early else ''}_{_arch(caps)}",
        template="attn_merge.cu.j2",
        params={"threads": threads, "heads": heads, "dim": dim, "lane_columns": width, "chunks": chunks,
                "early": early},  # fmt: skip
        grid=(heads, types["gate"].shape[0], 1),
        block=threads,
        smem=0,
        args=("partial_o", "partial_ml", "gate", "gate_stride", "lane_ncols", "lane_len", "o", "o_stride"),
        early=MERGE_EARLY if early else (),
        reason=f"one block per head and column, {MERGE_SPAN} chunks per thread",
    )
