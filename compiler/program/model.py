"""Data model of a program: values with placements, phases with a linear schedule of kernel calls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from compiler.control import ControlLimits
from compiler.emit.nvrtc import Resources
from compiler.ir.op import Op
from compiler.ir.types import TensorType, Value
from compiler.kernels.spec import DeviceCaps, KernelSpec
from compiler.model.spec import ModelSpec

# Device regions, one allocation each per rank; HOST regions are pinned host memory shared by the ranks.
WEIGHTS, CONTROL, STATE, WORK = "weights", "control", "state", "work"
RING, EGRESS = "ring", "egress"
DEVICE_REGIONS = (WEIGHTS, CONTROL, STATE, WORK)
EXCHANGE = "exchange"  # of programs for two ranks: what the other rank writes to, in device memory or page-locked host memory
ALIGNMENT = 256


@dataclass(frozen=True)
class Placement:
    """A byte range of one region of one rank."""

    region: str
    offset: int
    nbytes: int
    rank: int = 0

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True)
class Arg:
    """One kernel argument: a pointer (``region`` and byte ``offset`` on ``rank``), a null pointer, an i32 or an f32."""

    name: str
    kind: str  # "pointer", "null", "int", "float"
    region: str = ""
    offset: int = 0
    number: int | float = 0
    rank: int = 0


@dataclass(frozen=True)
class Call:
    """One kernel launch and the ops it replaces.

    ``internal`` are values that live only inside the call (fused away: no memory). ``scratch`` are declared ranges,
    dead outside the call. ``deps`` are calls that must have completed: data hazards and reuse of a range. A call
    ``beside`` the chain of its rank runs while the chain goes on, up to the first call that has it among its ``deps``.
    """

    index: int
    rank: int
    entry: str
    args: tuple[Arg, ...]
    grid: tuple[int, int, int]
    block: int
    smem: int
    cluster: tuple[int, int, int]
    ops: tuple[Op, ...]
    deps: tuple[int, ...]
    scratch: Mapping[str, Placement] = field(default_factory=dict)
    internal: Mapping[str, TensorType] = field(default_factory=dict)
    programmatic: bool = False
    beside: bool = False


@dataclass(frozen=True)
class Phase:
    """One graph: B lanes × T columns. ``placements`` are those of its activations, in region WORK;
    ``outputs`` are activations that stay readable until the next launch."""

    name: str
    phase: str
    lanes: int
    width: int
    calls: tuple[Call, ...]
    values: Mapping[str, Value]
    placements: Mapping[str, Placement]
    outputs: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()  # hidden rows before the output head of every rank, for the cross-rank check

    @property
    def columns(self) -> int:
        return self.lanes * self.width

    def ops(self) -> Iterator[Op]:
        """The ops of all calls, in order."""
        return (op for call in self.calls for op in call.ops)


@dataclass(frozen=True)
class KernelImage:
    """A kernel of the program: its spec, source digest, resources and the file names inside the program folder."""

    spec: KernelSpec
    source: str
    image: bytes
    resources: Resources


@dataclass(frozen=True)
class ArtifactIdentity:
    """What binds a program to its artifact: the directory's SHA-256, the size, and what the user may read."""

    directory_sha256: str
    file_bytes: int
    directory_bytes: int
    version: int
    model_id: str
    weights_id: str


@dataclass
class Program:
    """Everything a runtime needs besides the artifact's bytes. ``values`` are the shared ones (weights, states,
    tables); ``regions[rank][region]`` their sizes in bytes."""

    spec: ModelSpec
    limits: ControlLimits
    caps: DeviceCaps
    artifact: ArtifactIdentity
    tp: int
    values: dict[str, Value]
    placements: dict[str, Placement]
    regions: list[dict[str, int]]
    phases: dict[str, Phase]
    kernels: dict[str, KernelImage]
    constants: dict[str, list[int]] = field(default_factory=dict)  # table name -> its i32 words at load time
    options: dict[str, Any] = field(default_factory=dict)

    def placement(self, phase: Phase, value: str) -> Placement:
        """Where a value of ``phase`` lies. Raises KeyError for an internal value."""
        return phase.placements[value] if value in phase.placements else self.placements[value]

    def value(self, phase: Phase, name: str) -> Value:
        return phase.values[name] if name in phase.values else self.values[name]
