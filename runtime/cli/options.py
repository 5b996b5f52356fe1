"""Options that several commands share, and strict parsers: whole strings only, every error names option and range."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from runtime.cli.errors import UsageError
from runtime.cli.io import Level
from runtime.frontend.presets import parse_decimal, parse_unsigned


def integer(option: str, low: int, high: int, step: int = 1) -> Callable[[str], int]:
    """Parser of a decimal integer in low … high that is a multiple of ``step``. It raises UsageError or OptionError."""

    def parse(text: str) -> int:
        value = parse_unsigned(option, text)
        if not low <= value <= high or value % step:
            rule = f"a multiple of {step} in {low}…{high}" if step > 1 else f"{low}…{high}"
            raise UsageError(f"{option} {value}: {rule} is allowed")
        return value

    return parse


def unsigned(option: str) -> Callable[[str], int]:
    """Parser of a non-negative integer whose range the model decides. It raises OptionError."""
    return lambda text: parse_unsigned(option, text)


def decimal(option: str) -> Callable[[str], float]:
    """Parser of a finite decimal number whose range is checked with the model's preset. It raises OptionError."""
    return lambda text: parse_decimal(option, text)


AUTO = 0
"""``--kv-capacity auto``: what the GPU has room for."""


def capacity(text: str) -> int:
    """Tokens, or AUTO for ``auto``. Raises UsageError or OptionError."""
    return AUTO if text == "auto" else integer("--kv-capacity", 1, 1 << 26)(text)


def pairs(text: str) -> str:
    """Check ``1x1,8x1``; the value stays a string, ``read_pairs`` gives the numbers. Raises UsageError."""
    read_pairs(text)
    return text


def read_pairs(text: str, option: str = "--pairs") -> tuple[tuple[int, int], ...]:
    """(lanes, columns) of each decode graph named in ``1x1,8x1,1x4``. Raises UsageError."""
    out = []
    for part in text.split(","):
        lanes, cross, columns = part.partition("x")
        if not (cross and lanes.isascii() and columns.isascii() and lanes.isdigit() and columns.isdigit() and len(part) < 10):
            raise UsageError(f"{option} {text[:60]!r}: lanes x columns such as 1x1,8x1,1x4 are needed")
        out.append((int(lanes), int(columns)))
    return tuple(out)


def read_devices(text: str) -> tuple[int, ...]:
    """CUDA indices of ``0`` or ``0,1``, one per rank. Raises UsageError."""
    parts = text.split(",")
    if len(parts) > 8 or any(not (part.isascii() and part.isdigit()) or len(part) > 3 for part in parts):
        raise UsageError(f"--devices {text[:60]!r}: CUDA indices such as 0,1 are needed, one per rank")
    return tuple(int(part) for part in parts)


def devices(text: str) -> str:
    """Check ``0,1``; the value stays a string, ``read_devices`` gives the numbers. Raises UsageError."""
    read_devices(text)
    return text


def one_of(option: str, *allowed: str) -> Callable[[str], str]:
    """Parser of one of some words. It raises UsageError."""

    def parse(text: str) -> str:
        if text not in allowed:
            raise UsageError(f"{option} {text[:40]!r}: {', '.join(allowed)} are allowed")
        return text

    return parse


def only(option: str, allowed: str, *known: str) -> Callable[[str], str]:
    """Parser of an option with one supported value, which others of the same name have more of. It raises UsageError."""

    def parse(text: str) -> str:
        if text != allowed:
            raise UsageError(f"{option} {text} is not supported; {allowed} is" if text in known
                             else f"{option} {text[:40]!r}: {allowed} is allowed")  # fmt: skip
        return text

    return parse


WIRES = {"fp32": "f32", "bf16": "bf16"}
"""``--exchange``: what ranks send each other in decode steps, by its name in the compiler."""

CONTEXT_HELP = "tokens of a sequence, prompt and answer together; default 2048 or the model's own limit"

Arch = Annotated[str | None, typer.Option("--arch", metavar="native|sm_75…sm_121a", help="GPU architecture")]
Card = Annotated[str | None, typer.Option("--as", metavar="CARD", help="with the capabilities of a card, e.g. rtx5090")]
MaxContext = Annotated[int | None, typer.Option("--max-context", metavar="N", parser=integer("--max-context", 1, 1 << 20),
                                                help=CONTEXT_HELP)]  # fmt: skip
MaxConcurrency = Annotated[int | None, typer.Option("--max-concurrency", metavar="B",
                                                    parser=integer("--max-concurrency", 1, 64),
                                                    help="sequences at a time; default 1")]  # fmt: skip
PrefillChunk = Annotated[int | None, typer.Option("--prefill-chunk", metavar="N",
                                                  parser=integer("--prefill-chunk", 128, 16384, 128),
                                                  help="prompt tokens per prefill step; default 1024")]  # fmt: skip
Pairs = Annotated[str | None, typer.Option("--pairs", metavar="1x1,8x1", parser=pairs,
                                           help="decode graphs to build: lanes x columns")]  # fmt: skip
KvCapacity = Annotated[int | None, typer.Option("--kv-capacity", metavar="N",
                                                parser=integer("--kv-capacity", 1, 1 << 26),
                                                help="KV cache tokens of all sequences; default: room for each")]
RunCapacity = Annotated[int | None, typer.Option("--kv-capacity", metavar="N|auto", parser=capacity,
                                                 help="KV cache tokens of all sequences; auto: as the GPU has room")]
Headroom = Annotated[int | None, typer.Option("--vram-headroom-mib", metavar="N",
                                              parser=integer("--vram-headroom-mib", 0, 1 << 20),
                                              help="GPU memory that auto leaves free; default 1024")]
ThinkingBudget = Annotated[int | None, typer.Option("--thinking-budget", metavar="N", parser=unsigned("--thinking-budget"),
                                                    help="most tokens of reasoning; then the answer is begun")]  # fmt: skip
Jobs = Annotated[int | None, typer.Option("--jobs", metavar="N", parser=integer("--jobs", 1, 1024),
                                          help="compiler processes; default: one per core")]  # fmt: skip
ProfileFile = Annotated[Path | None, typer.Option("--profile", metavar="FILE",
                                                  help="device profile of ninferc tune")]  # fmt: skip
DeviceName = Annotated[str | None, typer.Option("--device", metavar="cpu|cuda[:N]",
                                                help="where to run; default: the first GPU, else cpu")]  # fmt: skip
Devices = Annotated[str | None, typer.Option("--devices", metavar="A,B", parser=devices,
                                             help="a GPU for each rank, rank 0 first; A,A is a test mode")]  # fmt: skip
Tp = Annotated[int | None, typer.Option("--tp", metavar="N", parser=integer("--tp", 1, 8),
                                        help="ranks, one GPU each; 1 or 2; default: one per device")]  # fmt: skip
Exchange = Annotated[str | None, typer.Option("--exchange", metavar="fp32|bf16", parser=one_of("--exchange", *WIRES),
                                              help="what two ranks send in decode; fp32 (default): same bits as one")]
Transport = Annotated[str | None, typer.Option("--transport", metavar="auto|peer|host|staged",
                                               parser=one_of("--transport", "auto", "peer", "host", "staged"),
                                               help="way between two GPUs; default: measured")]  # fmt: skip
CheckRanks = Annotated[bool, typer.Option("--check-ranks", help="compare both ranks after every step (slow)")]
ArtifactFile = Annotated[Path | None, typer.Option("--artifact", metavar="FILE",
                                                   help="the program's artifact, if it moved")]  # fmt: skip
Numerics = Annotated[str | None, typer.Option("--numerics", metavar="exact|engine",
                                              help="on cpu: float64, or rounded as the kernels do (default)")]  # fmt: skip
Yes = Annotated[bool, typer.Option("--yes", "-y", help="run on the CPU however long it is predicted to take")]
NoGraph = Annotated[bool, typer.Option("--no-cuda-graph", help="launch kernels one by one; same tokens")]
LEVELS = tuple(level.name.lower() for level in Level)
LogLevel = Annotated[str | None, typer.Option("--log-level", metavar="|".join(LEVELS), parser=one_of("--log-level", *LEVELS),
                                              help="what goes to stderr; default info")]  # fmt: skip
Rope = Annotated[str | None, typer.Option("--rope", metavar="native", parser=only("--rope", "native", "yarn"),
                                          help="rotary regime; native (default) is the one there is")]  # fmt: skip
KvDtype = Annotated[str | None, typer.Option("--kv-dtype", metavar="bf16",
                                             parser=only("--kv-dtype", "bf16", "int8", "fp8", "nvfp4", "k8v4"),
                                             help="numbers of the KV cache; bf16 (default) are the ones there are")]
Temperature = Annotated[float | None, typer.Option("--temperature", metavar="X", parser=decimal("--temperature"),
                                                   help="0…2; 0 is greedy; default: the model's")]  # fmt: skip
TopP = Annotated[float | None, typer.Option("--top-p", metavar="X", parser=decimal("--top-p"), help="0…1")]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="N", parser=unsigned("--top-k"), help="0…20; 0 means 20")]
MinP = Annotated[float | None, typer.Option("--min-p", metavar="X", parser=decimal("--min-p"), help="0…1")]
Presence = Annotated[float | None, typer.Option("--presence-penalty", metavar="X", parser=decimal("--presence-penalty"),
                                                help="-2…2, on generated tokens")]  # fmt: skip
Frequency = Annotated[float | None, typer.Option("--frequency-penalty", metavar="X", parser=decimal("--frequency-penalty"),
                                                 help="-2…2, on generated tokens")]  # fmt: skip
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", parser=unsigned("--seed"),
                                          help="64 bits; default 0")]  # fmt: skip
Greedy = Annotated[bool, typer.Option("--greedy", help="always the most likely token; overrides sampling")]
StopIds = Annotated[list[int] | None, typer.Option("--stop-token-id", metavar="N", parser=unsigned("--stop-token-id"),
                                                   help="end at this id; repeatable")]  # fmt: skip
Stops = Annotated[list[str] | None, typer.Option("--stop", metavar="TEXT", help="end at this text; repeatable")]
ReasoningStops = Annotated[list[str] | None, typer.Option("--reasoning-stop", metavar="TEXT",
                                                          help="end when reasoning says this; repeatable")]  # fmt: skip
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="do not end at the model's own end ids")]
MaxNew = Annotated[int | None, typer.Option("--max-new", metavar="N", parser=unsigned("--max-new"),
                                            help="most output tokens; default 128")]  # fmt: skip
NoThinking = Annotated[bool, typer.Option("--no-thinking", help="answer without reasoning first")]
Effort = Annotated[str | None, typer.Option("--reasoning-effort", metavar="LEVEL",
                                            help="none, minimal, low, medium, high, xhigh or max")]  # fmt: skip
TemplateFile = Annotated[Path | None, typer.Option("--chat-template", metavar="FILE",
                                                   help="Jinja file instead of the artifact's template")]  # fmt: skip
