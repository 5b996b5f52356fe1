"""What a conversion will write: every object with its format, its source and what is done to the words."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from artifacts.container.directory_v2 import Identity
from artifacts.container.directory_v3 import DirectoryV3
from artifacts.container.schema import ObjectPlan, place
from artifacts.convert.config import model_config
from artifacts.convert.linear import Linear, Notes, Stack
from artifacts.convert.preflight import Need
from artifacts.convert.recipe import SOURCE, Recipe
from artifacts.convert.sources import Source
from artifacts.errors import ArtifactError, FormatError, IdentityError, quoted
from artifacts.formats import FORMATS, Array
from artifacts.identities import TextDims, VisionDims, plan_objects
from artifacts.identities.components import directory_v3
from artifacts.identities.parameters import bindings_of
from artifacts.identities.plan import CONFIG_RESOURCE, NVFP4, divisor_name
from artifacts.identities.registry import REGISTRY, RegisteredIdentity, tensor_signature

FIXED_LEAVES = ("convolution", "position_embedding")  # [N,K] objects that are no matrix product


@dataclass(frozen=True)
class Job:
    """One object to write. Exactly one of `data` (resource), `array` (reads words) and `stack` is set.

    `action`: copy (source words), encode (from unquantized values), requantize (from decoded values).
    """

    plan: ObjectPlan
    action: str
    data: bytes | None = None
    array: Callable[[], Array] | None = None
    stack: Stack | None = None
    divisor: np.float32 | None = None


@dataclass
class ConversionPlan:
    """Identity and jobs in file order; `configs` by component, in version 3 spelling; `layout` of the source.

    `twins`: unquantized linears of the quantized checkpoint and of its base, which must be equal word for word.
    """

    identity: Identity
    jobs: list[Job]
    registered: bool
    configs: dict[str, dict[str, Any]]
    twins: list[tuple[Linear, Linear]]
    layout: str = ""

    def directory_v3(self, provenance: dict[str, Any], dims: TextDims) -> DirectoryV3:
        """The version 3 directory of the same objects."""
        objects = place([job.plan for job in self.jobs])
        bindings = bindings_of(objects, dims, None)
        return directory_v3(objects, bindings, self.configs.get, self.identity.model_id, provenance)


def registered_for(model_id: str, schema: str) -> RegisteredIdentity | None:
    """The registered identity that a model id and an object schema name."""
    for entry in REGISTRY.values():
        if entry.identity.model_id == model_id and entry.schema == schema:
            return entry
    return None


def is_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Whether an object is a matrix product's weight, whose format a recipe may choose."""
    return len(shape) == 2 and name.rsplit("/", 1)[-1] not in FIXED_LEAVES


@dataclass
class Planner:
    """Builds a ConversionPlan; `main` is the checkpoint, `base` an optional unquantized one."""

    text: TextDims
    vision: VisionDims | None
    recipe: Recipe
    main: Source
    base: Source | None
    notes: Notes
    vocabulary_format: str | None
    draft_ids: Array | None
    with_mtp: bool

    def source(self, name: str) -> Source:
        return self.base if self.base is not None and self.recipe.source_of(name) == "base" else self.main

    def _objects(self, rule: Callable[[str, str], str], resources: Mapping[str, int]) -> list[ObjectPlan]:
        return plan_objects(
            self.text,
            self.recipe.schema,
            with_mtp=self.with_mtp,
            with_vision=self.vision,
            vocabulary_format=self.vocabulary_format,
            draft_rows=0 if self.draft_ids is None else len(self.draft_ids),
            resources=resources,
            format_rule=rule,
        )

    def needs(self) -> list[Need]:
        """Every object that is made of a checkpoint's tensors, and which checkpoint that is."""
        objects = self._objects(lambda _, default: default if default in ("FP32", "I32") else "BF16", {})
        return [
            Need(plan, is_matrix(plan.name, plan.shape), self.recipe.source_of(plan.name) if self.base else "main")
            for plan in objects
            if plan.name != "text/draft_head_token_ids"
        ]

    def build(self, model_id: str, resources: Mapping[str, bytes], config: Mapping[str, object]) -> ConversionPlan:
        """Decide every format, find every source, check the identity. Errors name the object or the tensor."""
        stacks: dict[str, Stack] = {}
        formats = self._formats(stacks)
        entry = registered_for(model_id, self.recipe.schema)
        identity = entry.identity if entry else Identity(model_id, self.recipe.weights_id)
        contents = dict(resources)
        normal = model_config(config, self.text, self.vision)
        if entry is None:
            contents[CONFIG_RESOURCE] = json.dumps(normal, indent=1).encode()
        lengths = {name: len(data) for name, data in contents.items()}
        plans = self._objects(lambda name, default: formats.get(name, default), lengths)
        jobs = [job for plan in plans if (job := self._job(plan, stacks, contents)) is not None]
        if entry is not None:
            self._check_registered(entry, [job.plan for job in jobs])
        configs = {"text": self.text.to_config() if entry else normal}
        if self.with_mtp:
            configs["mtp"] = {"architectures": ["Qwen3_5MTP"]}
        if self.vision is not None:
            configs["vision"] = self.vision.to_config()
        return ConversionPlan(identity, jobs, entry is not None, configs, self._twins())

    def _twins(self) -> list[tuple[Linear, Linear]]:
        """Pairs of linears that the recipe wants to be equal and that the quantized checkpoint left unquantized."""
        pairs: list[tuple[Linear, Linear]] = []
        if self.base is None:
            return pairs
        for need in self.needs():
            if not (need.is_matrix and self.recipe.equals_base(need.plan.name)):
                continue
            for linear in self.base.stack(need.plan.name, need.plan.shape, self.draft_ids).linears:
                name = self.main.trunk + linear.name.removeprefix(self.base.trunk)
                weight = self.main.checkpoint.tensors.get(name + ".weight")
                if weight is not None and weight.dtype == "BF16" and linear.weight.dtype == "BF16":
                    pairs.append((self.main.linear(name, linear.rows, linear.columns), linear))
        return pairs

    def _formats(self, stacks: dict[str, Stack]) -> dict[str, str]:
        defaults: dict[str, str] = {}

        def collect(name: str, default: str) -> str:
            defaults[name] = default
            return default if default in ("FP32", "I32") else "BF16"

        objects = self._objects(collect, {})
        matrices = [p for p in objects if is_matrix(p.name, p.shape)]
        for pattern, _ in self.recipe.overrides:
            one = Recipe("", "", "", formats=((pattern, "BF16"),))
            if not any(one.format_of(p.name, "") for p in matrices):
                raise FormatError(f"--override {quoted(pattern)} matches no matrix of the model")
        formats = {}
        for plan in matrices:
            stack = self.source(plan.name).stack(plan.name, plan.shape, self.draft_ids)
            stacks[plan.name] = stack
            format = self.recipe.format_of(plan.name, defaults[plan.name])
            if format == SOURCE:
                format = stack.format() or self._mixed(plan.name, stack)
            try:
                FORMATS[format].check_shape(plan.shape)
            except ArtifactError as error:
                raise FormatError(f"object {quoted(plan.name)}: {error}; choose a format with --override") from None
            formats[plan.name] = format
        return formats

    @staticmethod
    def _mixed(name: str, stack: Stack) -> str:
        kinds = ", ".join(f"{linear.name} {linear.format or linear.weight.dtype}" for linear in stack.linears)
        raise FormatError(
            f"object {quoted(name)}: its parts have no common format ({kinds}); choose one with --override"
        )

    def _job(self, plan: ObjectPlan, stacks: Mapping[str, Stack], contents: Mapping[str, bytes]) -> Job | None:
        name = plan.name
        if plan.format is None:
            return Job(plan, "copy", data=contents[name])
        if name.endswith("/input_scale_divisor"):
            return self._divisor_job(plan, stacks)
        if name == "text/draft_head_token_ids":
            ids = self.draft_ids
            assert ids is not None
            return Job(plan, "encode", array=lambda: ids)
        if name not in stacks:
            return Job(plan, "copy", array=self.source(name).array(name, plan.shape, plan.format))
        stack = stacks[name]
        quantized = any(linear.kind != "plain" for linear in stack.linears)
        if stack.format() == plan.format:
            divisor = stack.common_divisor("divisor") if plan.format == NVFP4 else None
            return Job(plan, "copy", stack=stack, divisor=divisor)
        if plan.format == "BF16" and quantized:
            kinds = ", ".join(sorted({linear.kind for linear in stack.linears}))
            raise FormatError(
                f"object {quoted(name)}: BF16 was asked for, but the checkpoint holds {kinds}; give --base"
            )
        if quantized:
            self.notes.requantized.append(name)
        return Job(plan, "requantize" if quantized else "encode", stack=stack)

    def _divisor_job(self, plan: ObjectPlan, stacks: Mapping[str, Stack]) -> Job | None:
        """The activation divisor of an NVFP4 parent. A source without one gives no object: it is measured, never
        made up, and without it the weights are used with unquantized activations."""
        parents = [s for n, s in stacks.items() if divisor_name(n) == plan.name and s.format() == NVFP4]
        divisor = parents[0].common_divisor("input_divisor") if parents else None
        if divisor is None:
            return None
        return Job(plan, "copy", array=lambda: np.asarray(divisor).view(np.uint32))

    def _check_registered(self, entry: RegisteredIdentity, plans: list[ObjectPlan]) -> None:
        hint = "give another --model-id to write an unregistered model"
        if self.text.to_config() != entry.text.to_config() or self.vision != entry.vision:
            raise IdentityError(f"the checkpoint's dimensions are not those of {quoted(str(entry.identity))}; {hint}")
        ours = {(p.name, p.shape, p.format) for p in plans if p.format is not None}
        wanted = tensor_signature(entry.identity)
        missing, extra = sorted(map(str, wanted - ours)), sorted(map(str, ours - wanted))
        if missing or extra:
            first = f"missing {missing[0]}" if missing else f"unexpected {extra[0]}"
            raise IdentityError(
                f"{quoted(str(entry.identity))} prescribes other objects: {len(missing)} missing, {len(extra)} "
                f"unexpected, {first}; {hint}"
            )
        absent = [name for name in entry.resources if name not in {p.name for p in plans}]
        if absent:
            raise IdentityError(f"{quoted(str(entry.identity))} needs {absent[0]}; {hint}")
