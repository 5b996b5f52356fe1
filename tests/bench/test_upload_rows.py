"""The benchmark of uploads: a row for each case, also where something fails; bytes that do not arrive are noticed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from benchmarks import upload as rows
from runtime.cuda.driver import api
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
    monkeypatch.setattr(rows, "CASES", (rows.Case(3, 200000, False), rows.Case(2, 70000, True)))
    yield made
    api.cache_clear()


def run(capsys: pytest.CaptureFixture[str], *options: str) -> list[dict[str, Any]]:
    assert rows.main([str(models.EXAMPLE), "-r", "2", *options]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_row_for_each(copies: Copies, capsys: pytest.CaptureFixture[str], tmp_path: Path,
                        monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    taken: set[int] = set()
    register = driver.cuMemHostRegister
    monkeypatch.setattr(driver, "cuMemHostRegister", lambda *args: (taken.add(args[1]), register(*args))[1])
    printed = run(capsys, "-o", str(tmp_path / "rows.json"))
    record = json.loads((tmp_path / "rows.json").read_text())
    assert record["rows"] == printed and record["gpu"] == ["made up"] and not [row for row in printed if "error" in row]
    uploads = [row for row in printed if row.get("metric") == "upload"]
    assert [row["case"] for row in uploads] == ["3 threads x 2 x 195 KiB, allocated", "2 threads x 2 x 68 KiB, registered"]
    assert all(row["value"] > 0 and row["seconds"] > 0 for row in uploads) and [row["threads"] for row in uploads] == [3, 2]
    assert len([row for row in printed if row.get("unit") == "ms"]) == 2 * len(rows.LOCKED)
    assert taken == {70000} | {nbytes for nbytes, _ in rows.LOCKED} and copies.open == 0


def test_what_fails_is_a_row(copies: Copies, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that cannot be registered for the page-locking rows, bytes that never arrive for the others."""
    monkeypatch.setattr(driver, "cuMemHostRegister", lambda *args: (driver.CUresult.CUDA_ERROR_NOT_SUPPORTED,))
    monkeypatch.setattr(driver, "cuMemcpyHtoDAsync", lambda *args: (OK,))
    printed = run(capsys)
    errors = {row["case"]: row["error"] for row in printed if "error" in row}
    assert all("are not those of the file" in errors[str(case)] for case in rows.CASES)
    assert sum("CUDA_ERROR_NOT_SUPPORTED" in error for error in errors.values()) == len(rows.LOCKED)
    assert {row["case"] for row in printed if "error" not in row} >= {"pinned copy", "PinnedBuffer 1 x 8 MiB"}
