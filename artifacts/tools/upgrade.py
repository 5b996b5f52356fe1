"""`upgrade`: a version 2 artifact becomes a version 3 artifact by the published mapping (container-v3.md section 11).

Weights keep their bytes and offsets; only names, bindings and the directory are new. Beyond the published tool, any
version 2 file whose model is known is accepted, not only the five published identities.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from artifacts.container.artifact import Artifact
from artifacts.container.directory_v3 import Component, DirectoryV3, FilePart
from artifacts.container.schema import ResourceObject, StoredObject
from artifacts.container.writer_v3 import DEFAULT_FILE_LIMIT, ArtifactWriterV3, plan_files
from artifacts.errors import IdentityError, PayloadError, quoted
from artifacts.identities.parameters import DIVISOR_SUFFIX, uses_of
from artifacts.layouts import align_up

TEXT_ROLES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
VISION_ROLES = ("preprocessor_config.json", "video_preprocessor_config.json")
CHAT_TEMPLATE = "frontend/chat_template.jinja"
BINDING_COUNTS = (1422, 1513, 32713)
COPY_BYTES = 16 << 20

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
    bindings = dict(model.bindings)
    if model.registered is not None and len(bindings) not in BINDING_COUNTS:
        raise IdentityError(
            f"{artifact.path.name}: {len(bindings)} logical parameters; {artifact.identity} has one of {BINDING_COUNTS}"
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
    end = objects[-1].offset + objects[-1].bytes
    directory = DirectoryV3(
        files=[FilePart(None, end)],
        objects=objects,
        components=_components(artifact),
        bindings=bindings,
        uses=uses_of(bindings, artifact.objects),
        metadata={"name": artifact.identity.model_id},
        provenance={
            "upgraded_from": {
                "version": 2,
                "model_id": artifact.identity.model_id,
                "weights_id": artifact.identity.weights_id,
            }
        },
    )
    raw, files = plan_files(directory, end, limit, entry_name)
    return UpgradePlan(replace(directory, files=files), files, len(raw), template, copied)


def _check_divisors(artifact: Artifact) -> None:
    for name in artifact.objects:
        if name.endswith(DIVISOR_SUFFIX):
            tensor = artifact.tensor(name)
            scalar = tensor.format == "FP32" and tensor.shape == ()
            if not scalar or not 0 < float(artifact.tensor_bytes(name).view("<f4")[0]) < math.inf:
                raise PayloadError(f"object {quoted(name)}: an input divisor must be one finite positive FP32 value")


def _components(artifact: Artifact) -> dict[str, Component]:
    """Text first, then what the object names show to be present."""

    def resources(roles: tuple[str, ...]) -> dict[str, str]:
        return {role: f"frontend/{role}" for role in roles if f"frontend/{role}" in artifact.objects}

    config = artifact.model.config
    proposal: tuple[str, int | None] | None = None
    if "proposal/head" in artifact.model.bindings:
        view = artifact.parameter("proposal/head")[0]
        proposal = ("indexed", view.r1 - view.r0)
    text: dict[str, Any] | None = config("text")
    assert text is not None
    components = {"text": Component(text, None, resources(TEXT_ROLES), proposal)}
    for name in ("vision", "mtp", "dflash", "dflash2"):
        found = config(name)
        if found is not None:
            components[name] = Component(found, "text", resources(VISION_ROLES) if name == "vision" else {})
    return components


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
