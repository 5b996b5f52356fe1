"""The dense text decoder as an op graph (spec/model-dense.md §3–§9), for B lanes × T columns of decode or one chunk
of prefill. The graph is that of one logical device; the sharding pass cuts it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from artifacts.layouts import get_layout
from compiler.control import (
    EGRESS_ENTRIES,
    RING_WORDS,
    ControlLimits,
    control_tables,
    egress_words,
    table_offsets,
)
from compiler.ir.graph import OpGraph
from compiler.ir.op import Attr
from compiler.ir.types import Kind, Ref, TensorType, Value, WeightSource
from compiler.model.bind import Binding, Product
from compiler.model.spec import GDN, ModelSpec

ROW_PARALLEL_SEGMENTS = 2  # decision 6: o, out and down sum their K in two parts at every tp
# columns at which an object may be cut for two ranks: multiples of its layout's unit (spec/tp2.md §4), and of 16 for loads
COLUMN_UNIT = 16


def segments_of(source: WeightSource) -> int:
    """Parts in which a row-parallel product sums its K: two where K can be cut for two ranks, else one."""
    unit = max(COLUMN_UNIT, get_layout(source.layout).column_unit)
    k = sum(end - begin for begin, end in source.cols)
    return ROW_PARALLEL_SEGMENTS if k % (ROW_PARALLEL_SEGMENTS * unit) == 0 else 1


@dataclass(frozen=True)
class PhaseRequest:
    """One graph to build. ``all_columns``: logits of every column (scoring), else of those that are sampled."""

    name: str
    phase: str
    lanes: int
    width: int
    all_columns: bool = False
    sample: bool = True


def rows_of(source: WeightSource, offset: int, rows: int) -> WeightSource:
    """The part of ``source`` that holds its rows [offset, offset + rows), counted over its row ranges."""
    ranges, at = [], 0
    for begin, end in source.rows:
        low, high = max(offset, at), min(offset + rows, at + end - begin)
        if low < high:
            ranges.append((begin + low - at, begin + high - at))
        at += end - begin
    return replace(source, rows=tuple(ranges))


class TextBuilder:
    """Builds phases that share weights, states and tables. ``shared`` collects these values for the program.

    ``work_items`` bounds the attention work list of every decode graph."""

    def __init__(self, spec: ModelSpec, binding: Binding, limits: ControlLimits, work_items: int) -> None:
        self.spec = spec
        self.binding = binding
        self.limits = limits
        self.shared: dict[str, Value] = {}
        tables = control_tables(limits)
        words = table_offsets(tables)[1]
        for value in tables.values():
            self.shared[value.name] = value
        self._share(Value("block", TensorType((words,), "i32"), Kind.TABLE))
        self._share(Value("ring", TensorType((RING_WORDS,), "i32"), Kind.TABLE))
        self._share(Value("egress", TensorType((EGRESS_ENTRIES, egress_words(limits.lanes)), "i32"), Kind.TABLE))
        self._share(Value("work", TensorType((work_items, 4), "i32"), Kind.STATE))
        self._share(Value("work_count", TensorType((1,), "i32"), Kind.STATE))
        self._share(Value("token_counts", TensorType((limits.slots, spec.vocab_rows), "i32"), Kind.STATE))

    def _share(self, value: Value) -> Value:
        return self.shared.setdefault(value.name, value)

    def build(self, request: PhaseRequest) -> OpGraph:
        """The op graph of one phase, not yet checked against the IR rules."""
        return _PhaseBuilder(self, request).run()


class _PhaseBuilder:
    def __init__(self, owner: TextBuilder, request: PhaseRequest) -> None:
        self.owner, self.spec, self.limits, self.request = owner, owner.spec, owner.limits, request
        self.graph = OpGraph(request.name, request.phase, request.lanes, request.width)
        self.prefill = request.phase == "prefill"
        self.columns = request.lanes * request.width
        self._count = 0

    # -- values

    def table(self, name: str) -> Ref:
        """A table of this phase's set: prefill has its own (prefix ``pf_``) of those that both sets hold; what holds one
        entry per column has the phase's extent."""
        if name in ("tokens", "positions"):
            if not self.prefill:
                shape = (self.columns,) if name == "tokens" else (3, self.columns)
                return self.graph.add_value(Value(name, TensorType(shape, "i32"), Kind.ACTIVATION))
            return self.shared(("sc_" if self.request.all_columns else "pf_") + name)
        prefixed = "pf_" + name
        chosen = prefixed if self.prefill and prefixed in self.owner.shared else name
        return self.graph.add_value(self.owner.shared[chosen])

    def shared(self, name: str) -> Ref:
        return self.graph.add_value(self.owner.shared[name])

    def state(self, name: str, shape: tuple[int, ...], dtype: str) -> Ref:
        return self.graph.add_value(self.owner._share(Value(name, TensorType(shape, dtype), Kind.STATE)))

    def weight(self, source: WeightSource) -> Ref:
        rows = sum(end - begin for begin, end in source.rows)
        cols = sum(end - begin for begin, end in source.cols)
        shape = (rows, cols) if len(source.object_shape) == 2 else (rows,)
        dtype = {"BF16": "bf16", "FP32": "f32"}.get(source.format, "u8")
        name = f"w{source.object_index}"
        if source.rows != ((0, source.object_shape[0]),):
            name += "r" + "_".join(f"{begin}_{end}" for begin, end in source.rows)
        size = get_layout(source.layout).encoded_size(source.format, shape)
        value = Value(name, TensorType(shape, dtype), Kind.WEIGHT, 0, source, size)
        return self.graph.add_value(self.owner._share(value))

    def activation(self, label: str, width: int, dtype: str = "bf16", rows: int = 0) -> Ref:
        self._count += 1
        shape = (rows or self.columns, width) if width else (rows or self.columns,)
        return self.graph.add_value(Value(f"{label}.{self._count}", TensorType(shape, dtype), Kind.ACTIVATION))

    def add(self, kind: str, inputs: dict[str, Ref], outputs: dict[str, Ref], state: dict[str, Ref] | None = None,
            layer: int = -1, **attrs: Attr) -> None:  # fmt: skip
        self.graph.add_op(kind, inputs, outputs, state, attrs, layer=layer)

    def lane_tables(self, *names: str) -> dict[str, Ref]:
        """Tables by operand name; those with one entry per lane are narrowed to this graph's lanes."""
        out = {}
        for name in names:
            ref = self.table(name)
            shape = self.graph.values[ref.value].type.shape
            per_lane = name.startswith("lane_") and len(shape) == 1
            out[name] = Ref(ref.value, 0, self.request.lanes) if per_lane else ref
        return out

    # -- the model

    def run(self) -> OpGraph:
        self._begin()
        x = self.activation("x", self.spec.hidden)
        self.add("embed", {"tokens": self.table("tokens"), "w": self.weight(self.owner.binding.embedding.source)}, {"x": x})
        for layer, kind in enumerate(self.spec.layer_types):
            x = self._gdn(layer, x) if kind == GDN else self._attention(layer, x)
            x = self._mlp(layer, x)
        self._head(x)
        return self.graph

    def _begin(self) -> None:
        names = ["step", "lane_ncols", "lane_len", "tokens", "positions"]
        if not self.prefill:
            names += ["work", "work_count"]
            names += ["lane_frozen", "lane_rope_delta", "lane_prompt_len", "queue", "queue_head", "queue_tail"]
        state = {name: self.table(name) for name in names}
        state["block"], state["token_counts"] = self.shared("block"), self.shared("token_counts")
        # an ingress record may change any table, so every reader of any table waits for begin
        others = [self.graph.add_value(v).value for v in self.owner.shared.values() if v.kind is Kind.TABLE]
        inputs = {"ring": self.shared("ring")}
        if not self.prefill:
            inputs["lane_page_row"] = self.shared("lane_page_row")
        self.graph.add_op(
            "begin", inputs, {}, state,
            {"phase": self.request.phase, "kv_heads": self.spec.kv_heads, "max_context": self.limits.max_context,
             "vocab": self.spec.vocab_rows},
            also_writes=others,
        )  # fmt: skip

    def _norm(self, layer: int, x: Ref, w: WeightSource) -> Ref:
        y = self.activation("h", self.spec.hidden)
        self.add("rmsnorm", {"x": x, "w": self.weight(w)}, {"y": y}, layer=layer, eps=self.spec.eps)
        return y

    def _project(self, layer: int, x: Ref, products: tuple[Product, ...]) -> dict[str, Ref]:
        """Run the products of a projection group; the result maps parameter suffixes to views of their outputs."""
        views: dict[str, Ref] = {}
        for product in products:
            y = self.activation("p", product.shape[0])
            self.add("linear", {"x": x, "w": self.weight(product.source)}, {"y": y}, layer=layer, segments=1, f32=False)
            for section in product.sections:
                suffix = section.parameter.rsplit("/", 1)[-1]
                views[suffix] = Ref(y.value, section.offset, section.rows)
        return views

    def _out(self, layer: int, x: Ref, product: Product, residual: Ref) -> Ref:
        y = self.activation("x", self.spec.hidden)
        self.add("linear_residual", {"x": x, "w": self.weight(product.source), "residual": residual}, {"y": y},
                 layer=layer, segments=segments_of(product.source))  # fmt: skip
        return y

    def _attention(self, layer: int, x: Ref) -> Ref:
        spec, weights = self.spec, self.owner.binding.layers[layer]
        h = self._norm(layer, x, weights["input_norm"])
        views = self._project(layer, h, weights["in"])
        kv = self.state(f"kv{layer}", (self.limits.pages, 2, spec.kv_heads, 64, spec.head_dim), "bf16")
        width = spec.heads * spec.head_dim
        q = self.activation("q", width)
        section = spec.mrope_section
        self.add(
            "attn_prepare",
            {"q": views["query"], "k": views["key"], "v": views["value"], "wq": self.weight(weights["query_norm"]),
             "wk": self.weight(weights["key_norm"]), "inv_freq": self.shared("inv_freq"), "positions": self.table("positions"),
             **self.lane_tables("lane_ncols", "lane_len", "lane_page_row", "page_table")},
            {"qr": q}, {"kv": kv}, layer, eps=spec.eps, heads=spec.heads, kv_heads=spec.kv_heads, dim=spec.head_dim,
            rotary=spec.rotary_dim, section_h=section[1], section_w=section[2], mscale=1.0,
        )  # fmt: skip
        o = self.activation("o", width)
        work = () if self.prefill else ("work", "work_count")
        self.add(
            "attention",
            {"qr": q, "gate": views["gate"], "kv": kv,
             **self.lane_tables("lane_ncols", "lane_len", "lane_page_row", "page_table", *work)},
            {"o": o}, None, layer, phase=self.request.phase, heads=spec.heads, kv_heads=spec.kv_heads,
            dim=spec.head_dim,
        )  # fmt: skip
        return self._out(layer, o, weights["out"][0], x)

    def _gdn(self, layer: int, x: Ref) -> Ref:
        spec, limits, weights = self.spec, self.limits, self.owner.binding.layers[layer]
        h = self._norm(layer, x, weights["input_norm"])
        views = self._project(layer, h, weights["in"])
        gates = self.activation("g", 2 * spec.value_heads, "f32")
        ab: dict[str, Ref] = {}
        for product in weights["ab"]:
            for section in product.sections:
                source = rows_of(product.source, section.offset, section.rows)
                ab["wa" if section.parameter.endswith("a_projection") else "wb"] = self.weight(source)
        ab |= {name: self.weight(weights[name]) for name in ("a_log", "dt_bias")}
        self.add("gdn_gates", {"x": h, **ab}, {"gates": gates}, None, layer)
        channels, s, t = spec.conv_channels, limits.slots, limits.records
        tables = self.lane_tables("lane_ncols", "lane_len", "lane_slot", "slot_pending", "slot_parity")
        y = self.activation("y", channels)
        conv_in = self._conv_inputs(views)
        self.add("conv", {**conv_in, "w": self.weight(weights["conv"]), **tables}, {"y": y},
                 {"window": self.state(f"window{layer}", (2, s, 3, channels), "bf16"),
                  "record": self.state(f"record{layer}", (2, s, t, channels), "bf16")},
                 layer, phase=self.request.phase)  # fmt: skip
        o = self.activation("o", spec.value_heads * spec.value_dim)
        hk, hv, dk, dv = spec.key_heads, spec.value_heads, spec.key_dim, spec.value_dim
        self.add(
            "gdn", {"y": y, "gates": gates, **tables}, {"o": o},
            {"recurrent": self.state(f"recurrent{layer}", (s, hv, dv, dk), "f32"),
             "rec_k": self.state(f"rec_k{layer}", (2, s, t, hk, dk), "f32"),
             "rec_u": self.state(f"rec_u{layer}", (2, s, t, hv, dv), "f32"),
             "rec_alpha": self.state(f"rec_alpha{layer}", (2, s, t, hv), "f32")},
            layer, phase=self.request.phase, key_heads=hk, value_heads=hv, dk=dk, dv=dv,
        )  # fmt: skip
        n = self.activation("n", hv * dv)
        self.add("gated_norm", {"o": o, "z": views["z"], "w": self.weight(weights["norm"])}, {"y": n}, None, layer,
                 eps=spec.eps, heads=hv, dim=dv)  # fmt: skip
        return self._out(layer, n, weights["out"][0], x)

    def _conv_inputs(self, views: dict[str, Ref]) -> dict[str, Ref]:
        """q, k, v channels as one view where they are neighbours, else the q|k part and the v part."""
        q, k, v = views["query"], views["key"], views["value"]
        if q.value != k.value or q.offset + q.width != k.offset:
            raise ValueError("gdn query and key must be neighbouring rows of one object")
        if v.value == q.value and k.offset + k.width == v.offset:
            return {"x": Ref(q.value, q.offset, q.width + k.width + v.width)}
        return {"x": Ref(q.value, q.offset, q.width + k.width), "x2": v}

    def _mlp(self, layer: int, x: Ref) -> Ref:
        weights = self.owner.binding.layers[layer]
        h = self._norm(layer, x, weights["post_attention_norm"])
        m = self.activation("m", self.spec.intermediate)
        self.add("linear_swiglu", {"x": h, "w": self.weight(weights["gate_up"][0].source)}, {"y": m}, layer=layer)
        return self._out(layer, m, weights["down"][0], x)

    def _head(self, x: Ref) -> None:
        spec, request = self.spec, self.request
        rows = self.columns
        if self.prefill and not request.all_columns:
            last = self.activation("last", spec.hidden, rows=request.lanes)
            self.add("select_last", {"x": x, **self.lane_tables("lane_ncols")}, {"y": last})
            x, rows = last, request.lanes
        hidden = self.activation("hidden", spec.hidden, rows=rows)
        self.add("rmsnorm", {"x": x, "w": self.weight(self.owner.binding.final_norm)}, {"y": hidden}, eps=spec.eps)
        run = {f"run_{name[5:]}": ref for name, ref in self.lane_tables("lane_ncols", "lane_len", "lane_slot").items()}
        if self.prefill:
            run["pf_control"] = self.shared("pf_control")
        advance = dict(run)
        if request.sample or request.all_columns:
            logits = self.activation("logits", spec.vocab_rows, rows=rows)
            self.graph.outputs.add(logits.value)
            self.add("linear", {"x": hidden, "w": self.weight(self.owner.binding.head.source)}, {"y": logits}, segments=1,
                     f32=False)  # fmt: skip
        if request.sample:
            sampled = self.activation("sampled", 0, "i32", rows=rows)
            self.add("sample", {"logits": logits, **{name: self.shared(name) for name in
                                                     ("lane_sampling", "lane_prompt_len", "token_counts")}, **run},
                     {"token": sampled}, vocab=spec.vocab_ids)  # fmt: skip
            advance["sampled"] = sampled
        state = {name: self.shared(name) for name in
                 ("step", "lane_len", "lane_prompt_len", "lane_limit", "lane_generated", "lane_frozen", "lane_stops",
                  "queue", "queue_head", "queue_tail", "slot_pending", "slot_parity", "token_counts", "egress")}  # fmt: skip
        self.add("advance", advance, {}, state, phase=request.phase, max_context=self.limits.max_context)
