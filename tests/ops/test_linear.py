"""Op rooms of the products and the embedding: rules, references against plain NumPy, costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import compiler.ops.linear as linear_room
from compiler.ir.op import Op, bf16_round, definition
from compiler.ir.types import IRError, Kind, Ref, TensorType, Value
from compiler.ops import embed, linear_residual, linear_swiglu  # noqa: F401  registers the kinds
from runtime.vm.context import VMContext

Array = np.ndarray[Any, Any]


def make(kind: str, **attrs: Any) -> Op:
    inputs = {"x": Ref("x"), "w": Ref("w")} | ({"residual": Ref("r")} if kind == "linear_residual" else {})
    return Op(kind, inputs, {"y": Ref("y")}, attrs=attrs)


def run(op: Op, arrays: dict[str, Array], exact: bool, ncols: tuple[int, ...] = (2, 1)) -> Array:
    """Executes the reference for lanes of two columns; inactive columns hold NaN, as in the VM."""
    kinds = {"y": "f32" if op.attrs.get("f32") else "bf16"}
    out = np.full((4, arrays["y_width"][0]), np.nan, np.float64 if exact else np.float32)
    values = arrays | {"y": out}
    ctx = VMContext(op, exact, 2, 2, np.array(ncols), lambda name: values[name],
                    lambda name: TensorType(values[name].shape, kinds.get(name, "bf16")),
                    lambda name, rows: values[name][slice(*rows) if rows else slice(None)])  # fmt: skip
    definition(op.kind).reference(op, ctx)
    return out


def inputs(n: int, k: int, outputs: int, exact: bool) -> dict[str, Array]:
    rng = np.random.default_rng(1)
    dtype = np.float64 if exact else np.float32
    x, w, r = rng.standard_normal((4, k)), rng.standard_normal((n, k)), rng.standard_normal((4, outputs))
    x[3], r[3] = np.nan, np.nan  # the inactive column of lane 1
    rounded = {"x": bf16_round(x), "w": bf16_round(w), "r": bf16_round(r)}
    return {name: a.astype(dtype) for name, a in rounded.items()} | {"y_width": np.array([outputs])}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("segments", [1, 2, 4])
def test_segments_are_float32_sums_added_in_order(monkeypatch: pytest.MonkeyPatch, segments: int, exact: bool) -> None:
    monkeypatch.setattr(linear_room, "BLOCK_WEIGHTS", 64 * 5)  # several row blocks, the last one short
    data = inputs(13, 64, 13, exact)
    y = run(make("linear", segments=segments, f32=True), data, exact)
    wide = data["x"].astype(np.float64), data["w"].astype(np.float64)
    parts = [wide[0][:3, s : s + 64 // segments] @ wide[1][:, s : s + 64 // segments].T for s in range(0, 64, 64 // segments)]
    total = parts[0] if exact else parts[0].astype(np.float32)
    for part in parts[1:]:
        total = total + (part if exact else part.astype(np.float32))
    np.testing.assert_allclose(y[:3], total, rtol=1e-12 if exact else 0, atol=1e-13 if exact else 0)
    assert np.isnan(y[3]).all()


def test_bf16_output_is_rounded_once() -> None:
    data = inputs(8, 32, 8, False)
    y = run(make("linear", segments=1, f32=False), data, False)
    assert np.array_equal(y[:3], bf16_round(data["x"][:3].astype(np.float64) @ data["w"].T.astype(np.float64)))


@pytest.mark.parametrize("exact", [True, False])
def test_residual_and_swiglu(exact: bool) -> None:
    data = inputs(8, 32, 8, exact)
    product = data["x"][:3].astype(np.float64) @ data["w"].T.astype(np.float64)
    y = run(make("linear_residual", segments=2), data, exact)
    np.testing.assert_allclose(y[:3], product + data["r"][:3], rtol=1e-12 if exact else 2**-8, atol=1e-12 if exact else 2**-7)
    data = inputs(8, 32, 4, exact)
    y = run(make("linear_swiglu"), data, exact)
    gate, up = product[:, :4], product[:, 4:]
    np.testing.assert_allclose(y[:3], gate / (1 + np.exp(-gate)) * up, rtol=1e-12 if exact else 2**-8, atol=1e-12)


@pytest.mark.parametrize("exact", [True, False])
def test_embedding(exact: bool) -> None:
    rng = np.random.default_rng(2)
    dtype = np.float64 if exact else np.float32
    table, tokens = rng.standard_normal((9, 6)).astype(dtype), np.array([8, 0, 8, 3], np.int32)
    x = np.full((4, 6), np.nan, dtype)
    values = {"x": x, "t": tokens, "w": table}
    op = Op("embed", {"tokens": Ref("t"), "w": Ref("w")}, {"x": Ref("x")})
    ctx = VMContext(op, exact, 2, 2, np.array([2, 1]), lambda name: values[name],
                    lambda name: TensorType(values[name].shape, "i32" if name == "t" else "bf16"),
                    lambda name, rows: table[slice(*rows)])  # fmt: skip
    definition("embed").reference(op, ctx)
    wanted = table[[8, 0, 8]]
    assert np.array_equal(x[:3], wanted if exact else bf16_round(wanted)) and np.isnan(x[3]).all()



X, W, Y = TensorType((2, 64), "bf16"), TensorType((16, 64), "u8"), TensorType((2, 16), "bf16")


@pytest.mark.parametrize("op, change, message", [
    (make("linear", segments=1, f32=False), {"x": TensorType((2, 64), "f32")}, "x is"),
    (make("linear", segments=1, f32=False), {"w": TensorType((16, 60), "u8")}, "w has shape"),
    (make("linear", segments=1, f32=True), {}, "y is bf16, f32 is needed"),
    (make("linear", segments=1, f32=False), {"y": TensorType((2, 15), "bf16")}, "y has shape"),
    (make("linear", segments=3, f32=False), {}, "3 segments do not divide K = 64"),
    (make("linear_swiglu"), {}, "y has shape"),
    (make("linear_swiglu"), {"w": TensorType((15, 64), "u8")}, "15 rows"),
    (make("linear_residual", segments=1), {"residual": TensorType((2, 17), "bf16")}, "residual is"),
    (Op("embed", {"tokens": Ref("t"), "w": Ref("w")}, {"x": Ref("x")}),
     {"tokens": TensorType((1,), "i32"), "x": TensorType((2, 64), "bf16")}, "2 columns, tokens 1"),
    (Op("embed", {"tokens": Ref("t"), "w": Ref("w")}, {"x": Ref("x")}),
     {"tokens": TensorType((2,), "i32"), "x": TensorType((2, 60), "bf16")}, "width 60"),
])  # fmt: skip
def test_rules(op: Op, change: dict[str, TensorType], message: str) -> None:
    types = {"x": X, "w": W, "y": Y, "residual": Y} | change
    with pytest.raises(IRError, match=message):
        definition(op.kind).check(op, types)


def test_legal_ops_pass_and_cost_every_weight_byte_once() -> None:
    values = {"w": Value("w", W, Kind.WEIGHT, encoded_bytes=16 * 36)}
    for op in (make("linear", segments=2, f32=False), make("linear_residual", segments=2)):
        types = {"x": X, "w": W, "y": Y, "residual": Y}
        definition(op.kind).check(op, types)
        cost = definition(op.kind).cost(op, types, values)
        assert cost.read == 16 * 36 + X.nbytes + (Y.nbytes if op.kind == "linear_residual" else 0)
        assert (cost.written, cost.flops) == (Y.nbytes, 2 * 2 * 16 * 64)
