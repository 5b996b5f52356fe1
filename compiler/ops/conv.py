"""Causal depthwise convolution with 4 taps and SiLU over the qkv channels of a GDN layer, with its window.

y_{c,t} = silu(Σ_j w_{j,c}·u_{c,t−3+j}), tap 3 on the current token; the window holds the last three inputs, oldest
first (spec/model-dense.md §6). Decode commits lazily, prefill at once (docs/architecture.md, "Lazy commit"). Window and
records are kept twice: decode reads those of the slot's parity and writes the others.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compiler.ir.op import Array, Context, Cost, Op, OpDef, register, require
from compiler.ir.types import TensorType, Value
from compiler.ops.gated_norm import silu

TAPS = 4
TABLES = ("lane_slot", "lane_ncols", "lane_len", "slot_pending", "slot_parity")


def lane_rows(ctx: Context) -> dict[int, list[int]]:
    """Rows of the active columns by lane, in column order."""
    rows: dict[int, list[int]] = {}
    for row, (lane, _) in enumerate(ctx.columns):
        rows.setdefault(lane, []).append(row)
    return rows


def causal_conv(history: Array, x: Array, w: Array) -> Array:
    """silu of the causal convolution in float64: history [3, ch], x [n, ch], w [4, ch] → [n, ch]."""
    padded = np.concatenate([history, x]).astype(np.float64)
    n = x.shape[0]
    return silu(sum((padded[j : j + n] * w[j] for j in range(1, TAPS)), padded[:n] * w[0]))


@register
class Conv(OpDef):
    """``x`` holds the first channels, the optional ``x2`` the remaining ones; ``lane_slot`` and its sisters are the
    tables of this phase, narrowed to the graph's lanes; ``slot_pending`` and ``slot_parity`` are tables of all slots."""

    kind = "conv"
    inputs = ("x", "x2", "w", *TABLES)
    outputs = ("y",)
    state = ("window", "record")
    optional = frozenset({"x2"})
    attrs = {"phase": str}

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        y, window, record = types["y"], types["window"], types["record"]
        require(op.attrs["phase"] in ("decode", "prefill"), op, f"phase is {op.attrs['phase']!r}")
        require(len(y.shape) == 2 and y.dtype == "bf16", op, f"y is {y}, bf16 [columns, channels] is needed")
        columns, channels = y.shape
        given = [types[name] for name in ("x", "x2") if name in types]
        require(all(t.dtype == "bf16" and len(t.shape) == 2 and t.shape[0] == columns for t in given)
                and sum(t.shape[1] for t in given) == channels, op,
                f"inputs are {given}, bf16 [{columns}, …] with {channels} channels together are needed")  # fmt: skip
        require(types["w"] == TensorType((TAPS, channels), "bf16"), op, f"w is {types['w']}, bf16 [4, {channels}]")
        require(len(record.shape) == 4, op, f"record is {record}, bf16 [2, slots, records, {channels}] is needed")
        slots, records = record.shape[1:3]
        require(record == TensorType((2, slots, records, channels), "bf16"), op,
                f"record is {record}, bf16 [2, {slots}, {records}, {channels}] is needed")  # fmt: skip
        require(window == TensorType((2, slots, TAPS - 1, channels), "bf16"), op, f"window is {window}")
        for name in TABLES[3:]:
            require(types[name] == TensorType((slots,), "i32"), op, f"{name} is {types[name]}, i32 [{slots}] is needed")
        for name in TABLES[:3]:
            require(types[name].dtype == "i32" and len(types[name].shape) == 1, op, f"{name} is {types[name]}")

    def reference(self, op: Op, ctx: Context) -> None:
        x = ctx.get("x")
        if "x2" in op.inputs:
            x = np.concatenate([x, ctx.get("x2")], axis=1)
        w = ctx.weight("w").astype(np.float64)
        window, record = ctx.whole("window"), ctx.whole("record")
        slots, lengths, pending, parities = (ctx.whole(n) for n in ("lane_slot", "lane_len", "slot_pending", "slot_parity"))
        decode = op.attrs["phase"] == "decode"
        y = np.empty(x.shape)
        for lane, rows in lane_rows(ctx).items():
            slot = int(slots[lane])
            parity = int(parities[slot])
            if lengths[lane] == 0:
                history = np.zeros_like(window[0, slot])
            else:
                history = np.concatenate([window[parity, slot], record[parity, slot, : int(pending[slot])]])[-(TAPS - 1) :]
            u = x[rows]
            y[rows] = causal_conv(history, u, w)
            if decode:
                window[1 - parity, slot] = history
                record[1 - parity, slot, : len(rows)] = u
            else:
                window[parity, slot] = np.concatenate([history, u])[-(TAPS - 1) :]
        ctx.put("y", y)
        ctx.store("window", window)
        if decode:
            ctx.store("record", record)

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        y = types["y"]
        state = types["lane_slot"].shape[0] * (TAPS - 1) * y.shape[1] * 2
        recorded = y.nbytes if op.attrs["phase"] == "decode" else 0
        return Cost(y.nbytes + types["w"].nbytes + state, y.nbytes + state + recorded, 2 * TAPS * y.elements)
