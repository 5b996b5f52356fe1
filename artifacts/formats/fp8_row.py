"""FP8_E4M3FN_ROW_BF16S: E4M3FN codes with one BF16 multiplier per row (tensor-formats.md section 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from artifacts.errors import FormatError, PayloadError

from .base import (
    Array,
    EncodedTensor,
    Fields,
    NumericFormat,
    as_source,
    bf16_to_f32,
    f32_to_bf16,
    for_row_blocks,
    widen,
)
from .minifloat import e4m3_decode, e4m3_encode


class Fp8RowFormat(NumericFormat):
    """`w[n,k] = float32(E4M3FN(code) * BF16(scale[n]))`."""

    name, v3_name, kind = "FP8_E4M3FN_ROW_BF16S", "fp8_e4m3fn_row_bf16", "row_float"
    bits, code_bits = 8.0, 8

    def field_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        return {"codes": (shape, np.dtype(np.uint8)), "scales": ((shape[0],), np.dtype(np.uint16))}

    def check_words(self, fields: Mapping[str, Array]) -> None:
        """No NaN code; scales non-negative and finite; a row with scale +0 holds only zeros."""
        codes, scales = fields["codes"], fields["scales"]
        if ((codes & np.uint8(0x7F)) == 0x7F).any():
            raise PayloadError(f"{self.name}: a code is the NaN word 0x7f or 0xff")
        if scales.size and int(scales.max()) >= 0x7F80:  # as uint16, negative, infinite and NaN words are >= 0x7F80
            raise PayloadError(f"{self.name}: scale word 0x{int(scales.max()):04x} is not +0 or finite positive BF16")
        zero_rows = scales == 0
        if zero_rows.any() and (codes[zero_rows] & np.uint8(0x7F)).any():
            raise PayloadError(f"{self.name}: a row with scale 0 holds a nonzero code")

    def decode_rows(self, fields: Mapping[str, Array], dtype: Any = np.float32) -> Array:
        """One correctly rounded product per element."""
        values = e4m3_decode(fields["codes"]).astype(dtype, copy=False)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            values *= bf16_to_f32(fields["scales"]).astype(dtype, copy=False)[:, None]
        return values

    def encode_rows(self, values: Array) -> Fields:
        """Fields of a block of rows [r,K] by MAXABS_BF16S_RECIP_E4M3FN_RNE_V1.

        float32 and float16 input is rounded to BF16 first (the method is defined on BF16 matrices). Raises FormatError
        on a non-finite value and where the scale or its reciprocal is not finite.
        """
        source = as_source(self.name, values)
        words = source if source.dtype == np.uint16 else f32_to_bf16(widen(source))
        magnitude = (words & np.uint16(0x7FFF)).max(axis=1)
        if int(magnitude.max()) >= 0x7F80:
            raise FormatError(f"{self.name}: input holds a NaN or an infinity")
        amax = bf16_to_f32(magnitude)
        with np.errstate(over="ignore", divide="ignore", under="ignore", invalid="ignore"):
            scales = f32_to_bf16(amax / np.float32(448))
            scales[(scales == 0) & (amax > 0)] = 1
            reciprocal = np.float32(1) / bf16_to_f32(scales)
            reciprocal[amax == 0] = 0
            y = bf16_to_f32(words)
            y *= reciprocal[:, None]
        if not np.isfinite(reciprocal).all() or not np.isfinite(y).all():
            raise FormatError(f"{self.name}: a row is too small for a BF16 scale with a finite reciprocal")
        codes = e4m3_encode(y)
        codes[amax == 0] = 0  # -0 in a zero row is code 0x00
        return {"codes": codes, "scales": scales}

    def encode(self, values: Array, *, threads: int | None = None) -> EncodedTensor:
        """Encode [N,K] BF16 words (uint16), float32 or float16 (rounded to BF16 first)."""
        source = as_source(self.name, values)
        rows, columns = source.shape
        codes, scales = np.empty((rows, columns), np.uint8), np.empty(rows, np.uint16)

        def work(r0: int, r1: int) -> None:
            block = self.encode_rows(source[r0:r1])
            codes[r0:r1], scales[r0:r1] = block["codes"], block["scales"]

        for_row_blocks(rows, columns, work, threads=threads)
        return EncodedTensor(self.name, (rows, columns), {"codes": codes, "scales": scales})


FP8_ROW = Fp8RowFormat()
