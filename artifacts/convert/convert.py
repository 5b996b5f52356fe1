"""`convert`: a Hugging Face checkpoint directory becomes a `.ninfer` artifact of version 2 or 3."""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from artifacts.container.artifact import HEADER_BYTES
from artifacts.container.directory_v2 import encode_directory
from artifacts.container.directory_v3 import DirectoryV3
from artifacts.container.payload import PART_HEADER_BYTES
from artifacts.container.schema import METADATA_ALIGNMENT, place
from artifacts.container.writer import ArtifactWriter, PayloadWriter
from artifacts.container.writer_v3 import DEFAULT_FILE_LIMIT, ArtifactWriterV3, plan_files
from artifacts.convert.checkpoint import Checkpoint
from artifacts.convert.config import text_dimensions, vision_dimensions
from artifacts.convert.frontend import draft_token_ids, frontend_resources, read_ranking, token_domain
from artifacts.convert.linear import Notes
from artifacts.convert.plan import ConversionPlan, Planner, registered_for
from artifacts.convert.preflight import preflight
from artifacts.convert.recipe import Recipe, load_recipe
from artifacts.convert.sources import Source
from artifacts.convert.write import Progress, require_equal, work_elements, write_jobs
from artifacts.errors import ConfigError, OutputError, quoted, quoted_path
from artifacts.formats import Array
from artifacts.identities import TextDims
from artifacts.identities.plan import RESOURCES
from artifacts.identities.registry import DRAFT_HEAD_ROWS
from artifacts.layouts import align_up

VOCABULARY_FORMATS = {"W8": "W8G32_F16S", "Q6": "Q6G64_F16S"}
Log = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """What to convert to. `weights` is bf16, groupwise-int, nvfp4, a shipped recipe or a recipe file (.toml).

    `model_id` None: the directory's name. `base`: the unquantized checkpoint of a quantized one. `vocabulary`: W8 or Q6
    (groupwise-int). `scale`: absmax or mse (NVFP4 from values). `overrides`: object name or pattern -> format.
    `vision` None: kept where the identity needs it, else skipped. `ranking`: token counts for the draft head.
    `container`: 2, or 3, whose files hold at most `file_limit` bytes each. `dry_run`: check and plan, write nothing.
    """

    weights: str = "groupwise-int"
    model_id: str | None = None
    base: str | os.PathLike[str] | None = None
    vocabulary: str | None = None
    scale: str | None = None
    overrides: Mapping[str, str] | None = None
    vision: bool | None = None
    ranking: str | os.PathLike[str] | None = None
    threads: int | None = None
    overwrite: bool = False
    container: int = 2
    file_limit: int = DEFAULT_FILE_LIMIT
    dry_run: bool = False


def default_model_id(directory: Path) -> str:
    """A model id from a directory name: lower case, letters, digits, dots and hyphens."""
    name = re.sub(r"[^a-z0-9.-]+", "-", directory.resolve().name.lower()).strip("-.")
    return name or "model"


def choose_recipe(weights: str, source: Source) -> Recipe:
    """The recipe of `weights`; nvfp4 is told apart by what the checkpoint holds. Errors: ConfigError."""
    kinds = source.quantized_kinds()
    if weights == "nvfp4" and kinds:
        return load_recipe("nvfp4-mixed" if "fp8" in kinds else "nvfp4-packed")
    return load_recipe(weights)


def _vocabulary(options: Options, recipe: Recipe, model_id: str) -> str | None:
    if recipe.schema != "groupwise-int":
        if options.vocabulary is not None:
            raise ConfigError("--vocabulary belongs to groupwise-int weights; use --override for others")
        return None
    name = options.vocabulary or ("Q6" if model_id == "qwen3.6-27b" else "W8")
    if name not in VOCABULARY_FORMATS:
        raise ConfigError(f"--vocabulary {quoted(name)} is unknown; allowed: {', '.join(VOCABULARY_FORMATS)}")
    return VOCABULARY_FORMATS[name]


def _draft_ids(options: Options, source: Source, resources: Mapping[str, bytes], log: Log) -> Array | None:
    vocabulary = source.dims.vocabulary
    if vocabulary < DRAFT_HEAD_ROWS:
        if options.ranking is not None:
            raise ConfigError(f"--ranking: a draft head needs {DRAFT_HEAD_ROWS} vocabulary rows, not {vocabulary}")
        return None
    if options.ranking is None:
        log("no --ranking given: the artifact gets no draft head")
        return None
    domain, special = token_domain(resources, vocabulary)
    return draft_token_ids(read_ranking(options.ranking, vocabulary), domain, special, DRAFT_HEAD_ROWS)


def plan_conversion(
    main: Checkpoint, base: Checkpoint | None, options: Options, log: Log
) -> tuple[ConversionPlan, Recipe, Notes, list[Source]]:
    """Everything that is decided before the output is opened: all names, shapes, types and the identity."""
    text = text_dimensions(main.config)
    if text.is_moe:
        raise ConfigError("config.json: mixture-of-experts checkpoints cannot be converted; dense ones can")
    notes = Notes()
    source = Source(main, text, notes)
    base_source: Source | None = None
    if base is not None:
        if text_dimensions(base.config).to_config() != text.to_config():
            raise ConfigError("--base: its configuration has other dimensions than the checkpoint's")
        base_source = Source(base, text, notes)
    recipe = choose_recipe(options.weights, source).with_overrides(options.overrides or {}, options.scale)
    model_id = options.model_id if options.model_id is not None else default_model_id(main.directory)
    if not model_id or len(model_id) > 200:
        raise ConfigError("--model-id must have 1 to 200 characters")
    entry = registered_for(model_id, recipe.schema)

    def origin(pattern: str) -> Source:
        return base_source if base_source is not None and recipe.source_of(pattern) == "base" else source

    vision = None
    if options.vision or (options.vision is None and entry is not None):
        vision = vision_dimensions(origin("vision/").checkpoint.config)
        if not origin("vision/").has_vision:
            raise ConfigError("vision objects were asked for, but the checkpoint has no vision tensors")
    elif source.has_vision:
        log("the checkpoint's vision tower is skipped; --vision keeps it")
    resources = frontend_resources(origin(RESOURCES[0]).checkpoint.directory)
    for name in RESOURCES[:4]:
        if name not in resources:
            log(f"the checkpoint has no {name.removeprefix('frontend/')}")
    planner = Planner(
        text=text,
        vision=vision,
        recipe=recipe,
        main=source,
        base=base_source,
        notes=notes,
        vocabulary_format=_vocabulary(options, recipe, model_id),
        draft_ids=_draft_ids(options, source, resources, log),
        with_mtp=origin("mtp/").has_mtp,
    )
    layout = preflight(main, base, text, planner.needs(), log, published=entry.identity if entry else None)
    plan = planner.build(model_id, resources, origin("vision/").checkpoint.config)
    plan.layout = str(layout)
    return plan, recipe, notes, [source] if base_source is None else [source, base_source]


def convert(
    directory: str | os.PathLike[str],
    output: str | os.PathLike[str],
    options: Options | None = None,
    *,
    log: Log | None = None,
    progress: Callable[[int], Progress] | None = None,
) -> dict[str, Any]:
    """Convert a checkpoint directory to `output`, and write `<output>.conversion.json` beside it. Returns the report.

    The output appears under its name only when it is complete. `log` gets one-line remarks (what was skipped and why).
    `progress(total)` is called once with the matrix elements to process and returns a function that is told how many
    are done, from any thread. Errors: ConfigError, FormatError, PayloadError, FramingError, IdentityError for the
    checkpoint or the options; OutputError for the output.
    """
    options = options or Options()
    remarks: list[str] = []

    def say(text: str) -> None:
        remarks.append(text)
        if log is not None:
            log(text)

    target = Path(output)
    if not (options.overwrite or options.dry_run) and os.path.lexists(target):
        raise OutputError(f"{quoted(str(target))} exists already")
    with ExitStack() as stack:
        main = stack.enter_context(Checkpoint(directory))
        base = stack.enter_context(Checkpoint(options.base)) if options.base is not None else None
        plan, recipe, notes, sources = plan_conversion(main, base, options, say)
        if notes.inexact_divisors:
            say(f"{len(notes.inexact_divisors)} NVFP4 multipliers have no exact reciprocal; divisors are rounded")
        if notes.rounded_scales:
            say(f"{len(notes.rounded_scales)} FP8 scales are rounded to BF16")
        if notes.requantized:
            say(f"{len(notes.requantized)} objects are encoded from decoded quantized weights")
        output_of = _Output(target, plan, recipe, sources[0].dims, options)
        if not options.dry_run:
            tick = progress(work_elements(plan)) if progress is not None else None
            require_equal(plan.twins, options.threads, tick)
            with output_of.writer() as writer:
                write_jobs(writer, plan.jobs, recipe.scale, options.threads, tick)
        report = _report(target, output_of.file_bytes(), plan, recipe, notes, sources, remarks)
    if not options.dry_run:
        _write_report(target.with_name(target.name + ".conversion.json"), report)
    return report


class _Output:
    """The file that a plan becomes, in the container version that the options name. Errors: OutputError."""

    def __init__(self, target: Path, plan: ConversionPlan, recipe: Recipe, dims: TextDims, options: Options) -> None:
        if options.container not in (2, 3):
            raise OutputError(f"container version {options.container} is not written by convert; 2 and 3 are")
        self.target, self.plan, self.options = target, plan, options
        self.plans = [job.plan for job in plan.jobs]
        self.directory: DirectoryV3 | None = None
        if options.container == 3:
            model_id, weights_id = plan.identity
            provenance = {"converted": {"model_id": model_id, "weights_id": weights_id, "recipe": recipe.name}}
            self.directory = plan.directory_v3(provenance, dims)

    def file_bytes(self) -> int:
        """Length of all files together."""
        if self.directory is None:
            objects = place(self.plans)
            header = align_up(HEADER_BYTES[2] + len(encode_directory(self.plan.identity, objects)), METADATA_ALIGNMENT)
            return header + objects[-1].offset + objects[-1].bytes
        payload = self.directory.payload_bytes
        raw, files = plan_files(self.directory, payload, self.options.file_limit, self.target.name)
        return HEADER_BYTES[3] + len(raw) + payload + PART_HEADER_BYTES * (len(files) - 1)

    def writer(self) -> PayloadWriter:
        overwrite = self.options.overwrite
        if self.directory is None:
            return ArtifactWriter(self.target, self.plan.identity, self.plans, overwrite=overwrite)
        return ArtifactWriterV3(self.target, self.directory, limit=self.options.file_limit, overwrite=overwrite)


def _report(
    target: Path,
    file_bytes: int,
    plan: ConversionPlan,
    recipe: Recipe,
    notes: Notes,
    sources: list[Source],
    remarks: list[str],
) -> dict[str, Any]:
    checkpoints = [source.checkpoint for source in sources]
    objects: list[dict[str, Any]] = []
    for job in plan.jobs:
        record: dict[str, Any] = {"name": job.plan.name, "format": job.plan.format or "raw", "action": job.action}
        if job.stack is not None:
            record["from"] = [linear.name for linear in job.stack.linears]
        objects.append(record)
    return {
        "report": 1,
        "file": {"name": target.name, "bytes": file_bytes},
        "identity": {"model_id": plan.identity.model_id, "weights_id": plan.identity.weights_id},
        "registered": plan.registered,
        "checkpoints": [{"name": c.directory.resolve().name, "tensors": len(c.tensors)} for c in checkpoints],
        "source_layout": plan.layout,
        "recipe": {
            "name": recipe.name,
            "schema": recipe.schema,
            "scale": recipe.scale,
            "overrides": dict(recipe.overrides),
        },
        "remarks": remarks,
        "inexact_divisors": notes.inexact_divisors,
        "rounded_scales": notes.rounded_scales,
        "requantized": notes.requantized,
        "unused_tensors": sources[0].unused(),
        "objects": objects,
    }


def _write_report(path: Path, report: dict[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        temporary.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise OutputError(f"{quoted_path(path)}: {error.strerror or error}") from None
    finally:
        temporary.unlink(missing_ok=True)
