"""``ninferc run … --check-ranks`` from end to end on the example, both ranks on the CPU, on one GPU and on two: the answer of
one rank, every step compared, and exit code 3 where the ranks differ."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

from compiler.ir.op import Array
from compiler.ir.types import Value
from runtime.cuda.transport import TRANSPORTS
from runtime.vm.weights import WeightReader, WeightStore
from tests import card, models
from tests.cli.conftest import Result, plan_folder, run_cli

QUESTION = models.ROOT / "examples" / "question.json"
GREEDY = ("--greedy",)
SAMPLED = ("--temperature", 0.9, "--top-k", 20, "--presence-penalty", 1, "--frequency-penalty", 0.2, "--seed", 7,
           "--ignore-eos")  # fmt: skip
AHEAD = 2  # steps that a session launches beyond those whose results it waits for
Run = Callable[..., Result]


@pytest.fixture(params=["cpu", pytest.param("0,0", marks=pytest.mark.gpu), pytest.param("0,1", marks=pytest.mark.gpu2)])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run(ranks, *options)``: the command on this place. On GPUs it compiles the example, in the CPU's place there are
    planned programs and a shorter prompt."""
    place = str(request.param)
    if place == "cpu":
        folder = tmp_path_factory.mktemp("programs")
        options: dict[str, Any] = {"max_context": 256, "prefill_chunk": 128, "score": False}
        programs = [plan_folder(folder / str(tp), models.artifact("example"), tp=tp, **options) for tp in (1, 2)]

    def command(ranks: int, *options: object) -> Result:
        if place == "cpu":
            asked: tuple[object, ...] = (programs[ranks - 1], "--device", "cpu", "--prompt", "What is the vault code?")
        else:
            asked = (models.EXAMPLE, "--devices", place[: 2 * ranks - 1], "--messages", QUESTION)
        checked = ("--check-ranks",) if ranks > 1 else ()
        with nullcontext() if place == "cpu" else card.alone():
            return run_cli("run", *asked, "--max-new", 20, "--raw-output", "--print-token-ids", *checked, *options)

    return command


def answer_ids(result: Result) -> str:
    return next(line for line in result.lines if line.startswith("answer ids "))


def compared(result: Result) -> int:
    """Steps after which the ranks were compared, as the summary says."""
    found = re.fullmatch(r"([0-9]+) steps, no difference", result.summary("ranks compared"))
    assert found is not None
    return int(found[1])


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "penalties and seed"])
def test_two_ranks_answer_as_one(run: Run, sampling: tuple[object, ...]) -> None:
    """The same text and ids through decode steps, each of them compared; through prefill chunks the ranks agree as well."""
    one, two = (run(ranks, "--prefill", "none", *sampling) for ranks in (1, 2))
    chunks = run(2, *sampling)
    assert one.code == two.code == chunks.code == 0, (one.err, two.err, chunks.err)
    assert two.out == one.out and two.out.strip() and answer_ids(two) == answer_ids(one)
    assert [result.summary("tensor parallel") for result in (one, two, chunks)] == ["1", "2", "2"]
    prompt, new = (int(two.summary(f"{what} tokens")) for what in ("prompt", "generated"))
    assert prompt + new - 1 <= compared(two) <= prompt + new - 1 + AHEAD
    assert 0 < compared(chunks) < prompt + new - 1
    assert "ranks compared" not in one.err
    if "on cuda:" in two.summary("target"):
        assert sampling != GREEDY or b"7421" in two.out  # the question is answered
        transport, wire = two.summary("transport").split(", ")
        assert transport in TRANSPORTS and wire == "fp32"


def test_a_difference_ends_the_run(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm before the output head has other weights on rank 1: seen after the first step, before anything is printed."""
    norm = models.artifact("example").object_index("text/final_norm")
    decode, read_into = WeightStore.decode, WeightReader.read_into

    def spoilt(value: Value) -> bool:
        return value.rank == 1 and value.source is not None and value.source.object_index == norm

    def decoded(self: WeightStore, value: Value, *args: Any) -> Array:
        found: Array = decode(self, value, *args)
        return found + 1 if spoilt(value) else found

    def read(self: WeightReader, value: Value, begin: int, out: Array) -> None:
        read_into(self, value, begin, out)
        if spoilt(value):
            out.view(np.uint16)[:] = 0x4000  # 2.0 in bf16

    monkeypatch.setattr(WeightStore, "decode", decoded)
    monkeypatch.setattr(WeightReader, "read_into", read)
    result = run(2, "--prefill", "none", "--greedy")
    assert result.code == 3 and result.out == b""
    assert result.lines[-1] == "ninferc: step 0: the hidden rows before the output head differ between rank 0 and rank 1"
