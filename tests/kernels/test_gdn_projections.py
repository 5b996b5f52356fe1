"""Causal convolution, gates and gated norm kernels against their float64 formulas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from compiler.kernels.conv import conv_spec
from compiler.kernels.gated_norm import gated_norm_spec
from compiler.kernels.gdn_gates import gates_spec
from compiler.ops import conv, gated_norm, gdn_gates
from compiler.ops.rmsnorm import rms_normalise
from tests.emulator.harness import assert_close_to_fp64, from_bf16, poisoned, to_bf16
from tests.kernels.gdn_cases import View, launch, load_vectors, op_of, types_of, vars_of

Array = np.ndarray[Any, Any]


class ConvLayer:
    """Windows and records of ``slots`` sequences. ``split``: the channels come from two buffers, cut there."""

    def __init__(self, weights: Array, slots: int, records: int, backend: Any, split: int = 0) -> None:
        self.w, self.backend, self.split = to_bf16(weights), backend, split
        self.channels = weights.shape[1]
        self.windows = poisoned((2, slots, 3, self.channels))  # by parity
        self.record = poisoned((2, slots, records, self.channels))
        self.pending, self.length, self.parity = (np.zeros(slots, np.int32) for _ in range(3))

    def window(self, slot: int) -> Array:
        """The slot's window as it was last committed."""
        window: Array = self.windows[self.parity[slot], slot]
        return window

    def begin(self, slot: int, window: Array, length: int, pending: int = 0) -> None:
        self.windows[self.parity[slot], slot], self.length[slot], self.pending[slot] = window, length, pending

    def call(self, phase: str, slots: Sequence[int], lanes: Sequence[Array], width: int,
             accepted: Sequence[int]) -> list[Array]:  # fmt: skip
        """Raw bf16 columns per lane → y per lane as bf16 bits."""
        columns = len(lanes) * width
        raw = poisoned((columns, self.channels + 24))
        for lane, x in enumerate(lanes):
            raw[lane * width : lane * width + len(x), 16 : 16 + self.channels] = x
        y = poisoned((columns, self.channels + 8))
        operands: dict[str, Array | View] = {"x": View(raw, 16, self.channels)}
        if self.split:
            operands["x"] = View(raw, 16, self.split)
            other = np.concatenate([poisoned((columns, 8)), raw[:, 16 + self.split : 16 + self.channels]], axis=1)
            operands["x2"] = View(np.ascontiguousarray(other), 8, self.channels - self.split)
        operands |= {"w": self.w, "window": self.windows, "record": self.record, "y": View(y, 8, self.channels),
                     "lane_slot": np.array(slots, np.int32), "lane_ncols": np.array([len(x) for x in lanes], np.int32),
                     "lane_len": self.length[list(slots)].copy(), "slot_pending": self.pending,
                     "slot_parity": self.parity}  # fmt: skip
        op = op_of("conv", operands, vars_of(conv.Conv), phase=phase)
        launch(self.backend, conv_spec(op, types_of(operands), len(lanes), width, self.backend.caps()), operands)
        for slot, x, count in zip(slots, lanes, accepted, strict=True):
            if len(x):
                self.length[slot] += count
                self.pending[slot] = count if phase == "decode" else 0
                self.parity[slot] ^= phase == "decode"
        out = [y[lane * width : lane * width + len(x), 8:].copy() for lane, x in enumerate(lanes)]
        for lane, x in enumerate(lanes):
            y[lane * width : lane * width + len(x), 8:] = 0xFFFF
        assert np.all(y == 0xFFFF), "something outside the active columns was written"
        return out


def run(layer: ConvLayer, slot: int, x: Array, width: int, phase: str = "decode") -> Array:
    parts = [x[begin : begin + width] for begin in range(0, len(x), width)]
    return np.concatenate([layer.call(phase, [slot], [part], width, [len(part)])[0] for part in parts])


@pytest.mark.parametrize(("phase", "width"), [("decode", 1), ("decode", 4), ("prefill", 48)])
def test_conv_golden_vectors(kernel_backend: Any, phase: str, width: int) -> None:
    gold = load_vectors()
    layer = ConvLayer(gold["conv_weight"].T, slots=2, records=4, backend=kernel_backend)
    layer.begin(1, to_bf16(gold["conv_state_in"].T), 9)
    x = to_bf16(gold["conv_x"])
    y = run(layer, 1, x, width, phase)
    exact = conv.causal_conv(gold["conv_state_in"].T, gold["conv_x"].astype(np.float64), gold["conv_weight"].T)
    assert np.abs(exact - gold["conv_out"]).max() < 1e-6
    assert_close_to_fp64(y, exact, "bf16")
    if phase == "decode":
        layer.call("decode", [1], [x[:1]], width, [0])  # commits what is pending
    assert np.array_equal(from_bf16(layer.window(1)), gold["conv_state_out"].T)


@pytest.mark.parametrize("split", [0, 64, 160])
def test_conv_lanes_slots_and_two_buffers(kernel_backend: Any, split: int) -> None:
    """Three lanes in permuted slots, one new (NaN window), one idle; two buffers give the bits of one."""
    rng = np.random.default_rng(split)
    weights = rng.normal(size=(4, 192))
    layer = ConvLayer(weights, slots=4, records=5, backend=kernel_backend, split=split)
    old = to_bf16(rng.normal(size=(3, 192)))
    layer.begin(0, old, 3)
    layer.begin(3, old, 3, pending=2)
    x = to_bf16(rng.normal(size=(9, 192)))
    first = layer.call("decode", [2, 3, 0], [x[:2], x[:0], x[:5]], 5, [2, 0, 2])
    second = layer.call("decode", [0, 2], [x[2:6], x[2:3]], 5, [4, 1])
    third = layer.call("prefill", [0], [x[6:]], 16, [3])[0]
    w, wide = from_bf16(to_bf16(weights)).astype(np.float64), from_bf16(x).astype(np.float64)
    new, running = np.zeros((3, 192)), from_bf16(old).astype(np.float64)
    assert_close_to_fp64(first[0], conv.causal_conv(new, wide[:2], w), "bf16")
    assert_close_to_fp64(second[1], conv.causal_conv(new, wide[:3], w)[2:], "bf16")
    exact = conv.causal_conv(running, wide, w)
    assert_close_to_fp64(first[2], exact[:5], "bf16")
    assert_close_to_fp64(np.concatenate([second[0], third]), exact[2:], "bf16")
    assert np.array_equal(layer.window(0), x[6:])
    assert np.array_equal(layer.window(3), old) and np.all(layer.windows[:, 1] == 0xFFFF)
    assert np.all(layer.windows[1, 3] == 0xFFFF), "the other window of an idle slot was written"
    assert np.all(layer.record[:, [1, 3]] == 0xFFFF), "records of a slot that did not run were written"


def test_conv_bits_do_not_depend_on_columns_or_phase(kernel_backend: Any) -> None:
    rng = np.random.default_rng(1)
    weights, x = rng.normal(size=(4, 320)), to_bf16(rng.normal(size=(21, 320)))
    results = []
    runs = [("decode", width) for width in (1, 2, 4, 8)] + [("prefill", width) for width in (2, 16, 37)]
    for phase, width in runs:
        layer = ConvLayer(weights, slots=1, records=8, backend=kernel_backend)
        y = run(layer, 0, x, width, phase)
        layer.call("decode", [0], [x[:1]], 1, [0])
        results.append((y, layer.window(0).copy()))
    for y, window in results:
        assert np.array_equal(y, results[0][0]) and np.array_equal(window, results[0][1])


def test_conv_rollback(kernel_backend: Any) -> None:
    """Four columns tried, one to three accepted: the bits of the run that saw only the accepted ones."""
    rng = np.random.default_rng(2)
    weights, x = rng.normal(size=(4, 64)), to_bf16(rng.normal(size=(13, 64)))
    expected = run(ConvLayer(weights, 1, 1, kernel_backend), 0, x, 1)
    layer = ConvLayer(weights, slots=1, records=4, backend=kernel_backend)
    out, at = [], 0
    for accepted in (1, 3, 2, 1, 1, 2, 3):
        wrong = to_bf16(rng.normal(size=(4 - accepted, 64)))
        step = np.concatenate([x[at : at + accepted], wrong])
        out.append(layer.call("decode", [0], [step], 4, [accepted])[0][:accepted])
        at += accepted
    assert np.array_equal(np.concatenate(out), expected)


def gates_case(rng: np.random.Generator, columns: int, hidden: int, heads: int) -> dict[str, Array]:
    wa, wb = (to_bf16(2 * hidden**-0.5 * rng.normal(size=(heads, hidden))) for _ in range(2))
    return {"x": to_bf16(rng.normal(size=(columns, hidden))), "wa": wa, "wb": wb,
            "a_log": rng.uniform(-3, 3, heads).astype(np.float32),
            "dt_bias": 3 * rng.normal(size=heads).astype(np.float32)}  # fmt: skip


def run_gates(backend: Any, case: dict[str, Array], fused: bool) -> Array:
    columns, heads = len(case["x"]), len(case["a_log"])
    gates = poisoned((columns, 2 * heads), "f32")
    wide = np.concatenate([case["x"], poisoned((columns, 8))], axis=1)
    operands: dict[str, Array | View] = {**case, "x": View(wide, 0, case["x"].shape[1]), "gates": gates}
    op = op_of("gdn_gates", operands, vars_of(gdn_gates.GdnGates))
    if fused:
        operands["wa"] = operands["wb"] = np.concatenate([case["wa"], case["wb"]])
        op.inputs["wb"] = op.inputs["wa"]  # type: ignore[index]
    launch(backend, gates_spec(op, types_of(operands), backend.caps()), operands)
    return gates


@pytest.mark.parametrize(("columns", "hidden", "heads"), [(1, 5120, 48), (5, 72, 3), (40, 256, 6), (33, 1032, 24)])
def test_gates(kernel_backend: Any, columns: int, hidden: int, heads: int) -> None:
    """FP32 sums of K products: a few units of what the sum of magnitudes allows. (The bound of rounding one output does
    not fit an FP32 product: the additions themselves round.)"""
    rng = np.random.default_rng(hidden)
    case = gates_case(rng, columns, hidden, heads)
    got = run_gates(kernel_backend, case, fused=False)
    x, wa, wb = (from_bf16(case[name]).astype(np.float64) for name in ("x", "wa", "wb"))
    a, b = x @ wa.T, x @ wb.T
    g, beta = gdn_gates.gates(a, b, case["a_log"], case["dt_bias"])
    slack = [4 * 2.0**-24 * np.abs(x) @ np.abs(w).T for w in (wa, wb)]
    rate = np.exp(case["a_log"].astype(np.float64)) / (1 + np.exp(-(a + case["dt_bias"])))
    assert np.all(np.abs(got[:, :heads] - g) <= rate * (slack[0] + 2.0**-22) + 2.0**-20 * np.abs(g))
    assert np.all(np.abs(got[:, heads:] - beta) <= beta * (1 - beta) * slack[1] + 2.0**-21 * beta)
    assert np.array_equal(run_gates(kernel_backend, case, fused=True), got)


def test_gates_bits_do_not_depend_on_columns(kernel_backend: Any) -> None:
    rng = np.random.default_rng(3)
    case = gates_case(rng, 70, 616, 6)
    whole = run_gates(kernel_backend, case, fused=False)
    for count in (1, 2, 8, 20):
        part = {**case, "x": case["x"][30 : 30 + count]}
        assert np.array_equal(run_gates(kernel_backend, part, fused=False), whole[30 : 30 + count])


def test_gates_at_the_ends(kernel_backend: Any) -> None:
    """Products of ±300: softplus is linear or zero, σ saturates; nothing overflows."""
    case = gates_case(np.random.default_rng(4), 2, 64, 2)
    case["x"][:] = to_bf16(np.array([[1.0], [-1.0]]) * np.ones((2, 64)))
    case["wa"][:] = case["wb"][:] = to_bf16(np.full((2, 64), 300 / 64))
    case["dt_bias"][:] = case["a_log"][:] = 0
    got = run_gates(kernel_backend, case, fused=False)
    assert np.allclose(got[0], [-300, -300, 1, 1]) and np.all(np.abs(got[1]) < 1e-30) and np.isfinite(got).all()


def run_norm(backend: Any, o: Array, z: Array, w: Array) -> Array:
    """bf16 bits of o, z [columns, heads, dim] and w [dim] → y, all inside wider buffers."""
    columns, heads, dim = o.shape
    width = heads * dim
    views = {}
    for name, array in (("o", o), ("z", z), ("y", None)):
        root = poisoned((columns, width + 24))
        if array is not None:
            root[:, 8 : 8 + width] = array.reshape(columns, width)
        views[name] = View(root, 8, width)
    operands: dict[str, Array | View] = {**views, "w": w}
    op = op_of("gated_norm", operands, vars_of(gated_norm.GatedNorm), eps=1e-6, heads=heads, dim=dim)
    launch(backend, gated_norm_spec(op, types_of(operands), backend.caps()), operands)
    y = views["y"].root
    assert np.all(y[:, :8] == 0xFFFF) and np.all(y[:, 8 + width :] == 0xFFFF)
    return np.ascontiguousarray(views["y"].array()).reshape(o.shape)


def test_gated_norm_golden_vectors(kernel_backend: Any) -> None:
    gold = load_vectors()
    o, z, w = (to_bf16(gold[name]) for name in ("norm_x", "norm_z", "norm_w"))
    exact = rms_normalise(gold["norm_x"], 1e-6) * gold["norm_w"] * gated_norm.silu(gold["norm_z"])
    assert np.abs(exact - gold["norm_plain_silu_out"]).max() < 1e-5
    assert_close_to_fp64(run_norm(kernel_backend, o[:, None], z[:, None], w)[:, 0], exact, "bf16")


@pytest.mark.parametrize(("columns", "heads", "dim"), [(1, 48, 128), (3, 6, 16), (5, 3, 48), (2, 5, 80), (1, 1, 256)])
def test_gated_norm(kernel_backend: Any, columns: int, heads: int, dim: int) -> None:
    rng = np.random.default_rng(dim)
    o = to_bf16(rng.normal(size=(columns, heads, dim)) * np.exp(4 * rng.normal(size=(columns, heads, 1))))
    z, w = to_bf16(4 * rng.normal(size=o.shape)), to_bf16(rng.normal(size=dim))
    exact = rms_normalise(from_bf16(o), 1e-6) * from_bf16(w) * gated_norm.silu(from_bf16(z))
    assert_close_to_fp64(run_norm(kernel_backend, o, z, w), exact, "bf16")
