"""``ninferc explain``: what a program does, call by call, and why."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from compiler.explain.text import explain_text
from compiler.program.io import load
from runtime.cli.errors import UsageError
from runtime.cli.files import AtomicFile
from runtime.cli.io import Output
from runtime.cli.options import integer


def explain(
    program: Annotated[Path, typer.Argument(metavar="DIR", help="a program folder")],
    html: Annotated[Path | None, typer.Option("--html", metavar="OUT.html", help="write a page with the graphs drawn")] = None,
    phase: Annotated[list[str] | None, typer.Option("--phase", metavar="NAME", help="only this graph; repeatable")] = None,
    context: Annotated[int | None, typer.Option("--context", metavar="N", parser=integer("--context", 1, 1 << 20),
                                                help="tokens in the cache that costs assume")] = None,  # fmt: skip
) -> None:
    """Show kernels, reasons, bytes, FLOPs, resources and edges of a program. Repeated layers are shown once."""
    loaded = load(program)
    for name in phase or ():
        if name not in loaded.phases:
            raise UsageError(f"--phase {name[:40]!r}: the program has {', '.join(loaded.phases)}")
    if context is not None and context > loaded.limits.max_context:
        raise UsageError(f"--context {context}: the program's context is {loaded.limits.max_context}")
    if html is None:
        Output().write("\n".join(explain_text(loaded, phase, context)) + "\n")
        return
    from compiler.explain.html import explain_html

    with AtomicFile(html) as file:
        for part in explain_html(loaded, phase, context):
            file.write(part.encode())
