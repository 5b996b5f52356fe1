"""The numbers of a replay's exchanges: each its own, the same on both ranks in the same order, and as many as are reserved.

A number used twice, or more numbers than `exchange_begin` reserves, would let a reader take an earlier word for the one it
waits for; no sequential execution shows it."""

from __future__ import annotations

from typing import Any

import pytest

from compiler.kernels.exchange import KINDS
from compiler.program.model import Phase
from tests import models

OPTIONS: dict[str, Any] = {"max_context": 256, "prefill_chunk": 128, "pairs": ((1, 1), (1, 4), (1, 16))}
PUSHED = ("decode1x1", "decode1x4", "prefill", "score")


def ordinals(phase: Phase, rank: int) -> tuple[list[int], list[int], list[int]]:
    """Of a rank, in schedule order: the ordinals its exchanges get, those that its products push, the counts reserved."""
    used: list[int] = []
    pushed: list[int] = []
    reserved: list[int] = []
    for call in phase.calls:
        if call.rank != rank:
            continue
        passed = {arg.name: arg.number for arg in call.args}
        for op in call.ops:
            if "ordinal" in op.attrs:
                assert passed["ordinal"] == op.int_attr("ordinal")
                (used if op.kind in KINDS else pushed).append(op.int_attr("ordinal"))
                if op.kind == "exchange_residual":
                    assert (op.attrs["pushed"] or op.attrs["tiles"]) == (op.attrs["ordinal"] in pushed), "sent twice or never"
            elif op.kind == "exchange_begin":
                reserved.append(op.int_attr("count"))
    return used, pushed, reserved


@pytest.mark.parametrize("phase", ["decode1x1", "decode1x4", "decode1x16", "prefill", "score"])
def test_every_exchange_has_its_own_number(phase: str) -> None:
    program = models.program("dense-small", "bf16", tp=2, **OPTIONS)
    used, pushed, reserved = ordinals(program.phases[phase], 0)
    assert used and used == list(range(len(used)))
    assert reserved == [len(used)]
    sums = used if phase == "score" else used[:-1]  # the last one is the choice of the token
    assert pushed == (sums if phase in PUSHED else [])
    assert ordinals(program.phases[phase], 1) == (used, pushed, reserved)


@pytest.mark.parametrize("options", [{"fused": False}, {"exchange": "bf16", "exchange_prefill": "f32"},
                                     {"exchange": "bf16"}], ids=str)  # fmt: skip
def test_products_push_only_what_they_can(options: dict[str, Any]) -> None:
    """Words only of FP32 sums; tiles of either kind."""
    program = models.program("dense-small", "bf16", tp=2, **OPTIONS, **options)
    pushing = {name for name, phase in program.phases.items() if ordinals(phase, 0)[1]}
    assert pushing == ({"prefill", "score"} if options.get("fused", True) else set())
