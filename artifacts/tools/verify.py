"""`verify`: beyond the container rules, is this the object list of its model, and are the stored values legal?"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

import numpy as np

from artifacts.container.artifact import Artifact
from artifacts.container.directory_v3 import Binding, Use
from artifacts.container.schema import ObjectPlan, StoredObject, TensorObject, place
from artifacts.errors import ArtifactError, ConfigError, quoted
from artifacts.formats import FORMATS, Array
from artifacts.formats.base import default_threads, rows_per_block
from artifacts.identities.dims import DraftDims
from artifacts.identities.parameters import DIVISOR_ROLE, DIVISOR_SUFFIX, bindings_of, uses_of
from artifacts.identities.plan import (
    CONFIG_RESOURCE,
    FP32,
    I32,
    NVFP4,
    RESOURCES,
    divisor_name,
    plan_objects,
)
from artifacts.identities.registry import TOKEN_IDS
from artifacts.layouts import LAYOUTS

Progress = Callable[[int, int], None]
"""(bytes checked, bytes in all)."""

DIRECT = ("BF16", FP32, I32)
MAX_BLOCK_ELEMENTS = 1 << 24
"""Columns times the row unit of the layout: longer rows are no model's, and unpacking one would take gigabytes."""


def verify(artifact: Artifact, deep: bool = False, progress: Progress | None = None) -> list[str]:
    """Everything that is wrong with an open artifact, one line per finding; empty when it is sound.

    Checks parts and object encodings (version 3), then the inventory: registered identities hold exactly the
    published names, shapes and formats; other models hold exactly the parameters that their configuration requires.
    deep: also every code, scale, divisor and padding byte, streaming, on all cores.
    """
    problems = list(_inventory_problems(artifact))
    if deep:
        problems += _value_problems(artifact, progress)
    return problems


def _inventory_problems(artifact: Artifact) -> Iterator[str]:
    try:
        artifact.open_parts()
    except ArtifactError as error:
        yield str(error)
    for entry in artifact.objects.values():
        if entry.problem is not None:
            yield entry.problem
    try:
        if artifact.model.registered is not None:
            yield from _registered_problems(artifact)
        else:
            yield from _parameter_problems(artifact)
    except ArtifactError as error:
        yield str(error)


def _registered_problems(artifact: Artifact) -> Iterator[str]:
    entry = artifact.model.registered
    assert entry is not None
    expected: dict[str, ObjectPlan] = {plan.name: plan for plan in entry.plan()}
    drafter = artifact.model.drafter
    if drafter is not None and drafter is entry.optional_drafter:
        stored = {n: o for n, o in artifact.objects.items() if n.startswith(drafter.component + "/")}
        with_drafter = plan_objects(entry.text, entry.schema, drafter=drafter, format_rule=_stored_format(stored))
        expected |= {plan.name: plan for plan in with_drafter if plan.name.startswith(drafter.component + "/")}
    yield from _set_problems(str(entry.identity), expected, artifact.objects)
    for name, plan in expected.items():
        found = artifact.objects.get(name)
        if found is None:
            continue
        if not isinstance(found, TensorObject):
            if plan.format is not None:
                yield f"object {quoted(name)}: a resource; {entry.identity} has a tensor there"
        elif plan.format is None:
            yield f"object {quoted(name)}: a tensor; {entry.identity} has a resource there"
        elif (found.shape, found.format) != (plan.shape, plan.format):
            yield (
                f"object {quoted(name)}: {quoted(found.format)} {list(found.shape)}; "
                f"{entry.identity} requires {plan.format} {list(plan.shape)}"
            )
    yield from _divisor_problems(artifact)


def _stored_format(stored: Mapping[str, StoredObject]) -> Callable[[str, str], str]:
    """A format rule that takes what the file has: the formats of these objects are not fixed by any publication."""

    def rule(name: str, default: str) -> str:
        entry = stored.get(name)
        return entry.format if isinstance(entry, TensorObject) and entry.problem is None else default

    return rule


def _set_problems(owner: str, expected: Mapping[str, object], found: Mapping[str, object]) -> Iterator[str]:
    missing = [name for name in expected if name not in found]
    if missing:
        yield f"{owner}: {len(missing)} missing, the first is {quoted(missing[0])}"
    extra = [name for name in found if name not in expected]
    if extra:
        yield f"{owner}: {len(extra)} not expected, the first is {quoted(extra[0])}"


def _expected_model(artifact: Artifact) -> tuple[dict[str, Binding], dict[str, StoredObject]]:
    """Bindings and objects of a model with the components that the artifact has, all weights BF16."""
    model = artifact.model
    present = {name.split("/", 1)[0] for name in model.bindings}
    drafter: DraftDims | None = model.drafter
    rows = 0
    if "proposal" in present:
        rows = sum(view.r1 - view.r0 for view in artifact.parameter("proposal/head"))
    vision = model.vision
    if "vision" in present and vision is None:
        raise ConfigError("the artifact holds vision objects but no vision configuration")
    placed = place(
        plan_objects(
            model.dims,
            "bf16",
            with_mtp="mtp" in present,
            with_vision=vision if "vision" in present else None,
            draft_rows=rows,
            drafter=drafter,
        )
    )
    return bindings_of(placed, model.dims, drafter), {entry.name: entry for entry in placed}


def _parameter_problems(artifact: Artifact) -> Iterator[str]:
    """Models outside the registry: the parameters, their shapes and the types that the mathematics fixes."""
    model = artifact.model
    expected, planned = _expected_model(artifact)
    found = model.bindings
    if artifact.version == 3:  # extra bindings are not an error there
        found = {name: binding for name, binding in found.items() if name in expected}
    yield from _set_problems("parameters", expected, found)
    for name, binding in expected.items():
        if name not in found:
            continue
        plan = planned[binding.parts[0].object]
        assert isinstance(plan, TensorObject)
        rows = sum(part.end - part.begin for part in binding.parts) // math.prod(plan.shape[1:])
        yield from _one_parameter(artifact, name, found[name], (rows, *plan.shape[1:]) if plan.shape else (), plan)
    if artifact.version == 3:
        yield from _use_problems(artifact, uses_of(expected, planned))
        return
    for name, entry in artifact.objects.items():
        if not isinstance(entry, TensorObject) and name not in RESOURCES and name != CONFIG_RESOURCE:
            yield f"object {quoted(name)}: not a resource of this schema"
    yield from _divisor_problems(artifact)


def _one_parameter(
    artifact: Artifact, name: str, binding: Binding, shape: tuple[int, ...], plan: TensorObject
) -> Iterator[str]:
    covered = sum(part.end - part.begin for part in binding.parts)
    if covered != math.prod(shape):
        yield f"parameter {quoted(name)}: {covered} elements stored, {list(shape)} required"
        return
    tensors = [artifact.objects[part.object] for part in binding.parts]
    for tensor in tensors:
        assert isinstance(tensor, TensorObject)
        if binding.whole and tensor.shape != shape:
            yield f"parameter {quoted(name)}: shape {list(tensor.shape)} stored, {list(shape)} required"
        free = len(shape) == 2 and plan.format not in (FP32, I32)  # a matrix may have any weight format
        if tensor.problem is None and not free and tensor.format != plan.format:
            yield f"parameter {quoted(name)}: stored as {tensor.format}, {plan.format} required"


def _use_problems(artifact: Artifact, expected: list[Use]) -> Iterator[str]:
    uses = artifact.model.uses
    for use in expected:
        if use.parameter not in artifact.model.bindings:
            continue
        found = uses.get((use.parameter, use.input))
        if found is None:
            yield f"parameter {quoted(use.parameter)}: no use at input {quoted(use.input)}"
            continue
        try:
            divisor = artifact.model.input_divisor(use.parameter, use.input)
        except ArtifactError as error:
            yield str(error)
            continue
        parent = artifact.objects[artifact.model.bindings[use.parameter].parts[0].object]
        nvfp4 = isinstance(parent, TensorObject) and parent.format == NVFP4
        if nvfp4 and found.policy == "AllowA4" and divisor is None:
            yield f"parameter {quoted(use.parameter)}: NVFP4 with policy AllowA4 needs an {DIVISOR_ROLE}"


def _divisor_problems(artifact: Artifact) -> Iterator[str]:
    """Versions 1 and 2: only NVFP4 parents have an input divisor, and it is finite and positive.

    Registered inventories name every divisor. Elsewhere a parent may lack it: nobody measured its activations, so they
    are not quantized.
    """
    known = {divisor_name(n) for n, o in artifact.objects.items() if isinstance(o, TensorObject) and o.format == NVFP4}
    for name, entry in artifact.objects.items():
        if not name.endswith(DIVISOR_SUFFIX):
            continue
        if name not in known:
            yield f"object {quoted(name)}: an input divisor without an NVFP4 parent"
        elif not isinstance(entry, TensorObject) or entry.format != FP32 or entry.shape != ():
            yield f"object {quoted(name)}: an input divisor must be one FP32 scalar"
        else:
            value = float(artifact.tensor_bytes(name).view("<f4")[0])
            if not (math.isfinite(value) and value > 0):
                yield f"object {quoted(name)}: input divisor {value} must be finite and positive"


# Stored values


def _value_problems(artifact: Artifact, progress: Progress | None) -> list[str]:
    """Check every word on all cores, one finding per object at most."""
    tensors = [entry for entry in artifact.objects.values() if isinstance(entry, TensorObject) and not entry.problem]
    total = sum(tensor.bytes for tensor in tensors)
    problems: dict[str, str] = {}
    done = 0
    jobs = _jobs(artifact, tensors)
    threads = default_threads()
    with ThreadPoolExecutor(threads) as pool:
        running: list[tuple[TensorObject, int, Future[str | None]]] = []

        def collect(count: int) -> None:
            nonlocal done
            for tensor, share, future in running[:count]:
                problem = future.result()
                if problem is not None:
                    problems.setdefault(tensor.name, f"object {quoted(tensor.name)}: {problem}")
                done += share
                if progress is not None:
                    progress(min(done, total), total)
            del running[:count]

        while batch := list(islice(jobs, threads)):  # bounded: a huge tensor has millions of blocks
            for tensor, data, r0, r1 in batch:
                share = tensor.bytes * (r1 - r0) // tensor.shape[0]
                running.append((tensor, share, pool.submit(_check_block, tensor, data, r0, r1)))
            collect(max(0, len(running) - 2 * threads))
        collect(len(running))
    for problem in _token_id_problems(artifact):
        problems.setdefault("token ids", problem)
    return list(problems.values())


def _jobs(artifact: Artifact, tensors: Iterable[TensorObject]) -> Iterator[tuple[TensorObject, Array, int, int]]:
    """Blocks of rows of a few MiB, each with the bytes of its whole tensor: a view, or read once where files join.

    Direct formats have no illegal words and no padding, so they need no blocks.
    """
    for tensor in tensors:
        if tensor.format in DIRECT:
            continue
        data = artifact.tensor_bytes(tensor.name)
        step = 4 * rows_per_block(tensor.shape[1], LAYOUTS[tensor.layout].row_unit)
        for r0 in range(0, tensor.shape[0], step):
            yield tensor, data, r0, min(r0 + step, tensor.shape[0])


def _check_block(tensor: TensorObject, data: Array, r0: int, r1: int) -> str | None:
    """The first broken rule among rows [r0, r1), or None."""
    layout = LAYOUTS[tensor.layout]
    if layout.row_unit * tensor.shape[1] > MAX_BLOCK_ELEMENTS:
        return f"rows of {tensor.shape[1]} columns are too long to check"
    try:
        FORMATS[tensor.format].check_words(layout.unpack_rows(tensor.format, tensor.shape, data, r0, r1))
        layout.check_padding(tensor.format, tensor.shape, data, r0, r1)
    except ArtifactError as error:
        return f"rows {r0} to {r1 - 1}: {error}"
    return None


def _token_id_problems(artifact: Artifact) -> Iterator[str]:
    """The id map of the proposal head: unique ids of real tokens."""
    try:
        if "proposal/token_ids" not in artifact.model.bindings:
            return
        tensor = artifact.parameter("proposal/token_ids")[0].object
        limit = artifact.model.dims.vocabulary if artifact.model.registered is None else TOKEN_IDS
        if tensor.format != I32:
            return
        ids = artifact.tensor_bytes(tensor.name).view("<i4")
    except ArtifactError as error:
        yield str(error)
        return
    if int(ids.min()) < 0 or int(ids.max()) >= limit:
        yield f"object {quoted(tensor.name)}: token ids must lie in 0 to {limit - 1}"
        return
    seen = np.zeros(limit, bool)
    if ids.size <= limit:
        seen[ids] = True
    if np.count_nonzero(seen) != ids.size:
        yield f"object {quoted(tensor.name)}: token ids must be unique"
