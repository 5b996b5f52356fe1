"""Cost of the calls of a program: bytes, FLOPs, least time, and what each kernel takes of its multiprocessor."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.explain.roofline import Rates, call_seconds, rates, slots_per_weight
from compiler.ir.op import Cost, Op, definition, operand_type
from compiler.ir.types import Kind, TensorType, Value
from compiler.ops.attention import keys_cost
from compiler.program.model import Call, KernelImage, Phase, Program

_READS_CACHE = ("attention", "attention_partial")


@dataclass(frozen=True)
class CallReport:
    """One call with what it costs. ``slots``: instruction slots per weight at full bandwidth, None without weights.
    ``seconds``: the least time the card allows."""

    call: Call
    kernel: KernelImage
    cost: Cost
    seconds: float
    slots: float | None

    @property
    def layer(self) -> int:
        return self.call.ops[0].layer if self.call.ops else -1

    @property
    def kinds(self) -> str:
        return "+".join(op.kind for op in self.call.ops)


def _value(program: Program, phase: Phase, call: Call, name: str) -> Value:
    if name in call.internal:
        return Value(name, call.internal[name], Kind.ACTIVATION)
    return program.value(phase, name)


def call_cost(program: Program, phase: Phase, call: Call, keys: int) -> Cost:
    """Bytes and FLOPs of a call with all columns active and ``keys`` tokens in the cache of every lane.

    Values that live inside a fused call move no bytes.
    """
    read = written = flops = 0
    for op in call.ops:
        values = {ref.value: _value(program, phase, call, ref.value) for _, ref in op.refs()}
        types: dict[str, TensorType] = {name: operand_type(op, ref, values[ref.value]) for name, ref in op.refs()}
        costs = [definition(op.kind).cost(op, types, values)]
        if op.kind in _READS_CACHE:
            costs.append(_cache_cost(op, phase, keys))
        read += sum(cost.read for cost in costs)
        written += sum(cost.written for cost in costs)
        flops += sum(cost.flops for cost in costs)
        read -= sum(types[name].nbytes for name, ref in op.inputs.items() if ref.value in call.internal)
        written -= sum(types[name].nbytes for name, ref in op.outputs.items() if ref.value in call.internal)
    return Cost(max(read, 0), max(written, 0), flops)


def _cache_cost(op: Op, phase: Phase, keys: int) -> Cost:
    one = keys_cost(op, keys, phase.width)
    return Cost(phase.lanes * one.read, phase.lanes * one.written, phase.lanes * one.flops)


def _weights(program: Program, phase: Phase, call: Call) -> tuple[int, int]:
    """(encoded bytes, weights) of the matrices that a call streams whole; embedding rows are picked, not streamed."""
    names = {ref.value for op in call.ops if op.kind != "embed" for ref in op.inputs.values()}
    found = [program.values[name] for name in names if name in program.values]
    matrices = [value for value in found if value.kind is Kind.WEIGHT and len(value.type.shape) == 2]
    return sum(value.nbytes for value in matrices), sum(value.type.elements for value in matrices)


def phase_report(program: Program, phase: Phase, keys: int, at: Rates | None = None) -> list[CallReport]:
    """Every call of a phase in schedule order. ``keys``: tokens in the cache. Raises IRError for an unknown op kind."""
    at = at or rates(program.caps)
    out = []
    for call in phase.calls:
        cost = call_cost(program, phase, call, keys)
        nbytes, weights = _weights(program, phase, call)
        slots = slots_per_weight(program.caps, at, nbytes, weights) if weights else None
        out.append(CallReport(call, program.kernels[call.entry], cost, call_seconds(cost, at, call.programmatic), slots))
    return out


def phase_seconds(program: Program, phase: Phase, keys: int, at: Rates | None = None) -> float:
    """Least time of one replay of a phase."""
    return sum(report.seconds for report in phase_report(program, phase, keys, at))
