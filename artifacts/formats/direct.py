"""Direct formats BF16, FP32 and I32 (tensor-formats.md section 1): words are kept bit for bit, never converted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from artifacts.errors import FormatError

from .base import MAX_RANK, Array, EncodedTensor, NumericFormat, bf16_to_f32


class DirectFormat(NumericFormat):
    """A format whose words are the values. Field: `words` [*shape]."""

    kind = "direct"

    def __init__(self, name: str, v3_name: str, word: type[np.generic], accepts: tuple[type[np.generic], ...]) -> None:
        self.name, self.v3_name = name, v3_name
        self.word: np.dtype[Any] = np.dtype(word)
        self.accepts = tuple(np.dtype(a) for a in accepts)
        self.code_bits = 8 * self.word.itemsize
        self.bits = float(self.code_bits)

    def _check_dims(self, dims: tuple[int, ...]) -> None:
        if len(dims) > MAX_RANK:
            raise FormatError(f"{self.name}: rank must be 0..{MAX_RANK}, not {len(dims)}")

    def field_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], np.dtype[Any]]]:
        return {"words": (shape, self.word)}

    def check_words(self, fields: Mapping[str, Array]) -> None:
        """Every word is legal: NaN payloads and signed zeros included."""

    def decode_rows(self, fields: Mapping[str, Array], dtype: Any = np.float32) -> Array:
        """BF16 and FP32 words as `dtype` (exact, except that a float32 NaN may change its payload in float64)."""
        words = fields["words"]
        if self.name == "I32":
            return words.copy()
        values = bf16_to_f32(words) if self.name == "BF16" else np.array(words, order="C").view(np.float32)
        return values if np.dtype(dtype) == np.float32 else values.astype(dtype)

    def decode(self, tensor: EncodedTensor, dtype: Any = np.float32, *, threads: int | None = None) -> Array:
        """Values of the whole tensor in `tensor.shape`: float32 or float64; int32 for I32."""
        if tensor.format != self.name:
            raise FormatError(f"tensor is in format {tensor.format}, not {self.name}")
        return self.decode_rows(tensor.fields, dtype).reshape(tensor.shape)

    def encode(self, values: Array, *, threads: int | None = None) -> EncodedTensor:
        """Take words: BF16 uint16, FP32 float32 or uint32, I32 int32. Any other dtype raises; nothing is cast."""
        if values.dtype not in self.accepts:
            names = " or ".join(str(a) for a in self.accepts)
            raise FormatError(f"{self.name}: encoder input must be {names}, not {values.dtype}")
        shape = self.check_shape(values.shape)
        words = np.array(values, order="C").view(self.word)  # a copy: the tensor must not alias the caller's buffer
        return EncodedTensor(self.name, shape, {"words": words})


BF16 = DirectFormat("BF16", "bf16", np.uint16, (np.uint16,))
FP32 = DirectFormat("FP32", "fp32", np.uint32, (np.float32, np.uint32))
I32 = DirectFormat("I32", "int32", np.int32, (np.int32,))
