"""Kernels of the chunked delta rule: inside the chunks (parallel over them), then across them."""

from __future__ import annotations

from collections.abc import Mapping

from compiler.ir.op import Op, require
from compiler.ir.types import TensorType
from compiler.kernels.gdn_decode import head_shape
from compiler.kernels.spec import BLOCK_RESERVED, DeviceCaps, KernelSpec
from compiler.ops.gdn import CHUNK

INTRA_THREADS = 128


def intra_shared(dk: int) -> int:
    """Bytes of IntraShared (intra.cuh checks them): tiles of q and k, A, five vectors."""
    return 2 * CHUNK * (dk + 8) * 2 + CHUNK * 68 * 4 + 5 * CHUNK * 4


def carry_shared(dk: int, warps: int) -> int:
    """Bytes of CarryShared (carry.cuh checks them): two tiles of k, one of q, a record, values, outputs."""
    return 3 * CHUNK * (dk + 8) * 2 + 16640 + CHUNK * (16 * warps + 8) * 2 + warps * CHUNK * 24 * 2


def chunked_fits(op: Op, types: Mapping[str, TensorType], caps: DeviceCaps) -> bool:
    """Whether the chunked kernels serve this prefill ``gdn`` op on the target; the recurrence (``recurrent_spec``)
    serves the rest: chunk calls that are no multiple of 64 columns, targets with too little shared memory."""
    _, _, dk, _ = head_shape(op)
    return types["y"].shape[0] % CHUNK == 0 and carry_shared(dk, 1) <= caps.smem_block


def intra_spec(op: Op, types: Mapping[str, TensorType], caps: DeviceCaps) -> KernelSpec:
    """Kernel of a ``gdn_intra`` op: one block per chunk and value head."""
    hk, hv, dk, _ = head_shape(op)
    chunks = types["y"].shape[0] // CHUNK
    require(chunks * CHUNK == types["y"].shape[0], op, f"{types['y'].shape[0]} columns are not a multiple of {CHUNK}")
    smem = intra_shared(dk)
    return KernelSpec(
        entry=f"gdn_intra_h{hk}x{hv}_d{dk}_{caps.arch.replace('_', '')}",
        template="gdn_intra.cu.j2",
        params={"block": INTRA_THREADS, "min_blocks": min(4, caps.smem_sm // (smem + BLOCK_RESERVED)), "dk": dk,
                "key_heads": hk, "value_heads": hv, "smem": smem},
        grid=(chunks, hv, 1),
        block=INTRA_THREADS,
        smem=smem,
        args=("y", "y_stride", "gates", "gates_stride", "lane_ncols", "matrices", "rows"),
        reason=f"{chunks} chunks of {CHUNK} columns",
    )  # fmt: skip


def carry_spec(op: Op, types: Mapping[str, TensorType], caps: DeviceCaps) -> KernelSpec:
    """Kernel of a ``gdn_carry`` op: a warp carries 16 rows of a state through all chunks.

    Warps of one head share the tiles in shared memory; fewer per block where blocks would leave multiprocessors idle."""
    hk, hv, dk, dv = head_shape(op)
    slots, records = types["rec_k"].shape[1:3]
    parts = dv // 16
    allowed = [w for w in (4, 2, 1) if parts % w == 0 and carry_shared(dk, w) <= caps.smem_block]
    require(bool(allowed), op, f"{carry_shared(dk, 1)} bytes of shared memory are needed, {caps.smem_block} are there")
    warps = next((w for w in allowed if 3 * hv * parts // w >= 2 * caps.sms), allowed[-1])
    smem = carry_shared(dk, warps)
    return KernelSpec(
        entry=f"gdn_carry_h{hk}x{hv}_d{dk}x{dv}_w{warps}_{caps.arch.replace('_', '')}",
        template="gdn_carry.cu.j2",
        params={"block": 32 * warps, "min_blocks": 1, "dk": dk, "dv": dv, "key_heads": hk, "value_heads": hv,
                "warps": warps, "smem": smem},
        grid=(hv * parts // warps, 1, 1),
        block=32 * warps,
        smem=smem,
        args=("y", "y_stride", "matrices", "rows", "lane_slot", "lane_ncols", "lane_len", "slot_pending", "slot_parity",
              "recurrent", "rec_k", "rec_u", "rec_alpha", "o", "o_stride", "slots", "records"),
        scalars={"slots": slots, "records": records},
        reason=f"{16 * warps} of {dv} state rows per block, {hv * parts // warps} blocks",
    )  # fmt: skip
