"""Model artifacts: `.ninfer` containers of every version, numeric formats, storage layouts, identities and tools."""

from artifacts.container.artifact import Artifact, RowView, open
from artifacts.container.directory_v2 import Identity
from artifacts.container.schema import ObjectPlan, ResourceObject, StoredObject, TensorObject
from artifacts.container.writer import ArtifactWriter
from artifacts.errors import ArtifactError

__all__ = [
    "Artifact",
    "ArtifactError",
    "ArtifactWriter",
    "Identity",
    "ObjectPlan",
    "ResourceObject",
    "RowView",
    "StoredObject",
    "TensorObject",
    "open",
]
