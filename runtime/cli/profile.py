"""``ninferc profile``: one decode step by kernel and op, and as a timeline per device."""

from __future__ import annotations

import re
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from runtime.cli.errors import UsageError
from runtime.cli.files import AtomicFile
from runtime.cli.io import Output
from runtime.cli.options import integer


def device_list(text: str) -> list[int]:
    """Device indices of ``0`` or ``0,1``. Raises UsageError."""
    if not re.fullmatch(r"[0-9]{1,3}(,[0-9]{1,3})?", text):
        raise UsageError(f"--devices {text[:40]!r}: one or two device indices such as 0 or 0,1 are allowed")
    return [int(part) for part in text.split(",")]


def profile_command(
    program: Annotated[Path, typer.Argument(metavar="PROGRAM|ARTIFACT", help="a program folder or a .ninfer file")],
    html: Annotated[Path | None, typer.Option("--html", metavar="PAGE", help="write a page with the timeline drawn")] = None,
    batch: Annotated[int | None, typer.Option("-b", metavar="B", parser=integer("-b", 1, 64), help="lanes; default 1")] = None,
    width: Annotated[int | None, typer.Option("-t", metavar="T", parser=integer("-t", 1, 32),
                                              help="columns per lane; default 1")] = None,  # fmt: skip
    depth: Annotated[int | None, typer.Option("-c", metavar="N", parser=integer("-c", 1, 1 << 20),
                                              help="tokens in the cache of every lane; default 1024")] = None,  # fmt: skip
    weights: Annotated[str, typer.Option("--weights", help="file, or synth: random weights made on the GPU")] = "file",
    devices: Annotated[str, typer.Option("--devices", metavar="A[,B]", help="CUDA device indices, one per rank")] = "0",
    transport: Annotated[str, typer.Option("--transport", help="auto, peer, host or staged (two ranks)")] = "auto",
    card: Annotated[str | None, typer.Option("--as", metavar="CARD",
                                             help="build with that card's capabilities, e.g. rtx5090")] = None,
) -> None:
    """Show where the time of one decode step goes on the GPU."""
    from runtime.bench.measure import Bench
    from runtime.bench.open import open_for_bench
    from runtime.bench.profile import Profiler
    from runtime.bench.profile_page import profile_html, profile_text

    lanes, columns, context = batch or 1, width or 1, depth or 1024
    room = context + 20 * 4 * columns + 64  # what the measured steps append
    with ExitStack() as stack:
        # a place that cannot be written is said before anything is measured
        file = None if html is None else stack.enter_context(AtomicFile(html))
        backend = open_for_bench(program, device_list(devices), [(lanes, columns)], room, weights, score=False, card=card,
                                 transport=transport)  # fmt: skip
        try:
            bench = Bench(backend)
            bench.fill_caches()
            profile = Profiler(bench).run(lanes, columns, context)
        finally:
            backend.close()
        if file is not None:
            for part in profile_html(profile):
                file.write(part.encode())
    Output().write("\n".join(profile_text(profile)) + "\n")
