"""Products of grouped integers on integer matrix units (templates/include/ninferc/linear/integers.cuh): exact sums of groups,
activations as digits, and what digits cannot hold."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiler.kernels.linear_columns import FORMATS, GROUPED, Product, Tile
from tests.emulator.harness import assert_close_to_fp64, from_bf16, to_bf16
from tests.kernels.encoded_weights import Weights, random_weights
from tests.kernels.test_linear_columns import activations, launch, reference

INTEGERS = [name for name, (kernel_name, *_) in FORMATS.items() if kernel_name in GROUPED]


@pytest.mark.parametrize("tile", [Tile(1, 1, 1, 3, True, 0), Tile(2, 2, 2, 3, False, 0)], ids=["resident", "ring"])
@pytest.mark.parametrize("format", INTEGERS)
def test_only_additions_of_groups_round(kernel_backend: Any, format: str, tile: Tile) -> None:
    """Twenty groups: an FP32 sum of so few exact terms errs by a few units, where products rounded one by one err by more."""
    rng, product = np.random.default_rng(5), Product(format, 48, 1280, 3, epilogue="store_f32")
    weights, x = random_weights(rng, format, 48, 1280), activations(rng, 3, 1280)
    assert_close_to_fp64(launch(kernel_backend, product, weights, x, tile), reference(product, weights, x), "f32", factor=8.0)


def zeroed(weights: Weights, columns: list[int]) -> Weights:
    """W8 weights with columns of zeros."""
    encoded, values = weights.encoded.copy(), weights.values.copy()
    n, k = values.shape
    encoded[: n * k].reshape(n, k)[:, columns] = 0
    values[:, columns] = 0
    return Weights(weights.format, encoded, values)


def test_an_activation_keeps_its_bits_beside_one_8192_times_as_large(kernel_backend: Any) -> None:
    """The large one meets weights of zero, so that only the small ones count."""
    rng, large = np.random.default_rng(6), [5, 70, 191]
    product, weights = Product("W8G32_F16S", 32, 256, 2, epilogue="store_f32"), random_weights(rng, "W8G32_F16S", 32, 256)
    weights, x = zeroed(weights, large), rng.uniform(1, 2, (2, 256)) * rng.choice([-1, 1], (2, 256))
    x[0, large] = 2.0**13
    x[1, large] = -(2.0**13)
    bits = to_bf16(x)
    assert_close_to_fp64(launch(kernel_backend, product, weights, bits), reference(product, weights, bits), "f32", factor=8.0)


def test_activations_of_any_size(kernel_backend: Any) -> None:
    """Groups from the largest bf16 numbers down to subnormal ones, and of zeros; every group has sums of its own size."""
    rng, product = np.random.default_rng(7), Product("Q4G64_F16S", 32, 1280, 5, epilogue="store_f32")
    weights, x = random_weights(rng, product.format, 32, 1280), rng.standard_normal((5, 1280))
    exponents = np.array([-40, -90, -120, 100, -105])
    bits = to_bf16(x * np.exp2(exponents)[:, None])
    y, wanted = launch(kernel_backend, product, weights, bits), reference(product, weights, bits)
    for column in (0, 1, 3):
        assert_close_to_fp64(y[column : column + 1], wanted[column : column + 1], "f32", factor=8.0)
    for column in (2, 4):  # a unit has a smallest size: what is lost below is nothing
        assert np.abs(y[column] - wanted[column]).max() < 2.0**-110
    mixed = to_bf16(np.repeat(x[:1], 5, 0) * np.exp2(np.repeat(np.arange(20) * 5 - 50, 64))[None])
    assert_close_to_fp64(launch(kernel_backend, product, weights, mixed), reference(product, weights, mixed), "f32", factor=8.0)
    assert not launch(kernel_backend, product, weights, np.zeros_like(bits)).any()


@pytest.mark.parametrize("tile", [Tile(1, 2, 1, 3, True, 0), Tile(1, 2, 1, 3, False, 0)], ids=["resident", "ring"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_what_is_no_number_stays_none(kernel_backend: Any, value: float, tile: Tile) -> None:
    """In one group of one column: all sums of that column are NaN, the others are as without it."""
    rng, product = np.random.default_rng(8), Product("Q5G64_F16S", 32, 384, 3, epilogue="store_f32")
    weights, x = random_weights(rng, product.format, 32, 384), activations(rng, 3, 384)
    clean = launch(kernel_backend, product, weights, x, tile)
    x[1, 200] = to_bf16(np.array([value]))[0]
    assert not np.isfinite(from_bf16(x[1, 200:201])).any()
    y = launch(kernel_backend, product, weights, x, tile)
    assert np.isnan(y[1]).all()
    assert np.array_equal(y[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("columns", [33, 40, 50])
def test_blocks_without_columns(kernel_backend: Any, columns: int) -> None:
    """Of a bucket of 64 columns the last block, or several, have none."""
    rng, product = np.random.default_rng(9), Product("Q6G64_F16S", 32, 384, columns)
    assert product.block_columns == 8
    weights, x = random_weights(rng, product.format, 32, 384), activations(rng, columns, 384)
    assert_close_to_fp64(launch(kernel_backend, product, weights, x, pad=8), reference(product, weights, x), "bf16")
