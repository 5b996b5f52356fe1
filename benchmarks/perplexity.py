"""Quality of the trained miniature in every weight format: perplexity of held-out text and needles found in it.

    python -m benchmarks.perplexity [--device cpu|cuda:N] [-o FILE.json] [--weights NAME,NAME] [--windows N] [--needles N]

Converts the bf16 checkpoint ../shared/models/tiny-hybrid (or $NINFERC_SHARED) to bf16, groupwise-int, nvfp4 with scales by
absmax and nvfp4 with scales by least squares, compiles each for the device and measures
- perplexity: windows of 4096 tokens of haystack.txt, each from a fresh state and without a first token of its own; every
  token after the first is scored and the last target of a window is the first token of the next (98 windows in all);
- needles: greedy exact match of the whole answer to a question about one fact hidden in held-out text, plain and as a chat;
- error: root mean square of (decoded - source) over that of the source, all text layers' matrices.
Rows are written as they come. The CPU runs the same programs on the Python VM: some seconds a window.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

import artifacts
from artifacts.convert import Options, convert
from artifacts.layouts import decode
from benchmarks.artifacts import environment as host_environment
from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import caps
from runtime.backend import Backend, VMBackend
from runtime.open import ArtifactWeights
from runtime.session import Request, Session
from runtime.vm import Machine
from runtime.vm.weights import WeightStore

ROOT = Path(__file__).resolve().parents[1]
WINDOW = 4096
LENGTHS = (512, 1024, 2048, 4096)
WEIGHTS = {
    "bf16": Options("bf16"),
    "groupwise-int": Options("groupwise-int"),
    "nvfp4-absmax": Options("nvfp4", scale="absmax"),
    "nvfp4-mse": Options("nvfp4", scale="mse"),
}
Array = np.ndarray[Any, Any]
Row = dict[str, Any]


@dataclass
class Case:
    """One checkpoint in one weight format on one device."""

    weights: str
    artifact: artifacts.Artifact
    backend: Backend

    @property
    def session(self) -> Session:
        return Session(self.backend)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def open_backend(artifact: artifacts.Artifact, device: str, context: int) -> Backend:
    """A program of the artifact on `cpu` (engine numerics on the VM) or `cuda:N`."""
    options, store = CompileOptions(max_context=context, prefill_chunk=1024), WeightStore(ArtifactWeights(artifact))
    if device == "cpu":
        program = compile_program(artifact, caps("sm_90a"), options, images=False)
        return VMBackend(Machine(program, store, "engine"))
    from runtime.cuda.backend import CudaBackend
    from runtime.cuda.device import Device

    index = int(device.removeprefix("cuda:"))
    return CudaBackend(compile_program(artifact, Device(index).caps(), options), store, [index], False)


def environment(device: str, folder: Path) -> Row:
    """The record of the machine, with the GPU where one is used."""
    record = {"device": device, "host": host_environment(folder)}
    if device != "cpu":
        from runtime.bench.environment import describe
        from runtime.cuda.device import Device

        record |= describe([Device(int(device.removeprefix("cuda:")))])
    return record


# Perplexity


def loss_sum(logits: Array, targets: Array) -> float:
    """Sum of negative log likelihoods of `targets` [T] under `logits` [T, V]."""
    wide = logits.astype(np.float64)
    top = wide.max(axis=1)
    total = top + np.log(np.exp(wide - top[:, None]).sum(axis=1))
    return float((total - wide[np.arange(len(targets)), targets]).sum())


def perplexity(case: Case, ids: Array, windows: int, window: int) -> Row:
    """exp of the mean loss over the first `windows` windows."""
    session, total, start = case.session, 0.0, time.perf_counter()
    for number in range(windows):
        chunk, at = ids[number * window : (number + 1) * window + 1], 0
        for logits in session.score([int(token) for token in chunk[:window]]):
            count = min(len(logits), len(chunk) - 1 - at)
            total += loss_sum(logits[:count], chunk[1 + at : 1 + at + count])
            at += count
        if at != window:
            raise RuntimeError(f"window {number}: {at} of {window} tokens were scored")
    loss = total / (windows * window)
    return {
        "what": "perplexity", "weights": case.weights, "windows": windows, "window": window,
        "tokens": windows * window, "loss": round(loss, 5), "perplexity": round(math.exp(loss), 4),
        "seconds": round(time.perf_counter() - start, 2),
    }  # fmt: skip


# Needles


class Needles:
    """Prompts with one hidden fact, the same for every weight format."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, stream: Array) -> None:
        spec = importlib.util.spec_from_file_location("tiny_hybrid_tasks", folder / "tasks" / "tasks.py")
        assert spec is not None and spec.loader is not None
        self.tasks = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.tasks)
        self.tokenizer, self.stream = tokenizer, stream
        ends = [id for text in ("\n\n", ".\n\n") for id in tokenizer.encode(text, add_special_tokens=False).ids]
        self.paragraphs = np.flatnonzero(np.isin(stream, ends)) + 1

    def prompts(self, kind: str, length: int, count: int) -> Iterator[tuple[list[int], list[int]]]:
        """(prompt, answer) of about `length` tokens."""
        builder = self.tasks.RowBuilder(self.tokenizer, [(self.stream, self.paragraphs, 1.0)], random.Random(1000 + length))
        for _ in range(count):
            fact = builder.F.fact(builder.r.choice(self.tasks.KINDS))
            head, tail, answer = "", f".\n\nQuestion: {fact.question}\nAnswer:", f" {fact.value}\n\n"
            if kind == "chat":
                head, answer = "<|im_start|>user\n", f"{fact.value}<|im_end|>"
                tail = (f".\n\n{fact.question} Reply with the value only.<|im_end|>\n<|im_start|>assistant\n"
                        "<think>\n\n</think>\n\n")  # fmt: skip
            before, after = builder.enc(head), builder.enc(tail)
            body = builder.hide(length - len(before) - len(after) - 48, [fact.statement])
            yield [*before, *(int(token) for token in body), *after], builder.enc(answer)

    def row(self, case: Case, kind: str, length: int, count: int) -> Row:
        """Share of exact answers."""
        session, correct, start = case.session, 0, time.perf_counter()
        for prompt, answer in self.prompts(kind, length, count):
            correct += [event.token for event in session.generate(Request(prompt, len(answer)))] == answer
        return {
            "what": "needles", "weights": case.weights, "kind": kind, "length": length, "prompts": count,
            "correct": correct, "accuracy": round(correct / count, 4), "seconds": round(time.perf_counter() - start, 2),
        }  # fmt: skip


# Weights


def weight_error(artifact: artifacts.Artifact, source: artifacts.Artifact) -> Row:
    """How far the matrices of the text layers are from the bf16 ones, and what they take."""
    squares = errors = stored = elements = 0.0
    for name in artifact.model.bindings:
        values = [_rows(a, name) for a in (artifact, source)]
        if name.startswith("text/layers/") and values[0].ndim == 2 and not name.endswith("convolution"):
            squares += float((values[1] ** 2).sum())
            errors += float(((values[0] - values[1]) ** 2).sum())
    for entry in artifact.objects.values():
        if isinstance(entry, artifacts.TensorObject):
            stored += entry.bytes
            elements += math.prod(entry.shape)
    return {"what": "weights", "relative_rms_error": round(math.sqrt(errors / squares), 6), "file_bytes": artifact.file_bytes,
            "bits_per_weight": round(8 * stored / elements, 3)}  # fmt: skip


def _rows(artifact: artifacts.Artifact, name: str) -> Array:
    parts = []
    for tensor, r0, r1 in artifact.parameter(name):
        data = artifact.tensor_bytes(tensor.name)
        parts.append(np.asarray(decode(tensor.format, tensor.layout, tensor.shape, data))[r0:r1])
    return np.concatenate(parts)


def measure(options: argparse.Namespace, folder: Path, add: Callable[[Row], None]) -> None:
    """All rows, one weight format after the other."""
    model: Path = options.shared / "models" / "tiny-hybrid"
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    ids = np.array(tokenizer.encode((model / "haystack.txt").read_text(), add_special_tokens=False).ids)
    windows = min(options.windows or len(ids), len(ids) // options.window)
    needles = Needles(model, tokenizer, ids) if options.needles else None
    convert(model, folder / "source.ninfer", WEIGHTS["bf16"])
    source = artifacts.open(folder / "source.ninfer")
    for weights in options.weights:
        path = folder / f"{weights}.ninfer"
        convert(model, path, WEIGHTS[weights])
        artifact = artifacts.open(path)
        add({"weights": weights} | weight_error(artifact, source))
        backend = open_backend(artifact, options.device, max(options.window, *options.lengths))
        try:
            case = Case(weights, artifact, backend)
            if windows:
                add(perplexity(case, ids, windows, options.window))
            for kind in ("plain", "chat") if needles is not None else ():
                for length in options.lengths:
                    add(needles.row(case, kind, length, options.needles))  # type: ignore[union-attr]
        finally:
            backend.close()


def main(arguments: list[str] | None = None) -> int:
    """Measure and print, or write to -o FILE, the record as JSON."""
    shared = Path(os.environ.get("NINFERC_SHARED", ROOT.parent / "shared"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="write the record here instead of to stdout")
    parser.add_argument("--device", default="cuda:0", help="cpu or cuda:N; default cuda:0")
    parser.add_argument("--weights", type=lambda text: text.split(","), default=list(WEIGHTS), help=", ".join(WEIGHTS))
    parser.add_argument("--windows", type=int, default=0, help="windows of the haystack; default all")
    parser.add_argument("--window", type=int, default=WINDOW, help="tokens of a window; default 4096")
    parser.add_argument("--needles", type=int, default=100, help="prompts per kind and length; default 100, 0 for none")
    parser.add_argument("--lengths", type=lambda text: [int(x) for x in text.split(",")], default=list(LENGTHS))
    parser.add_argument("--shared", type=Path, default=shared, help="folder with models/tiny-hybrid")
    options = parser.parse_args(arguments)
    unknown = sorted(set(options.weights) - set(WEIGHTS))
    if unknown:
        parser.error(f"--weights {unknown[0]}: {', '.join(WEIGHTS)} are known")
    if not (options.shared / "models" / "tiny-hybrid" / "model.safetensors").is_file():
        parser.error(f"{options.shared / 'models' / 'tiny-hybrid'} has no checkpoint; set --shared or NINFERC_SHARED")
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        say(json.dumps(row))
        if options.output is not None:
            write(options.output, record)

    with tempfile.TemporaryDirectory(prefix="ninferc-perplexity-") as name:
        folder = Path(name)
        record = {"benchmark": "perplexity", "environment": environment(options.device, folder), "rows": rows}
        published = json.loads((options.shared / "models" / "tiny-hybrid" / "eval.json").read_text())
        keys = [f"{kind}/{length}/none" for kind in ("plain", "chat") for length in options.lengths]
        needle = {key: published["needle"][key]["accuracy"] for key in keys if key in published["needle"]}
        record["reference"] = {"haystack": published["perplexity"]["haystack"], "needle": needle}
        measure(options, folder, add)
    if options.output is None:
        print(json.dumps(record, indent=1))
    return 0


def write(path: Path, record: Row) -> None:
    """The record so far, complete or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(record, indent=1) + "\n", "utf-8")
    os.replace(partial, path)


if __name__ == "__main__":
    raise SystemExit(main())
