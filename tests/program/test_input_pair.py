"""Which products of the same activations share a kernel, and with what operands."""

from __future__ import annotations

import pytest

from compiler.passes.input_pair import second_of
from compiler.passes.schedule import Group
from tests.program.test_early import schedule


def products(groups: list[Group]) -> list[Group]:
    """Kernels that store plain products."""
    return [group for group in groups if any(op.kind == "linear" for op in group.ops)]


@pytest.mark.parametrize(("arch", "width"), [("sm_90a", 1), ("sm_86", 4), ("sm_120a", 8)])
def test_weights_of_four_and_five_bits_share_a_kernel(arch: str, width: int) -> None:
    """Each op of a group has its own weight and its own result there, the norm in front at few columns."""
    graph, groups = schedule(arch, name="example", width=width)
    pairs = [group for group in products(groups) if sum(op.kind == "linear" for op in group.ops) == 2]
    layers = sum(op.kind in ("gdn", "attention_partial") for _, op in graph.ops())
    assert len(pairs) == layers > 0
    for group in pairs:
        norm, (first, second) = group.ops[:-2], group.ops[-2:]
        assert [op.kind for op in norm] == (["rmsnorm"] if width <= 4 else [])
        assert first.inputs["x"] == second.inputs["x"]
        assert (group.operands["w"], group.operands["y"]) == (first.inputs["w"], first.outputs["y"])
        assert (group.operands["w2"], group.operands["y2"]) == (second.inputs["w"], second.outputs["y"])
        assert group.operands["x"] == (norm[0].inputs["x"] if norm else first.inputs["x"])
        assert group.spec.params["second_n"] == graph.values[second.inputs["w"].value].type.shape[0]


def test_only_products_of_the_same_activations_are_a_pair() -> None:
    graph, _ = schedule(name="example")
    found = {node: second_of(graph, node) for node, op in graph.ops() if op.kind == "linear"}
    seconds = {other for other in found.values() if other is not None}
    assert seconds and all(graph.op(node).inputs["x"] == graph.op(other).inputs["x"] for node, other in found.items() if other)
    assert all(found[other] is None for other in seconds) and None in found.values()


def test_what_only_the_pair_reads_is_not_stored() -> None:
    """Normalised rows are kept where the gates of a GDN layer take them too."""
    graph, groups = schedule(name="example")
    pairs = [group for group in products(groups) if "w2" in group.operands]
    for group in pairs:
        taken = any(op.kind == "gdn_gates" and op.inputs["x"] == group.operands["normed"] for _, op in graph.ops())
        assert ("normed" in group.spec.args) == taken == (group.operands["normed"].value not in group.internal)
    assert {bool(group.internal) for group in pairs} == {False, True}


@pytest.mark.parametrize(("name", "phase", "width"), [("dense-small", "decode", 1), ("example", "prefill", 1),
                                                      ("example", "decode", 24)])  # fmt: skip
def test_others_keep_kernels_of_their_own(name: str, phase: str, width: int) -> None:
    """Weights of one format in one matrix, chunks of prefill, and more columns than a block takes."""
    _, groups = schedule(phase=phase, name=name, width=width)
    assert products(groups) and not any("w2" in group.operands for group in groups)
