"""The command line in this process, on programs that are planned but not compiled (the VM needs no kernels)."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from artifacts import Artifact
from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import caps
from compiler.emit.nvrtc import Cubin, Resources
from compiler.program.io import save
from runtime.cli.main import main
from runtime.cuda.driver import api
from runtime.open import relative, sample_digest
from tests import models
from tests.cli import small_model


@dataclass(frozen=True)
class Result:
    """What a command left: exit code, stdout as bytes, stderr as text."""

    code: int
    out: bytes
    err: str

    @property
    def text(self) -> str:
        return self.out.decode()

    @property
    def lines(self) -> list[str]:
        return self.err.splitlines()

    def summary(self, name: str) -> str:
        """The value of a summary row. Raises StopIteration when there is none."""
        return next(line[len("summary ") + 26 :].strip() for line in self.lines if line.startswith(f"summary {name:<26}"))


def run_cli(*args: object) -> Result:
    """Run ``ninferc`` with these arguments in this process."""
    out, err = io.BytesIO(), io.BytesIO()
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = io.TextIOWrapper(out, "utf-8", write_through=True), io.TextIOWrapper(err, "utf-8")
    try:
        code = main([str(arg) for arg in args])
        sys.stdout.flush()
        sys.stderr.flush()
        return Result(code, out.getvalue(), err.getvalue().decode())
    finally:
        sys.stdout, sys.stderr = before


def rejected(result: Result, code: int, *parts: str) -> None:
    """The rule for every bad input: this exit code, one line on stderr that holds ``parts``, nothing on stdout."""
    assert result.code == code, result
    assert result.out == b""
    assert len(result.lines) == 1 and result.lines[0].startswith("ninferc: "), result.err
    assert "Traceback" not in result.err and len(result.err) < 600
    for part in parts:
        assert part in result.err, (part, result.err)


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """No test touches the user's cache, and none inherits the driver that another made up."""
    folder = tmp_path_factory.getbasetemp() / "ninferc-cache"
    monkeypatch.setenv("NINFERC_CACHE", str(folder))
    yield folder
    api.cache_clear()


@pytest.fixture
def no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compiling renders every source but calls no compiler; the names of compiled kernels are collected."""
    seen: list[str] = []

    def compile_all(jobs: Any, folder: Any = None, workers: Any = None, progress: Any = None) -> dict[str, Cubin]:
        out = {}
        for done, job in enumerate(jobs):
            assert job.entry in job.source
            out[job.entry] = Cubin(b"\x7fELF" + job.entry.encode(), Resources(32, 0, 0, 0, 0), "")
            seen.append(job.entry)
            if progress:
                progress(done, done + 2, job.entry)
        if progress:
            progress(len(out), len(out), "")
        return out

    monkeypatch.setattr("compiler.driver.compile_all", compile_all)
    return seen


def plan_folder(folder: Path, artifact: Artifact, arch: str = "sm_90a", **options: Any) -> Path:
    """A program folder of a model, without kernel images."""
    program = compile_program(artifact, caps(arch), CompileOptions(**options), images=False)
    program.options["artifact_path"] = relative(artifact.path, folder)
    program.options["artifact_sample"] = sample_digest(artifact)
    save(program, folder)
    return folder


LIMITS: dict[str, Any] = {"max_context": 384, "max_concurrency": 4, "prefill_chunk": 128, "pairs": ((1, 1), (4, 1), (1, 32))}


@pytest.fixture(scope="session")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model with a tokenizer, up to four lanes."""
    return plan_folder(tmp_path_factory.mktemp("programs") / "small", small_model.opened(), **LIMITS)


@pytest.fixture(scope="session")
def dense_program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fixture dense-small, which has no tokenizer."""
    return plan_folder(tmp_path_factory.mktemp("programs") / "dense", models.artifact("dense-small", "bf16"), max_context=384,
                       prefill_chunk=128, pairs=((1, 1), (1, 4)))  # fmt: skip


@pytest.fixture
def ids_file(tmp_path: Path) -> Callable[[Any], Path]:
    """Write a JSON value to a file."""

    def write(value: Any) -> Path:
        path = tmp_path / "ids.json"
        path.write_text(json.dumps(value))
        return path

    return write


@pytest.fixture
def untouched(tmp_path: Path) -> Iterator[Path]:
    """A folder in which a failing command must leave nothing."""
    folder = tmp_path / "out"
    folder.mkdir()
    yield folder
    assert list(folder.iterdir()) == []
