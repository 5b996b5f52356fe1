"""NVFP4 codes in device order: the kernel against the bit table, and that nothing of a code is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiler.emit.render import render
from compiler.kernels.arrange import arrange_spec
from tests.kernels.encoded_weights import DEVICE_BITS, arranged


@pytest.mark.parametrize("pieces", [1, 37, 5000])
def test_arranged_in_place(kernel_backend: Any, pieces: int) -> None:
    rng = np.random.default_rng(pieces)
    codes = rng.integers(0, 256, 16 * pieces + 32).astype(np.uint8)  # what lies behind stays as it is
    words, spec = codes.copy(), arrange_spec(kernel_backend.caps(sms=2))
    kernel_backend.launch(spec, render(spec.template, spec.entry, spec.params), [words, pieces])
    assert np.array_equal(words[: 16 * pieces], arranged(codes[: 16 * pieces].copy()))
    assert np.array_equal(words[16 * pieces :], codes[16 * pieces :])


def test_every_bit_has_one_place() -> None:
    assert sorted(DEVICE_BITS) == list(range(16))
    assert sorted(DEVICE_BITS.values()) == [(pair, bit) for pair in range(4) for bit in range(4)]
