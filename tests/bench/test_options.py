"""Bad input of the commands that measure: said before anything is compiled, loaded or measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.cuda.driver import NoDevice
from tests.cli.conftest import rejected, run_cli
from tests.cli.fake_driver import FakeDriver
from tests.models import EXAMPLE


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["bench", EXAMPLE, "-r", "0"], ["-r 0", "1…1000"]),
        (["bench", EXAMPLE, "-n", "0"], ["-n 0", "1…100000"]),
        (["bench", EXAMPLE, "-n", "1.5"], ["-n '1.5'"]),
        (["bench", EXAMPLE, "-p", "1024,x"], ["-p '1024,x'", "comma-separated"]),
        (["bench", EXAMPLE, "-b", ""], ["-b ''"]),
        (["bench", EXAMPLE, "-o", "xml"], ["-o 'xml'", "table or json"]),
        (["bench", EXAMPLE, "--max-context", "0"], ["--max-context 0"]),
        (["bench", EXAMPLE, "--weights", "random"], ["--weights 'random'", "file, synth"]),
        (["bench", EXAMPLE, "--devices", "a"], ["--devices 'a'"]),
        (["bench", EXAMPLE, "--as", "rtx9"], ["--as 'rtx9'", "rtx5090"]),
        (["profile", EXAMPLE, "--as", "rtx9"], ["--as 'rtx9'"]),
        (["profile", EXAMPLE, "--weights", "x"], ["--weights 'x'"]),
        *(([command, EXAMPLE, *more, "--transport", "bus"], ["--transport 'bus'", "auto, peer, host, staged"])
          for command, more in (("bench", []), ("profile", []), ("tune", ["-o", "x.json"]))),
        (["tune", EXAMPLE, "-o", "x.json", "--phases", "1"], ["--phases '1'", "1x1"]),
        (["tune", EXAMPLE, "-o", "x.json", "--variants", "0"], ["--variants 0"]),
        (["tune", EXAMPLE, "-o", "x.json", "-c", "-1"], ["-c '-1'"]),
        (["tune", EXAMPLE, "-o", "x.json", "--devices", "x"], ["--devices 'x'"]),
        (["tune", EXAMPLE, "-o", "x.json", "--devices", "0,1,2"], ["--devices '0,1,2'", "one or two"]),
    ],
)
def test_usage(args: list[str], parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rejected(run_cli(*args), 2, *parts)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["bench", "profile", "tune"])
def test_files(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no model, and a place that cannot be written."""
    output = {"bench": "--output-file", "profile": "--html", "tune": "-o"}[command]
    rejected(run_cli(command, tmp_path / "none", output, tmp_path / "out"), 1, "none", "No such file")
    monkeypatch.setattr("runtime.bench.open.api", lambda: pytest.fail("measuring has begun"))
    rejected(run_cli(command, EXAMPLE, output, tmp_path / "no" / "out"), 1, "no")
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_profile_is_said_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.bench.open.api", lambda: pytest.fail("measuring has begun"))
    output = tmp_path / "x.json"
    for text in ("{", '{"ninferc_profile": 1, "gpu": "", "arch": "", "sms": 1, "tiles": {"product": {"mtiles": "1"}}}'):
        output.write_text(text)
        rejected(run_cli("tune", EXAMPLE, "-o", output), 1, "device profile", "x.json")
        assert output.read_text() == text


@pytest.mark.parametrize("command", ["bench", "profile", "tune"])
def test_no_gpu(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise NoDevice("no driver; use --device cpu")

    monkeypatch.setattr("runtime.bench.open.api", none)
    more = ["-o", tmp_path / "x.json"] if command == "tune" else []
    rejected(run_cli(command, EXAMPLE, *more), 3, "needs an NVIDIA GPU and none is visible")
    assert list(tmp_path.iterdir()) == []


def test_a_device_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDriver().install(monkeypatch)
    for command in ("bench", "profile"):
        rejected(run_cli(command, EXAMPLE, "--devices", "7"), 3, "device 7 does not exist; 1 device(s) are visible")
