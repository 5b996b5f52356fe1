"""Tests of the template language (`value is name`), the allowlisted part of Jinja2's set."""

from collections.abc import Callable
from typing import Any

from runtime.frontend.sandbox import operators
from runtime.frontend.sandbox.filters import FILTERS, Context
from runtime.frontend.sandbox.strings import need_int
from runtime.frontend.sandbox.values import DictValue, ListValue, TupleValue, Undefined

_CONTAINERS = (str, ListValue, TupleValue, DictValue, range, Undefined)


def _compare(name: str) -> Callable[..., bool]:
    return lambda context, value, other: operators.COMPARE[name](context.meter, value, other)


def _kind(*kinds: type) -> Callable[..., bool]:
    return lambda context, value: isinstance(value, kinds)


def _case(test: Callable[[str], bool]) -> Callable[..., bool]:
    def run(context: Context, value: Any) -> bool:
        text = operators.to_text(context.meter, value)
        context.meter.chars(len(text) >> 3)
        return test(text)

    return run


def _remainder(context: Context, value: Any, divisor: int) -> Any:
    return operators.BINARY["%"](context.meter, value, need_int(divisor, "divisibleby"))


TESTS: dict[str, Callable[..., bool]] = {
    "boolean": _kind(bool),
    "callable": lambda context, value: callable(value),
    "defined": lambda context, value: not isinstance(value, Undefined),
    "divisibleby": lambda context, value, num: _remainder(context, value, num) == 0,
    "even": lambda context, value: _remainder(context, value, 2) == 0,
    "false": lambda context, value: value is False,
    "filter": lambda context, value: value in FILTERS if isinstance(value, str) else False,
    "float": _kind(float),
    "in": lambda context, value, seq: operators.contains(context.meter, value, seq),
    "integer": lambda context, value: isinstance(value, int) and not isinstance(value, bool),
    "iterable": _kind(*_CONTAINERS),
    "lower": _case(str.islower),
    "mapping": _kind(DictValue),
    "none": lambda context, value: value is None,
    "number": _kind(int, float),
    "odd": lambda context, value: _remainder(context, value, 2) == 1,
    "sameas": lambda context, value, other: value is other,
    "sequence": _kind(*_CONTAINERS),
    "string": _kind(str),
    "test": lambda context, value: value in TESTS if isinstance(value, str) else False,
    "true": lambda context, value: value is True,
    "undefined": _kind(Undefined),
    "upper": _case(str.isupper),
    **dict.fromkeys(("eq", "==", "equalto"), _compare("eq")),
    **dict.fromkeys(("ne", "!="), _compare("ne")),
    **dict.fromkeys(("lt", "<", "lessthan"), _compare("lt")),
    **dict.fromkeys(("le", "<="), _compare("lteq")),
    **dict.fromkeys(("gt", ">", "greaterthan"), _compare("gt")),
    **dict.fromkeys(("ge", ">="), _compare("gteq")),
}
"""Tests by name: function(context, value, ...)."""
