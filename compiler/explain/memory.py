"""Device memory of a program by what it is for. Nothing is loaded; a planned program is enough."""

from __future__ import annotations

import re
from collections.abc import Iterator

from compiler.ir.types import Kind
from compiler.program.model import CONTROL, DEVICE_REGIONS, EGRESS, EXCHANGE, RING, STATE, WEIGHTS, WORK, Program

USES = ("weights", "kv pool", "gdn state", "sequence", "workspace")
_KV = re.compile(r"kv[0-9]+(@[0-9]+)?\Z")
_GDN = re.compile(r"(window|record|recurrent|rec_k|rec_u|rec_alpha)[0-9]+(@[0-9]+)?\Z")


def use_of(name: str) -> str:
    """What a value of region STATE is for, by the name its builder gives it."""
    return "kv pool" if _KV.match(name) else "gdn state" if _GDN.match(name) else "sequence"


def device_memory(program: Program) -> list[dict[str, int]]:
    """Bytes per rank and use. The uses of a rank sum to its regions: gaps and launch counters count as ``sequence``. Programs
    for two ranks have the use ``exchange`` besides."""
    out = []
    for rank, regions in enumerate(program.regions):
        sizes = dict.fromkeys(USES, 0)
        sizes["weights"], sizes["workspace"] = regions.get(WEIGHTS, 0), regions.get(WORK, 0)
        for name, place in program.placements.items():
            if place.rank == rank and place.region == STATE and use_of(name) != "sequence":
                sizes[use_of(name)] += place.nbytes
        sizes["sequence"] = regions.get(CONTROL, 0) + regions.get(STATE, 0) - sizes["kv pool"] - sizes["gdn state"]
        if EXCHANGE in regions:
            sizes["exchange"] = regions[EXCHANGE]
        out.append(sizes)
    return out


def total_bytes(program: Program, rank: int = 0) -> int:
    """Device memory that a rank allocates, without the driver's own (context, kernels, graphs)."""
    return sum(program.regions[rank].get(region, 0) for region in (*DEVICE_REGIONS, EXCHANGE))


def host_bytes(program: Program) -> int:
    """Page-locked host memory of the two rings."""
    return sum(program.regions[0].get(region, 0) for region in (RING, EGRESS))


def exchange_bytes(program: Program) -> int:
    """Page-locked host memory that exchanges take instead of the devices' when they go through the host."""
    return sum(regions.get(EXCHANGE, 0) for regions in program.regions)


def weight_values(program: Program) -> Iterator[tuple[str, int, int]]:
    """(name, encoded bytes, elements) of every weight."""
    for name, value in program.values.items():
        if value.kind is Kind.WEIGHT:
            yield name, value.nbytes, value.type.elements


def amount(nbytes: float) -> str:
    """Bytes for people: three digits and a binary prefix."""
    for prefix in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} B" if prefix == "B" else f"{nbytes:.4g} {prefix}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"
