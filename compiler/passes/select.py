"""Kernel choice and fusion: which family serves an op (or a run of ops) on the target, by its capabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from compiler.ir.graph import OpGraph
from compiler.ir.op import Op
from compiler.ir.types import IRError, Ref, TensorType
from compiler.kernels.spec import DeviceCaps, KernelSpec
from compiler.passes.schedule import Group


@dataclass(frozen=True)
class Site:
    """One op at the place where a kernel is chosen for it."""

    graph: OpGraph
    op: Op
    caps: DeviceCaps

    @property
    def types(self) -> Mapping[str, TensorType]:
        return self.graph.types(self.op)

    @property
    def columns(self) -> int:
        return self.graph.columns

    @property
    def prefill(self) -> bool:
        return self.graph.phase == "prefill"

    def format(self, operand: str = "w") -> str:
        """Numeric format of a weight operand."""
        source = self.graph.values[self.op.inputs[operand].value].source
        if source is None:
            raise IRError(f"op {self.op.kind}: {operand} is no weight")
        return source.format


Choice = Callable[[Site], KernelSpec]
FAMILIES: dict[str, Choice] = {}


def family(kind: str) -> Callable[[Choice], Choice]:
    """Register the function that chooses a kernel for ops of ``kind``."""

    def add(choice: Choice) -> Choice:
        FAMILIES[kind] = choice
        return choice

    return add


def row_count(site: Site, spec: KernelSpec) -> dict[str, Ref]:
    """The device-side row count that prefill kernels take besides their op's operands."""
    if not spec.template.startswith("linear_rows"):
        return {}
    return {"rows": Ref("pf_lane_ncols" + (f"@{site.op.rank}" if site.op.rank else ""))}


def operands(op: Op) -> dict[str, Ref]:
    return dict(op.refs())


def select(graph: OpGraph, caps: DeviceCaps) -> list[Group]:
    """One kernel per op or fused run of ops, in build order. Raises IRError when no family serves an op."""
    import compiler.passes.families  # noqa: F401  registers the choices

    groups = []
    for node, op in graph.ops():
        if op.kind not in FAMILIES:
            raise IRError(f"op {op.kind} has no kernel family; known: {', '.join(sorted(FAMILIES))}")
        site = Site(graph, op, caps)
        spec = FAMILIES[op.kind](site)
        groups.append(Group(spec, (op,), (node,), operands(op) | row_count(site, spec), frozenset(), op.rank))
    return groups
