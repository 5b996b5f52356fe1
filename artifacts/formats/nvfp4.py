"""NVFP4: E2M1 codes, one E4M3FN scale per 16 columns and one FP32 divisor per matrix (tensor-formats.md section 3)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from artifacts.errors import FormatError, PayloadError

from .base import Array, EncodedTensor, Fields, NumericFormat, as_source, for_row_blocks, widen
from .minifloat import E4M3_MAX_WORD, E4M3_VALUES, e2m1_codes, e2m1_decode, e4m3_encode, round_to_grid, sign_bits

SCALE_METHODS = ("absmax", "mse")
# Largest E2M1 magnitude that the group maximum may be mapped to, tried in this order; ties keep the first.
MSE_TARGETS = (6.0, 5.5, 5.0, 4.5, 4.0)


def check_divisor(value: Any, what: str) -> np.float32:
    """The divisor as float32; raises PayloadError naming `what` unless it is finite and above zero."""
    divisor = np.float32(value)
    if not np.isfinite(divisor) or divisor <= 0:
        raise PayloadError(f"{what} must be finite and > 0, not {divisor}")
    return divisor


class Nvfp4Format(NumericFormat):
    """`w[n,k] = E2M1(code) * E4M3FN(scale[n, k//16]) / divisor`."""

    name, v3_name, kind = "NVFP4", "nvfp4", "block_float"
    bits, code_bits, group = 4.5, 4, 16

    def _check_dims(self, dims: tuple[int, ...]) -> None:
        super()._check_dims(dims)
        if dims[0] % 128 or dims[1] % 64:
            raise FormatError(f"NVFP4: shape needs N % 128 == 0 and K % 64 == 0, not {list(dims)}")

    def field_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        rows, columns = shape
        return {
            "codes": (shape, np.dtype(np.uint8)),
            "scales": ((rows, columns // 16), np.dtype(np.uint8)),
            "divisor": ((), np.dtype(np.float32)),
        }

    def check_words(self, fields: Mapping[str, Array]) -> None:
        """Codes 0..15, scale words 0x00..0x7e, divisor finite and > 0."""
        codes, scales = fields["codes"], fields["scales"]
        if codes.size and int(codes.max()) > 15:
            raise PayloadError("NVFP4: a code lies outside 0..15")
        if scales.size and int(scales.max()) > E4M3_MAX_WORD:
            raise PayloadError(f"NVFP4: scale word 0x{int(scales.max()):02x} is not in 0x00..0x7e")
        check_divisor(fields["divisor"], "NVFP4: weight divisor")

    def decode_rows(self, fields: Mapping[str, Array], dtype: Any = np.float32) -> Array:
        """The exact numerator over the divisor, rounded once to `dtype` (float64 is the oracle's variant)."""
        codes = fields["codes"]
        rows, columns = codes.shape
        out = e2m1_decode(codes).reshape(rows, columns // 16, 16)
        out *= np.take(E4M3_VALUES, fields["scales"])[:, :, None]  # exact: 2 x 4 significant bits
        values = out.reshape(rows, columns).astype(dtype, copy=False)
        with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
            values /= np.asarray(fields["divisor"]).astype(dtype)
        return values

    def divisor_for(self, amax: float) -> np.float32:
        """`f32(2688 / amax)` of a whole parent whose largest magnitude is `amax`; 1.0 when that is zero."""
        if amax == 0:
            return np.float32(1)
        with np.errstate(over="ignore"):
            divisor = np.float32(2688) / np.float32(amax)
        if not np.isfinite(divisor):
            raise FormatError(f"NVFP4: the divisor 2688/{amax:g} leaves binary32; the matrix is too small to encode")
        return np.float32(divisor)

    def encode_rows(self, values: Array, divisor: np.float32, scale: str = "absmax") -> Fields:
        """Fields of a block of rows [r,K] for a known parent divisor (artifact-container-v3.md section 5).

        `scale` is "absmax" (group maximum maps to 6) or "mse" (the best of MSE_TARGETS by squared error).
        Raises FormatError on a non-finite value.
        """
        if scale not in SCALE_METHODS:
            raise FormatError(f"NVFP4: scale method must be one of {', '.join(SCALE_METHODS)}, not {scale!r}")
        source = widen(as_source(self.name, values))
        rows, columns = source.shape
        if columns % 16:
            raise FormatError(f"NVFP4: K must be a multiple of 16, not {columns}")
        # Element of a group first: then every step below runs over long rows, and a group's sum has a fixed order.
        turned = np.ascontiguousarray(source.reshape(-1, 16).T)
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            turned *= np.float32(divisor)
            y = (turned.view(np.uint32) & np.uint32(0x7FFFFFFF)).view(np.float32)
            bmax: Array = y.view(np.uint32).max(axis=0).view(np.float32)
            if int(bmax.view(np.uint32).max()) >= 0x7F800000:
                raise FormatError("NVFP4: input is not finite, or overflows when multiplied by the divisor")
            words = self._scale_words(bmax, MSE_TARGETS[0]) if scale == "absmax" else self._search(y, bmax)
            codes = e2m1_codes(self._on_grid(y, self._scales(words)))
        codes |= sign_bits(turned, 28)
        codes[:, words == 0] = 0
        return {
            "codes": np.ascontiguousarray(codes.T).reshape(rows, columns),
            "scales": words.reshape(rows, columns // 16),
            "divisor": np.asarray(divisor, np.float32),
        }

    @staticmethod
    def _scale_words(bmax: Array, target: float) -> Array:
        words = e4m3_encode(np.minimum(bmax / np.float32(target), np.float32(448)))
        words[(words == 0) & (bmax > 0)] = 1
        return words

    @staticmethod
    def _scales(words: Array) -> Array:
        """Scale values; 1 for the word 0, whose groups hold only zeros."""
        scales: Array = E4M3_VALUES[words]
        scales[words == 0] = 1
        return scales

    @staticmethod
    def _on_grid(y: Array, scales: Array) -> Array:
        """E2M1 magnitudes nearest to y / scale."""
        quotient = y / scales
        return round_to_grid(np.minimum(quotient, np.float32(6), out=quotient), 1, 1)

    def _search(self, y: Array, bmax: Array) -> Array:
        """Scale words with the least squared error among MSE_TARGETS; y are magnitudes [16, groups]."""
        best_words: Array | None = None
        best: Array | None = None
        for target in MSE_TARGETS:
            words = self._scale_words(bmax, target)
            scales = self._scales(words)
            difference = self._on_grid(y, scales)
            difference *= scales
            difference -= y
            difference *= difference
            error = difference.sum(axis=0)
            if best is None or best_words is None:
                best_words, best = words, error
            else:
                better = error < best
                np.copyto(best_words, words, where=better)
                np.copyto(best, error, where=better)
        assert best_words is not None
        return best_words

    def encode(self, values: Array, *, threads: int | None = None, scale: str = "absmax") -> EncodedTensor:
        """Encode [N,K] float32, float16 or BF16 words (uint16); the divisor is that of the whole array."""
        source = as_source(self.name, values)
        rows, columns = shape = self.check_shape(source.shape)
        divisor = self.divisor_for(absolute_maximum(source))
        codes, scales = np.empty(shape, np.uint8), np.empty((rows, columns // 16), np.uint8)

        def work(r0: int, r1: int) -> None:
            block = self.encode_rows(source[r0:r1], divisor, scale)
            codes[r0:r1], scales[r0:r1] = block["codes"], block["scales"]

        for_row_blocks(rows, columns, work, threads=threads)
        return EncodedTensor(self.name, shape, {"codes": codes, "scales": scales, "divisor": np.asarray(divisor)})


def absolute_maximum(values: Array) -> float:
    """max |x| of an encoder input (float32, float16, BF16 words); raises FormatError on NaN or infinity."""
    if values.dtype == np.uint16:
        word = (values & np.uint16(0x7FFF)).max()
        if word >= 0x7F80:
            raise FormatError("encoder input holds a NaN or an infinity")
        return float(np.uint32(int(word) << 16).view(np.float32))
    amax = float(np.abs(values).max())
    if not np.isfinite(amax):
        raise FormatError("encoder input holds a NaN or an infinity")
    return amax


NVFP4 = Nvfp4Format()
