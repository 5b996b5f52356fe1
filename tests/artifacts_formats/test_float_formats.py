"""Float formats: E4M3FN and E2M1 words, FP8 rows, NVFP4; every encoder against a scalar oracle."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.errors import FormatError, PayloadError
from artifacts.formats import FP8_ROW, NVFP4, EncodedTensor, bf16_to_f32, f32_to_bf16
from artifacts.formats.minifloat import (
    E2M1_MAGNITUDES,
    E2M1_VALUES,
    E4M3_VALUES,
    e2m1_decode,
    e2m1_encode,
    e4m3_decode,
    e4m3_encode,
)
from tests.artifacts_formats.samples import random_matrix

# --- minifloats


def nearest_word(value: float, magnitudes: list[float]) -> int:
    """Index of the magnitude nearest to |value|, ties to the even index."""
    distance = [abs(Fraction(abs(value)) - Fraction(m)) for m in magnitudes]
    least = min(distance)
    best = [i for i, d in enumerate(distance) if d == least]
    return next((i for i in best if i % 2 == 0), best[0])


E4M3_MAGNITUDES = [float(v) for v in E4M3_VALUES[:0x7F]]


def test_minifloat_tables() -> None:
    assert E4M3_MAGNITUDES[0x7E] == 448 and E4M3_MAGNITUDES[1] == 2.0**-9 and E4M3_MAGNITUDES[8] == 2.0**-6
    assert E4M3_MAGNITUDES[0x38] == 1 and E4M3_MAGNITUDES[0x3F] == 1.875
    assert np.isnan(E4M3_VALUES[[0x7F, 0xFF]]).all()
    assert np.array_equal(e4m3_decode(np.arange(256, dtype=np.uint8)), E4M3_VALUES, equal_nan=True)
    decoded = e2m1_decode(np.arange(16, dtype=np.uint8))
    assert np.array_equal(decoded.view(np.uint32), E2M1_VALUES.view(np.uint32))  # the two zeros keep their signs


@pytest.mark.parametrize(
    ("encode", "magnitudes", "sign"),
    [(e4m3_encode, E4M3_MAGNITUDES, 0x80), (e2m1_encode, [float(m) for m in E2M1_MAGNITUDES], 8)],
    ids=["e4m3", "e2m1"],
)
def test_minifloat_encoders_round_to_nearest_even(encode, magnitudes, sign) -> None:  # type: ignore[no-untyped-def]
    midpoints = [(a + b) / 2 for a, b in zip(magnitudes, magnitudes[1:], strict=False)]
    around = [np.nextafter(np.float32(m), np.float32(d)) for m in midpoints + magnitudes for d in (0, 1e9)]
    values = np.array([*magnitudes, *midpoints, *around, 1e30, 1e-30, 2.0**-149, magnitudes[-1] * 1.01], np.float32)
    codes = encode(values)
    for value, code in zip(values, codes, strict=True):
        assert code == nearest_word(min(float(value), magnitudes[-1]), magnitudes), value
    assert np.array_equal(encode(-values), codes | sign)


# --- FP8 rows


def fp8_oracle(words: np.ndarray) -> tuple[int, list[int]]:
    x = bf16_to_f32(words)
    amax = np.abs(x).max()
    if amax == 0:
        return 0, [0] * len(words)
    scale = max(int(f32_to_bf16(np.array([np.float32(np.float64(amax) / 448)]))[0]), 1)
    inverse = np.float32(1 / np.float64(bf16_to_f32(np.array([scale], np.uint16))[0]))
    codes = []
    for v in x:
        y = float(np.float32(v) * inverse)
        codes.append(nearest_word(min(abs(y), 448.0), E4M3_MAGNITUDES) | (0x80 if math.copysign(1, y) < 0 else 0))
    return scale, codes


def test_fp8_encoder_equals_scalar_oracle() -> None:
    rng = np.random.default_rng(9)
    x = random_matrix(rng, 9, 70)
    x[3, 5] = -0.0
    words = f32_to_bf16(x)
    tensor = FP8_ROW.encode(words)
    FP8_ROW.check(tensor)
    for row in range(len(x)):
        scale, codes = fp8_oracle(words[row])
        assert int(tensor.fields["scales"][row]) == scale
        assert tensor.fields["codes"][row].tolist() == codes
    assert np.array_equal(FP8_ROW.encode(x).fields["codes"], tensor.fields["codes"])  # float32 goes through BF16


def test_fp8_zero_rows_and_failures() -> None:
    zero = FP8_ROW.encode(np.array([[0x8000, 0x0000]], np.uint16)).fields
    assert zero["scales"].tolist() == [0] and zero["codes"].tolist() == [[0, 0]]
    with pytest.raises(FormatError, match="NaN or an infinity"):
        FP8_ROW.encode(np.array([[np.inf, 1]], np.float32))
    with pytest.raises(FormatError, match="too small"):  # the reciprocal of a scale <= 2^-128 is infinite
        FP8_ROW.encode(np.array([[1]], np.uint16))


@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 5), columns=st.integers(1, 200), seed=st.integers(0, 2**32 - 1))
def test_fp8_error_bound(rows: int, columns: int, seed: int) -> None:
    words = f32_to_bf16(random_matrix(np.random.default_rng(seed), rows, columns))
    tensor = FP8_ROW.encode(words)
    exact, decoded = bf16_to_f32(words).astype(np.float64), FP8_ROW.decode(tensor, np.float64)
    scale = bf16_to_f32(tensor.fields["scales"]).astype(np.float64)[:, None]
    # half a unit in the last place (2^-4 relative), half a subnormal step, and the clamp of a scale rounded down
    bound = np.abs(exact) * (2.0**-4 + 2.0**-8) + scale * 2.0**-10
    assert (np.abs(decoded - exact) <= bound).all()


def test_fp8_illegal_words() -> None:
    def tensor(code: int, scale: int) -> EncodedTensor:
        return EncodedTensor(
            FP8_ROW.name, (1, 1), {"codes": np.array([[code]], np.uint8), "scales": np.array([scale], np.uint16)}
        )

    for code, scale in [(0x7F, 0x3F80), (0xFF, 0x3F80), (1, 0x8000), (1, 0xBF80), (1, 0x7F80), (1, 0x7FC0), (1, 0)]:
        with pytest.raises(PayloadError):
            FP8_ROW.check(tensor(code, scale))
    for code, scale in [(0x80, 0), (0x00, 0), (0x80, 1), (0xFE, 0x7F7F)]:
        FP8_ROW.check(tensor(code, scale))


# --- NVFP4


def nvfp4_group_oracle(x: np.ndarray, divisor: np.float32, target: float) -> tuple[int, list[int], float]:
    """Scale word, codes and squared error (of the divided values) of one group."""
    y = [np.float32(v) * divisor for v in x]
    bmax = max(abs(v) for v in y)
    word = nearest_word(min(float(np.float32(bmax / np.float32(target))), 448.0), E4M3_MAGNITUDES)
    if word == 0 and bmax > 0:
        word = 1
    scale = np.float32(E4M3_MAGNITUDES[word])
    codes, error = [], 0.0
    for v in y:
        code = 0
        if word:
            q = np.float32(v / scale)
            code = nearest_word(min(abs(float(q)), 6.0), [float(m) for m in E2M1_MAGNITUDES])
            code |= 8 if math.copysign(1, float(q)) < 0 else 0
        codes.append(code)
        error += (float(E2M1_VALUES[code]) * float(scale) - float(v)) ** 2
    return word, codes, error


@pytest.mark.parametrize("scale", ["absmax", "mse"])
def test_nvfp4_encoder_equals_scalar_oracle(scale: str) -> None:
    rng = np.random.default_rng(4)
    x = random_matrix(rng, 128, 64)
    x[2, :16] *= np.float32(2.0**-20)  # a group whose scale word is rescued from zero
    tensor = NVFP4.encode(x, scale=scale)
    NVFP4.check(tensor)
    divisor = np.float32(np.float64(2688) / np.float64(np.abs(x).max()))
    assert tensor.fields["divisor"] == divisor
    for row in range(0, 128, 3):
        for group in range(4):
            part = x[row, group * 16 : group * 16 + 16]
            word, codes, error = nvfp4_group_oracle(part, divisor, 6.0)
            if scale == "mse":
                for target in (5.5, 5.0, 4.5, 4.0):
                    other = nvfp4_group_oracle(part, divisor, target)
                    if other[2] < error * (1 - 1e-6):
                        word, codes, error = other
            assert int(tensor.fields["scales"][row, group]) == word
            assert tensor.fields["codes"][row, group * 16 : group * 16 + 16].tolist() == codes


def test_nvfp4_edges() -> None:
    zero = NVFP4.encode(np.zeros((128, 64), np.float32))
    assert zero.fields["divisor"] == 1 and not zero.fields["scales"].any() and not zero.fields["codes"].any()
    negative = np.full((128, 64), -0.0, np.float32)
    negative[0, 0] = 1
    fields = NVFP4.encode(negative).fields
    assert fields["codes"][0, 1] == 8  # sign kept in a group with a scale
    assert fields["codes"][1, 0] == 0  # scale 0: code 0
    bad = np.zeros((128, 64), np.float32)
    for value in (np.nan, np.inf, 1e-40):
        bad[5, 5] = value
        with pytest.raises(FormatError):
            NVFP4.encode(bad)
    with pytest.raises(FormatError, match="scale method"):
        NVFP4.encode(np.ones((128, 64), np.float32), scale="best")
    with pytest.raises(FormatError):
        NVFP4.encode(np.ones((100, 64), np.float32))


def test_nvfp4_row_blocks_do_not_change_the_words() -> None:
    x = f32_to_bf16(random_matrix(np.random.default_rng(8), 256, 128))
    whole = NVFP4.encode(x)
    for r0 in (0, 128):
        block = NVFP4.encode_rows(x[r0 : r0 + 128], whole.fields["divisor"][()])
        assert np.array_equal(block["codes"], whole.fields["codes"][r0 : r0 + 128])
        assert np.array_equal(block["scales"], whole.fields["scales"][r0 : r0 + 128])


def test_nvfp4_mse_is_never_worse_and_absmax_error_is_bounded() -> None:
    x = random_matrix(np.random.default_rng(3), 128, 128, spread=1.0)
    decoded = {s: NVFP4.decode(NVFP4.encode(x, scale=s), np.float64) for s in ("absmax", "mse")}
    error = {s: ((d - x) ** 2).reshape(128, 8, 16).sum(-1) for s, d in decoded.items()}
    assert (error["mse"] <= error["absmax"] * (1 + 1e-6) + 1e-20).all() and error["mse"].sum() < error["absmax"].sum()
    fields = NVFP4.encode(x).fields
    scale = E4M3_VALUES[fields["scales"]].astype(np.float64) / float(fields["divisor"])
    # half of the widest step (4 to 6) in units of the scale, plus the clamp of a scale rounded down by 2^-4
    assert (np.abs(decoded["absmax"] - x) <= np.repeat(scale, 16, 1) * (1 + 6 * 2.0**-4)).all()


def test_nvfp4_decode_rounds_once() -> None:
    rng = np.random.default_rng(6)
    fields = {
        "codes": rng.integers(0, 16, (128, 64), dtype=np.uint8),
        "scales": rng.integers(0, 0x7F, (128, 4), dtype=np.uint8),
        "divisor": np.asarray(np.float32(2688 / 0.37)),
    }
    tensor = EncodedTensor("NVFP4", (128, 64), fields)
    NVFP4.check(tensor)
    numerator = E2M1_VALUES[fields["codes"]].astype(np.float64) * np.repeat(E4M3_VALUES[fields["scales"]], 16, 1)
    exact = numerator / np.float64(fields["divisor"])
    assert np.array_equal(NVFP4.decode(tensor, np.float64), exact)
    assert np.array_equal(NVFP4.decode(tensor), exact.astype(np.float32))


def test_nvfp4_illegal_words() -> None:
    def tensor(code: int = 0, scale: int = 0x38, divisor: float = 1.0) -> EncodedTensor:
        return EncodedTensor(
            "NVFP4",
            (128, 64),
            {
                "codes": np.full((128, 64), code, np.uint8),
                "scales": np.full((128, 4), scale, np.uint8),
                "divisor": np.asarray(divisor, np.float32),
            },
        )

    NVFP4.check(tensor(15, 0x7E))
    divisors = [tensor(divisor=d) for d in (0, -1, np.inf, np.nan)]
    for bad in (tensor(16), tensor(scale=0x7F), tensor(scale=0x80), *divisors):
        with pytest.raises(PayloadError):
            NVFP4.check(bad)
