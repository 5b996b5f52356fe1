"""Prefill attention, both variants, on the emulator and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compiler.emit.arch import caps
from compiler.emit.nvrtc import compile_source
from compiler.emit.render import render
from compiler.ir.types import IRError
from compiler.kernels.attention_prefill import mma_spec, prefill_spec, wgmma_spec
from tests.emulator.harness import assert_close_to_fp64, poisoned
from tests.gpu_launch import EmulatorLauncher
from tests.kernels.attention_cases import PAGE, Case, consumer_card, make_case, run_prefill
from tests.kernels.fixture_vectors import vectors

VARIANTS = {"mma": mma_spec, "wgmma": wgmma_spec}


def choice(backend: Any, variant: str) -> Any:
    if variant == "wgmma" and not backend.caps().wgmma:
        pytest.skip(f"{backend.arch} has no warpgroup products")
    return VARIANTS[variant]


@pytest.mark.parametrize(("variant", "dim"), [*(("mma", dim) for dim in (32, 64, 128, 256)), ("wgmma", 64), ("wgmma", 256)])
@pytest.mark.parametrize(("before", "rows"), [(0, 1), (0, 65), (127, 130)])
def test_against_fp64(kernel_backend: Any, variant: str, dim: int, before: int, rows: int) -> None:
    case = make_case([before], [rows], 192, dim=dim, heads=6 if dim < 256 else 3, kv_heads=2 if dim < 256 else 1)
    out = run_prefill(kernel_backend, case, kernel_backend.caps(sms=5), choice(kernel_backend, variant))
    assert_close_to_fp64(out[:rows], case.reference(), "bf16")
    assert (out[rows:] == 0xFFFF).all(), "an inactive row was written"


SPLITS = [("mma", 32, 20, 7), ("mma", 32, 130, 9), ("mma", 32, 20, 40), ("wgmma", 64, 20, 7), ("wgmma", 64, 130, 9)]


@pytest.mark.parametrize(("variant", "dim", "rows", "sms"), SPLITS)
def test_split_keys(kernel_backend: Any, variant: str, dim: int, rows: int, sms: int) -> None:
    """Few rows after a long history: tiles are cut along the keys; the result is the same function."""
    case = make_case([1600], [rows], 256, dim=dim, heads=2, kv_heads=1, row_pages=30)
    choose = choice(kernel_backend, variant)
    out = run_prefill(kernel_backend, case, kernel_backend.caps(sms=sms), choose)
    assert_close_to_fp64(out[:rows], case.reference(), "bf16")
    whole = run_prefill(kernel_backend, case, kernel_backend.caps(sms=1), choose)
    assert (whole[:rows] != out[:rows]).any(), "nothing was split"


def test_consumer_card(kernel_backend: Any) -> None:
    case = make_case([70], [150], 192, dim=256, heads=2, kv_heads=1)
    target = consumer_card(kernel_backend)
    assert prefill_spec(case.op("prefill"), case.types(), target).smem < target.smem_block
    assert_close_to_fp64(run_prefill(kernel_backend, case, target)[:150], case.reference(), "bf16")


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_rows(kernel_backend: Any, variant: str) -> None:
    case = make_case([64], [0], 128, dim=64)
    assert (run_prefill(kernel_backend, case, kernel_backend.caps(), choice(kernel_backend, variant)) == 0xFFFF).all()


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_race(variant: str) -> None:
    case = make_case([1100], [90], 128, dim=64, heads=2, kv_heads=1, row_pages=20)
    target, choose = EmulatorLauncher().caps(sms=6), choice(EmulatorLauncher(), variant)
    assert len({run_prefill(EmulatorLauncher(seed), case, target, choose).tobytes() for seed in range(3)}) == 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_forgotten_page_is_rejected(variant: str) -> None:
    case = make_case([200], [40], 64, dim=64)
    backend = EmulatorLauncher()
    out = run_prefill(backend, case, backend.caps(), choice(backend, variant))
    with pytest.raises(AssertionError):
        assert_close_to_fp64(out[:40], case.reference(short=1), "bf16")


@pytest.mark.parametrize("variant", VARIANTS)
def test_sharp_scores(kernel_backend: Any, variant: str) -> None:
    case = make_case([190], [70], 128, dim=64, sharpness=40.0)
    out = run_prefill(kernel_backend, case, kernel_backend.caps(sms=3), choice(kernel_backend, variant))
    assert_close_to_fp64(out[:70], case.reference(), "bf16")


@pytest.mark.parametrize("variant", [*VARIANTS, "decode"])
def test_golden_vectors(kernel_backend: Any, variant: str) -> None:
    """gqa_*: five queries at positions 65 … 69 over 70 rows, 12 query and 2 KV heads of 256."""
    from tests.kernels.attention_cases import run_decode

    gold = vectors()
    case = make_case([65], [5], 5, dim=256, heads=12, kv_heads=2)
    cache = case.cache.copy()
    for token in range(70):
        page = case.page_table[case.page_row[0], token // PAGE]
        cache[page, 0, :, token % PAGE], cache[page, 1, :, token % PAGE] = gold["gqa_k"][token], gold["gqa_v"][token]
    case = replace(case, cache=cache, qr=gold["gqa_q"].reshape(5, -1), gate=gold["gqa_gate"].reshape(5, -1))
    target = kernel_backend.caps()
    if variant == "decode":
        out = run_decode(kernel_backend, case, target)
    else:
        out = run_prefill(kernel_backend, case, target, choice(kernel_backend, variant))
    assert_close_to_fp64(out, gold["gqa_gated_out"].reshape(5, -1), "bf16")


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
def test_resources(arch: str) -> None:
    """Production shape: compiles, fits shared memory; the chosen variant of sm_90a does not spill."""
    target = caps(arch)
    rows = poisoned((1024, 6144))
    case = Case(24, 4, 256, 1024, np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.int32),
                np.zeros((1, 1 << 14), np.int32), poisoned((1, 2, 4, PAGE, 256)), rows, rows)  # fmt: skip
    spec = prefill_spec(case.op("prefill"), case.types(), target)
    found = compile_source(spec.entry, render(spec.template, spec.entry, spec.params), arch).resources
    assert spec.smem + found.static_smem <= target.smem_block
    assert found.spill_stores <= 32, "the accumulators do not fit the registers"
    if target.wgmma:
        assert spec.template == "attn_prefill_wgmma.cu.j2" and found.stack == 0


def test_targets_that_cannot_run_it() -> None:
    case = make_case([0], [1], 16)
    with pytest.raises(IRError, match="warpgroup products need sm_90a"):
        wgmma_spec(case.op("prefill"), case.types(), caps("sm_120a"))
