"""Repeated layers are shown once: a schedule becomes blocks of calls, each with the layers it stands for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from compiler.explain.cost import CallReport


@dataclass
class Block:
    """Calls of one layer, standing for all ``layers`` whose calls are the same; no layers: calls outside of any."""

    layers: list[int]
    calls: list[CallReport]

    @property
    def times(self) -> int:
        return max(len(self.layers), 1)


def _signature(calls: Sequence[CallReport]) -> tuple[object, ...]:
    return tuple((item.kinds, item.call.entry, item.call.grid, item.call.block, item.call.smem, item.cost) for item in calls)


def fold(reports: Sequence[CallReport]) -> list[Block]:
    """Blocks in order of first appearance. Runs of calls with the same layer belong together."""
    runs: list[Block] = []
    for item in reports:
        layers = [item.layer] if item.layer >= 0 else []
        if runs and runs[-1].layers == layers:
            runs[-1].calls.append(item)
        else:
            runs.append(Block(layers, [item]))
    blocks: list[Block] = []
    known: dict[tuple[object, ...], Block] = {}
    for run in runs:
        key = (bool(run.layers), *_signature(run.calls))
        if run.layers and key in known:
            known[key].layers += run.layers
        else:
            blocks.append(run)
            if run.layers:
                known[key] = run
    return blocks


def ranges(numbers: Sequence[int]) -> str:
    """``0-2, 4-6, 8`` of sorted integers."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
