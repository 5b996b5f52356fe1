"""`migrate`: a version 1 artifact becomes version 2 in place (artifact-container.md section 6).

Only the metadata before the payload is rewritten. Files of the registered version 1 models must hold exactly the
published object list; other files keep their objects and get the weights id that the caller names.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from artifacts.container.artifact import Artifact
from artifacts.container.directory_v2 import Identity, encode_directory
from artifacts.container.schema import StoredObject, TensorObject, place
from artifacts.container.writer import MAGIC_OF_VERSION
from artifacts.errors import ArtifactError, IdentityError, OutputError, quoted
from artifacts.identities.registry import REGISTRY, RegisteredIdentity
from artifacts.layouts import align_up
from artifacts.tools.inplace import Disk, Rewrite, header_bytes

BACKUP_SUFFIX = ".v1-metadata-backup"
HASH_BYTES = 16 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Migration:
    """What was done or would be done. `already`: the file is version 2; `recovered`: an interrupted run was undone."""

    identity: Identity
    already: bool
    recovered: bool
    payload_start: int
    old_directory_bytes: int
    new_directory_bytes: int


def migrate(
    path: Path,
    weights_id: str = "groupwise-int",
    require_published: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    disk: Disk | None = None,
) -> Migration:
    """Migrate `path` in place, or finish what an interrupted run left.

    require_published: the directory and the whole file must also have the published SHA-256. dry_run: check only,
    write nothing. A file that is version 2 already succeeds. Errors: IdentityError (not the published inventory, a
    version 3 file), OutputError (the payload would have to move, unwritable), and those of `artifacts.open`.
    """
    path = path.resolve()
    rewrite = Rewrite(path, BACKUP_SUFFIX, disk)
    saved_version = rewrite.backup_version()
    with Artifact(path) as artifact:  # reads the backup's directory when the file is torn
        version, torn = artifact.version, artifact.recovered_from is not None
    if version == 3:
        raise IdentityError(f"{path.name}: is version 3; only version 1 is migrated")
    if version == 2 and not torn:
        if saved_version is not None and not dry_run:
            rewrite.discard_backup()
        return _result(path, already=True, recovered=False)
    if dry_run:
        return _plan(path, weights_id, require_published, progress, recovered=torn)[0]
    if saved_version is not None:
        rewrite.recover()
    result, header = _plan(path, weights_id, require_published, progress, recovered=torn)
    rewrite.apply(header)
    try:
        _check(path, result)
    except ArtifactError as error:
        rewrite.recover()
        raise OutputError(f"{path.name}: the new directory did not read back ({error}); the old one was restored") from None
    rewrite.discard_backup()
    return result


def _result(path: Path, already: bool, recovered: bool) -> Migration:
    with Artifact(path) as artifact:
        length = artifact.directory_bytes
        return Migration(artifact.identity, already, recovered, artifact.payload_start, length, length)


def _plan(
    path: Path, weights_id: str, require_published: bool, progress: Progress | None, recovered: bool
) -> tuple[Migration, bytes]:
    """Check the version 1 file and encode its version 2 metadata."""
    with Artifact(path) as artifact:
        objects = list(artifact.objects.values())
        published = _published(artifact.identity.model_id)
        if published is not None:
            _require_inventory(artifact, published, objects)
        if require_published:
            _require_hashes(artifact, published, progress)
        identity = Identity(artifact.identity.model_id, weights_id)
        if published is not None and identity != published.identity:
            raise IdentityError(f"{path.name}: weights id of {identity.model_id} must be {published.identity.weights_id}")
        directory = encode_directory(identity, objects)
        start = align_up(16 + len(directory), 4096)
        if start != artifact.payload_start:
            raise OutputError(
                f"{path.name}: the new directory of {len(directory)} bytes would move the payload from "
                f"{artifact.payload_start} to {start}"
            )
        header = header_bytes(MAGIC_OF_VERSION[2], directory, start)
        return Migration(identity, False, recovered, start, artifact.directory_bytes, len(directory)), header


def _published(model_id: str) -> RegisteredIdentity | None:
    return REGISTRY.get(Identity(model_id, "groupwise-int"))


def _require_inventory(artifact: Artifact, entry: RegisteredIdentity, objects: list[StoredObject]) -> None:
    """Every entry equals the replanned inventory; only resource lengths come from the file."""
    lengths = {o.name: o.bytes for o in objects if not isinstance(o, TensorObject)}
    expected = place(entry.plan(lengths)) if list(lengths) == list(entry.resources) else []
    for want, found in zip(expected, objects, strict=False):
        if want != found:
            raise IdentityError(f"{artifact.path.name}: object {quoted(found.name)} differs from {entry.identity}")
    if len(expected) != len(objects):
        raise IdentityError(
            f"{artifact.path.name}: {len(objects)} objects do not match the inventory of {entry.identity}"
        )
    end = objects[-1].offset + objects[-1].bytes
    if end != artifact.payload_bytes:
        raise IdentityError(f"{artifact.path.name}: {artifact.payload_bytes - end} bytes follow the last object")


def _require_hashes(artifact: Artifact, entry: RegisteredIdentity | None, progress: Progress | None) -> None:
    if entry is None or entry.v1_directory_sha256 is None:
        raise IdentityError(f"{artifact.path.name}: no version 1 file of {quoted(artifact.identity.model_id)} was published")
    if artifact.directory_digest != entry.v1_directory_sha256:
        raise IdentityError(f"{artifact.path.name}: the directory is not the published one")
    digest, done = hashlib.sha256(), 0
    with open(artifact.path, "rb") as file:
        while chunk := file.read(HASH_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done, artifact.file_bytes)
    if digest.hexdigest() != entry.v1_sha256:
        raise IdentityError(f"{artifact.path.name}: SHA-256 {digest.hexdigest()} is not that of the published file")


def _check(path: Path, result: Migration) -> None:
    """What was written reads back as planned."""
    with Artifact(path) as artifact:
        wanted = (2, result.identity, result.payload_start, None)
        if (artifact.version, artifact.identity, artifact.payload_start, artifact.recovered_from) != wanted:
            raise IdentityError(f"read back {quoted(str(artifact.identity))} in version {artifact.version}")
