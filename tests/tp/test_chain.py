"""Self-tests of a transport, the choice, and the exchange benchmark on an emulated pair: every value, every planted fault."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest

from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import caps
from compiler.ir.op import bf16_round
from compiler.kernels import exchange
from compiler.ops.exchange_begin import number
from compiler.program.model import Program
from runtime.bench import exchange as measured
from runtime.cuda.chain import payloads
from runtime.cuda.driver import DeviceError
from runtime.cuda.self_test import Trial, choose, self_test
from tests import models
from tests.emulator import toolchain
from tests.tp import emulated_pair
from tests.tp.emulated_pair import MEMORY, Device, Graph, Modules

pytestmark = pytest.mark.skipif(bool(toolchain.missing_reason()), reason=str(toolchain.missing_reason()))
OPTIONS: dict[str, Any] = {"max_context": 128, "prefill_chunk": 128, "tp": 2, "pairs": ((1, 1), (1, 4))}


@pytest.fixture(autouse=True)
def pair(monkeypatch: pytest.MonkeyPatch) -> Any:
    emulated_pair.install(monkeypatch)
    monkeypatch.setattr("runtime.cuda.self_test.TEST_EXCHANGES", 3)
    monkeypatch.setattr("runtime.cuda.self_test.TEST_COLUMNS", 3)
    monkeypatch.setattr("runtime.cuda.self_test.TEST_LIMIT_MS", 1e9)
    before = set(MEMORY.spans)
    yield monkeypatch
    assert set(MEMORY.spans) == before, "memory of a test is not released"


def planned(slices: bool, patch: pytest.MonkeyPatch) -> tuple[Program, Any, list[Any]]:
    """A program whose prefill exchanges are slices, or words, on a pair."""
    patch.setattr(exchange, "WORDS_UP_TO", dict.fromkeys(("host", "peer"), 8192 if slices else 1 << 30))
    program = compile_program(models.artifact("dense-small"), caps("sm_90a", sms=4), CompileOptions(**OPTIONS), images=False)
    return program, Modules(program.kernels), [Device(0), Device(1)]


@pytest.mark.parametrize("wire", ["f32", "bf16"])
def test_every_bit_of_a_payload_matters(wire: str) -> None:
    """Sums are exact in bf16, sets add up to zero, and a flipped bit of any value of either rank changes the sum's bf16."""
    parts, totals = payloads(np.random.default_rng(3), (4, 32), wire)
    assert not sum(totals).any() and all(np.array_equal(bf16_round(total), total) for total in totals)
    for (own, other), total in zip(parts, totals, strict=True):
        assert np.array_equal(own + other, total)
        if wire == "bf16":
            assert np.array_equal(bf16_round(own), own) and np.array_equal(bf16_round(other), other)
        for part, rest in ((own, other), (other, own)):
            for bit in range(16 if wire == "bf16" else 0, 32):
                flipped = (part.view(np.uint32) ^ np.uint32(1 << bit)).view(np.float32)
                with np.errstate(over="ignore", invalid="ignore"):
                    assert np.all(bf16_round(flipped + rest) != total), bit
    differ = [np.any(a[0] != b[0]) for a, b in ((parts[0], parts[2]), (parts[1], parts[0]), (parts[2], parts[1]))]
    assert all(differ), "a set equals the one two places before"


@pytest.mark.parametrize("slices", [False, True], ids=["words", "slices"])
@pytest.mark.parametrize("transport", ["peer", "host", "staged"])
def test_a_sound_transport_passes(pair: pytest.MonkeyPatch, transport: str, slices: bool) -> None:
    """Both the words of one column and, where a program has them, the slices of many."""
    program, modules, devices = planned(slices, pair)
    trial = self_test(program, modules, devices, transport)
    assert trial.problem == "" and trial.microseconds > 0
    used = {modules.specs[entry].params.get(f"{transport}_slices") for entry in modules._kernels}
    assert used >= ({False, True} if slices and transport != "staged" else {False} if transport != "staged" else set())


def damage(patch: pytest.MonkeyPatch, where: str) -> None:
    """Spoil a byte of every mail's words or bytes, of either rank, once sent."""
    put = Graph._put

    def spoil(named: dict[str, Any], spec: Any, check: bool = False) -> None:
        put(named, spec, check)
        mail = MEMORY.at(named["outbox"])
        words, slices, nbytes = named["slot_words"], named["slot_slices"], named["slot_bytes"]
        slot = number(int(MEMORY.at(named["sequence"])[:4].view(np.uint32)[0]), named["ordinal"]) % 2
        start, size = (8 * words * slot, 8 * words) if where == "words" else (
            2 * (8 * words + 64 * slices) + nbytes * slot, nbytes)  # fmt: skip
        used = [i for i in range(start, start + size, 8) if mail[i : i + 4].any()]
        if not check and used:
            mail[used[len(used) // 2] + 1] ^= 0x10

    patch.setattr(Graph, "_put", staticmethod(spoil))


@pytest.mark.parametrize("where", ["words", "slices"])
def test_a_spoilt_byte_is_noticed(pair: pytest.MonkeyPatch, where: str) -> None:
    program, modules, devices = planned(True, pair)
    damage(pair, where)
    trial = self_test(program, modules, devices, "host")
    assert trial.problem.startswith(f"{where}: ") and "arrived wrong at rank" in trial.problem


def test_a_peer_that_sends_nothing_is_noticed(pair: pytest.MonkeyPatch) -> None:
    program, modules, devices = planned(False, pair)
    pair.setattr(Graph, "_put", staticmethod(lambda *args, **kwargs: None))
    assert self_test(program, modules, devices, "peer").problem == "words: what the other rank sent did not arrive"


def test_the_faster_one_is_chosen_and_the_rest_has_a_reason(pair: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ninferc")
    program, modules, devices = planned(False, pair)
    assert choose(program, modules, devices) in ("peer", "host")
    assert "is not used:" in caplog.text and "µs" in caplog.text and "staged" not in caplog.text
    caplog.clear()
    assert choose(program, modules, devices, corrupt=frozenset({"peer"})) == "host"
    assert "transport peer is not used: words: 1 of 128 values arrived wrong at rank 0" in caplog.text
    assert choose(program, modules, devices, corrupt=frozenset({"peer", "host"})) == "staged"
    with pytest.raises(DeviceError, match="no transport between devices 0 and 1 works .peer: words: 1 of 128"):
        choose(program, modules, devices, "peer", frozenset({"peer"}))
    with pytest.raises(DeviceError, match="peer: .*; host: .*; staged: "):
        choose(program, modules, devices, corrupt=frozenset({"peer", "host", "staged"}))
    pair.setattr("runtime.cuda.self_test.TEST_LIMIT_MS", 0.0)
    assert "3 exchanges took" in self_test(program, modules, devices, "peer").problem
    pair.setattr("runtime.cuda.self_test.peer_access", lambda devices: "device 0 cannot reach the memory of device 1")
    assert self_test(program, modules, devices, "peer").problem == "device 0 cannot reach the memory of device 1"


def test_auto_takes_the_faster(pair: pytest.MonkeyPatch) -> None:
    """As measured on the pair; staged copies are measured only where nothing else works."""
    times = {"peer": 5.0, "host": 3.0}
    pair.setattr("runtime.cuda.self_test.self_test", lambda program, modules, devices, transport, corrupt: Trial(
        transport, times.get(transport, 0.0), "" if transport in times else "not asked for"))  # fmt: skip
    program: Any = None
    assert choose(program, program, []) == "host"
    times["host"] = 9.0
    assert choose(program, program, []) == "peer"
    del times["peer"]
    assert choose(program, program, []) == "host"


@pytest.fixture
def small(pair: pytest.MonkeyPatch) -> None:
    for name, value in (("WIDTH", 256), ("INNER", 128), ("CHUNK", 6)):
        pair.setattr(measured, name, value)


@pytest.mark.parametrize("exchanges", [2, 3])
@pytest.mark.parametrize("wire", ["f32", "bf16"])
@pytest.mark.parametrize("limit", [0, 1 << 30], ids=["slices", "words"])
def test_the_benchmark_checks_every_value(small: None, pair: pytest.MonkeyPatch, limit: int, wire: str, exchanges: int) -> None:
    """Every transport gives the same digest; a rank that computes something else ends the measurement."""
    pair.setattr(exchange, "WORDS_UP_TO", dict.fromkeys(("host", "peer"), limit))
    rows = [measured.bench([0, 1], 3, wire, transport, exchanges, 3, delays=transport == "host")
            for transport in ("peer", "host", "staged")]  # fmt: skip
    assert len({row.digest for row in rows}) == 1
    assert rows[0].nbytes == 3 * 256 * (2 if wire == "bf16" else 4)
    assert rows[1].case == f"exchange host {rows[0].nbytes // 1024} KiB x{exchanges} unfused devices 0,1"
    damage(pair, "slices" if limit == 0 else "words")
    with pytest.raises(DeviceError, match="transport peer: .* arrived wrong"):
        measured.bench([0, 1], 3, wire, "peer", exchanges, 2)


@pytest.mark.parametrize(("columns", "kib"), [(2, 2), (70, 35)], ids=["words", "tiles"])
@pytest.mark.parametrize("transport", ["peer", "host", "staged"])
def test_pushed_and_sent_sums_are_the_same(small: None, transport: str, columns: int, kib: int) -> None:
    fused, unfused = measured.bench_fused([0, 0], columns, transport, 3, 2)
    assert fused.digest == unfused.digest
    assert fused.case == f"exchange {transport} {kib} KiB x3 fused devices 0,0"


def test_rows_of_a_pair(small: None, pair: pytest.MonkeyPatch) -> None:
    """All transports where peers reach each other, all but peer where they do not; asked for by name it is an error."""
    pair.setattr(measured, "bench", lambda devices, columns, wire, transport, exchanges, replays=1: measured.ExchangeRow(
        f"{transport} {columns} {wire} x{exchanges}", transport, 0, 1.0, ""))  # fmt: skip
    pair.setattr(measured, "bench_fused", lambda devices, columns, transport, exchanges: [
        measured.ExchangeRow(f"{transport} {columns} fused", transport, 0, 1.0, "")])  # fmt: skip
    cases = [row.case for row in measured.run([0, 1], (1, 64), exchanges=16)]
    assert cases[:7] == ["peer 1 f32 x16", "peer 1 bf16 x16", "peer 1 fused", "peer 64 f32 x16", "peer 64 bf16 x16",
                         "peer 6 bf16 x2", "peer 6 fused"]  # fmt: skip
    assert len(cases) == 21
    pair.setattr(measured, "peer_access", lambda devices: "device 0 cannot reach the memory of device 1")
    assert {row.transport for row in measured.run([0, 1], (1,), exchanges=16)} == {"host", "staged"}
    with pytest.raises(DeviceError, match="cannot reach"):
        list(measured.run([0, 1], (1,), ("peer",)))
    assert np.all([row.microseconds == 1.0 for row in measured.run([0, 1], (1,))])
