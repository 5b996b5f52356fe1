"""The error bound and the number helpers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator import harness


@pytest.mark.parametrize("dtype", ["bf16", "f16", "f32"])
def test_bound_accepts_rounding_and_rejects_more(dtype: str) -> None:
    rng = np.random.default_rng(0)
    reference = rng.standard_normal((16, 256))
    rounded = harness.encode(reference, dtype)
    assert harness.error_ratio(rounded, reference, dtype) == pytest.approx(1.0)
    harness.assert_close_to_fp64(rounded, reference, dtype)
    unit = harness.UNIT_ROUNDOFF[dtype]
    twice = harness.encode(reference * (1 + unit * rng.uniform(-1, 1, reference.shape)), dtype)
    harness.assert_close_to_fp64(twice, reference, dtype)
    with pytest.raises(AssertionError, match="L2 error"):
        harness.assert_close_to_fp64(harness.encode(reference * (1 + 6 * unit), dtype), reference, dtype)
    one = reference.copy()
    one[3, 5] += 40 * unit
    with pytest.raises(AssertionError, match=r"worst element \(3, 5\)"):
        harness.assert_close_to_fp64(harness.encode(one, dtype), reference, dtype)
    with pytest.raises(AssertionError, match="not finite"):
        harness.assert_close_to_fp64(harness.poisoned((16, 256), dtype), reference, dtype)
    with pytest.raises(AssertionError, match="shape"):
        harness.assert_close_to_fp64(rounded[:8], reference, dtype)


def test_representable_reference_has_a_floor() -> None:
    reference = np.ones((4, 64))
    harness.assert_close_to_fp64(harness.encode(reference, "bf16"), reference, "bf16")
    harness.assert_close_to_fp64(harness.encode(np.zeros(64), "f32"), np.zeros(64), "f32")
    with pytest.raises(AssertionError):
        harness.assert_close_to_fp64(harness.encode(reference * 1.01, "bf16"), reference, "bf16")
    with pytest.raises(AssertionError):
        harness.assert_close_to_fp64(np.full(64, 1e-20, np.float32), np.zeros(64), "f32")


def test_to_bf16_rounds_float64_once() -> None:
    # 1 + 2^-8 is a tie between two bfloat16 numbers; a float64 just above it must not be decided by the tie rule.
    values = np.array([1 + 2.0**-8, 1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8 - 2.0**-40, 1 + 3 * 2.0**-8, np.nan, np.inf, -0.0])
    np.testing.assert_array_equal(harness.to_bf16(values), [0x3F80, 0x3F81, 0x3F80, 0x3F82, 0x7FFF, 0x7F80, 0x8000])
    codes = np.arange(65536, dtype=np.uint16)
    finite = ~np.isnan(harness.from_bf16(codes))
    np.testing.assert_array_equal(harness.to_bf16(harness.from_bf16(codes))[finite], codes[finite])


def test_poison_is_nan() -> None:
    assert np.isnan(harness.from_bf16(harness.poisoned(3, "bf16"))).all()
    assert np.isnan(harness.poisoned((2, 2), "f16")).all() and np.isnan(harness.poisoned(3, "f32")).all()
    assert (harness.poisoned(3, np.int32) == -1).all()


def test_schedules_must_agree() -> None:
    harness.under_schedules(lambda seed: [np.zeros(3)], range(3))
    with pytest.raises(AssertionError, match="differs between schedules 0 and 2"):
        harness.under_schedules(lambda seed: [np.full(3, seed // 2)], range(3))
