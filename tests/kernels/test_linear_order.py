"""The order in which a product adds its slices of K is one, whoever adds them: with two slices no order shows, with four
it does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiler.kernels.linear_columns import Product, Tile, slices_of
from tests.kernels.encoded_weights import random_weights
from tests.kernels.test_linear_columns import activations, launch, skip_large


@pytest.mark.parametrize("format", ["BF16", "Q4G64_F16S"])
def test_four_slices_in_registers_and_in_shared_memory(kernel_backend: Any, format: str) -> None:
    rng = np.random.default_rng(12)
    product = Product(format, 32, 2560, 3, epilogue="store_f32")
    assert slices_of(product.k) == 4
    weights, x = random_weights(rng, format, product.n, product.k), activations(rng, product.columns, product.k)
    outputs = []
    for warps_k in (1, 2, 4):  # one warp adds in registers; several meet in shared memory
        tile = Tile(1, 1, warps_k, 3, False, 0)
        skip_large(product, tile, kernel_backend.caps())
        outputs.append(launch(kernel_backend, product, weights, x, tile))
    for other in outputs[1:]:
        assert np.array_equal(outputs[0], other)
