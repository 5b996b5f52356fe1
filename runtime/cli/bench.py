"""``ninferc bench``: prefill and decode speed of a program, as records."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import artifacts
from runtime.cli.errors import UsageError
from runtime.cli.files import AtomicFile
from runtime.cli.io import Output
from runtime.cli.options import MaxContext, integer

if TYPE_CHECKING:
    from runtime.bench.measure import Bench
    from runtime.bench.memory import DeviceMemory
    from runtime.cuda.backend import CudaBackend

Rows = list[dict[str, Any]]


def _numbers(text: str, option: str, least: int = 1) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or min(values) < least:
        raise UsageError(f"{option} {text!r}: a comma-separated list of integers from {least} on is needed")
    return values


def bench_command(
    program: Annotated[Path, typer.Argument(help="Program folder or artifact.")],
    prompts: Annotated[str, typer.Option("-p", help="Prompt lengths for prefill and contexts for decode.")] = "1024,8192",
    steps_given: Annotated[int | None, typer.Option("-n", metavar="N", parser=integer("-n", 1, 100_000),
                                                    help="Decode steps per repeat; default 128.")] = None,  # fmt: skip
    batches: Annotated[str, typer.Option("-b", help="Lanes.")] = "1,8",
    columns: Annotated[str, typer.Option("-t", help="Columns per lane of one step.")] = "1",
    repeats_given: Annotated[int | None, typer.Option("-r", metavar="N", parser=integer("-r", 1, 1000),
                                                      help="Repeats; the median counts; default 3.")] = None,  # fmt: skip
    weights: Annotated[str, typer.Option("--weights", help="file or synth (random weights made on the GPU).")] = "file",
    output: Annotated[str, typer.Option("-o", help="table or json.")] = "table",
    output_file: Annotated[Path | None, typer.Option("--output-file", help="Write the JSON record here.")] = None,
    devices: Annotated[str, typer.Option("--devices", help="CUDA device indices, one per rank: 0 or 0,1.")] = "0",
    transport: Annotated[str, typer.Option("--transport", help="auto, peer, host or staged (two ranks).")] = "auto",
    exchange: Annotated[str, typer.Option("--exchange", help="fp32 or bf16: what two ranks send in decode.")] = "fp32",
    seed: Annotated[int, typer.Option("--seed")] = 0,
    max_context: MaxContext = None,
    card: Annotated[str | None, typer.Option("--as", help="Build for the GPU here with that card's capabilities.")] = None,
    no_cuda_graph: Annotated[bool, typer.Option("--no-cuda-graph")] = False,
    skip_prefill: Annotated[bool, typer.Option("--skip-prefill")] = False,
    load: Annotated[bool, typer.Option("--load", help="Only the time from opening the file to the first token.")] = False,
) -> None:
    """Measure a program on the GPU; every record says what it was measured on and with."""
    from runtime.bench.device_fill import MINIMUM_READ_RATE
    from runtime.bench.environment import describe, gpu_state
    from runtime.bench.measure import Bench
    from runtime.bench.memory import device_memory
    from runtime.bench.open import SHORT_PROMPT, open_for_bench
    from runtime.cli.options import WIRES

    steps, repeats = steps_given or 128, repeats_given or 3
    if output not in ("table", "json"):
        raise UsageError(f"-o {output[:40]!r}: table or json is allowed")
    if exchange not in WIRES:
        raise UsageError(f"--exchange {exchange[:40]!r}: {', '.join(WIRES)} are allowed")
    contexts, lanes, widths = _numbers(prompts, "-p"), _numbers(batches, "-b"), _numbers(columns, "-t")
    began = time.perf_counter()
    ranks = _numbers(devices, "--devices", least=0)
    if len(set(ranks)) < len(ranks):
        print(f"--devices {devices}: a test mode, the ranks share one GPU", file=sys.stderr)
    pairs = [SHORT_PROMPT, *((b, t) for b in lanes for t in widths)]
    need = max_context or max(contexts) + (steps + 4) * max(widths) + 64

    def opening() -> CudaBackend:
        return open_for_bench(program, ranks, pairs, need, weights, score=False, card=card, eager=no_cuda_graph, seed=seed,
                              transport=transport, exchange=WIRES[exchange])  # fmt: skip

    def measured() -> dict[str, Any]:
        backend = opening()
        built = backend.program
        loaded = time.perf_counter()
        try:
            memory = device_memory(backend)  # before anything that only measuring needs
            bench = Bench(backend, seed)
            record: dict[str, Any] = describe(backend.devices)
            record |= {
                "command": ["ninferc", *sys.argv[1:]],
                "artifact": {"model_id": built.artifact.model_id, "weights_id": built.artifact.weights_id,
                             "file_bytes": built.artifact.file_bytes, "directory_sha256": built.artifact.directory_sha256},
                "weights": "synthetic, generated on the GPU" if weights == "synth" else "file",
                "cache": "filled with random values",
                "caps": {"arch": built.caps.arch, "as": card or "", "sms": built.caps.sms},
                "tp": built.tp, "devices": ranks, "transport": backend.exchange.transport if backend.exchange else "",
                "exchange": exchange if built.tp > 1 else "", "seed": seed, "repeats": repeats, "steps": steps,
                "regions_bytes": built.regions, "open_seconds": loaded - began,
            }  # fmt: skip
            rates = bench.read_rates()
            rate = max(rates.values())
            record["roofline_void"] = "H200" in record["gpu"][0] and rate < MINIMUM_READ_RATE
            if record["roofline_void"]:
                print(f"the read kernel reached {rate / 1e12:.2f} TB/s of at least {MINIMUM_READ_RATE / 1e12}: roofline "
                      "fractions of this run are void", file=sys.stderr)  # fmt: skip
            rows: Rows = [{"case": f"{kernel} 8 GiB", "metric": "bandwidth", "value": each / 1e9, "unit": "GB/s"}
                          for kernel, each in rates.items()]  # fmt: skip
            name = f"{built.artifact.model_id}/{built.artifact.weights_id} tp{built.tp}"
            bench.fill_caches()
            rows += _decode_rows(bench, name, rate, contexts, [(b, t) for b in lanes for t in widths], steps, repeats)
            record["state_decode"] = [gpu_state(d.index) for d in backend.devices]
            if not skip_prefill:
                rows += _prefill_rows(bench, name, contexts, repeats)
            rows += _memory_rows(name, memory, device_memory(backend))
            record["state_after"] = [gpu_state(d.index) for d in backend.devices]
            record["rows"] = rows
        finally:
            backend.close()
        return record

    if load and weights != "file":
        raise UsageError("--load measures reading the file; it needs --weights file")
    with ExitStack() as stack:
        # a place that cannot be written is said before anything is measured
        file = None if output_file is None else stack.enter_context(AtomicFile(output_file))
        record = _load_record(program, opening, repeats, seed) if load else measured()
        text = json.dumps(record, indent=1)
        if file is not None:
            file.write(text.encode() + b"\n")
    out = Output()
    if output == "json":
        out.write(text + "\n")
        return
    for row in record["rows"]:
        out.write(f"{row['case']:64s} {row['metric']:16s} {row['value']:14.4f} {row['unit']}\n")


def _decode_rows(bench: Bench, name: str, rate: float, contexts: list[int], shapes: list[tuple[int, int]], steps: int,
                 repeats: int) -> Rows:  # fmt: skip
    """Steps of (lanes, columns) at every context, and their share of the read bandwidth ``rate``."""
    rows: Rows = []
    for context in contexts:
        for b, t in shapes:
            phase = bench.program.phases[f"decode{b}x{t}"]
            timing = bench.decode(b, t, context, steps, repeats)
            moved = bench.step_bytes(phase, context)
            case = f"{name} ctx{context} bf16kv decode T{t} B{b}"
            rows += [
                {"case": case, "metric": "step", "value": timing.median * 1e3, "unit": "ms",
                 "spread": [min(timing.seconds) * 1e3, max(timing.seconds) * 1e3]},
                {"case": case, "metric": "decode", "value": b * t / timing.median, "unit": "tok/s"},
                {"case": case, "metric": "bytes per device", "value": moved, "unit": "B"},
                {"case": case, "metric": "roofline", "value": moved / rate / timing.median, "unit": "fraction"},
                {"case": case, "metric": "host per launch", "value": timing.host * 1e6, "unit": "us"},
            ]  # fmt: skip
    return rows


def _prefill_rows(bench: Bench, name: str, contexts: list[int], repeats: int) -> Rows:
    """Prompts of every length, and the time to the first token of a short one."""
    rows: Rows = []
    for context in contexts:
        seconds = bench.prefill(context, max(1, min(repeats, 3)))
        rows.append({"case": f"{name} prompt{context} bf16kv prefill", "metric": "prefill", "unit": "tok/s",
                     "value": context / statistics.median(seconds),
                     "spread": [context / max(seconds), context / min(seconds)]})  # fmt: skip
    short = statistics.median(bench.first_token(20, max(repeats, 3)))
    rows.append({"case": f"{name} prompt20 first token", "metric": "time", "value": short * 1e3, "unit": "ms"})
    return rows


def _memory_rows(name: str, loaded: list[DeviceMemory], used: list[DeviceMemory]) -> Rows:
    """Bytes per device against ``plan``, when loaded and after all graphs have run. What is taken must stay within the plan
    and its allowance for the driver; what only measuring needs, its kernels above all, counts after use."""
    from runtime.cli.capacity import DRIVER_BYTES

    rows: Rows = []
    for first, last in zip(loaded, used, strict=True):
        values = {"planned": first.planned, "planned with the driver's own": first.planned + DRIVER_BYTES,
                  "reserved": first.reserved, "taken when loaded": first.taken, "taken after use": last.taken,
                  "resident": last.resident}  # fmt: skip
        rows += [{"case": f"{name} memory device {first.index}", "metric": metric, "value": value, "unit": "B"}
                 for metric, value in values.items()]  # fmt: skip
    return rows


def _load_record(path: Path, opening: Callable[[], CudaBackend], repeats: int, seed: int) -> dict[str, Any]:
    """The load case: times from opening to the first token, and the links' own rate."""
    from runtime.bench import load
    from runtime.bench.environment import describe
    from runtime.open import is_program, open_program

    opening().close()  # compiles the program where it is not in the cache
    artifact = open_program(path, None).artifact if is_program(path) else artifacts.open(path)
    artifact.open_parts()
    warmed = load.warm(artifact)
    loads, backend = load.measure(opening, repeats, seed)
    try:
        built = backend.program
        link = load.pinned_rate(backend.devices)
        record = describe(backend.devices) | {
            "command": ["ninferc", *sys.argv[1:]], "weights": "file", "page_cache": f"{warmed} bytes read once before",
            "artifact": {"model_id": built.artifact.model_id, "weights_id": built.artifact.weights_id,
                         "file_bytes": built.artifact.file_bytes, "directory_sha256": built.artifact.directory_sha256},
            "caps": {"arch": built.caps.arch, "sms": built.caps.sms}, "tp": built.tp, "repeats": repeats, "seed": seed,
        }  # fmt: skip
    finally:
        backend.close()
    case = f"{built.artifact.model_id}/{built.artifact.weights_id} tp{built.tp} load"

    def row(metric: str, values: list[float], unit: str) -> dict[str, Any]:
        return {"case": case, "metric": metric, "value": statistics.median(values), "unit": unit,
                "spread": [min(values), max(values)]}  # fmt: skip

    record["rows"] = [
        row("open to first token", [item.first_token for item in loads], "s"),
        row("open to ready", [item.ready for item in loads], "s"),
        row("weights", [item.upload for item in loads], "s"),
        row("weights: buffers page-locked by all threads", [item.times.prepare for item in loads], "s"),
        row("weights: a thread reads", [item.times.read for item in loads], "s"),
        row("weights: a thread gives copies to the driver", [item.times.send for item in loads], "s"),
        row("weights: a thread waits for the device", [item.times.wait for item in loads], "s"),
        row("weights: a thread gives buffers back", [item.times.finish for item in loads], "s"),
        row("weights: threads", [item.times.threads for item in loads], "count"),
        row("weights rate", [item.rate / 1e9 for item in loads], "GB/s"),
        {"case": case, "metric": "bytes", "value": loads[0].nbytes, "unit": "B"},
        {"case": case, "metric": "pinned copy", "value": link / 1e9, "unit": "GB/s"},
        row("of the pinned copy", [item.rate / link for item in loads], "fraction"),
    ]
    return record
