"""Filters of the template language, the allowlisted part of Jinja2's set plus `tojson` as Hugging Face defines it."""

from collections.abc import Callable
from typing import Any, Protocol

from runtime.frontend.sandbox import operators, strings
from runtime.frontend.sandbox.meter import Meter, SandboxError
from runtime.frontend.sandbox.strings import need_int, need_text, type_name
from runtime.frontend.sandbox.values import Undefined, concat, make_list, make_tuple, take_slice, weight


class Context(Protocol):
    """What a filter needs of the evaluator."""

    meter: Meter

    def member(self, value: Any, name: Any) -> Any:
        """`value.name` or `value[name]`."""
        ...

    def filter(self, name: str, value: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Applies a filter by name."""
        ...

    def test(self, name: str, value: Any, args: list[Any], kwargs: dict[str, Any]) -> bool:
        """Applies a test by name."""
        ...


def _attribute(context: Context, path: Any, default: Any = None) -> Callable[[Any], Any]:
    """Getter for `attribute="a.b"` or an index; a missing step gives `default` unless that is none."""
    steps: list[Any] = [path] if isinstance(path, int) else need_text(path, "attribute").split(".")

    def get(value: Any) -> Any:
        for step in steps:
            context.meter.step()
            value = context.member(value, int(step) if isinstance(step, str) and step.isdecimal() else step)
            if default is not None and isinstance(value, Undefined):
                value = default
        return value

    return get


def _length(context: Context, value: Any) -> int:
    if isinstance(value, Undefined):
        return 0
    if isinstance(value, str | list | tuple | dict | range):
        return len(value)
    raise SandboxError(f"{type_name(value)} has no length")


def _items(context: Context, value: Any) -> list[Any]:
    if isinstance(value, Undefined):
        return make_list([], context.meter)
    if not isinstance(value, dict):
        raise SandboxError(f"items needs a mapping, not {type_name(value)}")
    return make_list([make_tuple(pair, context.meter) for pair in value.items()], context.meter)


def _default(context: Context, value: Any, default: Any = "", boolean: Any = False) -> Any:
    return default if isinstance(value, Undefined) or (boolean and not value) else value


def _join(context: Context, value: Any, d: Any = "", attribute: Any = None) -> str:
    items = operators.iterate(context.meter, value)
    if attribute is not None:
        items = list(map(_attribute(context, attribute), items))
    texts = [operators.to_text(context.meter, item) for item in items]
    return strings.join(context.meter, operators.to_text(context.meter, d), texts)


def _text_filter(name: str) -> Callable[..., str]:
    def run(context: Context, value: Any) -> str:
        return strings.METHODS[name](context.meter, operators.to_text(context.meter, value))  # type: ignore[no-any-return]

    return run


def _trim(context: Context, value: Any, chars: Any = None) -> str:
    return strings.strip(context.meter, operators.to_text(context.meter, value), chars)


def _replace(context: Context, value: Any, old: Any, new: Any, count: Any = None) -> str:
    return strings.replace(context.meter, operators.to_text(context.meter, value), old, new,
                           -1 if count is None else count)


def _title(context: Context, value: Any) -> str:
    """Jinja2's title: a letter after whitespace, hyphen or an opening bracket is upper case, the rest lower."""
    def cased(text: str) -> str:
        out, start = [], True
        for char in text:
            out.append(char.upper() if start else char.lower())
            start = char.isspace() or char in "-([{<"
        return "".join(out)

    text = operators.to_text(context.meter, value)
    context.meter.step(len(text))
    return strings.change_case(context.meter, text, cased)


def _indent(context: Context, value: Any, width: Any = 4, first: Any = False, blank: Any = False) -> str:
    pad = width if isinstance(width, str) else strings.repeat(context.meter, " ", need_int(width, "indent"))
    text = operators.to_text(context.meter, value)
    lines = strings.METHODS["splitlines"](context.meter, text)
    if text.endswith("\n") or not lines:
        lines.append("")
    parts: list[str] = []
    for number, line in enumerate(lines):
        if number:
            parts.append("\n")
        if (number or first) and (line or (blank and number) or (first and not number)):
            parts.append(pad)
        parts.append(line)
    context.meter.step(len(parts))
    return concat(parts, context.meter)


def _first(context: Context, value: Any) -> Any:
    if isinstance(value, str):
        return operators.value_at(value, 0) if value else Undefined("the first element")
    items = operators.iterate(context.meter, value)
    return items[0] if items else Undefined("the first element")


def _last(context: Context, value: Any) -> Any:
    if isinstance(value, str):
        return operators.value_at(value, -1) if value else Undefined("the last element")
    items = operators.iterate(context.meter, value)
    return items[-1] if items else Undefined("the last element")


def _list(context: Context, value: Any) -> list[Any]:
    return make_list(operators.iterate(context.meter, value), context.meter)


def _reverse(context: Context, value: Any) -> Any:
    if isinstance(value, str):
        context.meter.chars(len(value))
        return take_slice(value, slice(None, None, -1))
    return make_list(operators.iterate(context.meter, value)[::-1], context.meter)


def _map(context: Context, value: Any, *args: Any, **kwargs: Any) -> list[Any]:
    items = operators.iterate(context.meter, value)
    if not args and "attribute" in kwargs:
        get = _attribute(context, kwargs.pop("attribute"), kwargs.pop("default", None))
        if kwargs:
            raise SandboxError("map takes attribute and default")
        return make_list([get(item) for item in items], context.meter)
    if not args:
        raise SandboxError("map needs a filter name or attribute=")
    name, *rest = args
    return make_list([context.filter(need_text(name, "map"), item, rest, kwargs) for item in items], context.meter)


def _choose(keep: bool, by_attribute: bool) -> Callable[..., list[Any]]:
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> list[Any]:
        rest = list(args)
        if by_attribute and not rest:
            raise SandboxError("selectattr needs an attribute name")
        get = _attribute(context, rest.pop(0)) if by_attribute else lambda item: item
        name = need_text(rest.pop(0), "select") if rest else None
        chosen = []
        for item in operators.iterate(context.meter, value):
            tested = get(item)
            if (context.test(name, tested, rest, kwargs) if name else bool(tested)) is keep:
                chosen.append(item)
        return make_list(chosen, context.meter)

    return run


def _sort_key(context: Context, attribute: Any, case_sensitive: Any) -> Callable[[Any], Any]:
    get = _attribute(context, attribute) if attribute is not None else lambda item: item

    def key(item: Any) -> Any:
        found = operators.defined(get(item))
        context.meter.step(weight(found))
        return found.lower() if isinstance(found, str) and not case_sensitive else found

    return key


def _pay_for_sort(context: Context, items: list[Any]) -> None:
    context.meter.step(sum(map(weight, items)) * max(1, len(items).bit_length()))


def _sort(context: Context, value: Any, reverse: Any = False, case_sensitive: Any = False,
          attribute: Any = None) -> list[Any]:
    items = operators.iterate(context.meter, value)
    _pay_for_sort(context, items)
    return make_list(sorted(items, key=_sort_key(context, attribute, case_sensitive), reverse=bool(reverse)),
                     context.meter)


def _dictsort(context: Context, value: Any, case_sensitive: Any = False, by: Any = "key",
              reverse: Any = False) -> list[Any]:
    if by not in ("key", "value"):
        raise SandboxError("dictsort sorts by 'key' or 'value'")
    pairs = _items(context, value)
    _pay_for_sort(context, pairs)
    key = _sort_key(context, 0 if by == "key" else 1, case_sensitive)
    return make_list(sorted(pairs, key=key, reverse=bool(reverse)), context.meter)


def _unique(context: Context, value: Any, case_sensitive: Any = False, attribute: Any = None) -> list[Any]:
    key = _sort_key(context, attribute, case_sensitive)
    seen: set[Any] = set()
    kept = []
    for item in operators.iterate(context.meter, value):
        found = operators.key_of(context.meter, key(item))
        if found not in seen:
            seen.add(found)
            kept.append(item)
    return make_list(kept, context.meter)


def _extreme(largest: bool) -> Callable[..., Any]:
    def run(context: Context, value: Any, case_sensitive: Any = False, attribute: Any = None) -> Any:
        items = operators.iterate(context.meter, value)
        if not items:
            return Undefined("the extreme of an empty list")
        key = _sort_key(context, attribute, case_sensitive)
        return max(items, key=key) if largest else min(items, key=key)

    return run


def _sum(context: Context, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    get = _attribute(context, attribute) if attribute is not None else lambda item: item
    total = start
    for item in operators.iterate(context.meter, value):
        total = operators.add(context.meter, total, get(item))
    return total


def _int(context: Context, value: Any, default: Any = 0, base: Any = 10) -> Any:
    try:
        if isinstance(value, str):
            if len(value) > 64:
                return default
            try:
                return operators.bounded(int(value, need_int(base, "int")))
            except ValueError:
                return operators.bounded(int(float(value)))
        return operators.bounded(int(value))
    except (TypeError, ValueError, OverflowError):
        return default


def _float(context: Context, value: Any, default: Any = 0.0) -> Any:
    try:
        return float(value) if not isinstance(value, str) or len(value) <= 64 else default
    except (TypeError, ValueError, OverflowError):
        return default


def _round(context: Context, value: Any, precision: Any = 0, method: Any = "common") -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SandboxError(f"round needs a number, not {type_name(value)}")
    digits = need_int(precision, "round")
    if method != "common" or abs(digits) > 16:
        raise SandboxError("round takes up to 16 digits and the method 'common'")
    return float(round(value, digits))


def _abs(context: Context, value: Any) -> Any:
    if isinstance(value, int | float):
        return abs(value)
    raise SandboxError(f"abs needs a number, not {type_name(value)}")


FILTERS: dict[str, Callable[..., Any]] = {
    "abs": _abs, "capitalize": _text_filter("capitalize"), "count": _length, "d": _default, "default": _default,
    "dictsort": _dictsort, "first": _first, "float": _float, "indent": _indent, "int": _int, "items": _items,
    "join": _join, "last": _last, "length": _length, "list": _list, "lower": _text_filter("lower"), "map": _map,
    "max": _extreme(True), "min": _extreme(False), "reject": _choose(False, False),
    "rejectattr": _choose(False, True), "replace": _replace, "reverse": _reverse, "round": _round,
    "safe": lambda context, value: operators.to_text(context.meter, value),
    "select": _choose(True, False), "selectattr": _choose(True, True), "sort": _sort,
    "string": lambda context, value: operators.to_text(context.meter, value), "sum": _sum, "title": _title,
    "tojson": lambda context, value, **kw: operators.to_json(context.meter, value, **kw),
    "trim": _trim, "unique": _unique, "upper": _text_filter("upper"),
}
"""Filters by name: function(context, value, ...)."""
