"""The kernels of both ranks on the emulator, over every transport: the tokens and states of one rank."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import caps
from compiler.kernels import exchange
from runtime.session import Request, Sampling, Session
from tests import models
from tests.emulator import toolchain
from tests.emulator_backend import EmulatorBackend

pytestmark = pytest.mark.skipif(bool(toolchain.missing_reason()), reason=str(toolchain.missing_reason()))
OPTIONS: dict[str, Any] = {"max_context": 128, "prefill_chunk": 128, "pairs": ((1, 1), (1, 4))}
SAMPLED = Sampling(0.9, 0.95, 20, 0.0, 1.0, 0.2, seed=3)


def run(tp: int, sampling: Sampling, transport: str = "staged", columns: int = 4, prefill: str = "none",
        tiles: bool | None = None, wgmma: bool = True, arch: str = "sm_90a", prompt: int = 7,
        **options: Any) -> tuple[list[int], bytes]:  # fmt: skip
    own = caps(arch, sms=6)
    artifact, target = models.artifact("dense-small"), replace(own, wgmma=wgmma and own.wgmma)
    program = compile_program(artifact, target, CompileOptions(tp=tp, **(OPTIONS | options)), images=False)
    backend = EmulatorBackend(program, models.store("dense-small", "bf16"), transport=transport, tiles=tiles)
    session = Session(backend, prefill=prefill, columns=columns)
    tokens = [e.token for e in session.generate(Request(list(range(3, 3 + prompt)), 3, sampling=sampling))]
    state = np.concatenate([backend.read("recurrent1", rank) for rank in range(tp)], axis=1)
    return tokens, state[0].tobytes()


@cache
def alone(sampled: bool) -> tuple[list[int], bytes]:
    return run(1, SAMPLED if sampled else Sampling())


@pytest.mark.parametrize(("sampled", "transport"), [(False, "peer"), (True, "peer"), (True, "host"), (True, "staged")])
def test_two_ranks_equal_one(sampled: bool, transport: str) -> None:
    """Products push their sums; both ranks' words, mail and sequence numbers are checked at every exchange."""
    assert run(2, SAMPLED if sampled else Sampling(), transport) == alone(sampled)


@pytest.mark.parametrize("columns", [1, 4])
def test_unfused_exchanges_give_the_same_bits(columns: int) -> None:
    assert run(2, SAMPLED, "peer", columns, fused=False) == alone(True)


def test_slices_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every exchange of the residual stream as slices of bytes, as large ones are."""
    monkeypatch.setattr(exchange, "WORDS_UP_TO", {"host": 0, "peer": 0})
    assert run(2, SAMPLED, "host", fused=False) == alone(True)


@pytest.mark.parametrize("limit", [pytest.param(0, id="slices", marks=pytest.mark.slow), pytest.param(1 << 30, id="words")])
def test_prefill_chunks_of_two_ranks(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    """A chunk of fewer rows than its kernels have room for: rows past the count are neither sent nor awaited. Products send
    their tiles over peer memory; exchanges send words or slices over the host."""
    monkeypatch.setattr(exchange, "WORDS_UP_TO", {"host": limit, "peer": limit})
    results = [run(2, Sampling(), transport, prefill="chunks") for transport in ("peer", "host", "staged")]
    assert results[0] == results[1] == results[2]


@pytest.mark.parametrize("limit", [0, 1 << 30], ids=["slices", "words"])
@pytest.mark.parametrize(("prompt", "wire"), [(13, "bf16"), (19, "f32")])
def test_chunks_in_halves(monkeypatch: pytest.MonkeyPatch, limit: int, prompt: int, wire: str) -> None:
    """Over the host a chunk runs in halves: here with a part of the second one, then with none of it in the last chunk."""
    monkeypatch.setattr(exchange, "WORDS_UP_TO", {"host": limit, "peer": limit})
    options: dict[str, Any] = {"prefill": "chunks", "prompt": prompt, "prefill_chunk": 16, "test_chunks": True,
                               "exchange_prefill": wire, "score": False}  # fmt: skip
    assert run(2, Sampling(), "host", **options) == run(2, Sampling(), "staged", **options)


@pytest.mark.parametrize(("wire", "wgmma"), [
    pytest.param("bf16", False, id="bf16 on warp-level products", marks=pytest.mark.slow), pytest.param("f32", True, id="f32"),
])  # fmt: skip
def test_tiles_of_products_give_the_bits_of_exchanges(wire: str, wgmma: bool) -> None:
    """Whatever sends a chunk's sums, over either memory."""
    options: dict[str, Any] = {"prefill": "chunks", "wgmma": wgmma, "exchange_prefill": wire}
    want = run(2, Sampling(), "peer", fused=False, **options)
    for transport, tiles in (("peer", True), ("host", True), ("peer", False)):
        assert run(2, Sampling(), transport, tiles=tiles, **options) == want, (transport, tiles)


@pytest.mark.slow
def test_turing() -> None:
    """A whole program with bf16 products on FP32 units: the tokens of another architecture, and its state but for rounding."""
    tokens, state = run(1, Sampling(), prefill="chunks", arch="sm_75")
    others, other = run(1, Sampling(), prefill="chunks")
    ours, theirs = (np.frombuffer(raw, np.float32) for raw in (state, other))
    assert tokens == others and np.linalg.norm(ours - theirs) < 2.0**-10 * np.linalg.norm(theirs)


@pytest.mark.slow
def test_two_ranks_of_turing() -> None:
    assert run(2, Sampling(), "host", arch="sm_75") == run(1, Sampling(), arch="sm_75")
