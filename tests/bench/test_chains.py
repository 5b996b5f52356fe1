"""Chains of products: what is in them, and what is subtracted."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import chains
from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import caps
from compiler.program.model import Phase, Program
from runtime.bench.measure import Bench
from tests import models


@cache
def program() -> Program:
    options = CompileOptions(max_context=128, pairs=((1, 1),), score=False)
    return compile_program(models.artifact("example"), caps("sm_90a"), options, images=False)


def test_a_chain_holds_one_product() -> None:
    phase = program().phases["decode1x1"]
    found = chains.products(phase)
    assert len(found) >= 4 and all(len(calls) > 1 for calls in found.values())
    for entry, calls in found.items():
        links = chains.chain(phase, calls)
        middle = links.calls[1:-2]
        assert [item.index for item in links.calls] == list(range(len(links.calls)))
        assert {item.entry for item in middle} == {entry} and len(middle) >= chains.LEAST and len(middle) % len(calls) == 0
        assert (links.calls[0].entry, links.calls[-1].entry) == (phase.calls[0].entry, phase.calls[-1].entry)

        def weights(links: Phase) -> set[object]:
            return {arg for item in links.calls[1:-2] for arg in item.args if arg.name == "w_codes"}

        assert len(weights(links)) == len(calls) and len(weights(chains.chain(phase, calls, True))) == 1


def test_ends_are_subtracted() -> None:
    """A step that takes 5 us, and 3 us for each call between its ends."""

    def replay(phase: Phase, *_: Any) -> float:
        return (5 + 3 * (len(phase.calls) - 3)) * 1e-6

    backend = SimpleNamespace(program=program(), modules=None, argument_address=None)
    phase = program().phases["decode1x1"]
    rows = chains.measure(cast(Bench, SimpleNamespace(backend=backend, replay=replay)), phase, 3)
    assert rows[0]["value"] == pytest.approx((5 + 3 * (len(phase.calls) - 3)) * 1e-3)
    assert [row["value"] for row in rows[1:]] == pytest.approx([3] * 2 * len(chains.products(phase)))
    assert all(row["GB/s"] > 0 for row in rows[1:])
