"""`contiguous-le-v1`: little-endian words in C order (storage-layouts.md section 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping

from artifacts.formats import Array, Fields, NumericFormat

from .base import Bytes, Layout, Plane


class ContiguousLayout(Layout):
    """No header, no padding. Rows are the first axis; [N,K] tensors may also be cut by several column ranges."""

    name, v3_name = "contiguous-le-v1", "contiguous_le_v1"
    formats = ("BF16", "FP32", "I32")
    several_column_ranges = True

    def _planes(self, fmt: NumericFormat, shape: tuple[int, ...]) -> tuple[Plane, ...]:
        word = fmt.code_bits // 8
        rows, inner = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        return (Plane("words", 0, rows, inner * word, 1, 1, word),)

    def _pack(self, fmt: NumericFormat, shape: tuple[int, ...], fields: Mapping[str, Array]) -> list[Array]:
        words = fields["words"]
        return [words.astype(words.dtype.newbyteorder("<"), copy=False)]

    def _unpack(self, fmt: NumericFormat, shape: tuple[int, ...], planes: list[Bytes]) -> Fields:
        word = fmt.field_shapes(shape)["words"][1]
        return {"words": planes[0].view(word.newbyteorder("<")).astype(word).reshape(shape)}


CONTIGUOUS = ContiguousLayout()
