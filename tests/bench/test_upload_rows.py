"""The benchmark of uploads: a row for each way, also where something fails; bytes that do not arrive are noticed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from benchmarks import upload as rows
from runtime.cuda.driver import api
from runtime.cuda.upload import DEFAULT
from tests import models
from tests.tp.copies import OK, Copies


class Memory:
    """The device of ``Copies``, as far as the benchmark uses it."""

    def __init__(self, copies: Copies) -> None:
        self._copies, self.stream, self.handle = copies, 0, 0

    def allocate(self, nbytes: int, what: str) -> int:
        self._copies.allocate([nbytes])
        self.activate = self._copies.devices[0].activate
        return self._copies.base(0)

    def download(self, address: int, nbytes: int) -> np.ndarray[Any, Any]:
        at = address - self._copies.base(0)
        return self._copies.memory[0][at : at + nbytes]

    def synchronize(self) -> None:
        return None

    def close(self) -> None:
        return None


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    made = Copies(monkeypatch)

    def clear(address: int, value: int, nbytes: int, stream: Any) -> tuple[Any]:
        at = address - made.base(0)
        made.memory[0][at : at + nbytes] = value
        return (OK,)

    monkeypatch.setattr(driver, "cuMemsetD8Async", clear)
    monkeypatch.setattr(rows, "Device", lambda index: Memory(made))
    monkeypatch.setattr(rows, "PinnedBuffer", made.pinned)
    monkeypatch.setattr(rows, "describe", lambda devices: {"gpu": ["made up"]})
    monkeypatch.setattr(rows, "pinned_rate", lambda devices: 50e9)
    monkeypatch.setattr(rows, "STRETCHED", rows.MIB)
    ways = replace(DEFAULT, piece=200000), replace(DEFAULT, piece=70000, registered=True, held=True)
    monkeypatch.setattr(rows, "WAYS", ways)
    yield made
    api.cache_clear()


def run(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    assert rows.main([str(models.EXAMPLE), "-r", "2", *options]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_row_for_each(copies: Copies, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    printed = run(capsys, "-o", str(tmp_path / "rows.json"))
    record = json.loads((tmp_path / "rows.json").read_text())
    assert record["rows"] == printed and record["gpu"] == ["made up"] and record["default"]["piece"] == DEFAULT.piece
    uploads = [row for row in printed if row.get("metric") == "upload"]
    assert [row["case"] for row in uploads] == [rows.name_of(way) for way in rows.WAYS]
    assert all(row["value"] > 0 and row["seconds"] > 0 and row["threads"] >= 1 for row in uploads)
    assert len([row for row in printed if row.get("unit") == "ms"]) == 2 * len(rows.LOCKED)
    refused = [row for row in printed if "error" in row]
    assert len(refused) == 2 and all("READ_ONLY_HOST_REGISTER_SUPPORTED is 0" in row["error"] for row in refused)
    assert copies.open == 0


def test_what_fails_is_a_row(copies: Copies, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that cannot be registered for the page-locking rows, bytes that never arrive for the others."""
    monkeypatch.setattr(driver, "cuMemHostRegister", lambda *args: (driver.CUresult.CUDA_ERROR_NOT_SUPPORTED,))
    monkeypatch.setattr(driver, "cuMemcpyHtoDAsync", lambda *args: (OK,))
    printed = run(capsys)
    errors = {row["case"]: row["error"] for row in printed if "error" in row}
    assert all("are not those of the file" in errors[rows.name_of(way)] for way in rows.WAYS)
    assert sum("CUDA_ERROR_NOT_SUPPORTED" in error for error in errors.values()) == len(rows.LOCKED)
    assert {row["case"] for row in printed if "error" not in row} >= {"pinned copy", "PinnedBuffer 1 x 8 MiB"}
