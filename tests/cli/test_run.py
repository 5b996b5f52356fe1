"""``ninferc run``: what goes to stdout and what to stderr, and that the answer is the session's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import caps
from compiler.program.io import load, save
from runtime.backend import VMBackend
from runtime.frontend.frontend import Frontend
from runtime.frontend.presets import SamplingOptions
from runtime.open import ArtifactWeights
from runtime.session import Request, Session
from runtime.vm import Machine
from runtime.vm.weights import WeightStore
from tests import models
from tests.cli import small_model
from tests.cli.conftest import LIMITS, Result, plan_folder, rejected, run_cli

QUESTION = "What is the capital of France?"
THINKING = small_model.TEMPLATE.replace("enable_thinking is defined and enable_thinking", "true")


def run(program: Path, *args: object) -> Result:
    return run_cli("run", program, "--device", "cpu", *args)


@pytest.fixture(scope="module")
def own() -> Frontend:
    return Frontend.from_artifact(small_model.opened())


@pytest.fixture(scope="module")
def expected() -> Callable[..., list[int]]:
    """Greedy ids of a session of its own."""
    artifact = small_model.opened()
    planned = compile_program(artifact, caps("sm_90a"), CompileOptions(**LIMITS), images=False)
    store = WeightStore(ArtifactWeights(artifact))

    def answer(prompt: list[int], count: int, stops: tuple[int, ...] = ()) -> list[int]:
        session = Session(VMBackend(Machine(planned, store)))
        return [emission.token for emission in session.generate(Request(prompt, count, stops))]

    return answer


def ids_of(result: Result, which: str = "answer") -> list[int]:
    line = next(line for line in result.lines if line.startswith(f"{which} ids "))
    return [int(word) for word in line.split()[2:]]


def test_an_answer(program: Path, own: Frontend, expected: Callable[..., list[int]]) -> None:
    result = run(program, "--prompt", QUESTION, "--max-new", 40, "--print-token-ids")
    assert result.code == 0
    prompt = own.prompt(QUESTION)
    ids = expected(prompt.ids, 40, own.eos_ids)
    stream = own.output_stream(prompt, own.sampling(SamplingOptions(), thinking=prompt.thinking))
    said = "".join(getattr(event, "text", "") for token in ids for event in stream.feed(token))
    assert len(ids) == 40 and said and result.text == said.rstrip("\n") + "\n"
    assert ids_of(result) == ids and ids_of(result, "prompt") == prompt.ids
    assert QUESTION not in result.text and "\r" not in result.err and "\x1b" not in result.err
    assert result.summary("prompt tokens") == str(len(prompt.ids)) and result.summary("generated tokens") == "40"
    assert result.summary("finish reason") == "output-limit" and result.summary("sampling") == "greedy"
    assert result.summary("kv pages used / max") == "1 / 24" and result.summary("target") == "sm_90a on cpu, engine numerics"
    for row in ("prepare", "prefill", "decode", "total", "prefill tok/s", "decode tok/s", "rope", "artifact file", "weights"):
        assert result.summary(row)


def test_the_committed_example_answers(no_nvrtc: list[str]) -> None:
    result = run(models.EXAMPLE, "--prompt", QUESTION, "--max-new", 4, "--raw-output")
    assert result.code == 0 and result.text.startswith("The text says:") and len(no_nvrtc) > 20


def test_reasoning_goes_to_stderr(program: Path, tmp_path: Path, own: Frontend) -> None:
    template = tmp_path / "think.jinja"
    template.write_text(THINKING)
    result = run(program, "--prompt", QUESTION, "--max-new", 12, "--chat-template", template, "--print-token-ids")
    ids = ids_of(result)
    assert result.code == 0 and own.tokenizer.decode(ids).strip() in result.err and result.out == b""
    assert own.tokenizer.decode(ids_of(result, "prompt")).endswith("<think>")
    word = own.tokenizer.decode(ids[4:6])
    stopped = run(program, "--prompt", QUESTION, "--max-new", 12, "--chat-template", template, "--reasoning-stop", word)
    assert stopped.summary("finish reason") == f"stop-string {word!r}" and stopped.out == b""


def test_raw_output_holds_every_token(program: Path, own: Frontend, ids_file: Callable[[Any], Path],
                                      expected: Callable[..., list[int]]) -> None:  # fmt: skip
    """This prompt's answer contains </think>, which only --raw-output leaves out of the reasoning split."""
    ids = expected([1, 2, 3, 4], 30)
    assert own.tokenizer.id_of("</think>") in ids
    result = run(program, "--ids", ids_file([1, 2, 3, 4]), "--max-new", 30, "--raw-output")
    assert result.text.rstrip("\n") == own.tokenizer.decode(ids).rstrip("\n") and result.text.endswith("\n")


@pytest.mark.parametrize("length", [5, 40, 140])
def test_prefill_none_gives_the_same_tokens(program: Path, ids_file: Callable[[Any], Path], length: int,
                                            expected: Callable[..., list[int]]) -> None:  # fmt: skip
    prompt = [(7 * n) % 4000 for n in range(length)]
    results = [run(program, "--ids", ids_file(prompt), "--max-new", 5, "--prefill", mode, "--print-token-ids", "--ignore-eos")
               for mode in ("chunks", "none")]  # fmt: skip
    assert ids_of(results[0]) == ids_of(results[1]) == expected(prompt, 5)


def test_messages(program: Path, tmp_path: Path, own: Frontend) -> None:
    file = tmp_path / "talk.json"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    file.write_text(json.dumps({"messages": messages}))
    talk = run(program, "--messages", file, "--max-new", 2, "--print-token-ids")
    assert talk.code == 0
    text = own.tokenizer.decode(ids_of(talk, "prompt"))
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n" + QUESTION)


def test_stop_strings_cancel_the_lane(program: Path, own: Frontend, ids_file: Callable[[Any], Path],
                                      expected: Callable[..., list[int]]) -> None:  # fmt: skip
    words = own.tokenizer.decode(expected([9, 8, 7], 40))
    stop = words[25:30]
    result = run(program, "--ids", ids_file([9, 8, 7]), "--max-new", 40, "--stop", stop, "--ignore-eos")
    assert result.code == 0 and result.text.strip() == words[: words.index(stop)].strip()
    assert result.summary("finish reason") == f"stop-string {stop!r}"
    assert int(result.summary("generated tokens")) < 40


def test_stop_ids(program: Path, ids_file: Callable[[Any], Path], expected: Callable[..., list[int]]) -> None:
    ids = expected([9, 8, 7], 20)
    result = run(program, "--ids", ids_file([9, 8, 7]), "--stop-token-id", ids[7], "--print-token-ids", "--ignore-eos")
    assert result.summary("finish reason") == f"stop-token {ids[7]}"
    assert ids_of(result) == ids[: ids.index(ids[7]) + 1]


def test_sampling_is_reproducible(program: Path) -> None:
    draw = ["--prompt", QUESTION, "--max-new", 8, "--temperature", "1.0", "--print-token-ids"]
    one, again, two = (run(program, *draw, "--seed", seed) for seed in (1, 1, 2))
    assert ids_of(one) == ids_of(again) != ids_of(two)
    assert one.summary("sampling").startswith("temperature 1 ") and one.summary("sampling").endswith("seed 1")
    greedy = run(program, *draw, "--greedy")
    assert ids_of(greedy) == ids_of(run(program, *draw[:4], "--print-token-ids")) != ids_of(one)
    assert greedy.summary("sampling") == "greedy"


def test_context_capacity_ends_an_answer(dense_program: Path, ids_file: Callable[[Any], Path]) -> None:
    ids = models.Goldens("dense-small").ids(300)
    result = run(dense_program, "--ids", ids_file(ids), "--max-new", 200)
    assert result.code == 0 and result.summary("finish reason") == "context-capacity"
    assert int(result.summary("generated tokens")) == 384 - 300 + 1  # the last token needs no place of its own


def test_without_a_tokenizer_ids_are_printed(dense_program: Path, ids_file: Callable[[Any], Path]) -> None:
    """The goldens' greedy tokens, in exact numerics."""
    goldens = models.Goldens("dense-small")
    result = run(dense_program, "--ids", ids_file(goldens.ids(7)), "--max-new", 8, "--numerics", "exact")
    assert result.code == 0 and "no tokenizer" in result.err and "exact numerics" in result.summary("target")
    assert [int(word) for word in result.text.split()] == [int(token) for token in goldens["greedy_7"][:8]]
    rejected(run(dense_program, "--prompt", "x"), 1, "--prompt", "tokenizer.json", "--ids")
    rejected(run(dense_program, "--ids", ids_file([1]), "--stop", "x"), 2, "--stop", "tokenizer")
    rejected(run(dense_program, "--ids", ids_file([1]), "--chat-template", "x"), 2, "--chat-template")


def test_an_artifact_is_compiled_once_into_the_cache(no_nvrtc: list[str], tmp_path: Path,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    monkeypatch.setenv("NINFERC_CACHE", str(tmp_path / "cache"))
    command = ["run", small_model.small_artifact(), "--prompt", QUESTION, "--max-new", 3]
    first = run_cli(*command)
    assert first.code == 0 and "kernels for sm_90a" in first.err
    assert "no NVIDIA GPU is visible: the program runs on the CPU" in first.err  # nobody asked for the CPU
    count = len(no_nvrtc)
    assert count > 15 and len(list((tmp_path / "cache" / "programs").iterdir())) == 1
    again = run_cli(*command, "--device", "cpu")
    assert again.out == first.out and len(no_nvrtc) == count and "kernels for" not in again.err
    other = run_cli(*command, "--device", "cpu", "--max-context", "256", "--arch", "sm_120a")
    assert other.out == first.out and len(no_nvrtc) > count and "kernels for sm_120a" in other.err
    for folder in (tmp_path / "cache" / "programs").iterdir():  # a crash or a bad disk
        manifest = folder / "program.json"
        manifest.write_bytes(manifest.read_bytes()[:-10])
    assert run_cli(*command, "--device", "cpu").out == first.out


def test_a_program_finds_its_artifact(tmp_path: Path, ids_file: Callable[[Any], Path]) -> None:
    """By the recorded relative path: both may move together; alone it needs --artifact."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "model.ninfer").write_bytes(small_model.small_artifact().read_bytes())
    program = plan_folder(home / "program", small_model.opened(), max_context=64, prefill_chunk=128)
    loaded = load(program)
    loaded.options["artifact_path"] = "../model.ninfer"
    save(loaded, program)
    moved = tmp_path / "moved"
    home.rename(moved)
    command = ["--ids", ids_file([1, 2]), "--max-new", 1]
    assert run(moved / "program", *command).code == 0
    elsewhere = tmp_path / "elsewhere.ninfer"
    (moved / "model.ninfer").rename(elsewhere)
    rejected(run(moved / "program", *command), 1, "is not at", "--artifact")
    assert run(moved / "program", *command, "--artifact", elsewhere).code == 0


def test_what_a_program_fixed_cannot_be_changed(program: Path) -> None:
    rejected(run(program, "--prompt", "x", "--max-context", 256), 2, "--max-context 256", "384", "compile again")
    rejected(run(program, "--prompt", "x", "--prefill-chunk", 256), 2, "--prefill-chunk 256", "128")
    rejected(run(program, "--prompt", "x", "--kv-capacity", 384), 2, "--kv-capacity 384", "its default")
    rejected(run(program, "--prompt", "x", "--arch", "sm_90a"), 2, "--arch")
    assert run(program, "--prompt", "x", "--max-context", 384, "--max-new", 1).code == 0
