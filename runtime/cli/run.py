"""``ninferc run``: one prompt, one answer, streamed."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from compiler.control import PAGE
from compiler.explain.memory import amount, device_memory
from runtime.cli import options as opt
from runtime.cli.errors import UsageError
from runtime.cli.io import Diagnostics, Level, Output
from runtime.cli.load import DEFAULT_HEADROOM, Choices, Source
from runtime.cli.observe import open_diagnostics, timed
from runtime.cli.prompt import make_prompt, open_frontend
from runtime.frontend.frontend import PromptOptions
from runtime.frontend.output_stream import Event, TextPiece, ToolCalls
from runtime.frontend.presets import SamplingOptions, SamplingParams, apply_options, preset
from runtime.generate import Job, Outcome, generate, request_of
from runtime.session import Session, check_request, pages_of


def run(
    target: Annotated[Path, typer.Argument(metavar="PROGRAM|ARTIFACT", help="a program folder or a .ninfer file")],
    prompt: Annotated[str | None, typer.Option("--prompt", metavar="TEXT", help="one user turn")] = None,
    messages: Annotated[Path | None, typer.Option("--messages", metavar="FILE", help="a conversation, JSON")] = None,
    ids: Annotated[Path | None, typer.Option("--ids", metavar="FILE", help="token ids, a JSON array")] = None,
    device: opt.DeviceName = None,
    devices: opt.Devices = None,
    transport: opt.Transport = None,
    exchange: opt.Exchange = None,
    check_ranks: opt.CheckRanks = False,
    artifact: opt.ArtifactFile = None,
    arch: opt.Arch = None,
    card: opt.Card = None,
    max_new: opt.MaxNew = None,
    max_context: opt.MaxContext = None,
    prefill_chunk: opt.PrefillChunk = None,
    kv_capacity: opt.RunCapacity = None,
    vram_headroom_mib: opt.Headroom = None,
    no_cuda_graph: opt.NoGraph = False,
    no_thinking: opt.NoThinking = False,
    reasoning_effort: opt.Effort = None,
    thinking_budget: opt.ThinkingBudget = None,
    chat_template: opt.TemplateFile = None,
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    top_k: opt.TopK = None,
    min_p: opt.MinP = None,
    presence_penalty: opt.Presence = None,
    frequency_penalty: opt.Frequency = None,
    seed: opt.Seed = None,
    greedy: opt.Greedy = False,
    stop_token_id: opt.StopIds = None,
    stop: opt.Stops = None,
    reasoning_stop: opt.ReasoningStops = None,
    ignore_eos: opt.IgnoreEos = False,
    raw_output: Annotated[bool, typer.Option("--raw-output", help="print all text, special tokens included")] = False,
    print_token_ids: Annotated[bool, typer.Option("--print-token-ids", help="ids of prompt and answer on stderr")] = False,
    prefill: Annotated[str, typer.Option("--prefill", metavar="chunks|none", help="none: through decode steps")] = "chunks",
    numerics: opt.Numerics = None,
    rope: opt.Rope = None,
    kv_dtype: opt.KvDtype = None,
    yes: opt.Yes = False,
    log_level: opt.LogLevel = None,
) -> None:
    """Answer one prompt. The answer goes to stdout as it comes; reasoning and a summary go to stderr.

    An artifact is compiled into the user cache first. Without a GPU the same program runs on the CPU.
    """
    started = time.monotonic()
    say = open_diagnostics(log_level)
    if print_token_ids and not say.says(Level.INFO):
        raise UsageError(f"--print-token-ids writes to stderr, and --log-level {log_level} leaves that out; info is needed")
    if prefill not in ("chunks", "none"):
        raise UsageError(f"--prefill {prefill[:40]!r}: chunks or none is allowed")
    if thinking_budget is not None and (no_thinking or raw_output):
        raise UsageError(f"--thinking-budget and {'--no-thinking' if no_thinking else '--raw-output'} exclude each other")
    source = Source(target, Choices(artifact, device, arch, card, max_context, None, prefill_chunk, kv_capacity,
                                    vram_headroom_mib, numerics, no_cuda_graph, yes, devices=devices,
                                    transport=transport, exchange=exchange, check_ranks=check_ranks), say)  # fmt: skip
    with timed(say, "frontend"):
        frontend = open_frontend(source.artifact, source.spec.vocab_rows, chat_template)
    given = make_prompt(frontend, prompt, messages, ids, PromptOptions(False if no_thinking else None, reasoning_effort))
    wanted = SamplingOptions(temperature, top_p, top_k, min_p, presence_penalty, frequency_penalty, seed, greedy, ignore_eos,
                             max_new, stop_token_id or ())  # fmt: skip
    stream = budget = None
    if frontend is not None:
        params = frontend.sampling(wanted, thinking=given.thinking)
        stream = frontend.output_stream(given, params, stops=stop or (), reasoning_stops=reasoning_stop or (), raw=raw_output)
        if thinking_budget is not None:
            budget = frontend.thinking_budget(thinking_budget, given, params, source.limits.max_context)
    else:
        if stop or reasoning_stop or raw_output or thinking_budget is not None:
            raise UsageError("--stop, --reasoning-stop, --raw-output and --thinking-budget need a tokenizer, and the artifact "
                             "has none")  # fmt: skip
        params = apply_options(preset(source.artifact.identity.model_id, False, None), wanted, (), source.spec.vocab_ids)
    job = Job(request_of(given.ids, params, budget), stream, budget)
    check_request(job.request, source.limits)
    source.require_patience(len(given.ids), params.max_new)
    for note in frontend.notes if frontend else ("the artifact has no tokenizer: the answer is printed as token ids",):
        say.line(note, Level.WARNING)

    backend = source.load()
    output = Output()
    try:
        session = Session(backend, prefill)

        def show(_: int, events: list[Event], token: int) -> None:
            if stream is None:
                output.write(f"{'' if output.ended else ' '}{token}")
            for event in events:
                if isinstance(event, TextPiece) and event.channel == "content":
                    output.write(event.text)
                elif isinstance(event, TextPiece):
                    say.stream(event.text)
                elif isinstance(event, ToolCalls):
                    for call in event.calls:
                        say.line(f"tool call {json.dumps(asdict(call), ensure_ascii=False)}")

        prepared = time.monotonic() - started
        (outcome,) = generate(session, [job], 1, show)
        output.end_line()
        backend.wait()
    finally:
        backend.close()
    source.ended()
    if print_token_ids:
        say.line("prompt ids " + " ".join(map(str, given.ids)))
        say.line("answer ids " + " ".join(map(str, outcome.ids)))
    _summary(say, outcome, params, prepared, time.monotonic() - started, source)


def _summary(say: Diagnostics, outcome: Outcome, params: SamplingParams, prepared: float, total: float, source: Source) -> None:
    row, count, prompt = say.summary, len(outcome.ids), len(outcome.job.request.prompt)
    row("prepare", f"{prepared:.3f} s")
    row("prefill", f"{outcome.prefill:.3f} s")
    row("decode", f"{outcome.decode:.3f} s")
    row("total", f"{total:.3f} s")
    row("sampling", _sampling(params))
    row("finish reason", outcome.finish if outcome.stop is None else f"{outcome.finish} {outcome.stop!r}")
    row("prompt tokens", prompt)
    row("reused tokens", 0)
    row("generated tokens", count)
    row("prefill tok/s", f"{prompt / outcome.prefill:.1f}" if outcome.prefill else "-")
    row("decode tok/s", f"{(count - 1) / outcome.decode:.1f}" if outcome.decode else "-")
    limits = source.limits
    policy = "full context per lane"
    if limits.pages * PAGE < limits.lanes * limits.max_context:
        headroom = DEFAULT_HEADROOM if source.choices.headroom is None else source.choices.headroom
        policy = f"as the GPU has room, {headroom} MiB left free" if source.choices.kv_capacity == opt.AUTO else "given"
    row("kv capacity", f"{limits.pages * PAGE} tokens, {policy}")
    used = pages_of(outcome.job.request, limits)
    row("kv pages used / max", f"{used} / {limits.pages}")
    assert source.program is not None
    pool = sum(uses["kv pool"] for uses in device_memory(source.program))
    row("kv payload used / max", f"{amount(pool * used / limits.pages)} / {amount(pool)}")
    row("kv dtype", "bf16")
    row("speculation", "off")


def _sampling(params: SamplingParams) -> str:
    if params.greedy:
        return "greedy"
    return (f"temperature {params.temperature:g} top-p {params.top_p:g} top-k {params.top_k} min-p {params.min_p:g} "
            f"presence {params.presence:g} frequency {params.frequency:g} seed {params.seed}")  # fmt: skip
