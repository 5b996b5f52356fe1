"""`row-split-k128-v1`: code, high-bit and scale planes of the grouped integers (storage-layouts.md section 2)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from artifacts.errors import PayloadError
from artifacts.formats import Array, Fields, GroupedIntFormat, NumericFormat

from .base import Bytes, Layout, Plane, align_up

GROUP_BYTES = 32  # of the base plane, in every one of these formats


class RowSplitLayout(Layout):
    """Rows are padded to 128 columns; each plane is row-major over (row, group)."""

    name, v3_name = "row-split-k128-v1", "row_split_k128_v1"
    formats = ("Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S")
    column_unit = 128

    def _planes(self, fmt: NumericFormat, shape: tuple[int, ...]) -> tuple[Plane, ...]:
        assert isinstance(fmt, GroupedIntFormat)
        rows, groups = shape[0], align_up(shape[1], 128) // fmt.group
        high_bytes = (fmt.code_bits - 4) * 8 if fmt.code_bits < 8 else 0
        base = Plane("base", 0, rows, groups * GROUP_BYTES, 1, fmt.group, GROUP_BYTES)
        high = Plane("high", align_up(base.end, 256), rows, groups * high_bytes, 1, fmt.group, high_bytes)
        scale = Plane("scale", align_up(high.end, 256), rows, groups * 2, 1, fmt.group, 2)
        return (base, high, scale) if high_bytes else (base, scale)

    def _pack(self, fmt: NumericFormat, shape: tuple[int, ...], fields: Mapping[str, Array]) -> list[Array]:
        assert isinstance(fmt, GroupedIntFormat)
        rows, columns = shape
        padded = align_up(columns, 128)
        codes, scales = np.ascontiguousarray(fields["codes"]), fields["scales"]
        if padded != columns:
            codes = np.pad(codes, ((0, 0), (0, padded - columns)))
            scales = np.pad(scales, ((0, 0), (0, padded // fmt.group - scales.shape[1])))
        scales = scales.astype("<u2", copy=False)
        if fmt.code_bits == 8:
            return [codes, scales]
        # Two neighbouring lanes are one little-endian 16-bit word: lane 2j in its low byte.
        pairs = codes.view("<u2")
        low = pairs & np.uint16(0x0F0F)
        low |= low >> np.uint16(4)
        base = low.astype(np.uint8)
        if fmt.code_bits == 4:
            return [base, scales]
        if fmt.code_bits == 5:
            bits = codes.view(np.uint8) >> np.uint8(4)
            bits &= np.uint8(1)
            return [base, np.packbits(bits, axis=1, bitorder="little"), scales]
        quads = codes.view("<u4") >> np.uint32(4)  # bits 4 and 5 of four lanes, one lane a byte
        quads &= np.uint32(0x03030303)
        quads |= quads >> np.uint32(6)
        quads |= quads >> np.uint32(12)
        return [base, quads.astype(np.uint8), scales]

    def _unpack(self, fmt: NumericFormat, shape: tuple[int, ...], planes: list[Bytes]) -> Fields:
        assert isinstance(fmt, GroupedIntFormat)
        rows, columns = shape
        groups = fmt.groups(columns)
        scales = planes[-1].view("<u2").reshape(rows, -1)[:, :groups].astype(np.uint16)
        base = planes[0].reshape(rows, -1)
        if fmt.code_bits == 8:
            return {"codes": base[:, :columns].view(np.int8).copy(), "scales": scales}
        pairs = base.astype("<u2")
        pairs |= pairs << np.uint16(4)
        pairs &= np.uint16(0x0F0F)
        lanes = pairs.view(np.uint8)
        if fmt.code_bits == 5:
            bits = np.unpackbits(planes[1].reshape(rows, -1), axis=1, bitorder="little")
            bits <<= np.uint8(4)
            lanes |= bits
        elif fmt.code_bits == 6:
            quads = planes[1].reshape(rows, -1).astype("<u4")
            quads |= quads << np.uint32(12)
            quads |= quads << np.uint32(6)
            quads &= np.uint32(0x03030303)
            quads <<= np.uint32(4)
            lanes |= quads.view(np.uint8)
        sign = np.uint8(1 << (fmt.code_bits - 1))
        lanes ^= sign
        lanes -= sign  # wraps: sign extension of a two's-complement field
        return {"codes": np.ascontiguousarray(lanes[:, :columns]).view(np.int8), "scales": scales}

    def _check_row_padding(self, fmt: NumericFormat, dims: tuple[int, ...], planes: list[Bytes], rows: int) -> None:
        assert isinstance(fmt, GroupedIntFormat)
        columns, padded = dims[1], align_up(dims[1], 128)
        if columns == padded:
            return
        codes = self._unpack(fmt, (rows, padded), planes)["codes"]
        if codes[:, columns:].any():
            raise PayloadError(f"layout {self.name}: a padding column past K = {columns} holds a nonzero code")
        if planes[-1].view("<u2").reshape(rows, -1)[:, fmt.groups(columns) :].any():
            raise PayloadError(f"layout {self.name}: a group past K = {columns} holds a nonzero scale")


ROW_SPLIT = RowSplitLayout()
