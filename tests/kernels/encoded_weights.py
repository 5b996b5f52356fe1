"""Random encoded weights for kernel tests: the planes that a kernel reads and the exact values they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from artifacts.formats import EncodedTensor, get_format
from artifacts.layouts import decode, layout_of

Array = np.ndarray[Any, Any]
# name of a plane in the layouts -> in kernels
_PLANES = {"codes": "codes", "words": "codes", "base": "codes", "high": "high", "scales": "scales", "scale": "scales",
           "divisor": "divisor"}  # fmt: skip


# Bit of a half word in device order -> (column of the half, bit of its code); templates/include/ninferc/codec/arrange.cuh
DEVICE_BITS = {15: (0, 3), 8: (0, 2), 7: (0, 1), 6: (0, 0), 12: (1, 3), 5: (1, 2), 4: (1, 1), 3: (1, 0), 9: (2, 3), 2: (2, 2),
               1: (2, 1), 0: (2, 0), 13: (3, 3), 11: (3, 2), 10: (3, 1), 14: (3, 0)}  # fmt: skip


def arranged(codes: Array) -> Array:
    """NVFP4 codes, bytes as stored, in device order: even columns of a word in its low half, odd ones in its high half."""
    words = codes.view(np.uint32)
    out = np.zeros_like(words)
    for half in range(2):
        for bit, (pair, source) in DEVICE_BITS.items():
            out |= (words >> np.uint32(4 * (2 * pair + half) + source) & np.uint32(1)) << np.uint32(bit + 16 * half)
    return out.view(np.uint8)


@dataclass(frozen=True)
class Weights:
    """Encoded bytes of a matrix [N, K] and the float64 ``values`` they stand for."""

    format: str
    encoded: Array
    values: Array

    def plane(self, name: str) -> Array | None:
        """Bytes of the plane codes, high, scales or divisor; None where the format has none."""
        for plane in layout_of(self.format).planes(self.format, self.values.shape):
            if _PLANES[plane.name] == name and plane.nbytes:
                stored = self.encoded[plane.offset : plane.end].copy()
                return arranged(stored) if (self.format, name) == ("NVFP4", "codes") else stored
        return None

    def pointers(self) -> list[Array | None]:
        """The four arguments w_codes, w_high, w_scales, w_divisor."""
        return [self.plane(name) for name in ("codes", "high", "scales", "divisor")]

    def columns(self, begin: int, end: int) -> Weights:
        """Columns [begin, end) as a tensor of their own, cut as a rank's shard is."""
        n, k = self.values.shape
        _, part = layout_of(self.format).slice(self.format, (n, k), self.encoded, None, [(begin, end)])
        return Weights(self.format, part, self.values[:, begin:end])


def _fields(rng: np.random.Generator, format: str, n: int, k: int) -> dict[str, Array]:
    """Every code is drawn; scales vary over some binades, with zero, tiny and large ones among them."""
    if format == "BF16":
        values = (rng.standard_normal((n, k)) / 16).astype(np.float32)
        return {"words": (values.view(np.uint32) >> 16).astype(np.uint16)}
    fmt = get_format(format)
    if format == "NVFP4":
        scales = rng.integers(0x28, 0x50, (n, k // 16)).astype(np.uint8)
        odd = rng.random(scales.shape) < 0.05
        scales[odd] = rng.integers(0, 0x60, int(odd.sum()))
        return {"codes": rng.integers(0, 16, (n, k)).astype(np.uint8), "scales": scales,
                "divisor": np.array(23.7, np.float32)}  # fmt: skip
    if format == "FP8_E4M3FN_ROW_BF16S":
        codes = rng.integers(0, 256, (n, k)).astype(np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0x80
        scales = (rng.uniform(0.001, 0.004, n).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        scales[n // 2] = 0
        codes[n // 2] &= 0x80
        return {"codes": codes, "scales": scales}
    low, high = (-127, 128) if format == "W8G32_F16S" else (-(1 << (fmt.code_bits - 1)), 1 << (fmt.code_bits - 1))
    assert fmt.group is not None
    codes = rng.integers(low, high, (n, k)).astype(np.int8)
    scale_values = np.exp2(rng.uniform(-3, 1, (n, -(-k // fmt.group)))) / high
    scale_values[rng.random(scale_values.shape) < 0.05] = 2.0**-24  # the smallest subnormal
    words = scale_values.astype(np.float16).view(np.uint16)
    words[n // 3, 0] = 0
    codes[n // 3, : fmt.group] = 0
    return {"codes": codes, "scales": words}


def random_weights(rng: np.random.Generator, format: str, n: int, k: int) -> Weights:
    """Weights [n, k] with legal words only."""
    tensor = EncodedTensor(format, (n, k), _fields(rng, format, n, k))
    get_format(format).check(tensor)
    layout = layout_of(format)
    encoded = layout.pack(tensor)
    return Weights(format, encoded, decode(format, layout.name, (n, k), encoded, np.float64, threads=1))
