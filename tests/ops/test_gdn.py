"""GDN rooms: golden vectors, chunked against recurrent, lazy commit, lowering, rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compiler.ir.op import Op, definition
from compiler.ir.types import IRError, Ref, TensorType
from compiler.ops import conv, gated_norm, gdn, gdn_gates
from compiler.ops.rmsnorm import rms_normalise
from runtime.vm.context import VMContext
from tests.kernels.gdn_cases import load_vectors

Array = np.ndarray[Any, Any]
GOLD = {name: array.astype(np.float64) for name, array in load_vectors().items()}
TABLES = ("lane_slot", "lane_ncols", "lane_len", "slot_pending", "slot_parity")


def golden_inputs(count: int) -> tuple[Array, ...]:
    q, k = (gdn.l2_normalise(GOLD[f"gdn_{name}"][:count]) for name in "qk")
    return q, k, GOLD["gdn_v"][:count], GOLD["gdn_g"][:count], GOLD["gdn_beta"][:count], GOLD["gdn_state_in_vk"]


@pytest.mark.parametrize("count", [65, 130])
@pytest.mark.parametrize("form", [gdn.recurrent, gdn.chunked])
def test_delta_rule_vectors(form: Any, count: int) -> None:
    o, state = form(*golden_inputs(count))
    assert np.abs(o - GOLD["gdn_out_130"][:count]).max() < 1e-7
    assert np.abs(state - GOLD[f"gdn_state_out_vk_{count}"]).max() < 1e-7


def test_gate_vectors() -> None:
    g, beta = gdn_gates.gates(GOLD["gdn_a"], GOLD["gdn_b"], GOLD["gdn_A_log"], GOLD["gdn_dt_bias"])
    assert np.abs(g - GOLD["gdn_g"]).max() < 1e-6 and np.abs(beta - GOLD["gdn_beta"]).max() < 1e-6
    g, beta = gdn_gates.gates(np.array([[800.0, -800.0]]), np.array([[800.0, -800.0]]), np.zeros(2), np.zeros(2))
    assert g.tolist() == [[-800.0, 0.0]] and beta.tolist() == [[1.0, 0.0]]


def test_conv_and_norm_vectors() -> None:
    out = conv.causal_conv(GOLD["conv_state_in"].T, GOLD["conv_x"], GOLD["conv_weight"].T)
    assert np.abs(out - GOLD["conv_out"]).max() < 1e-6
    normed = rms_normalise(GOLD["norm_x"], 1e-6) * GOLD["norm_w"] * gated_norm.silu(GOLD["norm_z"])
    assert np.abs(normed - GOLD["norm_plain_silu_out"]).max() < 1e-5


@pytest.mark.parametrize("count", [1, 63, 64, 65, 300])
def test_chunked_equals_the_recurrence(count: int) -> None:
    rng = np.random.default_rng(count)
    q, k = (gdn.l2_normalise(rng.normal(size=(count, 2, 16))) for _ in range(2))
    v, state = rng.normal(size=(count, 6, 48)), rng.normal(size=(6, 48, 16))
    for scale in (0.0, 0.1, 60.0):  # with 60, e^(γ_i − γ_j) overflows above the diagonal
        g, beta = -scale * rng.gamma(1.0, size=(count, 6)), rng.uniform(size=(count, 6))
        a, b = gdn.recurrent(q, k, v, g, beta, state), gdn.chunked(q, k, v, g, beta, state)
        assert np.abs(a[0] - b[0]).max() < 1e-12 and np.abs(a[1] - b[1]).max() < 1e-12


class Rig:
    """conv and gdn of one layer on VM contexts: 2 lanes' worth of tables, 3 slots; unread memory is NaN."""

    def __init__(self, exact: bool, records: int = 4) -> None:
        self.exact, self.dims = exact, {"key_heads": 2, "value_heads": 6, "dk": 16, "dv": 16}
        hk, hv, dk, dv = self.dims.values()
        self.channels, s = 2 * hk * dk + hv * dv, 3
        shapes = {"window": (2, s, 3, self.channels), "record": (2, s, records, self.channels), "recurrent": (s, hv, dv, dk),
                  "rec_k": (2, s, records, hk, dk), "rec_u": (2, s, records, hv, dv), "rec_alpha": (2, s, records, hv)}
        dtype = np.float64 if exact else np.float32
        self.arrays: dict[str, Array] = {name: np.full(shape, np.nan, dtype) for name, shape in shapes.items()}
        self.arrays |= {name: np.zeros(s if "slot" in name[:5] else 2, np.int32) for name in TABLES}
        self.types = {name: "bf16" for name in ("x", "y", "o", "w", "window", "record")}
        self.w = np.random.default_rng(0).normal(size=(4, self.channels)).astype(np.float16).astype(dtype)

    def _context(self, op: Op, lanes: int, width: int, chosen: Mapping[str, str]) -> VMContext:
        def resolve(name: str) -> Array:
            return self.arrays[chosen.get(name, name)]

        def type_of(name: str) -> TensorType:
            array = resolve(name)
            fallback = "i32" if array.dtype == np.int32 else "f32"
            return TensorType(array.shape, self.types.get(name, fallback))

        return VMContext(op, self.exact, lanes, width, self.arrays["lane_ncols"], resolve, type_of, lambda *_: self.w)

    def _run(self, kind: str, attrs: Mapping[str, Any], lanes: int, width: int) -> None:
        known = definition(kind)
        names = [name for name in known.inputs if name != "x2"]
        op = Op(kind, {n: Ref(n) for n in names}, {n: Ref(n) for n in known.outputs}, {n: Ref(n) for n in known.state}, attrs)
        if kind == "gdn" and attrs["phase"] == "prefill" and width % gdn.CHUNK == 0:
            context = self._context(op, lanes, width, {})
            types = {name: context.type_of(name) for name in (*names, *known.outputs, *known.state)}
            values, ops = gdn.lower_prefill(op, types, "t")
            for value in values:
                self.arrays[value.name] = np.full(value.type.shape, np.nan, self.w.dtype)
            for piece in ops:
                definition(piece.kind).check(piece, {n: context.type_of(ref.value) for n, ref in piece.refs()})
                definition(piece.kind).reference(piece, self._context(piece, lanes, width, {}))
            return
        known.reference(op, self._context(op, lanes, width, {}))

    def step(self, phase: str, slots: list[int], lanes: list[Array], width: int, accepted: list[int]) -> list[Array]:
        """Rows [raw qkv | g | beta] per lane → o per lane."""
        columns = len(lanes) * width
        for name, extent in (("x", self.channels), ("y", self.channels), ("gates", 12), ("o", 96)):
            self.arrays[name] = np.full((columns, extent), np.nan, self.w.dtype)
        for lane, rows in enumerate(lanes):
            at = slice(lane * width, lane * width + len(rows))
            self.arrays["x"][at], self.arrays["gates"][at] = rows[:, : self.channels], rows[:, self.channels :]
            self.arrays["lane_slot"][lane], self.arrays["lane_ncols"][lane] = slots[lane], len(rows)
        before = self.arrays["lane_len"].copy()
        self._run("conv", {"phase": phase}, len(lanes), width)
        self._run("gdn", {"phase": phase, **self.dims}, len(lanes), width)
        assert np.array_equal(before, self.arrays["lane_len"])
        for lane, (slot, rows) in enumerate(zip(slots, lanes, strict=True)):
            if len(rows):
                self.arrays["lane_len"][lane] += accepted[lane]
                self.arrays["slot_pending"][slot] = accepted[lane] if phase == "decode" else 0
                self.arrays["slot_parity"][slot] ^= phase == "decode"
        return [self.arrays["o"][lane * width : lane * width + len(rows)].copy() for lane, rows in enumerate(lanes)]


def random_rows(rng: np.random.Generator, count: int) -> Array:
    raw = rng.normal(size=(count, 160)).astype(np.float16)
    g, beta = -rng.gamma(0.5, size=(count, 6)).astype(np.float32), rng.uniform(size=(count, 6)).astype(np.float32)
    return np.concatenate([raw, g, beta], axis=1).astype(np.float64)


@pytest.mark.parametrize("exact", [True, False])
def test_prefill_decode_and_rollback_agree(exact: bool) -> None:
    """One prefill of everything against cuts, decode, tries of four columns with two accepted, in any mix; with engine
    numerics the decode runs agree bit by bit."""
    rng = np.random.default_rng(3)
    rows = random_rows(rng, 100)
    if not exact:
        rows[:, :160] = np.round(rows[:, :160] * 64) / 64  # bf16 values
        rows[:, :160] = np.clip(rows[:, :160], -2, 2)
    whole = Rig(exact).step("prefill", [1], [rows], 128, [100])[0]
    mixed, out, at = Rig(exact), [], 0
    steps = [("prefill", 37, 64, 37), ("decode", 3, 4, 2), ("decode", 1, 4, 1), ("prefill", 16, 16, 16),
             ("decode", 4, 4, 2), ("prefill", 30, 128, 30), *[("decode", 4, 4, 4)] * 3]  # fmt: skip
    for phase, count, width, kept in steps:
        out.append(mixed.step(phase, [2], [rows[at : at + count]], width, [kept])[0][:kept])
        at += kept
    assert at == 100
    bound = 1e-12 if exact else 2.0**-8 * np.abs(whole).max()
    assert np.abs(np.concatenate(out) - whole).max() <= bound
    results = []
    for width, kept in ((1, 1), (4, 4), (4, 2), (3, 1)):
        rig, out = Rig(exact), []
        for begin in range(0, 24, kept):
            out.append(rig.step("decode", [0], [rows[begin : begin + width]], width, [kept])[0][:kept])
        rig.step("decode", [0], [rows[24:25]], 4, [0])
        results.append((np.concatenate(out), rig.arrays["recurrent"][0], rig.arrays["window"][rig.arrays["slot_parity"][0], 0]))
    assert np.abs(results[0][0] - whole[:24]).max() <= bound
    for result in results:
        assert all(np.array_equal(a, b) for a, b in zip(result, results[0], strict=True))


def test_lanes_are_independent() -> None:
    """Two lanes in swapped slots, one idle in between, equal their solo runs; a used slot starts again from zero."""
    rng = np.random.default_rng(4)
    a, b = random_rows(rng, 6), random_rows(rng, 6)
    solo = []
    for rows in (a, b):
        rig = Rig(True)
        solo.append(np.concatenate([rig.step("decode", [0], [rows[i : i + 2]], 2, [2])[0] for i in range(0, 6, 2)]))
    both = Rig(True)
    first = both.step("decode", [2, 0], [a[:2], b[:2]], 2, [2, 2])
    second = both.step("decode", [2, 0], [a[:0], b[2:4]], 2, [0, 2])
    third = both.step("decode", [2, 0], [a[2:4], b[4:]], 2, [2, 2])
    assert np.array_equal(np.concatenate([first[0], third[0]]), solo[0][:4])
    assert np.array_equal(np.concatenate([first[1], second[1], third[1]]), solo[1])
    both.arrays["lane_len"][0] = 0
    assert np.array_equal(both.step("decode", [0], [a[:2]], 2, [2])[0], solo[0][:2])


def test_a_step_wider_than_the_records_is_refused() -> None:
    with pytest.raises(IRError, match="records hold 2"):
        Rig(True, records=2).step("decode", [0], [random_rows(np.random.default_rng(5), 3)[:1]], 3, [1])


def gdn_op() -> tuple[Op, dict[str, TensorType]]:
    known = definition("gdn")
    op = Op("gdn", {n: Ref(n) for n in known.inputs}, {"o": Ref("o")}, {n: Ref(n) for n in known.state},
            {"phase": "decode", "key_heads": 2, "value_heads": 6, "dk": 16, "dv": 32})  # fmt: skip
    types = {"y": TensorType((4, 256), "bf16"), "gates": TensorType((4, 12), "f32"), "o": TensorType((4, 192), "bf16"),
             "recurrent": TensorType((3, 6, 32, 16), "f32"), "rec_k": TensorType((2, 3, 4, 2, 16), "f32"),
             "rec_u": TensorType((2, 3, 4, 6, 32), "f32"), "rec_alpha": TensorType((2, 3, 4, 6), "f32"),
             **{n: TensorType((3 if n.startswith("slot") else 2,), "i32") for n in TABLES}}  # fmt: skip
    return op, types


@pytest.mark.parametrize(("name", "wrong"), [
    ("y", TensorType((4, 240), "bf16")), ("gates", TensorType((4, 12), "bf16")), ("o", TensorType((3, 192), "bf16")),
    ("recurrent", TensorType((3, 6, 16, 32), "f32")), ("rec_u", TensorType((2, 3, 5, 6, 32), "f32")),
    ("slot_parity", TensorType((2,), "i32")), ("lane_len", TensorType((2,), "f32"))])  # fmt: skip
def test_gdn_rules_name_the_operand(name: str, wrong: TensorType) -> None:
    op, types = gdn_op()
    definition("gdn").check(op, types)
    with pytest.raises(IRError, match=name):
        definition("gdn").check(op, {**types, name: wrong})


def test_gdn_rules_of_heads_phase_and_lowering() -> None:
    op, types = gdn_op()
    with pytest.raises(IRError, match="multiple of 4 key heads"):
        gdn.check_state(replace(op, attrs={**op.attrs, "key_heads": 4}), types)
    with pytest.raises(IRError, match="phase"):
        definition("gdn").check(replace(op, attrs={**op.attrs, "phase": "verify"}), types)
    with pytest.raises(IRError, match="only prefill"):
        gdn.lower_prefill(op, types, "t")
    with pytest.raises(IRError, match="multiple of 64"):
        gdn.lower_prefill(replace(op, attrs={**op.attrs, "phase": "prefill"}), types, "t")


def test_cost_of_decode_counts_each_byte_once() -> None:
    op, types = gdn_op()
    cost = definition("gdn").cost(op, types, {})
    state, record = 2 * 6 * 32 * 16 * 4, 4 * (2 * 16 + 6 * 32 + 6)
    assert cost.read == state + 4 * 256 * 2 + 4 * 12 * 4 + 2 * record
    assert cost.written == state + 4 * 192 * 2 + 4 * record
