"""The bits of synthetic weights: a counter-based generator that any device can repeat.

Every plane of an encoded tensor (see Layout.planes) is filled in 64-bit little-endian words; the last word is cut off
at the end of the plane. Word i of plane p of object o (its index in the directory) under a seed is

    key  = mix(seed + GOLDEN * (1 + 8*o + p))
    word = (mix(key + GOLDEN * (i + 1)) & mask) + add            all modulo 2^64

    mix(z): z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31

(mix with the counter is splitmix64.) `mask` and `add` are constants of the plane that keep every lane legal and zero
on average: `plane_bits` returns them. Where K is not a multiple of 128, `row-split` planes are then ANDed, row by row,
with the bytes of `row_masks`, which clear the padding columns. Gaps between planes are zero, and so is everything that
is not a plane of random words: constants have mask 0, and the id map of the proposal head is arithmetic (`token_ids`).

Lanes: integer codes are odd (symmetric around zero and never the illegal W8 word 0x80), FP8 codes even (never NaN),
NVFP4 codes free; scales jitter in their low mantissa bits; direct words get a free sign, a free mantissa and two free
exponent bits. Magnitudes follow the role of the tensor, so that activations stay of order one through many layers.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from artifacts.container.schema import TensorObject
from artifacts.errors import FormatError, quoted
from artifacts.formats import Array
from artifacts.layouts import LAYOUTS, align_up

GOLDEN = 0x9E3779B97F4A7C15
FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
LIMIT = 1 << 64
Words = NDArray[np.uint64]

SPECIAL_IDS = 33
"""Added tokens at the end of the published token domain; the proposal head must be able to propose them."""


@dataclass(frozen=True)
class PlaneBits:
    """One plane: `bytes` at `offset` inside the tensor, `row_bytes` per row, and the word constants."""

    index: int
    offset: int
    bytes: int
    row_bytes: int
    mask: int
    add: int


def mix(z: int) -> int:
    """The finalizer of splitmix64 on one 64-bit integer."""
    z ^= z >> 30
    z = z * FACTORS[0] % LIMIT
    z ^= z >> 27
    z = z * FACTORS[1] % LIMIT
    return z ^ (z >> 31)


def plane_key(seed: int, object_index: int, plane_index: int) -> int:
    """The key of one plane."""
    return mix((seed + GOLDEN * (1 + 8 * object_index + plane_index)) % LIMIT)


class WordSource:
    """Makes words in memory of its own; one per thread. Runs of up to `block` words stay in the second-level cache."""

    def __init__(self, block: int = 1 << 15) -> None:
        self.block = block
        self._steps = np.arange(1, block + 1, dtype=np.uint64) * np.uint64(GOLDEN)
        self._scratch = np.empty(block, np.uint64)
        self._out = np.empty(block, np.uint64)

    def words(self, key: int, first: int, count: int, mask: int, add: int) -> Words:
        """Words first … first+count-1 of a plane; valid until the next call."""
        if count > self._out.size:
            self._out = np.empty(count, np.uint64)
        out = self._out[:count]
        for begin in range(0, count, self.block):
            self._fill(out[begin : begin + self.block], key, first + begin, mask, add)
        return out

    def _fill(self, out: Words, key: int, first: int, mask: int, add: int) -> None:
        if mask == 0:
            out[:] = add
            return
        scratch = self._scratch[: out.size]
        np.add(self._steps[: out.size], np.uint64((key + GOLDEN * first) % LIMIT), out=out)
        for shift, factor in ((30, FACTORS[0]), (27, FACTORS[1])):
            np.right_shift(out, np.uint64(shift), out=scratch)
            np.bitwise_xor(out, scratch, out=out)
            np.multiply(out, np.uint64(factor), out=out)
        np.right_shift(out, np.uint64(31), out=scratch)
        np.bitwise_xor(out, scratch, out=out)
        if mask != LIMIT - 1:
            np.bitwise_and(out, np.uint64(mask), out=out)
        if add:
            np.add(out, np.uint64(add), out=out)


def repeat(lane: int, bits: int) -> int:
    """A 64-bit word of equal lanes of `bits` bits."""
    word = 0
    for shift in range(0, 64, bits):
        word |= lane << shift
    return word


def token_ids(rows: int, domain: int) -> NDArray[np.int32]:
    """The id map of the proposal head: the lowest ids, then the last SPECIAL_IDS of the domain; unique, ascending."""
    special = min(SPECIAL_IDS, rows, domain)
    ids = np.arange(rows, dtype=np.int32)
    ids[rows - special :] = np.arange(domain - special, domain, dtype=np.int32)
    return ids


def _rms_of_codes(format: str) -> float:
    """Root mean square of the generated codes of a format."""
    if format == "NVFP4":
        return math.sqrt(sum(v * v for v in (0, 0.5, 1, 1.5, 2, 3, 4, 6)) / 8)
    if format == "FP8_E4M3FN_ROW_BF16S":
        squares = 0.0
        for code in range(0, 128, 2):
            exponent, mantissa = code >> 3, code & 7
            value = mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
            squares += value * value
        return math.sqrt(squares / 64)
    top = {"Q4G64_F16S": 8, "Q5G64_F16S": 16, "Q6G64_F16S": 32, "W8G32_F16S": 128}[format]
    return math.sqrt(sum(v * v for v in range(1, top, 2)) / (top // 2))


def target_rms(tensor: TensorObject) -> float:
    """Root mean square that the weights of a matrix should have, by its role.

    A product of K normalised inputs then has outputs of order one; what is added to the residual is smaller, so that
    the residual grows slowly; logits spread over a few units.
    """
    leaf = tensor.name.rpartition("/")[2]
    if leaf == "token_embedding":
        return 1.0
    if leaf == "position_embedding":
        return 0.1
    if leaf == "convolution":
        return 0.5
    gain = 1.0
    if leaf in ("output_head", "draft_head"):
        gain = 4.0
    elif leaf in ("output", "down", "routed_down", "shared_down", "fc2"):
        gain = 0.3
    return gain / math.sqrt(tensor.shape[-1])


def plane_bits(tensor: TensorObject) -> list[PlaneBits]:
    """The planes of a tensor with their word constants. Errors: FormatError for a format without a rule."""
    planes = LAYOUTS[tensor.layout].planes(tensor.format, tensor.shape)
    constants = _constants(tensor)
    return [
        PlaneBits(index, plane.offset, plane.nbytes, plane.row_bytes, mask, add)
        for index, (plane, (mask, add)) in enumerate(zip(planes, constants, strict=True))
    ]


FREE = LIMIT - 1


def _constants(tensor: TensorObject) -> list[tuple[int, int]]:
    format = tensor.format
    if format in ("BF16", "FP32", "I32"):
        return [_direct(tensor)]
    scale = target_rms(tensor) / _rms_of_codes(format)
    if format == "NVFP4":
        # block scales 128 … 240 (E4M3FN words 0x70 … 0x77), brought to the target by the divisor of the matrix
        scales_rms = math.sqrt(sum((128 + 16 * m) ** 2 for m in range(8)) / 8)
        divisor = int(np.float32(scales_rms / scale).view(np.uint32))
        return [(FREE, 0), (repeat(0x07, 8), repeat(0x70, 8)), (0, divisor)]
    if format == "FP8_E4M3FN_ROW_BF16S":
        word = int(np.float32(scale).view(np.uint32)) >> 16
        return [(repeat(0xFE, 8), 0), (repeat(0x0007, 16), repeat(word, 16))]
    word = int(np.float16(scale).view(np.uint16))
    scales = (repeat(0x003F, 16), repeat(word, 16))
    if format == "W8G32_F16S":
        return [(repeat(0xFE, 8), repeat(0x01, 8)), scales]
    base = (repeat(0xE, 4), repeat(0x1, 4))
    return [base, scales] if format == "Q4G64_F16S" else [base, (FREE, 0), scales]


def bf16_around_zero(rms: float) -> tuple[int, int]:
    """Free sign, mantissa and two exponent bits: magnitudes over four octaves."""
    spread = math.sqrt(sum(4.0**k for k in range(4)) / 4 * 7 / 3)
    exponent = round(127 + math.log2(rms / spread))
    return repeat(0x81FF, 16), repeat(exponent << 7, 16)


def _direct(tensor: TensorObject) -> tuple[int, int]:
    site, _, leaf = tensor.name.rpartition("/")
    if tensor.format == "I32":
        return 0, 0
    if tensor.format == "FP32":
        if leaf == "a_log":  # decay rates exp(a_log) of about 0.4 to 2.6
            return repeat(0x80FFFFFF, 32), repeat(125 << 23, 32)
        if leaf == "dt_bias":  # -1 … -4: states forget over tens of tokens
            return repeat(0x00FFFFFF, 32), repeat(0x80000000 | 127 << 23, 32)
        if leaf == "input_scale_divisor":
            return 0, repeat(int(np.float32(64.0).view(np.uint32)), 32)
        raise FormatError(f"object {quoted(tensor.name)}: no rule for synthetic FP32 values of this name")
    plain_norm = site.endswith(("/gdn", "norm1", "norm2", "merger/norm")) or site.startswith("dflash")
    if leaf.endswith("norm") or (leaf == "weight" and len(tensor.shape) == 1):
        # plain norms multiply by the weight, the others by one plus it
        return (repeat(0x000F, 16), repeat(0x3F80, 16)) if plain_norm else bf16_around_zero(0.1)
    if leaf.endswith("bias"):
        return bf16_around_zero(0.02)
    return bf16_around_zero(target_rms(tensor))


def row_masks(tensor: TensorObject) -> list[NDArray[np.uint8]] | None:
    """Per plane, the bytes that one row is ANDed with; None when no column is padding."""
    if tensor.layout != "row-split-k128-v1" or tensor.shape[1] == align_up(tensor.shape[1], 128):
        return None
    columns = tensor.shape[1]
    group = 32 if tensor.format == "W8G32_F16S" else 64
    scales = np.full((1, -(-columns // group)), 0xFFFF, np.uint16)
    fields: dict[str, Array] = {"codes": np.full((1, columns), -1, np.int8), "scales": scales}
    return [data for _, data in LAYOUTS[tensor.layout].pack_rows(tensor.format, (1, columns), 0, fields)]
