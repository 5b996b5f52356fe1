"""Gated delta rule over a recurrent state per value head, FP32 [Hv, Dv, Dk] (spec/model-dense.md §6).

One token: S ← α·S, u = β(v − S k), S ← S + u kᵀ, o = S q / √Dk, with q and k L2-normalised (ε added to the sum of
squares) and α = e^g. Decode commits lazily through records of k, u and α, prefill at once (docs/architecture.md).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compiler.ir.op import Array, Context, Cost, Op, OpDef, register, require
from compiler.ir.types import Kind, Ref, TensorType, Value
from compiler.ops.conv import TABLES, lane_rows

L2_EPS = 1e-6  # added to the sum of squares (spec/model-dense.md §1)
CHUNK = 64  # tokens of one chunk of the WY form
MATRIX_WIDTH = CHUNK + 1  # floats per column and value head that pass between the kernels of the chunked form


def l2_normalise(x: Array) -> Array:
    """x·(Σx² + ε)^(-1/2) over the last axis, float64."""
    wide = np.asarray(x, dtype=np.float64)
    result: Array = wide / np.sqrt(np.sum(wide * wide, axis=-1, keepdims=True) + L2_EPS)
    return result


def per_value_head(x: Array, value_heads: int) -> Array:
    """Repeat the key heads of [n, Hk, D] so that value head j sees key head ⌊j·Hk/Hv⌋."""
    return np.repeat(x, value_heads // x.shape[1], axis=1)


def decayed_update(state: Array, alpha: Array, u: Array, k: Array) -> Array:
    """α·S + u kᵀ in float64: state [Hv, Dv, Dk], alpha [Hv], u [Hv, Dv], k [Hv, Dk]."""
    result: Array = alpha[:, None, None].astype(np.float64) * state + u[:, :, None].astype(np.float64) * k[:, None, :]
    return result


def recurrent(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """The recurrence in float64, token by token: the definition against which the chunked form is verified.

    q, k [n, Hk, Dk] normalised, v [n, Hv, Dv], g and beta [n, Hv], state [Hv, Dv, Dk] → (o [n, Hv, Dv], state)."""
    heads = v.shape[1]
    q, k = per_value_head(q, heads), per_value_head(k, heads)
    scale = q.shape[2] ** -0.5
    out = np.empty(v.shape)
    for t in range(v.shape[0]):
        alpha = np.exp(g[t])
        u = beta[t][:, None] * (v[t] - alpha[:, None] * np.einsum("hvk,hk->hv", state, k[t]))
        state = decayed_update(state, alpha, u, k[t])
        out[t] = np.einsum("hvk,hk->hv", state, q[t]) * scale
    return out, state


def chunk_matrices(k: Array, g: Array, beta: Array) -> tuple[Array, Array]:
    """What the WY form (§6.2) needs of one chunk besides the state, float64: T·diag(β) [Hv, n, n] and γ [Hv, n].

    k [Hv, n, Dk] normalised, per value head; g and beta [Hv, n]."""
    n = g.shape[1]
    gamma = np.cumsum(g, axis=1)
    lower = beta[:, :, None] * (k @ k.transpose(0, 2, 1)) * decay_matrix(gamma) * np.tri(n, k=-1)
    solved = np.linalg.solve(np.eye(n) + lower, np.eye(n) * beta[:, :, None])
    return solved, gamma


def decay_matrix(gamma: Array) -> Array:
    """e^{γ_i−γ_j} on and below the diagonal, else 0. Masked before exp: above it the difference could overflow."""
    difference = gamma[:, :, None] - gamma[:, None, :]
    result: Array = np.exp(np.where(np.tri(gamma.shape[1], dtype=bool), difference, -np.inf))
    return result


def chunk_step(q: Array, k: Array, v: Array, solved: Array, gamma: Array, state: Array) -> tuple[Array, Array]:
    """One chunk of the WY form from its matrices: (o [Hv, n, Dv], state). All per value head, q and k [Hv, n, Dk]."""
    carried = np.exp(gamma)[:, :, None]
    transposed = state.transpose(0, 2, 1)
    u = solved @ (v - carried * (k @ transposed))
    scores = (q @ k.transpose(0, 2, 1)) * decay_matrix(gamma)
    o = q.shape[2] ** -0.5 * (carried * (q @ transposed) + scores @ u)
    remaining = np.exp(gamma[:, -1:] - gamma)[:, :, None]
    return o, np.exp(gamma[:, -1])[:, None, None] * state + (remaining * u).transpose(0, 2, 1) @ k


def chunked(q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> tuple[Array, Array]:
    """The same function in the WY form, float64, chunks of 64 tokens; operands as ``recurrent``."""
    heads = v.shape[1]
    q, k = (per_value_head(x, heads).transpose(1, 0, 2) for x in (q, k))  # [Hv, n, Dk]
    v, g, beta = v.transpose(1, 0, 2), g.T, beta.T
    out = np.empty(v.shape)
    for begin in range(0, v.shape[1], CHUNK):
        at = slice(begin, begin + CHUNK)
        solved, gamma = chunk_matrices(k[:, at], g[:, at], beta[:, at])
        out[:, at], state = chunk_step(q[:, at], k[:, at], v[:, at], solved, gamma, state)
    return out.transpose(1, 0, 2), state


def folded_state(ctx: Context, slot: int, length: int) -> Array:
    """The slot's state with its pending records folded in; zero at the start of a sequence."""
    stored = ctx.whole("recurrent")[slot]
    if length == 0:
        return np.zeros_like(stored)
    parity = int(ctx.whole("slot_parity")[slot])
    rec_k, rec_u, rec_alpha = (ctx.whole(name)[parity, slot] for name in ("rec_k", "rec_u", "rec_alpha"))
    state: Array = stored.copy()
    for i in range(int(ctx.whole("slot_pending")[slot])):
        k = per_value_head(rec_k[i : i + 1], stored.shape[0])[0]
        state = ctx.round(decayed_update(state, rec_alpha[i], rec_u[i], k), "f32")
    return state


def split_columns(op: Op, y: Array) -> tuple[Array, Array, Array]:
    """Rows [q | k | v] → q, k [n, Hk, Dk] normalised and v [n, Hv, Dv]."""
    hk, hv, dk, dv = (op.int_attr(name) for name in ("key_heads", "value_heads", "dk", "dv"))
    q, k, v = np.split(y, (hk * dk, 2 * hk * dk), axis=1)
    n = y.shape[0]
    return l2_normalise(q.reshape(n, hk, dk)), l2_normalise(k.reshape(n, hk, dk)), v.reshape(n, hv, dv)


def check_state(op: Op, types: Mapping[str, TensorType]) -> None:
    """Shape rule of the recurrent state, its records and the tables that lead to them."""
    hk, hv, dk, dv = (op.int_attr(name) for name in ("key_heads", "value_heads", "dk", "dv"))
    require(hk > 0 and hv % hk == 0, op, f"{hv} value heads are not a multiple of {hk} key heads")
    rec_k = types["rec_k"]
    require(len(rec_k.shape) == 5, op, f"rec_k is {rec_k}, f32 [2, slots, records, {hk}, {dk}] is needed")
    slots, records = rec_k.shape[1:3]
    expected = {
        "recurrent": (slots, hv, dv, dk),
        "rec_k": (2, slots, records, hk, dk),
        "rec_u": (2, slots, records, hv, dv),
        "rec_alpha": (2, slots, records, hv),
    }
    for name, shape in expected.items():
        require(types[name] == TensorType(shape, "f32"), op, f"{name} is {types[name]}, f32 {shape} is needed")
    for name in ("slot_pending", "slot_parity"):
        require(types[name] == TensorType((slots,), "i32"), op, f"{name} is {types[name]}, i32 [{slots}] is needed")
    for name in TABLES[:3]:
        require(types[name].dtype == "i32" and len(types[name].shape) == 1, op, f"{name} is {types[name]}")


def check_columns(op: Op, types: Mapping[str, TensorType]) -> None:
    """Shape rule of the convolved rows and of those of gates and o that the op has."""
    hk, hv, dk, dv = (op.int_attr(name) for name in ("key_heads", "value_heads", "dk", "dv"))
    y = types["y"]
    require(len(y.shape) == 2 and y.shape[1] == 2 * hk * dk + hv * dv and y.dtype == "bf16", op,
            f"y is {y}, bf16 [columns, {2 * hk * dk + hv * dv}] is needed")  # fmt: skip
    for name, width, dtype in (("gates", 2 * hv, "f32"), ("o", hv * dv, "bf16")):
        if name in types:
            require(types[name] == TensorType((y.shape[0], width), dtype), op,
                    f"{name} is {types[name]}, {dtype} [{y.shape[0]}, {width}] is needed")  # fmt: skip


@register
class Gdn(OpDef):
    """``y`` is the convolved row [q | k | v]; ``gates`` is [g | β]; rec_* hold the records of the last two steps by
    parity. ``slot_pending`` and ``slot_parity`` are tables of all slots, the others of the phase's lanes."""

    kind = "gdn"
    inputs = ("y", "gates", *TABLES)
    outputs = ("o",)
    state = ("recurrent", "rec_k", "rec_u", "rec_alpha")
    attrs = {"phase": str, "key_heads": int, "value_heads": int, "dk": int, "dv": int}

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        require(op.attrs["phase"] in ("decode", "prefill"), op, f"phase is {op.attrs['phase']!r}")
        check_columns(op, types)
        check_state(op, types)

    def reference(self, op: Op, ctx: Context) -> None:
        hk, hv, dk, dv = (op.int_attr(name) for name in ("key_heads", "value_heads", "dk", "dv"))
        y, gates = ctx.get("y").astype(np.float64), ctx.get("gates").astype(np.float64)
        n = y.shape[0]
        q, k, v = split_columns(op, y)
        g, beta = gates[:, :hv], gates[:, hv:]
        decode = op.attrs["phase"] == "decode"
        recurrent_state = ctx.whole("recurrent")
        require(not decode or ctx.width <= ctx.whole("rec_k").shape[2], op,
                f"{ctx.width} columns per lane, but records hold {ctx.whole('rec_k').shape[2]}")  # fmt: skip
        o = np.empty((n, hv, dv))
        for lane, rows in lane_rows(ctx).items():
            slot = int(ctx.whole("lane_slot")[lane])
            state = folded_state(ctx, slot, int(ctx.whole("lane_len")[lane]))
            if decode:
                recurrent_state[slot] = state
                o[rows] = self._columns(ctx, slot, q[rows], k[rows], v[rows], g[rows], beta[rows], state)
            else:
                o[rows], recurrent_state[slot] = chunked(q[rows], k[rows], v[rows], g[rows], beta[rows], state)
        ctx.put("o", o.reshape(n, hv * dv))

    @staticmethod
    def _columns(ctx: Context, slot: int, q: Array, k: Array, v: Array, g: Array, beta: Array, state: Array) -> Array:
        """Run a lane's columns from ``state``, which is not stored, and write their records of the other parity."""
        target = 1 - int(ctx.whole("slot_parity")[slot])
        rec_k, rec_u, rec_alpha = (ctx.whole(name)[target, slot] for name in ("rec_k", "rec_u", "rec_alpha"))
        heads = v.shape[1]
        k, alphas = ctx.round(k, "f32"), ctx.round(np.exp(g), "f32")
        wide_k, wide_q = per_value_head(k, heads), per_value_head(q, heads)
        o = np.empty(v.shape)
        for t in range(v.shape[0]):
            projected = np.einsum("hvk,hk->hv", state, wide_k[t])
            u = ctx.round(beta[t][:, None] * (v[t] - alphas[t][:, None] * projected), "f32")
            state = ctx.round(decayed_update(state, alphas[t], u, wide_k[t]), "f32")
            o[t] = np.einsum("hvk,hk->hv", state, wide_q[t]) * q.shape[2] ** -0.5
            rec_k[t], rec_u[t], rec_alpha[t] = k[t], u, alphas[t]
        return o

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        hk, hv, dk, dv = (op.int_attr(name) for name in ("key_heads", "value_heads", "dk", "dv"))
        y, lanes = types["y"], types["lane_slot"].shape[0]
        state = lanes * hv * dv * dk * 4
        activations = y.nbytes + types["gates"].nbytes
        if op.attrs["phase"] == "decode":
            # one record per lane folded (the least a running lane has), one written per column
            record = 4 * (hk * dk + hv * dv + hv)
            flops = 8 * y.shape[0] * hv * dv * dk
            return Cost(state + activations + lanes * record, state + types["o"].nbytes + y.shape[0] * record, flops)
        per_token = hv * (4 * CHUNK * dk + 4 * CHUNK * dv + 6 * dk * dv)
        return Cost(state + activations, state + types["o"].nbytes, y.shape[0] * per_token)


def lower_prefill(op: Op, types: Mapping[str, TensorType], label: str) -> tuple[tuple[Value, Value], tuple[Op, Op]]:
    """The two ops, with the two activations between them, that replace a prefill ``gdn`` op in the chunked form.

    ``label`` makes the names of the activations unique in the graph; ``types`` are the op's operand types. Columns must
    be a multiple of 64; whether the target can run them, ``kernels.gdn_prefill.chunked_fits`` tells."""
    require(op.kind == "gdn" and op.attrs["phase"] == "prefill", op, "only prefill is lowered to chunks")
    columns = types["y"].shape[0]
    require(columns % CHUNK == 0, op, f"{columns} columns are not a multiple of {CHUNK}")
    hk, hv, dk = (op.int_attr(name) for name in ("key_heads", "value_heads", "dk"))
    shapes = {"matrices": (columns, hv * MATRIX_WIDTH), "rows": (columns, hk * dk)}
    made = {
        name: Value(f"{label}.{name}", TensorType(shape, "f32"), Kind.ACTIVATION, op.rank)
        for name, shape in shapes.items()
    }
    refs = {name: Ref(value.name) for name, value in made.items()}
    attrs = {name: op.attrs[name] for name in ("key_heads", "value_heads", "dk", "dv")}
    given = {name: op.inputs[name] for name in ("y", "gates", "lane_ncols")}
    intra = Op("gdn_intra", given, refs, {}, attrs, op.rank, op.layer)
    tables = {name: op.inputs[name] for name in TABLES}
    carry = Op("gdn_carry", {"y": op.inputs["y"], **refs, **tables}, op.outputs, op.state, attrs, op.rank, op.layer)
    return (made["matrices"], made["rows"]), (intra, carry)
