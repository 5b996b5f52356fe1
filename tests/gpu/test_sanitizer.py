"""NVIDIA's memory checker finds nothing in a small run: out-of-bounds and misaligned accesses, races in shared memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache

import pytest

from compiler.driver import CompileOptions, compile_program
from runtime.backend import VMBackend
from runtime.vm import Machine
from tests import card, models
from tests.gpu import small_run

# The race checker does not follow a stage that one lane hands over for its warp through an mbarrier (the loaders of warpgroup
# products), and calls every use of it a hazard. Kernels of a card without warpgroup products hand over by barriers it knows.
RACES_AS = "rtx4090"
LIMIT = 240  # seconds that one tool may take, other tests beside it
FOUND = 99  # exit code for "the tool has something to report"
UNSUPPORTED = "Device not supported"  # how the tool refuses a GPU that its sandbox hides


def checker() -> str | None:
    places = [shutil.which("compute-sanitizer"), "/usr/local/cuda/bin/compute-sanitizer"]
    return next((place for place in places if place and os.path.exists(place)), None)


def execute(prefix: Sequence[str], arguments: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    command = [*prefix, sys.executable, "-m", "tests.gpu.small_run", *arguments]
    stands_for = {"NINFERC_TEST_AS": RACES_AS} if arguments else {}
    return subprocess.run(command, cwd=models.ROOT, capture_output=True, text=True, timeout=seconds,
                          env={**stands_for, **os.environ})  # fmt: skip


@cache
def expected(arguments: tuple[str, ...]) -> list[list[int]]:
    """The run without a tool; it also leaves every cubin in the cache, so that no compiler runs under the tool."""
    done = execute((), arguments, 300)
    assert done.returncode == 0, done.stderr[-2000:]
    tokens: list[list[int]] = json.loads(done.stdout.splitlines()[-1])
    return tokens


@pytest.mark.gpu
@pytest.mark.parametrize("tool, arguments", [
    pytest.param(("memcheck", "--leak-check", "no"), (), id="memcheck"),
    *(pytest.param(("racecheck", "--racecheck-report", "all"), (part,), id=f"racecheck-{part}") for part in small_run.PARTS),
])  # fmt: skip
def test_nothing_is_found(tool: tuple[str, ...], arguments: tuple[str, ...]) -> None:
    program = checker()
    if program is None:
        pytest.skip("compute-sanitizer is not installed; it is a part of the CUDA toolkit")
    want = expected(arguments)
    try:
        done = execute([program, "--tool", *tool, "--error-exitcode", str(FOUND), "--target-processes", "application-only",
                        "--print-limit", "20"], arguments, LIMIT)  # fmt: skip
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"not done in {LIMIT} s; so far: {bytes(late.stdout or b'')[-4000:].decode(errors='replace')}")
    if UNSUPPORTED in done.stdout + done.stderr:
        pytest.skip(f"compute-sanitizer: {UNSUPPORTED}")
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    lines = done.stdout.splitlines()
    assert any("ERROR SUMMARY: 0 errors" in line or "0 hazards displayed" in line for line in lines), lines[-5:]
    assert json.dumps(want) in lines


def test_the_run_takes_every_kind_of_step() -> None:
    """What the tool executes, on the Python VM: every phase of the program is launched, and the tokens come."""
    program = compile_program(models.artifact("example"), card.emulated(), CompileOptions(**small_run.OPTIONS), images=False)
    launched: list[str] = []
    taken, counts = {}, {}
    for part in ("", *small_run.PARTS):
        backend = VMBackend(Machine(program, models.store("example"), "engine"))
        launch = backend.launch

        def noting(phase: str, launch: Callable[[str], None] = launch) -> None:
            launched.append(phase)
            launch(phase)

        backend.launch = noting  # type: ignore[method-assign]
        counts[part] = [len(lane) for lane in small_run.run(backend, part)]
        taken[part] = launched.copy()
        launched.clear()
    assert set(taken[""]) == set(program.phases) and taken[""].count("prefill") == 3 and counts[""] == [3, 3, 3]
    brief = [phase for part in small_run.PARTS for phase in taken[part]]
    assert set(brief) == set(program.phases) and len(brief) == 4, taken
    assert counts["prefill"] == [1] and counts["decode"] == [1, 1, 2]
