"""`open(path)`: one view of a `.ninfer` file of any version.

An `Artifact` names its objects by their binding names (v1, v2) or ids (v3) and its weights by *logical parameters*
(artifact-container-v3.md section 7), which version 1 and 2 files get from the published mapping (section 11).
"""

import hashlib
import os
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, NamedTuple, Self

import numpy as np

from artifacts.container.directory_v2 import Identity
from artifacts.container.directory_v2 import parse_directory as parse_directory_v2
from artifacts.container.directory_v3 import DirectoryV3, FilePart
from artifacts.container.directory_v3 import parse_directory as parse_directory_v3
from artifacts.container.json_reader import MAX_DIRECTORY_BYTES
from artifacts.container.payload import PART_HEADER_BYTES, Bytes, MappedFile, Payload, PayloadReader, Segment
from artifacts.container.schema import METADATA_ALIGNMENT, StoredObject, TensorObject
from artifacts.errors import DirectoryError, FramingError, IdentityError, LayoutError, PayloadError, quoted
from artifacts.identities.model import ModelView, RowView
from artifacts.layouts import align_up

MAGICS = {b"NINFER\x00\x01": 1, b"NINFER\x00\x02": 2, b"NINFER\x00\x03": 3}
MAX_RESOURCE_BYTES = 64 << 20
HEADER_BYTES = {1: 16, 2: 16, 3: 32}


class Frame(NamedTuple):
    """What the fixed header says: version, where the JSON lies, where the payload starts (bytes)."""

    version: int
    json_start: int
    json_bytes: int
    payload_start: int
    artifact_id: bytes


def read_frame(header: bytes, file_bytes: int) -> Frame:
    """Framing rules 1 to 3 of either specification on the first 32 bytes (fewer when the file is shorter).

    Errors: FramingError (too short, magic, directory length), DirectoryError (directory over 8 MiB).
    """
    if len(header) < 16:
        raise FramingError(f"{file_bytes} bytes are too few for a .ninfer header (16 bytes)")
    version = MAGICS.get(header[:8])
    if version is None:
        known = ", ".join(magic.hex() for magic in MAGICS)
        raise FramingError(f"not a .ninfer artifact: magic {header[:8].hex()}; known: {known}")
    start = HEADER_BYTES[version]
    if file_bytes < start:
        raise FramingError(f"{file_bytes} bytes are too few for a version {version} header ({start} bytes)")
    json_bytes = int.from_bytes(header[8:16], "little")
    if json_bytes == 0:
        raise FramingError("the directory length is 0; at least one byte is required")
    payload_start = align_up(start + json_bytes, METADATA_ALIGNMENT)
    if start + json_bytes > file_bytes or payload_start > file_bytes:
        raise FramingError(f"the directory of {json_bytes} bytes leaves the file of {file_bytes} bytes")
    if json_bytes > MAX_DIRECTORY_BYTES:
        raise DirectoryError(f"the JSON directory has {json_bytes} bytes; at most {MAX_DIRECTORY_BYTES} are allowed")
    return Frame(version, start, json_bytes, payload_start, header[16:32] if version == 3 else b"")


BACKUP_SUFFIXES = (".v1-metadata-backup", ".relabel-backup")
"""Names that in-place tools give to the saved metadata of a file while they rewrite it."""


def read_backup(path: Path, file_bytes: int) -> tuple[Frame, bytes]:
    """The frame and directory bytes of saved metadata for a file of `file_bytes`.

    A backup is complete when it is the header and directory of a version 1 or 2 file, fills exactly its own
    `[0, P)`, and its objects fit the payload of the file. Errors: ArtifactError subclasses.
    """
    backup = MappedFile(path)
    try:
        frame = read_frame(backup.data[:32].tobytes(), backup.size)
        if frame.version == 3 or frame.payload_start != backup.size or backup.size > file_bytes:
            raise FramingError(f"{quoted(path.name)} is not saved metadata of a file of {file_bytes} bytes")
        raw = backup.data[frame.json_start : frame.json_start + frame.json_bytes].tobytes()
        parse_directory_v2(raw, frame.version, file_bytes - backup.size)
    finally:
        backup.close()
    return frame, raw


class Artifact:
    """An open, container-valid artifact. Use `artifacts.open`, and `close` it or use it as a context manager.

    version: 1, 2 or 3. identity: `Identity(model_id, weights_id)`; a version 3 file has no identity, its
    `model_id` is the public name in its metadata or "". objects: name -> `TensorObject` | `ResourceObject`, in file
    order. directory_bytes: length of the JSON directory; directory_digest: SHA-256 hex digest of exactly those bytes.
    file_bytes: length of the file, of all files together for version 3 (parts are not opened for it).
    payload_bytes: length of the payload that offsets refer to. artifact_id: 16 bytes, version 3 only.
    recovered_from: None, or the backup whose directory is used because an in-place tool was interrupted.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        entry = MappedFile(self.path)
        try:
            self._load(entry)
        except BaseException:
            entry.close()
            raise

    def _load(self, entry: MappedFile) -> None:
        self._entry = entry
        self.recovered_from: Path | None = None
        try:
            frame = read_frame(entry.data[:32].tobytes(), entry.size)
            self._read_directory(frame, entry.data[frame.json_start : frame.json_start + frame.json_bytes])
        except (FramingError, DirectoryError):
            backup = next((b for s in BACKUP_SUFFIXES if (b := Path(f"{self.path}{s}")).exists()), None)
            if backup is None:
                raise
            frame, raw = read_backup(backup, entry.size)
            self._read_directory(frame, np.frombuffer(raw, np.uint8))
            self.recovered_from = backup

    def _read_directory(self, frame: Frame, json_text: Bytes) -> None:
        entry = self._entry
        self.version = frame.version
        self.artifact_id = frame.artifact_id
        self.directory_bytes = frame.json_bytes
        self.payload_start = frame.payload_start
        self._directory: Bytes | None = json_text
        raw = json_text.data
        self.directory_digest = hashlib.sha256(raw).hexdigest()
        self._v3: DirectoryV3 | None = None
        stored: list[StoredObject]
        if frame.version == 3:
            self._v3 = directory = parse_directory_v3(raw, self.path.name)
            length = frame.payload_start + directory.files[0].payload_bytes
            if entry.size != length:
                raise FramingError(f"the file has {entry.size} bytes; its directory requires exactly {length}")
            segments = [Segment(None, frame.payload_start, directory.files[0].payload_bytes)]
            for file in directory.files[1:]:
                assert file.path is not None
                segments.append(Segment(self.path.parent / file.path, PART_HEADER_BYTES, file.payload_bytes))
            name = (directory.metadata or {}).get("name", "")
            self.identity = Identity(name)
            stored = directory.objects
        else:
            old = parse_directory_v2(raw, frame.version, entry.size - frame.payload_start)
            segments = [Segment(None, frame.payload_start, entry.size - frame.payload_start)]
            self.identity = old.identity
            stored = old.objects
        self._payload = Payload(entry, segments, frame.artifact_id)
        self.payload_bytes = self._payload.bytes
        self.file_bytes = frame.payload_start + self.payload_bytes + PART_HEADER_BYTES * (len(segments) - 1)
        self.objects: Mapping[str, StoredObject] = MappingProxyType({entry.name: entry for entry in stored})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Release the mappings; arrays already handed out stay valid, further reads fail."""
        self._directory = None
        self._payload.close()

    def directory(self) -> Bytes:
        """The JSON directory bytes, exactly `directory_bytes` of them."""
        if self._directory is None:
            raise ValueError("the artifact is closed")
        return self._directory

    # Objects and payload

    def object(self, name: str) -> StoredObject:
        """The object called `name`. Errors: IdentityError when there is none, LayoutError when it is unusable."""
        entry = self.objects.get(name)
        if entry is None:
            raise IdentityError(f"{self.path.name}: no object {quoted(name)}")
        if entry.problem is not None:
            raise LayoutError(f"{self.path.name}: {entry.problem}")
        return entry

    def tensor(self, name: str) -> TensorObject:
        """The tensor object called `name`; errors as `object`, and IdentityError for a resource."""
        entry = self.object(name)
        if not isinstance(entry, TensorObject):
            raise IdentityError(f"{self.path.name}: object {quoted(name)} is a resource, not a tensor")
        return entry

    def read(self, offset: int, length: int) -> Bytes:
        """Payload bytes [offset, offset + length) as a read-only uint8 array, a view wherever one file holds them."""
        return self._payload.read(offset, length)

    def tensor_bytes(self, name: str, begin: int = 0, end: int | None = None) -> Bytes:
        """Encoded bytes [begin, end) of a tensor (default: all), a read-only uint8 array."""
        entry = self.tensor(name)
        stop = entry.bytes if end is None else end
        if not 0 <= begin <= stop <= entry.bytes:
            raise LayoutError(f"object {quoted(name)}: bytes [{begin}, {stop}) leave its {entry.bytes} bytes")
        return self._payload.read(entry.offset + begin, stop - begin)

    def reader(self) -> PayloadReader:
        """Reads payload bytes into memory of the caller, with file handles of its own; for one thread. To be closed."""
        return PayloadReader(self._payload)

    def resource(self, name: str, limit: int = MAX_RESOURCE_BYTES) -> bytes:
        """The bytes of a resource, by object name or, in version 3, by id.

        Errors: as `object`, IdentityError for a tensor, PayloadError when it is longer than `limit` bytes.
        """
        entry = self.object(name)
        if isinstance(entry, TensorObject):
            raise IdentityError(f"{self.path.name}: object {quoted(name)} is a tensor, not a resource")
        if entry.bytes > limit:
            raise PayloadError(f"{self.path.name}: resource {quoted(name)} has {entry.bytes} bytes; at most {limit} are read")
        return self._payload.read(entry.offset, entry.bytes).tobytes()

    def open_parts(self) -> None:
        """Open and check every continuation part now. Errors: PartError."""
        self._payload.open_all()

    def object_index(self, name: str) -> int:
        """Position of an object in the directory. Errors: IdentityError when there is none."""
        try:
            return self._positions[name]
        except KeyError:
            raise IdentityError(f"{self.path.name}: no object {quoted(name)}") from None

    @cached_property
    def _positions(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self.objects)}

    # The model

    @cached_property
    def model(self) -> ModelView:
        """Dimensions, logical parameters, uses and frontend files, the same for every version."""
        return ModelView(self)

    def text_config(self) -> dict[str, Any]:
        """The text configuration: of the registry, of `model/config.json`, or of the version 3 component `text`.

        Members are those of artifact-container-v3.md section 6, always flat. Errors: ConfigError.
        """
        config = self.model.config("text")
        assert config is not None
        return config

    def parameter(self, name: str) -> list[RowView]:
        """Row ranges of objects that hold a logical parameter such as `text/layers/3/attention/query`.

        Errors: IdentityError when there is none, LayoutError when it is not made of whole rows, ConfigError.
        """
        return self.model.parameter(name)

    # Version 3 records

    @property
    def files(self) -> list[FilePart]:
        """The files of the artifact; one entry for version 1 and 2."""
        return [FilePart(None, self.payload_bytes)] if self._v3 is None else self._v3.files

    @property
    def directory_v3(self) -> DirectoryV3:
        """The version 3 records. Errors: DirectoryError for other versions."""
        if self._v3 is None:
            raise DirectoryError(f"{self.path.name}: version {self.version} has no components, bindings or uses")
        return self._v3


def open(path: str | os.PathLike[str]) -> Artifact:
    """Open a version 1, 2 or 3 artifact and check its container rules in the order of the specifications.

    Nothing of the payload is read. Errors: the subclasses of ArtifactError in artifacts.errors, one line each.
    """
    return Artifact(path)


__all__ = ["Artifact", "RowView", "open"]
