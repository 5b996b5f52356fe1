"""A prefill chunk in two halves of its columns, so that exchanges between the ranks run beside products.

Between two ops that walk the sequence (attention, the delta rule with its convolution) all ops work column by column. Such a
run of ops is repeated for each half of the columns, stage by stage, a stage being what ends with an exchange: while the sums
of one half travel, products of the other half are computed. Each half of an exchange has a number of its own. Values stay
whole, an op with attribute ``half`` is about half of their columns. Products send nothing themselves: this form of a chunk is
for transports over which exchanges send (runtime/cuda/transport.py).
"""

from __future__ import annotations

from dataclasses import replace

from compiler.ir.graph import HALVES, OpGraph
from compiler.ir.op import Attr, Op
from compiler.ir.types import IRError, Ref
from compiler.kernels.exchange import KINDS
from compiler.ops.exchange_begin import SHARES
from compiler.passes.shard import at

PREFILL, PREFILL_HALVES = "prefill", "prefill_halves"
ROW_WISE = frozenset({"linear", "linear_swiglu", "exchange_residual", "rmsnorm"})


def in_halves(graph: OpGraph) -> OpGraph:
    """The graph of a prefill chunk on several ranks in halves, not yet checked. Raises IRError for an odd number of columns."""
    if graph.phase != "prefill" or graph.columns % 2:
        raise IRError(f"graph {graph.name}: {graph.columns} columns of {graph.phase} have no halves")
    return _Pass(graph).run()


class _Pass:
    def __init__(self, graph: OpGraph) -> None:
        self.old = graph
        self.new = OpGraph(PREFILL_HALVES, graph.phase, graph.lanes, graph.width, set(graph.outputs), dict(graph.values),
                           set(graph.kept))  # fmt: skip
        self.numbers: dict[tuple[Attr, int | None], int] = {}  # ordinals by those of the whole chunk, and half

    def run(self) -> OpGraph:
        exchanges = [op for _, op in self.old.ops() if op.kind in KINDS and op.rank == 0]
        count = len(exchanges) + sum(op.kind == "exchange_residual" for op in exchanges)
        run: list[Op] = []
        for node, op in self.old.ops():
            if op.kind in ROW_WISE and op.layer >= 0:
                run.append(op)
                continue
            self._run(run)
            run = []
            if op.kind == "exchange_begin":
                op = replace(op, inputs={"rows": Ref(at("pf_lane_ncols", op.rank))},
                             attrs={"count": count, "columns": self.old.columns // 2})  # fmt: skip
            self.new.append(self._numbered(op), self.old.also_writes(node))
        return self.new

    def _run(self, run: list[Op]) -> None:
        """Append a run of row-wise ops, in halves if there is an exchange in it."""
        stages: list[list[Op]] = [[]]
        for op in run:
            if stages[-1] and stages[-1][-1].kind == "exchange_residual" != op.kind:
                stages.append([])
            stages[-1].append(op)
        exchanges = any(op.kind == "exchange_residual" for op in run)
        for stage in stages:
            for half in HALVES if exchanges else (None,):
                for op in stage:
                    self.new.append(op if half is None else self._half(op, half))

    def _half(self, op: Op, half: int) -> Op:
        inputs, attrs = dict(op.inputs), {**op.attrs, "half": half}
        if op.kind == "linear":  # what it would send is left to the exchange
            inputs = {name: ref for name, ref in inputs.items() if name not in ("sequence", "step")}
            attrs.pop("ordinal", None)
        elif op.kind == "exchange_residual":
            inputs["rows"] = rows_of(op.rank, half)
            attrs |= {"pushed": False, "tiles": False}
        return self._numbered(replace(op, inputs=inputs, attrs=attrs))

    def _numbered(self, op: Op) -> Op:
        if "ordinal" not in op.attrs:
            return op
        number = self.numbers.setdefault((op.attrs["ordinal"], op.half), len(self.numbers))
        return replace(op, attrs={**op.attrs, "ordinal": number})


def rows_of(rank: int, half: int | None) -> Ref:
    """The device-side number of active columns of a prefill chunk, or of one half of it."""
    return Ref(at("pf_lane_ncols", rank)) if half is None else Ref(at("exchange_sequence", rank), SHARES + half, 1)
