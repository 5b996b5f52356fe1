"""Decode product y[C, N] = x[C, K] Wᵀ for up to 64 columns (templates/include/ninferc/linear/geometry.cuh).

What fixes the bits of a result is here in one function, ``slices_of``: it looks at K of one segment only. Everything else
(``Tile``) is a matter of speed and may differ between cards, column counts and tunings.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from math import ceil
from typing import Any

from compiler.ir.op import Op, require
from compiler.ir.types import IRError, TensorType
from compiler.kernels.arrange import UNIT_FORMATS, in_units
from compiler.kernels.spec import BLOCK_RESERVED, DeviceCaps, KernelSpec, smem_alone
from compiler.ops.exchange_residual import PUSH_COLUMNS
from compiler.profiles import tile_fields

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 64)
BLOCK_COLUMNS = 32  # columns of a block: accumulators of more do not fit the registers
INTEGER_COLUMNS = 8  # the same of integer products: of 4 to 6 bits slower in wider blocks, of 8 not measured
# bytes of 128 columns in the plane of high bits, and of the scales of 16 rows of them
_HIGH = {"Q5G64_F16S": 16, "Q6G64_F16S": 32}
_SCALES = {"Q4G64_F16S": 64, "Q5G64_F16S": 64, "Q6G64_F16S": 64, "W8G32_F16S": 128, "NVFP4": 128}
# artifact name -> (name in kernels, bytes of 128 columns in the code plane, _HIGH, _SCALES); the figures repeat those of
# geometry.cuh, which checks the sum
FORMATS = {name: (*known, _HIGH.get(name, 0), _SCALES.get(name, 0)) for name, known in UNIT_FORMATS.items()}
# Registers of a thread besides what grows with its sums.
_REGISTERS = {"bf16": 56, "q4g64": 58, "q5g64": 66, "q6g64": 70, "w8g32": 60, "nvfp4": 58, "fp8_row": 54}
GROUPED = frozenset({"q4g64", "q5g64", "q6g64", "w8g32"})
CHUNK = 128
X_DIGITS = 400  # bytes of 128 activations of an integer product
X_TILES = 3  # chunks of activations that warpgroup products keep
MAX_SLICES = 8
EARLY_RELEASE = 24 << 20  # weights below this many bytes: a short kernel
MAX_CLUSTER = 8  # blocks, by the architecture
MIN_CHUNKS = 5  # chunks of a slice below which its share of the final sum costs too much


@dataclass(frozen=True)
class Product:
    """What is computed. ``format`` is the artifact's name, ``n`` counts weight rows (gate and up), ``columns`` real ones."""

    format: str
    n: int
    k: int
    columns: int
    segments: int = 1
    epilogue: str = "store"  # store, store_f32, push_f32, swiglu, residual
    norm: bool = False  # rmsnorm of x in the prologue
    keep: bool = False  # and the normalised x stored as well
    # Another product of the same x in the same kernel, its results apart: the artifact's name of its format, its weight rows.
    second: tuple[str, int] | None = None

    @property
    def key(self) -> str:
        """Name of the product in device profiles; products of a bucket share a tile."""
        norm = "+norm" if self.norm else ""
        epilogue = self.epilogue.replace("push", "store")  # the same work but for what leaves the device
        formats, rows = "+".join(self.kernel_formats), "+".join(str(part.n) for part in self.parts)
        return f"{formats} {rows}x{self.k} c{self.bucket} s{self.segments} {epilogue}{norm}"

    @cached_property
    def parts(self) -> tuple[Product, ...]:
        """The products of one weight each that the kernel computes: asked for at every tile that is weighed."""
        alone = replace(self, second=None)
        return (alone,) if self.second is None else (alone, replace(alone, format=self.second[0], n=self.second[1]))

    @property
    def kernel_format(self) -> str:
        return FORMATS[self.format][0]

    @property
    def kernel_formats(self) -> tuple[str, ...]:
        """Of both products where there are two."""
        return tuple(part.kernel_format for part in self.parts)

    @property
    def bucket(self) -> int:
        return next(b for b in BUCKETS if b >= self.columns)

    @property
    def block_columns(self) -> int:
        """Columns that one block computes: as many as its accumulators find registers for."""
        return min(self.bucket, INTEGER_COLUMNS if self.kernel_format in GROUPED else BLOCK_COLUMNS)

    @property
    def few(self) -> bool:
        """Few columns: the weights are all that takes time."""
        return self.bucket <= 8

    @property
    def outputs(self) -> int:
        return self.n // 2 if self.epilogue == "swiglu" else self.n

    @property
    def chunks(self) -> int:
        """Chunks of one segment."""
        return ceil(self.k // self.segments / CHUNK)

    @property
    def slices(self) -> int:
        return slices_of(self.k // self.segments)

    @property
    def in_units(self) -> bool:
        """Whether the weights lie in units of 16 rows x 128 columns (codec/units.cuh)."""
        return all(in_units(part.format, part.n, part.k) for part in self.parts)

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 outputs."""
        return ceil(self.outputs / 16)


@dataclass(frozen=True)
class Tile:
    """How it is computed: see geometry.cuh. ``blocks_per_sm``: resident blocks that the grid is sized for (0: one block
    per tile). ``split``: a block computes one segment. ``release``: when dependents may start: early, late or end.
    ``warpgroup``: products of four warps at once (warpgroup.cuh). ``mixed``: gate and up rows share a matrix tile.
    ``clustered``: split, and the blocks of a tile are a cluster whose sums meet in shared memory (meeting.cuh). ``claimed``:
    teams take tiles while they run (claims.cuh). ``primed``: stages filled before the kernels in front have ended (0: all but
    one); where bulk copies fill the ring of a resident tile. ``stream``: weights are the first to leave the L2 cache."""

    mtiles: int
    warps_r: int
    warps_k: int
    stages: int
    resident: bool
    blocks_per_sm: int
    split: bool = False
    release: str = "late"
    warpgroup: bool = False
    mixed: bool = False
    clustered: bool = False
    claimed: bool = False
    primed: int = 0
    stream: bool = False


def slices_of(k_segment: int) -> int:
    """Slices that K of one segment is cut into: at most 8, equal, of at least 5 chunks (fewer chunks are one slice)."""
    chunks = ceil(k_segment / CHUNK)
    return max(s for s in range(1, MAX_SLICES + 1) if s == 1 or (chunks % s == 0 and chunks // s >= MIN_CHUNKS))


def block_segments(product: Product, tile: Tile) -> int:
    """Segments that one block computes."""
    return 1 if tile.split else product.segments


def pair_of(product: Product, tile: Tile) -> int:
    """Warps that make one tile together: two where gate and up tile go to neighbouring warps."""
    return 2 if product.epilogue == "swiglu" and tile.mtiles == 1 and not tile.mixed else 1


def teams_of(product: Product, tile: Tile) -> int:
    """Tiles that a block works on at once."""
    return tile.warps_r // pair_of(product, tile)


def units_of(product: Product, tile: Tile) -> int:
    """Accumulator tiles (16 rows x 8 columns) of one tile."""
    return tile.mtiles * ceil(product.block_columns / 8)


def sharers_of(product: Product, tile: Tile) -> int:
    """Blocks that work on one tile: parts of its columns, its segments."""
    return product.bucket // product.block_columns * (product.segments if tile.split else 1)


def tiles_of(product: Product, tile: Tile) -> int:
    """Tiles of the product, or of both."""
    if product.second is not None:
        return sum(tiles_of(part, tile) for part in product.parts)
    if tile.mixed:
        return ceil(product.outputs / 8)
    return ceil(product.row_tiles * (2 if product.epilogue == "swiglu" else 1) / (tile.mtiles * pair_of(product, tile)))


def stage_bytes(product: Product, tile: Tile) -> int:
    """Bytes from one stage of a warp to the next: the weights of a chunk, of two products the larger."""
    planes = [FORMATS[part.format][1:] for part in product.parts]
    return tile.mtiles * max(16 * (code_bytes + high_bytes) + scale_bytes for code_bytes, high_bytes, scale_bytes in planes)


def shared_bytes(product: Product, tile: Tile, caps: DeviceCaps) -> int:
    """Dynamic shared memory of a block (LinearGeometry::smem_bytes; the template asserts that they agree)."""
    stage = stage_bytes(product, tile) + (8 if product.in_units and caps.bulk_copy else 0)  # its mbarrier
    segments = block_segments(product, tile)
    grouped = product.kernel_format in GROUPED
    chunk, padding = (X_DIGITS, 0) if grouped else (256, 64)  # bytes of a column's activations
    members = tile.warps_k * pair_of(product, tile)
    columns = product.block_columns
    unit = 32 * (ceil(columns / 2) if columns < 8 else 4) * (2 if columns == 1 else 4)  # of eight columns those that exist
    sums = members * units_of(product, tile) * unit if members > 1 else 0
    if tile.resident:
        zeros = 256 if product.block_columns < 8 and not grouped else 0  # for lanes of columns that do not exist
        x = product.block_columns * (segments * product.chunks * chunk + padding) + zeros
    elif tile.warpgroup:
        x = X_TILES * tile.warps_k * product.block_columns * 256
    else:
        x = tile.stages * tile.warps_k * product.block_columns * (chunk + padding)
    norm = product.block_columns * 36 if product.norm else 0
    ring = ceil((x + norm) / 128) * 128 + tile.warps_r * tile.warps_k * tile.stages * stage
    places = ceil(units_of(product, tile) / product.segments) if tile.clustered else 0
    meeting = places * ((product.segments - 1) * 512 + 8)
    return ring + teams_of(product, tile) * (sums * (2 if tile.resident else 1) + meeting + (16 if tile.claimed else 0))


def registers_fit(product: Product, tile: Tile) -> bool:
    """Whether ptxas can be expected to hold a thread's values in the registers that a block of this size leaves it.

    The estimate follows compiled kernels (sm_80 … sm_120); at few columns about a tenth below what ptxas takes when it is
    free still does without spills, with warpgroup products a quarter; integer formats at many columns want more on sm_120.
    Multiprocessors have 65536 registers and give them to four warps at a time.
    """
    name = product.kernel_format
    sums, members = units_of(product, tile) * 4, tile.warps_k * pair_of(product, tile)
    whole = tile.mtiles * ceil(product.block_columns / 2) * 2  # sums of an integer product while it runs
    fixed = max(_REGISTERS[format] for format in product.kernel_formats) + (0 if tile.resident else 14)
    needed = fixed + (5 * whole if name in GROUPED else 2.5 * sums)
    if tile.warpgroup:
        needed += 10
    if members == 1:
        needed += sums * min(2, block_segments(product, tile))
    elif block_segments(product, tile) * product.slices > tile.warps_k:  # totals of the units that a warp finishes
        needed += ceil(sums * pair_of(product, tile) / members / 4) * 4 * min(2, block_segments(product, tile))
    threads = ceil(tile.warps_r * tile.warps_k / 4) * 128 * max(1, tile.blocks_per_sm)
    free = 0.9 if product.few else 0.75 if tile.warpgroup else 1.05 if name in GROUPED else 1.0
    return free * needed <= min(255, 65536 // threads // 8 * 8)


def problem(product: Product) -> str | None:
    """Why no kernel of this family can compute the product; None if one can."""
    if product.format not in FORMATS:
        return f"weights in {product.format}; a product takes {', '.join(FORMATS)}"
    if product.columns > BUCKETS[-1]:
        return f"{product.columns} columns; at most {BUCKETS[-1]} are supported"
    if product.k % (8 * product.segments):
        return f"K = {product.k} in {product.segments} segments; a multiple of 8 columns per segment is needed"
    if product.segments > 1 and product.kernel_format in GROUPED and product.k // product.segments % CHUNK:
        return f"K = {product.k} in {product.segments} segments; {product.format} needs multiples of {CHUNK}"
    if product.in_units and product.k // product.segments % CHUNK:
        return f"K = {product.k} in {product.segments} segments; a weight in units needs multiples of {CHUNK}"
    if product.kernel_format == "nvfp4" and (product.outputs % 128 or product.k // product.segments % 64):
        return f"[{product.n}, {product.k}] in NVFP4; outputs in multiples of 128 and K per segment of 64 are needed"
    if product.epilogue == "push_f32" and product.columns > PUSH_COLUMNS:
        return f"{product.columns} columns to send as they are finished; at most {PUSH_COLUMNS} are"
    if product.epilogue == "swiglu" and product.n % 2:
        return f"{product.n} rows of gate and up; an even number is needed"
    return None if product.second is None else _problem_of_two(product)


def _problem_of_two(product: Product) -> str | None:
    """Why one kernel cannot compute both products."""
    if product.segments > 1 or product.epilogue != "store":
        return "two products of the same activations are stored as they are, from K in one segment"
    if not all(name in GROUPED and name != "w8g32" for name in product.kernel_formats):
        return f"two products in {' and '.join(product.kernel_formats)}; formats of 4 to 6 bits have the same activations"
    if product.bucket > product.block_columns:
        return f"two products of {product.columns} columns; a block has {product.block_columns}"
    if not product.in_units:
        return f"two products of [{product.n} and {product.parts[1].n}, {product.k}]: both weights must lie in units"
    return None


def fits(product: Product, tile: Tile, caps: DeviceCaps) -> bool:
    """Whether the tile is legal for the product and its shared memory available ``blocks_per_sm`` times."""
    warps, all_slices = tile.warps_r * tile.warps_k, block_segments(product, tile) * product.slices
    if all_slices % tile.warps_k or warps > 32 or tile.warps_r % pair_of(product, tile):
        return False
    if teams_of(product, tile) + tile.warps_k > 15:  # named barriers
        return False
    if tile.stages < (2 if tile.resident else 3) or (product.norm and not tile.resident):
        return False
    if product.keep and product.bucket > product.block_columns:
        return False
    if product.second is not None and (not tile.resident or tile.claimed):
        return False
    if tile.split and (product.segments == 1 or product.epilogue == "swiglu" or product.norm):
        return False
    if tile.primed and not (tile.primed <= tile.stages and tile.resident and product.in_units and caps.bulk_copy):
        return False
    if tile.stream and not (product.in_units and caps.bulk_copy and product.bucket == product.block_columns):
        return False  # neighbouring blocks find each other's weights in the L2 cache
    if tile.claimed and not _claims_fit(product, tile, caps):
        return False
    if tile.clustered and not _cluster_fits(product, tile, caps):
        return False
    if tile.warpgroup and not _warpgroup_fits(product, tile, caps):
        return False
    if tile.mixed and (product.epilogue != "swiglu" or tile.mtiles != 1 or tile.warpgroup):
        return False
    smem = shared_bytes(product, tile, caps)
    return smem <= caps.smem_block and max(1, tile.blocks_per_sm) * (smem + BLOCK_RESERVED) <= caps.smem_sm


def _claims_fit(product: Product, tile: Tile, caps: DeviceCaps) -> bool:
    """What claiming asks of a tile: blocks that can take any and stay for more, with copies less than a tile ahead."""
    if not caps.bulk_copy or not tile.resident or tile.split or product.bucket > product.block_columns:
        return False
    share = product.chunks // product.slices * (block_segments(product, tile) * product.slices // tile.warps_k)
    return tile.blocks_per_sm > 0 and tile.stages < share


def _cluster_fits(product: Product, tile: Tile, caps: DeviceCaps) -> bool:
    """What blocks that meet in shared memory ask of a tile: they are its segments alone, and walk over no other tile."""
    if not caps.clusters or not tile.split or tile.blocks_per_sm:
        return False
    return product.bucket == product.block_columns and product.segments <= MAX_CLUSTER


def _warpgroup_fits(product: Product, tile: Tile, caps: DeviceCaps) -> bool:
    """What warpgroup products ask of a tile: whole groups of four warps with one matrix tile each, whole chunks, and scales
    that do not belong on sums of groups."""
    if not caps.wgmma or product.kernel_format in GROUPED or product.k // product.segments % CHUNK:
        return False
    return product.block_columns >= 16 and tile.mtiles == 1 and tile.warps_r % 4 == 0 and not tile.resident


def _tiles(product: Product, caps: DeviceCaps) -> Iterator[Tile]:
    """All legal tiles of a wide net."""
    release = "early" if weight_bytes(product) < EARLY_RELEASE else "late"
    few = product.few
    stages_tried = (2, 3, 4, 5, 6) if few else (2, 3, 4, 6)
    swiglu = product.epilogue == "swiglu"
    sizes = [(1, False), (2, False)] if not swiglu else [(1, few), (2, False), (4, False)]  # matrix tiles, mixed
    meetings = ((False, False), (True, False), (True, True)) if product.segments > 1 else ((False, False),)
    for split, clustered in meetings:
        all_slices = product.slices * (1 if split else product.segments)
        spread = [k for k in range(all_slices, 0, -1) if all_slices % k == 0]
        for warps_r, warps_k, stages, blocks in itertools.product(range(1, 21), spread, stages_tried, (0, 1, 2, 3)):
            if warps_r * warps_k > (32 if few else 24) or (few and warps_r > (8 if warps_k > 1 else 12)):
                continue
            for mtiles, mixed in sizes:
                for resident in (True, False) if product.block_columns <= 16 else (False,):
                    for warpgroup in (False, True) if caps.wgmma and not few else (False,):
                        tile = Tile(mtiles, warps_r, warps_k, stages, resident, blocks, split, release, warpgroup, mixed,
                                    clustered)  # fmt: skip
                        if registers_fit(product, tile) and fits(product, tile, caps):
                            yield tile


def _slowdown(product: Product, tile: Tile, caps: DeviceCaps) -> float:
    """Rough estimate of a tile's time over that of streaming the weights, with terms weighted for an H200."""
    blocks = ceil(tiles_of(product, tile) / teams_of(product, tile)) * sharers_of(product, tile)
    own_warps = tile.warps_r * tile.warps_k
    # Blocks that one multiprocessor holds: by shared memory, and by registers at about 80 per thread (wide: 128 and more).
    shared = shared_bytes(product, tile, caps) + BLOCK_RESERVED
    room = min(caps.smem_sm // shared, (24 if product.few else 16) // own_warps or 1)
    together = min(tile.blocks_per_sm or room, room, ceil(blocks / caps.sms))
    warps = together * own_warps
    waves = blocks / (together * caps.sms)
    # The busiest multiprocessor against the average one: unpacking takes most of its issue slots.
    share = ceil(blocks / caps.sms) / (blocks / caps.sms) if waves <= 1 else ceil(waves) / waves
    stage = stage_bytes(product, tile)
    # Copies at once: of a warp, what it waits for is in flight, whatever the ring.
    flight = warps * (tile.stages - (1.25 if tile.resident else 2.25) if caps.cp_async else 1) * stage
    wanted = min(48 << 10, caps.smem_sm // 3)
    walks = tile.blocks_per_sm > 0 or waves <= 1  # else a block ends, and the next begins with an empty ring
    x_reads = min(blocks, together * caps.sms) if tile.resident and walks else blocks
    x_bytes = x_reads * 2 * product.block_columns * product.k * block_segments(product, tile) // product.segments
    few = product.few
    cost = 1 + (0.5 if few else 0.9) * (share - 1) + max(0.0, (0.4 if few else 0.1) * (wanted / flight - 1))
    cost += 0.5 * x_bytes / weight_bytes(product) + (0.015 if tile.clustered else 0.03 if tile.split else 0)
    cost += 0 if tile.resident or tile.warpgroup else 0.15 if few else 0.4
    cost += max(0.0, 0.02 * (14 - warps) if few else 0.06 * (16 - warps))
    cost += (0 if walks else 0.05) + (0.05 if tile.mtiles == 1 and caps.bf16_mma else 0)
    cost += 0.1 if tile.warps_k < min(4, product.slices) and few else 0
    return cost + 0.005 * (tile.mtiles + tile.warps_r) + (0.0003 * flight / 1024 if flight > 2 * wanted else 0)


def candidates(product: Product, caps: DeviceCaps) -> Iterator[Tile]:
    """Legal tiles worth measuring, the built-in choice first."""
    tiles = sorted(_tiles(product, caps), key=lambda tile: _slowdown(product, tile, caps))
    for tile in tiles:
        if tile == tiles[0] or 8 <= tile.warps_r * tile.warps_k * max(1, tile.blocks_per_sm) <= 32:
            yield tile


def turned(product: Product, tile: Tile, caps: DeviceCaps, knob: str, values: Iterable[Any]) -> list[Tile]:
    """The tile with its field ``knob`` at each of the values that are legal."""
    return [choice for choice in (replace(tile, **{knob: value}) for value in values) if fits(product, choice, caps)]


def claiming(product: Product, tile: Tile, caps: DeviceCaps) -> Tile | None:
    """The tile with claims, where some teams have several tiles and it is legal."""
    claimed = replace(tile, claimed=True, blocks_per_sm=max(1, tile.blocks_per_sm))
    teams = teams_of(product, tile) * (caps.sms * claimed.blocks_per_sm // sharers_of(product, tile))
    return claimed if teams < tiles_of(product, tile) and fits(product, claimed, caps) else None


def choose(product: Product, caps: DeviceCaps) -> Tile:
    """The tile of the device profile where one names the product, else the built-in choice. Raises IRError when no tile
    fits the target."""
    if (tile := best_tile(product, caps)) is None:
        raise IRError(f"product [{product.n}, {product.k}] {product.format} at {product.bucket} columns: no tile fits the "
                      f"{caps.smem_block} bytes of shared memory of {caps.arch}")  # fmt: skip
    return tile


@cache
def best_tile(product: Product, caps: DeviceCaps) -> Tile | None:
    """The same, None where no tile fits: weighing all of them takes long, and every layer asks."""
    for key in dict.fromkeys((product.key, replace(product, norm=False).key)):  # a norm in front seldom changes the best tile
        if fields := tile_fields(key, caps.arch, caps.sms):
            tuned = Tile(**fields)
            if fits(product, tuned, caps):
                return tuned
    return min(_tiles(product, caps), key=lambda tile: _slowdown(product, tile, caps), default=None)


def weight_bytes(product: Product) -> int:
    """Bytes of codes, high bits and scales, padding of K left out."""
    bits = {"bf16": 16.0, "q4g64": 4.25, "q5g64": 5.25, "q6g64": 6.25, "w8g32": 8.5, "nvfp4": 4.5, "fp8_row": 8.0}
    return sum(int(part.n * part.k * bits[part.kernel_format] / 8) for part in product.parts)


def spec_of(product: Product, tile: Tile, caps: DeviceCaps, eps: float = 0.0) -> KernelSpec:
    """The kernel of ``product`` with ``tile``. Raises IRError naming what is not supported."""
    if reason := problem(product):
        raise IRError(f"product: {reason}")
    if not fits(product, tile, caps):
        raise IRError(f"product [{product.n}, {product.k}]: tile {tile} does not fit {caps.arch}")
    norm, sharers = product.norm, sharers_of(product, tile)
    blocks = ceil(tiles_of(product, tile) / teams_of(product, tile))
    if tile.blocks_per_sm:
        blocks = min(blocks, max(1, caps.sms * tile.blocks_per_sm // sharers))
    blocks *= sharers
    threads, smem = 32 * tile.warps_r * tile.warps_k, shared_bytes(product, tile, caps)
    suffix = {"store": "", "store_f32": "_f32", "push_f32": "_push"}.get(product.epilogue, f"_{product.epilogue}")
    if product.segments > 1:
        suffix = f"_s{product.segments}{suffix}"
    args = ["x", "x_stride", "w_codes", "w_high", "w_scales", "w_divisor"]
    if product.second is not None:
        args += ["w2_codes", "w2_high", "w2_scales"]
    scalars: dict[str, int | float] = {"columns": product.columns}
    if norm:
        args += ["norm_w", "normed"] if product.keep else ["norm_w"]
    if product.epilogue == "residual":
        args += ["residual", "residual_stride"]
    scratch: dict[str, int] = {}
    if tile.claimed:
        scratch = {"claims": 8}
        args += scratch
    if tile.split and not tile.clustered:
        units = tiles_of(product, tile) * units_of(product, tile) * (product.bucket // product.block_columns)
        scratch = {"partials": product.segments * units * 512, "arrivals": units * 4}
        args += scratch
    if product.epilogue == "push_f32":
        args += ["outbox", "sequence", "step", "ordinal", "transport", "slot_words"]
    args += ["y", "y_stride", *(("y2", "y2_stride") if product.second is not None else ()), "columns"]
    if norm:
        args.append("eps")
        scalars["eps"] = eps
    weights = "_".join(f"{part.kernel_format}_n{part.n}" for part in product.parts)
    return KernelSpec(
        entry=f"linear_{weights}_k{product.k}_c{product.bucket}{suffix}{'_norm' if norm else ''}"
        f"{'_keep' if product.keep else ''}_{caps.arch.replace('_', '')}",
        template="linear_columns.cu.j2",
        params={"format": product.kernel_format, "n": product.n, "second_format": product.kernel_formats[-1],
                "second_n": product.second[1] if product.second else 0, "stage_pitch": stage_bytes(product, tile),
                "k": product.k, "bucket": product.block_columns,
                "column_blocks": product.bucket // product.block_columns, "segments": product.segments,
                "slices": product.slices, "in_units": product.in_units, "norm": norm, "keep": product.keep,
                "epilogue": product.epilogue, **{k: v for k, v in asdict(tile).items() if k != "blocks_per_sm"},
                "threads": threads, "smem": smem, "min_blocks": max(1, min(tile.blocks_per_sm, 2048 // threads))},  # fmt: skip
        grid=(blocks, 1, 1),
        block=threads,
        smem=smem_alone(smem, caps) if blocks <= caps.sms else smem,
        args=tuple(args),
        scalars=scalars,
        scratch=scratch,
        zeroed=frozenset({"arrivals", "claims"}) & scratch.keys(),
        cluster=(product.segments if tile.clustered else 1, 1, 1),
        waits_first=True,
        published=("normed",) if product.keep else (),
        reason=f"{'warpgroup products, ' if tile.warpgroup else ''}{blocks} blocks of {tile.warps_r} x {tile.warps_k} warps, "
        f"{16 * tile.mtiles * pair_of(product, tile)} rows a tile{' (gate and up mixed)' if tile.mixed else ''}, K in "
        f"{product.segments * product.slices} slices, {tile.stages} stages"
        f"{f' ({tile.primed} filled early)' if tile.primed else ''}, activations "
        f"{'resident' if tile.resident else 'streamed'}{', a segment per block' if tile.split else ''}"
        f"{', segments meet in a cluster' if tile.clustered else ''}{', tiles claimed' if tile.claimed else ''}"
        f"{', weights leave L2 first' if tile.stream else ''}"
        f", dependents released {tile.release}",
    )


_EPILOGUES = {"linear": "store", "linear_swiglu": "swiglu", "linear_residual": "residual"}


def product_of(op: Op, types: Mapping[str, TensorType], format: str, norm: bool = False, keep: bool = False,
               second: tuple[str, int] | None = None) -> Product:  # fmt: skip
    """The product of a ``linear``, ``linear_swiglu`` or ``linear_residual`` op whose weight has the artifact's ``format``."""
    n, k = types["w"].shape
    segments = op.int_attr("segments") if "segments" in op.attrs else 1
    epilogue = "push_f32" if "sequence" in op.inputs else "store_f32" if op.attrs.get("f32") else _EPILOGUES[op.kind]
    return Product(format, n, k, types["x"].shape[0], segments, epilogue, norm, keep, second)


def linear_spec(op: Op, types: Mapping[str, TensorType], format: str, x_row: int, caps: DeviceCaps,
                norm: Op | None = None, keep: bool = False, second: tuple[str, int] | None = None) -> KernelSpec:  # fmt: skip
    """Kernel of a product op; ``x_row`` is the width of the value that x views (its row stride in elements).

    ``norm``: an rmsnorm op to compute in the prologue; the fused call then has its input as ``x`` and its weight as
    ``norm_w``, and with ``keep`` its output as ``normed``. ``second``: format and rows of another weight that x is multiplied
    by, ``w2``, with a result ``y2``. Raises IRError when no kernel serves the op.
    """
    x = (norm or op).inputs["x"]
    require(x.offset % 8 == 0 and x_row % 8 == 0, op,
            f"x is columns {x.offset} … of rows of {x_row}; both must be multiples of 8 (16-byte loads)")  # fmt: skip
    product = product_of(op, types, format, norm is not None, keep, second)
    if reason := problem(product):
        raise IRError(f"op {op.kind} (layer {op.layer}): {reason}")
    spec = spec_of(product, choose(product, caps), caps, norm.float_attr("eps") if norm else 0.0)
    return replace(spec, scalars=dict(spec.scalars) | {"ordinal": op.int_attr("ordinal")}) if "sequence" in op.inputs else spec
