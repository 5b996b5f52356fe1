"""Turns generated token ids into what a caller sees: reasoning, content, tool calls, and why it ended.

The stages, each holding back what it cannot decide yet: bytes to characters, reasoning split at the first
`</think>`, stop strings per channel, tool-call markup in the content. The events do not depend on how the text was
cut into tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal

from runtime.frontend.detokenize import Detokenizer
from runtime.frontend.stops import StopMatcher, check_stops
from runtime.frontend.tokenizer import Tokenizer
from runtime.frontend.tool_calls import OPEN, SPACE, ToolCall, parse_tool_calls

THINK_OPEN = "<think>"
THINK_CLOSE = "</think>"

Channel = Literal["reasoning", "content"]


class FinishReason(StrEnum):
    """Why a generation ended, by the names of the command line's summary."""

    NONE = "none"
    OUTPUT_LIMIT = "output-limit"
    CONTEXT_CAPACITY = "context-capacity"
    STOP_TOKEN = "stop-token"
    STOP_STRING = "stop-string"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class TextPiece:
    """More text of one channel, never empty."""

    channel: Channel
    text: str


@dataclass(frozen=True)
class ToolCalls:
    """The parsed tool calls of the answer; comes once, right before Finish."""

    calls: tuple[ToolCall, ...]


@dataclass(frozen=True)
class Finish:
    """The last event. `stop` is the stop string or stop id that matched."""

    reason: FinishReason
    stop: str | int | None = None


Event = TextPiece | ToolCalls | Finish


@dataclass(frozen=True)
class StreamOptions:
    """How output is read.

    thinking: the prompt ends inside a think block, so the output starts as reasoning. tools: declared tools (OpenAI
    form); without any, tool markup is ordinary text. stops, reasoning_stops: stop strings per channel. stop_ids:
    ids that end the answer; they count as generated and their text is withheld. raw: all text, special tokens
    included, as content.
    """

    thinking: bool = False
    tools: Sequence[dict[str, Any]] = ()
    stops: Sequence[str] = ()
    reasoning_stops: Sequence[str] = ()
    stop_ids: Iterable[int] = ()
    raw: bool = False


@dataclass(frozen=True)
class Answer:
    """Everything a stream has said so far."""

    reasoning: str
    content: str
    tool_calls: tuple[ToolCall, ...]
    finish: Finish


class OutputStream:
    """One answer. Feed every generated id, the stop id included; call `finish` when generation ends for other reasons.

    `generated` and `reasoning_tokens` count ids, the stop id included.
    """

    def __init__(self, tokenizer: Tokenizer, options: StreamOptions) -> None:
        """Raises OptionError for empty, too long or too many stop strings."""
        content_stops = check_stops(options.stops, "--stop")
        reasoning_stops = check_stops(options.reasoning_stops, "--reasoning-stop")
        self._text = Detokenizer(tokenizer, skip_special=not options.raw)
        self._stop_ids = frozenset(options.stop_ids)
        self._reasoning = options.thinking and not options.raw
        self._reasoning_matcher = StopMatcher(tuple(dict.fromkeys((THINK_CLOSE, *reasoning_stops))))
        self._content_matcher = StopMatcher(content_stops)
        self._at_start = False  # between </think> and the first character of the content
        self._tools = () if options.raw else tuple(options.tools)
        self._markup = StopMatcher((OPEN,))
        self._spaces = ""  # whitespace that may turn out to precede a tool call
        self._region: list[str] = []  # text from the first <tool_call> on
        self._events: list[Event] = []
        self._said: dict[Channel, list[str]] = {"reasoning": [], "content": []}
        self._calls: tuple[ToolCall, ...] = ()
        self._finish = Finish(FinishReason.NONE)
        self.done = False
        self.generated = 0
        self.reasoning_tokens = 0

    @property
    def reasoning(self) -> bool:
        """Whether the output so far has not left the think block that the prompt opened."""
        return self._reasoning

    @property
    def answer(self) -> Answer:
        """The concatenation of all events so far."""
        return Answer("".join(self._said["reasoning"]), "".join(self._said["content"]), self._calls, self._finish)

    def feed(self, token: int) -> list[Event]:
        """Events of one more id; none after the end. Raises TokenizerError for an unknown id."""
        if self.done:
            return []
        self.generated += 1
        self.reasoning_tokens += self._reasoning
        if token in self._stop_ids:
            return self.finish(FinishReason.STOP_TOKEN, token)
        self._advance(self._text.feed(token))
        return self._take()

    def finish(self, reason: FinishReason, stop: str | int | None = None) -> list[Event]:
        """Events of the end: text held back, tool calls, Finish. A stop string in the held text takes precedence."""
        if self.done:
            return []
        self._advance(self._text.finish())
        if not self.done:
            self._end(reason, stop)
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _advance(self, text: str) -> None:
        if self._reasoning:
            found = self._reasoning_matcher.feed(text)
            self._emit("reasoning", found.text)
            if found.stop is None:
                return
            if found.stop != THINK_CLOSE:
                self._end(FinishReason.STOP_STRING, found.stop)
                return
            self._reasoning, self._at_start = False, True
            text = found.rest
        if self._at_start:
            text = text.lstrip(SPACE)
            self._at_start = not text
        found = self._content_matcher.feed(text)
        self._content(found.text)
        if found.stop is not None:
            self._end(FinishReason.STOP_STRING, found.stop)

    def _content(self, text: str) -> None:
        """Content after the stop strings: shown at once, or held where a tool call may begin."""
        if not self._tools:
            self._emit("content", text)
            return
        if self._region:
            self._region.append(text)
            return
        found = self._markup.feed(text)
        shown = self._spaces + found.text
        visible = shown.rstrip(SPACE)
        self._spaces = shown[len(visible):]
        self._emit("content", visible)
        if found.stop is not None:
            self._region = [found.stop, found.rest]

    def _end(self, reason: FinishReason, stop: str | int | None) -> None:
        if self._reasoning:
            if reason is not FinishReason.STOP_STRING:
                self._emit("reasoning", self._reasoning_matcher.flush())
        else:
            if reason is not FinishReason.STOP_STRING:
                self._content(self._content_matcher.flush())
            self._end_content()
        self._finish = Finish(reason, stop)
        self._events.append(self._finish)
        self.done = True

    def _end_content(self) -> None:
        region = "".join(self._region)
        calls = parse_tool_calls(region, self._tools) if region else None
        if calls:
            self._calls = tuple(calls)
            self._events.append(ToolCalls(self._calls))
        else:
            self._emit("content", self._spaces + self._markup.flush() + region)
        self._spaces, self._region = "", []

    def _emit(self, channel: Channel, text: str) -> None:
        if text:
            self._events.append(TextPiece(channel, text))
            self._said[channel].append(text)


def ends_in_think_block(text: str) -> bool:
    """Whether a prompt's text ends right after an opened `<think>`: the answer then starts as reasoning."""
    return text.rstrip(SPACE).endswith(THINK_OPEN)
