"""`upgrade`: a version 2 artifact becomes a version 3 artifact by the published mapping (container-v3.md section 11).

Weights keep their bytes and offsets; only names, bindings and the directory are new. Beyond the published tool, any
version 2 file whose model is known is accepted, not only the five published identities.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from artifacts.container.artifact import Artifact
from artifacts.container.directory_v3 import DirectoryV3, FilePart
from artifacts.container.schema import ResourceObject, StoredObject
from artifacts.container.writer_v3 import DEFAULT_FILE_LIMIT, ArtifactWriterV3, plan_files
from artifacts.errors import IdentityError, PayloadError, quoted
from artifacts.identities.components import directory_v3
from artifacts.identities.parameters import DIVISOR_SUFFIX
from artifacts.layouts import align_up

CHAT_TEMPLATE = "frontend/chat_template.jinja"
BINDING_COUNTS = (1422, 1513, 32713)
COPY_BYTES = 1 << 20  # stays in the cache between reading and writing

Progress = Callable[[int, int], None]
"""(bytes done, bytes in all)."""


@dataclass(frozen=True)
class UpgradePlan:
    """What an upgrade writes: the directory, its files, and where a new chat template goes (None: kept)."""

    directory: DirectoryV3
    files: list[FilePart]
    directory_bytes: int
    template: bytes | None
    copied_bytes: int

    @property
    def file_bytes(self) -> int:
        """Length of all files together."""
        return 32 + self.directory_bytes + self.directory.payload_bytes + 4096 * (len(self.files) - 1)


def plan_upgrade(
    artifact: Artifact, entry_name: str, template: bytes | None = None, limit: int = DEFAULT_FILE_LIMIT
) -> UpgradePlan:
    """Check a version 2 artifact and derive its version 3 directory.

    template: bytes that replace the chat template; the old ones stay in the payload, unreferenced. limit: bytes per
    file. Errors: IdentityError (other version, unknown model, other object set), ConfigError, PayloadError (divisor).
    """
    if artifact.version == 1:
        raise IdentityError(f"{artifact.path.name}: version 1; bring it to version 2 with 'ninferc migrate' first")
    if artifact.version == 3:
        raise IdentityError(f"{artifact.path.name}: is version 3 already")
    model = artifact.model
    count = len(model.bindings)
    if model.registered is not None and count not in BINDING_COUNTS:
        raise IdentityError(
            f"{artifact.path.name}: {count} logical parameters; {artifact.identity} has one of {BINDING_COUNTS}"
        )
    _check_divisors(artifact)
    objects: list[StoredObject] = list(artifact.objects.values())
    copied = max(entry.offset + entry.bytes for entry in objects)
    if template is not None:
        if CHAT_TEMPLATE not in artifact.objects:
            raise IdentityError(f"{artifact.path.name}: no object {quoted(CHAT_TEMPLATE)} to replace")
        copied = artifact.payload_bytes
        objects = [entry for entry in objects if entry.name != CHAT_TEMPLATE]
        objects.append(ResourceObject(CHAT_TEMPLATE, align_up(copied, 256), len(template)))
    upgraded_from = {"version": 2, "model_id": artifact.identity.model_id, "weights_id": artifact.identity.weights_id}
    provenance = {"upgraded_from": upgraded_from}
    directory = directory_v3(objects, model.bindings, model.config, artifact.identity.model_id, provenance)
    raw, files = plan_files(directory, directory.payload_bytes, limit, entry_name)
    return UpgradePlan(replace(directory, files=files), files, len(raw), template, copied)


def _check_divisors(artifact: Artifact) -> None:
    for name in artifact.objects:
        if name.endswith(DIVISOR_SUFFIX):
            tensor = artifact.tensor(name)
            scalar = tensor.format == "FP32" and tensor.shape == ()
            if not scalar or not 0 < float(artifact.tensor_bytes(name).view("<f4")[0]) < math.inf:
                raise PayloadError(f"object {quoted(name)}: an input divisor must be one finite positive FP32 value")


def upgrade(
    artifact: Artifact,
    output: Path,
    template: bytes | None = None,
    limit: int = DEFAULT_FILE_LIMIT,
    progress: Progress | None = None,
) -> UpgradePlan:
    """Write the version 3 form of a version 2 artifact to `output` (and parts beside it when it exceeds `limit`).

    Errors: as plan_upgrade, OutputError when an output exists or the disk is full.
    """
    plan = plan_upgrade(artifact, output.name, template, limit)
    with ArtifactWriterV3(output, plan.directory, limit=limit) as writer:
        for offset in range(0, plan.copied_bytes, COPY_BYTES):
            length = min(COPY_BYTES, plan.copied_bytes - offset)
            writer.write_payload(offset, artifact.read(offset, length))
            if progress is not None:
                progress(offset + length, plan.copied_bytes)
        if template is not None:
            writer.write(CHAT_TEMPLATE, template)
    return plan
