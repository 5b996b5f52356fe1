"""The storage layouts of `.ninfer` tensors, byte-exact: sizes, packing by row block, shards and decoding.

`LAYOUTS` maps the canonical (container v2) name to its object; `layout_of(format)` is the layout a format is stored in.
"""

from __future__ import annotations

from .base import Bytes, Layout, Plane, Shard, Span, align_up
from .decode import decode, decode_rows
from .raw_bytes import RAW_BYTES
from .registry import ENCODINGS, LAYOUTS, V3_ENCODINGS, V3_LAYOUTS, get_layout, layout_of

__all__ = [
    "ENCODINGS", "LAYOUTS", "RAW_BYTES", "V3_ENCODINGS", "V3_LAYOUTS", "Bytes", "Layout", "Plane",
    "Shard", "Span", "align_up", "decode", "decode_rows", "get_layout", "layout_of",
]  # fmt: skip
