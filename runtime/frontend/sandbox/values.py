"""The values a template works on: strings that know their origin, immutable containers that know their size.

Strings written in the template are plain `str`. Strings that came in with the messages are `Text`, a `str` whose
`literal` spans say which characters are data; every string operation here carries the spans along. Containers store
their total weight, so that comparing, printing or serialising a structure with shared parts is paid in full
before it starts (forty nested `[x, x]` are 2**40 elements).
"""

from collections.abc import Iterable, Sequence
from typing import Any

from runtime.frontend.sandbox.meter import MAX_VALUE_DEPTH, Meter, SandboxError

Span = tuple[int, int]


class Text(str):
    """A string with `literal`: sorted, disjoint, non-touching half-open spans of characters that are data."""

    __slots__ = ("literal",)
    literal: tuple[Span, ...]


class ListValue(list[Any]):
    """A list of the template or of the messages."""

    __slots__ = ("depth", "weight")
    weight: int
    depth: int


class TupleValue(tuple[Any, ...]):
    """A tuple of the template."""

    weight: int
    depth: int


class DictValue(dict[Any, Any]):
    """A mapping of the template or of the messages."""

    __slots__ = ("depth", "weight")
    weight: int
    depth: int


class Undefined:
    """A name or member that does not exist: empty and false, an error in any other use."""

    __slots__ = ("what",)

    def __init__(self, what: str) -> None:
        self.what = what

    def __bool__(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Undefined)

    def __hash__(self) -> int:
        return id(type(self))


class Namespace:
    """`namespace(...)`: the one mutable value of the language."""

    __slots__ = ("members",)

    def __init__(self, members: dict[str, Any]) -> None:
        self.members = members


def weight(value: Any) -> int:
    """Cost of walking a value once, shared parts counted each time; a string counts one per 16 characters."""
    if isinstance(value, str):
        return 1 + (len(value) >> 4)
    if isinstance(value, ListValue | DictValue | TupleValue):
        return value.weight
    return 1


def _measure(container: "ListValue | DictValue | TupleValue", children: Iterable[Any], meter: Meter | None) -> None:
    total, depth = 1, 0
    for child in children:
        total += weight(child)
        if isinstance(child, ListValue | DictValue | TupleValue):
            depth = max(depth, child.depth)
    if depth + 1 > MAX_VALUE_DEPTH:
        raise SandboxError(f"nests values deeper than {MAX_VALUE_DEPTH}")
    container.weight, container.depth = total, depth + 1
    if meter is not None:
        meter.step(len(container))


def make_list(items: Iterable[Any], meter: Meter | None) -> ListValue:
    """A measured list."""
    made = ListValue(items)
    _measure(made, made, meter)
    return made


def make_tuple(items: Iterable[Any], meter: Meter | None) -> TupleValue:
    """A measured tuple."""
    made = TupleValue(items)
    _measure(made, made, meter)
    return made


def make_dict(pairs: Iterable[tuple[Any, Any]], meter: Meter | None) -> DictValue:
    """A measured mapping."""
    made = DictValue(pairs)
    _measure(made, [*made, *made.values()], meter)
    return made


def from_data(value: Any, depth: int = 0) -> Any:
    """Converts JSON data to template values; every string becomes literal text. Raises SandboxError."""
    if isinstance(value, str):
        return mark(value)
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        if value.bit_length() > 64:
            raise SandboxError("an integer of the messages does not fit 64 bits")
        return value
    if depth >= MAX_VALUE_DEPTH:
        raise SandboxError(f"the messages nest deeper than {MAX_VALUE_DEPTH}")
    if isinstance(value, list | tuple):
        return make_list([from_data(item, depth + 1) for item in value], None)
    if isinstance(value, dict):
        return make_dict([(from_data(k, depth + 1), from_data(v, depth + 1)) for k, v in value.items()], None)
    raise SandboxError(f"the messages hold a {type(value).__name__}, which is not JSON")


def spans(text: str) -> tuple[Span, ...]:
    """Literal spans of a string; none for a string of the template."""
    return text.literal if isinstance(text, Text) else ()


def with_spans(text: str, literal: Sequence[Span]) -> str:
    """A string with the given spans (sorted, disjoint, non-touching)."""
    if not literal:
        return str.__str__(text)
    made = Text(text)
    made.literal = tuple(literal)
    return made


def mark(text: str) -> str:
    """The whole string as literal text."""
    return with_spans(text, [(0, len(text))] if text else [])


def like(result: str, *sources: str) -> str:
    """A string derived from `sources` character by character in no simple way: literal as a whole if any part was."""
    return mark(result) if any(spans(source) for source in sources) else str.__str__(result)


def join_spans(parts: Iterable[str]) -> list[Span]:
    """Literal spans of the concatenation of `parts`."""
    merged: list[Span] = []
    base = 0
    for part in parts:
        if isinstance(part, Text):
            for start, end in part.literal:
                if merged and merged[-1][1] == base + start:
                    merged[-1] = (merged[-1][0], base + end)
                else:
                    merged.append((base + start, base + end))
        base += len(part)
    return merged


def concat(parts: Sequence[str], meter: Meter) -> str:
    """Concatenation that keeps origins."""
    meter.chars(sum(map(len, parts)))
    return with_spans("".join(parts), join_spans(parts))


def cut(text: str, start: int, end: int) -> str:
    """`text[start:end]` (0 <= start <= end <= len) with its origins."""
    piece = str.__getitem__(text, slice(start, end))
    if not isinstance(text, Text):
        return piece
    clipped = [(max(a, start) - start, min(b, end) - start) for a, b in text.literal if a < end and b > start]
    return with_spans(piece, clipped)


def take_slice(text: str, index: slice) -> str:
    """`text[index]` for any slice; a stride other than 1 marks the result as a whole."""
    start, end, stride = index.indices(len(text))
    if stride == 1:
        return cut(text, start, max(start, end))
    return like(str.__getitem__(text, index), text)
