"""Numeric formats: worked examples of the format tables, scalar oracles, error bounds, legality."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.errors import FormatError, PayloadError
from artifacts.formats import (
    FORMATS,
    V3_FORMATS,
    EncodedTensor,
    GroupedIntFormat,
    bf16_to_f32,
    f32_to_bf16,
    get_format,
)
from tests.artifacts_formats.samples import random_matrix

GROUPED = [f for f in FORMATS.values() if isinstance(f, GroupedIntFormat)]
GROUPED_IDS = [f.name for f in GROUPED]


# --- registry


def test_registry_names_and_facts() -> None:
    assert list(FORMATS) == [
        "BF16", "FP32", "I32", "Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S", "NVFP4", "FP8_E4M3FN_ROW_BF16S",
    ]  # fmt: skip
    assert set(V3_FORMATS) == {
        "bf16", "fp32", "int32", "q4_g64_fp16", "q5_g64_fp16", "q6_g64_fp16", "q8_g32_fp16", "nvfp4",
        "fp8_e4m3fn_row_bf16",
    }  # fmt: skip
    bits = [16, 32, 32, 4.25, 5.25, 6.25, 8.5, 4.5, 8]
    assert [f.bits for f in FORMATS.values()] == bits


@pytest.mark.parametrize(
    "name", ["FP16", "bf16", "Q4G32_F16S", "W8G64_F16S", "NVFP4_F32M", "q4_g64_fp16", "", "Q4G64_F16S "]
)
def test_unknown_names_are_errors(name: str) -> None:
    with pytest.raises(FormatError, match="unknown format"):
        get_format(name)


@pytest.mark.parametrize("name", ["BF16", "Q4G64_F16S"])
def test_v2_spelling_is_unknown_in_v3(name: str) -> None:
    with pytest.raises(FormatError, match="unknown format"):
        get_format(name, version=3)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Q4G64_F16S", (4,)), ("Q4G64_F16S", ()), ("W8G32_F16S", (1, 2, 3)), ("NVFP4", (128, 32)), ("NVFP4", (64, 64)),
        ("NVFP4", (128,)), ("FP8_E4M3FN_ROW_BF16S", (3,)), ("BF16", (0,)), ("BF16", (1,) * 17), ("BF16", (True, 2)),
        ("FP32", (-1, 2)), ("I32", (1.0,)),
    ],
)  # fmt: skip
def test_illegal_shapes(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(FormatError):
        FORMATS[name].check_shape(shape)


# --- direct


def test_direct_words_survive_bit_for_bit() -> None:
    words = np.array([0x0000, 0x8000, 0x0001, 0x7F80, 0xFF80, 0x7F81, 0x7FC1, 0xFFFF], np.uint16)
    tensor = FORMATS["BF16"].encode(words)
    assert np.array_equal(tensor.fields["words"], words)
    values = FORMATS["BF16"].decode(tensor)
    assert np.array_equal(values.view(np.uint32), words.astype(np.uint32) << 16)
    wide = np.array([0x7F800001, 0x80000000, 1], np.uint32)
    assert np.array_equal(FORMATS["FP32"].decode(FORMATS["FP32"].encode(wide)).view(np.uint32), wide)
    ids = np.array([[-(2**31), 2**31 - 1]], np.int32)
    assert np.array_equal(FORMATS["I32"].decode(FORMATS["I32"].encode(ids)), ids)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("BF16", np.float32), ("BF16", np.int16), ("FP32", np.float64), ("I32", np.int64), ("I32", np.uint32)],
)
def test_direct_encoders_reject_other_dtypes(name: str, dtype: type) -> None:
    with pytest.raises(FormatError, match="encoder input must be"):
        FORMATS[name].encode(np.zeros(3, dtype))


def test_bf16_rounding() -> None:
    bits = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x7F7FFFFF, 0x7F800001, 0xFFC00000, 0x00008000], np.uint32)
    want = [0x3F80, 0x3F82, 0x3F81, 0x7F80, 0x7FC0, 0xFFC0, 0x0000]
    assert f32_to_bf16(bits.view(np.float32)).tolist() == want
    words = np.arange(65536, dtype=np.uint16)
    values = bf16_to_f32(words)
    finite = np.isfinite(values)
    assert np.array_equal(f32_to_bf16(values)[finite], words[finite])


# --- grouped integers


@pytest.mark.parametrize(
    ("name", "word", "codes"),
    [
        ("Q4G64_F16S", 0x3092, [7, -2, 0, 0]),
        ("Q5G64_F16S", 0x2C44, [15, -5, 1, 0]),
        ("Q6G64_F16S", 0x2821, [31, -9, 2, 0]),
        ("W8G32_F16S", 0x2008, [127, -38, 6, 0]),
    ],
)
def test_grouped_vector(name: str, word: int, codes: list[int]) -> None:
    tensor = FORMATS[name].encode(np.array([[1.0, -0.3, 0.05, 0.0]], np.float32))
    assert tensor.fields["scales"].tolist() == [[word]]
    assert tensor.fields["codes"].tolist() == [codes]


@pytest.mark.parametrize(
    ("name", "amax", "x", "word", "code"),
    [
        ("Q4G64_F16S", 6.701416015625, 6.223876953125, 0x3BA9, 7),
        ("W8G32_F16S", 5.146728515625, 0.547119140625, 0x2930, 13),
    ],
)
def test_grouped_multiplies_by_the_rounded_reciprocal(name: str, amax: float, x: float, word: int, code: int) -> None:
    fields = FORMATS[name].encode(np.array([[amax, x]], np.float32)).fields
    assert fields["scales"].tolist() == [[word]] and fields["codes"][0, 1] == code


def grouped_oracle(fmt: GroupedIntFormat, row: np.ndarray) -> tuple[list[int], list[int]]:
    """MAXABS_F16_RECIP_RNE_V1 one scalar at a time."""
    codes: list[int] = []
    scales: list[int] = []
    for start in range(0, len(row), fmt.group):
        group = [float(v) for v in row[start : start + fmt.group]]
        amax = max(abs(v) for v in group)
        if amax == 0:
            scales.append(0)
            codes += [0] * len(group)
            continue
        scale = np.float16(np.float32(np.float64(amax) / fmt.qmax))
        if scale == 0:
            scale = np.array(1, np.uint16).view(np.float16)[()]
        scales.append(int(scale.view(np.uint16)))
        inverse = np.float32(np.float64(1) / np.float64(scale))
        for v in group:
            codes.append(min(max(round(float(np.float32(v) * inverse)), fmt.qmin), fmt.qmax))
    return codes, scales


@pytest.mark.parametrize("fmt", GROUPED, ids=GROUPED_IDS)
@pytest.mark.parametrize("columns", [1, 31, 64, 65, 200, 256])
@pytest.mark.parametrize("source", ["float32", "bf16", "float16"])
def test_grouped_encoder_equals_scalar_oracle(fmt: GroupedIntFormat, columns: int, source: str) -> None:
    rng = np.random.default_rng(columns)
    x = random_matrix(rng, 7, columns)
    x[1] *= np.float32(2.0**-24)  # scales that are subnormal or rescued from zero
    given_values = {"float32": x, "bf16": f32_to_bf16(x), "float16": x.astype(np.float16)}[source]
    exact = bf16_to_f32(given_values) if source == "bf16" else given_values.astype(np.float32)
    tensor = fmt.encode(given_values)
    fmt.check(tensor)
    for row in range(len(x)):
        codes, scales = grouped_oracle(fmt, exact[row])
        assert tensor.fields["codes"][row].tolist() == codes
        assert tensor.fields["scales"][row].tolist() == scales


@pytest.mark.parametrize("fmt", GROUPED, ids=GROUPED_IDS)
def test_grouped_edges(fmt: GroupedIntFormat) -> None:
    # the smallest subnormal scale rescues a maximum that rounds to zero; the code may then be below qmax
    tiny = fmt.encode(np.array([[2.0**-25]], np.float32)).fields
    assert tiny["scales"].tolist() == [[1]]
    assert fmt.encode(np.array([[-0.0, 0.0]], np.float32)).fields["codes"].tolist() == [[0, 0]]
    for bad in (np.nan, np.inf, -np.inf, 65520.0 * fmt.qmax):
        with pytest.raises(FormatError):
            fmt.encode(np.array([[0, bad]], np.float32))
    for word in (0x7F80, 0xFFC0):
        with pytest.raises(FormatError):
            fmt.encode(np.array([[0, word]], np.uint16))
    with pytest.raises(FormatError):
        fmt.encode(np.zeros((2, 2), np.float64))
    with pytest.raises(FormatError):
        fmt.encode(np.zeros(2, np.float32))


@pytest.mark.parametrize("fmt", GROUPED, ids=GROUPED_IDS)
@settings(max_examples=25, deadline=None)
@given(rows=st.integers(1, 5), columns=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_grouped_error_bound(fmt: GroupedIntFormat, rows: int, columns: int, seed: int) -> None:
    x = random_matrix(np.random.default_rng(seed), rows, columns)
    tensor = fmt.encode(x)
    decoded = fmt.decode(tensor)
    scales = tensor.fields["scales"].view(np.float16).astype(np.float64)
    per_column = np.repeat(scales, fmt.group, axis=1)[:, :columns]
    # half a step, plus what a scale that was rounded down to binary16 cuts from the largest codes
    bound = per_column * (0.5 + fmt.qmax * 2.0**-10) + 2.0**-25
    assert (np.abs(decoded.astype(np.float64) - x) <= bound).all()


@pytest.mark.parametrize("fmt", GROUPED, ids=GROUPED_IDS)
def test_grouped_decode_is_exact(fmt: GroupedIntFormat) -> None:
    rng = np.random.default_rng(5)
    codes = rng.integers(fmt.qmin, fmt.qmax + 1, (6, 100), dtype=np.int8)
    scales = rng.integers(1, 0x7C00, (6, fmt.groups(100)), dtype=np.uint16)
    tensor = EncodedTensor(fmt.name, (6, 100), {"codes": codes, "scales": scales})
    fmt.check(tensor)
    product = np.repeat(scales.view(np.float16).astype(np.float64), fmt.group, 1)[:, :100] * codes
    assert np.array_equal(fmt.decode(tensor).astype(np.float64), product)
    assert np.array_equal(fmt.decode(tensor, np.float64), product)


@pytest.mark.parametrize("fmt", GROUPED, ids=GROUPED_IDS)
def test_grouped_illegal_words(fmt: GroupedIntFormat) -> None:
    def tensor(code: int, scale: int) -> EncodedTensor:
        return EncodedTensor(
            fmt.name, (1, 2), {"codes": np.array([[0, code]], np.int8), "scales": np.array([[scale]], np.uint16)}
        )

    for scale in (0x8000, 0x8001, 0x7C00, 0x7C01, 0xFE00):
        with pytest.raises(PayloadError):
            fmt.check(tensor(1, scale))
    for code in (fmt.qmin - 1, fmt.qmax + 1):
        if -128 <= code <= 127:
            with pytest.raises(PayloadError):
                fmt.check(tensor(code, 0x3C00))
    with pytest.raises(PayloadError, match="scale 0"):
        fmt.check(tensor(1, 0))
    fmt.check(tensor(0, 0))
    fmt.check(tensor(fmt.qmin, 1))
    with pytest.raises(FormatError):
        unsigned = {"codes": np.zeros((1, 2), np.uint8), "scales": np.zeros((1, 1), np.uint16)}
        fmt.check(EncodedTensor(fmt.name, (1, 2), unsigned))
    with pytest.raises(FormatError):
        fmt.check(EncodedTensor(fmt.name, (1, 2), {"codes": np.zeros((1, 2), np.int8)}))
