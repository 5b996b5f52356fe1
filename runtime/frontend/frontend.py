"""The frontend of one artifact: prompts to token ids, generated ids to answers, with the model's own defaults."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from artifacts.errors import quoted
from runtime.frontend.chat_template import ChatTemplate, Rendered, TemplateOptions
from runtime.frontend.errors import ChatTemplateError, OptionError
from runtime.frontend.messages import Conversation, user_prompt
from runtime.frontend.output_stream import THINK_CLOSE, THINK_OPEN, OutputStream, StreamOptions, ends_in_think_block
from runtime.frontend.presets import (
    GENERATION_CONFIG,
    GenerationConfig,
    SamplingOptions,
    SamplingParams,
    apply_options,
    preset,
    read_generation_config,
)
from runtime.frontend.tokenizer import TOKENIZER_CONFIG, TOKENIZER_JSON, Tokenizer

CHAT_TEMPLATE = "chat_template.jinja"
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Accepted reasoning efforts. Templates know low, medium and xhigh; the others fold onto them, none turns thinking off."""
EARLY_CLOSE = f"\n\nThat is all the time there is for thinking, so the answer follows now.\n{THINK_CLOSE}\n\n"
"""What is inserted where a budget ends the thinking; it stays in the context."""
_FOLDED = {"minimal": "low", "high": "xhigh", "max": "xhigh"}


class _Model(Protocol):
    def frontend(self, role: str) -> bytes | None: ...


class _Identity(Protocol):
    @property
    def model_id(self) -> str: ...


class ArtifactLike(Protocol):
    """What the frontend needs of an open artifact: its identity and its frontend files by role."""

    @property
    def identity(self) -> _Identity: ...

    @property
    def model(self) -> _Model: ...


@dataclass(frozen=True)
class PromptOptions:
    """How a conversation becomes a prompt. None leaves the choice to the template.

    thinking False opens no think block; reasoning_effort is one of EFFORTS; preserve_thinking keeps the reasoning of
    earlier turns.
    """

    thinking: bool | None = None
    reasoning_effort: str | None = None
    preserve_thinking: bool | None = None


@dataclass(frozen=True)
class ThinkingBudget:
    """``tokens`` that the model may think; then the ids ``close`` are inserted, unless it has closed the block itself."""

    tokens: int
    close: tuple[int, ...]


@dataclass(frozen=True)
class Prompt:
    """A prompt ready for the model. thinking: it ends inside a think block, the answer starts as reasoning."""

    ids: list[int]
    text: str
    thinking: bool
    tools: Sequence[dict[str, Any]] = ()


class Frontend:
    """Tokenizer, chat template and defaults of one model.

    `notes` are lines for the user about settings of the artifact that have no effect.
    """

    def __init__(self, resources: Mapping[str, bytes], model_id: str = "", *, vocab_rows: int | None = None,
                 chat_template: bytes | None = None) -> None:
        """resources: `tokenizer.json` and, where they exist, `tokenizer_config.json`, `chat_template.jinja`,
        `generation_config.json`. chat_template: a local template instead of the artifact's. vocab_rows: rows of the
        model's embedding. Raises FrontendError.
        """
        if TOKENIZER_JSON not in resources:
            raise OptionError(f"the artifact has no {TOKENIZER_JSON}: only token ids can be used (--ids)")
        self.model_id = model_id
        self.tokenizer = Tokenizer(resources[TOKENIZER_JSON], resources.get(TOKENIZER_CONFIG), vocab_rows=vocab_rows)
        self.generation: GenerationConfig | None = None
        if GENERATION_CONFIG in resources:
            self.generation = read_generation_config(resources[GENERATION_CONFIG], self.tokenizer.domain)
        self.notes = self.generation.notes if self.generation is not None else ()
        self.template = self._template(resources, chat_template)
        self.eos_ids = self._eos_ids()

    @classmethod
    def from_artifact(cls, artifact: ArtifactLike, *, vocab_rows: int | None = None,
                      chat_template: bytes | None = None) -> "Frontend":
        """The frontend of an open artifact of any container version."""
        roles = (TOKENIZER_JSON, TOKENIZER_CONFIG, CHAT_TEMPLATE, GENERATION_CONFIG)
        found = {role: artifact.model.frontend(role) for role in roles}
        return cls({role: data for role, data in found.items() if data is not None}, artifact.identity.model_id,
                   vocab_rows=vocab_rows, chat_template=chat_template)

    def _template(self, resources: Mapping[str, bytes], local: bytes | None) -> ChatTemplate | None:
        if local is not None:
            return ChatTemplate(local, name="--chat-template")
        if CHAT_TEMPLATE in resources:
            return ChatTemplate(resources[CHAT_TEMPLATE])
        inline = self.tokenizer.config.get("chat_template")
        if isinstance(inline, list):  # several named templates; the one for conversations is called default
            named = [item for item in inline if isinstance(item, dict) and item.get("name") == "default"]
            inline = named[0].get("template") if named else None
        if inline is None:
            return None
        if not isinstance(inline, str):
            raise ChatTemplateError(f"{TOKENIZER_CONFIG}: chat_template must be a text or a list with one named 'default'")
        return ChatTemplate(inline)

    def _eos_ids(self) -> tuple[int, ...]:
        """End-of-turn ids: those of the generation settings, else the tokenizer's end token."""
        if self.generation is not None and self.generation.eos_ids:
            return self.generation.eos_ids
        named = self.tokenizer.id_of(self.tokenizer.special_tokens.get("eos_token", ""))
        return () if named is None else (named,)

    def prompt(self, given: str | Conversation, options: PromptOptions | None = None) -> Prompt:
        """Renders and encodes a conversation, or a text as its single user turn.

        A model without a chat template takes a text as it is and refuses conversations. Raises FrontendError.
        """
        options = options or PromptOptions()
        parameters = self._parameters(options)
        if self.template is None:
            if not isinstance(given, str):
                raise ChatTemplateError("the artifact has no chat template: messages cannot be rendered")
            return Prompt(self.tokenizer.encode_text(given), given, False)
        conversation = user_prompt(given) if isinstance(given, str) else given
        rendered = self.template.render(conversation.messages, tools=conversation.tools, options=parameters,
                                        special_tokens=self.tokenizer.special_tokens)
        return Prompt(self.tokenizer.encode(rendered.text, rendered.literal), rendered.text, _thinks(rendered),
                      conversation.tools)

    def _parameters(self, options: PromptOptions) -> TemplateOptions:
        """Template parameters. A choice that this template would ignore is an error, not a silent no."""
        known = self.template.parameters if self.template is not None else frozenset()
        effort, thinking = options.reasoning_effort, options.thinking
        if effort is not None and effort not in EFFORTS:
            raise OptionError(f"--reasoning-effort {quoted(effort, 40)}: allowed are {', '.join(EFFORTS)}")
        if effort is not None and thinking is False:
            raise OptionError("--no-thinking and --reasoning-effort exclude each other")
        if effort == "none":
            effort, thinking = None, False
        if effort is not None:
            effort = _FOLDED.get(effort, effort)
            if "reasoning_effort" not in known:
                raise OptionError("--reasoning-effort: the model's chat template has no effort levels")
        if thinking is False and "enable_thinking" not in known:
            raise OptionError("--no-thinking: the model's chat template cannot turn thinking off")
        if options.preserve_thinking is not None and "preserve_thinking" not in known:
            raise OptionError("--preserve-thinking: the model's chat template does not keep reasoning")
        return TemplateOptions(thinking, options.preserve_thinking, effort)

    def sampling(self, options: SamplingOptions, *, thinking: bool) -> SamplingParams:
        """The model's preset for the mode with the user's options. Raises OptionError."""
        return apply_options(preset(self.model_id, thinking, self.generation), options, self.eos_ids, self.tokenizer.domain)

    def output_stream(self, prompt: Prompt, params: SamplingParams, *, stops: Sequence[str] = (),
                      reasoning_stops: Sequence[str] = (), raw: bool = False) -> OutputStream:
        """Reader of one answer to `prompt`. Raises OptionError for bad stop strings."""
        return OutputStream(self.tokenizer, StreamOptions(
            thinking=prompt.thinking, tools=prompt.tools, stops=stops, reasoning_stops=reasoning_stops,
            stop_ids=params.stop_ids, raw=raw))

    def thinking_budget(self, tokens: int, prompt: Prompt, params: SamplingParams, max_context: int) -> ThinkingBudget:
        """Check a budget of thinking tokens for an answer to ``prompt``: closing the block and one token of the answer must
        fit besides. Raises OptionError."""
        if tokens < 1:
            raise OptionError(f"--thinking-budget {tokens}: at least 1 is needed; --no-thinking answers at once")
        if not prompt.thinking:
            raise OptionError("--thinking-budget: the prompt opens no think block")
        close = tuple(self.tokenizer.encode(EARLY_CLOSE, ()))
        least = tokens + len(close) + 1
        limits = ("--max-new", params.max_new, least), ("--max-context", max_context, len(prompt.ids) + least)
        for name, limit, used in limits:
            if used > limit:
                raise OptionError(f"--thinking-budget {tokens}: with the {len(close)} tokens that close the block and one of "
                                  f"the answer {name} {used} is needed; it is {limit}")  # fmt: skip
        return ThinkingBudget(tokens, close)

    def from_ids(self, ids: Sequence[int]) -> Prompt:
        """A prompt given as token ids; whether it ends inside a think block is read off its end. Raises TokenizerError."""
        text = self.tokenizer.decode(ids)
        opened = self.tokenizer.id_of(THINK_OPEN)
        inside = ends_in_think_block(text) and (opened is None or opened in ids[-4:])
        return Prompt(list(ids), text, inside)


def _thinks(rendered: Rendered) -> bool:
    """Whether the template, not a user, left a think block open at the end."""
    if not ends_in_think_block(rendered.text):
        return False
    start = rendered.text.rindex(THINK_OPEN)
    return not any(first < start + len(THINK_OPEN) and last > start for first, last in rendered.literal)
