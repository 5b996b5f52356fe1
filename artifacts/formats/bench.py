"""Encode and decode throughput per format on this CPU: `python -m artifacts.formats.bench [-o FILE]`.

Encode is BF16 words to stored bytes (format and layout), decode is stored bytes to float32. Figures are the best of
three runs over one matrix of 1024 x 5120 random normal weights on one thread, in megabytes (10^6) of BF16 input or
float32 output per second, and in millions of weights per second. Row blocks are independent: more threads add up as far
as free cores and memory bandwidth go (`--threads N` measures that).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from artifacts.formats import FORMATS, SCALE_METHODS, Array, EncodedTensor, Nvfp4Format, bf16_to_f32, f32_to_bf16
from artifacts.layouts import decode, layout_of

ROWS, COLUMNS, REPEATS = 1024, 5120, 3


def best_seconds(run: Callable[[], object]) -> float:
    """Least wall time of REPEATS calls."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def encode_and_pack(name: str, words: Array, threads: int, scale: str) -> Array:
    """Stored bytes of a matrix of BF16 words."""
    fmt = FORMATS[name]
    if isinstance(fmt, Nvfp4Format):
        tensor: EncodedTensor = fmt.encode(words, threads=threads, scale=scale)
    elif name == "FP32":
        tensor = fmt.encode(bf16_to_f32(words))
    else:
        tensor = fmt.encode(words, threads=threads)
    return layout_of(name).pack(tensor)


def measure(name: str, words: Array, threads: int, scale: str = "") -> dict[str, Any]:
    """One row of the report."""
    stored = encode_and_pack(name, words, threads, scale or SCALE_METHODS[0])
    layout = layout_of(name).name
    encode_s = best_seconds(lambda: encode_and_pack(name, words, threads, scale or SCALE_METHODS[0]))
    decode_s = best_seconds(lambda: decode(name, layout, words.shape, stored, threads=threads))
    weights = words.size / 1e6
    return {
        "format": f"{name} ({scale})" if scale else name,
        "layout": layout,
        "threads": threads,
        "stored_bits_per_weight": round(8 * stored.size / words.size, 3),
        "encode_mb_per_s": round(2 * weights / encode_s),
        "encode_mweights_per_s": round(weights / encode_s),
        "decode_mb_per_s": round(4 * weights / decode_s),
        "decode_mweights_per_s": round(weights / decode_s),
    }


def cpu_name() -> str:
    """Model name of the CPU, as the operating system gives it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def commit() -> str:
    """Commit of the source tree, or an empty string outside one."""
    try:
        command = ["git", "rev-parse", "HEAD"]
        return subprocess.run(
            command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def main(arguments: list[str] | None = None) -> int:
    """Measure and print, or write to -o FILE, the report as JSON."""
    parser = argparse.ArgumentParser(description="Throughput of the numeric formats on this CPU.")
    parser.add_argument("-o", "--output", type=Path, help="write the report here instead of to stdout")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run; default 1")
    options = parser.parse_args(arguments)
    words = f32_to_bf16(np.random.default_rng(0).standard_normal((ROWS, COLUMNS), np.float32))
    cases = [(n, s) for n in FORMATS if n != "I32" for s in (SCALE_METHODS if n == "NVFP4" else ("",))]
    report = {
        "what": "BF16 words -> stored bytes (encode) and stored bytes -> float32 (decode)",
        "matrix": [ROWS, COLUMNS],
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "commit": commit(),
        "results": [measure(name, words, max(1, options.threads), scale) for name, scale in cases],
    }
    text = json.dumps(report, indent=1) + "\n"
    if options.output is None:
        sys.stdout.write(text)
    else:
        options.output.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
