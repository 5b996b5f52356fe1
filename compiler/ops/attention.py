"""Causal attention of grouped query heads over the paged cache, with the output gate (spec/model-dense.md §4, 5–6).

    a = softmax_j(q·k_j / √D) over 0 ≤ j ≤ own token;  o = bf(bf(Σ a_j v_j) ⊙ σ(gate))

``attention`` is the whole op. In decode it is lowered (``lower_decode``) to ``attention_partial``, which leaves a
maximum, a sum and an unnormalised output per chunk of keys, and ``attention_merge``: two kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from compiler.control import MAX_CHUNKS, PAGE, chunk_keys
from compiler.ir.op import Array, Context, Cost, Op, OpDef, register, require
from compiler.ir.types import Kind, Ref, TensorType, Value
from compiler.ops.attn_prepare import LANE_TABLES, check_cache, check_heads, check_lane_tables

LOG2_E = float(np.log2(np.e))


def sigmoid(x: Array) -> Array:
    """1/(1 + e^−x) in float64."""
    with np.errstate(over="ignore"):
        result: Array = 1.0 / (1.0 + np.exp(-np.asarray(x, dtype=np.float64)))
    return result


def gather(cache: Array, pages: Array, length: int, kind: int) -> Array:
    """Rows 0 … length−1 of a sequence, float64 [kv heads, length, D]. ``pages`` are its page ids, ``kind`` 0 keys, 1 values."""
    count = -(-length // PAGE)
    picked = cache[pages[:count], kind].astype(np.float64)  # [pages, heads, 64, D]
    rows: Array = picked.transpose(1, 0, 2, 3).reshape(cache.shape[2], count * PAGE, cache.shape[4])[:, :length]
    return rows


def attend(q: Array, keys: Array, values: Array, first: int) -> Array:
    """Softmax attention in float64: q [n, Hq, D] of tokens ``first`` … first+n−1, keys and values [Hkv, L, D] with
    L ≥ first+n. Returns [n, Hq, D], not rounded."""
    n, heads, dim = q.shape
    share = heads // keys.shape[0]
    out = np.empty((n, heads, dim))
    hidden = np.arange(keys.shape[1])[None, :] > first + np.arange(n)[:, None]
    for head in range(heads):
        scores = q[:, head].astype(np.float64) @ keys[head // share].T * dim**-0.5
        scores[hidden] = -np.inf
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[:, head] = (weights @ values[head // share]) / weights.sum(axis=1, keepdims=True)
    return out


def chunk_count(max_context: int) -> int:
    """Chunks that a column of at most ``max_context`` keys can have."""
    return min(MAX_CHUNKS, -(-max_context // PAGE))


def lanes_of(ctx: Context) -> Iterator[tuple[int, list[int]]]:
    """Lanes with active columns and the positions of these among the active rows."""
    rows: dict[int, list[int]] = {}
    for index, (lane, _) in enumerate(ctx.columns):
        rows.setdefault(lane, []).append(index)
    yield from rows.items()


def gated(op: Op, ctx: Context, attention: Array) -> None:
    """Round the attention, apply σ(gate), store as o."""
    ctx.put("o", ctx.round(attention).astype(np.float64) * sigmoid(ctx.get("gate")))


def _check_queries(op: Op, types: Mapping[str, TensorType], names: tuple[str, ...]) -> None:
    check_heads(op)
    width = op.int_attr("heads") * op.int_attr("dim")
    want = TensorType((types[names[0]].shape[0], width), "bf16")
    for name in names:
        require(types[name] == want, op, f"{name} is {types[name]}, {want} is needed")


def _check_work(op: Op, types: Mapping[str, TensorType]) -> None:
    work, count = types["work"], types["work_count"]
    require(work.dtype == count.dtype == "i32" and count.shape == (1,), op, f"work_count is {count}, i32 [1] is needed")


@register
class Attention(OpDef):
    """Both phases; ``work`` and ``work_count`` hold the decode work list (unused in prefill)."""

    kind = "attention"
    inputs = ("qr", "gate", "kv", *LANE_TABLES, "work", "work_count")
    outputs = ("o",)
    optional = frozenset({"work", "work_count"})
    attrs = {"phase": str, "heads": int, "kv_heads": int, "dim": int}

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        require(op.attrs["phase"] in ("decode", "prefill"), op, f"phase is {op.attrs['phase']!r}")
        _check_queries(op, types, ("qr", "gate", "o"))
        check_lane_tables(op, types)
        check_cache(op, types)
        if op.attrs["phase"] == "decode":
            require("work" in types and "work_count" in types, op, "decode needs work and work_count")
            _check_work(op, types)

    def reference(self, op: Op, ctx: Context) -> None:
        heads, dim = op.int_attr("heads"), op.int_attr("dim")
        q = ctx.get("qr").reshape(-1, heads, dim)
        cache, table = ctx.whole("kv"), np.asarray(ctx.whole("page_table"))
        out = np.empty(q.shape)
        for lane, rows in lanes_of(ctx):
            length = int(ctx.whole("lane_len")[lane])
            pages = table[int(ctx.whole("lane_page_row")[lane])]
            keys, values = (gather(cache, pages, length + len(rows), kind) for kind in (0, 1))
            out[rows] = attend(q[rows], keys, values, length)
        gated(op, ctx, out.reshape(q.shape[0], -1))

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        """Without the cache, whose size depends on the lengths: ``keys_cost`` adds it."""
        q = types["qr"]
        return Cost(2 * q.nbytes, q.nbytes, 0)


def keys_cost(op: Op, keys: int, columns: int) -> Cost:
    """Cost of ``columns`` neighbouring columns of one lane that see up to ``keys`` keys: the cache is read once."""
    heads, kv_heads, dim = op.int_attr("heads"), op.int_attr("kv_heads"), op.int_attr("dim")
    return Cost(read=2 * kv_heads * keys * dim * 2, flops=4 * heads * dim * keys * columns)


@register
class AttentionPartial(OpDef):
    """Per column, head and chunk of ``chunk_keys(length)`` keys: m = max of log2(e)·q·k/√D, l = Σ 2^(s−m) and
    Σ 2^(s−m)·v. Layouts: partial_ml f32 [columns, heads·chunks·2], partial_o f32 [columns, heads·chunks·D]."""

    kind = "attention_partial"
    inputs = ("qr", "kv", *LANE_TABLES, "work", "work_count")
    outputs = ("partial_o", "partial_ml")
    attrs = {"heads": int, "kv_heads": int, "dim": int, "chunks": int}

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        _check_queries(op, types, ("qr",))
        check_lane_tables(op, types)
        check_cache(op, types)
        _check_work(op, types)
        _check_partials(op, types)
        most = chunk_count(types["page_table"].shape[1] * PAGE)
        require(op.int_attr("chunks") == most, op, f"chunks is {op.attrs['chunks']}, {most} is needed")

    def reference(self, op: Op, ctx: Context) -> None:
        heads, dim, chunks = op.int_attr("heads"), op.int_attr("dim"), op.int_attr("chunks")
        share = heads // op.int_attr("kv_heads")
        q = ctx.get("qr").reshape(-1, heads, dim).astype(np.float64)
        cache, table = ctx.whole("kv"), np.asarray(ctx.whole("page_table"))
        partial_o = np.full((q.shape[0], heads, chunks, dim), np.nan)
        partial_ml = np.full((q.shape[0], heads, chunks, 2), np.nan)
        for lane, rows in lanes_of(ctx):
            before = int(ctx.whole("lane_len")[lane])
            pages = table[int(ctx.whole("lane_page_row")[lane])]
            keys, values = (gather(cache, pages, before + len(rows), kind) for kind in (0, 1))
            for t, row in enumerate(rows):
                length = before + t + 1
                size = chunk_keys(length)
                for chunk, begin in enumerate(range(0, length, size)):
                    span = slice(begin, min(begin + size, length))
                    grouped = q[row].reshape(-1, share, dim)
                    scores = grouped @ keys[:, span].transpose(0, 2, 1) * (dim**-0.5 * LOG2_E)
                    m = scores.max(axis=2, keepdims=True)
                    weights = np.exp2(scores - m)
                    partial_ml[row, :, chunk, 0] = m.reshape(-1)
                    partial_ml[row, :, chunk, 1] = weights.sum(axis=2).reshape(-1)
                    partial_o[row, :, chunk] = (weights @ values[:, span]).reshape(heads, dim)
        ctx.put("partial_o", partial_o.reshape(q.shape[0], -1))
        ctx.put("partial_ml", partial_ml.reshape(q.shape[0], -1))

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        return Cost(types["qr"].nbytes, 0, 0)


@register
class AttentionMerge(OpDef):
    """o = bf(bf(Σ_c 2^(m_c−M) o_c / Σ_c 2^(m_c−M) l_c) ⊙ σ(gate)) over the column's chunks c in order."""

    kind = "attention_merge"
    inputs = ("partial_o", "partial_ml", "gate", "lane_ncols", "lane_len")
    outputs = ("o",)
    attrs = {"heads": int, "kv_heads": int, "dim": int, "chunks": int}

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        _check_queries(op, types, ("gate", "o"))
        _check_partials(op, types)

    def reference(self, op: Op, ctx: Context) -> None:
        heads, dim, chunks = op.int_attr("heads"), op.int_attr("dim"), op.int_attr("chunks")
        partial_o = ctx.get("partial_o").reshape(-1, heads, chunks, dim).astype(np.float64)
        partial_ml = ctx.get("partial_ml").reshape(-1, heads, chunks, 2).astype(np.float64)
        out = np.empty((len(ctx.columns), heads, dim))
        for row, (lane, t) in enumerate(ctx.columns):
            length = int(ctx.whole("lane_len")[lane]) + t + 1
            count = -(-length // chunk_keys(length))
            m, total = partial_ml[row, :, :count, 0], partial_ml[row, :, :count, 1]
            weights = np.exp2(m - m.max(axis=1, keepdims=True))
            weighted = (weights[..., None] * partial_o[row, :, :count]).sum(axis=1)
            out[row] = weighted / (weights * total).sum(axis=1, keepdims=True)
        gated(op, ctx, out.reshape(out.shape[0], -1))

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        return Cost(types["gate"].nbytes, types["o"].nbytes, 0)


def _check_partials(op: Op, types: Mapping[str, TensorType]) -> None:
    chunks, per_chunk = op.int_attr("chunks"), op.int_attr("heads") * op.int_attr("chunks")
    require(1 <= chunks <= MAX_CHUNKS, op, f"chunks is {chunks}; allowed: 1…{MAX_CHUNKS}")
    columns = types["partial_o"].shape[0]
    for name, width in (("partial_o", per_chunk * op.int_attr("dim")), ("partial_ml", per_chunk * 2)):
        want = TensorType((columns, width), "f32")
        require(types[name] == want, op, f"{name} is {types[name]}, {want} is needed")


def lower_decode(op: Op, types: Mapping[str, TensorType], label: str) -> tuple[tuple[Value, Value], tuple[Op, Op]]:
    """The two ops, with the two activations between them, that replace a decode ``attention`` op.

    ``label`` makes the names of the activations unique in the graph; ``types`` are the op's operand types."""
    require(op.kind == "attention" and op.attrs["phase"] == "decode", op, "only decode attention is lowered")
    chunks = chunk_count(types["page_table"].shape[1] * PAGE)
    columns, per_chunk = types["qr"].shape[0], op.int_attr("heads") * chunks
    shapes = {"partial_o": (columns, per_chunk * op.int_attr("dim")), "partial_ml": (columns, per_chunk * 2)}
    made = {name: Value(f"{label}.{name}", TensorType(shape, "f32"), Kind.ACTIVATION, op.rank)
            for name, shape in shapes.items()}  # fmt: skip
    refs = {name: Ref(value.name) for name, value in made.items()}
    attrs = {name: op.attrs[name] for name in ("heads", "kv_heads", "dim")} | {"chunks": chunks}
    partial = Op("attention_partial", {name: op.inputs[name] for name in AttentionPartial.inputs}, refs, {}, attrs,
                 op.rank, op.layer)  # fmt: skip
    rest = {name: op.inputs[name] for name in ("gate", "lane_ncols", "lane_len")}
    merge = Op("attention_merge", {**refs, **rest}, op.outputs, {}, attrs, op.rank, op.layer)
    return (made["partial_o"], made["partial_ml"]), (partial, merge)
