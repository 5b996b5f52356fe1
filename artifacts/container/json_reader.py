"""Reading a JSON directory with bounded memory.

`json.loads` turns eight hostile megabytes of `[[],[],…` into hundreds of megabytes of Python objects before any rule
is looked at. This reader walks the document once: the caller says what it expects, converts each record to its compact
form and drops it. Tables of records go through the C scanner in batches of bounded length, everything else through a
budgeted parser.

Limits (policy, not part of the format; the largest published directory, 8.0 MB with 98,550 records, fits):
directory 8 MiB; decoded text 16 MiB; open values 32,768 in all; values in one record 4,096; nesting 64; 262,144 characters
per string.
"""

import gc
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from json.decoder import scanstring  # type: ignore[attr-defined]  # the C string scanner of the standard library
from typing import Any

import numpy as np

from artifacts.errors import DirectoryError, quoted

MAX_DIRECTORY_BYTES = 8 << 20
MAX_DECODED_BYTES = 16 << 20
MAX_OPEN_VALUES = 32768
MAX_DEPTH = 64
MAX_RECORD_VALUES = 4096
STRING_SLICE, MAX_STRING = 4096, 262144  # characters
RECORD_SLICE, BATCH_SLICE = 2048, 16384  # characters handed to the C scanner at once: bounds what it can allocate
SPELLED_SLICE = 4096

Buffer = bytes | memoryview
Rows = list[tuple[str, ...]]
Pairs = tuple[tuple[str, Any], ...]
"""An object of a closed schema as it stands in the text: (name, value) in order, objects inside it alike.

The C scanner builds these without a Python call per object; `unique` makes a dict of one.
"""

_space = re.compile(r"[ \t\n\r]*").match
_plain_string = re.compile(r'"([^"\\\x00-\x1f]*)"').match
_number = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?").match
_MAX_NUMBER = 400  # characters; longer than any binary64 printed exactly in practice, far below int()'s own limit


def decode_text(raw: Buffer) -> str:
    """UTF-8 directory bytes to text.

    A str costs one, two or four bytes per character by its widest character, so the width is checked first.
    Errors: DirectoryError for size, byte order mark, invalid UTF-8.
    """
    if len(raw) > MAX_DIRECTORY_BYTES:
        raise DirectoryError(f"JSON directory is {len(raw)} bytes; at most {MAX_DIRECTORY_BYTES} are allowed")
    if bytes(raw[:3]) == b"\xef\xbb\xbf":
        raise DirectoryError("JSON directory starts with a byte order mark; plain UTF-8 is required")
    widest = int(np.frombuffer(raw, np.uint8).max(initial=0))
    width = 4 if widest >= 0xF0 else 2 if widest >= 0xC4 else 1
    if len(raw) * width > MAX_DECODED_BYTES:
        raise DirectoryError(f"JSON directory decodes to more than {MAX_DECODED_BYTES} bytes of text")
    try:
        return str(raw, "utf-8")
    except UnicodeDecodeError as error:
        raise DirectoryError(f"JSON directory is not UTF-8: bad byte at {error.start}") from None


def is_unicode(text: str) -> bool:
    """False when the text holds a lone surrogate (JSON escapes can spell one), which UTF-8 cannot store."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked(value: str) -> str:
    if not is_unicode(value):
        raise DirectoryError(f"JSON directory holds a lone surrogate in {quoted(value)}")
    return value


def _reject_constant(name: str) -> Any:
    raise DirectoryError(f"JSON directory holds {name}, which is not JSON")


def _strict_int(digits: str) -> int:
    if digits == "-0":
        raise DirectoryError("JSON directory spells an integer -0; 0 is required")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise DirectoryError(f"JSON directory holds the number {quoted(digits)}, which overflows binary64")
    return value


@contextmanager
def collector_paused() -> Iterator[None]:
    """Tables of records hold no cycles: the garbage collector would only walk them again and again as they grow."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def unique(pairs: Pairs) -> dict[str, Any]:
    """The members of a record by name. Errors: DirectoryError for a repeated name."""
    record = dict(pairs)
    if len(record) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DirectoryError(f"JSON directory repeats member {quoted(key)} in one object")
            seen.add(key)
    return record


def _pairs(value: Any) -> Any:
    """An open value with its objects turned into Pairs."""
    if type(value) is dict:
        return tuple((name, _pairs(item)) for name, item in value.items())
    if type(value) is list:
        return [_pairs(item) for item in value]
    return value


class Spelling:
    """One spelling of an array element or an object member, without white space.

    `pattern`: a regular expression whose groups are the parts that vary; `fixed`: the element with these parts empty.
    """

    def __init__(self, pattern: str, fixed: str) -> None:
        self._find = re.compile(pattern + ",").findall
        self._fixed = len(fixed) + 1

    def rows(self, run: str) -> Rows:
        """The groups of each element of a run of elements with commas between them; none if one is spelled otherwise.

        `findall` passes over what does not match; that nothing was passed over shows in the length.
        """
        rows: Rows = self._find(run + ",")
        length = self._fixed * len(rows) + sum([len("".join(column)) for column in zip(*rows, strict=True)])
        return rows if length == len(run) + 1 else []


class JsonCursor:
    """A position in a JSON text. Every method consumes exactly one construct and raises DirectoryError otherwise.

    `negative_zero`: whether the integer token `-0` is accepted (version 3) or an error (versions 1 and 2).
    """

    def __init__(self, text: str, negative_zero: bool) -> None:
        self.text = text
        self.position = 0
        self._open_values = MAX_OPEN_VALUES
        self._unbatched = self._unspelled = 0
        self._parse_int: Callable[[str], int] = int if negative_zero else _strict_int
        decoder = json.JSONDecoder(
            object_pairs_hook=tuple,
            parse_constant=_reject_constant,
            parse_int=None if negative_zero else _strict_int,
            parse_float=_finite,
        )
        self._scan = decoder.scan_once  # type: ignore[attr-defined]

    def fail(self, expected: str) -> DirectoryError:
        found = quoted(self.text[self.position : self.position + 12]) if self.position < len(self.text) else "the end"
        return DirectoryError(f"JSON directory: expected {expected} at character {self.position}, found {found}")

    def peek(self) -> str:
        """The next character that is not white space, or '' at the end."""
        next_character = self.text[self.position : self.position + 1]
        if next_character not in " \t\n\r":
            return next_character
        self.position = _space(self.text, self.position).end()  # type: ignore[union-attr]
        return self.text[self.position : self.position + 1]

    def end(self) -> None:
        """Only white space may follow."""
        if self.peek():
            raise self.fail("the end of the document")

    def _take(self, character: str, expected: str) -> None:
        if self.peek() != character:
            raise self.fail(expected)
        self.position += 1

    def string(self) -> str:
        """One JSON string; lone surrogates are rejected because no writer could store them.

        The scanner gets a bounded stretch of the text: one wide character makes a whole string four times as large.
        """
        if self.peek() != '"':
            raise self.fail("a string")
        plain = _plain_string(self.text, self.position)
        if plain is not None and plain.end() - self.position <= MAX_STRING:
            self.position = plain.end()
            return _checked(plain[1])
        start = self.position + 1
        for limit in (STRING_SLICE, MAX_STRING):
            try:
                value, length = scanstring(self.text[start : start + limit], 0, True)
                break
            except json.JSONDecodeError as error:
                reason, at = error.msg, start + error.pos
        else:
            cut = len(self.text) - start > MAX_STRING and (at < start or at >= start + MAX_STRING - 12)
            if cut:  # unterminated, or an escape broken off, at the end of the stretch
                raise DirectoryError(f"JSON directory: a string of more than {MAX_STRING} characters")
            raise DirectoryError(f"JSON directory: {reason} at character {at}")
        self.position = start + length
        return _checked(value)

    def members(self, what: str, limit: int) -> Iterator[str]:
        """The member names of an object, in order; the caller consumes each value before the next name.

        Errors: not an object, a repeated name, more than `limit` members.
        """
        self._take("{", f"an object ({what})")
        seen: set[str] = set()
        if self.peek() == "}":
            self.position += 1
            return
        while True:
            name = self.string()
            if name in seen:
                raise DirectoryError(f"JSON directory repeats member {quoted(name)} of {what}")
            if len(seen) == limit:
                raise DirectoryError(f"JSON directory: {what} has more than {limit} members")
            seen.add(name)
            self._take(":", "a colon")
            yield name
            if self.peek() == "}":
                self.position += 1
                return
            self._take(",", "a comma or the end of an object")

    def elements(self, what: str, limit: int) -> Iterator[int]:
        """The indices of an array, in order; the caller consumes each element before the next index."""
        self._take("[", f"an array ({what})")
        if self.peek() == "]":
            self.position += 1
            return
        for index in range(limit):
            yield index
            if self.peek() == "]":
                self.position += 1
                return
            self._take(",", "a comma or the end of an array")
        raise DirectoryError(f"JSON directory: {what} has more than {limit} elements")

    def record(self, what: str) -> dict[str, Any]:
        """One object of a closed schema; the caller checks its members, objects inside it are `Pairs`."""
        return unique(self._record(what))

    def _record(self, what: str) -> Pairs:
        short = self.short_record(what)
        if short is not None:
            return short
        document_budget, self._open_values = self._open_values, MAX_RECORD_VALUES
        value = _pairs(self.open_value(what))
        self._open_values = document_budget
        return value  # type: ignore[no-any-return]

    def short_record(self, what: str) -> Pairs | None:
        """One object if it ends within RECORD_SLICE characters, read by the C scanner; else None, nothing consumed."""
        if self.peek() != "{":
            raise self.fail(f"an object ({what})")
        try:
            value, length = self._scan(self.text[self.position : self.position + RECORD_SLICE], 0)
        except (StopIteration, ValueError, RecursionError):
            return None
        self.position += length
        return value  # type: ignore[no-any-return]

    def record_array(self, what: str, limit: int) -> Iterator[Pairs]:
        """The objects of an array of closed-schema records. Errors: not an array of objects, more than `limit`."""
        for _, records in self.record_runs(what, limit):
            yield from records

    def record_runs(self, what: str, limit: int, spelling: Spelling | None = None) -> Iterator[tuple[Rows, Sequence[Pairs]]]:
        """As `record_array`, in runs: each the rows of consecutive elements of `spelling`, or records."""
        self._take("[", f"an array ({what})")
        if self.peek() == "]":
            self.position += 1
            return
        count = 0
        while True:
            rows = self._spelled(spelling, "},{")
            records: Sequence[Pairs] = ()
            if not rows:
                records = self._batch("[", "},{", "]") or (self._record(what),)
            strange = [value for value in records if type(value) is not tuple]
            if strange:
                raise DirectoryError(f"JSON directory: {what} may only hold objects, found {quoted(strange[0])}")
            count += len(rows) + len(records)
            if count > limit:
                raise DirectoryError(f"JSON directory: {what} has more than {limit} elements")
            yield rows, records
            if self.peek() == "]":
                self.position += 1
                return
            self._take(",", "a comma or the end of an array")

    def member_runs(
        self, what: str, limit: int, spelling: Spelling
    ) -> Iterator[tuple[Rows, Sequence[tuple[str, Pairs | None]]]]:
        """The members of an object whose values are closed-schema records, in runs: each the rows of consecutive members
        of `spelling`, whose first group is the name, or (name, record).

        A record of None means that the value was not read yet and the caller must consume it (it may be long); it is
        the only one of its run. Errors: not an object, a repeated name, a value that is no object, more than `limit`
        members.
        """
        self._take("{", f"an object ({what})")
        seen: set[str] = set()
        if self.peek() == "}":
            self.position += 1
            return
        while True:
            rows = self._spelled(spelling, '},"')
            records: Sequence[tuple[str, Pairs | None]] = ()
            if not rows:
                records = self._batch("{", '},"', "}") or (self._unread_member(what),)
                if any([value is not None and type(value) is not tuple for _, value in records]):
                    raise DirectoryError(f"JSON directory: {what} may only hold objects")
            names = [element[0] for element in rows or records]
            if len(set(names)) != len(names) or not seen.isdisjoint(names):
                repeated = next(name for at, name in enumerate(names) if name in seen or name in names[:at])
                raise DirectoryError(f"JSON directory repeats member {quoted(repeated)} of {what}")
            seen.update(names)
            if len(seen) > limit:
                raise DirectoryError(f"JSON directory: {what} has more than {limit} members")
            yield rows, records
            if self.peek() == "}":
                self.position += 1
                return
            self._take(",", "a comma or the end of an object")

    def _unread_member(self, what: str) -> tuple[str, Pairs | None]:
        name = self.string()
        self._take(":", "a colon")
        return name, self.short_record(what)

    def _spelled(self, spelling: Spelling | None, mark: str) -> Rows:
        """Rows of the elements up to the last `mark` within SPELLED_SLICE characters; none, and nothing consumed, when
        one of them is spelled otherwise. The stretch is then not tried again."""
        if spelling is None or self.position < self._unspelled:
            return []
        end = self.text.rfind(mark, self.position, self.position + SPELLED_SLICE)
        rows = spelling.rows(self.text[self.position : end + 1]) if end > 0 else []
        if rows:
            self.position = end + 1
        else:
            self._unspelled = self.position + SPELLED_SLICE
        return rows

    def _batch(self, opening: str, mark: str, closing: str) -> Any:
        """Whole elements up to the last `mark` within BATCH_SLICE characters, read by the C scanner, or None.

        The elements are wrapped in brackets of their own, so text that is not a run of whole elements is a syntax
        error. Then nothing is consumed, and the stretch is not tried again: the budgeted parser reads it.
        """
        if self.position < self._unbatched:
            return None
        stop = self._unspelled if self.position < self._unspelled else self.position + BATCH_SLICE
        end = self.text.rfind(mark, self.position, stop)
        if end < 0:
            self._unbatched = stop - len(mark)
            return None
        run = f"{opening}{self.text[self.position : end + 1]}{closing}"
        try:
            value, length = self._scan(run, 0)
        except (StopIteration, ValueError, RecursionError):
            length = 0
        if length != len(run):
            self._unbatched = end
            return None
        self.position = end + 1
        return value

    def open_value(self, what: str, depth: int = 0) -> Any:
        """Any JSON value, within the depth limit and the document-wide budget of open values."""
        if depth == MAX_DEPTH:
            raise DirectoryError(f"JSON directory: {what} is nested deeper than {MAX_DEPTH} levels")
        self._open_values -= 1
        if self._open_values < 0:
            raise DirectoryError(f"JSON directory: {what} holds more values than the reader's limit")
        first = self.peek()
        if first == '"':
            return self.string()
        if first == "{":
            return {name: self.open_value(what, depth + 1) for name in self.members(what, MAX_OPEN_VALUES)}
        if first == "[":
            return [self.open_value(what, depth + 1) for _ in self.elements(what, MAX_OPEN_VALUES)]
        for word, value in (("true", True), ("false", False), ("null", None)):
            if self.text.startswith(word, self.position):
                self.position += len(word)
                return value
        return self._number()

    def _number(self) -> int | float:
        match = _number(self.text, self.position, self.position + _MAX_NUMBER + 1)
        if match is None:
            raise self.fail("a JSON value")
        digits = match.group()
        if len(digits) > _MAX_NUMBER:
            raise DirectoryError(f"JSON directory: a number of more than {_MAX_NUMBER} digits")
        self.position = match.end()
        if digits.lstrip("-").isdigit():
            return self._parse_int(digits)
        return _finite(digits)
