"""A budget for thinking: the lane pauses on the device, the block is closed without sampling, the answer goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import caps
from compiler.program.model import Program
from runtime.backend import VMBackend
from runtime.cli.errors import INPUT, USAGE
from runtime.frontend.errors import OptionError
from runtime.frontend.frontend import Frontend, Prompt, ThinkingBudget
from runtime.frontend.output_stream import OutputStream, StreamOptions
from runtime.frontend.presets import SamplingOptions
from runtime.generate import Job, Outcome, generate
from runtime.open import ArtifactWeights
from runtime.session import Request, RequestError, Sampling, Session
from runtime.vm import Machine
from runtime.vm.weights import WeightStore
from tests.cli import small_model
from tests.cli.conftest import LIMITS, rejected, run_cli
from tests.cli.test_run import QUESTION, THINKING, ids_of, run

SAMPLED = Sampling(0.9, 0.95, 20, 0.0, 1.0, 0.2, seed=7)
CLOSING = [1, 2, 3, 4]  # its greedy answer holds </think> among the first 30 tokens


@cache
def planned() -> Program:
    return compile_program(small_model.opened(), caps("sm_90a"), CompileOptions(**LIMITS), images=False)


@cache
def store() -> WeightStore:
    return WeightStore(ArtifactWeights(small_model.opened()))


@cache
def own() -> Frontend:
    return Frontend.from_artifact(small_model.opened())


def session(**options: Any) -> Session:
    return Session(VMBackend(Machine(planned(), store())), **options)


def answer(prompt: list[int], count: int, sampling: Sampling | None = None) -> list[int]:
    return [e.token for e in session().generate(Request(prompt, count, sampling=sampling or Sampling()))]


# -- a lane that pauses


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("prefill", ["chunks", "none"])
@pytest.mark.parametrize("depth", [0, 1, 4])
@pytest.mark.parametrize("pause", [1, 5])
def test_a_pause_changes_no_token(depth: int, pause: int, prefill: str, sampling: Sampling) -> None:
    """Whatever was launched ahead, and with a neighbour that goes on."""
    prompt = list(range(50, 50 + 40))
    want, neighbour = answer(prompt, 12, sampling), answer([3, 4, 5], 20)
    run_ahead = session(depth=depth, prefill=prefill)
    lane = run_ahead.submit(Request(prompt, 12, sampling=sampling, pause=pause), 1)
    run_ahead.submit(Request([3, 4, 5], 20), 2)
    got: dict[int, list[int]] = {1: [], 2: []}
    idle = 0
    while run_ahead.active:
        for emission in run_ahead.advance():
            got[emission.lane].append(emission.token)
            assert emission.paused == (emission.lane == lane and len(got[lane]) == pause)
            idle += emission.paused
        if idle and idle < 4:
            idle += 1
            if idle == 4:  # some steps later
                run_ahead.resume(lane)
    assert got == {1: want, 2: neighbour}


@pytest.mark.parametrize("prefill", ["chunks", "none"])
def test_inserted_tokens_are_context_and_output(prefill: str) -> None:
    """What follows them is what follows a prompt that holds them."""
    prompt, forced = [9, 8, 7, 6], [100, 200, 300]
    head = answer(prompt, 5)
    tail = answer([*prompt, *head, *forced], 4)
    paused = session(prefill=prefill)
    lane, got = paused.submit(Request(prompt, 12, pause=5)), []
    while paused.active:
        for emission in paused.advance():
            got.append((emission.token, bool(emission.finish)))
            if emission.paused:
                paused.resume(lane, forced)
    assert [token for token, _ in got] == [*head, *forced, *tail]
    assert [last for _, last in got] == [False] * 11 + [True]


def test_a_pause_that_is_lifted_or_ends_the_lane() -> None:
    lifted = session()
    lane, got = lifted.submit(Request([5, 6], 9, pause=8)), []
    while lifted.active:
        for emission in lifted.advance():
            got.append(emission.token)
            assert not emission.paused
            if len(got) == 2:
                lifted.lift(lane)
    assert got == answer([5, 6], 9)
    assert [e.paused for e in session().generate(Request([5, 6], 4, pause=4))] == [False] * 4  # the limit itself


def test_what_cannot_be_resumed() -> None:
    one = session()
    lane = one.submit(Request([5, 6], 6, pause=3))
    with pytest.raises(RequestError, match="lane 0 is not paused"):
        one.resume(lane)
    while not any(e.paused for e in one.advance()):
        pass
    with pytest.raises(RequestError, match="3 tokens to insert after 3 do not fit max_new 6"):
        one.resume(lane, [1, 2, 3])
    with pytest.raises(RequestError, match="token 1 of the prompt is 99999"):
        one.resume(lane, [99999])
    one.resume(lane, [1, 2])
    assert sum(1 for _ in iter(lambda: one.advance() if one.active else None, None)) > 0


# -- budgets


def outcome_of(prompt: list[int], count: int, budget: ThinkingBudget | None) -> tuple[Outcome, OutputStream]:
    stream = OutputStream(own().tokenizer, StreamOptions(thinking=True))
    request = Request(prompt, count, pause=budget.tokens if budget else 0)
    (outcome,) = generate(session(), [Job(request, stream, budget)])
    return outcome, stream


@pytest.mark.parametrize("budget", [1, 3, 11])
def test_the_block_is_closed_at_the_budget(budget: int) -> None:
    prompt = own().prompt(QUESTION)
    close = own().thinking_budget(budget, Prompt(prompt.ids, "", True), own().sampling(SamplingOptions(max_new=60),
                                                                                      thinking=True), 384).close  # fmt: skip
    count = budget + len(close) + 5
    got, stream = outcome_of(prompt.ids, count, ThinkingBudget(budget, close))
    free = answer(prompt.ids, budget)
    assert got.ids == [*free, *close, *answer([*prompt.ids, *free, *close], 5)] and len(got.ids) == count
    text = own().tokenizer.decode
    assert stream.answer.reasoning.startswith(text(free)) and "the answer follows now" in stream.answer.reasoning
    assert stream.answer.content == text(got.ids[-5:]).lstrip() and str(got.finish) == "output-limit"
    assert stream.reasoning_tokens < budget + len(close)


@pytest.mark.parametrize("more", [0, 1, 2, 100])
def test_a_model_that_closes_it_in_time_is_not_disturbed(more: int) -> None:
    closes_at = answer(CLOSING, 30).index(own().tokenizer.id_of("</think>")) + 1
    budget = closes_at + more
    plain, _ = outcome_of(CLOSING, 30, None)
    got, stream = outcome_of(CLOSING, 30, ThinkingBudget(budget, (100, 200)))
    assert got.ids == plain.ids and stream.answer == outcome_of(CLOSING, 30, None)[1].answer


def test_one_token_short_of_it() -> None:
    ids = answer(CLOSING, 30)
    budget = ids.index(own().tokenizer.id_of("</think>"))
    got, _ = outcome_of(CLOSING, 30, ThinkingBudget(budget, (100, 200)))
    assert got.ids[: budget + 2] == [*ids[:budget], 100, 200]


def test_a_reasoning_stop_inside_what_is_inserted() -> None:
    stream = OutputStream(own().tokenizer, StreamOptions(thinking=True, reasoning_stops=("answer follows",)))
    close = tuple(own().tokenizer.encode("the answer follows now</think>"))
    (got,) = generate(session(), [Job(Request([5, 6], 60, pause=3), stream, ThinkingBudget(3, close))])
    assert got.stop == "answer follows" and len(got.ids) < 3 + len(close)


# -- the command line


def test_run_and_batch(program: Path, tmp_path: Path) -> None:
    template = tmp_path / "think.jinja"
    template.write_text(THINKING)
    result = run(program, "--prompt", QUESTION, "--max-new", 40, "--chat-template", template, "--thinking-budget", 7,
                 "--greedy", "--print-token-ids")  # fmt: skip
    assert result.code == 0 and "the answer follows now" in result.err and "follows now" not in result.text
    lines, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines.write_text(json.dumps({"prompt": QUESTION, "max_new": 40, "greedy": True, "thinking_budget": 7}) + "\n"
                     + json.dumps({"prompt": QUESTION, "max_new": 12, "greedy": True}) + "\n")  # fmt: skip
    batch = run_cli("batch", program, lines, "-o", out, "--device", "cpu", "--chat-template", template)
    assert batch.code == 0, batch.err
    first, second = (json.loads(line) for line in out.read_text().splitlines())
    assert first["ids"] == ids_of(result) and first["generated_tokens"] == 40
    assert first["text"].strip() == result.text.strip() and second["ids"][:7] == first["ids"][:7]
    assert "text" in second and second["text"] == ""


def test_refused(program: Path, dense_program: Path, tmp_path: Path, ids_file: Callable[[Any], Path]) -> None:
    template = tmp_path / "think.jinja"
    template.write_text(THINKING)
    thinking = [program, "--prompt", QUESTION, "--chat-template", template]
    for args, parts in (
        ([*thinking, "--thinking-budget", "0"], ["--thinking-budget 0", "at least 1"]),
        ([*thinking, "--thinking-budget", "x"], ["--thinking-budget 'x'"]),
        ([*thinking, "--thinking-budget", "20", "--max-new", "40"], ["--thinking-budget 20", "--max-new 41", "it is 40"]),
        ([*thinking, "--thinking-budget", "370", "--max-new", "400"], ["--thinking-budget 370", "--max-context", "it is 384"]),
        ([*thinking, "--thinking-budget", "9", "--raw-output"], ["--thinking-budget and --raw-output"]),
        ([*thinking, "--thinking-budget", "9", "--no-thinking"], ["--thinking-budget and --no-thinking"]),
        ([program, "--prompt", QUESTION, "--thinking-budget", "9"], ["the prompt opens no think block"]),
        ([dense_program, "--ids", ids_file([1]), "--thinking-budget", "9"], ["--thinking-budget", "need a tokenizer"]),
    ):
        rejected(run(*args), USAGE, *parts)
    lines = tmp_path / "in.jsonl"
    for value, part in (({"thinking_budget": "9"}, "must be an integer"), ({"thinking_budget": True}, "must be an integer"),
                        ({"thinking_budget": 9, "thinking": False}, "excludes thinking false"),
                        ({"thinking_budget": 500, "max_new": 60}, "thinking-budget 500")):  # fmt: skip
        lines.write_text(json.dumps({"prompt": QUESTION} | value))
        result = run_cli("batch", program, lines, "-o", tmp_path / "out.jsonl", "--device", "cpu", "--chat-template", template)
        rejected(result, INPUT, "line 1", part)
    with pytest.raises(OptionError):
        own().thinking_budget(3, Prompt([1], "", False), own().sampling(SamplingOptions(), thinking=False), 384)
