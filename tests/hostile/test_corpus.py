"""Every hostile file meets one clear error, quickly and in bounded memory; every borderline valid file opens."""

import time
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


@pytest.mark.parametrize("case", list(resource_cases()), ids=lambda case: case.name)
def test_resource_attacks(tmp_path: Path, case: Case) -> None:
    path = tmp_path / "case.ninfer"
    assert len(case.data) <= MAX_DIRECTORY_BYTES + 8192
    seconds = 9.0
    for _ in range(3):  # the machine may be busy
        start = time.process_time()
        open_case(path, case)
        seconds = min(seconds, time.process_time() - start)
        if seconds < 1.0:
            break
    assert seconds < 1.0
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
