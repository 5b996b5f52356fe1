"""String operations of the template language: allowlisted, paid for in advance, origin-preserving.

`like` marks a result as a whole where positions cannot be followed (case changes); text of the template mixed into
such a result then counts as data, which is the safe direction.
"""

from collections.abc import Callable
from typing import Any

from runtime.frontend.sandbox.meter import Meter, SandboxError
from runtime.frontend.sandbox.values import concat, cut, like, make_list


def need_text(value: Any, what: str) -> str:
    """The value if it is a string, else SandboxError."""
    if not isinstance(value, str):
        raise SandboxError(f"{what} needs a string, not {type_name(value)}")
    return value


def need_int(value: Any, what: str) -> int:
    """The value if it is an integer (or boolean, as in Python), else SandboxError."""
    if not isinstance(value, int):
        raise SandboxError(f"{what} needs an integer, not {type_name(value)}")
    return int(value)


def type_name(value: Any) -> str:
    """Name of a value's kind as messages print it."""
    for kind, name in ((str, "a string"), (bool, "a boolean"), (int, "an integer"), (float, "a number"),
                       (dict, "a mapping"), (list, "a list"), (tuple, "a tuple")):
        if isinstance(value, kind):
            return name
    if value is None:
        return "none"
    return "undefined" if type(value).__name__ == "Undefined" else f"a {type(value).__name__.lower()}"


def _scan(meter: Meter, *texts: str) -> None:
    meter.chars(sum(map(len, texts)) >> 3)


def strip(meter: Meter, text: str, chars: Any = None, left: bool = True, right: bool = True) -> str:
    """`str.strip` and its one-sided forms."""
    if chars is not None:
        need_text(chars, "strip")
    _scan(meter, text)
    start = len(text) - len(str.lstrip(text, chars)) if left else 0
    end = len(str.rstrip(text, chars)) if right else len(text)
    meter.chars(max(0, end - start))
    return cut(text, start, max(start, end))


def split(meter: Meter, text: str, sep: Any = None, maxsplit: Any = -1, right: bool = False) -> list[Any]:
    """`str.split` and `str.rsplit`."""
    limit = need_int(maxsplit, "split")
    _scan(meter, text)
    meter.chars(len(text))
    if sep is not None and not need_text(sep, "split"):
        raise SandboxError("split needs a separator that is not empty")
    if right and sep is not None:
        meter.chars((len(text) * len(sep)) >> 10)
    plain = str.rsplit(text, sep, limit) if right else str.split(text, sep, limit)
    meter.step(len(plain))
    pieces, position = [], 0
    for piece in plain:
        position = text.find(piece, position) if sep is None else position
        pieces.append(cut(text, position, position + len(piece)))
        position += len(piece) + (len(sep) if sep is not None else 0)
    return make_list(pieces, meter)


def splitlines(meter: Meter, text: str, keepends: Any = False) -> list[Any]:
    """`str.splitlines`."""
    meter.chars(len(text))
    pieces, position = [], 0
    for line in str.splitlines(text, True):
        bare = line if keepends else str.splitlines(line)[0]
        pieces.append(cut(text, position, position + len(bare)))
        position += len(line)
    return make_list(pieces, meter)


def replace(meter: Meter, text: str, old: Any, new: Any, count: Any = -1) -> str:
    """`str.replace`; the characters put in keep their own origin."""
    need_text(old, "replace")
    need_text(new, "replace")
    limit = need_int(count, "replace")
    _scan(meter, text, old)
    if not old:
        raise SandboxError("replace needs a text to look for that is not empty")
    found = text.count(old) if limit < 0 else min(limit, text.count(old))
    meter.step(found)
    meter.chars(found * len(new))
    parts: list[str] = []
    position = 0
    for _ in range(found):
        at = text.find(old, position)
        parts += [cut(text, position, at), new]
        position = at + len(old)
    parts.append(cut(text, position, len(text)))
    return concat(parts, meter)


def join(meter: Meter, separator: str, items: list[str]) -> str:
    """`separator.join(items)`."""
    parts: list[str] = []
    for index, item in enumerate(items):
        if index and separator:
            parts.append(separator)
        parts.append(item)
    meter.step(len(parts))
    return concat(parts, meter)


def repeat(meter: Meter, text: str, times: int) -> str:
    """`text * times`."""
    times = max(0, times)
    meter.chars(len(text) * times)
    meter.step(times)
    return concat([text] * times, meter)


def change_case(meter: Meter, text: str, how: Callable[[str], str]) -> str:
    """upper, lower, title, capitalize and similar."""
    meter.chars(3 * len(text))  # the longest expansion of one character is three
    return like(how(text), text)


def find(meter: Meter, text: str, what: Any, start: Any = 0, end: Any = None, last: bool = False) -> int:
    """`str.find` and `str.rfind`."""
    need_text(what, "find")
    first = need_int(start, "find")
    stop = None if end is None else need_int(end, "find")
    _scan(meter, text, what)
    if last:  # the reverse search of CPython has no linear bound
        meter.chars((len(text) * len(what)) >> 10)
    return str.rfind(text, what, first, stop) if last else str.find(text, what, first, stop)


def index(meter: Meter, text: str, what: Any, start: Any = 0, end: Any = None, last: bool = False) -> int:
    """`str.index` and `str.rindex`."""
    at = find(meter, text, what, start, end, last)
    if at < 0:
        raise SandboxError("index: the text was not found")
    return at


def count(meter: Meter, text: str, what: Any) -> int:
    """`str.count`."""
    need_text(what, "count")
    _scan(meter, text, what)
    return str.count(text, what)


def starts_or_ends(meter: Meter, text: str, what: Any, test: Callable[..., bool]) -> bool:
    """`str.startswith` and `str.endswith`, with one string or a tuple of them."""
    options = tuple(need_text(item, "startswith") for item in what) if isinstance(what, tuple) else (
        need_text(what, "startswith"),)
    _scan(meter, *options)
    meter.step(len(options))
    return test(text, options)


def remove(meter: Meter, text: str, affix: Any, suffix: bool) -> str:
    """`str.removeprefix` and `str.removesuffix`."""
    need_text(affix, "removeprefix")
    _scan(meter, affix)
    meter.chars(len(text))
    if suffix:
        return cut(text, 0, len(text) - len(affix)) if affix and str.endswith(text, affix) else text
    return cut(text, len(affix), len(text)) if str.startswith(text, affix) else text


def partition(meter: Meter, text: str, sep: Any, last: bool = False) -> list[Any]:
    """`str.partition` and `str.rpartition`, as a list."""
    if not need_text(sep, "partition"):
        raise SandboxError("partition needs a separator that is not empty")
    at = find(meter, text, sep, last=last)
    meter.chars(len(text))
    if at < 0:
        return make_list(["", "", text] if last else [text, "", ""], meter)
    return make_list([cut(text, 0, at), cut(text, at, at + len(sep)), cut(text, at + len(sep), len(text))], meter)


def _predicate(test: Callable[[str], bool]) -> Callable[..., bool]:
    def run(meter: Meter, text: str) -> bool:
        _scan(meter, text)
        return test(text)

    return run


def _cased(how: Callable[[str], str]) -> Callable[..., str]:
    return lambda meter, text: change_case(meter, text, how)


def _join_method(meter: Meter, separator: str, items: Any) -> str:
    if not isinstance(items, list | tuple):
        raise SandboxError(f"join needs a list, not {type_name(items)}")
    return join(meter, separator, [need_text(item, "join") for item in items])


METHODS: dict[str, Callable[..., Any]] = {
    "strip": strip,
    "lstrip": lambda meter, text, chars=None: strip(meter, text, chars, right=False),
    "rstrip": lambda meter, text, chars=None: strip(meter, text, chars, left=False),
    "split": split,
    "rsplit": lambda meter, text, sep=None, maxsplit=-1: split(meter, text, sep, maxsplit, right=True),
    "splitlines": splitlines,
    "replace": replace,
    "join": _join_method,
    "find": find,
    "rfind": lambda meter, text, what, start=0, end=None: find(meter, text, what, start, end, True),
    "index": index,
    "rindex": lambda meter, text, what, start=0, end=None: index(meter, text, what, start, end, True),
    "count": count,
    "startswith": lambda meter, text, what: starts_or_ends(meter, text, what, str.startswith),
    "endswith": lambda meter, text, what: starts_or_ends(meter, text, what, str.endswith),
    "removeprefix": lambda meter, text, affix: remove(meter, text, affix, False),
    "removesuffix": lambda meter, text, affix: remove(meter, text, affix, True),
    "partition": partition,
    "rpartition": lambda meter, text, sep: partition(meter, text, sep, last=True),
    "upper": _cased(str.upper),
    "lower": _cased(str.lower),
    "title": _cased(str.title),
    "capitalize": _cased(str.capitalize),
    "casefold": _cased(str.casefold),
    "swapcase": _cased(str.swapcase),
    **{name: _predicate(getattr(str, name)) for name in (
        "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric",
        "isprintable", "isspace", "istitle", "isupper")},
}
"""Methods of strings: name to function(meter, text, ...)."""
