"""What a kernel may touch before its dependency wait: values whose last accesses are over when its first block starts.

Behind a programmatic edge a kernel starts as soon as every block of the one before it has let it. Where that one lets go
only after its own wait has returned (``KernelSpec.waits_first``), everything in front of it is complete, its stores
included. Kernels that let go at once pass the question on to the one before them. So of a rank's calls everything in front
of the nearest kernel that waits first is settled; that kernel itself, but for what it publishes, and what follows it is
not. What earlier launches of the graph wrote is settled, since launches follow each other whole. Calls beside the chain are
joined to it by ordinary edges wherever they have anything in common with it, so they neither settle nor unsettle anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from compiler.ir.graph import OpGraph
from compiler.ir.types import IRError
from compiler.passes.schedule import Group


def _reads(group: Group) -> set[str]:
    return {ref.value for op in group.ops for ref in (*op.inputs.values(), *op.state.values())}


def _writes(graph: OpGraph, group: Group) -> set[str]:
    named = {ref.value for op in group.ops for ref in (*op.outputs.values(), *op.state.values())}
    return named.union(*(graph.also_writes(node) for node in group.nodes))


def settled(graph: OpGraph, before: Sequence[Group], rank: int, reads: set[str], writes: set[str], programmatic: bool) -> bool:
    """Whether a kernel of ``rank`` scheduled behind the groups ``before`` may, ahead of its wait, read the values ``reads``
    and write the values ``writes``. Everything may where edges are ordinary (not ``programmatic``)."""
    if not programmatic:
        return True
    for group in reversed([item for item in before if item.rank == rank and not item.beside]):
        written = _writes(graph, group)
        if group.spec.waits_first:
            written -= {group.operands[name].value for name in group.spec.published}
        if written & (reads | writes) or _reads(group) & writes:
            return False
        if group.spec.waits_first:
            return True
    return True  # from here on: earlier launches


def check_early(graph: OpGraph, groups: Sequence[Group], programmatic: bool) -> None:
    """Raise IRError for a kernel that touches something before its wait that another one may still be at."""
    for index, group in enumerate(groups):
        if not group.spec.early:
            continue
        states = {ref.value for op in group.ops for ref in op.state.values()}
        values = {group.operands[name].value for name in group.spec.early}
        if not settled(graph, groups[:index], group.rank, values, values & states, programmatic):
            raise IRError(f"graph {graph.name}: kernel {group.spec.entry} (call {index}) touches "
                          f"{', '.join(group.spec.early)} before its wait, while an earlier kernel may be at it")  # fmt: skip
