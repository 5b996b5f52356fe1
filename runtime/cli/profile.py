"""``ninferc profile``: per kernel of one decode step, isolated and in-graph time, bytes and share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def profile_command(
    program: Annotated[Path, typer.Argument(help="Program folder or artifact.")],
    lanes: Annotated[int, typer.Option("-b", help="Lanes.")] = 1,
    columns: Annotated[int, typer.Option("-t", help="Columns per lane.")] = 1,
    context: Annotated[int, typer.Option("-c", help="Tokens in the cache of every lane.")] = 1024,
    weights: Annotated[str, typer.Option("--weights", help="file or synth (random weights made on the GPU).")] = "file",
    device: Annotated[int, typer.Option("--device", help="CUDA device index.")] = 0,
) -> None:
    """Where the time of one step goes."""
    from runtime.bench.measure import Bench
    from runtime.bench.open import open_for_bench
    from runtime.bench.profile import Profiler

    backend = open_for_bench(program, [device], [(lanes, columns)], context + 20 * 4 * columns + 64, weights, score=False)
    try:
        bench = Bench(backend)
        bench.fill_caches()
        whole, rows = Profiler(bench).run(lanes, columns, context)
    finally:
        backend.close()
    print(f"{'kernel':74s} {'calls':>5s} {'isolated us':>11s} {'in graph us':>11s} {'MB':>8s} {'GB/s':>6s} {'share':>6s}")
    for row in rows:
        rate = row.nbytes / row.in_graph / 1e9 if row.in_graph > 0 else 0.0
        alone, inside = row.isolated / row.calls * 1e6, row.in_graph / row.calls * 1e6
        print(f"{row.entry[:74]:74s} {row.calls:5d} {alone:11.2f} {inside:11.2f} "
              f"{row.nbytes / row.calls / 1e6:8.2f} {rate:6.0f} {row.in_graph / whole:6.1%}")  # fmt: skip
    covered = sum(row.in_graph for row in rows)
    print(f"step {whole * 1e3:.3f} ms; kernels account for {covered / whole:.1%}, the rest overlaps or is control")
