"""The delta rule as a recurrence: lazy commit, rollback, bits independent of the number of columns and blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulator.harness import assert_close_to_fp64, to_bf16, under_schedules
from tests.gpu_launch import EmulatorLauncher
from tests.kernels.gdn_cases import Layer, Shape, Tokens, assert_state, golden_tokens, random_tokens, reference

SHAPES = [Shape(), Shape(2, 6, 16, 16), Shape(2, 4, 48, 80)]
SHAPE_NAMES = [f"h{s.key_heads}x{s.value_heads}_d{s.dk}x{s.dv}" for s in SHAPES]
POISON = 0xFFFFFFFF


def run(layer: Layer, slot: int, tokens: Tokens, width: int) -> np.ndarray[Any, Any]:
    """All tokens through steps of ``width`` columns, all accepted."""
    out = []
    for begin in range(0, len(tokens), width):
        part = tokens[begin : begin + width]
        out.append(layer.step([slot], [part], width, [len(part)])[0])
    return np.concatenate(out)


@pytest.mark.parametrize("count", [65, 130])
def test_golden_vectors(kernel_backend: Any, count: int) -> None:
    shape, tokens, gold = golden_tokens()
    layer = Layer(shape, slots=2, records=8, backend=kernel_backend)
    layer.begin(1, gold["gdn_state_in_vk"])
    o = run(layer, 1, tokens[:count], 8)
    exact = reference(shape, tokens[:count], gold["gdn_state_in_vk"])[0]
    assert np.abs(exact - gold["gdn_out_130"][:count].reshape(count, -1)).max() < 1e-7
    assert_close_to_fp64(to_bf16(o), exact, "bf16")
    state = layer.commit(1)
    assert_state(state, shape, tokens[:count], gold["gdn_state_in_vk"])
    assert np.abs(state - gold[f"gdn_state_out_vk_{count}"]).max() < 1e-5


@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_NAMES)
def test_lanes_slots_and_poison(kernel_backend: Any, shape: Shape) -> None:
    """Three lanes of five columns in permuted slots: one new, one idle, one running; nothing else is read or written."""
    rng = np.random.default_rng(1)
    layer = Layer(shape, slots=4, records=6, backend=kernel_backend, wide=True)
    start = rng.normal(size=layer.recurrent.shape[1:]).astype(np.float32)
    layer.begin(0, start)
    idle = rng.normal(size=start.shape).astype(np.float32)
    layer.begin(3, idle)
    layer.pending[3] = 2  # records of an idle lane stay what they are, NaN here
    fresh, running = random_tokens(shape, 3, rng), random_tokens(shape, 8, rng)
    first = layer.step([2, 3, 0], [fresh, running[:0], running[:5]], 5, [3, 0, 4])
    second = layer.step([0, 2], [running[4:], random_tokens(shape, 1, rng)], 5, [4, 1])
    zero = np.zeros_like(start)
    exact = reference(shape, running, start)[0]
    assert_close_to_fp64(to_bf16(first[0]), reference(shape, fresh, zero)[0], "bf16")
    assert_close_to_fp64(to_bf16(np.concatenate([first[2][:4], second[0]])), exact, "bf16")
    assert_state(layer.commit(0), shape, running, start)
    assert_state(layer.recurrent[2], shape, fresh, zero)
    assert np.array_equal(layer.recurrent[3], idle) and layer.pending[3] == 2
    for array in (layer.recurrent[1:2], layer.rec_k[:, 1::2], layer.rec_u[:, 1::2], layer.rec_alpha[:, 1::2],
                  layer.rec_k[:, :, 5:], layer.rec_u[:, 2, 3:], layer.rec_alpha[:, 2, 3:]):  # fmt: skip
        assert np.all(np.ascontiguousarray(array).view(np.uint32) == POISON), "something untouchable was written"


def test_records_hold_the_step(kernel_backend: Any) -> None:
    """Records are k normalised, u and α in FP32 of the other parity, to a few units of FP32."""
    shape, rng = Shape(2, 6, 16, 16), np.random.default_rng(2)
    layer = Layer(shape, slots=1, records=4, backend=kernel_backend)
    tokens = random_tokens(shape, 3, rng)
    layer.step([0], [tokens], 4, [3])
    from compiler.ir.op import Op
    from compiler.ops.gdn import per_value_head, split_columns
    from tests.emulator.harness import from_bf16

    _, k, v = split_columns(Op("gdn", {}, {}, {}, shape.attrs), from_bf16(tokens.y).astype(np.float64))
    assert np.allclose(layer.rec_k[1, 0, :3], k, rtol=3e-7, atol=1e-8)
    g, beta = np.split(tokens.gates.astype(np.float64), 2, axis=1)
    assert np.allclose(layer.rec_alpha[1, 0, :3], np.exp(g), rtol=3e-7)
    state, wide = np.zeros((6, 16, 16)), per_value_head(k, 6)
    for t in range(3):
        alpha = np.exp(g[t])[:, None]
        u = beta[t][:, None] * (v[t] - alpha * np.einsum("hvk,hk->hv", state, wide[t]))
        state = alpha[:, :, None] * state + u[:, :, None] * wide[t][:, None]
        assert np.allclose(layer.rec_u[1, 0, t], u, rtol=1e-6, atol=1e-6)
    assert np.all(layer.rec_k[0].view(np.uint32) == POISON) and np.all(layer.rec_k[1, :, 3:].view(np.uint32) == POISON)


@pytest.mark.parametrize("shape", SHAPES[:2], ids=SHAPE_NAMES[:2])
def test_bits_do_not_depend_on_columns_or_blocks(kernel_backend: Any, shape: Shape) -> None:
    rng = np.random.default_rng(3)
    tokens = random_tokens(shape, 24, rng)
    start = rng.normal(size=(shape.value_heads, shape.dv, shape.dk)).astype(np.float32)
    outputs, states = [], []
    tiles: list[dict[str, int]] = [{}, {}, {}, {}, {"warps": 1, "rows": 1}, {"warps": 2, "rows": 1}]
    if shape.dv == 128:
        tiles.append({"warps": 4, "rows": 2})
    for width, tile in zip((1, 2, 4, 8, 3, 8, 5), tiles, strict=False):
        layer = Layer(shape, slots=1, records=8, backend=kernel_backend, overrides=tile)
        layer.begin(0, start)
        outputs.append(run(layer, 0, tokens, width))
        states.append(layer.commit(0))
    # many records folded at once, many columns at once, and the committing kernel
    layer = Layer(shape, slots=1, records=24, backend=kernel_backend)
    layer.begin(0, start)
    outputs.append(run(layer, 0, tokens, 24))
    states.append(layer.commit(0))
    layer = Layer(shape, slots=1, records=1, backend=kernel_backend)
    layer.begin(0, start)
    outputs.append(layer.prefill(0, tokens, 32, chunked=False))
    states.append(layer.recurrent[0])
    for o, state in zip(outputs, states, strict=True):
        assert np.array_equal(o, outputs[0]) and np.array_equal(state, states[0])


@pytest.mark.parametrize("accepted", [1, 2, 3])
def test_rollback_equals_the_straight_run(kernel_backend: Any, accepted: int) -> None:
    """Four columns verified, ``accepted`` of them kept, again and again: the bits of a run that saw only those."""
    shape, rng = Shape(2, 6, 16, 16), np.random.default_rng(4)
    tokens = random_tokens(shape, 12, rng)
    straight = Layer(shape, slots=1, records=4, backend=kernel_backend)
    expected = run(straight, 0, tokens, 1)
    layer = Layer(shape, slots=1, records=4, backend=kernel_backend)
    out = []
    for begin in range(0, 12, accepted):
        rejected = random_tokens(shape, 4 - accepted, rng)
        step = Tokens(np.concatenate([tokens[begin : begin + accepted].y, rejected.y]),
                      np.concatenate([tokens[begin : begin + accepted].gates, rejected.gates]))  # fmt: skip
        out.append(layer.step([0], [step], 4, [accepted])[0][:accepted])
    assert np.array_equal(np.concatenate(out), expected)
    assert np.array_equal(layer.commit(0), straight.commit(0))


def test_a_new_sequence_in_a_used_slot_starts_from_zero(kernel_backend: Any) -> None:
    shape, rng = Shape(2, 6, 16, 16), np.random.default_rng(5)
    tokens = random_tokens(shape, 6, rng)
    clean = Layer(shape, slots=1, records=2, backend=kernel_backend)
    expected = run(clean, 0, tokens, 2)
    layer = Layer(shape, slots=1, records=2, backend=kernel_backend)
    run(layer, 0, random_tokens(shape, 5, rng), 2)
    layer.length[0] = 0  # pending and parity stay those of the old sequence
    assert np.array_equal(run(layer, 0, tokens, 2), expected)
    assert np.array_equal(layer.commit(0), clean.commit(0))


def test_no_race() -> None:
    shape, rng = Shape(2, 6, 16, 16), np.random.default_rng(6)
    tokens = random_tokens(shape, 20, rng)

    def once(seed: int) -> list[np.ndarray[Any, Any]]:
        layer = Layer(shape, slots=1, records=12, backend=EmulatorLauncher(seed))
        out = [layer.step([0], [tokens[:12]], 12, [11])[0], layer.step([0], [tokens[11:]], 12, [9])[0]]
        return [*out, layer.recurrent, layer.rec_k, layer.rec_u, layer.rec_alpha]

    under_schedules(once)
