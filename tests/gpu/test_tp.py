"""Two ranks on one GPU (``--devices 0,0``, a test mode) and on two: bits, transports, faults.

On one GPU each rank is compiled for half the multiprocessors, so that a waiting kernel of one rank leaves room for every
kernel of the other. Every test runs on both kinds of pair: ``-m gpu`` on devices 0,0, ``-m gpu2`` on 0,1."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

import artifacts
from compiler.driver import CompileOptions, compile_program
from compiler.passes.halves import PREFILL, PREFILL_HALVES
from compiler.program.model import Program
from runtime.bench.exchange import bench, bench_fused
from runtime.cuda.backend import CudaBackend
from runtime.cuda.device import Device, rank_caps
from runtime.cuda.driver import DeviceError
from runtime.cuda.modules import Modules
from runtime.cuda.self_test import choose, self_test
from runtime.cuda.transport import TILES_OVER, TRANSPORTS, peer_access
from runtime.lockstep import CheckedBackend
from runtime.session import EngineFault, Request, Sampling, Session
from runtime.vm.weights import WeightStore
from tests import card, models
from tests.tp.equality import SAMPLED, SPLITS, deep_artifact, deep_store, tokens_and_logits

Pair = tuple[int, int]
PAIRS = [pytest.param((0, 0), marks=pytest.mark.gpu, id="0,0"), pytest.param((0, 1), marks=pytest.mark.gpu2, id="0,1")]
OPTIONS: dict[str, Any] = {"max_context": 512, "max_concurrency": 8, "prefill_chunk": 128,
                           "pairs": ((1, 1), (1, 4), (1, 8), (8, 1), (8, 8))}  # fmt: skip
DEEP = "deep"  # the model of tests/tp/equality.py


def model(name: str) -> tuple[artifacts.Artifact, WeightStore]:
    if name == DEEP:
        return deep_artifact(), deep_store()
    return models.artifact(name, "bf16"), models.store(name, "bf16")


@pytest.fixture(params=PAIRS)
def pair(request: pytest.FixtureRequest) -> Pair:
    found: Pair = request.param
    return found


@contextmanager
def devices_of(pair: Pair) -> Iterator[list[Device]]:
    devices = [Device(index) for index in pair]
    try:
        yield devices
    finally:
        for device in devices:
            device.close()


@cache
def transports(pair: Pair) -> tuple[str, ...]:
    """Those that the pair has."""
    with devices_of(pair) as devices:
        return TRANSPORTS if peer_access(devices) is None else TRANSPORTS[1:]


@cache
def compiled(pair: Pair, name: str, tp: int, **options: Any) -> Program:
    with devices_of(pair) as devices:
        share = rank_caps(devices)
    caps = card.target(share)
    with card.alone():
        return compile_program(model(name)[0], replace(caps, sms=min(caps.sms, share.sms)),
                               CompileOptions(tp=tp, **(OPTIONS | options)))  # fmt: skip


@contextmanager
def opened(pair: Pair, name: str, tp: int, transport: str = "auto", eager: bool = False, device: int = 0,
           **options: Any) -> Iterator[CudaBackend]:  # fmt: skip
    """One rank runs on the pair's device number ``device``."""
    places = list(pair) if tp == 2 else [pair[device]]
    backend = CudaBackend(compiled(pair, name, tp, **options), model(name)[1], places, eager, transport=transport)
    try:
        yield backend
    finally:
        backend.close()


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "penalties and seed"])
@pytest.mark.parametrize("name", ["example", "dense-small"])
def test_one_value_over_ranks_lanes_columns_and_transports(pair: Pair, name: str, sampling: Sampling) -> None:
    """The equality hash: tp {1, 2}, 1 or 8 lanes, 1, 4, 8 columns, every transport, graph and eager, sums pushed by products
    or sent by exchanges."""
    results: dict[tuple[tuple[int, ...], bytes], list[str]] = {}
    runs: list[tuple[int, str, bool, dict[str, Any]]] = [(1, "auto", False, {}), (1, "auto", True, {})]
    runs += [(2, transport, False, {}) for transport in transports(pair)]
    runs += [(2, transports(pair)[0], True, {}), (2, "staged", True, {}), (2, "host", False, {"fused": False})]
    for tp, transport, eager, options in runs:
        with opened(pair, name, tp, transport, eager, **options) as backend:
            for lanes, columns in ((1, 1), (1, 4), (1, 8), (8, 1), (8, 8)):
                tokens, logits = tokens_and_logits(backend, columns, lanes, sampling)
                label = f"tp{tp} {transport} eager={eager} {options} {lanes}x{columns}"
                results.setdefault((tuple(tokens), logits), []).append(label)
    assert len(results) == 1, list(results.values())


def test_a_deep_model_has_one_value(pair: Pair) -> None:
    """The equality hash on 48 layers in which every quantised format occurs: tp {1, 2}, 1 or 8 lanes, 1, 4, 8 columns, every
    transport, 96 exchanges a token."""
    options: dict[str, Any] = {"pairs": SPLITS, "score": False}
    results: dict[tuple[tuple[int, ...], bytes], list[str]] = {}
    for tp, transport in ((1, "auto"), *((2, transport) for transport in transports(pair))):
        with opened(pair, DEEP, tp, transport, **options) as backend:
            for lanes, columns in SPLITS:
                tokens, logits = tokens_and_logits(backend, columns, lanes, SAMPLED)
                results.setdefault((tuple(tokens), logits), []).append(f"tp{tp} {transport} {lanes}x{columns}")
    assert len(results) == 1, list(results.values())
    ((found, bits),) = results
    assert len(set(found)) > 6 and len(set(np.frombuffer(bits, np.float32))) > 1000


@pytest.mark.gpu2
def test_both_devices_alone_compute_the_same() -> None:
    """Null control: one rank on either device."""
    answers = set()
    for device in (0, 1):
        with opened((0, 1), "example", 1, device=device) as backend:
            answers.add(str(tokens_and_logits(backend, 4, 1, SAMPLED)))
    assert len(answers) == 1


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_prefill_chunks(pair: Pair, transport: str) -> None:
    """Through prefill chunks the ranks agree with each other on every transport; the logits stay near those of one rank."""
    if transport not in transports(pair):
        pytest.skip(f"the pair has no {transport}")
    ids = [random.Random(5).randrange(4000) for _ in range(300)]
    logits = []
    for tp in (1, 2):
        with opened(pair, "example", tp, transport) as backend:
            session = Session(CheckedBackend(backend))
            logits.append(np.concatenate(list(session.score(ids))))
            assert len([e.token for e in session.generate(Request(ids, 8))]) == 8
    assert (logits[0].argmax(1) == logits[1].argmax(1)).mean() >= 0.93
    cosine = (logits[0] * logits[1]).sum(1) / np.linalg.norm(logits[0], axis=1) / np.linalg.norm(logits[1], axis=1)
    assert cosine.mean() > 0.98


@pytest.mark.parametrize("wire", ["f32", "bf16"])
@pytest.mark.parametrize("columns", [1, 4, 8, 64])
def test_ten_thousand_exchanges(pair: Pair, columns: int, wire: str) -> None:
    """Back to back under random delays of the producers, every bit of every received value checked, the same on every
    transport."""
    rows = [bench(pair, columns, wire, t, exchanges=125, replays=80, delays=True) for t in transports(pair)]
    assert len({row.digest for row in rows}) == 1


@pytest.mark.parametrize("columns", [1, 4, 8])
def test_ten_thousand_pushed_exchanges(pair: Pair, columns: int) -> None:
    """Sent by the products that compute the sums: the bits of sums that an exchange sends, on both ranks and all transports."""
    rows = [row for t in transports(pair) for row in bench_fused(pair, columns, t, exchanges=125, replays=80)]
    assert len({row.digest for row in rows}) == 1


def test_a_chunk_of_prefill(pair: Pair) -> None:
    """1024 columns of BF16, 10 MiB, and FP32, 20 MiB."""
    for wire in ("bf16", "f32"):
        rows = [bench(pair, 1024, wire, t, exchanges=5, replays=4, delays=True) for t in transports(pair)]
        assert len({row.digest for row in rows}) == 1


def test_tiles_of_a_chunk_of_prefill(pair: Pair) -> None:
    """Sent by row products as they finish them, in several waves of blocks: the bits of a chunk that an exchange sends."""
    for columns in (1000, 1024):
        rows = [row for t in transports(pair) for row in bench_fused(pair, columns, t, exchanges=10, replays=20)]
        assert len({row.digest for row in rows}) == 1


@pytest.mark.parametrize("wire", ["bf16", "f32"])
@pytest.mark.parametrize("name", ["example", "dense-small"])
def test_prefill_has_one_value_over_transports(pair: Pair, monkeypatch: pytest.MonkeyPatch, name: str, wire: str) -> None:
    """Whether products or exchanges send a chunk's sums, through which memory, whole or in halves, graph or eager; both ranks
    compared. Of the last chunks one ends in its first half, one in its second."""
    ids = [random.Random(7).randrange(500) for _ in range(300)]
    results: dict[bytes, list[str]] = {}
    runs: list[tuple[str, bool, bool, dict[str, Any]]] = [(t, False, True, {}) for t in transports(pair)]
    runs += [(t, False, False, {}) for t in transports(pair) if t in TILES_OVER]
    runs += [(transports(pair)[0], True, True, {}), (transports(pair)[0], False, True, {"fused": False})]
    runs += [("host", True, True, {}), ("host", False, True, {"fused": False})]
    for transport, eager, tiles, options in runs:
        monkeypatch.setattr("runtime.cuda.transport.TILES_OVER", TILES_OVER if tiles else frozenset())
        with opened(pair, name, 2, transport, eager, exchange_prefill=wire, **options) as backend:
            assert backend.exchange is not None  # 2: blocks that need not send may wait, each rank having a device
            assert backend.exchange.tiles == (1 + pair[1] if tiles and transport in TILES_OVER else 0)
            assert backend.prefill == (PREFILL_HALVES if transport == "host" else PREFILL)
            session = Session(CheckedBackend(backend))
            for _ in range(3):  # slots and numbers of earlier chunks stand there
                found = np.concatenate(list(session.score(ids))).tobytes()
                tokens = [e.token for length in (300, 228) for e in session.generate(Request(ids[:length], 4))]
                results.setdefault(found + bytes(str(tokens), "ascii"), []).append(f"{transport} {eager} {tiles} {options}")
    assert len(results) == 1, list(results.values())


@pytest.mark.parametrize("wire", ["bf16", "f32"])
@pytest.mark.parametrize("name", ["example", "dense-small"])
def test_a_chunk_in_halves(pair: Pair, name: str, wire: str) -> None:
    """Over the host exchanges run beside products, as slices: tokens and states of a chunk in which everything waits for
    everything, over and over again, graph and eager."""
    options: dict[str, Any] = {"max_context": 2048, "prefill_chunk": 1024, "max_concurrency": 1, "pairs": ((1, 1),),
                               "exchange_prefill": wire, "score": False}  # fmt: skip
    ids = [random.Random(9).randrange(500) for _ in range(1800)]
    results: dict[bytes, list[str]] = {}
    for transport, eager in (("staged", False), ("host", True), ("host", False)):
        with opened(pair, name, 2, transport, eager, **options) as backend:
            session, layer = Session(CheckedBackend(backend)), backend.program.spec.gdn_layers[-1]
            for repeat in range(1 if eager or transport == "staged" else 10):
                found = b""
                for length in (1800, 1024, 700, 513, 512, 300):
                    found += bytes(str([e.token for e in session.generate(Request(ids[:length], 3))]), "ascii")
                    found += b"".join(backend.read(f"recurrent{layer}", rank).tobytes() for rank in (0, 1))
                results.setdefault(found, []).append(f"{transport} eager={eager} {repeat}")
    assert len(results) == 1, list(results.values())


def test_step_down_and_self_test(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """A corrupted byte steps down with a logged reason; a transport asked for by name is not replaced."""
    program = compiled(pair, "dense-small", 2)
    with devices_of(pair) as devices:
        modules = Modules(program.kernels, devices)
        try:
            assert all(self_test(program, modules, devices, t).problem == "" for t in transports(pair))
            assert choose(program, modules, devices) in transports(pair)[:2]
            assert choose(program, modules, devices, corrupt=frozenset({"peer"})) == "host"
            assert "transport peer is not used:" in caplog.text
            assert choose(program, modules, devices, corrupt=frozenset({"peer", "host"})) == "staged"
            with pytest.raises(DeviceError, match="arrived wrong"):
                choose(program, modules, devices, "host", frozenset({"host"}))
        finally:
            modules.close()


@pytest.mark.parametrize("prefill", ["none", "chunks"])
@pytest.mark.parametrize("fused", [True, False], ids=["pushed", "sent"])
@pytest.mark.parametrize("transport", ["peer", "host"])
def test_a_peer_that_never_arrives(pair: Pair, transport: str, fused: bool, prefill: str) -> None:
    """What rank 1 sends in a step or a chunk is left out: the replay ends within a second, its output is not used, and after
    ``resynchronise`` both ranks go on with the bits of a fresh run."""
    if transport not in transports(pair):
        pytest.skip(f"the pair has no {transport}")
    request = Request(list(range(20)), 6)
    with opened(pair, "dense-small", 2, transport, eager=True, fused=fused) as backend:
        want = [e.token for e in Session(backend, prefill=prefill).generate(request)]
        phase: Any = backend._phases["decode1x1" if prefill == "none" else backend.prefill]
        whole = phase._phase
        kept = tuple(item for item in whole.calls if item.rank == 0 or not any("ordinal" in op.attrs for op in item.ops))
        args = phase._args
        left = {item.index for item in kept}
        phase._args = [packed for item, packed in zip(whole.calls, args, strict=True) if item.index in left]
        phase._phase = replace(whole, calls=kept)
        session = Session(backend, prefill=prefill, depth=0)
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
        assert [e.token for e in Session(backend, prefill=prefill).generate(request)] == want


@pytest.mark.slow
def test_twenty_boots(pair: Pair) -> None:
    """Each with its own self-tests, buffers and graphs; all transports take turns."""
    names, outputs = ("auto", *transports(pair)), set()
    for boot in range(20):
        with opened(pair, "dense-small", 2, names[boot % len(names)]) as backend:
            outputs.add(tuple(e.token for e in Session(backend, prefill="none").generate(Request(list(range(9)), 5))))
    assert len(outputs) == 1


@pytest.mark.gpu
def test_a_whole_card_program_is_refused_on_a_shared_one() -> None:
    program = compiled((0, 0), "dense-small", 2)
    with devices_of((0, 0)) as devices:
        whole = replace(program, caps=devices[0].caps())
    with pytest.raises(DeviceError, match="multiprocessors"):
        CudaBackend(whole, models.store("dense-small", "bf16"), [0, 0])
