"""From what the user names to a loaded program: open, predict, compile at first use, place on a device."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path

import artifacts
from compiler.control import PAGE, ControlLimits
from compiler.driver import CompileOptions, limits_of, model_of
from compiler.explain.memory import amount, device_memory, total_bytes, weight_values
from compiler.model import ModelSpec
from compiler.program.model import Program
from runtime.backend import Backend, VMBackend
from runtime.cli.capacity import DRIVER_BYTES, auto_capacity
from runtime.cli.errors import UsageError
from runtime.cli.io import Diagnostics, Level
from runtime.cli.observe import ObservedBackend, compile_progress, describe, timed
from runtime.cli.options import AUTO, WIRES, read_devices
from runtime.cli.predict import cpu_seconds, duration
from runtime.cli.target import choose_place, compile_target, free_memory
from runtime.cuda.transport import HOST
from runtime.lockstep import CheckedBackend
from runtime.open import ArtifactWeights, cached_program, is_program, open_program
from runtime.vm import Machine
from runtime.vm.weights import WeightStore

DEFAULT_CONTEXT = 2048
DEFAULT_HEADROOM = 1024  # MiB
PATIENCE = 300.0
"""Seconds of predicted CPU time above which ``--yes`` is needed."""


@dataclass(frozen=True)
class Choices:
    """Options of running a program. None: the user did not say."""

    artifact: Path | None = None
    device: str | None = None
    arch: str | None = None
    card: str | None = None
    max_context: int | None = None
    max_concurrency: int | None = None
    prefill_chunk: int | None = None
    kv_capacity: int | None = None  # AUTO: what the device has room for
    headroom: int | None = None  # MiB that AUTO leaves free
    numerics: str | None = None
    eager: bool = False
    yes: bool = False
    tokens: int = 0  # tokens that an artifact's context shall hold where --max-context is not given
    devices: str | None = None  # one per rank
    transport: str | None = None
    exchange: str | None = None
    check_ranks: bool = False


def compile_options(spec: ModelSpec, max_context: int | None, max_concurrency: int | None, prefill_chunk: int | None,
                    kv_capacity: int | None = None, pairs: tuple[tuple[int, int], ...] = (), tp: int = 1,
                    exchange: str | None = None) -> CompileOptions:  # fmt: skip
    """Compile options with the defaults of the command line: a context of 2048 or the model's own limit. Raises UsageError."""
    if exchange is not None and tp == 1:
        raise UsageError(f"--exchange {exchange}: one rank exchanges nothing; add --tp 2 or --devices A,B")
    return CompileOptions(
        max_context=max_context or min(DEFAULT_CONTEXT, spec.max_position),
        max_concurrency=max_concurrency or 1,
        prefill_chunk=prefill_chunk or 1024,
        pairs=pairs,
        kv_capacity=kv_capacity,
        tp=tp,
        exchange=WIRES[exchange or "fp32"],
    )


def open_artifact(path: Path, say: Diagnostics) -> artifacts.Artifact:
    """Open an artifact and say so when an interrupted tool left a torn directory. Raises ArtifactError."""
    artifact = artifacts.open(path)
    if artifact.recovered_from is not None:
        say.line(f"{path}: an interrupted rewrite left a torn directory; reading {artifact.recovered_from.name} instead",
                 Level.WARNING)  # fmt: skip
    return artifact


def wire_of(program: Program) -> str:
    """What the ranks send each other in decode, as ``--exchange`` names it."""
    return next(name for name, known in WIRES.items() if known == program.options.get("exchange"))


class Source:
    """A program folder or an artifact, opened but not loaded. Raises at once what needs no compiling to be known."""

    def __init__(self, path: Path, choices: Choices, say: Diagnostics) -> None:
        if choices.headroom is not None and choices.kv_capacity != AUTO:
            raise UsageError("--vram-headroom-mib needs --kv-capacity auto")
        if choices.numerics not in (None, "exact", "engine"):
            raise UsageError(f"--numerics {str(choices.numerics)[:40]!r}: exact or engine is allowed")
        self.choices, self.say, self.path = choices, say, path
        self.place = choose_place(choices.device, read_devices(choices.devices) if choices.devices else None)
        if not self.place.cpu and choices.numerics:
            raise UsageError("--numerics is a choice of the CPU; add --device cpu")
        if self.place.cpu and choices.eager:
            raise UsageError("--no-cuda-graph needs a GPU; the CPU has no graphs")
        self.program: Program | None = None
        self.limits: ControlLimits
        self._checked: CheckedBackend | None = None
        self._observed: ObservedBackend | None = None
        if is_program(path) or path.is_dir():
            with timed(say, "program and artifact opened"):
                opened = open_program(path, choices.artifact)
            self.program, self.artifact = opened.program, opened.artifact
            self.spec, self.limits = self.program.spec, self.program.limits
            self._fixed()
            self._ranks(self.program.tp)
        else:
            self._ranks(len(self.place.devices) or 1)
            if choices.artifact is not None:
                raise UsageError("--artifact belongs to a program folder; an artifact was named itself")
            with timed(say, "artifact opened"):
                self.artifact = open_artifact(path, say)
                self.spec = model_of(self.artifact)
            context = choices.max_context or min(max(DEFAULT_CONTEXT, choices.tokens), self.spec.max_position)
            self.caps = compile_target(choices.arch, choices.card, self.place)
            self.options = self._capacity(compile_options(self.spec, context, choices.max_concurrency, choices.prefill_chunk,
                                                          choices.kv_capacity or None, (), len(self.place.devices) or 1,
                                                          choices.exchange))  # fmt: skip
            self.limits = limits_of(self.spec, self.options)

    def _capacity(self, options: CompileOptions) -> CompileOptions:
        """The KV capacity checked against what the sequences can use, or chosen by the GPU's free memory."""
        most = options.max_concurrency * (-(-options.max_context // PAGE) * PAGE)
        if self.choices.kv_capacity == AUTO:
            if self.place.cpu:
                return options  # host memory: room for each
            headroom = DEFAULT_HEADROOM if self.choices.headroom is None else self.choices.headroom
            places = self.place.devices
            free = [free_memory(index) // places.count(index) for index in places]
            found = auto_capacity(self.artifact, self.caps, options, free, headroom << 20)
            return options if found == most else replace(options, kv_capacity=found)
        if options.kv_capacity is not None and options.kv_capacity > most:
            raise UsageError(f"--kv-capacity {options.kv_capacity}: {options.max_concurrency} sequence(s) of "
                             f"{options.max_context} tokens use at most {most}")  # fmt: skip
        return options

    def _fixed(self) -> None:
        """What a program fixed when it was compiled can be repeated but not changed."""
        assert self.program is not None
        known = self.program.options
        if self.choices.kv_capacity == AUTO:
            raise UsageError("--kv-capacity auto: the program's capacity is fixed; run its artifact")
        for option, given in (("max_context", self.choices.max_context), ("prefill_chunk", self.choices.prefill_chunk),
                              ("kv_capacity", self.choices.kv_capacity)):  # fmt: skip
            if given is not None and given != known.get(option):
                raise UsageError(f"--{option.replace('_', '-')} {given}: the program was compiled with "
                                 f"{known.get(option) or 'its default'}; compile again to change it")  # fmt: skip
        if (self.choices.max_concurrency or 1) > self.limits.lanes:
            raise UsageError(f"--max-concurrency {self.choices.max_concurrency}: the program has {self.limits.lanes} lane(s); "
                             "compile again with more")  # fmt: skip
        exchange, tp = self.choices.exchange, self.program.tp
        if exchange is not None and (tp == 1 or WIRES[exchange] != known.get("exchange")):
            has = f"{tp} ranks that send {wire_of(self.program)}" if tp > 1 else "one rank"
            raise UsageError(f"--exchange {exchange}: the program has {has}; compile again to change it")
        if self.choices.arch or self.choices.card:
            raise UsageError("--arch and --as belong to compiling; the program has its target already")

    def _ranks(self, tp: int) -> None:
        """That every rank has a device, and that options of two ranks are given to two. Raises UsageError."""
        if not self.place.cpu and len(self.place.devices) != tp:
            raise UsageError(f"--devices {self.place}: the program has {tp} rank(s); name a GPU for each, such as "
                             f"{','.join(map(str, range(tp)))}")  # fmt: skip
        for option, given in (("--transport", self.choices.transport), ("--check-ranks", self.choices.check_ranks)):
            if given and tp == 1:
                raise UsageError(f"{option} belongs to two ranks; add --devices A,B")
        if self.choices.transport and self.place.cpu:
            raise UsageError(f"--transport {self.choices.transport}: on the CPU nothing is transported")

    def require_patience(self, prompt: int, generated: int) -> None:
        """On the CPU: predict the time and refuse what takes long unless the user said ``--yes``. Raises UsageError."""
        if self.place.cpu and not self.choices.yes:
            seconds = cpu_seconds(self.artifact, self.spec, prompt, generated, self.limits.chunk,
                                  self.choices.numerics == "exact")  # fmt: skip
            if seconds > PATIENCE:
                raise UsageError(f"--device cpu is predicted to take {duration(seconds)} for {prompt} + {generated} tokens; "
                                 "add --yes to run it all the same")  # fmt: skip

    def compiled(self) -> Program:
        """The program; an artifact's is taken from the user cache or compiled into it."""
        if self.place.reason:
            self.say.line(f"{self.place.reason}: the program runs on the CPU, on the Python VM", Level.WARNING)
        if self.program is None:
            with timed(self.say, "program"), compile_progress(self.say, self.caps.arch) as report:
                self.program, folder = cached_program(self.artifact, self.caps, self.options, report)
            self.say.line(f"program folder: {folder}", Level.DEBUG)
        return self.program

    def load(self) -> Backend:
        """The program on its device, with the load rows on stderr. Raises DeviceError."""
        program = self.compiled()
        store = WeightStore(ArtifactWeights(self.artifact))
        encoded = sum(nbytes for _, nbytes, _ in weight_values(program))
        describe(self.say, program)
        started = time.monotonic()
        if self.place.cpu:
            backend: Backend = VMBackend(Machine(program, store, self.choices.numerics or "engine"))
        else:
            from runtime.cuda.backend import CudaBackend

            if self.place.shared:
                self.say.line(f"--devices {self.place}: a test mode, both ranks on one GPU, each with half of it",
                              Level.WARNING)  # fmt: skip
            with self.say.progress("uploading weights", encoded, "B") as bar:
                backend = CudaBackend(program, store, list(self.place.devices), self.choices.eager,
                                      lambda done, _: bar.advance(done - bar.done),
                                      self.choices.transport or "auto")  # fmt: skip
        self.rows(program, backend, encoded, time.monotonic() - started)
        if self.choices.check_ranks:
            backend = self._checked = CheckedBackend(backend)
        if self.say.says(Level.DEBUG):
            backend = self._observed = ObservedBackend(backend, self.say)
        return backend

    def ended(self) -> None:
        """How many steps there were, and how many of them --check-ranks compared; one that differs ends the run."""
        if self._checked is not None:
            self.say.summary("ranks compared", f"{self._checked.rounds} steps, no difference")
        if self._observed is not None:
            self.say.line(f"launches: {self._observed.said()}", Level.DEBUG)

    def rows(self, program: Program, backend: Backend, encoded: int, seconds: float) -> None:
        """Load rows. encoded: bytes of the weights on the device; seconds: from opened to ready."""
        row, identity = self.say.summary, program.artifact
        tensors = sum(1 for item in self.artifact.objects.values() if isinstance(item, artifacts.TensorObject))
        row("target", program.caps.arch + (f" on cpu, {self.choices.numerics or 'engine'} numerics" if self.place.cpu
                                           else f" on cuda:{self.place}"))  # fmt: skip
        row("weights", f"{identity.model_id or '-'} / {identity.weights_id or '-'}, container version {identity.version}")
        row("artifact file", amount(identity.file_bytes))
        row("tensors / resources", f"{tensors} / {len(self.artifact.objects) - tensors}")
        row("tensor parallel", program.tp)
        row("rope", f"native, factor 1, origin {program.spec.max_position}, ceiling {program.limits.max_context}, mscale 1, "
                    f"theta {program.spec.rope_theta:g}")  # fmt: skip
        if self.place.cpu:
            row("cpu weights", f"{amount(encoded)}, decoded at first use")
            return
        from runtime.cuda.backend import CudaBackend

        assert isinstance(backend, CudaBackend)
        sent, took = backend.uploaded
        row("weight upload", f"{amount(sent)} in {took:.2f} s, {sent / 1e9 / max(took, 1e-9):.2f} GB/s")
        row("load", f"{seconds:.2f} s with kernels and graphs")
        if backend.exchange is not None:
            row("transport", f"{backend.exchange.transport}, {wire_of(program)}")
        for rank, uses in enumerate(device_memory(program)):
            for use, nbytes in uses.items():
                row(f"gpu{rank} {use}", amount(nbytes))
            reserved, free = total_bytes(program, rank), backend.free_at_start[rank]
            row(f"gpu{rank} reserved", amount(reserved))
            info = backend.devices[rank].info()
            if not self.place.shared:  # else what the ranks took cannot be told apart
                elsewhere = uses["exchange"] if backend.exchange and backend.exchange.transport == HOST else 0
                row(f"gpu{rank} kernels and graphs", f"{amount(max(free - info.free - reserved + elsewhere, 0))}, "
                                                     f"{amount(DRIVER_BYTES)} allowed with the context")  # fmt: skip
                row(f"gpu{rank} planned slack", _signed(free - reserved - DRIVER_BYTES))
            row(f"gpu{rank} free at start", amount(free))
            row(f"gpu{rank} free / total", f"{amount(info.free)} / {amount(info.total)}")


def _signed(nbytes: int) -> str:
    return f"-{amount(-nbytes)}" if nbytes < 0 else amount(nbytes)
