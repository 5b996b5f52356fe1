"""The cross-rank check: silent on sound runs, names what differs, and does nothing with one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from compiler.control import EGRESS_ENTRIES, egress_words
from runtime.backend import VMBackend
from runtime.lockstep import CheckedBackend, RankMismatch
from runtime.session import Request, Sampling, Session
from tests import models

OPTIONS: dict[str, Any] = {"max_context": 256, "max_concurrency": 2, "prefill_chunk": 128,
                           "pairs": ((1, 1), (1, 4), (2, 1))}  # fmt: skip
SAMPLED = Sampling(0.9, 0.95, 20, 0.0, 1.0, 0.2, seed=3)


def backend(tp: int) -> CheckedBackend:
    return CheckedBackend(VMBackend(models.machine("dense-small", numerics="engine", tp=tp, **OPTIONS)))


@pytest.mark.parametrize("prefill", ["chunks", "none"])
def test_sound_runs_pass(prefill: str) -> None:
    """Two lanes of different lengths, sampling with penalties, prefill chunks and the scoring graph."""
    checked = backend(2)
    session = Session(checked, prefill=prefill)
    for i in range(2):
        session.submit(Request(list(range(3, 20 + 9 * i)), 4 + 3 * i, sampling=SAMPLED))
    while session._lanes:
        session.advance()
    rounds = checked.rounds
    assert rounds >= 8 and all(phase.kept for name, phase in checked.program.phases.items() if name != "score")
    list(session.score(list(range(40))))
    assert checked.rounds == rounds + 1


def test_one_rank_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = backend(1)
    for name in ("wait", "read", "read_activation", "rank_egress"):
        monkeypatch.setattr(checked.inner, name, lambda *args, name=name: pytest.fail(f"{name} is called"))
    checked.launch("decode1x1")
    assert checked.rounds == 0 and not any(phase.kept for phase in checked.program.phases.values())


def _token(inner: Any) -> None:
    inner.rank_egress(1)[inner.ingress.step % EGRESS_ENTRIES * egress_words(2) + 5] += 1


def _length(inner: Any) -> None:
    inner.machine.read("lane_len", 1)[0] += 1


def _hidden(inner: Any) -> None:
    phase = inner.program.phases["decode1x1"]
    name = next(name for name in phase.kept if phase.values[name].rank == 1)
    inner.machine.activation("decode1x1", name)[0, 7] *= np.float32(1.5)


@pytest.mark.parametrize(("fault", "message"), [(_token, "word 5 of the egress"), (_length, "of the control block"),
                                                (_hidden, "hidden rows")], ids=["token", "length", "hidden"])  # fmt: skip
def test_a_difference_is_named(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Any], None], message: str) -> None:
    checked = backend(2)
    session = Session(checked, prefill="none", depth=0)
    session.submit(Request(list(range(3, 9)), 6))
    session.advance()
    run, steps = checked.inner.launch, checked.ingress.step

    def launch(phase: str) -> None:
        run(phase)
        if phase == "decode1x1":
            fault(checked.inner)

    monkeypatch.setattr(checked.inner, "launch", launch)
    with pytest.raises(RankMismatch, match=f"{message}.*rank 1") as raised:
        for _ in range(8):
            session.advance()
    assert int(str(raised.value).split(":")[0].removeprefix("step ")) >= steps


@pytest.mark.parametrize("pair", [(1, 1), (1, 2), (1, 3), (2, 1), (2, 2), (1, 32)], ids=str)
def test_what_is_compared_has_a_place(pair: tuple[int, int]) -> None:
    """However the norm before the head is fused, its rows stay readable to the end of the graph, on every rank."""
    program = models.program("dense-small", tp=2, max_context=256, max_concurrency=2, prefill_chunk=128, pairs=((1, 1), pair))
    for name in (f"decode{pair[0]}x{pair[1]}", "prefill"):
        phase = program.phases[name]
        assert sorted(phase.values[kept].rank for kept in phase.kept) == [0, 1]
        for kept in phase.kept:
            place = phase.placements[kept]
            written = [item.index for item in phase.calls for op in item.ops
                       if kept in (ref.value for ref in op.outputs.values())]  # fmt: skip
            for item in phase.calls[max(written) + 1 :]:
                touched = [phase.placements[ref.value] for op in item.ops for ref in op.outputs.values()
                           if ref.value in phase.placements]  # fmt: skip
                assert not any(other.rank == place.rank and other.offset < place.end and place.offset < other.end
                               for other in (*touched, *item.scratch.values())), item.entry  # fmt: skip
