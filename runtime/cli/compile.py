"""``ninferc compile``: an artifact becomes a program folder."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from compiler import profiles
from compiler.driver import limits_of, model_of
from compiler.explain.memory import amount, total_bytes
from compiler.program.io import check_target
from runtime.cli import options as opt
from runtime.cli.io import Level
from runtime.cli.load import compile_options, open_artifact
from runtime.cli.observe import compile_progress, describe, open_diagnostics, timed
from runtime.cli.target import compile_place, compile_target, gpu_name
from runtime.open import compile_to


def compile_command(
    artifact: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="a .ninfer file")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="program folder to write")],
    arch: opt.Arch = "native",
    card: opt.Card = None,
    tp: opt.Tp = None,
    devices: opt.Devices = None,
    exchange: opt.Exchange = None,
    max_context: opt.MaxContext = None,
    max_concurrency: opt.MaxConcurrency = None,
    prefill_chunk: opt.PrefillChunk = None,
    pairs: opt.Pairs = None,
    kv_capacity: opt.KvCapacity = None,
    jobs: opt.Jobs = None,
    profile: opt.ProfileFile = None,
    rope: opt.Rope = None,
    kv_dtype: opt.KvDtype = None,
    log_level: opt.LogLevel = None,
) -> None:
    """Compile an artifact for one GPU, or for two that share it. No weights are read; the folder appears when it is complete.

    --arch native is the GPU of this machine, or what --devices have in common. An existing program folder of that name is
    replaced.
    """
    say, started = open_diagnostics(log_level), time.monotonic()
    with timed(say, "artifact opened"):
        opened = open_artifact(artifact, say)
    with opened:
        spec = model_of(opened)
        place, ranks = compile_place(arch, tp, devices)
        options = compile_options(spec, max_context, max_concurrency, prefill_chunk, kv_capacity,
                                  opt.read_pairs(pairs) if pairs else (), ranks, exchange)  # fmt: skip
        limits_of(spec, options)
        if place is not None and place.shared:
            say.line(f"--devices {place}: a test mode, each rank is compiled for its share of one GPU",
                     Level.WARNING)  # fmt: skip
        caps = compile_target(arch, card, place)
        check_target(output)
        if profile is not None:
            profiles.use(profile, gpu_name() if arch == "native" else None)
        with compile_progress(say, caps.arch) as report:
            program = compile_to(opened, output, caps, options, report, jobs)
    describe(say, program)
    say.summary("program", output)
    say.summary("target", f"{caps.arch}, {caps.sms} multiprocessors")
    say.summary("tensor parallel", program.tp)
    say.summary("graphs", " ".join(program.phases))
    say.summary("kernels", len(program.kernels))
    say.summary("device memory", amount(total_bytes(program)))
    say.summary("total", f"{time.monotonic() - started:.1f} s")
