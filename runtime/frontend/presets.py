"""Sampling parameters: presets by model and mode, overrides by options, range checks.

Registered models have presets of their own (spec frontend.md, section 5); any other model takes its
`generation_config.json`. What the sampler cannot do is said in `notes`, never dropped in silence.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from artifacts.errors import quoted
from runtime.frontend.errors import GenerationConfigError, OptionError
from runtime.frontend.json_data import parse_json

GENERATION_CONFIG = "generation_config.json"
MAX_CONFIG_BYTES = 1024 * 1024
MAX_TOP_K = 20
MAX_STOP_IDS = 16
MAX_SEED = (1 << 64) - 1
DEFAULT_MAX_NEW = 128


@dataclass(frozen=True)
class SamplingParams:
    """Everything that decides how tokens are picked and when picking ends.

    temperature 0 … 2, top_p 0 … 1, top_k 0 … 20 (0 means 20), min_p 0 … 1, presence and frequency -2 … 2 (penalties on
    generated tokens), seed u64. greedy: exact argmax, which ignores all of them. ignore_eos: the model's own
    end tokens do not stop; ids given by the user do. max_new: most output tokens. stop_ids: at most 16 ids.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence: float = 0.0
    frequency: float = 0.0
    seed: int = 0
    greedy: bool = False
    ignore_eos: bool = False
    max_new: int = DEFAULT_MAX_NEW
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class SamplingOptions:
    """What the user asked for; None keeps the preset."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence: float | None = None
    frequency: float | None = None
    seed: int | None = None
    greedy: bool = False
    ignore_eos: bool = False
    max_new: int | None = None
    stop_token_ids: Sequence[int] = ()


_THINKING = SamplingParams(temperature=1.0, top_p=0.95, top_k=20)
_PLAIN = SamplingParams(temperature=0.7, top_p=0.80, top_k=20, presence=1.5)
PRESETS: dict[str, tuple[SamplingParams, SamplingParams]] = {
    "qwen3.6-27b": (_THINKING, _PLAIN),
    "qwen3.8-27b": (_THINKING, _PLAIN),
    "qwen3.6-35b-a3b": (replace(_THINKING, presence=1.5), _PLAIN),
}
"""Presets of the registered models: (thinking, not thinking)."""

_RANGES: dict[str, tuple[str, float, float]] = {
    "temperature": ("--temperature", 0.0, 2.0), "top_p": ("--top-p", 0.0, 1.0), "top_k": ("--top-k", 0, MAX_TOP_K),
    "min_p": ("--min-p", 0.0, 1.0), "presence": ("--presence-penalty", -2.0, 2.0),
    "frequency": ("--frequency-penalty", -2.0, 2.0), "seed": ("--seed", 0, MAX_SEED), "max_new": ("--max-new", 1, 1 << 30),
}
_INTEGERS = ("top_k", "seed", "max_new")


@dataclass(frozen=True)
class GenerationConfig:
    """What `generation_config.json` says: default sampling, end-of-turn ids, and notes on what is not supported."""

    sampling: SamplingParams
    eos_ids: tuple[int, ...]
    notes: tuple[str, ...] = ()


def read_generation_config(data: bytes, domain: int) -> GenerationConfig:
    """Parses the resource. `domain`: ids of the tokenizer. Raises GenerationConfigError.

    Missing members have the defaults of Hugging Face: no sampling, temperature 1, top_p 1, top_k 50.
    """
    root = parse_json(data, GENERATION_CONFIG, MAX_CONFIG_BYTES, GenerationConfigError)
    if not isinstance(root, dict):
        raise GenerationConfigError(f"{GENERATION_CONFIG}: must be an object")
    notes = []
    sampled = root.get("do_sample", False)
    if not isinstance(sampled, bool):
        raise GenerationConfigError(f"{GENERATION_CONFIG}: do_sample must be a boolean")
    temperature = _number(root, "temperature", 1.0, 0.0, 2.0)
    top_k = int(_number(root, "top_k", 50, 0, 1 << 31, integer=True))
    if top_k > MAX_TOP_K or top_k == 0:
        if sampled and "top_k" in root:
            notes.append(f"{GENERATION_CONFIG}: top_k {top_k} becomes {MAX_TOP_K}, the most the sampler keeps")
        top_k = MAX_TOP_K
    if _number(root, "repetition_penalty", 1.0, 0.0, 100.0) != 1.0:
        notes.append(f"{GENERATION_CONFIG}: repetition_penalty is not supported and has no effect")
    sampling = SamplingParams(
        temperature=temperature, top_p=_number(root, "top_p", 1.0, 0.0, 1.0), top_k=top_k,
        min_p=_number(root, "min_p", 0.0, 0.0, 1.0), greedy=not sampled or temperature == 0)
    return GenerationConfig(sampling, _eos_ids(root.get("eos_token_id"), domain), tuple(notes))


def _number(root: dict[str, Any], name: str, default: float, low: float, high: float, *, integer: bool = False) -> float:
    value = root.get(name)
    if value is None:
        return default
    kinds = int if integer else int | float
    if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
        raise GenerationConfigError(f"{GENERATION_CONFIG}: {name} {quoted(value)}; allowed are {low:g} to {high:g}")
    return value


def _eos_ids(value: Any, domain: int) -> tuple[int, ...]:
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < domain:
            raise GenerationConfigError(f"{GENERATION_CONFIG}: eos_token_id {quoted(token)}; allowed are 0 to {domain - 1}")
    unique = tuple(dict.fromkeys(ids))
    if len(unique) > MAX_STOP_IDS:
        raise GenerationConfigError(f"{GENERATION_CONFIG}: {len(unique)} end tokens; at most {MAX_STOP_IDS} are allowed")
    return unique


def preset(model_id: str, thinking: bool, generation: GenerationConfig | None) -> SamplingParams:
    """Sampling defaults of a model in one mode; plain greedy when neither a preset nor a configuration exists."""
    if model_id in PRESETS:
        return PRESETS[model_id][0 if thinking else 1]
    return generation.sampling if generation is not None else SamplingParams(greedy=True, temperature=0.0)


def apply_options(base: SamplingParams, options: SamplingOptions, eos_ids: Sequence[int], domain: int) -> SamplingParams:
    """The preset with a user's options. Raises OptionError naming the option and its range.

    A temperature above 0 turns a greedy preset into sampling, 0 turns sampling into greedy; `greedy` wins over
    everything. Stop ids are the model's end tokens (unless ignored) followed by the user's.
    """
    changes: dict[str, Any] = {}
    for name, (option, low, high) in _RANGES.items():
        value = getattr(options, name)
        if value is None:
            continue
        kinds = int if name in _INTEGERS else int | float
        if isinstance(value, bool) or not isinstance(value, kinds) or not low <= value <= high:
            raise OptionError(f"{option} {quoted(value, 40)}: allowed are {low} to {high}")
        changes[name] = value if name in _INTEGERS else float(value)
    if "temperature" in changes:
        changes["greedy"] = changes["temperature"] == 0
    elif base.greedy and not options.greedy and changes.keys() & {"top_p", "top_k", "min_p", "presence", "frequency"}:
        raise OptionError("this model answers greedily by default; sampling options need --temperature above 0")
    if options.greedy:
        changes |= {"greedy": True}
    made = replace(base, **changes)
    if made.greedy:
        made = replace(made, temperature=0.0)
    stops = tuple(dict.fromkeys([*(() if options.ignore_eos else eos_ids), *options.stop_token_ids]))
    for token in options.stop_token_ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < domain:
            raise OptionError(f"--stop-token-id {quoted(token, 40)}: allowed are 0 to {domain - 1}")
    if len(stops) > MAX_STOP_IDS:
        raise OptionError(f"--stop-token-id: {len(stops)} stop ids with the model's own; at most {MAX_STOP_IDS} are allowed")
    return replace(made, ignore_eos=options.ignore_eos, stop_ids=stops)


_UNSIGNED = re.compile(r"[0-9]{1,20}")
_DECIMAL = re.compile(r"-?([0-9]{1,32}(\.[0-9]{0,32})?|\.[0-9]{1,32})([eE][+-]?[0-9]{1,3})?")


def parse_unsigned(option: str, text: str) -> int:
    """A non-negative integer in decimal digits only: no sign, space or underscore. Raises OptionError."""
    if not _UNSIGNED.fullmatch(text):
        raise OptionError(f"{option} {quoted(text, 40)}: a non-negative integer is needed")
    return int(text)


def parse_decimal(option: str, text: str) -> float:
    """A finite decimal number, whole string. Raises OptionError."""
    value = float(text) if _DECIMAL.fullmatch(text) else math.nan
    if not math.isfinite(value):
        raise OptionError(f"{option} {quoted(text, 40)}: a finite decimal number is needed")
    return value
