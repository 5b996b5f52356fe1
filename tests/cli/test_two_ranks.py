"""Commands on programs for two ranks: options, refusals, the VM as both ranks, plans; a made-up driver stands for the GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.program.io import load
from compiler.program.model import EXCHANGE
from runtime.cuda.driver import api
from tests import models
from tests.cli.conftest import plan_folder, rejected, run_cli
from tests.cli.fake_driver import FakeDriver

DENSE: dict[str, Any] = {"max_context": 384, "prefill_chunk": 128, "pairs": ((1, 1), (1, 4))}
PROMPT = list(range(3, 20))


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plan_folder(tmp_path_factory.mktemp("programs") / "one", models.artifact("dense-small"), **DENSE)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return plan_folder(tmp_path_factory.mktemp("programs") / "two", models.artifact("dense-small"), tp=2, **DENSE)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    yield FakeDriver(count=2).install(monkeypatch)
    api.cache_clear()


def test_both_ranks_on_the_cpu_answer_as_one(one: Path, two: Path, ids_file: Callable[[Any], Path]) -> None:
    """Penalties and a seed on; --check-ranks says what it compared."""
    sampling = ("--temperature", 0.9, "--top-k", 20, "--presence-penalty", 1, "--frequency-penalty", 0.2, "--seed", 7)
    answers = []
    for program, extra in ((one, ()), (two, ("--check-ranks",))):
        result = run_cli("run", program, "--device", "cpu", "--ids", ids_file(PROMPT), "--max-new", 6, "--prefill", "none",
                         *sampling, *extra)  # fmt: skip
        assert result.code == 0, result.err
        answers.append(result.text)
    assert answers[0] == answers[1] and len(answers[0].split()) == 6
    assert result.summary("tensor parallel") == "2" and result.summary("ranks compared").endswith("steps, no difference")


def test_logits_and_batch(one: Path, two: Path, ids_file: Callable[[Any], Path], tmp_path: Path) -> None:
    rows = []
    for i, program in enumerate((one, two)):
        out = tmp_path / f"{i}.npy"
        result = run_cli("logits", program, "--device", "cpu", "--ids", ids_file(PROMPT), "-o", out)
        assert result.code == 0, result.err
        rows.append(np.load(out))
    assert rows[0].shape == rows[1].shape == (len(PROMPT), load(one).spec.vocab_rows)
    assert np.abs(rows[0] - rows[1]).max() < 0.05 * np.abs(rows[0]).max()
    requests, answers = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests.write_text(json.dumps({"ids": PROMPT, "max_new": 3, "greedy": True}) + "\n")
    result = run_cli("batch", two, requests, "-o", answers, "--device", "cpu", "--check-ranks")
    assert result.code == 0, result.err
    assert len(json.loads(answers.read_text())["ids"]) == 3 and result.summary("ranks compared").split()[0].isdigit()


def test_compile_for_two(no_nvrtc: list[str], gpus: FakeDriver, tmp_path: Path) -> None:
    """--tp 2 writes a program of two ranks; --devices A,A one whose ranks have half the multiprocessors each."""
    artifact = models.artifact("dense-small").path
    whole = run_cli("compile", artifact, "-o", tmp_path / "whole", "--arch", "sm_90a", "--tp", 2, "--exchange", "bf16",
                    "--prefill-chunk", 128)  # fmt: skip
    assert whole.code == 0, whole.err
    built = load(tmp_path / "whole")
    assert (built.tp, built.caps.sms, built.options["exchange"]) == (2, 132, "bf16") and whole.summary("tensor parallel") == "2"
    shared = run_cli("compile", artifact, "-o", tmp_path / "shared", "--devices", "0,0", "--prefill-chunk", 128)
    assert shared.code == 0 and "a test mode" in shared.err
    assert (load(tmp_path / "shared").tp, load(tmp_path / "shared").caps.sms) == (2, 66)


@pytest.mark.parametrize(("options", "code", "parts"), [
    (("--tp", 3), 2, ("--tp 3", "power of two")),
    (("--tp", 4), 2, ("--tp 4", "KV heads")),
    (("--tp", 9), 2, ("--tp 9", "1…8")),
    (("--exchange", "fp32"), 2, ("--exchange fp32", "--tp 2")),
    (("--tp", 2, "--exchange", "fp8"), 2, ("--exchange 'fp8'", "fp32, bf16")),
    (("--tp", 2, "--devices", "0"), 2, ("--tp 2", "1 device(s)")),
    (("--devices", "0,2"), 3, ("--devices 0,2", "2 GPU(s)")),
    (("--devices", "0,x"), 2, ("--devices '0,x'", "0,1")),
    (("--devices", "0,"), 2, ("--devices '0,'",)),
    (("--devices", "0,1", "--arch", "sm_90a"), 2, ("--devices 0,1", "--arch sm_90a")),
])  # fmt: skip
def test_compile_refuses(gpus: FakeDriver, untouched: Path, options: tuple[Any, ...], code: int,
                         parts: tuple[str, ...]) -> None:  # fmt: skip
    artifact = models.artifact("dense-small").path
    rejected(run_cli("compile", artifact, "-o", untouched / "program", "--prefill-chunk", 128, *options), code, *parts)
    assert not list(untouched.iterdir())


@pytest.mark.parametrize(("which", "options", "code", "parts"), [
    ("two", (), 2, ("the program has 2 rank(s)", "0,1")),
    ("two", ("--devices", "0"), 2, ("--devices 0", "2 rank(s)")),
    ("two", ("--devices", "0,1,1"), 2, ("2 rank(s)",)),
    ("two", ("--devices", "0,5"), 3, ("--devices 0,5", "2 GPU(s)")),
    ("two", ("--devices", "1,0", "--device", "cuda:0"), 2, ("--device cuda:0", "--devices 1,0")),
    ("two", ("--devices", "0,1", "--device", "cpu"), 2, ("--device cpu",)),
    ("two", ("--devices", "0,1", "--transport", "usb"), 2, ("--transport 'usb'", "staged")),
    ("two", ("--devices", "0,1", "--exchange", "bf16"), 2, ("--exchange bf16", "send fp32")),
    ("two", ("--device", "cpu", "--transport", "peer"), 2, ("--transport peer", "CPU")),
    ("one", ("--devices", "0,1"), 2, ("the program has 1 rank(s)",)),
    ("one", ("--transport", "peer"), 2, ("--transport", "--devices A,B")),
    ("one", ("--check-ranks",), 2, ("--check-ranks",)),
    ("one", ("--exchange", "fp32"), 2, ("--exchange fp32", "one rank")),
])  # fmt: skip
def test_run_refuses(request: pytest.FixtureRequest, gpus: FakeDriver, ids_file: Callable[[Any], Path], which: str,
                     options: tuple[Any, ...], code: int, parts: tuple[str, ...]) -> None:  # fmt: skip
    program = request.getfixturevalue(which)
    rejected(run_cli("run", program, "--ids", ids_file(PROMPT), "--max-new", 2, *options), code, *parts)


def test_a_whole_card_program_is_refused_on_a_shared_one(two: Path, gpus: FakeDriver, ids_file: Callable[[Any], Path]) -> None:
    result = run_cli("run", two, "--devices", "0,0", "--ids", ids_file(PROMPT))
    assert result.code == 3 and "--devices 0,0: a test mode" in result.lines[-2]
    assert "compiled for 66 multiprocessors (this one: 132)" in result.lines[-1]


def test_plan_shows_every_rank_and_the_exchange(gpus: FakeDriver) -> None:
    path = models.artifact("dense-small").path
    report = json.loads(run_cli("plan", path, "--tp", 2, "--prefill-chunk", 128, "--json").text)
    program = models.program("dense-small", tp=2, max_context=512, prefill_chunk=128)
    size = program.regions[0][EXCHANGE]
    assert size > 4096 and report["tp"] == 2 and len(report["devices"]) == 2
    for device in report["devices"]:
        assert device["memory"]["exchange"] == size and sum(device["memory"].values()) == device["planned"] and device["fits"]
    assert report["host_exchange_bytes"] == 2 * size
    text = run_cli("plan", path, "--tp", 2, "--prefill-chunk", 128).text
    assert "2 ranks" in text and "device 1 exchange" in text and "where exchanges go through the host" in text
    alone = json.loads(run_cli("plan", path, "--prefill-chunk", 128, "--json").text)
    assert "exchange" not in alone["devices"][0]["memory"] and alone["host_exchange_bytes"] == 0


def test_ranks_that_share_a_card_must_fit_together(gpus: FakeDriver) -> None:
    path = models.artifact("dense-small").path
    planned = json.loads(run_cli("plan", path, "--tp", 2, "--prefill-chunk", 128, "--json").text)["devices"]
    gpus.free = planned[0]["needed"] + 4096
    assert run_cli("plan", path, "--devices", "0,1", "--prefill-chunk", 128).code == 0
    assert run_cli("plan", path, "--devices", "0,0", "--prefill-chunk", 128).code == 3


@pytest.mark.parametrize(("options", "code", "parts"), [
    ((), 2, ("--devices",)),
    (("--devices", "0"), 2, ("--devices 0", "two")),
    (("--devices", "0,1", "-t", "0"), 2, ("-t '0'",)),
    (("--devices", "0,1", "-n", "1"), 2, ("-n 1",)),
    (("--devices", "0,1", "-o", "csv"), 2, ("-o 'csv'", "json")),
    (("--devices", "0,1", "--transport", "wire"), 2, ("--transport 'wire'",)),
])  # fmt: skip
def test_bench_exchange_refuses(gpus: FakeDriver, options: tuple[Any, ...], code: int, parts: tuple[str, ...]) -> None:
    rejected(run_cli("bench", "exchange", *options), code, *parts)


def test_bench_still_takes_a_program() -> None:
    result = run_cli("bench", "nowhere.ninfer")
    assert result.code != 0 and "exchange" not in result.err
