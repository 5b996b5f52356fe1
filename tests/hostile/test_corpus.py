"""Every hostile file meets one clear error, quickly and in bounded memory; every borderline valid file opens."""

import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import artifacts
from artifacts.container.json_reader import MAX_DIRECTORY_BYTES
from artifacts.errors import ArtifactError
from runtime.cli.artifact import register
from tests.hostile.corpus import Case, resource_cases, small_cases, valid

MEMORY_LIMIT = 64 << 20
CASES = small_cases()


def check_message(message: str) -> None:
    """One printable ASCII line of bounded length."""
    assert message and message.isascii() and message.isprintable() and len(message) < 600, message


def open_case(path: Path, case: Case) -> None:
    path.write_bytes(case.data)
    if case.error is None:
        artifacts.open(path).close()
        return
    with pytest.raises(ArtifactError) as caught:
        artifacts.open(path).close()
    assert type(caught.value) is case.error, (type(caught.value), str(caught.value))
    assert case.match in str(caught.value), str(caught.value)
    check_message(str(caught.value))


def test_the_corpus_covers_both_verdicts() -> None:
    assert len(CASES) > 600 and sum(case.error is None for case in CASES) > 20
    for version in (1, 2, 3):
        assert valid(version)


@pytest.mark.parametrize("start", range(0, len(CASES), 50))
def test_rules(tmp_path: Path, start: int) -> None:
    for case in CASES[start : start + 50]:
        try:
            open_case(tmp_path / "case.ninfer", case)
        except (AssertionError, ArtifactError, pytest.fail.Exception) as error:
            raise AssertionError(f"{case.name}: {error!r}") from error


ATTACKS = list(resource_cases())
CHILD = """
import resource, sys, time
import artifacts
for line in sys.stdin:
    start, outcome = time.process_time(), "valid"
    try:
        artifacts.open(line.rstrip("\\n")).close()
    except artifacts.ArtifactError as error:
        outcome = type(error).__name__
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(outcome, time.process_time() - start, peak, flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="reads the peak of resident memory")
def test_resource_attacks_in_one_process(tmp_path: Path) -> None:
    """Each attack in under a second of CPU; all of them within 64 MiB over what the process needed before."""
    path = tmp_path / "case.ninfer"
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None and child.stdout is not None

    def ask(data: bytes) -> tuple[str, float, int]:
        path.write_bytes(data)
        child.stdin.write(f"{path}\n")
        child.stdin.flush()
        outcome, seconds, peak = child.stdout.readline().split()
        return outcome, float(seconds), int(peak)

    try:
        baseline = ask(valid(3))[2]
        for case in ATTACKS:
            seconds = 9.0
            for _ in range(3):  # the machine may be busy
                outcome, spent, peak = ask(case.data)
                seconds = min(seconds, spent)
                if seconds < 1.0:
                    break
            assert case.error is not None and outcome == case.error.__name__, case.name
            assert seconds < 1.0, case.name
            pages = len(case.data)  # of the mapped file, which count as resident
            assert peak - baseline < MEMORY_LIMIT + pages, (case.name, peak - baseline)
    finally:
        child.stdin.close()
        child.wait(30)
        child.stdout.close()


@pytest.mark.slow
@pytest.mark.parametrize("case", ATTACKS, ids=lambda case: case.name)
def test_resource_attacks_traced(tmp_path: Path, case: Case) -> None:
    """Python's own account of the memory of each attack, and the wording of its error."""
    path = tmp_path / "case.ninfer"
    assert len(case.data) <= MAX_DIRECTORY_BYTES + 8192
    tracemalloc.start()
    try:
        open_case(path, case)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_LIMIT, peak


def test_commands_report_one_line(tmp_path: Path) -> None:
    app = typer.Typer()
    register(app)
    runner = CliRunner()
    path = tmp_path / "case.ninfer"
    for case in CASES[::7]:
        path.write_bytes(case.data)
        for command in ("inspect", "verify"):
            result = runner.invoke(app, [command, str(path)])
            if case.error is not None:
                assert isinstance(result.exception, ArtifactError) and result.stdout == "", (case.name, result.exception)
                check_message(str(result.exception))
            elif command == "inspect":
                assert result.exit_code == 0, case.name
