"""Writing version 3 artifacts: directory padded with spaces, payload split over files of limited size.

Geometry and naming follow artifact-container-v3.md section 9.
"""

import os
import secrets
from dataclasses import replace
from pathlib import Path

from artifacts.container.directory_v3 import DirectoryV3, FilePart, encode_directory, parse_directory
from artifacts.container.json_reader import MAX_DIRECTORY_BYTES
from artifacts.container.output import OutputFile, require_space
from artifacts.container.payload import PART_HEADER_BYTES, PART_MAGIC
from artifacts.container.schema import METADATA_ALIGNMENT
from artifacts.container.writer import MAGIC_OF_VERSION, PayloadWriter
from artifacts.errors import LayoutError, OutputError
from artifacts.layouts import align_up

DEFAULT_FILE_LIMIT = 32_000_000_000
HEADER_BYTES = 32


def split_payload(payload_bytes: int, payload_start: int, limit: int, entry_name: str) -> list[FilePart]:
    """Shares of the payload per file, each file at most `limit` bytes with its framing.

    `payload_start`: where the payload begins in the entry. Errors: OutputError when the limit leaves no room.
    """
    if payload_start + payload_bytes <= limit:
        return [FilePart(None, payload_bytes)]
    entry_capacity = (limit - payload_start) // METADATA_ALIGNMENT * METADATA_ALIGNMENT
    part_capacity = (limit - PART_HEADER_BYTES) // METADATA_ALIGNMENT * METADATA_ALIGNMENT
    if entry_capacity <= 0 or part_capacity <= 0:
        raise OutputError(f"a file limit of {limit} bytes leaves no room for payload behind {payload_start} bytes of header")
    files = [FilePart(None, entry_capacity)]
    remaining = payload_bytes - entry_capacity
    while remaining > 0:
        share = min(part_capacity, remaining)
        files.append(FilePart(f"{entry_name}.part-{len(files):04d}", share))
        remaining -= share
    return files


def plan_files(directory: DirectoryV3, payload_bytes: int, limit: int, entry_name: str) -> tuple[bytes, list[FilePart]]:
    """Directory bytes, space-padded so that the payload starts right behind them, and the files of the artifact."""
    raw = encode_directory(directory, [FilePart(None, payload_bytes)])
    while True:
        payload_start = align_up(HEADER_BYTES + len(raw), METADATA_ALIGNMENT)
        files = split_payload(payload_bytes, payload_start, limit, entry_name)
        raw = encode_directory(directory, files)
        if HEADER_BYTES + len(raw) <= payload_start:
            break
    reserve = payload_start - HEADER_BYTES
    if reserve > MAX_DIRECTORY_BYTES:
        raise OutputError(f"the directory takes {reserve} bytes; at most {MAX_DIRECTORY_BYTES} are allowed")
    return raw.ljust(reserve, b" "), files


class ArtifactWriterV3(PayloadWriter):
    """Writes a version 3 artifact from a directory of placed objects; its `files` are recomputed from `limit`.

    The payload ends with the last object. `artifact_id`: 16 bytes, random when None. Publishes parts first, the entry
    last; replaces files only with `overwrite`. Errors: OutputError, LayoutError for unusable objects, DirectoryError and
    GeometryError when the directory breaks a rule.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        directory: DirectoryV3,
        *,
        limit: int = DEFAULT_FILE_LIMIT,
        artifact_id: bytes | None = None,
        overwrite: bool = False,
        sparse: bool = False,
    ) -> None:
        target = Path(path)
        for entry in directory.objects:
            if entry.problem is not None:
                raise LayoutError(entry.problem)
        if not directory.objects:
            raise OutputError("an artifact needs at least one object")
        payload_bytes = directory.objects[-1].offset + directory.objects[-1].bytes
        raw, files = plan_files(directory, payload_bytes, limit, target.name)
        parsed = parse_directory(raw, target.name)  # the reader's rules are the writer's checks
        for entry in parsed.objects:
            if entry.problem is not None:
                raise LayoutError(entry.problem)
        self.directory = replace(directory, files=files)
        self.artifact_id = secrets.token_bytes(16) if artifact_id is None else artifact_id
        if not sparse:
            framing = HEADER_BYTES + len(raw) + PART_HEADER_BYTES * (len(files) - 1)
            require_space(target.parent, payload_bytes + framing)
        segments: list[tuple[OutputFile, int, int]] = []
        try:
            for index, file in enumerate(files):
                start = PART_HEADER_BYTES if index else HEADER_BYTES + len(raw)
                path = target if file.path is None else target.parent / file.path
                output = OutputFile(path, start + file.payload_bytes, overwrite)
                segments.append((output, start, file.payload_bytes))
                if index:
                    header = PART_MAGIC + index.to_bytes(8, "little") + self.artifact_id
                else:
                    header = MAGIC_OF_VERSION[3] + len(raw).to_bytes(8, "little") + self.artifact_id + raw
                output.write_at(0, memoryview(header))
        except BaseException:
            for output, _, _ in segments:
                output.discard()
            raise
        super().__init__(directory.objects, segments, sparse)
