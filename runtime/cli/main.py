"""``ninferc``: the command line. A command's module is imported when the command runs, so that ``--help`` is quick.

stdout carries results only. Every error is one line on stderr; exit codes: ``runtime/cli/errors.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup

from runtime.cli.errors import USAGE, guard
from runtime.cli.io import run_main

PROGRAM = "ninferc"


class Lazy(NamedTuple):
    """Where a command's function stands, and its line in ``--help``."""

    module: str
    function: str
    help: str


COMMANDS: dict[str, Lazy] = {
    "run": Lazy("runtime.cli.run", "run", "Answer one prompt with a program or an artifact."),
    "batch": Lazy("runtime.cli.batch", "batch", "Answer the requests of a JSON-lines file, several at a time."),
    "compile": Lazy("runtime.cli.compile", "compile_command", "Compile an artifact to a program folder for one GPU."),
    "plan": Lazy("runtime.cli.plan", "plan", "Show memory and predicted time before anything is loaded."),
    "explain": Lazy("runtime.cli.explain", "explain", "Show what a program does, call by call, and why."),
    "logits": Lazy("runtime.cli.logits", "logits", "Write teacher-forced logits of token ids."),
    "bench": Lazy("runtime.cli.bench", "bench_command", "Measure prefill and decode speed on the GPU."),
    "bench exchange": Lazy("runtime.cli.bench_exchange", "bench_exchange", "Measure exchanges between two GPUs."),
    "profile": Lazy("runtime.cli.profile", "profile_command", "Show where the time of one step goes on the GPU."),
    "tune": Lazy("runtime.cli.tune", "tune_command", "Measure tiles of products on the GPU and write a device profile."),
    "doctor": Lazy("runtime.cli.doctor", "doctor", "Check driver, GPUs, compiler and cache, each with its fix."),
    "convert": Lazy("runtime.cli.convert", "convert_command", "Convert a checkpoint directory to an artifact."),
    "inspect": Lazy("runtime.cli.artifact", "inspect", "Say what an artifact is."),
    "verify": Lazy("runtime.cli.artifact", "verify", "Check an artifact, with --deep every stored value."),
    "diff": Lazy("runtime.cli.artifact", "diff", "List the objects that differ between two artifacts."),
    "migrate": Lazy("runtime.cli.artifact", "migrate", "Bring a version 1 artifact to version 2 in place."),
    "upgrade": Lazy("runtime.cli.artifact", "upgrade", "Write the version 3 form of a version 2 artifact."),
    "relabel": Lazy("runtime.cli.artifact", "relabel", "Change the weights id of a version 2 artifact in place."),
    "synth": Lazy("runtime.cli.artifact", "synth", "Write a full-size artifact of random weights."),
    "pull": Lazy("runtime.cli.artifact", "pull", "Download a published artifact, resuming and checking it."),
}


def load(name: str) -> Any:
    """The command object of ``name``, its module imported."""
    entry = COMMANDS[name]
    single = typer.Typer(add_completion=False)
    single.command(name)(getattr(import_module(entry.module), entry.function))
    command = typer.main.get_command(single)
    command.name = name
    return command


class LazyGroup(TyperGroup):
    """Lists commands by their help lines and imports only the one that is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        return TyperCommand(cmd_name, help=COMMANDS[cmd_name].help) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        for words in (2, 1):  # "bench exchange" before "bench"
            name = " ".join(args[:words])
            if len(args) >= words and name in COMMANDS:
                return name, load(name), args[words:]
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=LazyGroup, add_completion=False, context_settings={"help_option_names": ["-h", "--help"]})


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"{PROGRAM} {version(PROGRAM)}")
        raise typer.Exit


@app.callback()
def _ninferc(
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="print the version"),
) -> None:
    """Compile .ninfer model artifacts to CUDA graph programs and run them."""


# typer carries its own copy of click or uses the installed one: the common base of its errors is found by name
_CLICK_ERROR: type[Exception] = next(kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException")


def _invoke(args: Sequence[str]) -> int:
    command: Any = typer.main.get_command(app)
    try:
        with command.make_context(PROGRAM, list(args)) as context:
            command.invoke(context)
    except typer.Exit as end:
        return int(end.exit_code)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except _CLICK_ERROR as error:
        text: str = error.format_message() if hasattr(error, "format_message") else str(error)
        where = getattr(getattr(error, "ctx", None), "command_path", PROGRAM)
        print(f"{PROGRAM}: {' '.join(text.split()).rstrip('.')}; see {where} --help", file=sys.stderr)
        return USAGE
    return 0


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code. ``args`` default to those of the process."""
    given = sys.argv[1:] if args is None else list(args)
    return run_main(lambda: _invoke(given), guard)


if __name__ == "__main__":
    sys.exit(main())
