"""The numbers of a replay's exchanges: each its own, the same on both ranks in the same order, and as many as are reserved.

A number used twice, or more numbers than `exchange_begin` reserves, would let a reader take an earlier word for the one it
waits for; no sequential execution shows it."""

from __future__ import annotations

from typing import Any

import pytest

from compiler.program.model import Phase
from tests import models

OPTIONS: dict[str, Any] = {"max_context": 256, "prefill_chunk": 128, "pairs": ((1, 1), (1, 4))}


def ordinals(phase: Phase, rank: int) -> tuple[list[int], list[int]]:
    """Of a rank, in schedule order: the ordinals its kernels get, and the counts that are reserved."""
    used, reserved = [], []
    for call in phase.calls:
        if call.rank != rank:
            continue
        passed = {arg.name: arg.number for arg in call.args}
        for op in call.ops:
            if "ordinal" in op.attrs:
                assert passed["ordinal"] == op.int_attr("ordinal")
                used.append(op.int_attr("ordinal"))
            elif op.kind == "exchange_begin":
                reserved.append(op.int_attr("count"))
    return used, reserved


@pytest.mark.parametrize("phase", ["decode1x1", "decode1x4", "prefill", "score"])
def test_every_exchange_has_its_own_number(phase: str) -> None:
    program = models.program("dense-small", "bf16", tp=2, **OPTIONS)
    used, reserved = ordinals(program.phases[phase], 0)
    assert used and used == list(range(len(used)))
    assert reserved == [len(used)]
    assert ordinals(program.phases[phase], 1) == (used, reserved)
