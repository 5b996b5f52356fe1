"""Ops and their definitions. An op node is data; what it means stands in one room, ``compiler/ops/<kind>.py``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from compiler.ir.types import IRError, Kind, Ref, TensorType, Value

Attr = int | float | str | bool
Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Op:
    """One node: ``kind`` names its definition. Inputs are read, outputs are fully written for the active columns,
    ``state`` refs are read and updated in place (KV pages, windows, recurrent states, tables)."""

    kind: str
    inputs: Mapping[str, Ref]
    outputs: Mapping[str, Ref]
    state: Mapping[str, Ref] = field(default_factory=dict)
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    rank: int = 0
    layer: int = -1

    def int_attr(self, name: str) -> int:
        value = self.attrs[name]
        if not isinstance(value, int):
            raise IRError(f"op {self.kind}: attribute {name} is {value!r}, an integer is needed")
        return value

    def float_attr(self, name: str) -> float:
        value = self.attrs[name]
        if isinstance(value, str):
            raise IRError(f"op {self.kind}: attribute {name} is {value!r}, a number is needed")
        return float(value)

    @property
    def half(self) -> int | None:
        """Which half of the columns of its activations the op is about (compiler/passes/halves.py); None: all of them."""
        return self.int_attr("half") if "half" in self.attrs else None

    def refs(self) -> list[tuple[str, Ref]]:
        return [*self.inputs.items(), *self.state.items(), *self.outputs.items()]


@dataclass(frozen=True)
class Cost:
    """Bytes that must move through device memory and floating-point operations, per execution with all columns."""

    read: int = 0
    written: int = 0
    flops: int = 0


class Context(Protocol):
    """What a reference sees: the op's operands in the numerics at hand.

    ``exact``: arrays are float64 and nothing is rounded. Engine numerics: arrays are float32 holding values of the
    storage dtype, ``put`` rounds to it. Only *active* columns are seen: row i of an activation is column
    ``columns[i] = (lane, t)``; the other rows keep what they hold (NaN in the VM).
    """

    exact: bool
    lanes: int
    width: int  # T, columns per lane
    columns: list[tuple[int, int]]

    def rows(self, name: str) -> list[tuple[int, int]]:
        """(lane, t) of each row that ``get(name)`` gives: the active columns, or, for a value with one row per lane,
        each active lane with its last column."""

    def get(self, name: str) -> Array:
        """Activation operand ``name`` (input or output by its operand name), [active columns, width of the ref]."""

    def put(self, name: str, value: Array) -> None:
        """Store the active columns of output ``name``, rounding to its dtype under engine numerics."""

    def whole(self, name: str) -> Array:
        """The whole array of a state, table, scratch or weight vector (a writable view: assign in place; under engine
        numerics bf16 storage is presented as float32 and ``store`` must be called to write it back)."""

    def store(self, name: str, value: Array) -> None:
        """Write back the whole array of a state or table operand, rounding to its dtype under engine numerics."""

    def weight(self, name: str, rows: tuple[int, int] | None = None) -> Array:
        """Decoded weight matrix [N, K] (or vector), float64 or float32; ``rows`` narrows to a half-open range."""

    def round(self, value: Array, dtype: str = "bf16") -> Array:
        """Round to ``dtype`` under engine numerics; the identity under exact numerics."""


class OpDef(ABC):
    """Everything the compiler knows of one op kind. One instance per kind, registered on import."""

    kind: ClassVar[str]
    inputs: ClassVar[tuple[str, ...]]
    outputs: ClassVar[tuple[str, ...]]
    state: ClassVar[tuple[str, ...]] = ()
    optional: ClassVar[frozenset[str]] = frozenset()
    attrs: ClassVar[Mapping[str, type]] = {}

    @abstractmethod
    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        """Shape and dtype rule. ``types`` maps operand names to the type of the *ref* (last axis narrowed).

        Raises IRError naming the operand and what is allowed."""

    @abstractmethod
    def reference(self, op: Op, ctx: Context) -> None:
        """NumPy meaning of the op for the active columns, by the formula of the specification."""

    @abstractmethod
    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        """Bytes and FLOPs with every column active."""


REGISTRY: dict[str, OpDef] = {}


def register(definition: type[OpDef]) -> type[OpDef]:
    """Class decorator: make the definition known by its kind. A second definition of a kind is an error."""
    if definition.kind in REGISTRY:
        raise IRError(f"op kind {definition.kind} is defined twice")
    REGISTRY[definition.kind] = definition()
    return definition


def definition(kind: str) -> OpDef:
    if kind not in REGISTRY:
        raise IRError(f"op kind {kind!r} is unknown; known: {', '.join(sorted(REGISTRY))}")
    return REGISTRY[kind]


def require(condition: bool, op: Op, rule: str) -> None:
    """Raise IRError for ``op`` with the rule it breaks."""
    if not condition:
        raise IRError(f"op {op.kind} (layer {op.layer}, rank {op.rank}): {rule}")


def ref_type(ref: Ref, value: Value) -> TensorType:
    """Type of a use: the value's type with its last axis narrowed to the ref's width."""
    if ref.width == 0:
        return value.type
    if not value.type.shape or ref.offset < 0 or ref.offset + ref.width > value.type.shape[-1]:
        raise IRError(f"ref {ref} lies outside value {value.name} of shape {value.type.shape}")
    return TensorType((*value.type.shape[:-1], ref.width), value.type.dtype)


def operand_type(op: Op, ref: Ref, value: Value) -> TensorType:
    """Type of a use by ``op``: of an activation only the columns that the op is about."""
    kind = ref_type(ref, value)
    if op.half is None or value.kind is not Kind.ACTIVATION:
        return kind
    return TensorType((kind.shape[0] // 2, *kind.shape[1:]), kind.dtype)


def bf16_round(value: Array) -> Array:
    """Round float32 to bfloat16, nearest-even, returned as float32; NaN stays NaN."""
    x = np.ascontiguousarray(value, dtype=np.float32)
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return np.where(np.isnan(x), x, rounded.view(np.float32)).astype(np.float32)
