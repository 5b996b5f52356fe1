"""The closed set of layouts and resource encodings, by name."""

from __future__ import annotations

from artifacts.errors import LayoutError, quoted

from .base import Layout
from .block_scale import BLOCK_SCALE
from .contiguous import CONTIGUOUS
from .raw_bytes import RAW_BYTES, RawBytesEncoding
from .row_scale import ROW_SCALE
from .row_split import ROW_SPLIT

LAYOUTS: dict[str, Layout] = {x.name: x for x in (CONTIGUOUS, ROW_SPLIT, BLOCK_SCALE, ROW_SCALE)}
V3_LAYOUTS: dict[str, Layout] = {x.v3_name: x for x in LAYOUTS.values()}
ENCODINGS: dict[str, RawBytesEncoding] = {RAW_BYTES.name: RAW_BYTES}
V3_ENCODINGS: dict[str, RawBytesEncoding] = {RAW_BYTES.v3_name: RAW_BYTES}
_LAYOUT_OF_FORMAT = {f: x for x in LAYOUTS.values() for f in x.formats}


def get_layout(name: str, version: int = 2) -> Layout:
    """The layout called `name` in container version 1, 2 (same spelling) or 3; raises LayoutError when unknown."""
    table = V3_LAYOUTS if version == 3 else LAYOUTS
    try:
        return table[name]
    except KeyError:
        raise LayoutError(f"unknown layout {quoted(name)}; known: {', '.join(table)}") from None


def layout_of(format: str) -> Layout:
    """The one layout that holds a format (v2 name); raises LayoutError when the format is unknown."""
    try:
        return _LAYOUT_OF_FORMAT[format]
    except KeyError:
        raise LayoutError(f"unknown format {quoted(format)}; known: {', '.join(_LAYOUT_OF_FORMAT)}") from None
