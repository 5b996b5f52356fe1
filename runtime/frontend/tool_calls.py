"""Parses the tool calls that Qwen models write, guided by the declared parameter schemas.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    value (may span lines)
    </parameter>
    </function>
    </tool_call>

Several calls follow each other with whitespace only. One newline at each end of a value belongs to the markup.
Text of a parameter that admits strings stays text, whatever it looks like; other types are read as JSON. A value that
does not fit its type is passed on as a string, so that the caller can answer with an error. Anything malformed makes
the whole region ordinary text. Format: spec "Output parsing", schema-aware variant.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.frontend.messages import NAME

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
SPACE = " \t\r\n"
MAX_KEY_CHARS = 256
MAX_SCHEMA_VISITS = 256

_FUNCTION = re.compile(r"<function=([^<>\s]+)>")
_PARAMETER = re.compile(r"<parameter=([^<>\r\n]+)>")
_BOUNDARY = re.compile(r"<parameter=[^<>\r\n]+>|</parameter>")

Json = Mapping[str, Any]
Types = frozenset[str] | None
"""JSON schema types that a parameter admits; None when the schema does not say."""


@dataclass(frozen=True)
class ToolCall:
    """One call: name of a declared tool and its arguments as the JSON text of an object, members in source order."""

    name: str
    arguments: str


class _Malformed(Exception):
    pass


def parse_tool_calls(region: str, tools: Sequence[Json]) -> list[ToolCall] | None:
    """The calls of a text that starts with `<tool_call>`, or None when it is not a sequence of well-formed calls.

    Undeclared tools, repeated parameters, unclosed tags and text between or after the calls are malformed.
    """
    declared = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    calls = []
    position = 0
    try:
        while position < len(region):
            call, position = _call(region, position, declared)
            calls.append(call)
            position = _skip(region, position)
    except _Malformed:
        return None
    return calls or None


def _skip(text: str, position: int) -> int:
    while position < len(text) and text[position] in SPACE:
        position += 1
    return position


def _expect(text: str, position: int, tag: str) -> int:
    if not text.startswith(tag, position):
        raise _Malformed
    return position + len(tag)


def _call(text: str, position: int, declared: Mapping[str, Any]) -> tuple[ToolCall, int]:
    position = _skip(text, _expect(text, position, OPEN))
    head = _FUNCTION.match(text, position)
    if head is None or not NAME.fullmatch(head[1]) or head[1] not in declared:
        raise _Malformed
    schema = declared[head[1]]
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        properties = {}
    arguments: dict[str, Any] = {}
    seen: set[str] = set()
    position = _skip(text, head.end())
    while parameter := _PARAMETER.match(text, position):
        key = parameter[1]
        if key in seen or len(key) > MAX_KEY_CHARS:
            raise _Malformed
        seen.add(key)
        end, position = _value_end(text, parameter.end())
        value = text[parameter.end() : end].removeprefix("\n").removesuffix("\n")
        types = _types(properties[key], schema) if key in properties else None
        converted = _convert(value, types)
        if converted is not _OMITTED:
            arguments[key] = converted
        position = _skip(text, position)
    position = _skip(text, _expect(text, position, "</function>"))
    return ToolCall(head[1], json.dumps(arguments, ensure_ascii=False)), _expect(text, position, CLOSE)


def _value_end(text: str, position: int) -> tuple[int, int]:
    """Start and end of the `</parameter>` that closes a value, nested pairs being part of the value."""
    depth = 1
    for boundary in _BOUNDARY.finditer(text, position):
        depth += 1 if boundary[0] != "</parameter>" else -1
        if depth == 0:
            return boundary.start(), boundary.end()
    raise _Malformed


_OMITTED = object()


def _convert(text: str, types: Types) -> Any:
    """Value of a parameter text under the types its schema admits; `_OMITTED` for an empty text of another type."""
    if types is None:
        found = _json(text.strip())
        return text if found is _OMITTED else found
    if "string" in types:
        return text
    trimmed = text.strip()
    if not trimmed:
        return _OMITTED
    if "boolean" in types and trimmed.lower() in ("true", "false"):
        return trimmed.lower() == "true"
    found = _json(trimmed)
    return found if found is not _OMITTED and _fits(found, types) else text


def _json(text: str) -> Any:
    """A JSON value, or `_OMITTED` when the text is none (or holds what JSON cannot carry on: NaN, lone surrogates)."""
    def refuse(*_: Any) -> Any:
        raise ValueError

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        return made if len(made) == len(pairs) else refuse()

    try:
        value = json.loads(text, parse_constant=refuse, object_pairs_hook=members)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (ValueError, RecursionError):
        return _OMITTED
    return value


def _fits(value: Any, types: frozenset[str]) -> bool:
    if value is None:
        return "null" in types
    if isinstance(value, bool):
        return "boolean" in types
    if isinstance(value, int | float):
        return "number" in types or ("integer" in types and (isinstance(value, int) or value.is_integer()))
    if isinstance(value, list):
        return "array" in types
    return "object" in types if isinstance(value, dict) else "string" in types


def _types(schema: Any, root: Json, visits: list[int] | None = None) -> Types:
    """Types that a schema admits, through `type`, `enum`, `const`, `anyOf`, `oneOf`, `allOf`, `nullable` and local
    references. `visits` counts the schemas looked at: references can multiply without end."""
    visits = [0] if visits is None else visits
    visits[0] += 1
    if not isinstance(schema, dict) or visits[0] > MAX_SCHEMA_VISITS:
        return None
    found: Types = None
    kind = schema.get("type")
    if isinstance(kind, str):
        found = frozenset((kind,))
    elif isinstance(kind, list) and all(isinstance(item, str) for item in kind):
        found = frozenset(kind)
    elif isinstance(schema.get("enum"), list):
        found = frozenset(_name(item) for item in schema["enum"])
    elif "const" in schema:
        found = frozenset((_name(schema["const"]),))
    elif isinstance(schema.get("$ref"), str):
        found = _types(_resolve(schema["$ref"], root), root, visits)
    else:
        for member in ("anyOf", "oneOf", "allOf"):
            options = schema.get(member)
            if isinstance(options, list) and options:
                kinds = [_types(option, root, visits) for option in options]
                known = [item for item in kinds if item is not None]
                if member == "allOf" and known:
                    found = frozenset.intersection(*known)
                elif len(known) == len(kinds):
                    found = frozenset.union(*known)
                break
    return found | {"null"} if found is not None and schema.get("nullable") is True else found


def _name(value: Any) -> str:
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "object"


def _resolve(reference: str, root: Json) -> Any:
    """Target of a reference such as `#/$defs/city`; None when there is none."""
    if not reference.startswith("#/"):
        return None
    target: Any = root
    for step in reference[2:].split("/"):
        target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
    return target
