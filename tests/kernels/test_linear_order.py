"""The order in which a product adds its slices of K is one, whoever adds them: with two slices no order shows, with four
it does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compiler.kernels.linear_columns import Product, Tile, fits, slices_of, spec_of
from tests.emulator.harness import assert_close_to_fp64
from tests.kernels.encoded_weights import random_weights
from tests.kernels.test_linear_columns import F32_FACTOR, activations, launch, launch_spec, reference, skip_large


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


@pytest.mark.parametrize("columns, format", [
    pytest.param(columns, format, marks=[] if fast else [pytest.mark.slow]) for columns, format, fast in (
    (1, "NVFP4", True), (3, "FP8_E4M3FN_ROW_BF16S", True), (1, "Q4G64_F16S", True),
    (3, "BF16", False), (3, "Q5G64_F16S", False),
    (1, "W8G32_F16S", False), (3, "NVFP4", False), (1, "FP8_E4M3FN_ROW_BF16S", False))])  # fmt: skip
def test_when_chunks_are_copied_changes_no_bit(kernel_backend: Any, format: str, columns: int) -> None:
    """Rings filled early and late, weights that leave L2 first, tiles claimed: on one multiprocessor
    and on more than there are tiles, so that warps have several tiles, one or none."""
    rng = np.random.default_rng(columns)
    product = Product(format, 384, 1280, columns, epilogue="store_f32")
    weights, x = random_weights(rng, format, product.n, product.k), activations(rng, columns, product.k)
    plain = Tile(1, 2, 2, 3, True, 1)
    variants = [plain, *(replace(plain, stages=stages, **knobs) for stages in (2, 4) for knobs in (
        {"primed": 1}, {"primed": stages, "stream": True}, {"claimed": True}, {"stream": True}))]  # fmt: skip
    expected = None
    for sms in (1, 30):
        target = kernel_backend.caps(sms=sms)
        for tile in variants:
            if not fits(product, tile, target):
                continue
            found = launch_spec(kernel_backend, spec_of(product, tile, target), product, weights, x, pad=8)
            if expected is None:
                expected = found
                assert_close_to_fp64(found, reference(product, weights, x), "f32", factor=F32_FACTOR)
            assert np.array_equal(found, expected), (tile, sms)
