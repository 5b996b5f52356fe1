"""Values straight from encoded bytes: the read path of whatever computes with an artifact's weights on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from artifacts.formats import Array, get_format
from artifacts.formats.base import for_row_blocks

from .registry import get_layout


def decode_rows(
    format: str, layout: str, shape: Sequence[int], buffer: Any, r0: int, r1: int, dtype: Any = np.float32
) -> Array:
    """Rows [r0, r1) of an encoded tensor as values [r1-r0, *shape[1:]].

    `buffer` holds the whole tensor's encoded bytes (bytes, mmap, memoryview or flat uint8 array); names are the v2
    spellings. float32 values are correctly rounded and carry no further rounding; float64 gives the exact products and,
    for NVFP4, the quotient rounded once to binary64. I32 gives int32. Raises FormatError or LayoutError.
    """
    fields = get_layout(layout).unpack_rows(format, shape, buffer, r0, r1)
    return get_format(format).decode_rows(fields, dtype)


def decode(
    format: str,
    layout: str,
    shape: Sequence[int],
    buffer: Any,
    dtype: Any = np.float32,
    *,
    threads: int | None = None,
) -> Array:
    """The whole tensor as values of `shape`, row blocks on `threads` threads (default: all cores); see decode_rows."""
    dims = tuple(shape)
    if len(dims) != 2:
        return decode_rows(format, layout, dims, buffer, 0, dims[0] if dims else 1, dtype).reshape(dims)
    if format == "I32":
        dtype = np.int32
    get_layout(layout).unpack_rows(format, dims, buffer, 0, 1)  # shape and size are checked before memory is taken
    out = np.empty(dims, dtype)

    def work(r0: int, r1: int) -> None:
        out[r0:r1] = decode_rows(format, layout, dims, buffer, r0, r1, dtype)

    for_row_blocks(dims[0], dims[1], work, unit=get_layout(layout).row_unit, threads=threads)
    return out
