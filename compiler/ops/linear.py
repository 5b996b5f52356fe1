"""Product of activations with a weight matrix: y = x Wᵀ, K summed in ``segments`` equal parts (spec/model-dense.md §1).

A segment is one FP32 number per output: tensor parallelism leaves each rank one segment, so the sum over segments, in
order, has the same bits on one device as on several.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from compiler.ir.op import Array, Context, Cost, Op, OpDef, register, require
from compiler.ir.types import TensorType, Value

BLOCK_WEIGHTS = 1 << 22  # weights decoded at once by a reference: 32 MiB of float64


def check_product(op: Op, types: Mapping[str, TensorType], outputs: int, dtypes: tuple[str, ...] = ("bf16",)) -> None:
    """Rule shared by the products: x bf16 [C, K], w [N, K], y [C, ``outputs``] in one of ``dtypes``."""
    x, w, y = types["x"], types["w"], types["y"]
    require(len(x.shape) == 2 and x.dtype == "bf16", op, f"x is {x}, bf16 [columns, K] is needed")
    require(len(w.shape) == 2 and w.shape[1] == x.shape[1], op, f"w has shape {w.shape}, [N, {x.shape[1]}] is needed")
    require(y.shape == (x.shape[0], outputs), op, f"y has shape {y.shape}, {(x.shape[0], outputs)} is needed")
    require(y.dtype in dtypes, op, f"y is {y.dtype}, {' or '.join(dtypes)} is needed")


def check_segments(op: Op, types: Mapping[str, TensorType]) -> None:
    """``segments`` is positive and cuts K into equal parts."""
    segments, k = op.int_attr("segments"), types["x"].shape[1]
    require(segments >= 1 and k % segments == 0, op, f"{segments} segments do not divide K = {k}")


def row_blocks(rows: int, k: int) -> Iterator[tuple[int, int]]:
    """Half-open row ranges of at most BLOCK_WEIGHTS weights (at least one row)."""
    step = max(1, BLOCK_WEIGHTS // k)
    return ((begin, min(begin + step, rows)) for begin in range(0, rows, step))


def segment_products(ctx: Context, x: Array, rows: tuple[int, int], segments: int) -> list[Array]:
    """[C, rows] per segment, accumulated in float64; under engine numerics each rounded to float32, as a segment is."""
    weight = np.asarray(ctx.weight("w", rows), dtype=np.float64)
    wide = np.asarray(x, dtype=np.float64)
    part = wide.shape[1] // segments
    sums = [wide[:, s * part : (s + 1) * part] @ weight[:, s * part : (s + 1) * part].T for s in range(segments)]
    return sums if ctx.exact else [s.astype(np.float32) for s in sums]


def product(ctx: Context, outputs: int, segments: int) -> Array:
    """x Wᵀ [active columns, ``outputs``]: segments added in order, float64 (exact) or float32 (engine), not yet rounded."""
    x = ctx.get("x")
    out = np.empty((x.shape[0], outputs), np.float64 if ctx.exact else np.float32)
    for begin, end in row_blocks(outputs, x.shape[1]):
        first, *others = segment_products(ctx, x, (begin, end), segments)
        for other in others:
            first = first + other
        out[:, begin:end] = first
    return out


def product_cost(op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
    """Every weight byte once, activations (and residual) once, 2·C·N·K operations."""
    read = values[op.inputs["w"].value].nbytes + sum(types[name].nbytes for name in op.inputs if name != "w")
    return Cost(read, types["y"].nbytes, 2 * types["x"].shape[0] * types["w"].elements)


@register
class Linear(OpDef):
    """y = Σ segments, rounded to bf16 once, or kept in FP32 (``f32``: partial sums of a rank).

    With ``sequence`` and ``step`` the kernel also sends what it stores to the other rank as it is finished, as words of
    exchange ``ordinal`` or tile by tile (compiler/ops/exchange_residual.py, ``pushed`` and ``tiles``)."""

    kind = "linear"
    inputs = ("x", "w", "sequence", "step")
    outputs = ("y",)
    optional = frozenset({"sequence", "step"})
    attrs = {"segments": int, "f32": bool}

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        check_product(op, types, types["w"].shape[0], ("f32",) if op.attrs["f32"] else ("bf16",))
        check_segments(op, types)
        if "sequence" in op.inputs:
            require("step" in op.inputs and op.int_attr("ordinal") >= 0, op,
                    "what is sent are partial sums of an exchange with an ordinal and a step table")  # fmt: skip

    def reference(self, op: Op, ctx: Context) -> None:
        ctx.put("y", product(ctx, int(ctx.whole("y").shape[-1]), op.int_attr("segments")))

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        return product_cost(op, types, values)
