"""The records of a version 3 directory, and the one spelling in which nearly all of them are written.

The largest published directory holds 65,000 bindings and uses. What a writer spells like `BINDING` or `USE` is taken
apart by one regular expression for many records at once; `directory_v3` reads everything else record by record.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import repeat
from operator import lt
from typing import Any, NamedTuple

from artifacts.container.json_reader import Rows, Spelling
from artifacts.container.schema import StoredObject
from artifacts.errors import DirectoryError, quoted

POLICIES = ("A16Only", "AllowA8", "AllowA4")


class FilePart(NamedTuple):
    """One file of the artifact: `path` None for the entry, else a name beside it; its share of the payload in bytes."""

    path: str | None
    payload_bytes: int


class Part(NamedTuple):
    """Elements [begin, end) of a tensor object, counted in its logical C order."""

    object: str
    begin: int
    end: int


class Binding(NamedTuple):
    """The elements of a logical parameter, in order. `whole`: the parameter has the shape of its one object."""

    parts: tuple[Part, ...]
    whole: bool


class Use(NamedTuple):
    """A product of `parameter` with the activation at `input`, and the activation precision it permits."""

    parameter: str
    input: str
    policy: str
    auxiliaries: dict[str, Binding]


@dataclass(frozen=True)
class Component:
    """`config` selects code; `resources` maps roles to resource objects; `proposal` is (domain, rows or None)."""

    config: dict[str, Any]
    target: str | None = None
    resources: dict[str, str] = field(default_factory=dict)
    proposal: tuple[str, int | None] | None = None


@dataclass
class DirectoryV3:
    """A whole directory; see artifact-container-v3.md section 3."""

    files: list[FilePart]
    objects: list[StoredObject]
    components: dict[str, Component]
    bindings: dict[str, Binding]
    uses: list[Use]
    metadata: dict[str, Any] | None = None
    provenance: dict[str, Any] | None = None

    @property
    def payload_bytes(self) -> int:
        """Length of the logical payload, all files together."""
        return sum(file.payload_bytes for file in self.files)


_TEXT = r'"([ !#-\[\]-~]+)"'  # printable ASCII without quotes and escapes: its JSON spelling is itself
_BEGIN, _END = "(0|[1-9][0-9]{0,18})", "([1-9][0-9]{0,18})"  # below 10^19, so below 2^64
BINDING = Spelling(
    rf'{_TEXT}:{{"parts":\[{{"object":{_TEXT},"range":\[{_BEGIN},{_END}\]}}\]}}', '"":{"parts":[{"object":"","range":[,]}]}'
)
USE = Spelling(
    rf'{{"parameter":{_TEXT},"input":{_TEXT},"activation_policy":"({"|".join(POLICIES)})"}}',
    '{"parameter":"","input":"","activation_policy":""}',
)


def not_ascending(span: Any) -> DirectoryError:
    """The error for a part whose range is empty, negative or too large."""
    return DirectoryError(f"range must be two ascending integers below 2^64, found {quoted(span)}")


def spelled_bindings(rows: Rows, names: dict[str, str]) -> list[tuple[str, Binding]]:
    """(name, binding) of members spelled like `BINDING`: name, object, begin, end. Errors: DirectoryError, empty range.

    `names` holds one copy of every name and is added to.
    """
    keys, parents, begins, ends = zip(*rows, strict=True)
    first, last = list(map(int, begins)), list(map(int, ends))
    if not all(map(lt, first, last)):
        name, begin, end = next((n, b, e) for n, b, e in zip(keys, first, last, strict=True) if b >= e)
        raise DirectoryError(f"binding {quoted(name)}: {not_ascending([begin, end])}")
    parts = _tuples(Part, zip(map(names.setdefault, parents, parents), first, last, strict=True))
    bindings = _tuples(Binding, zip(zip(parts, strict=True), repeat(False)))
    return list(zip(map(names.setdefault, keys, keys), bindings, strict=True))


def spelled_uses(rows: Rows, names: dict[str, str]) -> list[Use]:
    """The uses of elements spelled like `USE`: parameter, input, policy."""
    columns = [map(names.setdefault, column, column) for column in zip(*rows, strict=True)]
    return _tuples(Use, zip(*columns, [{} for _ in rows], strict=True))


def _tuples(kind: type[Any], rows: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Named tuples of complete rows; a call of the class would check each row's length in Python."""
    return list(map(tuple.__new__, repeat(kind), rows))
