"""``--kv-capacity N|auto``: bounds, and what a GPU's free memory allows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from compiler.control import PAGE
from compiler.driver import compile_program
from compiler.explain.memory import device_memory, total_bytes
from runtime.cli.capacity import DRIVER_BYTES, STEPS
from runtime.cli.errors import DEVICE, USAGE
from runtime.cli.io import Diagnostics
from runtime.cli.load import Choices, Source
from runtime.cli.options import AUTO
from tests.cli import small_model
from tests.cli.conftest import rejected, run_cli
from tests.cli.fake_driver import FakeDriver

CONTEXT, LANES = 1000, 8
PAGES = LANES * -(-CONTEXT // PAGE)
HEADROOM = 64 << 20


def source(free: int, patch: pytest.MonkeyPatch, **choices: Any) -> Source:
    """An artifact opened for a GPU with this many free bytes, nothing compiled."""
    FakeDriver(free=free).install(patch)
    given = {"kv_capacity": AUTO, "headroom": HEADROOM >> 20, "max_context": CONTEXT, "max_concurrency": LANES} | choices
    return Source(small_model.small_artifact(), Choices(device="cuda", **given), Diagnostics())


def need(capacity: int | None) -> int:
    """Free bytes that a program of this capacity needs."""
    with pytest.MonkeyPatch.context() as patch:
        made = source(1 << 40, patch, kv_capacity=capacity, headroom=None)
        return total_bytes(compile_program(made.artifact, made.caps, made.options, images=False)) + DRIVER_BYTES + HEADROOM


def test_room_for_every_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    found = source(1 << 40, monkeypatch)
    assert found.options.kv_capacity is None and found.limits.pages == PAGES  # the program of --kv-capacity left out


def test_what_is_chosen_fits_and_one_step_more_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    least, full = need(CONTEXT), need(None)
    for share in (0.0, 0.3, 0.7, 0.999):
        free = least + int((full - least) * share)
        found = source(free, monkeypatch)
        capacity = found.options.kv_capacity
        assert capacity is not None and capacity % PAGE == 0 and need(capacity) <= free
        step = max(PAGES // STEPS, 1) * PAGE
        assert capacity + step >= LANES * CONTEXT or need(capacity + step) > free
        planned = compile_program(found.artifact, found.caps, found.options, images=False)
        assert device_memory(planned)[0]["kv pool"] * PAGES == device_memory(compile_program(
            found.artifact, found.caps, source(1 << 40, monkeypatch).options, images=False))[0]["kv pool"] * (capacity // PAGE)


def test_headroom_is_left_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = need(None) - HEADROOM + (1 << 30)
    assert source(free, monkeypatch, headroom=None).options.kv_capacity is None  # 1 GiB by default
    assert source(free - 4096, monkeypatch, headroom=None).options.kv_capacity is not None
    assert source(free - (1 << 30), monkeypatch, headroom=0).options.kv_capacity is None


def test_too_small_for_one_context(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, untouched: Path) -> None:
    lines = tmp_path / "in.jsonl"
    lines.write_text('{"prompt": "x"}')
    free = need(CONTEXT) - 4096
    FakeDriver(free=free).install(monkeypatch)
    result = run_cli("batch", small_model.small_artifact(), lines, "-o", untouched / "out", "--device", "cuda", "--kv-capacity",
                     "auto", "--max-context", CONTEXT, "--max-concurrency", LANES, "--vram-headroom-mib", HEADROOM >> 20)
    rejected(result, DEVICE, "are needed with one context of 1000 tokens and 64 MiB of headroom", "--max-context")


def test_auto_on_the_cpu_is_room_for_each(no_nvrtc: list[str]) -> None:
    result = run_cli("run", small_model.small_artifact(), "--prompt", "x", "--max-new", 2, "--device", "cpu",
                     "--kv-capacity", "auto", "--max-context", 200)  # fmt: skip
    assert result.code == 0 and result.summary("kv capacity") == "256 tokens, full context per lane"


def test_bad_capacities(program: Path) -> None:
    run = ["run", small_model.small_artifact(), "--prompt", "x", "--device", "cpu"]
    for args, parts in (
        ([*run, "--kv-capacity", "1100"], ["--kv-capacity 1100", "1 sequence(s) of 1024 tokens use at most 1024"]),
        ([*run, "--kv-capacity", "512"], ["--kv-capacity 512", "--max-context 1024"]),
        ([*run, "--kv-capacity", "Auto"], ["--kv-capacity 'Auto'"]),
        ([*run, "--vram-headroom-mib", "10"], ["--vram-headroom-mib needs --kv-capacity auto"]),
        ([*run, "--kv-capacity", "1024", "--vram-headroom-mib", "10"], ["--vram-headroom-mib needs --kv-capacity auto"]),
        ([*run, "--kv-capacity", "auto", "--vram-headroom-mib", "-1"], ["--vram-headroom-mib '-1'"]),
        (["run", program, "--prompt", "x", "--device", "cpu", "--kv-capacity", "auto"], ["--kv-capacity auto", "fixed"]),
    ):
        rejected(run_cli(*args), USAGE, *parts)
