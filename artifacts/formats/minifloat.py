"""E4M3FN and E2M1 words to and from float32, by bit operations (tables of tensor-formats.md section 3)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .base import Array

E4M3_MAX_WORD = 0x7E  # 448
E2M1_MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)


def _e4m3_table() -> NDArray[np.float32]:
    words = np.arange(256)
    e, m = (words >> 3) & 15, words & 7
    magnitude = np.where(e == 0, m * 2.0**-9, (1 + m / 8) * 2.0 ** (e - 7.0))
    magnitude[(words & 0x7F) == 0x7F] = np.nan
    return np.copysign(magnitude, np.where(words & 0x80, -1.0, 1.0)).astype(np.float32)


E4M3_VALUES = _e4m3_table()  # by word; 0x7f and 0xff are NaN
E2M1_VALUES = np.concatenate([E2M1_MAGNITUDES, -E2M1_MAGNITUDES])  # by word; index 8 is -0.0


def e4m3_decode(words: Array) -> NDArray[np.float32]:
    """Float32 values of E4M3FN words (uint8), shape kept. NaN words (0x7f, 0xff) give NaN."""
    return np.take(E4M3_VALUES, words)


def e2m1_decode(codes: Array) -> NDArray[np.float32]:
    """Float32 values of E2M1 words (uint8 0..15), shape kept; both zeros keep their sign.

    The upper half of the binary32 of code c >= 2 is 0x3f00 + 64c; code 1 is 64 less and code 0 is zero.
    """
    c = (codes & np.uint8(7)).astype(np.uint16)
    upper = c << np.uint16(6)
    upper += (c != 0).view(np.uint8) * np.uint16(0x3F00)
    upper -= (c == 1).view(np.uint8) * np.uint16(64)
    upper |= (codes & np.uint8(8)).astype(np.uint16) << np.uint16(12)
    wide = upper.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def _round_magnitude(bits: NDArray[np.uint32], drop: int, bias: int, small: float, small_code: float) -> Array:
    """Codes of non-negative float32 bit patterns, rounded to nearest with ties to the even code.

    `drop` low fraction bits go; `bias` is the code of 2^0 shifted so that normal codes continue the exponent field.
    Below `small` (the least normal value) codes are uniform steps: rint(value * small_code / small).
    """
    lower = np.uint32((1 << (drop - 1)) - 1)
    normal = bits + lower + ((bits >> np.uint32(drop)) & np.uint32(1))
    normal >>= np.uint32(drop)
    normal -= np.uint32(bias)
    values = bits.view(np.float32)
    uniform = np.rint(np.minimum(values, np.float32(small)) * np.float32(small_code / small))
    return np.where(values < np.float32(small), uniform.astype(np.uint8), normal.astype(np.uint8))


def e4m3_encode(values: Array) -> NDArray[np.uint8]:
    """Nearest E4M3FN words of float32 values clamped to [-448, 448], ties to the even word, sign bit copied.

    The caller has excluded NaN.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    magnitude = np.minimum((bits & np.uint32(0x7FFFFFFF)).view(np.float32), np.float32(448)).view(np.uint32)
    codes: Any = _round_magnitude(magnitude, 20, 120 << 3, 2.0**-6, 8)
    codes |= (bits >> np.uint32(24)).astype(np.uint8) & np.uint8(0x80)
    return np.asarray(codes)


def e2m1_encode(values: Array) -> NDArray[np.uint8]:
    """Nearest E2M1 words of float32 values, saturating at 6, ties to the even word, sign bit copied.

    The caller has excluded NaN.
    """
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    magnitude = np.minimum((bits & np.uint32(0x7FFFFFFF)).view(np.float32), np.float32(6)).view(np.uint32)
    codes: Any = _round_magnitude(magnitude, 22, 126 << 1, 1.0, 2)
    codes |= (bits >> np.uint32(28)).astype(np.uint8) & np.uint8(8)
    return np.asarray(codes)
