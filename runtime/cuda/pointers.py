"""Every pointer that a graph is built with lies in the memory of its own rank (spec/tp2.md §8: the fault that greedy decoding
hides is a kernel of rank 1 with a pointer of rank 0)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from compiler.program.model import Arg, Phase
from runtime.cuda.driver import DeviceError
from runtime.cuda.modules import describe

Span = tuple[int, int]


def check_pointers(phase: Phase, spans: Sequence[Mapping[str, Span]], address_of: Callable[[Arg], int]) -> None:
    """Raise DeviceError naming the kernel and argument that points elsewhere. ``spans[rank]``: half-open address ranges that
    kernels of a rank may point into, by region (outbox: the other rank's mail)."""
    for item in phase.calls:
        for arg in item.args:
            if arg.kind != "pointer":
                continue
            if arg.rank != item.rank:
                raise DeviceError(f"{describe(item)}: argument {arg.name} of rank {item.rank} points to rank {arg.rank}")
            address = address_of(arg)
            begin, end = spans[item.rank].get(arg.region, (0, 0))
            if not begin <= address < end:
                raise DeviceError(f"{describe(item)}: argument {arg.name} of rank {item.rank} is {address:#x}, outside its "
                                  f"{arg.region or 'memory'} at {begin:#x}…{end:#x}")  # fmt: skip
