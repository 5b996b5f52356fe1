"""What every numeric format shares: the logical tensor, the row-block loop and the format interface.

A *format* says which words a tensor holds and what they mean (tensor-formats.md); where the words lie in a file is the
business of `artifacts.layouts`. All arrays here are logical: codes [N, K], one scale per group that has a real column.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from artifacts.errors import FormatError

Array = NDArray[Any]
Fields = dict[str, Array]

# Elements that one block of a row loop touches: 1 MiB of float32, so that the passes of a block stay in the L2 cache.
BLOCK_ELEMENTS = 1 << 18
MAX_RANK = 16


@dataclass(frozen=True)
class EncodedTensor:
    """Words of one tensor in logical order.

    `format` is the canonical (container v2) name, `shape` the logical shape, `fields` the arrays of the format:
    BF16/FP32/I32 `words` [*shape] uint16/uint32/int32; grouped integers `codes` [N,K] int8 and `scales` [N,ceil(K/G)]
    uint16 binary16 words; NVFP4 `codes` [N,K] uint8 0..15, `scales` [N,K/16] uint8 E4M3FN words, `divisor` [] float32;
    FP8 rows `codes` [N,K] uint8 E4M3FN words, `scales` [N] uint16 BF16 words.
    """

    format: str
    shape: tuple[int, ...]
    fields: Mapping[str, Array]


def default_threads() -> int:
    """Threads a row loop uses when the caller names no number: the cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):  # absent on Windows and macOS
        return max(1, len(os.sched_getaffinity(0)))
    return max(1, os.cpu_count() or 1)


def rows_per_block(columns: int, unit: int = 1) -> int:
    """Rows of `columns` elements that make one block, a multiple of `unit` and at least one unit."""
    return max(1, BLOCK_ELEMENTS // max(1, columns) // unit) * unit


def for_row_blocks(
    rows: int, columns: int, work: Callable[[int, int], None], *, unit: int = 1, threads: int | None = None
) -> None:
    """Call `work(r0, r1)` for blocks that cover rows [0, rows), on `threads` threads; the first error is raised.

    The order of blocks is free, so `work` may only write rows [r0, r1) of its results. NumPy releases the GIL inside
    the array operations, which is where the time goes.
    """
    step = rows_per_block(columns, unit)
    starts = range(0, rows, step)
    count = default_threads() if threads is None else threads
    if count <= 1 or len(starts) <= 1:
        for r0 in starts:
            work(r0, min(r0 + step, rows))
        return
    with ThreadPoolExecutor(min(count, len(starts))) as pool:
        futures = [pool.submit(work, r0, min(r0 + step, rows)) for r0 in starts]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def bf16_to_f32(words: Array) -> NDArray[np.float32]:
    """Exact float32 values of BF16 words (uint16): the word is the upper half of the binary32."""
    wide = words.astype(np.uint32)
    wide <<= np.uint32(16)
    return wide.view(np.float32)


def f32_to_bf16(values: Array) -> NDArray[np.uint16]:
    """BF16 words nearest to float32 values, ties to even; infinities stay, NaN becomes a quiet NaN of its sign."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    return np.where(nan, (bits >> np.uint32(16)) | np.uint32(0x40), rounded).astype(np.uint16)


def as_source(name: str, values: Array) -> Array:
    """Check an encoder's input, a 2-D float32 or float16 array or uint16 BF16 words, and return it C-ordered."""
    if values.ndim != 2 or 0 in values.shape:
        raise FormatError(f"{name}: encoder input must be [N,K] with N,K >= 1, not {list(values.shape)}")
    if values.dtype not in (np.dtype(np.float32), np.dtype(np.float16), np.dtype(np.uint16)):
        raise FormatError(f"{name}: encoder input must be float32, float16 or uint16 BF16 words, not {values.dtype}")
    return np.ascontiguousarray(values)


def widen(values: Array) -> NDArray[np.float32]:
    """Encoder input (float32, float16, or uint16 BF16 words) as float32, exactly."""
    if values.dtype == np.uint16:
        return bf16_to_f32(values)
    return values.astype(np.float32, copy=False)


class NumericFormat(ABC):
    """One closed numeric identity.

    Attributes: `name` canonical (v2) and `v3_name` spelling; `kind` direct | grouped_int | block_float | row_float;
    `bits` ideal storage per weight, scales included; `code_bits` of one code; `group` elements along K that share a
    scale (None when there is no group inside a row).
    """

    name: str
    v3_name: str
    kind: str
    bits: float
    code_bits: int
    group: int | None = None

    def check_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape as a tuple; raises FormatError naming the rule when the format does not allow it."""
        dims = tuple(shape)
        if any(isinstance(d, bool) or not isinstance(d, int) or d < 1 for d in dims):
            raise FormatError(f"{self.name}: every dimension must be an integer >= 1, not {list(dims)}")
        self._check_dims(dims)
        return dims

    def _check_dims(self, dims: tuple[int, ...]) -> None:
        if len(dims) != 2:
            raise FormatError(f"{self.name}: shape must be [N,K], not {list(dims)}")

    @abstractmethod
    def field_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        """Name -> (shape, dtype) of the fields of a tensor of this shape."""

    @abstractmethod
    def check_words(self, fields: Mapping[str, Array]) -> None:
        """Raise PayloadError when a code, scale or divisor is not legal. Works on any block of rows."""

    @abstractmethod
    def decode_rows(self, fields: Mapping[str, Array], dtype: Any = np.float32) -> Array:
        """Values of a block of rows [r, K]; `dtype` float32 (default) or float64. I32 gives int32 whatever `dtype`."""

    @abstractmethod
    def encode(self, values: Array, *, threads: int | None = None) -> EncodedTensor:
        """Encode a whole array. The concrete class names its method and its errors."""

    def check(self, tensor: EncodedTensor) -> None:
        """Raise FormatError for fields of wrong names, shapes or types, PayloadError for an illegal word."""
        if tensor.format != self.name:
            raise FormatError(f"tensor is in format {tensor.format}, not {self.name}")
        expected = self.field_shapes(self.check_shape(tensor.shape))
        if set(tensor.fields) != set(expected):
            raise FormatError(f"{self.name}: fields must be {sorted(expected)}, not {sorted(tensor.fields)}")
        for key, (shape, dtype) in expected.items():
            array = tensor.fields[key]
            if array.shape != shape or array.dtype != dtype:
                found = f"{array.dtype}{list(array.shape)}"
                raise FormatError(f"{self.name}: {key} must be {dtype}{list(shape)}, not {found}")
        self.check_words(tensor.fields)

    def decode(self, tensor: EncodedTensor, dtype: Any = np.float32, *, threads: int | None = None) -> Array:
        """Values of the whole tensor, shape `tensor.shape`, float32 or float64 (I32: int32)."""
        if tensor.format != self.name:
            raise FormatError(f"tensor is in format {tensor.format}, not {self.name}")
        rows, columns = self.check_shape(tensor.shape)
        out = np.empty((rows, columns), dtype)

        def work(r0: int, r1: int) -> None:
            block = {k: v if v.ndim == 0 else v[r0:r1] for k, v in tensor.fields.items()}
            out[r0:r1] = self.decode_rows(block, dtype)

        for_row_blocks(rows, columns, work, threads=threads)
        return out
