"""Commands, help, version, options outside their range, exit codes."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from runtime.cli.errors import CODES, DEVICE, INPUT, INTERRUPTED, USAGE, InputError, exit_code, guard, message
from runtime.cli.main import COMMANDS, load
from tests.cli.conftest import rejected, run_cli
from tests.models import EXAMPLE, ROOT

RUN = ["run", EXAMPLE, "--prompt", "x", "--device", "cpu"]


def test_help_lists_every_command_and_imports_none() -> None:
    code = ("import sys, time; from runtime.cli.main import main; code = main(['--help']);"
            "print(code, time.process_time(), sorted(m for m in ('numpy', 'jinja2', 'networkx', 'compiler.driver')"
            " if m in sys.modules), file=sys.stderr)")  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60)
    exit_value, seconds, heavy = done.stderr.split(maxsplit=2)
    assert exit_value == "0" and heavy.strip() == "[]" and float(seconds) < 0.4
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    assert load(name).name == name
    result = run_cli(name, "--help")
    assert result.code == 0 and result.err == "" and f"ninferc {name}" in result.text
    assert run_cli(name, "-h").out == result.out


def test_version() -> None:
    result = run_cli("--version")
    assert result.code == 0 and result.text.startswith("ninferc 0.") and result.err == ""


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        ([], ["Missing command"]),
        (["answer"], ["No such command 'answer'"]),
        (["run"], ["Missing argument", "ninferc run --help"]),
        ([*RUN, "--fast"], ["No such option", "--fast"]),
        ([*RUN, "--max-new"], ["--max-new", "requires an argument"]),
        ([*RUN, "--max-new", "0"], ["--max-new '0'", "1 to"]),
        ([*RUN, "--max-new", "1e3"], ["--max-new '1e3'", "integer"]),
        ([*RUN, "--max-new", "+5"], ["--max-new '+5'"]),
        ([*RUN, "--max-new", " 5"], ["--max-new ' 5'"]),
        ([*RUN, "--max-new", "1_000"], ["--max-new '1_000'"]),
        ([*RUN, "--max-new", "٣"], ["--max-new"]),
        ([*RUN, "--seed", "18446744073709551616"], ["--seed", "18446744073709551615"]),
        ([*RUN, "--temperature", "nan"], ["--temperature 'nan'"]),
        ([*RUN, "--temperature", "2.5"], ["--temperature", "0.0 to 2.0"]),
        ([*RUN, "--temperature", "1e999"], ["--temperature"]),
        ([*RUN, "--top-p", "1.5"], ["--top-p", "0.0 to 1.0"]),
        ([*RUN, "--top-k", "21"], ["--top-k", "20"]),
        ([*RUN, "--min-p", "2"], ["--min-p"]),
        ([*RUN, "--presence-penalty", "-3"], ["--presence-penalty"]),
        ([*RUN, "--frequency-penalty", "3"], ["--frequency-penalty"]),
        ([*RUN, "--max-context", "0"], ["--max-context 0", "1…1048576"]),
        ([*RUN, "--max-context", "4097"], ["--max-context 4097", "1…4096"]),
        ([*RUN, "--prefill-chunk", "100"], ["--prefill-chunk 100", "multiple of 128"]),
        ([*RUN, "--kv-capacity", "64"], ["--kv-capacity 64", "--max-context"]),
        ([*RUN, "--stop", ""], ["--stop", "1 to 1024"]),
        ([*RUN, "--reasoning-stop", ""], ["--reasoning-stop"]),
        ([*RUN, "--stop-token-id", "4096"], ["--stop-token-id '4096'", "4095"]),
        ([*RUN, "--reasoning-effort", "extreme"], ["--reasoning-effort", "allowed are none"]),
        ([*RUN, "--reasoning-effort", "low", "--no-thinking"], ["--no-thinking and --reasoning-effort"]),
        ([*RUN, "--numerics", "fast"], ["--numerics 'fast'", "exact or engine"]),
        ([*RUN, "--prefill", "all"], ["--prefill 'all'", "chunks or none"]),
        ([*RUN, "--no-cuda-graph"], ["--no-cuda-graph needs a GPU"]),
        ([*RUN, "--arch", "sm_91"], ["sm_91", "sm_90a"]),
        ([*RUN, "--as", "rtx9090"], ["--as 'rtx9090'", "rtx5090"]),
        ([*RUN, "--ids", "x.json"], ["exactly one of", "--prompt, --ids given"]),
        (["run", EXAMPLE, "--device", "cpu"], ["exactly one of", "none given"]),
        (["run", EXAMPLE, "--prompt", "x", "--device", "gpu"], ["--device 'gpu'", "cuda:N"]),
        (["run", EXAMPLE, "--prompt", "x", "--device", "cuda:-1"], ["--device"]),
        ([*RUN, "--artifact", EXAMPLE], ["--artifact belongs to a program folder"]),
        (["compile", EXAMPLE, "--arch", "sm_90a"], ["--output"]),
        (["compile", EXAMPLE, "-o", "x", "--arch", "sm_90a", "--pairs", "1x1,2"], ["--pairs '1x1,2'"]),
        (["compile", EXAMPLE, "-o", "x", "--arch", "sm_90a", "--pairs", "2x1"], ["--pairs 2x1"]),
        (["compile", EXAMPLE, "-o", "x", "--arch", "sm_90a", "--pairs", "1x64"], ["--pairs 1x64"]),
        (["compile", EXAMPLE, "-o", "x", "--arch", "sm_90a", "--max-concurrency", "65"], ["--max-concurrency 65", "1…64"]),
        (["compile", EXAMPLE, "-o", "x", "--arch", "sm_90a", "--jobs", "0"], ["--jobs 0"]),
        (["batch", EXAMPLE, "in.jsonl"], ["--output"]),
        (["logits", EXAMPLE, "-o", "x.npy"], ["--ids"]),
    ],
)  # fmt: skip
def test_usage_errors(args: list[str], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rejected(run_cli(*args), USAGE, *parts)
    assert list(tmp_path.iterdir()) == []


def test_options_of_ids_only() -> None:
    result = run_cli("run", EXAMPLE, "--device", "cpu", "--ids", "x.json", "--no-thinking")
    rejected(result, USAGE, "--no-thinking and --reasoning-effort", "--ids needs none")


def test_every_code_names_an_error_class() -> None:
    """A class that is renamed or moved must not become a traceback."""
    for name, code in CODES.items():
        module, _, kind = name.rpartition(".")
        found = getattr(import_module(module), kind)
        assert issubclass(found, BaseException) and code in (INPUT, USAGE, DEVICE, INTERRUPTED)
    from runtime.cuda.driver import NoDevice
    from runtime.frontend.errors import ChatTemplateError, OptionError

    assert exit_code(NoDevice("x")) == DEVICE and exit_code(OptionError("x")) == USAGE
    assert exit_code(ChatTemplateError("x")) == INPUT and exit_code(FileNotFoundError()) == INPUT
    assert exit_code(KeyboardInterrupt()) == INTERRUPTED and exit_code(ZeroDivisionError()) is None


def test_messages_are_one_line() -> None:
    assert message(InputError("\n first \n second")) == " first "
    assert message(OSError(28, "No space left on device", "/x/y")) == "/x/y: No space left on device"
    assert message(MemoryError()) == "out of host memory" and message(InputError()) == "InputError"


def test_a_defect_keeps_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    assert guard(lambda: 1 // 0) == INPUT
    assert "ZeroDivisionError" in capsys.readouterr().err
