"""The version 3 directory of a model: components, bindings and uses over placed objects (container-v3.md section 11).

Objects keep their version 2 names as ids, so the files of both versions hold the same objects.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from artifacts.container.directory_v3 import Binding, Component, DirectoryV3, FilePart
from artifacts.container.schema import ResourceObject, StoredObject
from artifacts.identities.parameters import uses_of

TEXT_ROLES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
VISION_ROLES = ("preprocessor_config.json", "video_preprocessor_config.json")
PROPOSAL_HEAD = "proposal/head"


def directory_v3(
    objects: Sequence[StoredObject],
    bindings: Mapping[str, Binding],
    config: Callable[[str], dict[str, Any] | None],
    name: str,
    provenance: dict[str, Any],
) -> DirectoryV3:
    """A directory over `objects`, which are placed in ascending order, in one file.

    bindings: logical parameters of these objects (`parameters.bindings_of`). config: the configuration of a component
    (text, vision, mtp, dflash, dflash2) in version 3 spelling, None when the model has no such component. name: public
    label. Every use gets the default policy of its format (`parameters.uses_of`).
    """
    stored = {entry.name: entry for entry in objects}
    end = objects[-1].offset + objects[-1].bytes
    return DirectoryV3(
        files=[FilePart(None, end)],
        objects=list(objects),
        components=_components(stored, bindings, config),
        bindings=dict(bindings),
        uses=uses_of(bindings, stored),
        metadata={"name": name},
        provenance=provenance,
    )


def _components(
    stored: Mapping[str, StoredObject], bindings: Mapping[str, Binding], config: Callable[[str], dict[str, Any] | None]
) -> dict[str, Component]:
    """Text first, then what the model has besides."""

    def resources(roles: tuple[str, ...]) -> dict[str, str]:
        names = {role: f"frontend/{role}" for role in roles}
        return {role: name for role, name in names.items() if isinstance(stored.get(name), ResourceObject)}

    proposal: tuple[str, int | None] | None = None
    if PROPOSAL_HEAD in bindings:
        part = bindings[PROPOSAL_HEAD].parts[0]
        head = stored[part.object]
        assert not isinstance(head, ResourceObject)
        proposal = ("indexed", (part.end - part.begin) // head.shape[-1])
    text = config("text")
    assert text is not None
    components = {"text": Component(text, None, resources(TEXT_ROLES), proposal)}
    for name in ("vision", "mtp", "dflash", "dflash2"):
        found = config(name)
        if found is not None:
            components[name] = Component(found, "text", resources(VISION_ROLES) if name == "vision" else {})
    return components
