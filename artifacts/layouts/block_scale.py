"""`blockscale-k16-m128x4-v1`: NVFP4 codes, swizzled block scales and the divisor (storage-layouts.md section 3)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from artifacts.formats import Array, Fields, NumericFormat

from .base import Bytes, Layout, Plane, align_up


class BlockScaleLayout(Layout):
    """Scales lie in 512-byte tiles of 128 rows x 4 groups, so row cuts are multiples of 128 and column cuts of 64."""

    name, v3_name = "blockscale-k16-m128x4-v1", "block_scale_k16_m128x4_v1"
    formats = ("NVFP4",)
    row_unit, column_unit = 128, 64

    def _planes(self, fmt: NumericFormat, shape: tuple[int, ...]) -> tuple[Plane, ...]:
        rows, columns = shape
        codes = Plane("codes", 0, rows, columns // 2, 1, 2, 1)
        scales = Plane("scales", align_up(codes.end, 256), rows // 128, columns // 64 * 512, 128, 64, 512)
        return codes, scales, Plane("divisor", scales.end, 1, 4, 0, 0, 0)

    def _pack(self, fmt: NumericFormat, shape: tuple[int, ...], fields: Mapping[str, Array]) -> list[Array]:
        rows, columns = shape
        pairs = np.ascontiguousarray(fields["codes"]).view("<u2")  # even column in the low byte
        pairs = pairs | (pairs >> np.uint16(4))
        natural = fields["scales"].reshape(rows // 128, 4, 32, columns // 64, 4)
        divisor = np.atleast_1d(fields["divisor"]).astype("<f4", copy=False)
        return [pairs.astype(np.uint8), natural.transpose(0, 3, 2, 1, 4), divisor]

    def _unpack(self, fmt: NumericFormat, shape: tuple[int, ...], planes: list[Bytes]) -> Fields:
        rows, columns = shape
        pairs = planes[0].astype("<u2")
        pairs |= pairs << np.uint16(4)
        pairs &= np.uint16(0x0F0F)
        tiles = planes[1].reshape(rows // 128, columns // 64, 32, 4, 4)
        return {
            "codes": pairs.view(np.uint8).reshape(shape),
            "scales": np.ascontiguousarray(tiles.transpose(0, 3, 2, 1, 4)).reshape(rows, columns // 16),
            "divisor": planes[2].view("<f4").astype(np.float32).reshape(()),
        }


BLOCK_SCALE = BlockScaleLayout()
