"""Several decode products in one persistent kernel (templates/include/ninferc/linear/chain.cuh): the end of one product and
the start of the next cost no memory time, because every warp streams weights across the seam.

The bits are those of ``linear_columns``: order of the sum by ``slices_of``. Everything here is a matter of speed.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil

from compiler.ir.types import IRError
from compiler.kernels.linear_columns import FORMATS, Product, problem
from compiler.kernels.spec import DeviceCaps, KernelSpec
from compiler.profiles import tile_fields

MAX_COLUMNS = 8
MAX_LINKS = 8
EPILOGUES = ("store", "store_f32", "swiglu", "residual")
# Threads that the register allocator is told of: leaves a fifth of the registers to the short kernels that start beside
# the end of a chain.
_REGISTER_SHARE = 1.25
# Bytes per microsecond that one multiprocessor gets of the memory's rate, and the memory's latency, for the cost estimate:
# an H200's; cards with fewer bytes per multiprocessor rank tiles the same way.
_RATE, _LATENCY = 33_000, 1.0
# Formats whose activations lie in shared memory in the same order (piece_slot and order_columns of the headers).
_ORDERS = {"q4g64": "nibbles", "q5g64": "nibbles", "q6g64": "nibbles", "w8g32": "w8", "bf16": "bf16", "nvfp4": "nvfp4",
           "fp8_row": "fp8"}  # fmt: skip


@dataclass(frozen=True)
class Link:
    """One product of a chain. ``source`` of its activations: ``before`` (kernels before this one), ``chain`` (an earlier
    link), ``same`` (what the link before had). ``keep``: the normalised activations are stored as well."""

    product: Product
    source: str
    keep: bool = False


@dataclass(frozen=True)
class LinkTile:
    """``mtiles`` matrix tiles of 16 weight rows in an item, ``warps_k`` warps of a team, K slices cut into ``groups``."""

    mtiles: int
    warps_k: int
    groups: int


@dataclass(frozen=True)
class ChainTile:
    """``warps`` of a block, ``stages`` of each warp's ring, and the tile of each link."""

    warps: int
    stages: int
    links: tuple[LinkTile, ...]


def chain_key(links: Sequence[Link]) -> str:
    """Name of the chain in device profiles."""
    return "chain " + " | ".join(f"{link.product.key}{' same' if link.source == 'same' else ''}" for link in links)


def stage_bytes(product: Product, mtiles: int) -> int:
    """Bytes of one chunk of a warp in its ring."""
    _, code_bytes, high_pitch, scale_bytes = FORMATS[product.format]
    return mtiles * (16 * code_bytes + 16 * high_pitch + scale_bytes)


def total_slices(product: Product) -> int:
    return product.segments * product.slices


def group_slices(product: Product, tile: LinkTile) -> int:
    return total_slices(product) // tile.groups


def tiles_of(product: Product, tile: LinkTile) -> int:
    return ceil(product.row_tiles / (tile.mtiles // 2 if product.epilogue == "swiglu" else tile.mtiles))


def x_bytes(product: Product, tile: LinkTile) -> int:
    """Activations of one group in shared memory (LinkGeometry::x_bytes)."""
    slices = group_slices(product, tile)
    row = min(slices, product.slices)
    part = product.chunks if row == product.slices else ceil(product.chunks / product.slices) * row
    return product.bucket * (slices // row * part * 256 + 64)


def sums_bytes(product: Product, tile: LinkTile, warps: int) -> int:
    """Slice sums in shared memory (LinkGeometry::sums_bytes)."""
    if tile.groups > 1:
        return 0
    pairs = 1 if product.bucket <= 2 else product.bucket // 2
    return 2 * (warps // tile.warps_k) * total_slices(product) * tile.mtiles * pairs * 128


def shared_bytes(links: Sequence[Link], tile: ChainTile) -> int:
    """Dynamic shared memory of a block (ChainShape::smem_bytes)."""
    pairs = list(zip(links, tile.links, strict=True))
    x = max(x_bytes(link.product, t) for link, t in pairs)
    ring = ceil((ceil(x / 128) * 128 + 8 * 9 * 4) / 128) * 128
    stage = max(stage_bytes(link.product, t.mtiles) for link, t in pairs)
    return ring + tile.warps * tile.stages * stage + max(sums_bytes(link.product, t, tile.warps) for link, t in pairs)


def blocks_of(tile: ChainTile, caps: DeviceCaps) -> int:
    """Blocks of the grid: one per multiprocessor, a multiple of every link's groups."""
    groups = max(t.groups for t in tile.links)
    return caps.sms // groups * groups


def legal(product: Product, tile: LinkTile, warps: int) -> bool:
    slices = total_slices(product)
    if slices % tile.groups or warps % tile.warps_k or group_slices(product, tile) % tile.warps_k:
        return False
    inside = group_slices(product, tile)
    if inside % product.slices and product.slices % inside:
        return False
    if product.epilogue == "swiglu" and tile.mtiles % 2:
        return False
    if product.kernel_format == "nvfp4" and 8 % (tile.mtiles // 2 if product.epilogue == "swiglu" else tile.mtiles):
        return False
    return tile.groups > 1 or tile.warps_k == 1 or warps // tile.warps_k <= 15


def fits(links: Sequence[Link], tile: ChainTile, caps: DeviceCaps) -> bool:
    """Whether the tile is legal for the chain and its shared memory there once per multiprocessor."""
    if not 3 <= tile.stages <= 16 or tile.warps * 32 * _REGISTER_SHARE > 1024 or len(tile.links) != len(links):
        return False
    groups = max(t.groups for t in tile.links)
    if any(groups % t.groups or not legal(link.product, t, tile.warps) for link, t in zip(links, tile.links, strict=True)):
        return False
    for (_, before), (link, t) in itertools.pairwise(zip(links, tile.links, strict=True)):
        if link.source == "same" and before.groups != t.groups:
            return False
    return caps.sms >= groups and shared_bytes(links, tile) <= caps.smem_block


def _link_cost(product: Product, tile: LinkTile, warps: int, stages: int, blocks: int) -> float:
    """Rough microseconds of a link on the busiest multiprocessor: as long as all warps have work at the memory's rate, then
    at what the warps with one more slice keep in flight."""
    teams = warps // tile.warps_k
    items = ceil(tiles_of(product, tile) * tile.groups / blocks)
    rounds, rest = divmod(items, teams)
    stage = stage_bytes(product, tile.mtiles)
    chunks = group_slices(product, tile) // tile.warps_k * ceil(product.chunks / product.slices)  # of a warp in an item
    in_flight = (stages - 1) * stage / _LATENCY

    def time(busy: int, slices: int) -> float:
        return busy * slices * chunks * stage / min(_RATE, busy * in_flight)

    cost = (time(warps, rounds) if rounds else 0.0) + (time(rest * tile.warps_k, 1) if rest else 0.0)
    mean = tiles_of(product, tile) * tile.groups / blocks / items  # of the busiest block's items
    if tile.groups > 1:  # partial sums through the L2 cache, and an arrival per item
        pairs = 1 if product.bucket <= 2 else product.bucket // 2
        nbytes = 2 * tiles_of(product, tile) * total_slices(product) * tile.mtiles * pairs * 128
        cost += nbytes / (blocks * _RATE) + 0.2 * ceil(items / teams)
    return cost * (0.5 + 0.5 * mean) + 0.02 * tile.groups


def _link_tiles(product: Product, warps: int, largest: int) -> Iterator[LinkTile]:
    unit = 2 if product.epilogue == "swiglu" else 1
    for mtiles in (unit, 2 * unit, 4 * unit):
        if mtiles > unit and stage_bytes(product, mtiles) > largest:
            continue
        for groups in (1, 2, 4, 8):
            for warps_k in (1, 2, 4, 8, 16):
                tile = LinkTile(mtiles, warps_k, groups)
                if legal(product, tile, warps):
                    yield tile


def candidates(links: Sequence[Link], caps: DeviceCaps) -> list[ChainTile]:
    """Legal tiles, best estimate first: for each number of warps and stages the cheapest tile of every link."""
    found: dict[ChainTile, float] = {}
    unit = max(stage_bytes(link.product, 2 if link.product.epilogue == "swiglu" else 1) for link in links)
    for warps, stages, largest_groups in itertools.product((16, 12, 8, 4), (3, 4, 5, 6, 8), (8, 4, 2, 1)):
        if caps.sms < largest_groups:
            continue
        blocks = caps.sms // largest_groups * largest_groups
        chosen: list[LinkTile] = []
        cost = 0.0
        for link in links:
            product = link.product
            choice = [t for t in _link_tiles(product, warps, max(unit, 2304)) if t.groups <= largest_groups
                      and x_bytes(product, t) <= caps.smem_block // 2
                      and not (link.source == "same" and t.groups != chosen[-1].groups)]  # fmt: skip
            if not choice:
                break
            best = min(choice, key=lambda t: _link_cost(product, t, warps, stages, blocks))
            chosen.append(best)
            cost += _link_cost(product, best, warps, stages, blocks)
        tile = ChainTile(warps, stages, tuple(chosen))
        if len(chosen) == len(links) and fits(links, tile, caps):
            # what the ring holds bridges the seams between links; what is left of shared memory serves the next kernels
            ring = warps * (stages - 1) * unit
            spare = caps.smem_sm - shared_bytes(links, tile) - 2048
            cost += len(links) * max(0.0, 3.5 - ring / _RATE) + max(0.0, 1.0 - spare / (24 << 10)) + 0.3 * max(0, 16 - warps)
            found[tile] = cost
    return sorted(found, key=lambda tile: found[tile])


@cache
def choose(links: tuple[Link, ...], caps: DeviceCaps) -> ChainTile | None:
    """The tile of the device profile where one names the chain, else the built-in choice; None when none fits."""
    if fields := tile_fields(chain_key(links), caps.arch, caps.sms):
        tuned = ChainTile(fields["warps"], fields["stages"], tuple(LinkTile(*entry) for entry in fields["links"]))
        if fits(links, tuned, caps):
            return tuned
    return next(iter(candidates(links, caps)), None)


def chainable(product: Product, caps: DeviceCaps) -> bool:
    """Whether the product may be a link at all."""
    return product.columns <= MAX_COLUMNS and product.epilogue in EPILOGUES and caps.cp_async and problem(product, caps) is None


def same_order(a: Product, b: Product) -> bool:
    """Whether both products take the activations in the same order, so that one staging serves both."""
    return a.k == b.k and a.segments == b.segments and a.norm == b.norm and _ORDERS[a.kernel_format] == _ORDERS[b.kernel_format]


def links_of(spec: KernelSpec) -> list[Link]:
    """The links that ``spec``, made by ``chain_spec``, computes."""
    names = {name: artifact for artifact, (name, *_) in FORMATS.items()}
    params, columns = spec.params, int(spec.scalars["columns"])
    return [
        Link(Product(names[str(params[f"format{i}"])], int(params[f"n{i}"]), int(params[f"k{i}"]), columns,
                     int(params[f"segments{i}"]), str(params[f"epilogue{i}"]), bool(params[f"norm{i}"])),
             "same" if params[f"source{i}"] == "block" else str(params[f"source{i}"]), bool(params[f"keep{i}"]))
        for i in range(int(params["links"]))
    ]  # fmt: skip


def link_variants(product: Product, tile: ChainTile, index: int) -> list[ChainTile]:
    """``tile`` with other tiles of link ``index``, whose stages fit the ring as it is or are twice as large."""
    largest = 2 * stage_bytes(product, tile.links[index].mtiles)
    return [replace(tile, links=(*tile.links[:index], other, *tile.links[index + 1 :]))
            for other in _link_tiles(product, tile.warps, largest) if other != tile.links[index]]  # fmt: skip


def chain_spec(links: Sequence[Link], tile: ChainTile, caps: DeviceCaps, eps: float) -> KernelSpec:
    """The kernel of a chain. Operand names are those of ``linear_columns`` behind ``l0_``, ``l1_`` …; a link that keeps its
    normalised activations has them as ``normed``. Raises IRError when the tile does not fit."""
    if not 1 < len(links) <= MAX_LINKS or not fits(links, tile, caps):
        raise IRError(f"chain {chain_key(links)}: tile {tile} does not fit {caps.arch}")
    columns, bucket = links[0].product.columns, links[0].product.bucket
    blocks = blocks_of(tile, caps)
    params: dict[str, int | str | bool] = {
        "links": len(links), "bucket": bucket, "warps": tile.warps, "stages": tile.stages, "blocks": blocks,
        "stage_bytes": max(stage_bytes(link.product, t.mtiles) for link, t in zip(links, tile.links, strict=True)),
        "x_bytes": max(x_bytes(link.product, t) for link, t in zip(links, tile.links, strict=True)),
        "sums_bytes": max(sums_bytes(link.product, t, tile.warps) for link, t in zip(links, tile.links, strict=True)),
        "smem": shared_bytes(links, tile), "bound_threads": int(tile.warps * 32 * _REGISTER_SHARE) // 32 * 32,
    }  # fmt: skip
    args: list[str] = []
    scratch: dict[str, int] = {}
    first_block, parts = 0, []
    for i, (link, t) in enumerate(zip(links, tile.links, strict=True)):
        product = link.product
        source = link.source
        if source == "same" and (not same_order(links[i - 1].product, product)
                                 or x_bytes(product, t) != x_bytes(links[i - 1].product, tile.links[i - 1])):  # fmt: skip
            source = "block"  # the same values in another order: staged again, without waiting for other blocks
        fields: dict[str, int | str | bool] = {
            "format": product.kernel_format, "n": product.n, "k": product.k, "segments": product.segments,
            "slices": product.slices, "groups": t.groups, "mtiles": t.mtiles, "warps_k": t.warps_k,
            "warps_r": tile.warps // t.warps_k, "first_block": first_block, "norm": product.norm, "keep": link.keep,
            "epilogue": product.epilogue, "source": source}  # fmt: skip
        params |= {f"{name}{i}": value for name, value in fields.items()}
        items = tiles_of(product, t) * t.groups
        if items > blocks:  # blocks with an item less come first in the next link
            groups = max(other.groups for other in tile.links)
            first_block = (first_block + items) % blocks // groups * groups
        names = ["x", "x_stride", "w_codes", "w_high", "w_scales", "w_divisor"]
        if product.norm:
            names += ["norm_w"] + (["normed"] if link.keep else [])
        if product.epilogue == "residual":
            names += ["residual", "residual_stride"]
        if t.groups > 1:
            pairs = 1 if bucket <= 2 else bucket // 2
            tiles = tiles_of(product, t)
            scratch[f"l{i}_partials"] = tiles * total_slices(product) * t.mtiles * pairs * 128
            scratch[f"l{i}_arrivals"] = 4 * tiles
            names += ["partials", "arrivals"]
        args += [f"l{i}_{name}" for name in [*names, "y", "y_stride"]]
        parts.append(f"{product.kernel_format}_n{product.n}_k{product.k}_{product.epilogue}_s{product.segments}"
                     f"{'_keep' if link.keep else ''}{'_norm' if product.norm else ''}_{source}")  # fmt: skip
    scratch["barrier"] = 8
    name = hashlib.sha256(" ".join(parts).encode()).hexdigest()[:8]
    weights = "_".join(dict.fromkeys(link.product.kernel_format for link in links))
    return KernelSpec(
        entry=f"chain{len(links)}_{weights}_h{links[-1].product.k}_c{bucket}_{name}_{caps.arch.replace('_', '')}",
        template="linear_chain.cu.j2",
        params=params,
        grid=(blocks, 1, 1),
        block=32 * tile.warps,
        smem=shared_bytes(links, tile),
        args=(*args, "barrier", "columns", "eps"),
        scalars={"columns": columns, "eps": eps},
        scratch=scratch,
        zeroed=frozenset(name for name in scratch if name == "barrier" or name.endswith("_arrivals")),
        cooperative=True,
        waits_first=True,
        published=tuple(name for name in args if name.endswith("_normed")),
        reason=f"{len(links)} products in one kernel of {blocks} blocks, {tile.warps} warps, {tile.stages} stages; "
        + ", ".join(f"[{link.product.n}, {link.product.k}] {16 * t.mtiles} rows x {t.warps_k} warps, {t.groups} groups"
                    for link, t in zip(links, tile.links, strict=True)),
    )  # fmt: skip
