"""Runs of decode products that one persistent kernel serves: each takes the one before, normalised or as it is."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.ir.graph import OpGraph
from compiler.ir.op import Op
from compiler.ir.types import Ref
from compiler.kernels.linear_chain import MAX_COLUMNS, MAX_LINKS, Link, chain_spec, chainable, choose
from compiler.kernels.linear_columns import Product, product_of, weight_bytes
from compiler.kernels.spec import DeviceCaps
from compiler.passes.schedule import Group

PRODUCTS = ("linear", "linear_swiglu", "linear_residual")
# A product that streams for longer than this (the head) gains nothing from a chain and keeps a kernel of its own.
MAX_WEIGHTS = 256 << 20


@dataclass(frozen=True)
class _Step:
    """A product of a run with the norm in front of it, if any (node numbers)."""

    node: int
    norm: int | None
    source: str


def _product(graph: OpGraph, op: Op, caps: DeviceCaps, norm: bool) -> Product | None:
    if op.kind not in PRODUCTS:
        return None
    source = graph.values[op.inputs["w"].value].source
    x = op.inputs["x"]
    if source is None or x.offset % 8 or graph.values[x.value].type.shape[-1] % 8:
        return None
    product = product_of(op, graph.types(op), source.format, norm)
    return product if chainable(product, caps) and weight_bytes(product) <= MAX_WEIGHTS else None


def _takers(graph: OpGraph, node: int, ref: Ref) -> list[int]:
    """Ops of the same rank that take ``ref``, an output of ``node``, as their ``x``, in build order."""
    after = sorted({int(v) for _, v in graph.dag.out_edges(node)})
    ops = [(n, graph.op(n)) for n in after]
    return [n for n, op in ops if op.rank == graph.op(node).rank and op.inputs.get("x") == ref]


def _behind(graph: OpGraph, node: int, caps: DeviceCaps) -> list[_Step]:
    """Products that take the product at ``node``, itself or through a norm; empty when there are none to chain."""
    takers = _takers(graph, node, graph.op(node).outputs["y"])
    direct = [n for n in takers if _product(graph, graph.op(n), caps, False)]
    norms = [n for n in takers if graph.op(n).kind == "rmsnorm"]
    if len(direct) == 1 and not norms:
        return [_Step(direct[0], None, "chain")]
    if direct or len(norms) != 1:
        return []
    norm = norms[0]
    found = [n for n in _takers(graph, norm, graph.op(norm).outputs["y"]) if _product(graph, graph.op(n), caps, True)]
    return [_Step(n, norm, "same" if i else "chain") for i, n in enumerate(found)]


def _run(graph: OpGraph, start: int, caps: DeviceCaps) -> list[_Step]:
    steps = [_Step(start, None, "before")]
    while len(steps) < MAX_LINKS:
        more = _behind(graph, steps[-1].node, caps)
        if not more or len(steps) + len(more) > MAX_LINKS:
            break
        steps += more
        if len(more) > 1:  # a projection group ends a run: nothing takes several products at once
            break
    return steps


def _nodes(steps: list[_Step]) -> list[int]:
    return sorted({n for step in steps for n in (step.node, step.norm) if n is not None})


def _too_early(graph: OpGraph, nodes: list[int]) -> bool:
    """Whether an op outside needs a result of the run before the run's last op stands: the run's place in the schedule."""
    inside = set(nodes)
    return any(v not in inside and v < nodes[-1] for n in nodes for _, v in graph.dag.out_edges(n))


def chain_at(graph: OpGraph, start: int, caps: DeviceCaps) -> Group | None:
    """The longest run of products that begins at node ``start`` and fits one kernel, or None."""
    if graph.phase != "decode" or graph.columns > MAX_COLUMNS or _product(graph, graph.op(start), caps, False) is None:
        return None
    steps = _run(graph, start, caps)
    while len(steps) > 1:
        group = None if _too_early(graph, _nodes(steps)) else _group(graph, steps, caps)
        if group is not None:
            return group
        steps = steps[:-1]
    return None


def _group(graph: OpGraph, steps: list[_Step], caps: DeviceCaps) -> Group | None:
    nodes = _nodes(steps)
    inside = set(nodes)
    links: list[Link] = []
    operands: dict[str, Ref] = {}
    internal: set[str] = set()
    eps = 0.0
    for i, step in enumerate(steps):
        op = graph.op(step.node)
        product = _product(graph, op, caps, step.norm is not None)
        assert product is not None
        keep = False
        operands |= {f"l{i}_{name}": ref for name, ref in op.refs()}
        if step.norm is not None:
            norm = graph.op(step.norm)
            normed = norm.outputs["y"]
            operands |= {f"l{i}_x": norm.inputs["x"], f"l{i}_norm_w": norm.inputs["w"], f"l{i}_normed": normed}
            readable = graph.outputs | graph.kept
            needed = normed.value in readable or any(v not in inside for _, v in graph.dag.out_edges(step.norm))
            keep = needed and step.source == "chain"
            if not needed:
                internal.add(normed.value)
            if eps not in (0.0, norm.float_attr("eps")):
                return None
            eps = norm.float_attr("eps")
        links.append(Link(product, step.source, keep))
    tile = choose(tuple(links), caps)
    if tile is None:
        return None
    ops = tuple(graph.op(n) for n in nodes)
    return Group(chain_spec(links, tile, caps, eps), ops, tuple(nodes), operands, frozenset(internal), ops[0].rank)
