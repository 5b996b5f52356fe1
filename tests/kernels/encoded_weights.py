"""Random encoded weights for kernel tests: the planes that a kernel reads and the exact values they stand for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from artifacts.formats import EncodedTensor, get_format
from artifacts.layouts import decode, layout_of
from compiler.kernels.arrange import in_units

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


def units(format: str, plane: str, stored: Array, n: int, k: int) -> Array:
    """A plane of [n, k], bytes as stored, in units (templates/include/ninferc/codec/units.cuh); ``plane`` is its name in
    kernels."""
    rows, chunks = np.arange(n).reshape(-1, 16), k // 128
    if format == "NVFP4":  # a band: four rows of each quarter of 128, one row of each quarter after the other
        rows = np.arange(n).reshape(n // 128, 4, 8, 4).transpose(0, 2, 3, 1).reshape(-1, 16)
    bands = len(rows)
    if plane == "divisor" or (plane == "scales" and format in ("BF16", "FP8_E4M3FN_ROW_BF16S")):
        return stored
    if plane == "scales" and format == "NVFP4":
        natural = stored.reshape(n // 128, k // 64, 32, 4, 4).transpose(0, 3, 2, 1, 4).reshape(n, -1)
        return natural[rows].reshape(bands, 2, 8, chunks, 2, 4).transpose(0, 3, 1, 4, 2, 5).reshape(-1)
    matrix = stored.reshape(n, -1)[rows]
    if plane == "scales":
        return matrix.reshape(bands, 16, chunks, -1).transpose(0, 2, 1, 3).reshape(-1)
    width = 64 if plane == "codes" else 16
    slabs = matrix.reshape(bands, 2, 8, chunks, -1, width).transpose(0, 3, 1, 4, 2, 5).copy()
    if plane == "codes" and format.endswith("_F16S"):
        slabs[..., [2, 3, 6, 7], :] = np.roll(slabs[..., [2, 3, 6, 7], :], 32, axis=-1)
    return slabs.reshape(-1)


def on_device(format: str, shape: tuple[int, int], encoded: Array, as_units: bool) -> Array:
    """A whole weight as kernels find it on the device."""
    out = encoded.copy()
    for plane in layout_of(format).planes(format, shape):
        part, name = out[plane.offset : plane.end], _PLANES[plane.name]
        if as_units and part.size:
            part[:] = units(format, name, part.copy(), *shape)
        if (format, name) == ("NVFP4", "codes"):
            part[:] = arranged(part.copy())
    return out


@dataclass(frozen=True)
class Weights:
    """Encoded bytes of a matrix [N, K] and the float64 ``values`` they stand for."""

    format: str
    encoded: Array
    values: Array

    def pointers(self, as_units: bool = True) -> list[Array | None]:
        """The four arguments w_codes, w_high, w_scales, w_divisor: bytes of the planes as kernels find them on the device, None
        where the format has none. ``as_units``: where the shape allows it."""
        n, k = self.values.shape
        device = on_device(self.format, (n, k), self.encoded, as_units and in_units(self.format, n, k))
        planes = {_PLANES[p.name]: device[p.offset : p.end].copy()
                  for p in layout_of(self.format).planes(self.format, (n, k)) if p.nbytes}  # fmt: skip
        return [planes.get(name) for name in ("codes", "high", "scales", "divisor")]

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
