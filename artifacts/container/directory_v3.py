"""Version 3 directories: files, objects, components, bindings and uses (artifact-container-v3.md sections 3 and 4).

Reader limits beyond the format: 131,072 records in all (objects, bindings and their parts, uses and their
auxiliaries, components and their resources), of which at most 32,768 objects and 4,096 files.
"""

import json
from collections.abc import Iterable
from typing import Any

from artifacts.container.directory_v2 import MAX_OBJECTS
from artifacts.container.json_reader import Buffer, JsonCursor, collector_paused, decode_text, unique
from artifacts.container.records_v3 import (
    BINDING,
    POLICIES,
    USE,
    Binding,
    Component,
    DirectoryV3,
    FilePart,
    Part,
    Use,
    not_ascending,
    spelled_bindings,
    spelled_uses,
)
from artifacts.container.schema import (
    CANONICAL_NAMES,
    RESOURCE_ENCODING,
    TENSOR_ALIGNMENT,
    U64_LIMIT,
    V3_NAMES,
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

MAX_RECORDS = 131072
MAX_FILES = 4096
ROOT_MEMBERS = ("files", "objects", "components", "bindings", "uses", "metadata", "provenance")
TENSOR_MEMBERS = frozenset(("id", "kind", "shape", "format", "layout", "offset", "bytes"))
RESOURCE_MEMBERS = frozenset(("id", "kind", "encoding", "offset", "bytes"))
USE_MEMBERS, USE_OPTIONAL = frozenset(("parameter", "input")), frozenset(("activation_policy", "auxiliaries"))
NONE: frozenset[str] = frozenset()


class _Reader:
    """One pass over the text into compact records; references are resolved afterwards, in specification order."""

    def __init__(self, raw: Buffer) -> None:
        self.cursor = JsonCursor(decode_text(raw), negative_zero=True)
        self.records = 0
        self.names: dict[str, str] = {}  # one copy of each object id, however often bindings repeat it

    def count(self, records: int = 1) -> None:
        self.records += records
        if self.records > MAX_RECORDS:
            raise DirectoryError(f"JSON directory holds more than {MAX_RECORDS} records")

    def shared(self, value: Any, what: str) -> str:
        if type(value) is str:
            known = self.names.get(value)
            if known is not None:
                return known
        name = identifier(value, what, forbid_nul=True)
        return self.names.setdefault(name, name)

    def read(self) -> DirectoryV3:
        found: dict[str, Any] = {}
        for member in self.cursor.members("root", limit=len(ROOT_MEMBERS) + 1):
            if member not in ROOT_MEMBERS:
                raise DirectoryError(f"root: unknown member {quoted(member)}; allowed: {', '.join(ROOT_MEMBERS)}")
            found[member] = getattr(self, f"_{member}")()
        self.cursor.end()
        for member in ROOT_MEMBERS[:5]:
            if member not in found:
                raise DirectoryError(f"root: missing member {member}")
        return DirectoryV3(**found)

    def _files(self) -> list[FilePart]:
        files: list[FilePart] = []
        for index, pairs in enumerate(self.cursor.record_array("files", MAX_FILES)):
            what, record = f"file {index}", unique(pairs)
            require_members(record, frozenset(("path", "payload_bytes")), NONE, what)
            path = record["path"]
            if index == 0:
                if path is not None:
                    raise DirectoryError(f"{what}: the path of the entry must be null, found {quoted(path)}")
            else:
                path = identifier(path, f"{what} path", forbid_nul=True)
                if path in (".", "..") or "/" in path or "\\" in path:
                    raise DirectoryError(f"{what}: path {quoted(path)} must be a plain file name")
            files.append(FilePart(path, integer(record["payload_bytes"], 1, f"{what} payload_bytes")))
        return files

    def _objects(self) -> list[StoredObject]:
        objects: list[StoredObject] = []
        for index, record in enumerate(self.cursor.record_array("objects", MAX_OBJECTS)):
            self.count()
            objects.append(self._object(unique(record), f"object {index}"))
        return objects

    def _object(self, record: dict[str, Any], what: str) -> StoredObject:
        kind = record.get("kind")
        if kind == "tensor":
            require_members(record, TENSOR_MEMBERS, NONE, what)
        elif kind == "resource":
            require_members(record, RESOURCE_MEMBERS, NONE, what)
        else:
            raise DirectoryError(f"{what}: kind must be 'tensor' or 'resource', found {quoted(kind)}")
        name = self.shared(record["id"], f"{what} id")
        what = f"object {quoted(name)}"
        offset = integer(record["offset"], 0, f"{what} offset")
        length = integer(record["bytes"], 1, f"{what} bytes")
        if kind == "resource":
            encoding = self.shared(record["encoding"], f"{what} encoding")
            known = CANONICAL_NAMES.get(encoding) == RESOURCE_ENCODING
            problem = None if known else f"{what}: unknown encoding {quoted(encoding)}; known: raw_bytes_v1"
            return ResourceObject(name, offset, length, RESOURCE_ENCODING if known else encoding, problem)
        shape = dimensions(record["shape"], f"{what} shape")
        format = self.shared(record["format"], f"{what} format")
        layout = self.shared(record["layout"], f"{what} layout")
        tensor = TensorObject(
            name, shape, CANONICAL_NAMES.get(format, format), CANONICAL_NAMES.get(layout, layout), offset, length
        )
        problem = _storage_problem(tensor, format, layout)
        if problem is None:
            return tensor
        return TensorObject(name, shape, tensor.format, tensor.layout, offset, length, problem)

    def _components(self) -> dict[str, Component]:
        components: dict[str, Component] = {}
        for name in self.cursor.members("components", MAX_RECORDS):
            self.count()
            what = f"component {quoted(identifier(name, 'component', forbid_nul=True))}"
            members: dict[str, Any] = {}
            for member in self.cursor.members(what, limit=5):
                if member not in ("config", "target", "resources", "proposal"):
                    raise DirectoryError(f"{what}: unknown member {quoted(member)}")
                members[member] = self.cursor.open_value(f"{what} {member}")
            if type(members.get("config")) is not dict:
                raise DirectoryError(f"{what}: config must be an object")
            if "target" in members:
                identifier(members["target"], f"{what} target", forbid_nul=True)
            resources = members.get("resources", {})
            if type(resources) is not dict:
                raise DirectoryError(f"{what}: resources must be an object")
            for role, reference in resources.items():
                self.count()
                identifier(role, f"{what} resource role", forbid_nul=True)
                identifier(reference, f"{what} resource {quoted(role)}", forbid_nul=True)
            proposal = _proposal(members["proposal"], name, what) if "proposal" in members else None
            components[name] = Component(members["config"], members.get("target"), resources, proposal)
        return components

    def _bindings(self) -> dict[str, Binding]:
        bindings: dict[str, Binding] = {}
        for rows, records in self.cursor.member_runs("bindings", MAX_RECORDS, BINDING):
            self.count(2 * len(rows))
            if rows:
                bindings.update(spelled_bindings(rows, self.names))
            for name, record in records:
                try:
                    self.count()
                    key = self.shared(name, "name")
                    bindings[key] = self._long_binding() if record is None else self._binding(record)
                except DirectoryError as error:
                    raise DirectoryError(f"binding {quoted(name)}: {error}") from None
        return bindings

    def _long_binding(self) -> Binding:
        """A binding too long for one record: a parameter of many parts, read part by part."""
        parts: list[Part] = []
        for member in self.cursor.members("binding", limit=1):
            if member != "parts":
                raise DirectoryError(f"unknown member {quoted(member)}; allowed: object, or parts")
            for part in self.cursor.record_array("parts", MAX_RECORDS):
                self.count()
                parts.append(self._part(part))
        return Binding(tuple(parts), False)

    def _binding(self, record: Any) -> Binding:
        if type(record) is not tuple or len(record) != 1:
            raise DirectoryError("exactly one member is required, object or parts")
        ((member, value),) = record
        if member == "parts" and type(value) is list:
            self.count(1 + len(value))
            return Binding(tuple([self._part(part) for part in value]), False)
        if member != "object":
            raise DirectoryError("one member is required: object, or parts as a nonempty array")
        self.count()
        return Binding((Part(self.shared(value, "object"), 0, 0),), True)

    def _part(self, record: Any) -> Part:
        if type(record) is not tuple or len(record) != 2:
            raise DirectoryError(f"each part must have exactly the members object and range, found {quoted(record)}")
        (first, name), (second, span) = record
        if first == "range":
            first, name, second, span = second, span, first, name
        if first != "object" or second != "range":
            raise DirectoryError(f"each part must have exactly the members object and range, found {quoted(record)}")
        if type(span) is not list or len(span) != 2:
            raise DirectoryError(f"range must be two integers, found {quoted(span)}")
        begin, end = span
        if type(begin) is not int or type(end) is not int or not 0 <= begin < end < U64_LIMIT:
            raise not_ascending(span)
        return Part(self.shared(name, "object"), begin, end)

    def _uses(self) -> list[Use]:
        uses: list[Use] = []
        for rows, records in self.cursor.record_runs("uses", MAX_RECORDS, USE):
            self.count(len(rows))
            if rows:
                uses.extend(spelled_uses(rows, self.names))
            for record in records:
                self.count()
                try:
                    uses.append(self._use(unique(record)))
                except DirectoryError as error:
                    raise DirectoryError(f"use {len(uses)}: {error}") from None
        return uses

    def _use(self, record: dict[str, Any]) -> Use:
        require_members(record, USE_MEMBERS, USE_OPTIONAL, "use")
        policy = record.get("activation_policy", "A16Only")
        if policy not in POLICIES:
            raise DirectoryError(f"policy {quoted(policy)} is not one of {', '.join(POLICIES)}")
        auxiliaries: Any = record.get("auxiliaries", ())
        if type(auxiliaries) is not tuple:
            raise DirectoryError("auxiliaries must be an object")
        return Use(
            self.shared(record["parameter"], "parameter"),
            self.shared(record["input"], "input"),
            POLICIES[POLICIES.index(policy)],
            {self.shared(role, "role"): self._binding(value) for role, value in unique(auxiliaries).items()},
        )

    def _metadata(self) -> dict[str, Any]:
        value = self._open_object("metadata")
        if "name" in value:
            identifier(value["name"], "metadata name", forbid_nul=True)
        return value

    def _provenance(self) -> dict[str, Any]:
        return self._open_object("provenance")

    def _open_object(self, what: str) -> dict[str, Any]:
        value = self.cursor.open_value(what)
        if type(value) is not dict:
            raise DirectoryError(f"{what}: expected an object, found {quoted(value)}")
        return value


def _proposal(record: Any, component: str, what: str) -> tuple[str, int | None]:
    if component != "text":
        raise DirectoryError(f"{what}: only component text may have a proposal")
    if type(record) is not dict:
        raise DirectoryError(f"{what}: proposal must be an object")
    require_members(record, frozenset(("domain",)), frozenset(("rows",)), f"{what} proposal")
    if record["domain"] == "full" and "rows" not in record:
        return "full", None
    if record["domain"] == "indexed" and "rows" in record:
        return "indexed", integer(record["rows"], 1, f"{what} proposal rows")
    raise DirectoryError(f"{what}: proposal must be domain full without rows, or domain indexed with rows")


def _storage_problem(tensor: TensorObject, format: str, layout: str) -> str | None:
    """Rule 6 of version 3, which makes only the object unusable. `format` and `layout` are the names in the file."""
    what = f"object {quoted(tensor.name)}"
    if format not in CANONICAL_NAMES or layout not in CANONICAL_NAMES:
        unknown = format if format not in CANONICAL_NAMES else layout
        return f"{what}: unknown format or layout {quoted(unknown)}; version 3 knows {', '.join(CANONICAL_NAMES)}"
    if tensor.offset % TENSOR_ALIGNMENT:
        return f"{what}: offset {tensor.offset} is not a multiple of {TENSOR_ALIGNMENT}"
    try:
        check_storage(tensor)
    except (FormatError, LayoutError) as error:
        return str(error)
    return None


def elements(tensor: TensorObject) -> int:
    """Number of logical elements of a tensor."""
    count = 1
    for dimension in tensor.shape:
        count *= dimension
    return count


def parse_directory(raw: Buffer, entry_name: str) -> DirectoryV3:
    """Check a version 3 directory; `entry_name` is the file name of the entry as it was opened.

    Errors: DirectoryError, GeometryError. Object storage problems are recorded in the objects, not raised.
    """
    with collector_paused():
        directory = _Reader(raw).read()
        check_references(directory, entry_name)
    return directory


def check_references(directory: DirectoryV3, entry_name: str) -> None:
    """Everything that relates records to each other, in specification order; resolves whole-object bindings."""
    _check_files(directory.files, entry_name)
    tensors, resources = _check_objects(directory.objects, directory.payload_bytes)
    if "text" not in directory.components:
        raise DirectoryError("components: component text is required")
    for name, component in directory.components.items():
        what = f"component {quoted(name)}"
        if component.target is not None and component.target not in directory.components:
            raise DirectoryError(f"{what}: target {quoted(component.target)} is not a component")
        for role, reference in component.resources.items():
            if reference not in resources:
                raise DirectoryError(f"{what}: resource {quoted(role)}: {quoted(reference)} is not a resource object")
    sizes = {name: elements(tensor) for name, tensor in tensors.items()}
    size_of = sizes.get
    for name, binding in directory.bindings.items():
        parts, whole = binding
        if len(parts) == 1 and not whole:  # the common case, without a call
            parent, _, end = parts[0]
            if end <= size_of(parent, 0):
                continue
        try:
            directory.bindings[name] = _resolve(binding, sizes)
        except DirectoryError as error:
            raise DirectoryError(f"binding {quoted(name)}: {error}") from None
    _check_uses(directory, sizes)


def _check_uses(directory: DirectoryV3, sizes: dict[str, int]) -> None:
    bindings, uses = directory.bindings, directory.uses
    parameters = [use.parameter for use in uses]
    places = set(zip(parameters, [use.input for use in uses], strict=True))
    if len(places) != len(uses) or not bindings.keys() >= set(parameters):  # some use is wrong: find the first
        seen: set[tuple[str, str]] = set()
        for index, use in enumerate(uses):
            if use.parameter not in bindings:
                raise DirectoryError(f"use {index}: parameter {quoted(use.parameter)} has no binding")
            key = (use.parameter, use.input)
            if key in seen:
                raise DirectoryError(f"use {index}: parameter {quoted(key[0])} and input {quoted(key[1])} occur twice")
            seen.add(key)
    for index, use in enumerate(uses):
        if not use.auxiliaries:
            continue
        for role, binding in use.auxiliaries.items():
            try:
                use.auxiliaries[role] = _resolve(binding, sizes)
            except DirectoryError as error:
                raise DirectoryError(f"use {index}: auxiliary {quoted(role)}: {error}") from None


def _check_files(files: list[FilePart], entry_name: str) -> None:
    if not files:
        raise DirectoryError("files: at least one file is required")
    names = {entry_name}
    for index, file in enumerate(files[1:], start=1):
        if file.path is None or file.path in names:
            raise DirectoryError(f"file {index}: path {quoted(file.path)} occurs twice or names the entry itself")
        names.add(file.path)
    if sum(file.payload_bytes for file in files) >= U64_LIMIT:
        raise GeometryError("files: the payload lengths add up to more than 2^64-1 bytes")


def _check_objects(objects: list[StoredObject], payload_bytes: int) -> tuple[dict[str, TensorObject], set[str]]:
    if not objects:
        raise DirectoryError("objects: at least one object is required")
    tensors: dict[str, TensorObject] = {}
    resources: set[str] = set()
    cursor = 0
    for entry in objects:
        what = f"object {quoted(entry.name)}"
        if entry.name in tensors or entry.name in resources:
            raise DirectoryError(f"{what}: the id occurs twice")
        if isinstance(entry, TensorObject):
            tensors[entry.name] = entry
        else:
            resources.add(entry.name)
        if entry.offset < cursor:
            raise GeometryError(f"{what}: offset {entry.offset} lies before the end {cursor} of the previous object")
        cursor = entry.offset + entry.bytes
        if cursor > payload_bytes:
            raise GeometryError(f"{what}: ends at {cursor}, the payload has {payload_bytes} bytes")
    return tensors, resources


def _resolve(binding: Binding, sizes: dict[str, int]) -> Binding:
    """Check a binding against the element counts of the tensors; a whole-object binding gets its range."""
    if not binding.parts:
        raise DirectoryError("parts must be a nonempty array")
    total = 0
    for part in binding.parts:
        size = sizes.get(part.object)
        if size is None:
            raise DirectoryError(f"{quoted(part.object)} is not a tensor object")
        if binding.whole:
            return Binding((Part(part.object, 0, size),), True)
        if part.end > size:
            raise DirectoryError(f"range [{part.begin}, {part.end}) leaves the {size} elements of its object")
        total += part.end - part.begin
    if total >= U64_LIMIT:
        raise DirectoryError("the parts cover more than 2^64-1 elements")
    return binding


def _encode_binding(binding: Binding) -> dict[str, Any]:
    if binding.whole:
        return {"object": binding.parts[0].object}
    return {"parts": [{"object": part.object, "range": [part.begin, part.end]} for part in binding.parts]}


def _encode_object(entry: StoredObject) -> dict[str, Any]:
    if isinstance(entry, TensorObject):
        return {
            "id": entry.name,
            "shape": list(entry.shape),
            "format": V3_NAMES.get(entry.format, entry.format),
            "layout": V3_NAMES.get(entry.layout, entry.layout),
            "offset": entry.offset,
            "bytes": entry.bytes,
            "kind": "tensor",
        }
    return {
        "id": entry.name,
        "encoding": V3_NAMES.get(entry.encoding, entry.encoding),
        "offset": entry.offset,
        "bytes": entry.bytes,
        "kind": "resource",
    }


def _encode_component(component: Component) -> dict[str, Any]:
    record: dict[str, Any] = {"config": component.config}
    if component.target is not None:
        record["target"] = component.target
    if component.resources:
        record["resources"] = component.resources
    if component.proposal is not None:
        domain, rows = component.proposal
        record["proposal"] = {"domain": domain} if rows is None else {"domain": domain, "rows": rows}
    return record


def _encode_use(use: Use) -> dict[str, Any]:
    record: dict[str, Any] = {"parameter": use.parameter, "input": use.input, "activation_policy": use.policy}
    if use.auxiliaries:
        record["auxiliaries"] = {role: _encode_binding(binding) for role, binding in use.auxiliaries.items()}
    return record


def encode_directory(directory: DirectoryV3, files: Iterable[FilePart] | None = None) -> bytes:
    """Compact JSON bytes without trailing space; `files` replaces those of the directory. No checks: see writer_v3."""
    root: dict[str, Any] = {
        "components": {name: _encode_component(c) for name, c in directory.components.items()},
        "objects": [_encode_object(entry) for entry in directory.objects],
        "bindings": {name: _encode_binding(binding) for name, binding in directory.bindings.items()},
        "uses": [_encode_use(use) for use in directory.uses],
    }
    if directory.metadata is not None:
        root["metadata"] = directory.metadata
    if directory.provenance is not None:
        root["provenance"] = directory.provenance
    root["files"] = [
        {"path": file.path, "payload_bytes": file.payload_bytes}
        for file in (directory.files if files is None else files)
    ]
    return json.dumps(root, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


__all__ = [
    "Binding",
    "Component",
    "DirectoryV3",
    "FilePart",
    "Part",
    "Use",
    "check_references",
    "encode_directory",
    "parse_directory",
]
