"""A prefill chunk in halves: the bits of a whole chunk, what runs beside what, and that nothing which does shares memory."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import networkx as nx
import pytest
from cuda.bindings import driver

from compiler.ir.graph import OpGraph
from compiler.ir.types import IRError
from compiler.passes.halves import PREFILL, PREFILL_HALVES, ROW_WISE, in_halves
from compiler.program.model import WORK, Call, Phase, Program
from runtime.cuda.device import Device
from runtime.cuda.graph import GraphPhase, joins
from runtime.cuda.modules import PackedArgs
from runtime.session import Request
from tests import models
from tests.cli.fake_driver import OK, FakeDriver

OPTIONS: dict[str, Any] = {"max_context": 256, "pairs": ((1, 1),), "tp": 2, "test_chunks": True}
NAMES = ("dense-small", "example")


def run(name: str, chunk: int, ids: list[int], phase: str, shuffle: int | None = None) -> tuple[list[int], list[bytes]]:
    """Tokens behind a prompt, and what the ranks' layers remember of it."""
    vm = models.machine(name, numerics="engine", shuffle=shuffle, prefill_chunk=chunk, **OPTIONS)
    session = models.session(vm, depth=0)
    session.backend.prefill = phase
    tokens = [e.token for e in session.generate(Request(ids, 3))]
    kinds = ("recurrent", "window", "kv", "lane_len")
    kept = sorted(name for name in vm.program.values if name.startswith(kinds) and "@" not in name)
    return tokens, [vm.read(name, rank).tobytes() for name in kept for rank in (0, 1)]


@pytest.mark.parametrize(("chunk", "prompt"), [(64, 10), (64, 32), (64, 33), (64, 64), (128, 150), (16, 41)])
@pytest.mark.parametrize("name", NAMES)
def test_halves_give_the_bits_of_a_whole_chunk(name: str, chunk: int, prompt: int) -> None:
    """Prompts that fill less than a half, one, a bit of the other, and several chunks; in any order that the edges allow."""
    ids = [(7 * i + 3) % 250 for i in range(prompt)]
    want = run(name, chunk, ids, PREFILL)
    assert run(name, chunk, ids, PREFILL_HALVES) == want
    if name == "dense-small":
        for shuffle in (1, 2):
            assert run(name, chunk, ids, PREFILL_HALVES, shuffle) == want


@pytest.fixture(params=NAMES)
def program(request: pytest.FixtureRequest) -> Program:
    return models.program(request.param, prefill_chunk=128, **OPTIONS)


def order(phase: Phase, rank: int) -> nx.DiGraph:
    """What comes after what on a rank, by the edges of the CUDA graph."""
    graph = nx.DiGraph()
    for item in phase.calls:
        if item.rank == rank:
            graph.add_node(item.index)
            graph.add_edges_from((before, item.index) for before, _ in joins(phase, True)[item.index])
    return nx.transitive_closure_dag(graph)


def touched(phase: Phase, item: Call) -> list[tuple[int, int, bool]]:
    """Bytes of its rank's WORK that a call may touch, and whether it writes them."""
    spans = [(place.offset, place.end, True) for place in item.scratch.values()]
    for op in item.ops:
        for name, ref in op.refs():
            if ref.value not in phase.placements or ref.value in item.internal or name.startswith("peer"):
                continue
            place, value = phase.placements[ref.value], phase.values[ref.value]
            assert (place.region, place.rank) == (WORK, item.rank)
            begin = place.offset + (op.half or 0) * value.nbytes // 2
            end = begin + value.nbytes // (1 if op.half is None else 2)
            spans.append((begin, end, name in op.outputs))
    return spans


def test_what_runs_at_once_shares_nothing(program: Program) -> None:
    """All pairs of calls without an order; and what depends on what has one."""
    phase, pairs = program.phases[PREFILL_HALVES], 0
    for rank in (0, 1):
        mine, after = [item for item in phase.calls if item.rank == rank], order(phase, rank)
        for i, first in enumerate(mine):
            for second in mine[i + 1 :]:
                if after.has_edge(first.index, second.index):
                    continue
                pairs += 1
                assert first.beside != second.beside and first.index not in second.deps
                for begin, end, writes in touched(phase, first):
                    for start, stop, stores in touched(phase, second):
                        assert not (writes or stores) or end <= start or stop <= begin, (first, second)
    assert pairs > 4 * len(program.spec.layer_types)


def test_the_chain_awaits_an_exchange_where_its_result_is_used(program: Program) -> None:
    """Not before: memory that an exchange touches is left alone until then. Edges of what is beside the chain are ordinary."""
    phase = program.phases[PREFILL_HALVES]
    edges, calls = joins(phase, True), phase.calls
    results = {(ref.value, op.half): item for item in calls if item.beside for op in item.ops for ref in op.outputs.values()}
    assert len([item for item in calls if item.beside]) == 8 * len(program.spec.layer_types)
    seen: set[int] = set()
    for item in calls:
        awaited = {before for before, _ in edges[item.index] if calls[before].beside}
        used = {results[ref.value, half].index for op in item.ops for ref in op.inputs.values() for half in (0, 1)
                if op.half in (None, half) and (ref.value, half) in results and calls[item.index].rank == op.rank}  # fmt: skip
        if item.beside:
            assert len(edges[item.index]) == len(awaited) + 1 and not any(early for _, early in edges[item.index])
        else:
            assert awaited == {max(used - seen)} if used - seen else not awaited, item.entry
            assert all(early != bool(awaited) for _, early in edges[item.index])
            seen |= used


def test_the_graph_has_these_edges(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what runs beside the chain comes first where blocks wait for room."""
    FakeDriver().install(monkeypatch)
    phase, nodes = program.phases[PREFILL_HALVES], itertools.count(1)
    edges: list[tuple[int, int, bool]] = []
    first: list[int] = []

    def join(graph: Any, before: Any, after: Any, data: Any, count: int) -> tuple[Any]:
        edges.append((int(before[0]) - 1, int(after[0]) - 1, data[0].type == driver.CUgraphDependencyType.
                      CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC.value))  # fmt: skip
        return (OK,)

    def prefer(node: Any, attribute: Any, value: Any) -> tuple[Any]:
        assert attribute == driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_PRIORITY and value.priority == -5
        first.append(int(node) - 1)
        return (OK,)

    monkeypatch.setattr(driver, "cuGraphAddKernelNode", lambda *args: (OK, driver.CUgraphNode(next(nodes))))
    monkeypatch.setattr(driver, "cuGraphAddDependencies", join)
    monkeypatch.setattr(driver, "cuGraphKernelNodeSetAttribute", prefer)
    modules: Any = SimpleNamespace(kernels=dict.fromkeys(program.kernels, driver.CUkernel(1)))
    GraphPhase(phase, modules, [PackedArgs((), lambda arg: 0)] * len(phase.calls), [Device(0), Device(0)], True)
    assert edges == [(before, after, early) for after, found in joins(phase, True).items() for before, early in found]
    assert first == [item.index for item in phase.calls if item.beside]


def test_a_rank_never_has_two_exchanges_at_once(program: Program) -> None:
    """It sends a number only after it has received the one before; the choice of the token is the last."""
    phase = program.phases[PREFILL_HALVES]
    for rank in (0, 1):
        after = order(phase, rank)
        ordinals = [(op.int_attr("ordinal"), item.index) for item in phase.calls for op in item.ops
                    if item.rank == rank and "ordinal" in op.attrs]  # fmt: skip
        assert [number for number, _ in ordinals] == list(range(len(ordinals)))
        assert all(after.has_edge(a, b) for (_, a), (_, b) in zip(ordinals, ordinals[1:], strict=False))


def test_arguments_of_the_halves(program: Program) -> None:
    """Both halves run the same kernels on the same weights; activations begin half a chunk later, rows are the half's own."""
    phase = program.phases[PREFILL_HALVES]
    ops = [op for op in phase.ops() if op.kind in ROW_WISE and op.layer >= 0]
    entrance = [op for op in ops if op.half is None]  # the first projection stands in front of every exchange
    assert {op.layer for op in entrance} == {0} and {op.kind for op in entrance} == {"rmsnorm", "linear"}
    assert all(op.half is None for op in phase.ops() if op not in ops)
    pairs = 0
    for first in phase.calls:
        if first.ops[0].half != 0:
            continue
        second = next(item for item in phase.calls if item.ops[0].half == 1 and item.ops[0].outputs == first.ops[0].outputs)
        pairs += 1
        assert (first.entry, first.grid) == (second.entry, second.grid)
        names = {name: ref.value for op in first.ops for name, ref in op.refs()} | {"normed": first.ops[-1].outputs["y"].value}
        for one, other in zip(first.args, second.args, strict=True):
            if one.name == "rows":
                assert (other.region, other.offset - one.offset) == ("state", 4)
            elif one.name == "ordinal":
                assert other.number == one.number + 1
            elif one.name in names and names[one.name] in phase.values:
                assert other.offset - one.offset == phase.values[names[one.name]].nbytes // 2, one.name
            else:
                assert one == other
    assert pairs > 8 * len(program.spec.layer_types)


def test_what_has_no_halves() -> None:
    with pytest.raises(IRError, match="3 columns of prefill have no halves"):
        in_halves(OpGraph("odd", "prefill", 1, 3))
    assert PREFILL_HALVES not in models.program("dense-small", **(OPTIONS | {"tp": 1, "prefill_chunk": 64})).phases
