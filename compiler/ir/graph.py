"""The op graph: a networkx.DiGraph of ops with hazard edges, and the table of rules checked after every pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import networkx as nx

from compiler.ir.op import Attr, Op, definition, operand_type
from compiler.ir.types import IRError, Kind, Ref, TensorType, Value

HALVES = (0, 1)


@dataclass
class OpGraph:
    """Ops of one phase. Node ids are integers in build order; node attribute ``op`` holds the Op.

    An edge u → v means that v must see u's effects (read after write, write after read, write after write on a value).
    ``lanes`` B and ``width`` T fix the columns; ``phase`` is ``decode`` or ``prefill``.
    """

    name: str
    phase: str
    lanes: int
    width: int
    outputs: set[str] = field(default_factory=set)  # activations that the host may read after the phase
    values: dict[str, Value] = field(default_factory=dict)
    kept: set[str] = field(default_factory=set)  # activations that all ranks must hold alike, read by the cross-rank check
    dag: nx.DiGraph = field(default_factory=nx.DiGraph)
    _writer: dict[tuple[str, int], int] = field(default_factory=dict)  # by value and half of its columns
    _readers: dict[tuple[str, int], set[int]] = field(default_factory=dict)

    @property
    def columns(self) -> int:
        return self.lanes * self.width

    def add_value(self, value: Value) -> Ref:
        """Declare a value. The same declaration twice is allowed (states and tables are shared), another is not."""
        known = self.values.setdefault(value.name, value)
        if known != value:
            raise IRError(f"value {value.name} is declared twice: {known} and {value}")
        return Ref(value.name)

    def add_op(self, kind: str, inputs: Mapping[str, Ref], outputs: Mapping[str, Ref],
               state: Mapping[str, Ref] | None = None, attrs: Mapping[str, Attr] | None = None,
               rank: int = 0, layer: int = -1, also_writes: Iterable[str] = ()) -> int:  # fmt: skip
        """Append an op in program order; hazard edges follow from the values it touches, and from ``also_writes``,
        values it may change besides its operands. Returns its node id."""
        op = Op(kind, dict(inputs), dict(outputs), dict(state or {}), dict(attrs or {}), rank, layer)
        return self.append(op, also_writes)

    def append(self, op: Op, also_writes: Iterable[str] = ()) -> int:
        node = int(self.dag.number_of_nodes())
        self.dag.add_node(node, op=op, also_writes=tuple(also_writes))
        reads = {ref.value for ref in (*op.inputs.values(), *op.state.values())}
        writes = {ref.value for ref in (*op.outputs.values(), *op.state.values())} | set(self.also_writes(node))
        for value in reads | writes:
            if value not in self.values:
                raise IRError(f"op {op.kind}: value {value} is not declared")
        for part in self._parts(op, reads):
            if part in self._writer:
                self.dag.add_edge(self._writer[part], node, value=part[0])
        for value in sorted(writes):
            for half in HALVES:  # writers of one value come in order, whichever half they fill
                if (value, half) in self._writer:
                    self.dag.add_edge(self._writer[value, half], node, value=value)
            for part in self._parts(op, [value]):
                for reader in sorted(self._readers.get(part, ())):
                    if reader != node:
                        self.dag.add_edge(reader, node, value=value)
        for part in self._parts(op, writes):
            # two ops may fill disjoint slices of one value; both stay producers, so keep the chain through the last
            self._writer[part] = node
            self._readers[part] = set()
        for part in self._parts(op, reads - writes):
            self._readers.setdefault(part, set()).add(node)
        return node

    def _parts(self, op: Op, values: Iterable[str]) -> list[tuple[str, int]]:
        """What an op touches of values: of activations one half, if it is about one."""
        return [(value, half) for value in sorted(values) for half in HALVES
                if op.half in (None, half) or self.values[value].kind is not Kind.ACTIVATION]  # fmt: skip

    def op(self, node: int) -> Op:
        op: Op = self.dag.nodes[node]["op"]
        return op

    def also_writes(self, node: int) -> tuple[str, ...]:
        """Values that the op may change besides its operands."""
        names: tuple[str, ...] = self.dag.nodes[node]["also_writes"]
        return names

    def ops(self) -> Iterator[tuple[int, Op]]:
        """Nodes in build order, which is a topological order."""
        for node in sorted(self.dag.nodes):
            yield node, self.op(node)

    def types(self, op: Op) -> dict[str, TensorType]:
        """Operand name → type of the use."""
        return {name: operand_type(op, ref, self.values[ref.value]) for name, ref in op.refs()}


Rule = Callable[[OpGraph], None]
RULES: dict[str, Rule] = {}


def rule(name: str) -> Callable[[Rule], Rule]:
    def add(function: Rule) -> Rule:
        RULES[name] = function
        return function

    return add


@rule("acyclic")
def _acyclic(graph: OpGraph) -> None:
    if not nx.is_directed_acyclic_graph(graph.dag):
        raise IRError(f"graph {graph.name} has a cycle: {nx.find_cycle(graph.dag)}")


@rule("operands")
def _operands(graph: OpGraph) -> None:
    """Operand names are those of the definition, attributes have their types, and the op's own rule holds."""
    for _, op in graph.ops():
        known = definition(op.kind)
        for role, given, expected in (("input", op.inputs, known.inputs), ("output", op.outputs, known.outputs),
                                      ("state", op.state, known.state)):  # fmt: skip
            missing = [name for name in expected if name not in given and name not in known.optional]
            extra = [name for name in given if name not in expected]
            if missing or extra:
                raise IRError(f"op {op.kind} (layer {op.layer}): {role} missing {missing}, unknown {extra}")
        for name, kind in known.attrs.items():
            if name not in op.attrs or not isinstance(op.attrs[name], kind):
                raise IRError(f"op {op.kind} (layer {op.layer}): attribute {name} must be {kind.__name__}")
        known.check(op, graph.types(op))


@rule("written before read")
def _written(graph: OpGraph) -> None:
    """An activation is written before it is read, tables and states persist, weights are never written."""
    written: set[tuple[str, int]] = set()
    for _, op in graph.ops():
        halves = HALVES if op.half is None else (op.half,)
        for name, ref in op.inputs.items():
            if graph.values[ref.value].kind is Kind.ACTIVATION and any((ref.value, half) not in written for half in halves):
                raise IRError(f"op {op.kind} (layer {op.layer}): input {name} reads {ref.value} before it is written")
        for name, ref in (*op.outputs.items(), *op.state.items()):
            kind = graph.values[ref.value].kind
            if kind is Kind.WEIGHT:
                raise IRError(f"op {op.kind} (layer {op.layer}): {name} writes the weight {ref.value}")
            written.update((ref.value, half) for half in halves)


@rule("own rank")
def _own_rank(graph: OpGraph) -> None:
    """Every operand lies on the op's rank, except the peers of an exchange."""
    for _, op in graph.ops():
        for name, ref in op.refs():
            if graph.values[ref.value].rank != op.rank and not name.startswith("peer"):
                raise IRError(f"op {op.kind} (layer {op.layer}, rank {op.rank}): {name} lies on another rank")


def check(graph: OpGraph, rules: Iterable[str] | None = None) -> OpGraph:
    """Run the rule table (or the named rules) and return the graph. Raises IRError naming graph, op and rule."""
    for name in rules or RULES:
        try:
            RULES[name](graph)
        except IRError as error:
            raise IRError(f"graph {graph.name}, rule '{name}': {error}") from error
    return graph
