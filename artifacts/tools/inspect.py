"""`inspect`: what a container says about itself, without touching its payload."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from json.encoder import encode_basestring_ascii
from typing import Any

from artifacts.container.artifact import Artifact
from artifacts.container.directory_v3 import Binding, Part
from artifacts.container.schema import V3_NAMES, StoredObject, TensorObject

_string: Callable[[str], str] = encode_basestring_ascii


def summary(artifact: Artifact) -> dict[str, Any]:
    """The facts of one artifact as JSON-ready values; sizes in bytes.

    Version 3 reports the members of artifact-container-v3.md section 12, older versions the identity, the registered
    identity that the object list makes it (null when unknown) and the directory digest.
    """
    objects = artifact.objects.values()
    tensors = [entry for entry in objects if isinstance(entry, TensorObject)]
    facts: dict[str, Any] = {"path": str(artifact.path), "version": artifact.version}
    if artifact.version == 3:
        directory = artifact.directory_v3
        facts["artifact_id"] = artifact.artifact_id.hex()
        facts["name"] = (directory.metadata or {}).get("name")
        facts["components"] = list(directory.components)
        facts["files"] = [{"path": file.path, "payload_bytes": file.payload_bytes} for file in directory.files]
    else:
        registered = artifact.model.registered
        facts["model_id"] = artifact.identity.model_id
        facts["weights_id"] = artifact.identity.weights_id
        facts["registered_as"] = None if registered is None else str(registered.identity)
    facts |= {
        "file_bytes": artifact.file_bytes,
        "payload_offset": artifact.payload_start,
        "payload_bytes": artifact.payload_bytes,
        "directory_bytes": artifact.directory_bytes,
        "directory_sha256": artifact.directory_digest,
        "objects": len(artifact.objects),
        "tensors": len(tensors),
        "resources": len(artifact.objects) - len(tensors),
    }
    if artifact.version == 3:
        facts["bindings"] = len(artifact.directory_v3.bindings)
        facts["uses"] = len(artifact.directory_v3.uses)
    facts["formats"] = dict(sorted(Counter(_spelling(artifact, tensor.format) for tensor in tensors).items()))
    facts["layouts"] = dict(sorted(Counter(_spelling(artifact, tensor.layout) for tensor in tensors).items()))
    return facts


def _spelling(artifact: Artifact, name: str) -> str:
    """Names as the file spells them."""
    return V3_NAMES.get(name, name) if artifact.version == 3 else name


def object_records(artifact: Artifact) -> list[dict[str, Any]]:
    """One record per object in file order."""

    def record(entry: StoredObject) -> dict[str, Any]:
        facts: dict[str, Any] = {"name": entry.name, "offset": entry.offset, "bytes": entry.bytes}
        if isinstance(entry, TensorObject):
            facts |= {
                "kind": "tensor",
                "shape": list(entry.shape),
                "format": _spelling(artifact, entry.format),
                "layout": _spelling(artifact, entry.layout),
            }
        else:
            facts |= {"kind": "resource", "encoding": _spelling(artifact, entry.encoding)}
        if entry.problem is not None:
            facts["problem"] = entry.problem
        return facts

    return [record(entry) for entry in artifact.objects.values()]


def document(artifact: Artifact) -> Iterator[str]:
    """`inspect --json`: one JSON object in pieces, ASCII only: `summary`, `object_records` and, for version 3,
    `binding_records` (parameter, parts as element ranges, whether it is one whole object) and `use_records`
    (parameter, input position, activation policy, auxiliaries).

    A large directory has 65,000 bindings and uses: they are printed straight from the directory, never as a tree.
    """
    facts = summary(artifact) | {"object_records": object_records(artifact)}
    text = json.dumps(facts, ensure_ascii=True, separators=(",", ":"))
    if artifact.version != 3:
        yield text
        return
    directory = artifact.directory_v3
    yield text[:-1]
    yield ',"binding_records":['
    yield ",".join([
        f'{{"parameter":{_string(name)},"whole":{"true" if whole else "false"},"parts":[{_parts(parts)}]}}'
        for name, (parts, whole) in directory.bindings.items()
    ])  # fmt: skip
    yield '],"use_records":['
    yield ",".join([
        f'{{"parameter":{_string(parameter)},"input":{_string(position)},"activation_policy":"{policy}",'
        f'"auxiliaries":{_auxiliaries(auxiliaries) if auxiliaries else "{}"}}}'
        for parameter, position, policy, auxiliaries in directory.uses
    ])  # fmt: skip
    yield "]}"


def _parts(parts: Iterable[Part]) -> str:
    return ",".join([f'{{"object":{_string(name)},"range":[{begin},{end}]}}' for name, begin, end in parts])


def _auxiliaries(auxiliaries: Mapping[str, Binding]) -> str:
    members = [f"{_string(role)}:[{_parts(binding.parts)}]" for role, binding in auxiliaries.items()]
    return f"{{{','.join(members)}}}"
