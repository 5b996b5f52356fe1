"""The weight matrices of a checkpoint, whatever they are stored as, read by row blocks.

Source kinds (conversion.md sections 5, 6, 9), told apart by the tensors that are there:

| kind | tensors under the linear's name | meaning |
|---|---|---|
| plain | `weight` BF16, F16 or F32 | values |
| nvfp4 | `weight_packed` U8, `weight_scale` F8_E4M3, `weight_global_scale` F32 | compressed-tensors: divisors |
| nvfp4 | `weight` U8, `weight_scale` F8_E4M3, `weight_scale_2` F32 | ModelOpt: multipliers |
| fp8 | `weight` F8_E4M3, `weight_scale` BF16, F16 or F32, per row or one for all | multipliers |

Even columns of packed codes lie in the low nibble in both NVFP4 spellings. A ModelOpt multiplier m becomes the divisor
f32(1/m); that is exact when m is a power of two and otherwise changes values by at most one part in 2^24. An FP8 scale
that is no BF16 number is rounded to BF16 (at most one part in 2^8); the codes stay. Both are counted for the report.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from artifacts.convert.checkpoint import Checkpoint, SourceTensor
from artifacts.errors import ConfigError, FormatError, PayloadError, quoted
from artifacts.formats import FORMATS, FP8_ROW, NVFP4, Array, Fields, bf16_to_f32, check_divisor, f32_to_bf16

PLAIN_TYPES = ("BF16", "F16", "F32")
KIND_FORMATS = {"nvfp4": NVFP4.name, "fp8": FP8_ROW.name}


@dataclass
class Notes:
    """What a conversion could not carry over word for word; ends in the report."""

    inexact_divisors: list[str] = field(default_factory=list)
    rounded_scales: list[str] = field(default_factory=list)
    requantized: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Linear:
    """One matrix [rows, columns] of a checkpoint. `divisor` and `input_divisor` are those of NVFP4 (float32)."""

    name: str
    checkpoint: Checkpoint
    kind: str
    rows: int
    columns: int
    weight: SourceTensor
    scale: SourceTensor | None = None
    divisor: np.float32 | None = None
    input_divisor: np.float32 | None = None

    @property
    def format(self) -> str | None:
        """The format whose words the source already holds; None for F16 and F32."""
        return KIND_FORMATS.get(self.kind) or ("BF16" if self.weight.dtype == "BF16" else None)

    def words(self, r0: int, r1: int) -> Fields:
        """Rows [r0, r1) as fields of `format` (BF16, NVFP4 or FP8 rows)."""
        raw = self.checkpoint.rows(self.weight, r0, r1)
        if self.kind == "plain":
            return {"words": raw.reshape(r1 - r0, self.columns)}
        assert self.scale is not None
        if self.kind == "fp8":
            return {"codes": raw, "scales": self._row_scales(r0, r1)}
        pairs = raw.astype("<u2")
        pairs |= pairs << np.uint16(4)
        pairs &= np.uint16(0x0F0F)
        scales = self.checkpoint.rows(self.scale, r0, r1)
        return {"codes": pairs.view(np.uint8), "scales": scales, "divisor": np.asarray(self.divisor)}

    def _row_scales(self, r0: int, r1: int) -> Array:
        assert self.scale is not None
        if self.scale.elements == 1:
            return np.repeat(scale_words(self.checkpoint.read(self.scale).reshape(1)), r1 - r0)
        return scale_words(self.checkpoint.rows(self.scale, r0, r1).reshape(-1))

    def values(self, r0: int, r1: int) -> Array:
        """Rows [r0, r1) as an encoder takes them: BF16 words (uint16), float16 or float32."""
        if self.kind == "plain":
            return self.checkpoint.rows(self.weight, r0, r1).reshape(r1 - r0, self.columns)
        return FORMATS[KIND_FORMATS[self.kind]].decode_rows(self.words(r0, r1))


def scale_words(scales: Array) -> Array:
    """FP8 row scales (BF16 words, float16 or float32) as BF16 words, rounded to nearest."""
    return scales if scales.dtype == np.uint16 else f32_to_bf16(scales.astype(np.float32))


@dataclass(frozen=True)
class Kind:
    """How a linear is stored: `form` of a Linear, `layout` whose spelling it is (None: of several), suffix of the codes."""

    name: str
    form: str
    title: str
    layout: str | None
    codes: str = "weight"


COMPRESSED, MODELOPT = "compressed-tensors", "ModelOpt"
PLAIN = Kind("plain", "plain", "unquantized", None)
COMPRESSED_NVFP4 = Kind("compressed-nvfp4", "nvfp4", "NVFP4", COMPRESSED, "weight_packed")
MODELOPT_NVFP4 = Kind("modelopt-nvfp4", "nvfp4", "NVFP4", MODELOPT)
FP8_ROWS = Kind("fp8", "fp8", "FP8", None)
KINDS = (COMPRESSED_NVFP4, MODELOPT_NVFP4, FP8_ROWS, PLAIN)
FOREIGN = {  # parts that a linear of this kind must not have
    "compressed-nvfp4": ("weight_scale_2",),
    "modelopt-nvfp4": ("weight_global_scale", "input_global_scale"),
    "fp8": ("weight_global_scale", "input_global_scale", "weight_scale_2"),
    "plain": ("weight_scale", "weight_scale_2", "weight_global_scale", "input_global_scale"),
}
SUFFIXES = ("weight", "weight_packed", "weight_scale", "weight_global_scale", "weight_scale_2", "input_global_scale",
            "input_scale", "weight_scale_inv")  # fmt: skip
SCALAR = ((), (1,), (1, 1))
# Numbers that describe activations or caches and have no place in an artifact.
IGNORED = re.compile(r"\.(k_scale|v_scale|q_scale|prob_scale|input_scale|output_scale|input_global_scale|inv_freq)$")


def kind_of(checkpoint: Checkpoint, name: str) -> Kind:
    """The kind of linear that the tensors under `name` are, complete or not."""
    weight = checkpoint.tensors.get(name + ".weight")
    if name + ".weight_packed" in checkpoint:
        return COMPRESSED_NVFP4
    if weight is None:
        if name + ".weight_global_scale" in checkpoint:
            return COMPRESSED_NVFP4
        if name + ".weight_scale_2" in checkpoint:
            return MODELOPT_NVFP4
        return FP8_ROWS if name + ".weight_scale" in checkpoint else PLAIN
    if weight.dtype == "U8":
        return MODELOPT_NVFP4
    return FP8_ROWS if weight.dtype == "F8_E4M3" else PLAIN


def part_problems(checkpoint: Checkpoint, name: str, kind: Kind, rows: int, columns: int) -> Iterator[str]:
    """What is wrong with the tensors of a linear [rows, columns], by their headers: one line each."""
    if kind is COMPRESSED_NVFP4 and name + ".weight" in checkpoint:
        yield f"checkpoint has both {quoted(name + '.weight')} and its packed form"
    if name + ".weight_scale_inv" in checkpoint:
        yield f"{quoted(name + '.weight')}: FP8 in blocks (weight_scale_inv) is not supported; rows are"
        return
    if kind.form == "nvfp4" and columns % 16:
        yield f"{quoted(name)}: NVFP4 needs a multiple of 16 columns, not {columns}"
    for suffix in FOREIGN[kind.name]:
        if f"{name}.{suffix}" in checkpoint:
            weight = checkpoint.tensors.get(name + ".weight")
            stored = weight.dtype if weight is not None and kind is PLAIN else kind.title
            yield f"{quoted(f'{name}.{kind.codes}')}: a {stored} weight must not have {suffix}"
    for suffix, dtypes, shapes, required in _parts(kind, rows, columns):
        tensor = checkpoint.tensors.get(f"{name}.{suffix}")
        if tensor is None:
            if required:
                yield f"checkpoint has no tensor {quoted(f'{name}.{suffix}')}"
        elif tensor.dtype not in dtypes or (shapes and tensor.shape not in shapes):
            yield wrong(tensor, dtypes, shapes)
        elif kind is PLAIN and (not tensor.shape or tensor.shape[0] != rows or tensor.elements != rows * columns):
            yield wrong(tensor, (), ((rows, columns),))


Shapes = tuple[tuple[int, ...], ...]


def _parts(kind: Kind, rows: int, columns: int) -> Iterator[tuple[str, tuple[str, ...], Shapes, bool]]:
    """(suffix, types, shapes, required) of every part of a linear; no shapes: any."""
    if kind is PLAIN:
        yield "weight", PLAIN_TYPES, (), True
    elif kind is FP8_ROWS:
        yield "weight", ("F8_E4M3",), ((rows, columns),), True
        yield "weight_scale", PLAIN_TYPES, ((rows, 1), (rows,), *SCALAR), True
    else:
        modelopt = kind is MODELOPT_NVFP4
        yield kind.codes, ("U8",), ((rows, columns // 2),), True
        yield "weight_scale", ("F8_E4M3", "U8"), ((rows, columns // 16),), True
        yield "weight_scale_2" if modelopt else "weight_global_scale", ("F32",), SCALAR, True
        yield "input_scale" if modelopt else "input_global_scale", ("F32",), SCALAR, False


def wrong(tensor: SourceTensor, dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> str:
    """One line for a tensor of another type or shape."""
    wanted = " or ".join([*dtypes[:1], *dtypes[1:]])
    sizes = " or ".join(str(list(shape)) for shape in shapes)
    needed = " ".join(part for part in (wanted, sizes) if part)
    return f"tensor {quoted(tensor.name)} is {tensor.dtype} {list(tensor.shape)}; {needed} is needed"


def find_linear(checkpoint: Checkpoint, name: str, rows: int, columns: int, notes: Notes) -> Linear:
    """The linear called `name` (without `.weight`), which must be [rows, columns].

    A plain weight of more dimensions is read as [rows, columns] in C order. Scalars are read, weights are not.
    Errors: ConfigError naming the tensor; PayloadError for a divisor that is not finite and positive.
    """
    kind = kind_of(checkpoint, name)
    for problem in part_problems(checkpoint, name, kind, rows, columns):
        raise ConfigError(problem)
    weight = checkpoint.tensor(f"{name}.{kind.codes}")
    scale = None if kind is PLAIN else checkpoint.tensor(name + ".weight_scale")
    divisor = input_divisor = None
    if kind is COMPRESSED_NVFP4:
        divisor = _scalar(checkpoint, name + ".weight_global_scale")
        input_divisor = _scalar(checkpoint, name + ".input_global_scale")
    elif kind is MODELOPT_NVFP4:
        divisor = _reciprocal(_scalar(checkpoint, name + ".weight_scale_2"), name + ".weight_scale_2", notes)
        input_divisor = _reciprocal(_scalar(checkpoint, name + ".input_scale"), name + ".input_scale", notes)
    elif scale is not None and scale.dtype != "BF16":
        exact = checkpoint.read(scale).astype(np.float32).reshape(-1)
        if not np.array_equal(bf16_to_f32(scale_words(exact)), exact):
            notes.rounded_scales.append(scale.name)
    return Linear(name, checkpoint, kind.form, rows, columns, weight, scale, divisor, input_divisor)


def _scalar(checkpoint: Checkpoint, name: str) -> np.float32 | None:
    """A divisor or multiplier, None when the checkpoint has none."""
    if name not in checkpoint:
        return None
    return check_divisor(checkpoint.read(checkpoint.tensor(name)).reshape(()), quoted(name))


def _reciprocal(multiplier: np.float32 | None, name: str, notes: Notes) -> np.float32 | None:
    if multiplier is None:
        return None
    with np.errstate(over="ignore"):
        divisor = np.float32(1) / multiplier
    if float(divisor) * float(multiplier) != 1:
        notes.inexact_divisors.append(name)
    return check_divisor(divisor, f"{quoted(name)}: the divisor 1/{multiplier}")


@dataclass(frozen=True)
class Piece:
    """Rows [begin, end) of a linear."""

    linear: Linear
    begin: int
    end: int


class Stack:
    """Rows of one or more linears, one below the other: the source of an artifact object."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self.pieces = list(pieces)
        self.starts = [0]
        for piece in self.pieces:
            self.starts.append(self.starts[-1] + piece.end - piece.begin)
        self.rows, self.columns = self.starts[-1], self.pieces[0].linear.columns
        self.linears = list({p.linear.name: p.linear for p in self.pieces}.values())

    def format(self) -> str | None:
        """The one format whose words all pieces hold, or None."""
        formats = {linear.format for linear in self.linears}
        return formats.pop() if len(formats) == 1 else None

    def _spans(self, r0: int, r1: int) -> list[tuple[Linear, int, int]]:
        spans, index = [], bisect_right(self.starts, r0) - 1
        while r0 < r1:
            piece, start = self.pieces[index], self.starts[index]
            end = min(r1, self.starts[index + 1])
            spans.append((piece.linear, piece.begin + r0 - start, piece.begin + end - start))
            r0, index = end, index + 1
        return spans

    def words(self, r0: int, r1: int) -> Fields:
        """Rows [r0, r1) as fields of `format()`."""
        blocks = [linear.words(a, b) for linear, a, b in self._spans(r0, r1)]
        if len(blocks) == 1:
            return blocks[0]
        first = blocks[0]
        return {k: v if v.ndim == 0 else np.concatenate([b[k] for b in blocks]) for k, v in first.items()}

    def values(self, r0: int, r1: int) -> Array:
        """Rows [r0, r1) as an encoder takes them; float32 when the pieces differ in type."""
        blocks = [linear.values(a, b) for linear, a, b in self._spans(r0, r1)]
        if len({b.dtype for b in blocks}) > 1:
            blocks = [bf16_to_f32(b) if b.dtype == np.uint16 else b.astype(np.float32) for b in blocks]
        return blocks[0] if len(blocks) == 1 else np.concatenate(blocks)

    def common_divisor(self, attribute: str) -> np.float32 | None:
        """`divisor` or `input_divisor` shared by all linears. Errors: PayloadError when two of them differ."""
        first = self.linears[0]
        value: np.float32 | None = getattr(first, attribute)
        for other in self.linears[1:]:
            found: np.float32 | None = getattr(other, attribute)
            if found != value:
                raise PayloadError(
                    f"{quoted(first.name)} and {quoted(other.name)} are stored as one matrix and must have one "
                    f"{attribute}; they have {value} and {found}"
                )
        return value


def exact_bf16(values: Array, what: str) -> Array:
    """BF16 words of values that BF16 holds exactly. Errors: FormatError naming `what`."""
    if values.dtype == np.uint16:
        return values
    wide = values.astype(np.float32)
    words = f32_to_bf16(wide)
    if not np.array_equal(bf16_to_f32(words).view(np.uint32), wide.view(np.uint32)):
        raise FormatError(f"{quoted(what)}: {values.dtype} values that BF16 does not hold exactly")
    return words
