"""`relabel`: another weights id for a version 2 artifact, in place, the payload untouched.

The use case is the file that was published as `qwen3.8-27b/nvfp4` with the object list of `nvfp4-split`.
"""

from dataclasses import dataclass
from pathlib import Path

from artifacts.container.artifact import Artifact
from artifacts.container.directory_v2 import Identity, encode_directory
from artifacts.container.schema import TensorObject
from artifacts.container.writer import MAGIC_OF_VERSION
from artifacts.errors import ArtifactError, IdentityError, OutputError, quoted
from artifacts.identities.registry import REGISTRY, identify, tensor_signature
from artifacts.layouts import align_up
from artifacts.tools.inplace import Disk, Rewrite, header_bytes

BACKUP_SUFFIX = ".relabel-backup"


@dataclass(frozen=True)
class Relabelling:
    """The identities before and after; equal when nothing was to do."""

    before: Identity
    after: Identity
    payload_start: int


def relabel(path: Path, weights_id: str | None = None, dry_run: bool = False, disk: Disk | None = None) -> Relabelling:
    """Give a version 2 file another weights id; None takes the one that its object list belongs to.

    Errors: IdentityError when the file is not version 2, its model is not registered and no id was given, or the
    objects are not those of the registered target; OutputError when the payload would have to move.
    """
    path = path.resolve()
    rewrite = Rewrite(path, BACKUP_SUFFIX, disk)
    if rewrite.backup_version() is not None and not dry_run:
        with Artifact(path) as artifact:
            torn = artifact.recovered_from is not None
        if torn:
            rewrite.recover()
        else:
            rewrite.discard_backup()
    with Artifact(path) as artifact:
        if artifact.version != 2:
            raise IdentityError(f"{path.name}: is version {artifact.version}; only version 2 has a weights id to change")
        objects = list(artifact.objects.values())
        before = artifact.identity
        after = _target(artifact, weights_id)
        result = Relabelling(before, after, artifact.payload_start)
        if before == after:
            return result
        directory = encode_directory(after, objects)
        start = align_up(16 + len(directory), 4096)
        if start != artifact.payload_start:
            raise OutputError(f"{path.name}: the new directory would move the payload from {artifact.payload_start} to {start}")
        header = header_bytes(MAGIC_OF_VERSION[2], directory, start)
    if dry_run:
        return result
    rewrite.apply(header)
    try:
        with Artifact(path) as artifact:
            if artifact.identity != after or artifact.recovered_from is not None:
                raise IdentityError(f"read back {quoted(str(artifact.identity))}")
    except ArtifactError as error:
        rewrite.recover()
        raise OutputError(f"{path.name}: the new directory did not read back ({error}); the old one was restored") from None
    rewrite.discard_backup()
    return result


def _target(artifact: Artifact, weights_id: str | None) -> Identity:
    belongs = identify(artifact.identity, artifact.objects.values())
    if weights_id is None:
        if belongs is None:
            found = quoted(str(artifact.identity))
            raise IdentityError(f"{artifact.path.name}: {found} is not registered; name the new weights id")
        return belongs.identity
    after = Identity(artifact.identity.model_id, weights_id)
    if after in REGISTRY:
        stored = {(o.name, o.shape, o.format) for o in artifact.objects.values() if isinstance(o, TensorObject)}
        if not tensor_signature(after) <= stored:
            raise IdentityError(f"{artifact.path.name}: its objects are not those of {after}")
    return after
