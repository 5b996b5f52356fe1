"""E4M3FN and E2M1 words to and from float32, by bit operations (tables of tensor-formats.md section 3)."""

from __future__ import annotations

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


def round_to_grid(values: NDArray[np.float32], least_normal: float, fraction_bits: int) -> NDArray[np.float32]:
    """Round non-negative finite float32 values, in place, to a minifloat's grid: nearest, ties to the even code.

    The grid has `fraction_bits` below the leading bit and uniform steps under `least_normal`. Adding and subtracting
    1.5 * 2^23 steps of a value's binade rounds it to a whole number of steps (the sum's last place is one step).
    """
    magic = (np.maximum(values, np.float32(least_normal)).view(np.uint32) & np.uint32(0x7F800000)).view(np.float32)
    magic *= np.float32(1.5 * 2.0 ** (23 - fraction_bits))
    values += magic
    values -= magic
    return values


def magnitudes(values: Array, limit: float) -> NDArray[np.float32]:
    """|values| as a new float32 array, clamped to `limit`."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)
    out = bits.view(np.float32)
    return np.minimum(out, np.float32(limit), out=out)


def e4m3_encode(values: Array) -> NDArray[np.uint8]:
    """Nearest E4M3FN words of float32 values clamped to [-448, 448], ties to the even word, sign bit copied.

    The caller has excluded NaN.
    """
    grid = round_to_grid(magnitudes(values, 448), 2.0**-6, 3)
    # for normal values the word continues the exponent field; below 2^-6 it counts steps of 2^-9
    words = ((grid.view(np.uint32) >> np.uint32(20)) - np.uint32(120 << 3)).astype(np.uint8)
    subnormal = grid < np.float32(2.0**-6)
    if subnormal.any():
        words[subnormal] = (grid[subnormal] * np.float32(512)).astype(np.uint8)
    words |= sign_bits(values, 24)
    return words


def sign_bits(values: Array, shift: int) -> NDArray[np.uint8]:
    """The sign bit of float32 values moved down by `shift` (24: bit 7, 28: bit 3)."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32) >> np.uint32(shift)
    return bits.astype(np.uint8) & np.uint8(0x80000000 >> shift)


def e2m1_encode(values: Array) -> NDArray[np.uint8]:
    """Nearest E2M1 words of float32 values, saturating at 6, ties to the even word, sign bit copied.

    The caller has excluded NaN.
    """
    codes = e2m1_codes(round_to_grid(magnitudes(values, 6), 1, 1))
    codes |= sign_bits(values, 28)
    return codes


def e2m1_codes(grid: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Codes 0..7 of the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; doubled they are 0..4, 6, 8, 12."""
    doubled = (grid + grid).astype(np.uint8)
    codes = doubled - (doubled >= 6).view(np.uint8)
    codes -= (doubled >= 8).view(np.uint8)
    codes -= (doubled >= 12).view(np.uint8) * np.uint8(3)
    return codes
