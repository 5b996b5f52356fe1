"""`row-scale-v1`: FP8 codes, then one BF16 multiplier per row (storage-layouts.md section 4)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from artifacts.formats import Array, Fields, NumericFormat

from .base import Bytes, Layout, Plane, align_up


class RowScaleLayout(Layout):
    """No column padding; a column cut copies every row scale."""

    name, v3_name = "row-scale-v1", "row_scale_v1"
    formats = ("FP8_E4M3FN_ROW_BF16S",)

    def _planes(self, fmt: NumericFormat, shape: tuple[int, ...]) -> tuple[Plane, ...]:
        rows, columns = shape
        codes = Plane("codes", 0, rows, columns, 1, 1, 1)
        return codes, Plane("scales", align_up(codes.end, 256), rows, 2, 1, 0, 0)

    def _pack(self, fmt: NumericFormat, shape: tuple[int, ...], fields: Mapping[str, Array]) -> list[Array]:
        return [fields["codes"], fields["scales"].astype("<u2", copy=False)]

    def _unpack(self, fmt: NumericFormat, shape: tuple[int, ...], planes: list[Bytes]) -> Fields:
        return {
            "codes": planes[0].reshape(shape).copy(),
            "scales": planes[1].view("<u2").astype(np.uint16),
        }


ROW_SCALE = RowScaleLayout()
