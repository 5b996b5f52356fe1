"""Byte ranges by liveness, and the edges that keep a range's next owner behind its last one."""

from __future__ import annotations

import random

import networkx as nx
import pytest

from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import caps
from compiler.passes.memory import Lifetime, check, plan, reuse_edges
from compiler.passes.schedule import Scheduler
from tests import models


@pytest.mark.parametrize("seed", range(20))
def test_every_access_of_a_range_comes_before_its_next_owner(seed: int) -> None:
    """In any order that the edges allow, those of the values themselves (first access before the others) included."""
    rng = random.Random(seed)
    lifetimes, accesses = [], {}
    for i in range(30):
        rank, touched = rng.randrange(2), sorted(rng.sample(range(40), rng.randrange(1, 5)))
        lifetimes.append(Lifetime(f"v{i}", rng.choice([1, 256, 700, 4096]), touched[0], touched[-1], rank))
        accesses[f"v{i}"] = touched
    placements, sizes = plan(lifetimes, "work")
    check(placements, lifetimes)
    assert all(placements[life.name].end <= sizes[life.rank] for life in lifetimes)
    graph = nx.DiGraph(reuse_edges(placements, lifetimes, accesses))
    graph.add_nodes_from(range(40))
    graph.add_edges_from((touched[0], later) for touched in accesses.values() for later in touched[1:])
    assert nx.is_directed_acyclic_graph(graph)
    behind = {call: nx.descendants(graph, call) for call in graph}
    shared = 0
    for a in lifetimes:
        for b in lifetimes:
            here, there = placements[a.name], placements[b.name]
            if a.rank != b.rank or a.last >= b.first or here.offset >= there.end or there.offset >= here.end:
                continue
            shared += 1
            assert all(b.first in behind[access] for access in accesses[a.name]), (a, b)
    assert shared


def test_a_schedule_holds_the_edges_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of one rank are a chain by their values alone, which would hide them."""
    monkeypatch.setattr(Scheduler, "_hazards", lambda self: set())
    program = compile_program(models.artifact("dense-small"), caps("sm_90a"), CompileOptions(max_context=256), images=False)
    for name, phase in program.phases.items():
        assert sum(bool(call.deps) for call in phase.calls) > len(phase.calls) // 2, name
