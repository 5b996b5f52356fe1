"""``ninferc tune``: measure candidate tiles of every decode product on the GPU at hand and write a device profile."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer


def tune_command(
    program: Annotated[Path, typer.Argument(help="Program folder or artifact.")],
    output: Annotated[Path, typer.Option("-o", help="Profile to write; one that exists is extended.")],
    phases: Annotated[str, typer.Option("--phases", help="Decode graphs, lanes x columns.")] = "1x1,1x4,1x8,8x1",
    context: Annotated[int, typer.Option("-c", help="Tokens in the cache.")] = 1024,
    variants: Annotated[int, typer.Option("--variants", help="Tiles to try per product.")] = 24,
    weights: Annotated[str, typer.Option("--weights", help="file or synth.")] = "file",
    device: Annotated[int, typer.Option("--device")] = 0,
) -> None:
    """Write a device profile that compile reads (--profile), or that ships with the compiler."""
    from compiler.profiles import VERSION, load
    from runtime.bench.measure import Bench
    from runtime.bench.open import open_for_bench
    from runtime.bench.tune import Tuner
    from runtime.cli.errors import UsageError

    try:
        pairs = [(int(a), int(b)) for a, _, b in (part.partition("x") for part in phases.split(","))]
    except ValueError as error:
        raise UsageError(f"--phases {phases!r}: pairs such as 1x1,8x1 are needed") from error
    width = max(t for _, t in pairs)
    backend = open_for_bench(program, [device], pairs, context + 64 * width, weights, score=False)
    try:
        bench = Bench(backend)
        bench.fill_caches()
        tuner = Tuner(bench, lambda line: print(line, file=sys.stderr))
        gpu, caps = backend.devices[0].info().name, backend.program.caps
        tiles: dict[str, object] = {}
        if output.exists():
            known = load(output)
            if (known.gpu, known.arch, known.sms) != (gpu, caps.arch, caps.sms):
                raise UsageError(f"-o {output} is a profile of {known.gpu}; the GPU here is {gpu}")
            tiles |= known.tiles
        for b, t in pairs:
            tiles |= tuner.run(b, t, context, variants)
            data = {"ninferc_profile": VERSION, "gpu": gpu, "arch": caps.arch, "sms": caps.sms,
                    "tiles": dict(sorted(tiles.items()))}  # fmt: skip
            output.write_text(json.dumps(data, indent=1) + "\n")
    finally:
        backend.close()
