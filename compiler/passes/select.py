"""Kernel choice and fusion: which family serves an op (or a run of ops) on the target, by its capabilities."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from compiler.ir.graph import OpGraph
from compiler.ir.op import Op
from compiler.ir.types import IRError, Ref, TensorType
from compiler.kernels import exchange
from compiler.kernels.spec import DeviceCaps, KernelSpec
from compiler.ops.exchange_residual import peers_of
from compiler.passes.early import check_early, settled
from compiler.passes.gdn_layer import gdn_layer_at
from compiler.passes.halves import rows_of
from compiler.passes.input_pair import input_pair_at, weight_format
from compiler.passes.norm_prologue import norm_prologue_at
from compiler.passes.schedule import Group


@dataclass(frozen=True)
class Site:
    """One op at the place where a kernel is chosen for it, behind the groups ``before``."""

    graph: OpGraph
    op: Op
    caps: DeviceCaps
    before: Sequence[Group] = ()

    @property
    def types(self) -> Mapping[str, TensorType]:
        return self.graph.types(self.op)

    @property
    def columns(self) -> int:
        return self.graph.columns

    @property
    def prefill(self) -> bool:
        return self.graph.phase == "prefill"

    def settled(self, *inputs: str) -> bool:
        """Whether the kernel may read these inputs before its dependency wait."""
        values = {self.op.inputs[name].value for name in inputs}
        return settled(self.graph, self.before, self.op.rank, values, set(), self.caps.programmatic_edges)

    def format(self, operand: str = "w") -> str:
        """Numeric format of a weight operand."""
        return weight_format(self.graph, self.op, operand)


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
    return {"rows": rows_of(site.op.rank, site.op.half)}


def operands(op: Op) -> dict[str, Ref]:
    return dict(op.refs())


def norm_behind(graph: OpGraph, node: int) -> int | None:
    """The rmsnorm of an exchange's result on the same rank: one kernel can do both."""
    op = graph.op(node)
    if op.kind != "exchange_residual":
        return None
    for _, after in sorted(graph.dag.out_edges(node)):
        other = graph.op(after)
        same = (other.rank, other.half) == (op.rank, op.half)
        if other.kind == "rmsnorm" and same and other.inputs["x"] == op.outputs["y"]:
            return int(after)
    return None


def sent_tiles(op: Op, before: Sequence[Group]) -> exchange.Tiles | None:
    """The tiles that the products in front of an exchange send, None when they send none. Raises IRError when those of the
    ranks differ: a kernel knows where its own rank's tiles lie and awaits the other's there."""
    if not op.attrs["tiles"]:
        return None
    wanted = {op.inputs[name].value for name in ("partial", *peers_of(op))}
    found = {exchange.tiles_of(group.spec) for group in before
             if group.operands.get("y", Ref("")).value in wanted and group.spec.params.get("push")}  # fmt: skip
    if len(found) != 1:
        raise IRError(f"op {op.kind} (layer {op.layer}): products send tiles of {len(found)} shapes, not of one")
    return found.pop()


def exchange_spec(site: Site, norm: Op | None = None) -> KernelSpec:
    """The kernel of an exchange, with ``norm`` behind it in the same kernel."""
    # prefill takes its number of rows, which the host writes, behind the wait
    early = not site.prefill and site.settled(*exchange.SETTLED)
    return exchange.residual_spec(site.op, site.types, site.caps, norm, sent_tiles(site.op, site.before), early)


def exchange_and_norm(graph: OpGraph, node: int, norm: int, caps: DeviceCaps, before: Sequence[Group]) -> Group:
    """An exchange with the norm behind it; both results are stored."""
    op, behind = graph.op(node), graph.op(norm)
    spec = exchange_spec(Site(graph, op, caps, before), behind)
    extra = {"norm_w": behind.inputs["w"], "normed": behind.outputs["y"]}
    return Group(spec, (op, behind), (node, norm), operands(op) | extra, frozenset(), op.rank)


def select(graph: OpGraph, caps: DeviceCaps) -> list[Group]:
    """One kernel per op or fused run of ops, in build order. Raises IRError when no family serves an op."""
    import compiler.passes.families  # noqa: F401  registers the choices

    groups: list[Group] = []
    fused: set[int] = set()
    for node, op in graph.ops():
        if node in fused:
            continue
        if (norm := norm_behind(graph, node)) is not None:
            groups.append(exchange_and_norm(graph, node, norm, caps, groups))
            fused.add(norm)
            continue
        if op.kind == "rmsnorm" and (product := norm_prologue_at(graph, node, caps)) is not None:
            groups.append(product)
            fused.update(product.nodes)
            continue
        if op.kind == "linear" and (pair := input_pair_at(graph, node, caps)) is not None:
            groups.append(pair)
            fused.update(pair.nodes)
            continue
        if op.kind == "gdn_gates" and (layer := gdn_layer_at(graph, node, caps, groups)) is not None:
            groups.append(layer)
            fused.update(layer.nodes)
            continue
        if op.kind not in FAMILIES:
            raise IRError(f"op {op.kind} has no kernel family; known: {', '.join(sorted(FAMILIES))}")
        site = Site(graph, op, caps, groups)
        spec = FAMILIES[op.kind](site)
        groups.append(Group(spec, (op,), (node,), operands(op) | row_count(site, spec), frozenset(), op.rank))
    check_early(graph, groups, caps.programmatic_edges)
    return groups
