"""``ninferc batch``: requests of a JSON-lines file, lanes joining and leaving, one result line per request."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from runtime.cli import options as opt
from runtime.cli.errors import InputError, UsageError
from runtime.cli.files import AtomicFile, read_bytes
from runtime.cli.io import Diagnostics, Level
from runtime.cli.load import Choices, Source
from runtime.cli.observe import open_diagnostics, timed
from runtime.cli.prompt import check_ids, open_frontend
from runtime.frontend.errors import FrontendError, OptionError
from runtime.frontend.frontend import Frontend, Prompt, PromptOptions
from runtime.frontend.messages import conversation
from runtime.frontend.presets import SamplingOptions, apply_options, preset
from runtime.generate import Job, Outcome, generate, request_of
from runtime.session import RequestError, Session, check_request

MAX_INPUT_BYTES = 1 << 30
MAX_REQUESTS = 1 << 20
_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
             "presence_penalty": "presence", "frequency_penalty": "frequency", "seed": "seed", "greedy": "greedy",
             "ignore_eos": "ignore_eos", "max_new": "max_new", "stop_token_ids": "stop_token_ids"}  # fmt: skip
_BOOLEANS = ("greedy", "ignore_eos", "thinking", "raw")
_LISTS = {"stop": str, "reasoning_stop": str, "stop_token_ids": int}
_PROMPTS = ("prompt", "messages", "ids")
_MEMBERS = {"id", "tools", "reasoning_effort", "thinking_budget", *_PROMPTS, *_SAMPLING, *_BOOLEANS, *_LISTS}


@dataclass(frozen=True)
class Entry:
    """A checked request: the user's ``id`` (None: none given), its prompt and the job."""

    id: str | int | None
    prompt: Prompt
    job: Job


def read_lines(data: bytes, name: str) -> list[tuple[int, dict[str, Any]]]:
    """(line number from 1, object) of every line that is not blank. Raises InputError naming the line."""
    out = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
        except UnicodeDecodeError as error:
            raise InputError(f"{name}, line {number}: not UTF-8 at byte {error.start}") from None
        except (ValueError, RecursionError) as error:
            raise InputError(f"{name}, line {number}: not JSON ({str(error).splitlines()[0]})") from None
        if not isinstance(value, dict):
            raise InputError(f"{name}, line {number}: a JSON object is needed")
        out.append((number, value))
    if not out:
        raise InputError(f"{name} holds no requests; one JSON object per line is needed")
    if len(out) > MAX_REQUESTS:
        raise InputError(f"{name} holds {len(out)} requests; at most {MAX_REQUESTS} are allowed")
    return out


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def _check_members(value: dict[str, Any]) -> None:
    """Member names and the types that nothing later checks. Raises InputError."""
    unknown = next((key for key in value if key not in _MEMBERS), None)
    if unknown is not None:
        raise InputError(f"unknown member {json.dumps(unknown)[:60]}; allowed are {', '.join(sorted(_MEMBERS))}")
    given = [key for key in _PROMPTS if key in value]
    if len(given) != 1:
        raise InputError(f"exactly one of {', '.join(_PROMPTS)} is needed; {', '.join(given) or 'none'} given")
    name = value.get("id")
    if isinstance(name, bool) or not (name is None or isinstance(name, str | int)):
        raise InputError("id must be a string or an integer")
    for key in _BOOLEANS:
        if not isinstance(value.get(key, False), bool):
            raise InputError(f"{key} must be true or false")
    for key, kind in _LISTS.items():
        items = value.get(key, [])
        if not isinstance(items, list) or any(isinstance(item, bool) or not isinstance(item, kind) for item in items):
            raise InputError(f"{key} must be an array of {'strings' if kind is str else 'integers'}")
    for key, kind in (("prompt", str), ("reasoning_effort", str)):
        if key in value and not isinstance(value[key], kind):
            raise InputError(f"{key} must be a string")
    budget = value.get("thinking_budget", 1)
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise InputError("thinking_budget must be an integer")
    if "thinking_budget" in value and (value.get("thinking") is False or value.get("raw")):
        raise InputError("thinking_budget excludes thinking false and raw true")
    if "tools" in value and "messages" not in value:
        raise InputError("tools belong to messages")


def _prompt(value: dict[str, Any], frontend: Frontend | None) -> Prompt:
    options = PromptOptions(value.get("thinking"), value.get("reasoning_effort"))
    if "ids" in value:
        if options != PromptOptions():
            raise InputError("thinking and reasoning_effort choose how a template renders; ids need none")
        ids = check_ids(value["ids"], "ids")
        return Prompt(ids, "", False) if frontend is None else frontend.from_ids(ids)
    if frontend is None:
        raise InputError("the artifact has no tokenizer; only ids can be used")
    if "prompt" in value:
        return frontend.prompt(value["prompt"], options)
    whole = {"messages": value["messages"]} | ({"tools": value["tools"]} if "tools" in value else {})
    return frontend.prompt(conversation(whole, "messages"), options)


def read_entry(value: dict[str, Any], frontend: Frontend | None, source: Source) -> Entry:
    """A request of one line, checked against the program's limits. Raises InputError, FrontendError, RequestError."""
    _check_members(value)
    prompt = _prompt(value, frontend)
    wanted = SamplingOptions(**{field: value[key] for key, field in _SAMPLING.items() if key in value})
    if frontend is None:
        if any(value.get(key) for key in ("stop", "reasoning_stop", "raw")) or "thinking_budget" in value:
            raise InputError("stop, reasoning_stop, raw and thinking_budget need a tokenizer, and the artifact has none")
        params = apply_options(preset(source.artifact.identity.model_id, False, None), wanted, (), source.spec.vocab_ids)
        stream = budget = None
    else:
        params = frontend.sampling(wanted, thinking=prompt.thinking)
        stream = frontend.output_stream(prompt, params, stops=value.get("stop", ()), raw=value.get("raw", False),
                                        reasoning_stops=value.get("reasoning_stop", ()))  # fmt: skip
        budget = None
        if "thinking_budget" in value:
            budget = frontend.thinking_budget(value["thinking_budget"], prompt, params, source.limits.max_context)
    job = Job(request_of(prompt.ids, params, budget), stream, budget)
    check_request(job.request, source.limits)
    return Entry(value.get("id"), prompt, job)


def result_line(entry: Entry, outcome: Outcome) -> bytes:
    """One result as a JSON line. ``index`` counts the requests from 0."""
    record: dict[str, Any] = {"index": outcome.index} | ({} if entry.id is None else {"id": entry.id})
    stream = outcome.job.stream
    if stream is not None:
        answer = stream.answer
        record["text"] = answer.content
        if answer.reasoning:
            record["reasoning"] = answer.reasoning
        if answer.tool_calls:
            record["tool_calls"] = [asdict(call) for call in answer.tool_calls]
    record |= {"ids": outcome.ids, "finish_reason": str(outcome.finish)}
    if outcome.stop is not None:
        record["stop"] = outcome.stop
    record |= {"prompt_tokens": len(entry.prompt.ids), "generated_tokens": len(outcome.ids)}
    return json.dumps(record, ensure_ascii=False).encode("utf-8", "replace") + b"\n"


def batch(
    target: Annotated[Path, typer.Argument(metavar="PROGRAM|ARTIFACT", help="a program folder or a .ninfer file")],
    requests: Annotated[Path, typer.Argument(metavar="IN.jsonl", help="one request per line: prompt, messages or ids")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="OUT.jsonl", help="one result per line")],
    max_concurrency: opt.MaxConcurrency = None,
    as_finished: Annotated[bool, typer.Option("--as-finished", help="results as they end, not in the order given")] = False,
    device: opt.DeviceName = None,
    devices: opt.Devices = None,
    transport: opt.Transport = None,
    exchange: opt.Exchange = None,
    check_ranks: opt.CheckRanks = False,
    artifact: opt.ArtifactFile = None,
    arch: opt.Arch = None,
    card: opt.Card = None,
    max_context: opt.MaxContext = None,
    prefill_chunk: opt.PrefillChunk = None,
    kv_capacity: opt.RunCapacity = None,
    vram_headroom_mib: opt.Headroom = None,
    no_cuda_graph: opt.NoGraph = False,
    chat_template: opt.TemplateFile = None,
    numerics: opt.Numerics = None,
    rope: opt.Rope = None,
    kv_dtype: opt.KvDtype = None,
    yes: opt.Yes = False,
    log_level: opt.LogLevel = None,
) -> None:
    """Answer the requests of a file, up to B at a time. Each line is a JSON object with one of prompt, messages, ids.

    Optional members: id, tools, thinking, reasoning_effort, thinking_budget, max_new, temperature, top_p, top_k, min_p,
    presence_penalty, frequency_penalty, seed, greedy, stop, reasoning_stop, stop_token_ids, ignore_eos, raw.
    Every line is checked before anything runs; OUT.jsonl appears when all have ended.
    """
    say = open_diagnostics(log_level)
    data = read_bytes(requests, MAX_INPUT_BYTES, "IN.jsonl")
    lines = read_lines(data, str(requests))
    source = Source(target, Choices(artifact, device, arch, card, max_context, max_concurrency, prefill_chunk, kv_capacity,
                                    vram_headroom_mib, numerics, no_cuda_graph, yes, devices=devices,
                                    transport=transport, exchange=exchange, check_ranks=check_ranks), say)  # fmt: skip
    with timed(say, "frontend"):
        frontend = open_frontend(source.artifact, source.spec.vocab_rows, chat_template)
    entries: list[Entry] = []
    for number, value in lines:
        try:
            entries.append(read_entry(value, frontend, source))
        except (InputError, UsageError, FrontendError, RequestError) as error:
            text = str(error).replace("--", "") if isinstance(error, OptionError) else str(error)
            raise InputError(f"{requests}, line {number}: {text}") from None
    source.require_patience(sum(len(entry.prompt.ids) for entry in entries),
                            sum(entry.job.request.max_new for entry in entries))  # fmt: skip
    for note in frontend.notes if frontend else ():
        say.line(note, Level.WARNING)
    with AtomicFile(output) as file:
        backend = source.load()
        try:
            _answer(Session(backend), entries, max_concurrency, as_finished, file, say)
            backend.wait()
        finally:
            backend.close()
        source.ended()


def _answer(session: Session, entries: list[Entry], lanes: int | None, as_finished: bool, file: AtomicFile,
            say: Diagnostics) -> None:  # fmt: skip
    started, tokens, following = time.monotonic(), 0, 0
    held: dict[int, bytes] = {}  # results that wait for an earlier request
    with say.progress("answering", len(entries)) as bar:
        for outcome in generate(session, [entry.job for entry in entries], lanes):
            tokens += len(outcome.ids)
            bar.advance()
            line = result_line(entries[outcome.index], outcome)
            if as_finished:
                file.write(line)
                continue
            held[outcome.index] = line
            while following in held:
                file.write(held.pop(following))
                following += 1
    seconds = max(time.monotonic() - started, 1e-9)
    say.summary("requests", len(entries))
    say.summary("generated tokens", tokens)
    say.summary("total", f"{seconds:.3f} s")
    say.summary("generated tok/s", f"{tokens / seconds:.1f}")
