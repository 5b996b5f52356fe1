"""The sharding pass: the graph of one logical device becomes that of ``tp`` ranks (spec/tp2.md §3, §5, §6).

Every op is repeated per rank over that rank's share: projections are cut by rows, heads and their states stay whole on one
rank, products back into the residual stream are cut by columns and leave FP32 partial sums that an exchange adds in rank
order, together with the residual, once. The head is cut by vocabulary; each rank leaves its best candidates, and every rank
draws the same token from all of them. Values of rank r > 0 are named ``name@r``, as the control tables are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from artifacts.errors import LayoutError
from artifacts.layouts import get_layout
from compiler.ir.graph import OpGraph
from compiler.ir.op import Attr, Op
from compiler.ir.types import IRError, Kind, Ref, TensorType, Value, WeightSource
from compiler.model.spec import ModelSpec
from compiler.ops.exchange_begin import SEQUENCE_WORDS
from compiler.ops.exchange_residual import MAX_RANKS, PUSH_COLUMNS
from compiler.ops.sample import MAX_CANDIDATES
from compiler.shard.plan import ShardDims, ShardError, check_width, even_ranges

Ranges = tuple[tuple[int, int], ...]
# attributes that count heads: each rank has its share
HEAD_ATTRS = {
    "begin": ("kv_heads",),
    "attn_prepare": ("heads", "kv_heads"),
    "attention": ("heads", "kv_heads"),
    "gdn": ("key_heads", "value_heads"),
    "gated_norm": ("heads",),
}
REPLICATED = frozenset({"begin", "advance", "embed", "rmsnorm", "select_last"})
STATE_AXIS = {"kv": 2, "recurrent": 1, "rec_k": 3, "rec_u": 3, "rec_alpha": 3, "window": 3, "record": 3}
WIRES = ("f32", "bf16")
MAX_KEPT_ROWS = 64  # hidden rows that stay readable for the cross-rank check; scoring has more


def at(name: str, rank: int) -> str:
    """Name of a value on ``rank``."""
    return f"{name}@{rank}" if rank else name


def concatenated(ranges: Ranges, wanted: Ranges) -> Ranges:
    """The parts ``wanted`` of an axis that is itself the concatenation of ``ranges`` of a stored object."""
    out: list[tuple[int, int]] = []
    for low, high in wanted:
        start = 0
        for begin, end in ranges:
            first, last = max(low, start), min(high, start + end - begin)
            if first < last:
                piece = (begin + first - start, begin + last - start)
                if out and out[-1][1] == piece[0]:
                    out[-1] = (out[-1][0], piece[1])
                else:
                    out.append(piece)
            start += end - begin
    return tuple(out)


@dataclass
class Sharder:
    """Cuts the phases of one program. ``logical`` are the shared values of the unsharded builder; ``shared`` collects those
    of all ranks. ``wire``: what the exchanges of the residual stream carry in each phase, ``f32`` or ``bf16``. ``fused``:
    row-parallel products send their partial sums as they finish them: of few columns FP32 words, of a prefill chunk tiles."""

    spec: ModelSpec
    tp: int
    logical: Mapping[str, Value]
    wire: Mapping[str, str] = field(default_factory=lambda: {"decode": "f32", "prefill": "f32"})
    fused: bool = True
    shared: dict[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_width(ShardDims.of(self.spec), self.tp)
        if self.tp > MAX_RANKS:
            raise ShardError(f"--tp {self.tp}: at most {MAX_RANKS} ranks")
        if self.spec.vocab_rows % self.tp:
            raise ShardError(f"--tp {self.tp}: {self.spec.vocab_rows} vocabulary rows cannot be shared evenly")
        if self.spec.intermediate % self.tp:
            raise ShardError(f"--tp {self.tp}: an MLP of width {self.spec.intermediate} cannot be shared evenly")
        for rank in range(self.tp):
            for value in self.logical.values():
                if value.kind is Kind.TABLE:
                    self.share(replace(value, name=at(value.name, rank), rank=rank))

    def share(self, value: Value) -> Value:
        return self.shared.setdefault(value.name, value)

    def run(self, graph: OpGraph) -> OpGraph:
        """The graph of all ranks, ops interleaved rank by rank, not yet checked against the IR rules.

        Raises ShardError naming the weight and the rule of its layout that forbids a cut."""
        return _Pass(self, graph).run()


class _Pass:
    def __init__(self, owner: Sharder, graph: OpGraph) -> None:
        self.owner, self.spec, self.tp, self.old = owner, owner.spec, owner.tp, graph
        self.new = OpGraph(graph.name, graph.phase, graph.lanes, graph.width)
        self.cuts = self._cuts()
        self.ordinal = 0

    # -- which activations are cut, and where

    def _cuts(self) -> dict[str, tuple[int, ...]]:
        """Sections of the last axis of every cut activation: each section is shared evenly."""
        marks: dict[str, set[tuple[int, int]]] = {}
        spec = self.spec
        channels = (spec.key_heads * spec.key_dim, spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim)

        def mark(ref: Ref, *widths: int) -> None:
            total = ref.width or self.old.values[ref.value].type.shape[-1]
            widths = widths or (total,)
            offset = ref.offset
            for width in widths:
                marks.setdefault(ref.value, set()).add((offset, width))
                offset += width
            if offset - ref.offset != total:
                raise IRError(f"value {ref.value}: sections {widths} do not fill {total} columns")

        for _, op in self.old.ops():
            if op.kind in ("attn_prepare", "attention"):
                for name in ("q", "k", "v", "gate", "qr"):
                    if name in op.inputs:
                        mark(op.inputs[name])
                for ref in op.outputs.values():
                    mark(ref)
            elif op.kind == "conv":
                mark(op.inputs["x"], *(channels[:2] if "x2" in op.inputs else channels))
                if "x2" in op.inputs:
                    mark(op.inputs["x2"])
                mark(op.outputs["y"], *channels)
            elif op.kind == "gdn":
                mark(op.inputs["gates"], spec.value_heads, spec.value_heads)
                mark(op.outputs["o"])
            elif op.kind == "gated_norm":
                mark(op.inputs["z"])
                mark(op.outputs["y"])
            elif op.kind == "linear_swiglu":
                mark(op.outputs["y"])
            elif op.kind == "linear" and op.layer < 0:  # the head: by vocabulary
                mark(op.outputs["y"])
        out = {}
        for name, sections in marks.items():
            ordered, end = sorted(sections), 0
            for offset, width in ordered:
                if offset != end:
                    raise IRError(f"value {name}: columns {end}…{offset} have no consumer that says how they are shared")
                end = offset + width
            out[name] = tuple(width for _, width in ordered)
        return out

    # -- values of a rank

    def activation(self, name: str, rank: int) -> Value:
        value = self.old.values[name]
        shape = value.type.shape
        if name in self.cuts:
            shape = (*shape[:-1], sum(self.cuts[name]) // self.tp)
        return Value(at(name, rank), TensorType(shape, value.type.dtype), Kind.ACTIVATION, rank)

    def local(self, ref: Ref, rank: int) -> Ref:
        """A use of an activation, table or replicated state on ``rank``."""
        value = self.old.values[ref.value]
        if value.kind is Kind.ACTIVATION:
            self.new.add_value(self.activation(ref.value, rank))
        else:
            self.new.add_value(self.owner.share(replace(value, name=at(value.name, rank), rank=rank)))
        if ref.value not in self.cuts or not ref.width:
            return Ref(at(ref.value, rank), ref.offset, ref.width)
        edges = [0]
        for width in self.cuts[ref.value]:
            edges.append(edges[-1] + width)
        if ref.offset not in edges or ref.offset + ref.width not in edges:
            raise IRError(f"ref {ref} cuts through the sections {self.cuts[ref.value]} of its value")
        return Ref(at(ref.value, rank), ref.offset // self.tp, ref.width // self.tp)

    def state(self, operand: str, ref: Ref, rank: int) -> Ref:
        """A state that is shared by heads or channels."""
        if operand not in STATE_AXIS:
            return self.local(ref, rank)
        value, axis = self.old.values[ref.value], STATE_AXIS[operand]
        shape = list(value.type.shape)
        if shape[axis] % self.tp:
            raise ShardError(f"--tp {self.tp}: state {value.name} has {shape[axis]} heads or channels, no multiple of it")
        shape[axis] //= self.tp
        cut = Value(at(value.name, rank), TensorType(tuple(shape), value.type.dtype), Kind.STATE, rank)
        return self.new.add_value(self.owner.share(cut))

    def weight(self, ref: Ref, rank: int, rows: Sequence[int] = (), columns: Sequence[int] = ()) -> Ref:
        """A weight cut by the sections of its rows or columns (both empty: whole)."""
        value = self.old.values[ref.value]
        source = value.source
        if source is None:
            raise IRError(f"value {value.name} is no weight")
        new = source
        shape = list(value.type.shape)
        try:
            if rows:
                part = even_ranges(rows, self.tp, rank)
                new = replace(new, rows=concatenated(source.rows, part))
                shape[0] //= self.tp
            if columns:
                part = even_ranges(columns, self.tp, rank)
                new = replace(new, cols=concatenated(source.cols, part))
                shape[-1] //= self.tp
            size = self._encoded(new, tuple(shape))
        except (LayoutError, ShardError) as error:
            raise ShardError(f"--tp {self.tp}: weight {value.name} [{', '.join(map(str, value.type.shape))}] "
                             f"{source.format}: {error}") from error  # fmt: skip
        cut = Value(at(value.name, rank), TensorType(tuple(shape), value.type.dtype), Kind.WEIGHT, rank, new, size)
        return self.new.add_value(self.owner.share(cut))

    @staticmethod
    def _encoded(source: WeightSource, shape: tuple[int, ...]) -> int:
        """Bytes of the shard; raises LayoutError when the layout forbids the cut."""
        layout, whole = get_layout(source.layout), source.object_shape
        rows = None if source.rows == ((0, whole[0]),) else list(source.rows)
        columns = None if source.cols == ((0, whole[-1]),) or len(whole) == 1 else list(source.cols)
        if rows is None and columns is None:
            return layout.encoded_size(source.format, shape)
        shard = layout.shard(source.format, whole, rows, columns)
        if shard.shape != shape:
            raise IRError(f"a shard of shape {shard.shape} was cut where {shape} is needed")
        return shard.nbytes

    # -- ops

    def run(self) -> OpGraph:
        count = sum(1 for _, op in self.old.ops() if op.kind in ("linear_residual", "sample"))
        for node, op in self.old.ops():
            for rank in range(self.tp):
                self._op(node, op, rank)
            if op.kind == "begin":
                self._exchange_begin(count)
            elif op.kind == "linear_residual":
                self._exchange_residual(op)
            elif op.kind == "sample":
                self._merge(op)
        self.new.outputs = {at(name, rank) for name in self.old.outputs for rank in range(self.tp)}
        heads = [op for _, op in self.old.ops() if op.kind == "linear" and op.layer < 0]
        few = [op.inputs["x"].value for op in heads if self.old.types(op)["x"].shape[0] <= MAX_KEPT_ROWS]
        self.new.kept = {at(name, rank) for name in few for rank in range(self.tp)}
        return self.new

    def _weights(self, op: Op, rank: int) -> dict[str, Ref]:
        """Weight operands of ``op``, cut as its kind demands."""
        out = {}
        for name, ref in op.inputs.items():
            value = self.old.values[ref.value]
            if value.kind is not Kind.WEIGHT:
                continue
            rows: tuple[int, ...] = ()
            columns: tuple[int, ...] = ()
            if op.kind == "linear":
                rows = self.cuts[op.outputs["y"].value]
            elif op.kind == "linear_swiglu":
                rows = (self.spec.intermediate, self.spec.intermediate)
            elif op.kind == "linear_residual":
                columns = (value.type.shape[1],)
            elif op.kind == "gdn_gates":
                heads = self.spec.value_heads
                rows = (heads,) * (value.type.shape[0] // heads)
            elif op.kind == "conv":
                columns = self.cuts[op.outputs["y"].value]
            elif op.kind not in REPLICATED and op.kind not in ("attn_prepare", "gated_norm"):
                raise IRError(f"op {op.kind}: no rule says how its weight {name} is shared")
            out[name] = self.weight(ref, rank, rows, columns)
        return out

    def _op(self, node: int, op: Op, rank: int) -> None:
        weights = self._weights(op, rank)
        inputs = {name: weights[name] if name in weights else self.state(name, ref, rank) for name, ref in op.inputs.items()}
        state = {name: self.state(name, ref, rank) for name, ref in op.state.items()}
        outputs = {name: self.local(ref, rank) for name, ref in op.outputs.items()} if op.kind not in (
            "linear_residual", "sample") else {}  # fmt: skip
        attrs: dict[str, Attr] = dict(op.attrs)
        for name in HEAD_ATTRS.get(op.kind, ()):
            attrs[name] = op.int_attr(name) // self.tp
        also = [at(name, rank) for name in self.old.also_writes(node)]
        for name in also:
            self.new.add_value(self.owner.shared[name])
        if op.kind == "linear_residual":
            self._partial(op, rank, inputs)
        elif op.kind == "sample":
            self._candidates(op, rank, inputs)
        else:
            self.new.add_op(op.kind, inputs, outputs, state, attrs, rank, op.layer, also)

    def _scratch(self, label: str, shape: tuple[int, ...], dtype: str, rank: int) -> Ref:
        return self.new.add_value(Value(at(label, rank), TensorType(shape, dtype), Kind.ACTIVATION, rank))

    @property
    def wire(self) -> str:
        return self.owner.wire[self.old.phase]

    def _pushes(self) -> bool:
        """Whether row-parallel products send their partial sums themselves, as words (2 ranks: a kernel has one peer)."""
        few = self.old.phase == "decode" and self.old.columns <= PUSH_COLUMNS
        return self.owner.fused and few and self.wire == "f32" and self.tp == 2

    def _tiles(self) -> bool:
        """Whether those of a prefill chunk can send theirs tile by tile."""
        return self.owner.fused and self.old.phase == "prefill" and self.old.columns > 1 and self.tp == 2

    def _partial(self, op: Op, rank: int, inputs: dict[str, Ref]) -> None:
        """The rank's share of a row-parallel product: its segments of K, summed in FP32, stored as what travels."""
        columns, width = self.old.types(op)["y"].shape
        partial = self._scratch(f"partial.{op.outputs['y'].value}", (columns, width), self.wire, rank)
        operands = {name: inputs[name] for name in ("x", "w")}
        attrs: dict[str, Attr] = {"segments": max(1, op.int_attr("segments") // self.tp), "f32": self.wire == "f32"}
        if self._pushes() or self._tiles():
            operands |= self._control(rank)
            attrs["ordinal"] = self.ordinal
        self.new.add_op("linear", operands, {"y": partial}, attrs=attrs, rank=rank, layer=op.layer)

    def _sequence(self, rank: int) -> Ref:
        value = Value(at("exchange_sequence", rank), TensorType((SEQUENCE_WORDS,), "i32"), Kind.STATE, rank)
        return self.new.add_value(self.owner.share(value))

    def _exchange_begin(self, count: int) -> None:
        for rank in range(self.tp):
            self.new.add_op("exchange_begin", {}, {}, {"sequence": self._sequence(rank)}, {"count": count}, rank)

    def _peers(self, label: str, rank: int) -> dict[str, Ref]:
        """``peer_1`` … in rank order, the own rank left out."""
        others = [other for other in range(self.tp) if other != rank]
        return {f"peer_{i + 1}": Ref(at(label, other)) for i, other in enumerate(others)}

    def _control(self, rank: int) -> dict[str, Ref]:
        return {"sequence": self._sequence(rank), "step": self.new.add_value(self.owner.shared[at("step", rank)])}

    def _exchange_residual(self, op: Op) -> None:
        label = f"partial.{op.outputs['y'].value}"
        for rank in range(self.tp):
            inputs = {"partial": Ref(at(label, rank)), **self._peers(label, rank),
                      "residual": self.local(op.inputs["residual"], rank), **self._control(rank)}  # fmt: skip
            if self.old.phase == "prefill":
                inputs["rows"] = self.new.add_value(self.owner.shared[at("pf_lane_ncols", rank)])
            self.new.add_op("exchange_residual", inputs, {"y": self.local(op.outputs["y"], rank)},
                            attrs={"ordinal": self.ordinal, "wire": self.wire, "pushed": self._pushes(),
                                   "tiles": self._tiles()}, rank=rank, layer=op.layer)  # fmt: skip
        self.ordinal += 1

    def _candidates(self, op: Op, rank: int, inputs: dict[str, Ref]) -> None:
        rows = self.old.types(op)["token"].shape[0]
        out = self._scratch(f"candidates.{op.outputs['token'].value}", (rows, 2 * MAX_CANDIDATES), "f32", rank)
        wanted = ("logits", "lane_sampling", "run_slot", "run_ncols", "token_counts", "pf_control")
        share = self.spec.vocab_rows // self.tp
        self.new.add_op("sample_candidates", {name: inputs[name] for name in wanted if name in inputs}, {"candidates": out},
                        attrs={"first": rank * share, "vocab": op.int_attr("vocab")}, rank=rank)  # fmt: skip

    def _merge(self, op: Op) -> None:
        label = f"candidates.{op.outputs['token'].value}"
        wanted = ("lane_sampling", "run_len", "run_ncols", "lane_prompt_len", "pf_control")
        for rank in range(self.tp):
            inputs = {"candidates": Ref(at(label, rank)), **self._peers(label, rank), **self._control(rank)}
            inputs |= {name: self.local(op.inputs[name], rank) for name in wanted if name in op.inputs}
            self.new.add_op("sample_merge", inputs, {"token": self.local(op.outputs["token"], rank)},
                            attrs={"ordinal": self.ordinal}, rank=rank)  # fmt: skip
        self.ordinal += 1
