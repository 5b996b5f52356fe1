"""``ninferc tune``: measure candidate tiles of every decode product on the GPU at hand and write a device profile."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from runtime.cli.errors import InputError, UsageError
from runtime.cli.files import AtomicFile
from runtime.cli.options import integer, read_pairs
from runtime.cli.profile import device_list


def tune_command(
    program: Annotated[Path, typer.Argument(help="Program folder or artifact.")],
    output: Annotated[Path, typer.Option("-o", help="Profile to write; one that exists is extended.")],
    phases: Annotated[str, typer.Option("--phases", help="Decode graphs, lanes x columns.")] = "1x1,1x4,1x8,8x1",
    depth: Annotated[int | None, typer.Option("-c", metavar="N", parser=integer("-c", 1, 1 << 20),
                                              help="Tokens in the cache; default 1024.")] = None,  # fmt: skip
    tiles_tried: Annotated[int | None, typer.Option("--variants", metavar="N", parser=integer("--variants", 1, 1000),
                                                    help="Tiles to try per product; default 24.")] = None,  # fmt: skip
    weights: Annotated[str, typer.Option("--weights", help="file or synth.")] = "file",
    devices: Annotated[str, typer.Option("--devices", metavar="A[,B]",
                                         help="CUDA device indices, one per rank; two tune the halved products.")] = "0",
    transport: Annotated[str, typer.Option("--transport", help="auto, peer, host or staged (two ranks).")] = "auto",
) -> None:
    """Write a device profile that compile reads (--profile), or that ships with the compiler."""
    from compiler.profiles import VERSION, load
    from runtime.bench.measure import Bench
    from runtime.bench.open import open_for_bench
    from runtime.bench.tune import Tuner

    context, variants = depth or 1024, tiles_tried or 24
    pairs = list(read_pairs(phases, "--phases"))
    if not output.parent.is_dir():
        raise InputError(f"-o {output}: the folder {output.parent} is not there")
    known = load(output) if output.exists() else None  # before anything is measured
    width = max(t for _, t in pairs)
    backend = open_for_bench(program, device_list(devices), pairs, context + 64 * width, weights, score=False,
                             transport=transport)  # fmt: skip
    try:
        bench = Bench(backend)
        bench.fill_caches()
        tuner = Tuner(bench, lambda line: print(line, file=sys.stderr))
        gpu, *other = (device.info().name for device in backend.devices)
        caps = backend.program.caps
        if other and other[0] != gpu:
            raise UsageError(f"--devices {devices}: {gpu} and {other[0]}; a profile is of one GPU model")
        tiles: dict[str, object] = {}
        if known is not None:
            if (known.gpu, known.arch, known.sms) != (gpu, caps.arch, caps.sms):
                raise UsageError(f"-o {output} is a profile of {known.gpu}; the GPU here is {gpu}")
            tiles |= known.tiles
        for b, t in pairs:
            tiles |= tuner.run(b, t, context, variants)
            data = {"ninferc_profile": VERSION, "gpu": gpu, "arch": caps.arch, "sms": caps.sms,
                    "tiles": dict(sorted(tiles.items()))}  # fmt: skip
            with AtomicFile(output) as file:
                file.write(json.dumps(data, indent=1).encode() + b"\n")
    finally:
        backend.close()
