"""Grouped integer formats Q4/Q5/Q6 G64 and W8 G32 with binary16 scales (tensor-formats.md section 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from artifacts.errors import FormatError, PayloadError

from .base import Array, EncodedTensor, Fields, NumericFormat, as_source, for_row_blocks, widen


class GroupedIntFormat(NumericFormat):
    """Two's-complement codes of `code_bits` bits; `group` columns in a row share one binary16 multiplier."""

    kind = "grouped_int"
    group: int

    def __init__(self, name: str, v3_name: str, code_bits: int, group: int) -> None:
        self.name, self.v3_name, self.code_bits, self.group = name, v3_name, code_bits, group
        self.qmax = (1 << (code_bits - 1)) - 1
        # W8 keeps the range symmetric: its byte 0x80 is illegal.
        self.qmin = -127 if code_bits == 8 else -self.qmax - 1
        self.bits = code_bits + 16 / group

    def groups(self, columns: int) -> int:
        """Groups of a row that hold at least one of `columns` real columns."""
        return -(-columns // self.group)

    def field_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        rows, columns = shape
        return {
            "codes": (shape, np.dtype(np.int8)),
            "scales": ((rows, self.groups(columns)), np.dtype(np.uint16)),
        }

    def check_words(self, fields: Mapping[str, Array]) -> None:
        """Codes in range, scales +0 or finite positive, all codes zero where the scale is zero."""
        codes, scales = fields["codes"], fields["scales"]
        if codes.size and (int(codes.min()) < self.qmin or int(codes.max()) > self.qmax):
            raise PayloadError(f"{self.name}: a code lies outside [{self.qmin},{self.qmax}]")
        if scales.size and int(scales.max()) >= 0x7C00:  # as uint16, negative, infinite and NaN words are >= 0x7C00
            raise PayloadError(f"{self.name}: scale word 0x{int(scales.max()):04x} is not +0 or finite positive")
        zero = scales == 0
        if zero.any():
            starts = np.arange(0, codes.shape[1], self.group)
            if (np.logical_or.reduceat(codes != 0, starts, axis=1) & zero).any():
                raise PayloadError(f"{self.name}: a group with scale 0 holds a nonzero code")

    def decode_rows(self, fields: Mapping[str, Array], dtype: Any = np.float32) -> Array:
        """`scale * code`; the product is exact in float32."""
        codes, words = fields["codes"], np.ascontiguousarray(fields["scales"])
        rows, columns = codes.shape
        scales = words.view(np.float16).astype(dtype)
        out = codes.astype(dtype)
        if columns % self.group:
            out *= np.repeat(scales, self.group, axis=1)[:, :columns]
        else:
            out.reshape(rows, -1, self.group)[...] *= scales[:, :, None]
        return out

    def encode_rows(self, values: Array) -> Fields:
        """Fields of a block of rows [r,K] by MAXABS_F16_RECIP_RNE_V1; groups never cross a row, so blocks are free.

        Raises FormatError on a non-finite value or a group whose scale leaves binary16.
        """
        source = as_source(self.name, values)
        rows, columns = source.shape
        groups = self.groups(columns)
        if groups * self.group != columns:  # zero columns take part harmlessly
            source = np.pad(source, ((0, 0), (0, groups * self.group - columns)))
        source = source.reshape(rows, groups, self.group)
        codes, scales = self._encode_groups(source)
        return {"codes": codes.reshape(rows, -1)[:, :columns], "scales": scales}

    def _encode_groups(self, source: Array) -> tuple[Array, Array]:
        # |x| is compared as an unsigned word: order is that of the magnitudes and NaN sorts above infinity.
        if source.dtype == np.float16:
            source = source.astype(np.float32)
        if source.dtype == np.uint16:
            magnitude = (source & np.uint16(0x7FFF)).max(axis=-1).astype(np.uint32) << np.uint32(16)
            x = widen(source)
        else:
            magnitude = (source.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(axis=-1)
            x = source
        if int(magnitude.max()) >= 0x7F800000:
            raise FormatError(f"{self.name}: input holds a NaN or an infinity")
        amax = magnitude.view(np.float32)
        # A float32 quotient is correctly rounded, so this equals the binary64 division rounded to binary32.
        with np.errstate(over="ignore", divide="ignore", under="ignore"):
            scale = (amax / np.float32(self.qmax)).astype(np.float16)
            words = scale.view(np.uint16)
            words[(words == 0) & (amax > 0)] = 1  # the smallest subnormal rescues a scale that rounded to zero
            if int(words.max()) >= 0x7C00:
                raise FormatError(f"{self.name}: a group's scale leaves binary16 (max |x| {float(amax.max()):g})")
            reciprocal = np.float32(1) / scale.astype(np.float32)
        reciprocal[amax == 0] = 0  # also keeps the codes of -0 and padding at 0
        y = x * reciprocal[:, :, None]
        np.rint(y, out=y)
        np.clip(y, np.float32(self.qmin), np.float32(self.qmax), out=y)
        return y.astype(np.int8), words

    def encode(self, values: Array, *, threads: int | None = None) -> EncodedTensor:
        """Encode [N,K] float32, float16 or BF16 words (uint16) by MAXABS_F16_RECIP_RNE_V1."""
        source = as_source(self.name, values)
        rows, columns = source.shape
        codes = np.empty((rows, columns), np.int8)
        scales = np.empty((rows, self.groups(columns)), np.uint16)

        def work(r0: int, r1: int) -> None:
            block = self.encode_rows(source[r0:r1])
            codes[r0:r1], scales[r0:r1] = block["codes"], block["scales"]

        for_row_blocks(rows, columns, work, threads=threads)
        return EncodedTensor(self.name, (rows, columns), {"codes": codes, "scales": scales})


Q4G64 = GroupedIntFormat("Q4G64_F16S", "q4_g64_fp16", 4, 64)
Q5G64 = GroupedIntFormat("Q5G64_F16S", "q5_g64_fp16", 5, 64)
Q6G64 = GroupedIntFormat("Q6G64_F16S", "q6_g64_fp16", 6, 64)
W8G32 = GroupedIntFormat("W8G32_F16S", "q8_g32_fp16", 8, 32)
