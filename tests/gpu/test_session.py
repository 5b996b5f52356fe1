"""Whole programs on one GPU: against the VM and the goldens, and bit-equality over lanes, columns, graph and eager."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from runtime.session import Request, Sampling, Session
from tests import models
from tests.gpu.conftest import ALL_PAIRS

pytestmark = pytest.mark.gpu
Backend = Callable[..., Any]


@pytest.mark.parametrize("n", [1, 7, 64, 65, 300])
@pytest.mark.parametrize("name", ["dense-small", "dense-prod-heads"])
def test_goldens(gpu: Backend, name: str, n: int) -> None:
    """Logits after a prompt through prefill chunks within twice the engine profile's deviation, greedy tokens equal
    where the stored margin exceeds it."""
    goldens = models.Goldens(name)
    backend = gpu(name, max_context=512, prefill_chunk=128, pairs=((1, 1), (1, 4)))
    bound = 2 * goldens.meta["engine_profile"][str(n)]["max_abs"]
    logits = np.concatenate(list(Session(backend).score(goldens.ids(n))))
    assert np.abs(logits[-1] - goldens[f"logits_last_{n}"]).max() < bound
    for prefill in ("chunks", "none"):
        fresh = gpu(name, max_context=512, prefill_chunk=128, pairs=((1, 1), (1, 4)))
        tokens = [e.token for e in Session(fresh, prefill=prefill).generate(Request(goldens.ids(n), 32))]
        for token, golden, margin in zip(tokens, goldens[f"greedy_{n}"], goldens[f"greedy_margin_{n}"], strict=True):
            if token != golden:
                assert margin <= bound, prefill
                break


def traced(backend: Any, lanes: int, columns: int, prompt: list[int], new: int, others: list[list[int]], seed: int,
           sampling: Sampling) -> str:  # fmt: skip
    """Hash of the tokens and of the logits that chose them, of ``prompt`` on one lane among ``lanes``."""
    session = Session(backend, prefill="none", depth=0, columns=columns, permute=seed)
    rng = random.Random(seed)
    mine = rng.randrange(lanes)
    queue = list(others)
    for lane in range(lanes):
        request = Request(prompt, new, sampling=sampling) if lane == mine else Request(queue.pop(0), 400)
        session.submit(request, lane)
    digest, produced = hashlib.sha256(), 0
    before = 0
    while produced < new:
        # run ahead while only the prompt is fed: nothing is read there
        session.depth = 4 if mine in session._lanes and session._lanes[mine].queued + 6 * columns < len(prompt) else 0
        emissions = [e for e in session.advance() if e.lane == mine]
        length = before
        if mine in session._lanes:
            length = session._lanes[mine].queued
        for emission in emissions:
            phase = session.program.phases[session.last_phase]
            ran = (length - before) if mine in session._lanes else 1
            row = mine * phase.width + max(ran, 1) - 1
            logits = session.backend.read_activation(phase.name, phase.outputs[0], phase.columns)[row]
            digest.update(str(emission.token).encode() + logits.tobytes())
            produced += 1
        before = length
    for lane in list(session._lanes):
        session.cancel(lane)
    return digest.hexdigest()


@pytest.mark.parametrize("length", [1, 64, 65, 300, 2000])
@pytest.mark.parametrize("weights", ["example", "bf16"])
def test_bits_do_not_depend_on_the_split_of_work(gpu: Backend, weights: str, length: int) -> None:
    """Decision 6: one hash over {1, 8 lanes} × {1, 4, 8 columns} × {graph, eager} × 6 repeats."""
    name = "example" if weights == "example" else "dense-prod-heads"
    rng = random.Random(length)
    vocab = 4000 if weights == "example" else 500
    prompt = [rng.randrange(vocab) for _ in range(length)]
    hashes: dict[str, list[str]] = {}
    for eager in (False, True):
        backend = gpu(name, "bf16", eager=eager, max_context=2560, max_concurrency=8, pairs=ALL_PAIRS)
        for lanes, columns in ((1, 1), (1, 4), (1, 8), (8, 1), (8, 4), (8, 8)):
            for repeat in range(6):
                others = [[rng.randrange(vocab) for _ in range(rng.choice([3, 70, 333]))] for _ in range(8)]
                key = traced(backend, lanes, columns, prompt, 4, others, repeat, Sampling())
                hashes.setdefault(key, []).append(f"{'eager' if eager else 'graph'} {lanes}x{columns} #{repeat}")
    assert len(hashes) == 1, {key[:8]: runs for key, runs in hashes.items()}


def solo(backend: Any, request: Request) -> list[int]:
    return [e.token for e in Session(backend, prefill="none").generate(request)]


def test_lanes_join_and_leave(gpu: Backend) -> None:
    """Eight lanes serve twenty requests of different lengths, greedy and sampled mixed, slots and pages permuted: each
    equals its run alone."""
    rng = random.Random(11)
    requests = []
    for i in range(20):
        prompt = [rng.randrange(4000) for _ in range(rng.choice([1, 5, 64, 130, 500]))]
        sampling = Sampling() if i % 2 else Sampling(0.9, 0.95, 20, 0.0, 1.0, 0.2, seed=i)
        requests.append(Request(prompt, rng.choice([3, 17, 40]), sampling=sampling))
    options: dict[str, Any] = {"max_context": 1024, "max_concurrency": 8, "pairs": ALL_PAIRS}
    backend = gpu("example", "bf16", **options)
    session = Session(backend, prefill="none", permute=5, columns=4)
    waiting, running, done = list(enumerate(requests)), {}, {}
    while waiting or running:
        while waiting and session.free_lane() is not None:
            index, request = waiting.pop(0)
            running[session.submit(request)] = index
            done[index] = []
        for emission in session.advance():
            done[running[emission.lane]].append(emission.token)
            if emission.finish:
                del running[emission.lane]
    alone = gpu("example", "bf16", **options)
    for index, request in enumerate(requests):
        assert done[index] == solo(alone, request), index


def test_look_ahead_changes_nothing(gpu: Backend) -> None:
    """After a stop token every state equals that of a run that reads each token before the next launch."""
    prompt = list(range(300, 380))
    first = gpu("example", "bf16", max_context=1024)
    tokens = [e.token for e in Session(first, depth=0).generate(Request(prompt, 24))]
    stop = next(t for i, t in enumerate(tokens) if i >= 5 and t not in tokens[:i])
    states = []
    for depth in (0, 1, 3):
        backend = gpu("example", "bf16", max_context=1024)
        out = [e.token for e in Session(backend, depth=depth).generate(Request(prompt, 24, stop_ids=(stop,)))]
        assert out == tokens[: tokens.index(stop) + 1]
        names = [n for n in backend.program.values if n.startswith(("recurrent", "window", "kv", "lane_len", "slot_pending"))]
        states.append([backend.read(name).tobytes() for name in names])
    assert states[0] == states[1] == states[2]
