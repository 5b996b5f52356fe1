"""Compile an artifact to a program: model → graphs → passes → sources → cubins."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import compiler.ops  # noqa: F401  registers every op kind
from artifacts.errors import ArtifactError
from compiler.build import PhaseRequest, TextBuilder
from compiler.control import MAX_CONTEXT, PAGE, ControlLimits, control_tables, table_offsets
from compiler.emit.cache import Job, compile_all
from compiler.emit.nvrtc import Resources
from compiler.emit.render import kernel_source
from compiler.ir.graph import check
from compiler.ir.op import Op
from compiler.ir.types import Kind, TensorType, Value
from compiler.kernels import exchange
from compiler.kernels.arrange import arrange_specs
from compiler.kernels.attention_decode import MAX_COLUMNS, row_limit, work_items
from compiler.kernels.spec import DeviceCaps, KernelSpec
from compiler.model import ModelError, ModelSpec, bind, spec_from_config
from compiler.ops.attn_prepare import frequency_table, native_frequencies
from compiler.passes.coresident import check_coresident
from compiler.passes.halves import PREFILL, in_halves
from compiler.passes.lower import lower
from compiler.passes.memory import align
from compiler.passes.schedule import Group, Scheduler
from compiler.passes.select import select
from compiler.passes.shard import WIRES, Sharder
from compiler.program.model import (
    CONTROL,
    EGRESS,
    EXCHANGE,
    RING,
    STATE,
    WEIGHTS,
    WORK,
    ArtifactIdentity,
    KernelImage,
    Phase,
    Placement,
    Program,
)
from compiler.shard.plan import ShardDims, ShardError, check_width

REGISTERED_IDS = 248077  # ids that the tokenizers of the registered models can produce (spec/frontend.md §1)
MAX_TOKENIZER = 64 << 20
NO_RESOURCES = Resources(0, 0, 0, 0, 0)
SCORE_LOGITS = 128 << 20  # bytes of the scoring phase's logits buffer, at most


class CompileOptionError(ValueError):
    """A compile option is outside what the model or the compiler allows; names the option and the range."""


SHORT_PROMPTS = (24, 32)  # columns of the decode graphs that take a short prompt at once


@dataclass(frozen=True)
class CompileOptions:
    """What a user chooses. ``pairs`` are the (lanes, columns) of the decode graphs."""

    max_context: int = 2048
    max_concurrency: int = 1
    prefill_chunk: int = 1024
    pairs: tuple[tuple[int, int], ...] = ()
    kv_capacity: int | None = None
    score: bool = True
    test_chunks: bool = False  # allow chunks of 16 and 64 (tests)
    tp: int = 1  # ranks
    exchange: str = "f32"  # what decode exchanges carry; bf16 halves the bytes and gives up bit-equality with one rank
    exchange_prefill: str = "bf16"
    fused: bool = True  # row-parallel products send their partial sums as they finish them

    def decode_pairs(self) -> list[tuple[int, int]]:
        """Decode graphs to build: those asked for, else 1×1, those of short prompts and max_concurrency×1."""
        pairs = set(self.pairs) or {(1, 1), *((1, width) for width in SHORT_PROMPTS)}
        pairs |= {(1, 1), (self.max_concurrency, 1)}
        return sorted(pairs)


class ArtifactSource(Protocol):
    """The part of ``artifacts.Artifact`` that compiling needs."""

    @property
    def version(self) -> int: ...
    @property
    def directory_digest(self) -> str: ...
    @property
    def file_bytes(self) -> int: ...
    @property
    def directory_bytes(self) -> int: ...
    @property
    def identity(self) -> Any: ...
    @property
    def model(self) -> Any: ...

    def text_config(self) -> dict[str, Any]: ...
    def parameter(self, name: str) -> Any: ...
    def object_index(self, name: str) -> int: ...


def vocabulary_ids(artifact: ArtifactSource, rows: int) -> int:
    """Size of the sampling domain: ids the artifact's tokenizer can produce; ``rows`` when it has none.

    Raises ModelError for a tokenizer that is not valid JSON or has ids outside the embedding.
    """
    if getattr(artifact.model, "registered", None) is not None:
        return REGISTERED_IDS
    raw = artifact.model.frontend("tokenizer.json")
    if raw is None:
        return rows
    if len(raw) > MAX_TOKENIZER:
        raise ModelError(f"tokenizer.json has {len(raw)} bytes; at most {MAX_TOKENIZER} are allowed")
    try:
        data = json.loads(raw)
        ids = [*data["model"]["vocab"].values(), *(token["id"] for token in data.get("added_tokens", []))]
        config = artifact.model.frontend("tokenizer_config.json")
        if config is not None and len(config) <= MAX_TOKENIZER:
            ids += [int(key) for key in json.loads(config).get("added_tokens_decoder", {})]
        top = max(ids)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"tokenizer.json has no usable vocabulary ({type(error).__name__}: {error})") from error
    if isinstance(top, bool) or not isinstance(top, int) or not 0 <= min(ids) <= top < rows:
        raise ModelError(f"tokenizer.json has ids up to {top!r}; the embedding has {rows} rows")
    return top + 1


def model_of(artifact: ArtifactSource) -> ModelSpec:
    """ModelSpec of an artifact. Raises ModelError."""
    try:
        config = artifact.text_config()
        rows = spec_from_config(config).vocab_rows
        return spec_from_config(config, vocabulary_ids(artifact, rows))
    except ArtifactError as error:
        raise ModelError(str(error)) from error


def limits_of(spec: ModelSpec, options: CompileOptions) -> ControlLimits:
    """Check the options against the model and fix the extents of the control block. Raises CompileOptionError."""
    if not 1 <= options.max_context <= min(spec.max_position, MAX_CONTEXT):
        raise CompileOptionError(f"--max-context {options.max_context}: 1…{min(spec.max_position, MAX_CONTEXT)} is allowed")
    if not 1 <= options.max_concurrency <= 64:
        raise CompileOptionError(f"--max-concurrency {options.max_concurrency}: 1…64 is allowed")
    try:
        check_width(ShardDims.of(spec), options.tp)
    except ShardError as error:
        raise CompileOptionError(str(error)) from None
    if options.tp > exchange.RANKS:
        raise CompileOptionError(f"--tp {options.tp}: 1 or {exchange.RANKS} is allowed; this model could be cut for up to "
                                 f"{spec.kv_heads} ranks, but kernels exchange between {exchange.RANKS}")  # fmt: skip
    chunk = options.prefill_chunk
    if not (chunk % 128 == 0 or (options.test_chunks and chunk in (16, 64))) or not 1 <= chunk <= 16384:
        raise CompileOptionError(f"--prefill-chunk {chunk}: a multiple of 128 up to 16384 is needed")
    for name, wire in (("--exchange", options.exchange), ("--exchange-prefill", options.exchange_prefill)):
        if wire not in WIRES:
            raise CompileOptionError(f"{name} {wire!r}: allowed are {', '.join(WIRES)}")
    pairs = options.decode_pairs()
    for lanes, width in pairs:
        if not 1 <= lanes <= options.max_concurrency or not 1 <= width or lanes * width > 64 or width > MAX_COLUMNS:
            raise CompileOptionError(f"--pairs {lanes}x{width}: 1…{options.max_concurrency} lanes, 1…{MAX_COLUMNS} columns "
                                     "per lane and at most 64 in all are allowed")  # fmt: skip
    per_lane = -(-options.max_context // PAGE)
    pages = options.max_concurrency * per_lane
    if options.kv_capacity is not None:
        if options.kv_capacity < options.max_context:
            raise CompileOptionError(f"--kv-capacity {options.kv_capacity}: at least --max-context {options.max_context}")
        pages = min(pages, max(-(-options.kv_capacity // PAGE), options.max_concurrency))
    return ControlLimits(
        lanes=options.max_concurrency,
        slots=options.max_concurrency,
        max_context=options.max_context,
        pages=pages,
        chunk=chunk,
        score_chunk=min(chunk, max(SCORE_LOGITS // (2 * spec.vocab_rows) // 128 * 128, 128)),
        records=max(width for _, width in pairs),
        vocab_rows=spec.vocab_rows,
        vocab_ids=spec.vocab_ids,
        kv_heads=spec.kv_heads,
        rotary_pairs=spec.rotary_dim // 2,
    )


def phase_requests(limits: ControlLimits, options: CompileOptions) -> list[PhaseRequest]:
    """The graphs of a program: decode pairs, one prefill chunk, and scoring (all-column head)."""
    requests = [PhaseRequest(f"decode{b}x{t}", "decode", b, t) for b, t in options.decode_pairs()]
    requests.append(PhaseRequest(PREFILL, "prefill", 1, limits.chunk))
    if options.score:
        requests.append(PhaseRequest("score", "prefill", 1, limits.score_chunk, all_columns=True, sample=False))
    return requests


def place_shared(shared: Mapping[str, Value], limits: ControlLimits) -> tuple[dict[str, Placement], list[dict[str, int]]]:
    """Placements of weights, states, tables and rings; region sizes per rank (WORK is added later). The ranks read one
    ingress ring; each has its own egress ring behind that of rank 0."""
    table_at, words = table_offsets(control_tables(limits))
    placements: dict[str, Placement] = {}
    sizes: dict[int, dict[str, int]] = {}
    for name, value in shared.items():
        size = sizes.setdefault(value.rank, {region: 0 for region in (WEIGHTS, CONTROL, STATE, WORK, RING, EGRESS)})
        base = name.partition("@")[0]
        if base == "block":
            placements[name] = Placement(CONTROL, 0, 4 * words, value.rank)
            size[CONTROL] = align(4 * words)
        elif base in table_at:
            placements[name] = Placement(CONTROL, 4 * table_at[base], value.nbytes, value.rank)
        elif base in ("ring", "egress"):
            region, at = (RING, 0) if base == "ring" else (EGRESS, value.rank * value.nbytes)
            placements[name] = Placement(region, at, value.nbytes, value.rank)
            size[region] = value.nbytes
            sizes[0][region] = max(sizes[0][region], at + value.nbytes)
        else:
            region = WEIGHTS if value.kind is Kind.WEIGHT else STATE
            placements[name] = Placement(region, size[region], value.nbytes, value.rank)
            size[region] += align(value.nbytes)
    return placements, [sizes[rank] for rank in sorted(sizes)]


def place_counters(groups: Sequence[Group], counters: dict[str, Placement], regions: list[dict[str, int]]) -> None:
    """Give zeroed scratch its own place in STATE, one per kernel, large enough for its largest launch."""
    for group in groups:
        for name in sorted(group.spec.zeroed):
            key, nbytes = f"{group.spec.entry}.{name}@{group.rank}", group.spec.scratch[name]
            if key not in counters or counters[key].nbytes < nbytes:
                counters[key] = Placement(STATE, regions[group.rank][STATE], nbytes, group.rank)
                regions[group.rank][STATE] += align(nbytes)


Progress = Callable[[int, int, str], None]
_log = logging.getLogger("ninferc")


class _Stages:
    """Seconds of compiler stages, summed over graphs, for the log."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._since = time.perf_counter()

    def done(self, stage: str) -> None:
        now = time.perf_counter()
        self._seconds[stage] = self._seconds.get(stage, 0.0) + now - self._since
        self._since = now

    def log(self) -> None:
        for stage, seconds in self._seconds.items():
            _log.info("%s: %.3f s", stage, seconds)


def compile_program(artifact: ArtifactSource, caps: DeviceCaps, options: CompileOptions, *, cache: Path | None = None,
                    workers: int | None = None, progress: Progress | None = None, images: bool = True) -> Program:  # fmt: skip
    """Compile ``artifact`` for ``caps``. ``images=False`` plans only: no NVRTC, kernels without source and cubin (what
    ``plan`` and the VM need).

    Raises ModelError, CompileOptionError, IRError, CompileError (NVRTC), CacheError. Only the artifact's directory and
    small resources are read, never the weights.
    """
    stages = _Stages()
    spec = model_of(artifact)
    limits = limits_of(spec, options)
    rows = row_limit(spec.head_dim, caps)
    items = max(work_items(b, t, spec.heads, spec.kv_heads, rows) for b, t in options.decode_pairs())
    builder = TextBuilder(spec, bind(artifact, spec), limits, items)
    graphs = [check(builder.build(request)) for request in phase_requests(limits, options)]
    stages.done("op graphs")
    shared: Mapping[str, Value] = builder.shared
    if options.tp > 1:
        sharder = Sharder(spec, options.tp, builder.shared, {"decode": options.exchange, "prefill": options.exchange_prefill},
                          options.fused)  # fmt: skip
        graphs = [check(sharder.run(graph)) for graph in graphs]
        graphs += [check(in_halves(graph)) for graph in graphs if graph.name == PREFILL]
        shared = sharder.shared
        stages.done("sharding")
    graphs = [check(lower(graph, caps)) for graph in graphs]
    stages.done("lowering")
    placements, regions = place_shared(shared, limits)
    phases: dict[str, Phase] = {}
    specs: dict[str, KernelSpec] = {}
    counters: dict[str, Placement] = {}
    exchanges: list[tuple[Op, Mapping[str, TensorType], KernelSpec]] = []
    for graph in graphs:
        groups = select(graph, caps)
        stages.done("fusion and kernel choice")
        exchanges += [(op, graph.types(op), group.spec) for group in groups for op in group.ops if op.kind in exchange.KINDS]
        place_counters(groups, counters, regions)
        for group in groups:
            known = specs.setdefault(group.spec.entry, group.spec)
            if (known.template, dict(known.params)) != (group.spec.template, dict(group.spec.params)):
                raise CompileOptionError(f"kernel name {group.spec.entry} stands for two different instantiations")
            if group.spec.smem > known.smem:
                specs[group.spec.entry] = group.spec
        phase, work = Scheduler(graph, groups, placements, caps.programmatic_edges, counters).run()
        phases[graph.name] = phase
        stages.done("memory and schedule")
        for rank, size in enumerate(work):
            regions[rank][WORK] = max(regions[rank][WORK], size)
    if options.tp > 1:
        specs |= {probe.entry: probe for probe in exchange.probe_specs(spec.hidden, caps)}
        for sizes in regions:
            sizes[EXCHANGE] = align(exchange.Mail.of(exchanges).size)
    specs |= arrange_specs(shared, (op for phase in phases.values() for op in phase.ops()), caps)
    stages.log()
    kernels = {entry: KernelImage(item, "", b"", NO_RESOURCES) for entry, item in specs.items()}
    if images:
        sources = {entry: kernel_source(item, caps) for entry, item in specs.items()}
        cubins = compile_all([Job(entry, source, caps.arch) for entry, source in sources.items()], cache, workers, progress)
        kernels = {
            entry: KernelImage(specs[entry], sources[entry], cubins[entry].image, cubins[entry].resources)
            for entry in specs
        }
    if options.tp > 1:
        check_coresident(phases, kernels, caps)
    identity = ArtifactIdentity(artifact.directory_digest, artifact.file_bytes, artifact.directory_bytes, artifact.version,
                                artifact.identity.model_id, artifact.identity.weights_id or "")  # fmt: skip
    frequencies = frequency_table(native_frequencies(spec.rope_theta, spec.rotary_dim))
    words = [int(word) for word in frequencies.reshape(-1)]
    constants = {name: words for name in shared if name.partition("@")[0] == "inv_freq"}
    return Program(spec, limits, caps, identity, options.tp, dict(shared), placements, regions, phases, kernels,
                   constants, asdict(options))  # fmt: skip
