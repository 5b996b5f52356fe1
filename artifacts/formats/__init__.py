"""The nine numeric formats of `.ninfer` artifacts: NumPy decode, encode and legality checks.

`FORMATS` maps the canonical (container v2) name to its object; `get_format` also takes the v3 spelling when asked.
Names are closed identifiers compared exactly, never parsed.
"""

from __future__ import annotations

from artifacts.errors import FormatError, quoted

from .base import Array, EncodedTensor, Fields, NumericFormat, bf16_to_f32, f32_to_bf16
from .direct import BF16, FP32, I32, DirectFormat
from .fp8_row import FP8_ROW, Fp8RowFormat
from .grouped_int import Q4G64, Q5G64, Q6G64, W8G32, GroupedIntFormat
from .nvfp4 import NVFP4, SCALE_METHODS, Nvfp4Format, absolute_maximum, check_divisor

FORMATS: dict[str, NumericFormat] = {f.name: f for f in (BF16, FP32, I32, Q4G64, Q5G64, Q6G64, W8G32, NVFP4, FP8_ROW)}
V3_FORMATS: dict[str, NumericFormat] = {f.v3_name: f for f in FORMATS.values()}


def get_format(name: str, version: int = 2) -> NumericFormat:
    """The format called `name` in container version 1, 2 (same spelling) or 3; raises FormatError when unknown."""
    table = V3_FORMATS if version == 3 else FORMATS
    try:
        return table[name]
    except KeyError:
        raise FormatError(f"unknown format {quoted(name)}; known: {', '.join(table)}") from None


__all__ = [
    "BF16", "FP32", "FP8_ROW", "FORMATS", "I32", "NVFP4", "Q4G64", "Q5G64", "Q6G64", "SCALE_METHODS", "V3_FORMATS",
    "W8G32", "Array", "DirectFormat", "EncodedTensor", "Fields", "Fp8RowFormat", "GroupedIntFormat",
    "Nvfp4Format", "NumericFormat", "absolute_maximum", "bf16_to_f32", "check_divisor", "f32_to_bf16", "get_format",
]  # fmt: skip
