"""The numbers of a replay's exchanges: each its own, the same on both ranks in the same order, and as many as are reserved.

A number used twice, or more numbers than `exchange_begin` reserves, would let a reader take an earlier word for the one it
waits for; no sequential execution shows it."""

from __future__ import annotations

from typing import Any

import pytest

from compiler.ir.graph import OpGraph, check
from compiler.ir.op import Attr
from compiler.ir.types import IRError, Kind, Ref, TensorType, Value
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


@pytest.mark.parametrize("phase", ["decode1x1", "decode1x4", "decode1x16", "prefill", "prefill_halves", "score"])
def test_every_exchange_has_its_own_number(phase: str) -> None:
    program = models.program("dense-small", "bf16", tp=2, **OPTIONS)
    used, pushed, reserved = ordinals(program.phases[phase], 0)
    assert used and used == list(range(len(used)))
    assert reserved == [len(used)]
    sums = used if phase == "score" else used[:-1]  # the last one is the choice of the token
    assert pushed == (sums if phase in PUSHED else [])
    assert ordinals(program.phases[phase], 1) == (used, pushed, reserved)


@pytest.mark.parametrize(("change", "message"), [
    ("not awaited", "partial is sent as exchange 0, awaited as None"),
    ("not sent", "partial is sent as exchange None, awaited as 0"),
    ("another number", "partial is sent as exchange 5, awaited as 0"), ("no exchange", "p is sent, but no exchange takes it"),
    ("one rank only", "peer_1 is sent as exchange None, awaited as 0")])  # fmt: skip
def test_the_rule_of_what_is_sent(change: str, message: str) -> None:
    """Products and the exchange behind them must agree, or a rank would wait for ever, or nobody for what was sent."""
    graph = OpGraph("g", "prefill", 1, 16)
    wide, row = TensorType((16, 64), "bf16"), TensorType((64, 64), "bf16")
    for name in ("x", "p", "q", "r", "y"):
        graph.add_value(Value(name, wide, Kind.ACTIVATION))
    graph.add_value(Value("w", row, Kind.STATE))
    for name in ("sequence", "step"):
        graph.add_value(Value(name, TensorType((4,), "i32"), Kind.STATE))
    control = {"sequence": Ref("sequence"), "step": Ref("step")}
    for index, name in enumerate("pq"):
        silent = change == "not sent" or (change == "one rank only" and index)
        attrs: dict[str, Attr] = {"segments": 1, "f32": False}
        if not silent:
            attrs["ordinal"] = 5 if change == "another number" else 0
        graph.add_op("linear", {"x": Ref("x"), "w": Ref("w")} | ({} if silent else control), {"y": Ref(name)}, attrs=attrs)
    if change != "no exchange":
        sums = {"partial": Ref("p"), "peer_1": Ref("q"), "residual": Ref("r")}
        graph.add_op("exchange_residual", sums | control, {"y": Ref("y")},
                     attrs={"ordinal": 0, "wire": "bf16", "pushed": False, "tiles": change != "not awaited"})  # fmt: skip
    with pytest.raises(IRError, match=message):
        check(graph, ["sent sums are awaited"])


@pytest.mark.parametrize("options", [{"fused": False}, {"exchange": "bf16", "exchange_prefill": "f32"},
                                     {"exchange": "bf16"}], ids=str)  # fmt: skip
def test_products_push_only_what_they_can(options: dict[str, Any]) -> None:
    """Words only of FP32 sums; tiles of either kind."""
    program = models.program("dense-small", "bf16", tp=2, **OPTIONS, **options)
    pushing = {name for name, phase in program.phases.items() if ordinals(phase, 0)[1]}
    assert pushing == ({"prefill", "score"} if options.get("fused", True) else set())
