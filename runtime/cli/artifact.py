"""Commands that read, check, write and fetch artifacts. `register(app)` adds them to the command line.

Results go to stdout, everything else to stderr. Errors are raised; the caller turns them into one line and a code.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

# Nothing here multiplies matrices: starting and stopping the threads of OpenBLAS would take longer than `inspect`.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import artifacts  # noqa: E402
from artifacts.errors import ArtifactError, IdentityError, quoted  # noqa: E402

File = Annotated[Path, typer.Argument(help="a .ninfer file", metavar="FILE")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="check and report, write nothing")]


SHOWN_PROBLEMS = 20


def _note(line: str) -> None:
    print(line, file=sys.stderr)


@contextmanager
def _progress(description: str) -> Iterator[Callable[[int, int], None]]:
    """A byte progress bar on stderr; silent when stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(description, total=None)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        yield update


def _print_json(value: Any) -> None:
    print(json.dumps(value, ensure_ascii=True, separators=(",", ":")))


def _open(path: Path) -> artifacts.Artifact:
    artifact = artifacts.open(path)
    if artifact.recovered_from is not None:
        _note(f"{path}: an interrupted rewrite left a torn directory; reading {artifact.recovered_from.name} instead")
    return artifact


def inspect(
    file: File,
    as_json: Json = False,
    objects: Annotated[bool, typer.Option("--objects", help="list the objects")] = False,
    bindings: Annotated[bool, typer.Option("--bindings", help="list bindings and uses (version 3)")] = False,
) -> None:
    """Say what a .ninfer file is: version, identity, sizes, formats. Reads the directory only."""
    from artifacts.container.json_reader import collector_paused
    from artifacts.tools import inspect as tool

    with collector_paused(), _open(file) as artifact:
        if as_json:
            for piece in tool.document(artifact):
                print(piece, end="")
            print()
            return
        for key, value in tool.summary(artifact).items():
            print(f"{key:18} {_plain(value)}")
        if objects:
            for record in tool.object_records(artifact):
                storage = record.get("encoding") or f"{record['format']} {record['shape']} {record['layout']}"
                place = f"{record['offset']:>14} {record['bytes']:>12}"
                print(f"object {place} {record['kind']:8} {_safe(record['name'])} {storage}")
        if bindings and artifact.version == 3:
            for name, binding in artifact.directory_v3.bindings.items():
                parts = " ".join(f"{_safe(part.object)}[{part.begin}:{part.end}]" for part in binding.parts)
                print(f"binding {_safe(name)} = {parts}")
            for use in artifact.directory_v3.uses:
                print(f"use {_safe(use.parameter)} at {_safe(use.input)} {use.policy}")


def _safe(name: str) -> str:
    """A name from a file, printable on a terminal."""
    return name if name.isprintable() else quoted(name, 4096)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{_safe(str(key))}={_plain(item)}" for key, item in value.items())
    if isinstance(value, list):
        return " ".join(_plain(item) for item in value)
    return "-" if value is None else _safe(str(value))


def verify(
    file: File,
    deep: Annotated[bool, typer.Option("--deep", help="also check every code, scale, divisor and padding byte")] = False,
) -> None:
    """Check a .ninfer file: container, object list of its model and, with --deep, the stored values."""
    from artifacts.tools.verify import verify as check

    with _open(file) as artifact:
        if deep:
            with _progress("verifying") as update:
                problems = check(artifact, deep=True, progress=update)
        else:
            problems = check(artifact)
        if len(problems) == 1:
            raise IdentityError(f"{file}: {problems[0]}")
        if problems:
            for problem in problems[:SHOWN_PROBLEMS]:
                _note(f"{file}: {problem}")
            if len(problems) > SHOWN_PROBLEMS:
                _note(f"{file}: … and {len(problems) - SHOWN_PROBLEMS} more")
            raise IdentityError(f"{file}: {len(problems)} problems")
        print(f"{file}: version {artifact.version}, {_safe(str(artifact.identity))}, {len(artifact.objects)} objects: sound")


def diff(
    a: Annotated[Path, typer.Argument(metavar="A")],
    b: Annotated[Path, typer.Argument(metavar="B")],
    as_json: Json = False,
    metadata: Annotated[bool, typer.Option("--metadata", help="do not compare payload bytes")] = False,
) -> None:
    """List the objects that differ between two artifacts. Exit code 0 when none does, else 1."""
    from artifacts.tools.diff import compare

    with _open(a) as left, _open(b) as right, _progress("comparing") as update:
        differences = list(compare(left, right, payload=not metadata, progress=update))
    if as_json:
        _print_json([difference.record() for difference in differences])
    else:
        for difference in differences:
            print(f"{difference.kind:9} {_safe(difference.name)} {difference.detail}".rstrip())
    if differences:
        raise typer.Exit(1)


def migrate(
    file: File,
    weights_id: Annotated[str, typer.Option(help="weights id of the version 2 identity")] = "groupwise-int",
    published: Annotated[bool, typer.Option("--published", help="require the published SHA-256 (reads it all)")] = False,
    dry_run: DryRun = False,
) -> None:
    """Bring a version 1 file to version 2 in place. Run it again after an interruption."""
    from artifacts.tools.migrate import migrate as run

    with _progress("checking") as update:
        result = run(file, weights_id, require_published=published, dry_run=dry_run, progress=update)
    if result.recovered:
        _note(f"{file}: an interrupted earlier run was undone first")
    done = "is version 2 already" if result.already else "would become version 2" if dry_run else "is now version 2"
    print(f"{file}: {done}, {_safe(str(result.identity))}")


def relabel(
    file: File,
    weights_id: Annotated[str | None, typer.Option(help="new weights id; default: the one its objects belong to")] = None,
    dry_run: DryRun = False,
) -> None:
    """Change the weights id of a version 2 file in place, for example nvfp4 to nvfp4-split."""
    from artifacts.tools.relabel import relabel as run

    result = run(file, weights_id, dry_run=dry_run)
    if result.before == result.after:
        print(f"{file}: is {_safe(str(result.after))} already")
    else:
        change = "would become" if dry_run else "is now"
        print(f"{file}: {_safe(str(result.before))} {change} {_safe(str(result.after))}")


def upgrade(
    file: File,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="version 3 file to write")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="Jinja file that replaces the chat template")] = None,
    file_limit: Annotated[int, typer.Option(help="bytes per file before the payload is split", min=8192)] = 32_000_000_000,
    dry_run: DryRun = False,
) -> None:
    """Write the version 3 form of a version 2 file; weights keep their bytes."""
    from artifacts.tools.upgrade import plan_upgrade
    from artifacts.tools.upgrade import upgrade as run

    if output is None and not dry_run:
        raise typer.BadParameter("name the new file with -o", param_hint="--output")
    template = None
    if chat_template is not None:
        try:
            template = chat_template.read_bytes()
        except OSError as error:
            raise ArtifactError(f"{chat_template}: {error.strerror or error}") from None
        if not template:
            raise ArtifactError(f"{chat_template}: a chat template needs at least one byte")
    with _open(file) as artifact:
        if dry_run or output is None:
            plan = plan_upgrade(artifact, (output or file).name, template, file_limit)
        else:
            with _progress("copying") as update:
                plan = run(artifact, output, template, file_limit, progress=update)
    if template is None:
        _note("the chat template was kept as it is; --chat-template FILE replaces it")
    verb = "would write" if dry_run else "wrote"
    print(
        f"{verb} {output or 'version 3'}: {plan.file_bytes} bytes in {len(plan.files)} file(s), "
        f"{len(plan.directory.bindings)} bindings, {len(plan.directory.uses)} uses"
    )


def synth(
    identity: Annotated[str, typer.Argument(help="MODEL/WEIGHTS of a registered identity", metavar="IDENTITY")],
    output: Annotated[Path, typer.Option("--output", "-o", help="file to write")],
    seed: Annotated[int, typer.Option(help="seed of the generator", min=0, max=2**64 - 1)] = 0,
    header_only: Annotated[bool, typer.Option("--header-only", help="a sparse file without weights, for planning")] = False,
) -> None:
    """Write a full-size artifact of random weights that runs."""
    from artifacts.container.directory_v2 import Identity
    from artifacts.identities.registry import registered
    from artifacts.tools.synth import synthesize_registered

    model_id, slash, weights_id = identity.partition("/")
    entry = registered(Identity(model_id, weights_id if slash else None))
    with _progress("writing") as update:
        synthesize_registered(entry.identity, output, seed, header_only=header_only, progress=update)
    print(f"wrote {output}: {entry.identity}, {entry.file_bytes} bytes{', weights sparse' if header_only else ''}")


def pull(
    repository: Annotated[str, typer.Argument(help="OWNER/NAME on the Hub", metavar="REPO")],
    file: Annotated[str, typer.Argument(help="file in the repository", metavar="FILE")],
    directory: Annotated[Path, typer.Option("--output", "-o", help="directory to write into")] = Path("."),
    revision: Annotated[str, typer.Option(help="branch, tag or commit")] = "main",
    sha256: Annotated[str | None, typer.Option(help="required SHA-256 of the file")] = None,
    endpoint: Annotated[str | None, typer.Option(help="base URL of another Hub")] = None,
    stall_timeout: Annotated[float, typer.Option(help="seconds without data before reconnecting", min=1)] = 30.0,
    attempts: Annotated[int, typer.Option(help="failures in a row before giving up", min=1)] = 6,
) -> None:
    """Download a published artifact, resuming and checking it."""
    from artifacts.tools.pull import PullOptions
    from artifacts.tools.pull import pull as run

    options = PullOptions(revision, endpoint, stall_timeout, attempts)
    with _progress("downloading") as update:
        path = run(repository, file, directory, sha256=sha256, options=options, progress=update, notice=_note)
    print(path)


def register(app: typer.Typer) -> None:
    """Add the artifact commands to an application."""
    for command in (inspect, verify, diff, migrate, relabel, upgrade, synth, pull):
        app.command(name=command.__name__)(command)
