"""The fused kernel of a GDN layer's decode step: the bits of the four kernels it replaces, outputs and state alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.emulator import toolchain
from tests.emulator.harness import under_schedules
from tests.gpu_launch import EmulatorLauncher
from tests.kernels.gdn_cases import Shape
from tests.kernels.gdn_layer_cases import STATE, WEIGHTS, Columns, WholeLayer
from tests.kernels.programmatic import ProgrammaticEmulator

SHAPES = [(Shape(1, 3), 320), (Shape(2, 6, 16, 16), 72), (Shape(2, 4, 48, 80), 1032)]
SHAPE_NAMES = [f"h{s.key_heads}x{s.value_heads}_d{s.dk}x{s.dv}_k{hidden}" for s, hidden in SHAPES]
KINDS = ("nothing", "state", "hidden")


def assert_same(a: WholeLayer, b: WholeLayer) -> None:
    for name in STATE:
        assert a.state[name].tobytes() == b.state[name].tobytes(), f"{name} differs"


def without_clusters(layer: WholeLayer) -> None:
    layer.target = replace(layer.backend.caps(), clusters=False)


@pytest.mark.parametrize(("shape", "hidden"), SHAPES, ids=SHAPE_NAMES)
@pytest.mark.parametrize("clusters", [True, False], ids=["pairs", "single"])
def test_bits_of_the_single_kernels(kernel_backend: Any, shape: Shape, hidden: int, clusters: bool) -> None:
    """Lanes in permuted slots: new, idle and running ones; steps of one, several and many columns, some rejected; more
    records than are folded at once. Every byte of outputs and state is that of the single kernels."""
    single = WholeLayer(shape, hidden, slots=4, records=20, backend=kernel_backend, split=2 * shape.key_heads * shape.dk)
    whole = single.copy()
    if not clusters:
        without_clusters(whole)
    steps: list[tuple[list[int], list[int], int, list[int]]] = [
        ([2, 3, 0], [3, 0, 5], 5, [3, 0, 4]), ([0, 2], [1, 1], 1, [1, 1]), ([0, 1], [20, 2], 20, [19, 1]),
        ([0, 2], [1, 0], 1, [0, 0]), ([0, 1], [9, 8], 9, [9, 2]), ([1, 0], [4, 1], 4, [4, 1])]  # fmt: skip
    for number, (slots, counts, width, accepted) in enumerate(steps):
        lanes = [single.columns(count) for count in counts]
        expected = single.step(slots, lanes, width, accepted)
        found = whole.step(slots, lanes, width, accepted, settled=KINDS[number % 3])
        assert all(np.array_equal(a, b) for a, b in zip(expected, found, strict=True)), f"step {number}"
        assert_same(single, whole)
    assert whole.specs[0].cluster == (2 if clusters and kernel_backend.caps().clusters else 1, 1, 1)


def test_production_heads(kernel_backend: Any) -> None:
    """Heads of 128 in groups of three, hidden width 5120, one matrix for a and b: one column, then eight."""
    single = WholeLayer(Shape(1, 3), 5120, slots=2, records=8, backend=kernel_backend, fused=True, seed=1)
    whole = single.copy()
    for width, accepted, settled in ((1, 1, "hidden"), (8, 6, "hidden"), (1, 1, "state"), (1, 1, "hidden")):
        columns = single.columns(width)
        expected = single.step([1], [columns], width, [accepted])
        assert np.array_equal(whole.step([1], [columns], width, [accepted], settled)[0], expected[0])
        assert_same(single, whole)


@pytest.mark.parametrize("settled", KINDS)
def test_bits_do_not_depend_on_columns_or_lanes(kernel_backend: Any, settled: str) -> None:
    shape = Shape(2, 6, 16, 16)
    first = WholeLayer(shape, 72, slots=3, records=24, backend=kernel_backend)
    columns = first.columns(24)
    results = []
    for width in (1, 4, 8, 3, 24):
        layer, out = first.copy(), []
        for begin in range(0, 24, width):
            part = columns[begin : begin + width]
            others = [layer.columns(min(width, 2))] if width > 1 else []
            slots = [2, 0][: 1 + len(others)]
            out.append(layer.step(slots, [part, *others], width, [len(part), *(1 for _ in others)], settled)[0])
        results.append(np.concatenate(out))
    assert all(np.array_equal(result, results[0]) for result in results)


def test_a_new_sequence_in_a_used_slot_starts_from_zero(kernel_backend: Any) -> None:
    clean = WholeLayer(Shape(2, 6, 16, 16), 72, slots=1, records=4, backend=kernel_backend)
    used = clean.copy()
    columns = clean.columns(5)
    used.step([0], [used.columns(3)], 4, [3], "hidden")
    used.state["length"][0] = 0  # pending and parity stay those of the old sequence
    for begin in (0, 2, 4):
        part = columns[begin : begin + 2]
        a, b = (layer.step([0], [part], 2, [len(part)], "hidden")[0] for layer in (clean, used))
        assert np.array_equal(a, b)


@pytest.mark.skipif(toolchain.missing_reason() is not None, reason=str(toolchain.missing_reason()))
@pytest.mark.parametrize("settled", KINDS)
@pytest.mark.parametrize("width", [1, 4])
def test_waits_for_what_is_not_settled(settled: str, width: int) -> None:
    layer = WholeLayer(Shape(2, 6, 16, 16), 72, slots=2, records=4, backend=ProgrammaticEmulator(WEIGHTS))
    for count in (1, 1):
        layer.step([1, 0], [layer.columns(count), layer.columns(0)], width, [1, 0], settled)
    early = set(layer.specs[0].early)
    assert ("h" in early) == (settled == "hidden") and ("recurrent" in early) == (settled != "nothing")
    assert not early & {"x", "x2", "z", "y"}, "what the projection writes is never taken before the wait"


@pytest.mark.skipif(toolchain.missing_reason() is not None, reason=str(toolchain.missing_reason()))
@pytest.mark.parametrize("clusters", [True, False], ids=["pairs", "single"])
@pytest.mark.parametrize("settled", ["state", "hidden"])
def test_no_race(settled: str, clusters: bool) -> None:
    start = WholeLayer(Shape(2, 4, 16, 32), 136, slots=2, records=12, backend=EmulatorLauncher(), seed=3)
    columns: list[Columns] = [start.columns(count) for count in (11, 12, 1)]

    def once(seed: int) -> list[Any]:
        layer = start.copy(EmulatorLauncher(seed))
        if not clusters:
            without_clusters(layer)
        out = [layer.step([1], [columns[0]], 12, [9], settled), layer.step([1], [columns[1]], 12, [12], settled),
               layer.step([1], [columns[2]], 1, [1], settled)]  # fmt: skip
        return [y for step in out for y in step] + [layer.state[name] for name in STATE]

    under_schedules(once)
