"""The load case of ``bench``: what is timed, what the record says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.backend import VMBackend
from runtime.bench import load
from runtime.bench.load import Load, measure, warm
from runtime.cuda.upload import UploadTimes
from runtime.vm import Machine
from tests import models
from tests.cli.conftest import rejected, run_cli

OPTIONS: dict[str, Any] = {"max_context": 384, "prefill_chunk": 128, "pairs": ((1, 1), (1, 32))}

TIMES = UploadTimes(16, 0.02, 0.18, 0.01, 0.03, 0.005)


class Loaded(VMBackend):
    """A backend as a GPU would give it, which counts how many are open."""

    open = 0

    def __init__(self, uploaded: tuple[int, float] = (8_000_000_000, 0.25)) -> None:
        super().__init__(Machine(models.program("dense-small", **OPTIONS), models.store("dense-small"), "engine"))
        self.uploaded, self.devices, self.upload_times = uploaded, [], TIMES
        Loaded.open += 1

    def close(self) -> None:
        Loaded.open -= 1


def test_every_page_is_touched() -> None:
    artifact = models.artifact("example")
    assert warm(artifact) == artifact.payload_bytes


def test_each_repeat_opens_answers_and_closes() -> None:
    loads, backend = measure(Loaded, 3)  # type: ignore[arg-type]
    assert len(loads) == 3 and Loaded.open == 1
    assert all(item.first_token > item.ready > 0 and item.rate == 32e9 and item.times == TIMES for item in loads)
    backend.close()

    def failing() -> Loaded:
        made = Loaded()
        made.launch = lambda phase: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        return made

    with pytest.raises(ZeroDivisionError):
        measure(failing, 3)  # type: ignore[arg-type]
    assert Loaded.open == 0


def test_the_record(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("runtime.bench.open.open_for_bench", lambda *args, **options: Loaded())
    monkeypatch.setattr("runtime.bench.environment.describe", lambda devices: {"gpu": ["made up"]})
    monkeypatch.setattr(load, "pinned_rate", lambda devices: 50e9)
    monkeypatch.setattr(load, "measure", lambda opening, repeats, seed: (
        [Load(3.0 + i, 0.25, 4.0 + i, 8_000_000_000, TIMES) for i in range(repeats)], opening()))  # fmt: skip
    file = tmp_path / "load.json"
    result = run_cli("bench", models.EXAMPLE, "--load", "-r", 3, "-o", "json", "--output-file", file)
    assert result.code == 0, result.err
    record = json.loads(result.text)
    assert record == json.loads(file.read_text()) and record["gpu"] == ["made up"] and "read once" in record["page_cache"]
    rows = {row["metric"]: row for row in record["rows"]}
    assert rows["open to first token"]["value"] == 5.0 and rows["open to first token"]["spread"] == [4.0, 6.0]
    assert rows["weights rate"]["value"] == 32.0 and rows["of the pinned copy"]["value"] == pytest.approx(0.64)
    assert {row["unit"] for row in record["rows"]} == {"s", "GB/s", "B", "fraction", "count"} and rows["bytes"]["value"] == 8e9
    assert rows["weights: buffers page-locked by all threads"]["value"] == 0.02 and rows["weights: threads"]["value"] == 16
    assert rows["weights: a thread reads"]["value"] == 0.18 and rows["weights: a thread waits for the device"]["value"] == 0.03
    assert all(row["case"].endswith("tp1 load") for row in record["rows"])
    assert Loaded.open == 0


def test_synthetic_weights_have_no_file() -> None:
    rejected(run_cli("bench", models.EXAMPLE, "--load", "--weights", "synth"), 2, "--load", "--weights file")
