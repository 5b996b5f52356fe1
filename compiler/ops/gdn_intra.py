"""First half of the chunked delta rule: what each chunk of 64 columns needs besides the state (spec/model-dense.md §6.2).

Per column and value head ``matrices`` holds 65 floats, per column and key head ``rows`` holds Dk floats. Their content
passes between the two halves only: the reference puts row i of T·diag(β) and γ_i, and the normalised key; the kernels
put T − I, P and coefficients as matrix operands, and scaled keys and queries as halves, into the same bytes (chunk.cuh).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compiler.ir.op import Context, Cost, Op, OpDef, register, require
from compiler.ir.types import TensorType, Value
from compiler.ops.gdn import CHUNK, MATRIX_WIDTH, check_columns, chunk_matrices, per_value_head, split_columns


def check_passed(op: Op, types: Mapping[str, TensorType]) -> None:
    """Shape rule of the two values that pass between the halves."""
    columns = types["y"].shape[0]
    require(columns % CHUNK == 0, op, f"{columns} columns are not a multiple of {CHUNK}")
    hk, hv, dk = (op.int_attr(name) for name in ("key_heads", "value_heads", "dk"))
    for name, width in (("matrices", hv * MATRIX_WIDTH), ("rows", hk * dk)):
        require(types[name] == TensorType((columns, width), "f32"), op, f"{name} is {types[name]}, f32 [{columns}, {width}]")


@register
class GdnIntra(OpDef):
    kind = "gdn_intra"
    inputs = ("y", "gates", "lane_ncols")
    outputs = ("matrices", "rows")
    attrs = {"key_heads": int, "value_heads": int, "dk": int, "dv": int}

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        check_columns(op, types)
        check_passed(op, types)
        require(types["lane_ncols"].dtype == "i32", op, f"lane_ncols is {types['lane_ncols']}")

    def reference(self, op: Op, ctx: Context) -> None:
        heads = op.int_attr("value_heads")
        _, k, _ = split_columns(op, ctx.get("y").astype(np.float64))
        gates = ctx.get("gates").astype(np.float64)
        n = k.shape[0]
        matrices = np.zeros((n, heads, MATRIX_WIDTH))
        wide = per_value_head(k, heads).transpose(1, 0, 2)
        for begin in range(0, n, CHUNK):
            at = slice(begin, begin + CHUNK)
            solved, gamma = chunk_matrices(wide[:, at], gates[at, :heads].T, gates[at, heads:].T)
            matrices[at, :, : gamma.shape[1]] = solved.transpose(1, 0, 2)
            matrices[at, :, CHUNK] = gamma.T
        ctx.put("matrices", matrices.reshape(n, heads * MATRIX_WIDTH))
        ctx.put("rows", k.reshape(n, -1))

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        hk, hv, dk = (op.int_attr(name) for name in ("key_heads", "value_heads", "dk"))
        columns = types["y"].shape[0]
        flops = columns * hv * (4 * CHUNK * dk + 2 * CHUNK * CHUNK // 3)
        return Cost(columns * 2 * hk * dk * 2 + types["gates"].nbytes, types["matrices"].nbytes + types["rows"].nbytes, flops)
