"""Kernels of products with many rows of activations (prefill): y[rows, n] = x[rows, k] Wᵀ in every weight format.

Two families: warpgroup products where the target has them (templates/include/ninferc/gemm/rows_wgmma.cuh), warp-level
products elsewhere (rows_mma.cuh). Both keep one FP32 accumulator over all of K.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from compiler.ir.types import IRError
from compiler.kernels.arrange import in_units
from compiler.kernels.spec import BLOCK_RESERVED, DeviceCaps, KernelSpec

# Format name -> (enumerator in codec/format.cuh; bytes of 64 columns of one row: codes, high bits, scale word)
FORMATS = {
    "BF16": ("bf16", 128, 0, 0),
    "FP8_E4M3FN_ROW_BF16S": ("fp8_row", 64, 0, 0),
    "NVFP4": ("nvfp4", 32, 0, 4),
    "Q4G64_F16S": ("q4g64", 32, 0, 4),
    "Q5G64_F16S": ("q5g64", 32, 8, 4),
    "Q6G64_F16S": ("q6g64", 32, 16, 4),
    "W8G32_F16S": ("w8g32", 64, 0, 4),
}
STORES = ("bf16", "f32", "swiglu", "residual")
# Arguments of a product that sends its tiles to the other rank (templates/include/ninferc/exchange/push.cuh)
PUSH = ("outbox", "sequence", "step", "ordinal", "transport", "slot_words", "slot_slices", "slot_bytes", "tiles")
STEP = 64  # columns of K per pipeline stage
MAX_STAGES = 8  # more adds nothing once latency times bandwidth is covered
LOAD_THREADS = 128  # of a warpgroup kernel, besides its 256 that hold accumulators
# Tokens of a warpgroup tile -> columns of one product. 352 is the tile of a third of a 1024-row chunk.
WARPGROUP_TILES = {64: 64, 128: 128, 256: 256, 352: 176}
# Cycles of a tile besides its products, estimated: pipeline fill, epilogue, launch; and per step, synchronisation.
TILE_CYCLES, STEP_CYCLES = 5000, 120
# Cycles to unpack one step of a tile's weights; products of narrower tiles wait for it.
UNPACK_CYCLES = 400


@dataclass(frozen=True)
class Tile:
    """Shape of one block's work. ``rows`` weight rows, ``tokens`` activations rows, ``stages`` of 64 columns of K."""

    family: str  # "wgmma" or "mma"
    rows: int
    tokens: int
    stages: int
    blocks_per_sm: int = 1


def _stage_bytes(fmt: str, rows: int, tokens: int, alignment: int) -> int:
    _, codes, high, scale = FORMATS[fmt]
    return -(-(tokens * 128 + rows * (codes + high + scale)) // alignment) * alignment


def shared_bytes(fmt: str, store: str, tile: Tile) -> int:
    """Dynamic shared memory of a block in bytes (mirrors Shape::shared_bytes in tile.cuh, which checks it)."""
    wgmma = tile.family == "wgmma"
    stages = tile.stages * _stage_bytes(fmt, tile.rows, tile.tokens, 1024 if wgmma else 128)
    outputs = tile.rows // 2 if store == "swiglu" else tile.rows
    staging = 0 if store == "f32" else tile.tokens * (outputs * 2 + 16)
    return max(stages, staging) + (16 * tile.stages if wgmma else 0)


def tiles(fmt: str, store: str, caps: DeviceCaps) -> Iterator[Tile]:
    """Tiles that the target can run, in no order of merit."""
    if caps.wgmma:
        for tokens in WARPGROUP_TILES:
            stage = _stage_bytes(fmt, 128, tokens, 1024) + 16
            tile = Tile("wgmma", 128, tokens, min(MAX_STAGES, caps.smem_block // stage))
            if tile.stages >= 2 and shared_bytes(fmt, store, tile) <= caps.smem_block:
                yield tile
    else:
        for rows in (128, 256):
            for tokens in (64, 128) if caps.bf16_mma else (64,):  # on FP32 units wide tiles are longer code, not faster
                stage = _stage_bytes(fmt, rows, tokens, 128)
                # Two blocks of four warps hide each other's barriers; otherwise one block of eight has the same warps.
                blocks = 2 if rows == 128 and (caps.smem_sm // 2 - BLOCK_RESERVED) // stage >= 2 else 1
                room = min(caps.smem_block, caps.smem_sm // blocks - BLOCK_RESERVED)
                tile = Tile("mma", rows, tokens, min(4, room // stage), blocks)
                if tile.stages >= 2 and shared_bytes(fmt, store, tile) <= room:
                    yield tile


def _cycles(tile: Tile, outputs: int, k: int, rows: int, store: str, caps: DeviceCaps) -> float:
    """Estimated cycles of the whole product: waves of blocks times the cycles of one."""
    per_tile = tile.rows // 2 if store == "swiglu" else tile.rows
    waves = -(-(-(-outputs // per_tile) * -(-rows // tile.tokens)) // (caps.sms * tile.blocks_per_sm))
    steps = -(-k // STEP)
    # 128 rows x 64 columns take 4 cycles per token on warpgroup products, and at least four times that on warp-level ones.
    if tile.family == "wgmma":
        step = (max(4 * tile.tokens, UNPACK_CYCLES) + STEP_CYCLES) * (1.05 if tile.stages < 5 else 1)  # less in flight
    else:
        step = (16 * tile.tokens + UNPACK_CYCLES) * tile.rows // 128 * tile.blocks_per_sm + STEP_CYCLES
    return waves * (steps * step + TILE_CYCLES)


def choose(fmt: str, store: str, n: int, k: int, rows: int, caps: DeviceCaps) -> Tile:
    """The tile with the smallest estimate. Raises IRError when the target has none."""
    outputs = n // 2 if store == "swiglu" else n
    allowed = list(tiles(fmt, store, caps))
    if not allowed:
        raise IRError(f"linear_rows {fmt}: no tile fits the {caps.smem_block} bytes of shared memory of {caps.arch}")
    return min(allowed, key=lambda tile: (_cycles(tile, outputs, k, rows, store, caps), tile.tokens, tile.rows))


def linear_rows(
    fmt: str, store: str, n: int, k: int, rows: int, caps: DeviceCaps, tile: Tile | None = None, push: int | None = None
) -> KernelSpec:
    """Kernel of y = x Wᵀ for up to ``rows`` rows of activations, of which the first ``rows[0]`` (device side) are computed.

    ``fmt`` is the weight's format name; W is [n, k] (for SwiGLU the gate rows, then as many up rows). ``store``: ``bf16`` or
    ``f32`` y [rows, n]; ``swiglu`` bf16 silu(gate)·up [rows, n/2]; ``residual`` bf16 of residual + product [rows, n], one
    rounding. Arguments: x, x_stride, w_codes, w_high, w_scales, w_divisor, (residual, residual_stride,) y, y_stride, rows;
    strides in elements. x, y and residual lie at multiples of 16 bytes with strides that are multiples of 8.
    ``tile`` overrides the choice (tuning). Rows of y past the count are not written. ``push``: ordinal of an exchange for which
    the kernel also sends every tile of y (bf16, f32) to the other rank as it is finished; arguments PUSH stand in front of y.
    Raises IRError when no kernel fits.
    """
    if fmt not in FORMATS or store not in STORES:
        raise IRError(f"linear_rows: format {fmt!r} or store {store!r} is unknown; {', '.join(FORMATS)}; {', '.join(STORES)}")
    if push is not None and store not in ("bf16", "f32"):
        raise IRError(f"linear_rows {fmt} {store}: only partial sums, stored as bf16 or f32, are sent to another rank")
    outputs = n // 2 if store == "swiglu" else n
    k_step = {"NVFP4": 64, "FP8_E4M3FN_ROW_BF16S": 16}.get(fmt, 8)
    n_step = 128 if fmt == "NVFP4" else 8
    if rows < 1 or n % n_step or n % 16 * (store == "swiglu") or k % k_step:
        raise IRError(
            f"linear_rows {fmt} {store}: n={n} and k={k} with {rows} rows; n must be a multiple of {n_step} "
            f"(outputs of 8), k of {k_step}, rows at least 1"
        )
    tile = tile or choose(fmt, store, n, k, rows, caps)
    token_tiles, row_tiles = -(-rows // tile.tokens), -(-outputs // (tile.rows // 2 if store == "swiglu" else tile.rows))
    if row_tiles > 65535:
        raise IRError(f"linear_rows {fmt} {store}: n={n} needs {row_tiles} row tiles; at most 65535")
    name, wgmma = FORMATS[fmt][0], tile.family == "wgmma"
    smem = shared_bytes(fmt, store, tile)
    params: dict[str, int | str | bool] = {
        "format": name, "store": store, "n": n, "k": k, "tile_rows": tile.rows, "tile_tokens": tile.tokens,
        "stages": tile.stages, "smem": smem, "in_units": in_units(fmt, n, k),
    }  # fmt: skip
    if wgmma:
        params["columns"] = WARPGROUP_TILES[tile.tokens]
    else:
        params["blocks_per_sm"] = tile.blocks_per_sm
    before_y: tuple[str, ...] = ("residual", "residual_stride") if store == "residual" else ()
    if push is not None:
        params["push"], before_y = True, PUSH
    return KernelSpec(
        entry=f"linear_rows_{tile.family}_{name}_{store}_n{n}_k{k}_m{tile.rows}t{tile.tokens}s{tile.stages}_"
        + ("push_" if push is not None else "")
        + caps.arch.replace("_", ""),
        template=f"linear_rows_{tile.family}.cu.j2",
        params=params,
        grid=(token_tiles, row_tiles, 1),
        block=256 + LOAD_THREADS if wgmma else tile.rows,
        smem=smem,
        args=("x", "x_stride", "w_codes", "w_high", "w_scales", "w_divisor", *before_y, "y", "y_stride", "rows"),
        scalars={} if push is None else {"ordinal": push},
        reason=f"{'warpgroup' if wgmma else 'warp'} products, tile of {tile.rows} weight rows x {tile.tokens} tokens: "
        f"{token_tiles * row_tiles} tiles on {caps.sms * tile.blocks_per_sm} places"
        + ("" if push is None else ", each sent as it is finished"),
    )
