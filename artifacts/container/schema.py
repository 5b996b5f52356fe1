"""The records that every container version shares: objects, their placement, names of formats and layouts.

In memory, format and layout names are always the canonical (version 2) spelling; version 3 files use another one
(artifact-container-v3.md section 5), translated on reading and writing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from artifacts.container.json_reader import is_unicode
from artifacts.errors import DirectoryError, FormatError, LayoutError, quoted
from artifacts.formats import FORMATS
from artifacts.layouts import ENCODINGS, LAYOUTS, align_up, layout_of

METADATA_ALIGNMENT = 4096
TENSOR_ALIGNMENT = 256
RESOURCE_ENCODING = "raw-bytes-v1"
MAX_RANK = 16
U64_LIMIT = 1 << 64

V3_NAMES = {format.name: format.v3_name for format in FORMATS.values()}
V3_NAMES |= {layout.name: layout.v3_name for layout in LAYOUTS.values()}
V3_NAMES |= {encoding.name: encoding.v3_name for encoding in ENCODINGS.values()}
CANONICAL_NAMES = {v3: canonical for canonical, v3 in V3_NAMES.items()}

V1_FORMATS = frozenset(("BF16", "FP32", "I32", "Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S"))


@dataclass(frozen=True, slots=True)
class TensorObject:
    """One stored tensor. `offset` (payload-relative) and `bytes` are the encoded span; `shape` is logical, C order.

    `problem` is None, or why the object cannot be used: version 3 files may name formats this program does not know,
    and that is an error only when the object is asked for.
    """

    name: str
    shape: tuple[int, ...]
    format: str
    layout: str
    offset: int
    bytes: int
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ResourceObject:
    """One byte string. `problem` as for tensors."""

    name: str
    offset: int
    bytes: int
    encoding: str = RESOURCE_ENCODING
    problem: str | None = None


StoredObject = TensorObject | ResourceObject


@dataclass(frozen=True)
class ObjectPlan:
    """An object before it has an offset: a tensor (`shape` and `format` set) or a resource (`format` None).

    `bytes` is computed for tensors and must be given for resources; a resource plan with 0 bytes is a placeholder
    whose length the caller fills in.
    """

    name: str
    shape: tuple[int, ...] = ()
    format: str | None = None
    bytes: int = 0
    layout: str = field(init=False, default=RESOURCE_ENCODING)

    def __post_init__(self) -> None:
        if self.format is not None:
            if self.format not in FORMATS:
                raise FormatError(f"object {quoted(self.name)}: unknown format {quoted(self.format)}")
            object.__setattr__(self, "layout", layout_of(self.format).name)
            object.__setattr__(self, "bytes", encoded_size(self.name, self.format, self.layout, self.shape))


def encoded_size(name: str, format: str, layout: str, shape: Sequence[int]) -> int:
    """Stored bytes of a tensor (storage-layouts.md). Errors: FormatError, LayoutError naming the object."""
    if format not in FORMATS:
        raise FormatError(f"object {quoted(name)}: unknown format {quoted(format)}; known: {', '.join(FORMATS)}")
    if layout not in LAYOUTS:
        raise LayoutError(f"object {quoted(name)}: unknown layout {quoted(layout)}; known: {', '.join(LAYOUTS)}")
    try:
        return _encoded_size(format, layout, tuple(shape))
    except (FormatError, LayoutError) as error:
        raise type(error)(f"object {quoted(name)}: {error}") from None


@lru_cache(4096)  # a directory has thousands of objects of a few dozen shapes
def _encoded_size(format: str, layout: str, shape: tuple[int, ...]) -> int:
    return LAYOUTS[layout].encoded_size(format, shape)


def check_storage(tensor: TensorObject) -> None:
    """Format and layout known, pair and shape accepted, size as encoded. Errors: FormatError, LayoutError."""
    size = encoded_size(tensor.name, tensor.format, tensor.layout, tensor.shape)
    if size != tensor.bytes:
        raise LayoutError(
            f"object {quoted(tensor.name)}: {tensor.bytes} bytes declared, {tensor.format} of shape "
            f"{list(tensor.shape)} takes {size}"
        )


def place(plans: Iterable[ObjectPlan]) -> list[StoredObject]:
    """Objects at their offsets: tensors at multiples of 256, resources packed (artifact-container.md section 4)."""
    placed: list[StoredObject] = []
    cursor = 0
    for plan in plans:
        if plan.bytes < 1:
            raise LayoutError(f"object {quoted(plan.name)}: planned with {plan.bytes} bytes; at least 1 is required")
        if plan.format is None:
            placed.append(ResourceObject(plan.name, cursor, plan.bytes))
        else:
            cursor = align_up(cursor, TENSOR_ALIGNMENT)
            placed.append(TensorObject(plan.name, plan.shape, plan.format, plan.layout, cursor, plan.bytes))
        cursor += plan.bytes
    return placed


def require_members(record: dict[str, Any], required: frozenset[str], optional: frozenset[str], what: str) -> None:
    """Closed member sets: every required member, nothing outside both sets."""
    keys = record.keys()
    if not keys <= required | optional:
        extra = sorted(keys - required - optional)[0]
        allowed = ", ".join(sorted(required | optional))
        raise DirectoryError(f"{what}: unknown member {quoted(extra)}; allowed: {allowed}")
    if not required <= keys:
        raise DirectoryError(f"{what}: missing member {sorted(required - keys)[0]}")


def integer(value: Any, minimum: int, what: str) -> int:
    """A JSON integer token in [minimum, 2^64-1]; booleans and floats such as 3.0 are errors."""
    if type(value) is not int or not minimum <= value < U64_LIMIT:
        raise DirectoryError(f"{what}: expected an integer from {minimum} to 2^64-1, found {quoted(value)}")
    return value


def identifier(value: Any, what: str, forbid_nul: bool) -> str:
    """A nonempty string that UTF-8 can store; version 3 also forbids U+0000."""
    if type(value) is not str or not value:
        raise DirectoryError(f"{what}: expected a nonempty string, found {quoted(value)}")
    if not is_unicode(value) or (forbid_nul and "\0" in value):
        raise DirectoryError(f"{what}: {quoted(value)} holds a character that is not allowed")
    return value


def dimensions(value: Any, what: str) -> tuple[int, ...]:
    """A shape: at most 16 integers >= 1 whose product fits 64 bits."""
    if type(value) is not list or len(value) > MAX_RANK:
        raise DirectoryError(f"{what}: expected an array of at most {MAX_RANK} dimensions, found {quoted(value)}")
    product = 1
    for dimension in value:
        product *= integer(dimension, 1, what)
        if product >= U64_LIMIT:
            raise DirectoryError(f"{what}: the product of {quoted(value)} exceeds 2^64-1")
    return tuple(value)
