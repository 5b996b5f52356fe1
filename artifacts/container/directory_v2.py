"""Version 1 and 2 directories: JSON text to checked objects and back (artifact-container.md sections 2 to 4).

Reader limits beyond the format: 32,768 objects.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from artifacts.container.json_reader import Buffer, JsonCursor, decode_text, unique
from artifacts.container.schema import (
    RESOURCE_ENCODING,
    TENSOR_ALIGNMENT,
    V1_FORMATS,
    ResourceObject,
    StoredObject,
    TensorObject,
    check_storage,
    dimensions,
    identifier,
    integer,
    require_members,
)
from artifacts.errors import DirectoryError, FormatError, GeometryError, LayoutError, quoted

MAX_OBJECTS = 32768
TENSOR_MEMBERS = frozenset(("name", "kind", "shape", "format", "layout", "offset", "bytes"))
RESOURCE_MEMBERS = frozenset(("name", "kind", "encoding", "offset", "bytes"))
NONE: frozenset[str] = frozenset()


class Identity(NamedTuple):
    """`model_id` / `weights_id`. Version 1 has no weights id; version 3 has neither, only an optional public name."""

    model_id: str
    weights_id: str | None = None

    def __str__(self) -> str:
        return self.model_id if self.weights_id is None else f"{self.model_id}/{self.weights_id}"


@dataclass(frozen=True)
class DirectoryV2:
    identity: Identity
    objects: list[StoredObject]


def parse_directory(raw: Buffer, version: int, payload_bytes: int) -> DirectoryV2:
    """Check a version 1 or 2 directory against the length of the payload region, in the order of the specification.

    Errors: DirectoryError (syntax, members, domains, names), FormatError and LayoutError (rule 9), GeometryError (11).
    """
    cursor = JsonCursor(decode_text(raw), negative_zero=False)
    identity: Identity | None = None
    objects: list[StoredObject] | None = None
    identity_member = "model_id" if version == 1 else "identity"
    for member in cursor.members("root", limit=4):
        if member == identity_member:
            identity = _identity(cursor, version)
        elif member == "objects":
            objects = []
            for index, record in enumerate(cursor.record_array("objects", MAX_OBJECTS)):
                objects.append(_object(unique(record), index, version))
        else:
            allowed = f"{identity_member}, objects"
            raise DirectoryError(f"root: unknown member {quoted(member)}; version {version} has {allowed}")
    cursor.end()
    if identity is None:
        raise DirectoryError(f"root: missing member {identity_member}")
    if objects is None:
        raise DirectoryError("root: missing member objects")
    if not objects:
        raise DirectoryError("objects: at least one object is required")
    check_geometry(objects, payload_bytes)
    return DirectoryV2(identity, objects)


def _identity(cursor: JsonCursor, version: int) -> Identity:
    if version == 1:
        return Identity(identifier(cursor.string(), "model_id", forbid_nul=False))
    record = cursor.record("identity")
    require_members(record, frozenset(("model_id", "weights_id")), NONE, "identity")
    return Identity(
        identifier(record["model_id"], "model_id", forbid_nul=False),
        identifier(record["weights_id"], "weights_id", forbid_nul=False),
    )


def _object(record: dict[str, Any], index: int, version: int) -> StoredObject:
    what = f"object {index}"
    kind = record.get("kind")
    if kind == "tensor":
        require_members(record, TENSOR_MEMBERS, NONE, what)
    elif kind == "resource":
        require_members(record, RESOURCE_MEMBERS, NONE, what)
    else:
        raise DirectoryError(f"{what}: kind must be 'tensor' or 'resource', found {quoted(kind)}")
    name = identifier(record["name"], f"{what} name", forbid_nul=False)
    what = f"object {quoted(name)}"
    offset = integer(record["offset"], 0, f"{what} offset")
    length = integer(record["bytes"], 1, f"{what} bytes")
    if kind == "resource":
        encoding = identifier(record["encoding"], f"{what} encoding", forbid_nul=False)
        if encoding != RESOURCE_ENCODING:
            raise FormatError(f"{what}: unknown encoding {quoted(encoding)}; known: {RESOURCE_ENCODING}")
        return ResourceObject(name, offset, length)
    tensor = TensorObject(
        name,
        dimensions(record["shape"], f"{what} shape"),
        identifier(record["format"], f"{what} format", forbid_nul=False),
        identifier(record["layout"], f"{what} layout", forbid_nul=False),
        offset,
        length,
    )
    if version == 1 and tensor.format not in V1_FORMATS:
        known = ", ".join(sorted(V1_FORMATS))
        raise FormatError(f"{what}: unknown format {quoted(tensor.format)}; version 1 knows {known}")
    check_storage(tensor)
    return tensor


def check_geometry(objects: Sequence[StoredObject], payload_bytes: int) -> None:
    """Unique names; ascending, aligned, disjoint ranges inside the payload. Errors: DirectoryError, GeometryError."""
    names: set[str] = set()
    cursor = 0
    for entry in objects:
        what = f"object {quoted(entry.name)}"
        if entry.name in names:
            raise DirectoryError(f"{what}: the name occurs twice")
        names.add(entry.name)
        if entry.offset < cursor:
            raise GeometryError(f"{what}: offset {entry.offset} lies before the end {cursor} of the previous object")
        if isinstance(entry, TensorObject) and entry.offset % TENSOR_ALIGNMENT:
            raise GeometryError(f"{what}: offset {entry.offset} is not a multiple of {TENSOR_ALIGNMENT}")
        cursor = entry.offset + entry.bytes
        if cursor > payload_bytes:
            raise GeometryError(f"{what}: ends at {cursor}, the payload has {payload_bytes} bytes")


def encode_directory(identity: Identity, objects: Iterable[StoredObject]) -> bytes:
    """The JSON bytes in the writer's spelling, byte-exact with published files; version 1 when weights_id is None.

    Errors: LayoutError or FormatError for an object that the version cannot hold.
    """
    identifier(identity.model_id, "model_id", forbid_nul=False)
    if identity.weights_id is not None:
        identifier(identity.weights_id, "weights_id", forbid_nul=False)
    entries: list[dict[str, Any]] = []
    for entry in objects:
        if isinstance(entry, TensorObject):
            if identity.weights_id is None and entry.format not in V1_FORMATS:
                raise FormatError(f"object {quoted(entry.name)}: version 1 cannot hold format {entry.format}")
            check_storage(entry)
            entries.append(
                {
                    "name": entry.name,
                    "kind": "tensor",
                    "shape": list(entry.shape),
                    "format": entry.format,
                    "layout": entry.layout,
                    "offset": entry.offset,
                    "bytes": entry.bytes,
                }
            )
        else:
            if entry.encoding != RESOURCE_ENCODING:
                raise LayoutError(f"object {quoted(entry.name)}: unknown encoding {quoted(entry.encoding)}")
            entries.append(
                {
                    "name": entry.name,
                    "kind": "resource",
                    "encoding": entry.encoding,
                    "offset": entry.offset,
                    "bytes": entry.bytes,
                }
            )
    root: dict[str, Any]
    if identity.weights_id is None:
        root = {"model_id": identity.model_id, "objects": entries}
    else:
        root = {
            "identity": {"model_id": identity.model_id, "weights_id": identity.weights_id},
            "objects": entries,
        }
    return json.dumps(root, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


__all__ = ["DirectoryV2", "Identity", "check_geometry", "encode_directory", "parse_directory"]
