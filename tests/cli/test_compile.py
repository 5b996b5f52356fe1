"""``ninferc compile``: options reach the program, the folder is whole, kernels come from the cache the second time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from compiler.build import PhaseRequest
from compiler.emit.nvrtc import CompileError
from compiler.program.io import MANIFEST, load
from tests.cli import small_model
from tests.cli.conftest import rejected, run_cli
from tests.models import ROOT


@pytest.mark.parametrize("arch", [pytest.param("sm_75", marks=pytest.mark.slow), "sm_80"])
def test_a_real_compile(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With NVRTC: cubins for the target, no GPU involved; a second compile takes every kernel from the cache.

    One graph alone, to keep the test short."""
    monkeypatch.setattr("compiler.driver.phase_requests", lambda limits, options: [PhaseRequest("decode1x1", "decode", 1, 1)])
    monkeypatch.setenv("NINFERC_CACHE", str(tmp_path / "cache"))
    command = ["compile", small_model.small_artifact(), "--arch", arch, "--max-context", 128, "--prefill-chunk", 128,
               "--pairs", "1x1", "--jobs", 2]  # fmt: skip
    result = run_cli(*command, "-o", tmp_path / "p")
    assert result.code == 0 and result.out == b"", result.err
    program = load(tmp_path / "p")
    assert program.caps.arch == arch and program.limits.max_context == 128
    assert f"compiling {len(program.kernels)} kernels for {arch}" in result.lines
    for entry, kernel in program.kernels.items():
        assert kernel.image[:4] == b"\x7fELF" and entry.encode() in kernel.image and kernel.resources.registers > 0
        assert (tmp_path / "p" / "src" / f"{entry}.cu").read_bytes() == kernel.source.encode()
    assert result.summary("kernels") == str(len(program.kernels))

    def refuse(*args: object) -> None:
        raise CompileError("compiled again")

    monkeypatch.setattr("compiler.emit.nvrtc.compile_source", refuse)
    again = run_cli(*command, "-o", tmp_path / "q")
    assert again.code == 0 and "compiling" not in again.err and load(tmp_path / "q").kernels == program.kernels
    # the artifact stands in another place as seen from q, all else is equal
    assert load(tmp_path / "q").phases == program.phases


def test_options_reach_the_program(no_nvrtc: list[str], tmp_path: Path) -> None:
    result = run_cli("compile", small_model.small_artifact(), "-o", tmp_path / "p", "--arch", "sm_120a", "--as", "rtx5060ti",
                     "--max-context", 512, "--max-concurrency", 8, "--prefill-chunk", 256, "--pairs", "1x1,8x1,1x4",
                     "--kv-capacity", 1024)  # fmt: skip
    assert result.code == 0 and result.summary("target") == "sm_120a, 36 multiprocessors"
    program = load(tmp_path / "p")
    limits = program.limits
    assert (limits.max_context, limits.lanes, limits.chunk, limits.pages) == (512, 8, 256, 16)
    decode = {(p.lanes, p.width) for p in program.phases.values() if p.phase == "decode"}
    assert decode == {(1, 1), (8, 1), (1, 4)} and len(no_nvrtc) == len(program.kernels)
    assert program.caps.arch == "sm_120a" and program.caps.sms == 36
    assert result.summary("graphs").split() == list(program.phases)


def test_an_existing_program_is_replaced_and_nothing_else(no_nvrtc: list[str], tmp_path: Path) -> None:
    command = ["compile", small_model.small_artifact(), "-o", tmp_path / "p", "--arch", "sm_90a"]
    (tmp_path / "p").mkdir()  # an empty folder is fine
    assert run_cli(*command, "--max-context", 128).code == 0
    (tmp_path / "p" / "src" / "stale.cu").write_text("")
    assert run_cli(*command, "--max-context", 256).code == 0
    assert load(tmp_path / "p").limits.max_context == 256 and not (tmp_path / "p" / "src" / "stale.cu").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["p"]
    (tmp_path / "file").write_text("x")
    rejected(run_cli(*command[:3], tmp_path / "file", *command[4:]), 1, "file exists and is no program folder")
    (tmp_path / "p" / MANIFEST).unlink()
    rejected(run_cli(*command), 1, "p exists and is no program folder")


def test_a_kernel_that_does_not_compile(tmp_path: Path, untouched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(entry: str, source: str, arch: str) -> None:
        raise CompileError(f"kernel {entry} for {arch}: x.cuh(3): error: identifier is undefined\nlog\nlog")

    monkeypatch.setenv("NINFERC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("compiler.emit.nvrtc.compile_source", broken)
    result = run_cli("compile", small_model.small_artifact(), "-o", untouched / "p", "--arch", "sm_90a", "--jobs", 1)
    assert result.code == 1 and result.out == b"" and len(result.lines) == 2  # "compiling …" and the error
    assert "sm_90a: x.cuh(3): error: identifier is undefined" in result.lines[1]


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_ctrl_c_while_compiling(tmp_path: Path, untouched: Path) -> None:
    """The terminal interrupts the workers too: one line all the same, nothing left but whole cache entries."""
    environment = os.environ | {"NINFERC_CACHE": str(tmp_path / "cache")}
    code = "import sys; from runtime.cli.main import main\nif __name__ == '__main__': sys.exit(main())"
    script = tmp_path / "ninferc.py"
    script.write_text(code)
    target = untouched / "p"
    process = subprocess.Popen([sys.executable, script, "compile", small_model.small_artifact(), "-o", target, "--arch",
                                "sm_90a", "--jobs", "2"], cwd=ROOT, env=environment | {"PYTHONPATH": str(ROOT)},
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)  # fmt: skip
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list((tmp_path / "cache").glob("*.cubin")):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and out == b""
    lines = errors.decode().splitlines()
    assert lines[-1] == "ninferc: interrupted" and len(lines) == 2, lines
