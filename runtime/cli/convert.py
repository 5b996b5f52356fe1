"""`ninferc convert`: a Hugging Face checkpoint directory becomes a `.ninfer` artifact."""

from __future__ import annotations

import sys
import threading
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from artifacts.container.writer_v3 import DEFAULT_FILE_LIMIT
from artifacts.convert import SHIPPED, Options, convert
from artifacts.convert.write import Progress as Tick


class Vocabulary(StrEnum):
    W8 = "W8"
    Q6 = "Q6"


class Container(StrEnum):
    v2 = "2"
    v3 = "3"


class Scale(StrEnum):
    absmax = "absmax"
    mse = "mse"


def _overrides(values: list[str]) -> dict[str, str]:
    overrides: dict[str, str] = {}
    for value in values:
        pattern, separator, format = value.partition("=")
        if not (pattern and separator and format):
            raise typer.BadParameter(f"{value!r}: OBJECT=FORMAT is needed", param_hint="--override")
        overrides[pattern] = format
    return overrides


def convert_command(
    directory: Annotated[
        Path, typer.Argument(metavar="HF_DIR", help="Checkpoint directory with config.json and safetensors files.")
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="OUT.ninfer", help="Artifact to write.")],
    weights: Annotated[
        str,
        typer.Option(metavar="NAME", help="bf16, groupwise-int, nvfp4, a shipped recipe, or a recipe file (.toml)."),
    ] = "groupwise-int",
    model_id: Annotated[
        str | None, typer.Option(metavar="ID", help="Identity of the model; default: the directory's name.")
    ] = None,
    base: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Unquantized checkpoint that a quantized HF_DIR was made of.")
    ] = None,
    vocabulary: Annotated[
        Vocabulary | None, typer.Option(help="Format of embedding and head for groupwise-int; default W8.")
    ] = None,
    scale: Annotated[
        Scale | None, typer.Option(help="How NVFP4 scales are chosen when weights are encoded; default absmax.")
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option(metavar="OBJECT=FORMAT", help="Format of an object or shell pattern of objects; repeatable."),
    ] = None,
    vision: Annotated[
        bool | None,
        typer.Option("--vision/--no-vision", help="Keep the vision tower; default: if the identity needs it."),
    ] = None,
    ranking: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Token counts (int64) that rank the draft head's rows.")
    ] = None,
    container: Annotated[Container, typer.Option(help="Container version to write.")] = Container.v2,
    file_limit: Annotated[
        int | None, typer.Option(min=8192, metavar="BYTES", help="Bytes per file of a version 3 artifact; default 32e9.")
    ] = None,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads; default: all cores.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing OUT.ninfer.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the checkpoint and report, write nothing.")] = False,
) -> None:
    """Convert a checkpoint directory to a .ninfer artifact, with a report in OUT.ninfer.conversion.json."""
    if weights not in SHIPPED and not weights.endswith(".toml"):
        raise typer.BadParameter(f"{weights!r}: {', '.join(SHIPPED)} or a recipe file (.toml)", param_hint="--weights")
    if file_limit is not None and container is not Container.v3:
        raise typer.BadParameter("only version 3 artifacts have several files", param_hint="--file-limit")
    options = Options(
        weights=weights,
        model_id=model_id,
        base=base,
        vocabulary=vocabulary.value if vocabulary else None,
        scale=scale.value if scale else None,
        overrides=_overrides(override or []),
        vision=vision,
        ranking=ranking,
        threads=threads,
        overwrite=force,
        container=int(container.value),
        file_limit=file_limit or DEFAULT_FILE_LIMIT,
        dry_run=dry_run,
    )
    console = Console(stderr=True)
    columns = (TextColumn("converting"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        lock = threading.Lock()

        def start(total: int) -> Tick:
            task = bar.add_task("converting", total=total)

            def tick(elements: int) -> None:
                with lock:
                    bar.advance(task, elements)

            return tick

        report = convert(
            directory, output, options, log=lambda text: print(f"ninferc: {text}", file=sys.stderr), progress=start
        )
    identity, size = report["identity"], report["file"]["bytes"]
    what = f"would have {size} bytes" if dry_run else f"{size} bytes"
    print(f"ninferc: {output}: {identity['model_id']} / {identity['weights_id']}, {what}", file=sys.stderr)
