"""Decode attention: the device-built work list, partial results and their merge, on the emulator and on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compiler.control import chunk_keys
from compiler.emit.arch import caps
from compiler.emit.nvrtc import compile_source
from compiler.emit.render import render
from compiler.ir.types import IRError
from compiler.kernels.attention_decode import group_columns, merge_spec, partial_spec, row_limit
from compiler.kernels.spec import DeviceCaps
from compiler.ops.attention import lower_decode, sigmoid
from tests.emulator import toolchain
from tests.emulator.emulator import EmulatorError
from tests.emulator.harness import assert_close_to_fp64, from_bf16, poisoned, to_bf16
from tests.gpu_launch import EmulatorLauncher
from tests.kernels.attention_cases import PAGE, Case, build_work, consumer_card, make_case, run_decode
from tests.kernels.programmatic import ProgrammaticEmulator

LENGTHS = [1, 63, 64, 65, 127, 300]


def listed(work: Any, count: Any) -> list[tuple[int, int, int, int, int, int]]:
    """(lane, page row, kv head, chunk size, first key, column mask) of every item."""
    words = work[: int(count[0])].astype(np.int64) & 0xFFFFFFFF
    return [(int(a) & 0xFFFF, int(a) >> 16, int(b) % PAGE, int(b) // PAGE * PAGE, int(c), int(d)) for a, b, c, d in words]


def expected_items(case: Case, target: DeviceCaps) -> set[tuple[int, int, int, int, int, int]]:
    """The same from the rule: columns of a lane, in groups, share an item when chunk size and chunk agree."""
    group = group_columns(case.width, case.heads, case.kv_heads, row_limit(case.dim, target))
    masks: dict[tuple[int, ...], int] = {}
    for lane in range(case.lanes):
        for t in range(int(case.active[lane])):
            length = int(case.before[lane]) + t + 1
            for first in range(0, length, chunk_keys(length)):
                for head in range(case.kv_heads):
                    key = (lane, int(case.page_row[lane]), head, chunk_keys(length), first, t // group)
                    masks[key] = masks.get(key, 0) | 1 << t
    return {(lane, row, head, size, first, mask) for (lane, row, head, size, first, _), mask in masks.items()}


@pytest.mark.parametrize(
    ("before", "active", "width", "heads"),
    [([0, 5, 63], [1, 0, 1], 1, 2), ([0, 62, 4090, 300], [8, 3, 8, 0], 8, 12), ([4095, 8190], [32, 17], 32, 12)],
)
def test_work_list(kernel_backend: Any, before: list[int], active: list[int], width: int, heads: int) -> None:
    case = make_case(before, active, width, heads=heads, row_pages=130, dim=32)
    work, count = build_work(kernel_backend, case, extra=3)
    items = listed(work, count)
    assert len(items) == len(set(items)) and set(items) == expected_items(case, kernel_backend.caps())
    assert (work[int(count[0]) :] == -1).all()


@pytest.mark.parametrize("length", [1, 4096, 4097, 8192, 8193, 12288, 262144, 262145, 1 << 20])
def test_chunks_of_a_length(kernel_backend: Any, length: int) -> None:
    case = make_case([0], [1], 1, heads=1, kv_heads=1, row_pages=1)
    case = replace(case, before=np.array([length - 1], np.int32), page_table=np.zeros((3, 1 << 14), np.int32))
    items = listed(*build_work(kernel_backend, case))
    size = chunk_keys(length)
    assert {item[3] for item in items} == {size}
    assert sorted(item[4] for item in items) == list(range(0, length, size)) and len(items) <= 64


@pytest.mark.parametrize("dim", [32, 64, 128, 256])
def test_lengths_against_fp64(kernel_backend: Any, dim: int) -> None:
    case = make_case([length - 1 for length in LENGTHS], [1] * 6, 1, dim=dim, heads=6, kv_heads=2)
    out = run_decode(kernel_backend, case, kernel_backend.caps(sms=5))
    assert_close_to_fp64(out, case.reference(), "bf16")


SHAPES = [(4, 24, 4, 256), (8, 12, 2, 256), (3, 5, 5, 64), (8, 16, 1, 32)]


@pytest.mark.parametrize(("width", "heads", "kv_heads", "dim"), SHAPES)
def test_columns_against_fp64(kernel_backend: Any, width: int, heads: int, kv_heads: int, dim: int) -> None:
    case = make_case([0, 61, 200], [width, 0, width - 1], width, dim=dim, heads=heads, kv_heads=kv_heads)
    out = run_decode(kernel_backend, case, kernel_backend.caps())
    assert_close_to_fp64(out[case.rows()], case.reference(), "bf16")
    idle = np.setdiff1d(np.arange(len(out)), case.rows())
    assert (out[idle] == 0xFFFF).all(), "an inactive column was written"


@pytest.mark.parametrize("width", [1, 8])
def test_consumer_card(kernel_backend: Any, width: int) -> None:
    case = make_case([0, 140], [width, 1], width, dim=256, heads=12, kv_heads=2)
    out = run_decode(kernel_backend, case, consumer_card(kernel_backend))
    assert_close_to_fp64(out[case.rows()], case.reference(), "bf16")


def test_sharp_scores(kernel_backend: Any) -> None:
    """Scores of some hundreds: the running maximum moves, earlier weights vanish."""
    case = make_case([299], [2], 2, dim=64, sharpness=40.0)
    assert_close_to_fp64(run_decode(kernel_backend, case, kernel_backend.caps()), case.reference(), "bf16")


def test_a_forgotten_page_is_rejected() -> None:
    """Negative control: the bound tells a kernel that misses one page of keys from a right one."""
    case = make_case([299], [1], 1, dim=128)
    out = run_decode(EmulatorLauncher(), case, EmulatorLauncher().caps())
    with pytest.raises(AssertionError):
        assert_close_to_fp64(out, case.reference(short=1), "bf16")


@pytest.mark.parametrize(("before", "dim"), [(60, 256), (290, 64), (4091, 32)])
def test_bits_do_not_depend_on_neighbours(kernel_backend: Any, before: int, dim: int) -> None:
    """One value per column over widths 1, 4, 8, neighbouring lanes, grids and what lies beyond its length."""
    target = kernel_backend.caps()
    pages = -(-(before + 8) // PAGE) + 1
    wide = make_case([before, 17, before - 3], [8, 8, 5], 8, dim=dim, heads=12, kv_heads=2, row_pages=pages)
    want = run_decode(kernel_backend, wide, target)
    assert (run_decode(kernel_backend, wide, target, grid=3) == want).all(), "the grid changed the bits"
    for t in range(8):
        solo = run_decode(kernel_backend, wide.column(0, t), target)
        assert (solo[0] == want[t]).all(), f"column {t} alone differs from its bits among neighbours"
    half = replace(wide, width=4, before=wide.before[:1] + 4, active=np.array([4], np.int32), page_row=wide.page_row[:1],
                   qr=wide.qr[4:8], gate=wide.gate[4:8])  # fmt: skip
    assert (run_decode(kernel_backend, half, target) == want[4:8]).all()


@pytest.mark.parametrize("width", [1, 8])
def test_no_race(width: int) -> None:
    case = make_case([100, 0], [width, 1], width, dim=128, heads=12, kv_heads=2)
    outputs = {run_decode(EmulatorLauncher(seed), case, EmulatorLauncher().caps(sms=3)).tobytes() for seed in range(5)}
    assert len(outputs) == 1


def test_very_long_sequences(kernel_backend: Any) -> None:
    """The longest sequence (400,000 keys on the emulator), over a few pages that stand at many places of the table."""
    length, physical, dim, heads = 400_000 if isinstance(kernel_backend, EmulatorLauncher) else 1 << 20, 5, 32, 2
    random = np.random.default_rng(1)
    cache = to_bf16(random.standard_normal((physical, 2, 1, PAGE, dim)))
    table = random.integers(0, physical, (1, -(-length // PAGE))).astype(np.int32)
    q, gate = (to_bf16(random.standard_normal((1, heads * dim))) for _ in range(2))
    before, active, row = (np.array([value], np.int32) for value in (length - 1, 1, 0))
    case = Case(heads, 1, dim, 1, before, active, row, table, cache, q, gate)
    out = run_decode(kernel_backend, case, kernel_backend.caps())

    def reference(pages: Any) -> Any:
        times = np.repeat(np.bincount(pages, minlength=physical), PAGE).astype(np.float64)
        keys, values = from_bf16(cache).astype(np.float64)[:, :, 0].transpose(1, 0, 2, 3).reshape(2, -1, dim)
        scores = from_bf16(q).astype(np.float64).reshape(heads, dim) @ keys.T * dim**-0.5
        weights = np.exp(scores - scores.max(axis=1, keepdims=True)) * times
        return ((weights / weights.sum(axis=1, keepdims=True)) @ values).reshape(1, -1) * sigmoid(from_bf16(gate))

    assert_close_to_fp64(out, reference(table[0]), "bf16")
    with pytest.raises(AssertionError):  # a kernel that stops at 262,144 keys would be caught
        assert_close_to_fp64(out, reference(table[0, : 262144 // PAGE]), "bf16")


@pytest.mark.parametrize("width", [1, 4])
def test_early_kernels_have_the_same_bits(kernel_backend: Any, width: int) -> None:
    case = make_case([0, 31, 200], [width, 0, width], width, dim=64, heads=12, kv_heads=2)
    target = kernel_backend.caps(sms=5)
    assert (run_decode(kernel_backend, case, target, early=True) == run_decode(kernel_backend, case, target)).all()


@pytest.mark.skipif(toolchain.missing_reason() is not None, reason=str(toolchain.missing_reason()))
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("before", "active", "takes_cache"), [([3, 31], [1, 0], False), ([31], [1], False), ([31], [4], False),
                                                               ([32], [1], True), ([95, 0], [1, 3], True)])  # fmt: skip
def test_waits_for_what_is_not_settled(before: list[int], active: list[int], takes_cache: bool, early: bool) -> None:
    """Before the wait only tables are read and, of the cache, tiles of 32 keys that end before the lane's length."""
    case = make_case(before, active, 4, dim=32)
    target = EmulatorLauncher().caps(sms=3)
    expected = run_decode(EmulatorLauncher(), case, target)

    def once(*constants: str) -> Any:
        return run_decode(ProgrammaticEmulator(constants), case, target, early=early, planner=EmulatorLauncher())

    assert (once("kv") == expected).all()
    if takes_cache and early:
        with pytest.raises(EmulatorError, match="touched before grid_dependency_wait"):
            once()
    else:
        assert (once() == expected).all()


ARCHITECTURES = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"]


@pytest.mark.parametrize(("arch", "width"), [*((arch, width) for arch in ARCHITECTURES for width in (1, 8)), ("sm_90a", 4)])
def test_resources(arch: str, width: int) -> None:
    """Production shapes: no stack frame and no spill on any architecture, shared memory within its limit."""
    target = caps(arch)
    case = Case(24, 4, 256, width, np.zeros(8, np.int32), np.zeros(8, np.int32), np.zeros(8, np.int32),
                np.zeros((8, 1 << 14), np.int32), poisoned((1, 2, 4, PAGE, 256)), poisoned((8 * width, 6144)),
                poisoned((8 * width, 6144)))  # fmt: skip
    types = case.types(8 * 4 * 3 * 64)
    values, (partial, merge) = lower_decode(case.op("decode"), types, "a")
    types |= {"partial_o": values[0].type, "partial_ml": values[1].type}
    for spec in (partial_spec(partial, types, width, target), merge_spec(merge, types, width, target)):
        found = compile_source(spec.entry, render(spec.template, spec.entry, spec.params), arch).resources
        assert (found.stack, found.spill_stores, found.spill_loads, found.local) == (0, 0, 0, 0), spec.entry
        assert spec.smem + found.static_smem <= target.smem_block


def test_targets_that_cannot_run_it() -> None:
    case = make_case([0], [1], 1)
    types = case.types(2)
    values, (partial, _) = lower_decode(case.op("decode"), types, "a")
    with pytest.raises(IRError, match="the work table has 2 items"):
        partial_spec(partial, types, 1, caps("sm_90a"))
    types = case.types(16)
    many = replace(case, heads=33, kv_heads=1, dim=256).op("decode")
    with pytest.raises(IRError, match="33 query heads per KV head; at most 32"):
        partial_spec(replace(many, attrs={**partial.attrs, **many.attrs}), types, 1, caps("sm_75"))
    with pytest.raises(IRError, match="33 columns per lane"):
        partial_spec(partial, types, 33, caps("sm_90a"))
