"""The chunked delta rule: against the recurrence in float64, across cuts, tails, pending records and extreme inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulator.harness import assert_close_to_fp64, from_bf16, to_bf16, under_schedules
from tests.gpu_launch import EmulatorLauncher
from tests.kernels.gdn_cases import Layer, Shape, Tokens, assert_state, golden_tokens, random_tokens, reference

SHAPES = [Shape(), Shape(2, 6, 16, 16), Shape(1, 2, 48, 80)]
SHAPE_NAMES = [f"h{s.key_heads}x{s.value_heads}_d{s.dk}x{s.dv}" for s in SHAPES]


def start_state(shape: Shape, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    return (0.3 * rng.normal(size=(shape.value_heads, shape.dv, shape.dk))).astype(np.float32)


def check(layer: Layer, slot: int, o: np.ndarray[Any, Any], tokens: Tokens, start: np.ndarray[Any, Any]) -> None:
    assert_close_to_fp64(to_bf16(o), reference(layer.shape, tokens, start)[0], "bf16")
    assert_state(layer.recurrent[slot], layer.shape, tokens, start)


@pytest.mark.parametrize("count", [65, 130])
def test_golden_vectors(kernel_backend: Any, count: int) -> None:
    shape, tokens, gold = golden_tokens()
    layer = Layer(shape, slots=2, records=1, backend=kernel_backend)
    layer.begin(1, gold["gdn_state_in_vk"])
    o = layer.prefill(1, tokens[:count], 192)
    check(layer, 1, o, tokens[:count], gold["gdn_state_in_vk"])
    assert np.abs(layer.recurrent[1] - gold[f"gdn_state_out_vk_{count}"]).max() < 1e-5


@pytest.mark.parametrize("count", [1, 2, 16, 37, 63, 64, 65, 128])
@pytest.mark.parametrize("shape", SHAPES, ids=SHAPE_NAMES)
def test_lengths_and_tails(kernel_backend: Any, shape: Shape, count: int) -> None:
    """From a stored state, in a permuted slot, inside wider buffers; rows behind the last are NaN and stay unread."""
    rng = np.random.default_rng(count)
    layer = Layer(shape, slots=3, records=2, backend=kernel_backend, wide=True)
    start, tokens = start_state(shape, rng), random_tokens(shape, count, rng)
    layer.begin(2, start)
    check(layer, 2, layer.prefill(2, tokens, 128), tokens, start)
    assert np.all(layer.recurrent[:2].view(np.uint32) == 0xFFFFFFFF), "another slot was written"


@pytest.mark.parametrize("cut", [16, 37, 64])
def test_cuts_change_nothing(kernel_backend: Any, cut: int) -> None:
    shape, rng = SHAPES[0], np.random.default_rng(7)
    tokens = random_tokens(shape, 150, rng)
    layer = Layer(shape, slots=1, records=1, backend=kernel_backend)
    out = [layer.prefill(0, tokens[begin : begin + cut], 64) for begin in range(0, 150, cut)]
    check(layer, 0, np.concatenate(out), tokens, np.zeros((3, 128, 128)))


@pytest.mark.parametrize("shape", SHAPES[:2], ids=SHAPE_NAMES[:2])
def test_pending_records_are_folded_first_and_decode_continues(kernel_backend: Any, shape: Shape) -> None:
    rng = np.random.default_rng(8)
    tokens = random_tokens(shape, 90, rng)
    layer = Layer(shape, slots=2, records=4, backend=kernel_backend)
    out = [layer.step([1], [tokens[:4]], 4, [3])[0][:3]]
    out.append(layer.prefill(1, tokens[3:80], 128))
    out += [layer.step([1], [tokens[t : t + 2]], 2, [2])[0] for t in range(80, 90, 2)]
    layer.commit(1)
    check(layer, 1, np.concatenate(out), tokens, np.zeros(layer.recurrent.shape[1:]))


def test_fold_has_the_bits_of_decode(kernel_backend: Any) -> None:
    """The state that prefill starts from is the one that the next decode step would have stored."""
    shape, rng = SHAPES[0], np.random.default_rng(9)
    layers = [Layer(shape, slots=1, records=6, backend=kernel_backend) for _ in range(2)]
    tokens = random_tokens(shape, 6, rng)
    # no decay and nothing written: the state after this token is the one before it
    still = Tokens(tokens.y[:1], np.zeros((1, 6), np.float32))
    for layer in layers:
        layer.step([0], [tokens], 6, [5])
    layers[0].commit(0)
    layers[1].prefill(0, still, 64)
    assert np.array_equal(layers[0].recurrent, layers[1].recurrent)


@pytest.mark.parametrize("shape", SHAPES[:1], ids=SHAPE_NAMES[:1])
def test_bits_do_not_depend_on_blocks(kernel_backend: Any, shape: Shape) -> None:
    rng = np.random.default_rng(10)
    start, tokens = start_state(shape, rng), random_tokens(shape, 100, rng)
    results = []
    for warps in (1, 2, 4):
        layer = Layer(shape, slots=1, records=1, backend=kernel_backend, overrides={"warps": warps})
        layer.begin(0, start)
        results.append((layer.prefill(0, tokens, 128), layer.recurrent))
    for o, state in results:
        assert np.array_equal(o, results[0][0]) and np.array_equal(state, results[0][1])


def test_no_columns_touch_nothing(kernel_backend: Any) -> None:
    shape, rng = SHAPES[1], np.random.default_rng(11)
    layer = Layer(shape, slots=1, records=2, backend=kernel_backend)
    layer.step([0], [random_tokens(shape, 2, rng)], 2, [2])
    before = {name: array.copy() for name, array in layer.state().items()}
    layer.prefill(0, random_tokens(shape, 0, rng), 64)
    for name, array in layer.state().items():
        assert array.tobytes() == before[name].tobytes()


EXTREMES = ["equal keys", "opposite keys", "no decay", "full decay", "large then tiny", "tiny", "huge", "zero rows",
            "zero state"]  # fmt: skip


@pytest.mark.parametrize("case", EXTREMES)
def test_extremes(kernel_backend: Any, case: str) -> None:
    """Inputs at the edges of the scaling: finite, and at most twice as wrong as the recurrence in FP32."""
    shape, rng = SHAPES[0], np.random.default_rng(12)
    tokens, start = random_tokens(shape, 130, rng), start_state(shape, rng)
    y, g, beta = from_bf16(tokens.y).copy(), tokens.gates[:, :3].copy(), tokens.gates[:, 3:].copy()
    if case in ("equal keys", "opposite keys"):
        y[:, 128:256] = y[0, 128:256]
        g[:], beta[:] = -0.001, 0.999
        if case == "opposite keys":
            y[1::2, 128:256] *= -1
    elif case == "no decay":
        g[:] = 0
    elif case == "full decay":
        g[::3] = -200.0
    elif case == "large then tiny":
        y[:70, 256:] *= 2.0**8
        y[70:, 256:] *= 2.0**-8
        g[70:] = -12
    elif case == "tiny":
        y *= 2.0**-12
        start *= np.float32(2.0**-40)
    elif case == "huge":
        y[:, 256:] *= 2.0**40
        y[:, :256] *= 2.0**15
        start *= np.float32(2.0**38)
    elif case == "zero rows":
        y[5:40] = 0
        beta[50:60] = 0
    elif case == "zero state":
        start[:] = 0
        y[:80, 256:] = 0
    tokens = Tokens(to_bf16(y), np.concatenate([g, beta], axis=1))
    exact, state = reference(shape, tokens, start)
    errors = []
    for chunked in (True, False):
        layer = Layer(shape, slots=1, records=1, backend=kernel_backend)
        layer.begin(0, start)
        o = layer.prefill(0, tokens, 192, chunked=chunked)
        assert np.isfinite(o).all() and np.isfinite(layer.recurrent).all()
        for head in range(3):
            part = slice(128 * head, 128 * head + 128)
            for rows in (slice(0, 64), slice(64, 130)):
                if np.any(exact[rows, part]):
                    assert_close_to_fp64(to_bf16(o[rows, part]), exact[rows, part], "bf16")
        errors.append(np.linalg.norm(layer.recurrent[0] - state, axis=(1, 2)))
    floor = 2.5 * 0.25 * 2.0**-24 * np.linalg.norm(state, axis=(1, 2))
    assert np.all(errors[0] <= np.maximum(2 * errors[1], floor)), f"{errors[0]} against {errors[1]}"


@pytest.mark.parametrize("decay", [0.003, 1.0, 8.0])
def test_other_decays(kernel_backend: Any, decay: float) -> None:
    """Slow and fast forgetting: within twice the error of the recurrence in FP32."""
    shape, rng = SHAPES[0], np.random.default_rng(13)
    tokens, start = random_tokens(shape, 128, rng, decay), start_state(shape, rng)
    exact, state = reference(shape, tokens, start)
    errors = []
    for chunked in (True, False):
        layer = Layer(shape, slots=1, records=1, backend=kernel_backend)
        layer.begin(0, start)
        assert_close_to_fp64(to_bf16(layer.prefill(0, tokens, 128, chunked=chunked)), exact, "bf16")
        errors.append(float(np.linalg.norm(layer.recurrent[0] - state)))
    assert errors[0] <= 2 * errors[1]


def test_no_race() -> None:
    shape, rng = SHAPES[1], np.random.default_rng(14)
    tokens = random_tokens(shape, 150, rng)

    def once(seed: int) -> list[np.ndarray[Any, Any]]:
        layer = Layer(shape, slots=1, records=2, backend=EmulatorLauncher(seed), overrides={"warps": 1})
        return [layer.prefill(0, tokens, 192), layer.recurrent]

    first = under_schedules(once)

    def shared(seed: int) -> list[np.ndarray[Any, Any]]:
        layer = Layer(Shape(1, 1, 16, 64), slots=1, records=2, backend=EmulatorLauncher(seed), overrides={"warps": 4})
        return [layer.prefill(0, random_tokens(layer.shape, 150, np.random.default_rng(15)), 192), layer.recurrent]

    assert first and under_schedules(shared)
