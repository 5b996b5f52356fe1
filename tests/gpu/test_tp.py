"""Two ranks on one GPU (``--devices 0,0``, a test mode): bits, transports, faults. Each rank is compiled for half the
multiprocessors, so that a waiting kernel of one rank leaves room for every kernel of the other."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from compiler.driver import CompileOptions, compile_program
from compiler.program.model import Program
from runtime.bench.exchange import bench
from runtime.cuda.backend import CudaBackend
from runtime.cuda.device import Device
from runtime.cuda.driver import DeviceError
from runtime.cuda.modules import Modules
from runtime.cuda.transport import TRANSPORTS, choose, exchange_op, self_test
from runtime.session import EngineFault, Request, Sampling, Session
from tests import card, models

pytestmark = pytest.mark.gpu
OPTIONS: dict[str, Any] = {"max_context": 512, "max_concurrency": 8, "prefill_chunk": 128,
                           "pairs": ((1, 1), (1, 4), (1, 8), (8, 1), (8, 8))}  # fmt: skip
SAMPLED = Sampling(0.9, 0.95, 20, 0.0, 1.0, 0.2, seed=7)


@cache
def compiled(name: str, tp: int, **options: Any) -> Program:
    caps = card.target(Device(0).caps())
    return compile_program(models.artifact(name, "bf16"), replace(caps, sms=caps.sms // 2),
                           CompileOptions(tp=tp, **(OPTIONS | options)))  # fmt: skip


@contextmanager
def opened(name: str, tp: int, transport: str = "auto", eager: bool = False, **options: Any) -> Iterator[CudaBackend]:
    backend = CudaBackend(compiled(name, tp, **options), models.store(name, "bf16"), [0] * tp, eager, transport=transport)
    try:
        yield backend
    finally:
        backend.close()


def tokens_and_logits(backend: CudaBackend, columns: int, lanes: int, sampling: Sampling) -> tuple[list[int], bytes]:
    """Of one request on lane 0 among ``lanes``; the logits are those of the last step."""
    session = Session(backend, prefill="none", columns=columns, depth=0)
    rng = random.Random(3)
    session.submit(Request([rng.randrange(500) for _ in range(70)], 12, sampling=sampling), 0)
    for lane in range(1, lanes):
        session.submit(Request([rng.randrange(500) for _ in range(5 + lane)], 200), lane)
    tokens: list[int] = []
    logits = b""
    while 0 in session._lanes:
        for emission in session.advance():
            if emission.lane == 0:
                tokens.append(emission.token)
                logits = session.logits(session.last_phase, 1).tobytes()
                backend.check_lockstep(session.step - 1)
    for lane in list(session._lanes):
        session.cancel(lane)
    return tokens, logits


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "penalties and seed"])
@pytest.mark.parametrize("name", ["example", "dense-small"])
def test_one_value_over_ranks_lanes_columns_and_transports(name: str, sampling: Sampling) -> None:
    results: dict[tuple[tuple[int, ...], bytes], list[str]] = {}
    runs = [(1, "auto", False), *((2, t, False) for t in TRANSPORTS), (2, "peer", True), (2, "staged", True)]
    for tp, transport, eager in runs:
        with opened(name, tp, transport, eager) as backend:
            for lanes, columns in ((1, 1), (1, 4), (1, 8), (8, 1), (8, 8)):
                tokens, logits = tokens_and_logits(backend, columns, lanes, sampling)
                results.setdefault((tuple(tokens), logits), []).append(f"tp{tp} {transport} {eager} {lanes}x{columns}")
    assert len(results) == 1, list(results.values())


def test_prefill_chunks() -> None:
    """Through prefill chunks the ranks agree with each other; the logits stay near those of one rank."""
    ids = [random.Random(5).randrange(4000) for _ in range(300)]
    logits = []
    for tp in (1, 2):
        with opened("example", tp) as backend:
            session = Session(backend)
            logits.append(np.concatenate(list(session.score(ids))))
            assert len([e.token for e in session.generate(Request(ids, 8))]) == 8
            backend.check_lockstep(session.step - 1)
    assert (logits[0].argmax(1) == logits[1].argmax(1)).mean() >= 0.93
    cosine = (logits[0] * logits[1]).sum(1) / np.linalg.norm(logits[0], axis=1) / np.linalg.norm(logits[1], axis=1)
    assert cosine.mean() > 0.98


@pytest.mark.parametrize("columns", [1, 4, 8, 64])
def test_ten_thousand_exchanges(columns: int) -> None:
    """Back to back under random delays of the producers, every received value checked, the same on every transport."""
    rows = [bench([0, 0], columns=columns, transport=t, exchanges=125, replays=80, delays=True) for t in TRANSPORTS]
    assert len({row.digest for row in rows}) == 1


def test_step_down_and_self_test() -> None:
    """A corrupted byte steps down with a logged reason; a transport asked for by name is not replaced."""
    program = compiled("dense-small", 2)
    devices = [Device(0), Device(0)]
    modules = Modules(program.kernels, devices)
    try:
        assert all(self_test(program, modules, devices, t).problem == "" for t in TRANSPORTS)
        assert choose(program, modules, devices, corrupt=frozenset({"peer"})) == "host"
        assert choose(program, modules, devices, corrupt=frozenset({"peer", "host"})) == "staged"
        with pytest.raises(DeviceError, match="arrived wrong"):
            choose(program, modules, devices, "peer", frozenset({"peer"}))
    finally:
        modules.close()
        for device in devices:
            device.close()


@pytest.mark.parametrize("transport", ["peer", "host"])
def test_a_peer_that_never_arrives(transport: str) -> None:
    """Rank 1's launches of a step are left out: the replay ends within a second, its output is not used, and after
    ``resynchronise`` both ranks go on with the bits of a fresh run."""
    import time

    request = Request(list(range(20)), 6)
    with opened("dense-small", 2, transport, eager=True) as backend:
        want = [e.token for e in Session(backend, prefill="none").generate(request)]
        phase = backend._phases["decode1x1"]
        whole = phase._phase
        kept = tuple(item for item in whole.calls if item.rank == 0 or exchange_op(item) is None)
        args = phase._args
        left = {item.index for item in kept}
        phase._args = [packed for item, packed in zip(whole.calls, args, strict=True) if item.index in left]
        phase._phase = replace(whole, calls=kept)
        session = Session(backend, prefill="none", depth=0)
        session.submit(request)
        began = time.monotonic()
        with pytest.raises((DeviceError, EngineFault)):
            for _ in range(3):
                session.advance()
        assert time.monotonic() - began < 2.0
        phase._phase, phase._args = whole, args
        backend.resynchronise()
        backend.check()
        session.cancel(0)
        assert [e.token for e in Session(backend, prefill="none").generate(request)] == want


def test_twenty_boots() -> None:
    outputs = set()
    for _ in range(20):
        with opened("dense-small", 2) as backend:
            outputs.add(tuple(e.token for e in Session(backend, prefill="none").generate(Request(list(range(9)), 5))))
    assert len(outputs) == 1


def test_a_whole_card_program_is_refused_on_a_shared_one() -> None:
    program = compiled("dense-small", 2)
    whole = replace(program, caps=Device(0).caps())
    with pytest.raises(DeviceError, match="multiprocessors"):
        CudaBackend(whole, models.store("dense-small", "bf16"), [0, 0])
