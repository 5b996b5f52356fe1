"""Operators of the template language on metered values: arithmetic, comparison, membership, conversion to text."""

import json
import operator
from collections.abc import Callable
from typing import Any

from runtime.frontend.sandbox.meter import MAX_INTEGER_BITS, Meter, SandboxError
from runtime.frontend.sandbox.strings import need_int, repeat, type_name
from runtime.frontend.sandbox.values import (
    DictValue,
    ListValue,
    Namespace,
    TupleValue,
    Undefined,
    concat,
    cut,
    make_list,
    mark,
    weight,
)


def defined(value: Any) -> Any:
    """The value, unless it is undefined."""
    if isinstance(value, Undefined):
        raise SandboxError(f"{value.what} is undefined")
    return value


def bounded(value: Any) -> Any:
    """The result of arithmetic, unless it is an integer beyond 64 bits or a complex number."""
    if isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
        raise SandboxError(f"an integer exceeds {MAX_INTEGER_BITS} bits")
    if isinstance(value, complex):
        raise SandboxError("a power has no real value")
    return value


def _numbers(left: Any, right: Any, sign: str) -> tuple[Any, Any]:
    for value in (defined(left), defined(right)):
        if not isinstance(value, int | float):
            raise SandboxError(f"{sign} does not take {type_name(left)} and {type_name(right)}")
    return left, right


def add(meter: Meter, left: Any, right: Any) -> Any:
    """`left + right` for numbers, strings and lists."""
    if isinstance(left, str) and isinstance(right, str):
        return concat([left, right], meter)
    if isinstance(left, list) and isinstance(right, list):
        meter.step(len(left) + len(right))
        return make_list([*left, *right], meter)
    a, b = _numbers(left, right, "+")
    return bounded(a + b)


def multiply(meter: Meter, left: Any, right: Any) -> Any:
    """`left * right` for numbers, and a string or list times an integer."""
    if isinstance(right, str | list):
        left, right = right, left
    if isinstance(left, str):
        return repeat(meter, left, need_int(right, "*"))
    if isinstance(left, list):
        times = max(0, need_int(right, "*"))
        meter.step(len(left) * times)
        return make_list(list(left) * times, meter)
    a, b = _numbers(left, right, "*")
    return bounded(a * b)


def power(_meter: Meter, left: Any, right: Any) -> Any:
    """`left ** right` for numbers; integer exponents up to 64."""
    a, b = _numbers(left, right, "**")
    if isinstance(a, int) and isinstance(b, int) and abs(b) > 64:
        raise SandboxError("an integer exponent exceeds 64")
    return bounded(a**b)


def _arithmetic(sign: str, run: Callable[[Any, Any], Any]) -> Callable[[Meter, Any, Any], Any]:
    def apply(_meter: Meter, left: Any, right: Any) -> Any:
        a, b = _numbers(left, right, sign)
        return bounded(run(a, b))

    return apply


BINARY: dict[str, Callable[[Meter, Any, Any], Any]] = {
    "+": add,
    "*": multiply,
    "**": power,
    "-": _arithmetic("-", operator.sub),
    "/": _arithmetic("/", operator.truediv),
    "//": _arithmetic("//", operator.floordiv),
    "%": _arithmetic("%", operator.mod),
}
"""Arithmetic by operator sign. `%` does not format strings."""


def equal(meter: Meter, left: Any, right: Any) -> bool:
    """`left == right`, paid by the smaller operand."""
    meter.step(min(weight(left), weight(right)))
    return bool(left == right)


def contains(meter: Meter, item: Any, container: Any) -> bool:
    """`item in container`."""
    if isinstance(container, Undefined):
        return False
    if isinstance(container, str):
        if not isinstance(item, str):
            raise SandboxError(f"'in' looks for a string in a string, not for {type_name(item)}")
        meter.chars((len(container) + len(item)) >> 3)
        return str.__contains__(container, item)
    if isinstance(container, dict):
        return key_of(meter, item) in container
    if isinstance(container, list | tuple):
        meter.step(len(container) + weight(container))
        return item in container
    if isinstance(container, range):
        return isinstance(item, int | float) and item in container
    raise SandboxError(f"'in' does not look into {type_name(container)}")


def key_of(meter: Meter, key: Any) -> Any:
    """A value that may be a mapping key."""
    meter.step(weight(key))
    if isinstance(key, ListValue | DictValue | Namespace) or (isinstance(key, TupleValue) and not _hashable(key)):
        raise SandboxError(f"{type_name(key)} cannot be a key")
    return key


def _hashable(key: TupleValue) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


def _order(test: Callable[[Any, Any], Any]) -> Callable[[Meter, Any, Any], bool]:
    def apply(meter: Meter, left: Any, right: Any) -> bool:
        meter.step(min(weight(defined(left)), weight(defined(right))))
        return bool(test(left, right))

    return apply


COMPARE: dict[str, Callable[[Meter, Any, Any], bool]] = {
    "eq": equal,
    "ne": lambda meter, left, right: not equal(meter, left, right),
    "lt": _order(operator.lt),
    "lteq": _order(operator.le),
    "gt": _order(operator.gt),
    "gteq": _order(operator.ge),
    "in": contains,
    "notin": lambda meter, left, right: not contains(meter, left, right),
}
"""Comparisons by Jinja2's operator names."""


def iterate(meter: Meter, value: Any) -> list[Any]:
    """The elements a loop visits: list, tuple, mapping keys, characters, range; nothing for undefined."""
    if isinstance(value, Undefined):
        return []
    if isinstance(value, str):
        meter.step(len(value))
        if type(value) is str:
            return list(value)
        return [value_at(value, i) for i in range(len(value))]
    if isinstance(value, list | tuple | dict | range):
        meter.step(len(value))
        return list(value)
    raise SandboxError(f"{type_name(value)} cannot be iterated over")


def value_at(text: str, index: int) -> str:
    """One character of a string with its origin."""
    index += len(text) if index < 0 else 0
    return cut(text, index, index + 1)


def to_text(meter: Meter, value: Any) -> str:
    """What `{{ value }}` prints. Lists and mappings print as Python writes them and count as data."""
    if isinstance(value, str):
        return value
    if isinstance(value, Undefined):
        return ""
    if value is None or isinstance(value, bool | int | float):
        return str(value)
    if isinstance(value, list | dict | tuple):
        _pay_for_dump(meter, value)
        _require_plain(value)
        shown = repr(value)
        meter.chars(len(shown))
        return mark(shown)
    raise SandboxError(f"{type_name(value)} cannot be printed")


def _require_plain(value: Any) -> None:
    """Walks a value and rejects members that have no printed form; the caller has paid for its weight."""
    pending = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, dict):
            pending += [*item, *item.values()]
        elif isinstance(item, list | tuple):
            pending += item
        elif not (item is None or isinstance(item, str | bool | int | float)):
            raise SandboxError(f"{type_name(item)} inside a list or mapping cannot be written out")


def _pay_for_dump(meter: Meter, value: Any) -> None:
    meter.step(weight(value))
    meter.chars(16 * weight(value))


def to_json(meter: Meter, value: Any, ensure_ascii: Any = False, indent: Any = None, separators: Any = None,
            sort_keys: Any = False) -> str:
    """`tojson` as Hugging Face chat templates define it: `json.dumps` with ensure_ascii off, members in source order.

    The result counts as data as a whole: a control token spelled inside a tool description stays text.
    """
    if isinstance(value, Undefined):
        raise SandboxError(f"{value.what} is undefined and cannot be written as JSON")
    if isinstance(indent, bool) or not (indent is None or (isinstance(indent, int) and 0 <= indent <= 16)):
        raise SandboxError("tojson takes an indent of 0 to 16")
    if separators is not None:
        if not (isinstance(separators, list | tuple) and len(separators) == 2
                and all(isinstance(s, str) and len(s) <= 16 for s in separators)):
            raise SandboxError("tojson takes two separators of at most 16 characters")
        separators = (str(separators[0]), str(separators[1]))
    _pay_for_dump(meter, value)
    if indent:
        meter.chars(weight(value) * indent * (getattr(value, "depth", 1) + 1))
    _require_plain(value)
    shown = json.dumps(value, ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators,
                       sort_keys=bool(sort_keys))
    meter.chars(len(shown))
    return mark(shown)
