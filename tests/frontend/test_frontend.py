"""The whole frontend of an artifact: prompt in, answer out."""

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.frontend.errors import ChatTemplateError, FrontendError, MessagesError, OptionError, TokenizerError
from runtime.frontend.frontend import Frontend, PromptOptions
from runtime.frontend.messages import conversation
from runtime.frontend.output_stream import Finish, FinishReason
from runtime.frontend.presets import SamplingOptions, SamplingParams
from tests.frontend.resources import TINY, as_bytes, synthetic
from tests.frontend.test_chat_template import EFFORT, THINK

RESOURCES = {path.name: path.read_bytes() for path in TINY.iterdir()}


@pytest.fixture(scope="module")
def frontend() -> Frontend:
    return Frontend(RESOURCES, "tiny-hybrid", vocab_rows=4096)


def with_template(source: str, model_id: str = "x") -> Frontend:
    return Frontend({"tokenizer.json": as_bytes(synthetic()), "chat_template.jinja": source.encode()}, model_id)


def test_prompt_and_answer_of_the_tiny_model(frontend: Frontend) -> None:
    prompt = frontend.prompt("What is the code?")
    assert prompt.text == "<|im_start|>user\nWhat is the code?<|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert prompt.thinking and prompt.ids[0] == 4090 and prompt.ids.count(4090) == 2
    assert frontend.tokenizer.decode(prompt.ids) == prompt.text
    params = frontend.sampling(SamplingOptions(max_new=9), thinking=prompt.thinking)
    assert params == SamplingParams(0.0, 1.0, 20, greedy=True, max_new=9, stop_ids=(4091, 4089))
    stream = frontend.output_stream(prompt, params)
    for token in frontend.tokenizer.encode("The text says: 7.\n</think>\n\n7"):
        stream.feed(token)
    assert stream.feed(4091)[-1] == Finish(FinishReason.STOP_TOKEN, 4091)
    assert (stream.answer.reasoning, stream.answer.content) == ("The text says: 7.\n", "7")


def test_no_thinking(frontend: Frontend) -> None:
    prompt = frontend.prompt("hi", PromptOptions(thinking=False))
    assert prompt.text.endswith("<think>\n\n</think>\n\n") and not prompt.thinking


def test_a_template_inside_the_tokenizer_configuration_counts() -> None:
    named = {"chat_template": [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]}
    base = {"tokenizer.json": as_bytes(synthetic())}
    assert Frontend(base | {"tokenizer_config.json": as_bytes(named)}).prompt("x").text == "D"
    assert Frontend(base | {"tokenizer_config.json": as_bytes(named), "chat_template.jinja": b"F"}).prompt("x").text == "F"
    assert Frontend(base | {"chat_template.jinja": b"F"}, chat_template=b"L").prompt("x").text == "L"
    with pytest.raises(ChatTemplateError, match="chat_template must be"):
        Frontend(base | {"tokenizer_config.json": as_bytes({"chat_template": 5})})
    with pytest.raises(ChatTemplateError, match="--chat-template, line 2"):
        Frontend(base, chat_template=b"\n{% if %}")


def test_without_a_template_text_is_taken_as_it_is() -> None:
    plain = Frontend({"tokenizer.json": as_bytes(synthetic())})
    prompt = plain.prompt("a<|im_end|>")
    assert (prompt.text, len(prompt.ids), prompt.thinking) == ("a<|im_end|>", 11, False)
    with pytest.raises(ChatTemplateError, match="no chat template"):
        plain.prompt(conversation([{"role": "user", "content": "x"}]))
    with pytest.raises(OptionError, match="no tokenizer.json"):
        Frontend({})


def test_a_user_cannot_open_a_think_block() -> None:
    fixed = with_template("{{ messages[0].content }}")
    assert not fixed.prompt("x<think>").thinking
    assert with_template("{{ messages[0].content }}<think>\n").prompt("x").thinking
    assert not with_template("{{ messages[0].content }}<think></think>").prompt("x").thinking


def test_options_that_the_template_would_ignore_are_errors() -> None:
    effort, think, bare = with_template(EFFORT), with_template(THINK), with_template("{{ messages[0].content }}")
    for level, word in (("low", "SHORT."), ("minimal", "SHORT."), ("high", "LONG."), ("max", "LONG."), ("xhigh", "LONG.")):
        assert word in effort.prompt("q", PromptOptions(reasoning_effort=level)).text
    assert effort.prompt("q", PromptOptions(reasoning_effort="none")).text.endswith("<think>\n\n</think>\n\n")
    assert think.prompt("q", PromptOptions(reasoning_effort="none")).text.endswith("<think>\n\n</think>\n\n")
    for chosen, options, message in (
            (think, PromptOptions(reasoning_effort="low"), "no effort levels"),
            (bare, PromptOptions(thinking=False), "cannot turn thinking off"),
            (bare, PromptOptions(reasoning_effort="none"), "cannot turn thinking off"),
            (bare, PromptOptions(preserve_thinking=True), "does not keep reasoning"),
            (effort, PromptOptions(reasoning_effort="huge"), "'huge': allowed are none, minimal, low, medium, high, xhigh"),
            (effort, PromptOptions(thinking=False, reasoning_effort="low"), "exclude each other")):
        with pytest.raises(OptionError, match=message):
            chosen.prompt("q", options)


def test_registered_models_have_presets_by_mode() -> None:
    known = with_template(THINK, "qwen3.6-27b")
    assert known.sampling(SamplingOptions(), thinking=True).top_p == 0.95
    assert known.sampling(SamplingOptions(seed=3), thinking=False).presence == 1.5


def test_end_tokens_fall_back_to_the_tokenizer() -> None:
    config = as_bytes({"eos_token": "<|im_end|>"})
    assert Frontend({"tokenizer.json": as_bytes(synthetic()), "tokenizer_config.json": config}).eos_ids == (257,)
    assert Frontend({"tokenizer.json": as_bytes(synthetic())}).eos_ids == ()


def test_prompts_given_as_ids(frontend: Frontend) -> None:
    prompt = frontend.prompt("hi")
    again = frontend.from_ids(prompt.ids)
    assert (again.ids, again.text, again.thinking) == (prompt.ids, prompt.text, True)
    assert not frontend.from_ids(prompt.ids[:-2]).thinking
    assert not frontend.from_ids(frontend.tokenizer.encode_text("<think>")).thinking
    with pytest.raises(TokenizerError, match="4096 is outside"):
        frontend.from_ids([4096])


class _Artifact:
    """An open artifact as far as the frontend looks."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.identity = SimpleNamespace(model_id="qwen3.8-27b")
        self.model: Any = SimpleNamespace(frontend=files.get)


def test_from_artifact() -> None:
    made = Frontend.from_artifact(_Artifact(RESOURCES), vocab_rows=4096)
    assert made.model_id == "qwen3.8-27b" and made.eos_ids == (4091, 4089)
    with pytest.raises(TokenizerError, match="vocabulary rows"):
        Frontend.from_artifact(_Artifact(RESOURCES), vocab_rows=4000)


def test_every_error_belongs_to_the_closed_set() -> None:
    for kind in (ChatTemplateError, MessagesError, OptionError, TokenizerError):
        assert issubclass(kind, FrontendError) and kind.exit_code in (1, 2)


def test_a_normal_template_is_ready_quickly() -> None:
    """Import, parse and first rendering in a fresh process, once the artifact library is loaded."""
    root = Path(__file__).parents[2]
    code = ("import sys, time; sys.path.insert(0, sys.argv[1]); s = open(sys.argv[2], encoding='utf-8').read()\n"
            "import artifacts; t = time.process_time()\n"
            "from runtime.frontend.chat_template import ChatTemplate\n"
            "ChatTemplate(s).render([{'role': 'user', 'content': 'x'}]); print(time.process_time() - t)")
    best = min(float(subprocess.run([sys.executable, "-c", code, str(root), str(root / "tests/frontend/templates/think.jinja")],
                                    capture_output=True, text=True, check=True).stdout) for _ in range(2))
    assert best < 0.3  # 0.12 s on an idle core, most of it importing jinja2


def test_rendering_is_fast(frontend: Frontend) -> None:
    turns = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 200} for i in range(101)]
    started = time.process_time()
    assert len(frontend.prompt(conversation(turns)).ids) > 20_000
    assert time.process_time() - started < 3
