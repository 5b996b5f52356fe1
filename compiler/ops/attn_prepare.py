"""Per-head norm, rotary embedding and cache append in front of attention (spec/model-dense.md §4 steps 2–4, §5).

q ← bf(N₊(q; w_q)), k ← bf(N₊(k; w_k)) over each head; then the first ``rotary`` dimensions are rotated, pair i joining
dimensions i and i + rotary/2 and following one of three position axes; rotated values are rounded once. k and v go to
the cache at the column's token index.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compiler.control import PAGE
from compiler.ir.op import Array, Context, Cost, Op, OpDef, register, require
from compiler.ir.types import TensorType, Value
from compiler.ops.rmsnorm import rms_normalise

HEAD_DIMS = (32, 64, 128, 256)  # what the kernels hold in a warp
LANE_TABLES = ("lane_ncols", "lane_len", "lane_page_row", "page_table")


def native_frequencies(theta: float, rotary: int) -> Array:
    """θ^(−2i/rotary) for i < rotary/2, float64, radians per position."""
    frequencies: Array = float(theta) ** (-2.0 * np.arange(rotary // 2, dtype=np.float64) / rotary)
    return frequencies


def frequency_table(frequencies: Array) -> Array:
    """The operand ``inv_freq`` for frequencies in radians per position: i32[2, pairs], the bits of two float32.

    Row 0 + row 1 is the frequency in turns per position to about 48 bits, so that a phase at position 10^6 is still
    exact to 10^-8 turns (an FP32 product of position and frequency is off by up to 0.03 rad there, spec/yarn.md).
    """
    turns = np.asarray(frequencies, dtype=np.float64) / (2.0 * np.pi)
    high = turns.astype(np.float32)
    low = (turns - high.astype(np.float64)).astype(np.float32)
    return np.stack([high, low]).view(np.int32)


def table_frequencies(table: Array) -> Array:
    """Inverse of ``frequency_table``: float64 turns per position [pairs]."""
    bits = np.ascontiguousarray(table)
    parts = bits.astype(np.int32).view(np.float32) if bits.dtype.kind == "i" else bits
    wide = parts.astype(np.float64)
    turns: Array = wide[0] + wide[1]
    return turns


def pair_axes(pairs: int, height: int, width: int) -> Array:
    """Position axis of each pair, interleaved: i mod 3 while axis 1 (``height`` pairs) or 2 (``width``) lasts, else 0."""
    index = np.arange(pairs)
    axis = index % 3
    lasts = np.where(axis == 1, index < 3 * height, np.where(axis == 2, index < 3 * width, True))
    axes: Array = np.where(lasts, axis, 0)
    return axes


def rotate(x: Array, positions: Array, turns: Array, axes: Array, scale: float) -> Array:
    """Rotate the first 2·pairs dimensions of x [n, heads, dim] at positions [3, n]; float64, not rounded.

    ``turns`` [pairs] per position, ``axes`` [pairs], ``scale`` multiplies cosine and sine."""
    pairs = turns.size
    phase = positions.astype(np.float64)[axes].T * turns  # [n, pairs]
    phase = 2.0 * np.pi * (phase - np.rint(phase))
    cosine, sine = scale * np.cos(phase)[:, None, :], scale * np.sin(phase)[:, None, :]
    out = np.array(x, dtype=np.float64)
    first, second = x[..., :pairs].astype(np.float64), x[..., pairs : 2 * pairs].astype(np.float64)
    out[..., :pairs] = first * cosine - second * sine
    out[..., pairs : 2 * pairs] = second * cosine + first * sine
    return out


def check_lane_tables(op: Op, types: Mapping[str, TensorType]) -> None:
    """Tables that lead from a column to its pages."""
    for name in LANE_TABLES:
        rank = 2 if name == "page_table" else 1
        require(types[name].dtype == "i32" and len(types[name].shape) == rank, op, f"{name} is {types[name]}")


def check_cache(op: Op, types: Mapping[str, TensorType]) -> None:
    kv = types["kv"]
    want = (2, op.int_attr("kv_heads"), PAGE, op.int_attr("dim"))
    require(kv.dtype == "bf16" and kv.shape[1:] == want, op, f"kv is {kv}, bf16 [pages, {', '.join(map(str, want))}]")


def check_heads(op: Op) -> None:
    heads, kv_heads, dim = op.int_attr("heads"), op.int_attr("kv_heads"), op.int_attr("dim")
    require(dim in HEAD_DIMS, op, f"dim is {dim}; allowed: {', '.join(map(str, HEAD_DIMS))}")
    require(kv_heads > 0 and heads % kv_heads == 0, op, f"{heads} heads are not a multiple of {kv_heads} KV heads")


@register
class AttnPrepare(OpDef):
    kind = "attn_prepare"
    inputs = ("q", "k", "v", "wq", "wk", "inv_freq", "positions", *LANE_TABLES)
    outputs = ("qr",)
    state = ("kv",)
    attrs = {"eps": float, "heads": int, "kv_heads": int, "dim": int, "rotary": int, "section_h": int, "section_w": int,
             "mscale": float}  # fmt: skip

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        check_heads(op)
        check_lane_tables(op, types)
        check_cache(op, types)
        dim, rotary = op.int_attr("dim"), op.int_attr("rotary")
        require(0 < rotary <= dim and rotary % 2 == 0, op, f"rotary is {rotary}; an even number in 2…{dim} is needed")
        columns = types["q"].shape[0]
        for name, heads in (("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads"), ("qr", "heads")):
            want = TensorType((columns, op.int_attr(heads) * dim), "bf16")
            require(types[name] == want, op, f"{name} is {types[name]}, {want} is needed")
        for name in ("wq", "wk"):
            require(types[name] == TensorType((dim,), "bf16"), op, f"{name} is {types[name]}, bf16 [{dim}] is needed")
        table = types["inv_freq"]
        require(table.shape == (2, rotary // 2) and table.dtype in ("i32", "f32"), op,
                f"inv_freq is {table}, 4-byte [2, {rotary // 2}] is needed")  # fmt: skip
        require(types["positions"] == TensorType((3, columns), "i32"), op, f"positions is {types['positions']}")
        require(op.int_attr("section_h") >= 0 and op.int_attr("section_w") >= 0, op, "sections are counts of pairs")

    def reference(self, op: Op, ctx: Context) -> None:
        dim, eps = op.int_attr("dim"), op.float_attr("eps")
        rows = [lane * ctx.width + t for lane, t in ctx.columns]
        positions = np.asarray(ctx.whole("positions"))[:, rows]
        turns = table_frequencies(ctx.whole("inv_freq"))
        axes = pair_axes(turns.size, op.int_attr("section_h"), op.int_attr("section_w"))

        def normed_and_rotated(name: str, weight: str, heads: int) -> Array:
            x = ctx.get(name).reshape(len(rows), heads, dim)
            normed = ctx.round(rms_normalise(x, eps) * (1.0 + ctx.weight(weight).astype(np.float64)))
            return ctx.round(rotate(normed, positions, turns, axes, op.float_attr("mscale")))

        ctx.put("qr", normed_and_rotated("q", "wq", op.int_attr("heads")).reshape(len(rows), -1))
        k = normed_and_rotated("k", "wk", op.int_attr("kv_heads"))
        v = ctx.get("v").reshape(k.shape)
        cache, table = ctx.whole("kv"), ctx.whole("page_table")
        lengths, page_rows = ctx.whole("lane_len"), ctx.whole("lane_page_row")
        lanes, offsets = (np.array(part) for part in zip(*ctx.columns, strict=True))
        tokens = np.asarray(lengths)[lanes] + offsets
        pages = np.asarray(table)[np.asarray(page_rows)[lanes], tokens // PAGE]
        cache[pages, 0, :, tokens % PAGE] = k  # already rounded
        cache[pages, 1, :, tokens % PAGE] = v

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        q, k = types["q"], types["k"]
        return Cost(q.nbytes + 2 * k.nbytes, q.nbytes + 2 * k.nbytes, 10 * (q.elements + k.elements))
