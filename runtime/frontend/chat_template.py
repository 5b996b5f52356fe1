"""Renders messages into a prompt with the artifact's chat template.

The result says which characters are data (message contents, tool definitions, tool arguments) and which the
template wrote. The tokenizer recognises control tokens only in the latter, so that "<|im_end|>" typed by a user is
encoded as plain text. Formats: Jinja2 as Hugging Face chat templates use it (trim_blocks, lstrip_blocks, loop
controls, `raise_exception`, `tojson` without ASCII escapes). `strftime_now` does not exist: a prompt depends
on its inputs alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from artifacts.errors import quoted
from runtime.frontend.errors import ChatTemplateError
from runtime.frontend.sandbox.evaluator import Evaluator, TemplateRaised
from runtime.frontend.sandbox.meter import Limits, Meter, SandboxError
from runtime.frontend.sandbox.syntax import SyntaxProblem, free_names, parse
from runtime.frontend.sandbox.values import Span, from_data, make_list, spans


@dataclass(frozen=True)
class Rendered:
    """A prompt as text. `literal`: sorted, disjoint half-open character spans that are data, not template text."""

    text: str
    literal: tuple[Span, ...]


@dataclass(frozen=True)
class TemplateOptions:
    """Parameters of Qwen-family templates; None leaves a parameter undefined, so that the template's default holds."""

    enable_thinking: bool | None = None
    preserve_thinking: bool | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True


class ChatTemplate:
    """A parsed template. `parameters` are the names it reads."""

    def __init__(self, source: bytes | str, *, name: str = "chat template", limits: Limits | None = None) -> None:
        """Parses UTF-8 `source`. Raises ChatTemplateError naming the line."""
        self.name = name
        self.limits = limits or Limits()
        try:
            text = source.decode("utf-8") if isinstance(source, bytes) else source
        except UnicodeDecodeError as error:
            raise ChatTemplateError(f"{name}: not UTF-8 at byte {error.start}") from None
        try:
            self._tree = parse(text)
        except SyntaxProblem as problem:
            raise self._error(problem.line, problem.message) from None
        self.parameters = free_names(self._tree)
        self._size = len(text)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        options: TemplateOptions | None = None,
        special_tokens: Mapping[str, str] | None = None,
    ) -> Rendered:
        """Renders JSON-like messages and tools.

        `special_tokens` (`bos_token`, `eos_token`, …) are template text, everything else is data.
        Raises ChatTemplateError: one line with the template line.
        """
        options = options or TemplateOptions()
        given = {
            "enable_thinking": options.enable_thinking,
            "preserve_thinking": options.preserve_thinking,
            "reasoning_effort": options.reasoning_effort,
        }
        variables: dict[str, Any] = dict(special_tokens or {})
        try:
            variables |= {key: from_data(value) for key, value in given.items() if value is not None}
            variables["messages"] = from_data(messages)
            variables["tools"] = from_data(tools) if tools else None
            variables["documents"] = None
            variables["add_generation_prompt"] = options.add_generation_prompt
        except SandboxError as error:
            raise ChatTemplateError(f"{self.name}: {error}") from None
        data = make_list(variables.values(), None)
        meter = Meter(self.limits, input_chars=16 * data.weight + self._size)
        evaluator = Evaluator(meter, variables)
        try:
            text = evaluator.render(self._tree)
        except TemplateRaised as error:
            raise self._error(evaluator.line, f"the template rejects the messages: {quoted(str(error), 300)}") from None
        except SandboxError as error:
            raise self._error(evaluator.line, str(error)) from None
        except RecursionError:
            raise self._error(evaluator.line, "nests too deeply") from None
        except (TypeError, ValueError, ArithmeticError) as error:
            raise self._error(evaluator.line, f"wrong value or argument: {error}") from None
        return Rendered(str.__str__(text), spans(text))

    def _error(self, line: int, message: str) -> ChatTemplateError:
        shown = "".join(char if " " <= char <= "~" or char == "…" else "?" for char in " ".join(message.split())[:400])
        return ChatTemplateError(f"{self.name}, line {line}: {shown}")
