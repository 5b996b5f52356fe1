"""Decode products in chains of their own kind: what one costs behind another, from memory and from the L2 cache.

    python -m benchmarks.chains FILE [--device 0] [--columns 1] [-r 3] [-o FILE.json]

FILE is an artifact (synthetic weights) or a program. A chain is the graph of a decode step with nothing between its beginning
and its end but the calls of one kernel, those of all layers, as often as it takes to fill a few milliseconds; what the step
costs without them is subtracted. In a second chain all calls read the weights of the first layer, which stand in the L2 cache
where that is large enough. One JSON row a line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path
from typing import Any

from compiler.explain.cost import call_cost
from compiler.program.model import Call, Phase
from runtime.bench.environment import describe
from runtime.bench.measure import Bench
from runtime.bench.open import open_for_bench

CONTEXT, STEPS = 1024, 40
LEAST = 96  # calls of a chain
WEIGHTS = ("w_codes", "w_high", "w_scales", "w_divisor", "norm_w")


def products(phase: Phase) -> dict[str, list[Call]]:
    """The calls of each decode product of rank 0 that more than one layer has, by kernel."""
    found: dict[str, list[Call]] = {}
    for item in phase.calls:
        if item.rank == 0 and item.entry.startswith("linear_"):
            found.setdefault(item.entry, []).append(item)
    return {entry: calls for entry, calls in found.items() if len(calls) > 1}


def chain(phase: Phase, calls: Sequence[Call], one_weight: bool = False) -> Phase:
    """``phase`` with ``calls`` in place of all that stands between its first call and its last two, over and over until they
    are LEAST or more; with ``one_weight`` all of them read what the first does."""
    first = {arg.name: arg for arg in calls[0].args}

    def link(item: Call) -> Call:
        return replace(item, args=tuple(first[arg.name] if arg.name in WEIGHTS else arg for arg in item.args))

    middle = [link(item) if one_weight else item for item in calls] * ceil(LEAST / len(calls))
    links = [*phase.calls[:1], *middle, *phase.calls[-2:]]
    return replace(phase, calls=tuple(replace(item, index=index, deps=()) for index, item in enumerate(links)))


def measure(bench: Bench, phase: Phase, repeats: int) -> list[dict[str, Any]]:
    """Rows of the whole step and of each product's chains."""
    backend = bench.backend

    def seconds(what: Phase) -> list[float]:
        return sorted(bench.replay(what, backend.modules, backend.argument_address, CONTEXT, STEPS) for _ in range(repeats))

    steps = seconds(phase)
    rows: list[dict[str, Any]] = [{"case": phase.name, "metric": "step", "value": steps[len(steps) // 2] * 1e3, "unit": "ms"}]
    ends = seconds(replace(phase, calls=(*phase.calls[:1], *phase.calls[-2:])))[repeats // 2]
    for entry, calls in products(phase).items():
        read = call_cost(backend.program, phase, calls[0], CONTEXT).read
        for one_weight in (False, True):
            links = chain(phase, calls, one_weight)
            each = [(value - ends) / (len(links.calls) - 3) for value in seconds(links)]
            value = each[len(each) // 2]
            rows.append({"case": f"{entry}{', one weight' if one_weight else ''}", "metric": "in a chain", "value": value * 1e6,
                         "unit": "us", "spread": [each[0] * 1e6, each[-1] * 1e6], "calls": len(links.calls) - 3,
                         "GB/s": read / value / 1e9})  # fmt: skip
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--columns", type=int, default=1)
    parser.add_argument("-r", "--repeats", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args(argv)
    backend = open_for_bench(args.file, [args.device], [(1, args.columns)], 2 * CONTEXT, "synth", score=False)
    try:
        bench = Bench(backend)
        bench.fill_caches()
        rows: list[dict[str, Any]] = [{"case": name, "metric": "bandwidth", "value": rate / 1e9, "unit": "GB/s"}
                                      for name, rate in bench.read_rates().items()]  # fmt: skip
        rows += measure(bench, backend.program.phases[f"decode1x{args.columns}"], args.repeats)
        for row in rows:
            print(json.dumps(row), flush=True)
        if args.output:
            record = {"benchmark": "chains", **describe(backend.devices), "weights": "synthetic, generated on the GPU",
                      "command": ["python", "-m", "benchmarks.chains", *(argv or sys.argv[1:])], "rows": rows}  # fmt: skip
            args.output.write_text(json.dumps(record, indent=1) + "\n")
    finally:
        backend.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
