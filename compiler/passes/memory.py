"""Memory plan: byte ranges of activations and scratch by liveness over the linear schedule.

Greedy by size (largest first, lowest free offset): the usual heuristic for static arena planning. Two ranges may share
bytes exactly when their lifetimes, in calls of the schedule, are disjoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from compiler.program.model import ALIGNMENT, Placement


def align(nbytes: int, to: int = ALIGNMENT) -> int:
    return -(-nbytes // to) * to


@dataclass(frozen=True)
class Lifetime:
    """A buffer of ``nbytes`` alive in the calls ``first`` … ``last``, both inclusive."""

    name: str
    nbytes: int
    first: int
    last: int
    rank: int = 0


def plan(lifetimes: Sequence[Lifetime], region: str) -> tuple[dict[str, Placement], list[int]]:
    """Placements by name and the region's size per rank (indexed by rank).

    Raises ValueError for a lifetime that ends before it begins.
    """
    taken: dict[tuple[int, int], list[tuple[int, int]]] = {}  # (rank, call) -> ranges placed so far
    out: dict[str, Placement] = {}
    sizes = [0] * (1 + max((life.rank for life in lifetimes), default=0))
    for life in sorted(lifetimes, key=lambda item: (-item.nbytes, item.first, item.name)):
        if life.last < life.first:
            raise ValueError(f"buffer {life.name} dies in call {life.last} before it is born in {life.first}")
        calls = [(life.rank, call) for call in range(life.first, life.last + 1)]
        offset = 0
        for begin, end in sorted({span for call in calls for span in taken.get(call, ())}):
            if offset + align(life.nbytes) <= begin:
                break
            offset = max(offset, end)
        for call in calls:
            taken.setdefault(call, []).append((offset, offset + align(life.nbytes)))
        out[life.name] = Placement(region, offset, life.nbytes, life.rank)
        sizes[life.rank] = max(sizes[life.rank], offset + align(life.nbytes))
    return out, sizes


def reuse_edges(placements: Mapping[str, Placement], lifetimes: Sequence[Lifetime],
                accesses: Mapping[str, Sequence[int]]) -> set[tuple[int, int]]:  # fmt: skip
    """Edges (earlier call, later call) that keep a range's next owner behind all accesses of its last owner.

    Only the latest owner of each byte is looked at: its own edges already stand behind the owners before it.
    """
    edges: set[tuple[int, int]] = set()
    owners: dict[int, list[tuple[int, int, str]]] = {}  # rank -> disjoint (begin, end, buffer)
    for life in sorted(lifetimes, key=lambda item: (item.first, item.name)):
        here = placements[life.name]
        kept: list[tuple[int, int, str]] = []
        for begin, end, name in owners.get(life.rank, []):
            if end <= here.offset or begin >= here.end:
                kept.append((begin, end, name))
                continue
            edges.update((access, life.first) for access in accesses[name] if access != life.first)
            if begin < here.offset:
                kept.append((begin, here.offset, name))
            if end > here.end:
                kept.append((here.end, end, name))
        kept.append((here.offset, here.end, life.name))
        owners[life.rank] = kept
    return edges


def check(placements: Mapping[str, Placement], lifetimes: Sequence[Lifetime]) -> None:
    """Raise ValueError when two buffers alive in one call share a byte (the plan's own proof)."""
    for i, a in enumerate(lifetimes):
        for b in lifetimes[i + 1 :]:
            if a.rank != b.rank or a.first > b.last or b.first > a.last:
                continue
            pa, pb = placements[a.name], placements[b.name]
            if pa.offset < pb.end and pb.offset < pa.end:
                raise ValueError(f"buffers {a.name} and {b.name} are alive together and share bytes")
