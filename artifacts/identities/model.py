"""What an open artifact says about its model: configuration, dimensions, logical parameters, uses, frontend files.

One interface over all versions: registered identities take their dimensions from the registry, other version 2 files
from their resource `model/config.json`, version 3 files from their components.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from artifacts.container.directory_v3 import Binding, Use
from artifacts.container.json_reader import MAX_DIRECTORY_BYTES, JsonCursor, decode_text
from artifacts.container.schema import TensorObject
from artifacts.errors import ConfigError, DirectoryError, IdentityError, LayoutError, PayloadError, quoted
from artifacts.identities.dims import DraftDims, TextDims, VisionDims
from artifacts.identities.parameters import DIVISOR_ROLE, bindings_of, uses_of
from artifacts.identities.plan import CONFIG_RESOURCE
from artifacts.identities.registry import RegisteredIdentity, identify

if TYPE_CHECKING:
    from artifacts.container.artifact import Artifact


class RowView(NamedTuple):
    """Rows [r0, r1) of `object`; for one-dimensional objects rows are elements, a scalar has one row."""

    object: TensorObject
    r0: int
    r1: int


class ModelView:
    """Lazily derived; every member is computed at first use and may raise ConfigError or IdentityError."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact = artifact

    @cached_property
    def registered(self) -> RegisteredIdentity | None:
        """The registry entry of a version 1 or 2 file; None for others."""
        if self._artifact.version == 3:
            return None
        return identify(self._artifact.identity, self._artifact.objects.values())

    def config(self, component: str) -> dict[str, Any] | None:
        """Configuration of `text`, `vision`, `mtp`, `dflash` or `dflash2` in version 3 spelling, None when absent."""
        artifact = self._artifact
        if artifact.version == 3:
            found = artifact.directory_v3.components.get(component)
            return None if found is None else found.config
        if component == "text":
            return self.dims.to_config() if self.registered else self._embedded_text()
        if not any(name.startswith(component + "/") for name in artifact.objects):
            return None
        if component == "mtp":
            return {"architectures": ["Qwen3_5MoeMTP" if self.dims.is_moe else "Qwen3_5MTP"]}
        if component == "vision":
            return self.vision.to_config() if self.vision else None
        return self.drafter.to_config() if self.drafter and self.drafter.component == component else None

    @cached_property
    def _embedded(self) -> dict[str, Any]:
        artifact = self._artifact
        if CONFIG_RESOURCE not in artifact.objects:
            raise ConfigError(
                f"{artifact.path.name}: identity {quoted(str(artifact.identity))} is not registered and the file has no "
                f"resource {CONFIG_RESOURCE}"
            )
        try:
            cursor = JsonCursor(decode_text(artifact.resource(CONFIG_RESOURCE, MAX_DIRECTORY_BYTES)), negative_zero=True)
            value = cursor.open_value(CONFIG_RESOURCE)
            cursor.end()
        except DirectoryError as error:
            raise ConfigError(f"{CONFIG_RESOURCE}: {str(error).replace('JSON directory', 'JSON text')}") from None
        if type(value) is not dict:
            raise ConfigError(f"{CONFIG_RESOURCE} must be a JSON object")
        return value

    def _embedded_text(self) -> dict[str, Any]:
        nested = self._embedded.get("text_config")
        return nested if type(nested) is dict else self._embedded

    @cached_property
    def dims(self) -> TextDims:
        """Dimensions of the text decoder. Errors: ConfigError."""
        if self.registered is not None:
            return self.registered.text
        if self._artifact.version != 3:
            return TextDims.from_config(self._embedded_text())
        return TextDims.from_config(self._artifact.directory_v3.components["text"].config)

    @cached_property
    def vision(self) -> VisionDims | None:
        """Dimensions of the vision tower, None when the artifact has none. Errors: ConfigError."""
        if self._artifact.version == 3:
            component = self._artifact.directory_v3.components.get("vision")
            return None if component is None else VisionDims.from_config(component.config)
        if not any(name.startswith("vision/") for name in self._artifact.objects):
            return None
        if self.registered is not None:
            return self.registered.vision
        return VisionDims.from_config(self._embedded)

    @cached_property
    def drafter(self) -> DraftDims | None:
        """Dimensions of a DFlash or DFlash2 drafter, None when the artifact has none. Errors: ConfigError."""
        if self._artifact.version == 3:
            components = self._artifact.directory_v3.components
            component = components.get("dflash2") or components.get("dflash")
            return None if component is None else DraftDims.from_config(component.config)
        names = self._artifact.objects
        if self.registered is not None:
            for known in (self.registered.drafter, self.registered.optional_drafter):
                if known is not None and any(name.startswith(known.component + "/") for name in names):
                    return known
            return None
        if not any(name.startswith(("dflash/", "dflash2/")) for name in names):
            return None
        nested = self._embedded.get("dflash_config")
        if type(nested) is not dict:
            raise ConfigError(f"{CONFIG_RESOURCE}: missing member dflash_config for the drafter in the file")
        return DraftDims.from_config(nested)

    @cached_property
    def bindings(self) -> Mapping[str, Binding]:
        """Logical parameter -> elements of tensor objects. Errors: ConfigError, IdentityError."""
        if self._artifact.version == 3:
            return self._artifact.directory_v3.bindings
        return bindings_of(self._artifact.objects.values(), self.dims, self.drafter)

    def parameter(self, name: str) -> list[RowView]:
        """Row ranges of objects whose concatenation is the parameter.

        Errors: IdentityError when there is no such parameter, LayoutError when a part is not whole rows or its
        object cannot be used.
        """
        binding = self.bindings.get(name)
        if binding is None:
            raise IdentityError(f"{self._artifact.path.name}: no parameter {quoted(name)}")
        views: list[RowView] = []
        for part in binding.parts:
            tensor = self._artifact.tensor(part.object)
            width = math.prod(tensor.shape[1:])
            if part.begin % width or part.end % width:
                raise LayoutError(f"parameter {quoted(name)}: elements [{part.begin}, {part.end}) are not whole rows")
            views.append(RowView(tensor, part.begin // width, part.end // width))
        return views

    @cached_property
    def uses(self) -> Mapping[tuple[str, str], Use]:
        """(parameter, input position) -> use with its activation policy and auxiliaries."""
        artifact = self._artifact
        uses = artifact.directory_v3.uses if artifact.version == 3 else uses_of(self.bindings, artifact.objects)
        return {(use.parameter, use.input): use for use in uses}

    def input_divisor(self, parameter: str, position: str) -> float | None:
        """The activation divisor of a use, None when it has none.

        Errors: IdentityError for an unknown use, PayloadError when it is not one finite positive FP32 element.
        """
        use = self.uses.get((parameter, position))
        if use is None:
            raise IdentityError(f"{self._artifact.path.name}: {quoted(parameter)} has no use at {quoted(position)}")
        binding = use.auxiliaries.get(DIVISOR_ROLE)
        if binding is None:
            return None
        part = binding.parts[0]
        tensor = self._artifact.tensor(part.object)
        what = f"object {quoted(tensor.name)}"
        if tensor.format != "FP32" or len(binding.parts) != 1 or part.end - part.begin != 1:
            raise PayloadError(f"{what}: an input divisor must be one FP32 element")
        value = float(self._artifact.tensor_bytes(tensor.name, 4 * part.begin, 4 * part.end).view("<f4")[0])
        if not (math.isfinite(value) and value > 0):
            raise PayloadError(f"{what}: input divisor {value} must be finite and positive")
        return value

    def frontend(self, role: str) -> bytes | None:
        """A frontend file such as `tokenizer.json` or `chat_template.jinja`; None when the artifact has none."""
        artifact = self._artifact
        if artifact.version != 3:
            name = f"frontend/{role}"
            return artifact.resource(name) if name in artifact.objects else None
        for component in artifact.directory_v3.components.values():
            if role in component.resources:
                return artifact.resource(component.resources[role])
        return None
