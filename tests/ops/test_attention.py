"""attn_prepare and attention rooms: formulas against the golden operator vectors, lowering, rules."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compiler.control import chunk_keys
from compiler.ir.op import Op, definition
from compiler.ir.types import IRError, Ref, TensorType
from compiler.ops.attention import attend, lower_decode, sigmoid
from compiler.ops.attn_prepare import frequency_table, native_frequencies, pair_axes, rotate, table_frequencies
from runtime.vm.context import VMContext
from tests.emulator.harness import from_bf16
from tests.kernels.attention_cases import Case, make_case
from tests.kernels.fixture_vectors import vectors

GOLD = vectors()


@pytest.mark.parametrize("name", ["native", "yarn_published", "yarn_vllm"])
def test_rope_vectors(name: str) -> None:
    """Positions up to 10^6 on three distinct axes. The stored frequencies are float32, the native ones known exactly."""
    frequencies = native_frequencies(1e7, 64) if name == "native" else GOLD[f"inv_freq_{name}"].astype(np.float64)
    turns = table_frequencies(frequency_table(frequencies))
    scale = 1.0 if name == "native" else 1.138629436111989
    x = from_bf16(GOLD["rope_x"]).astype(np.float64)
    out = rotate(x, GOLD["rope_positions"], turns, pair_axes(32, 11, 10), scale)
    near = np.abs(GOLD["rope_positions"]).max(axis=0) < 2000
    error = np.abs(out - GOLD[f"rope_{name}"])
    assert error[near].max() < 5e-4
    # a float32 frequency is off by up to 2^-25 of itself: 0.03 rad at 10^6
    assert error.max() < (5e-4 if name == "native" else 0.15)


def test_frequency_table_is_exact_to_48_bits() -> None:
    frequencies = native_frequencies(1e7, 64)
    turns = table_frequencies(frequency_table(frequencies))
    assert np.abs(turns * 2 * np.pi / frequencies - 1).max() < 2.0**-46
    assert frequency_table(frequencies).dtype == np.int32


def test_axes_are_interleaved() -> None:
    assert np.bincount(pair_axes(32, 11, 10)).tolist() == [11, 11, 10]
    assert (pair_axes(32, 11, 10) == np.arange(32) % 3).all()
    assert pair_axes(8, 1, 1).tolist() == [0, 1, 2, 0, 0, 0, 0, 0]


def test_gqa_vectors() -> None:
    q, k, v, gate = (from_bf16(GOLD[f"gqa_{name}"]).astype(np.float64) for name in ("q", "k", "v", "gate"))
    out = attend(q, k.transpose(1, 0, 2), v.transpose(1, 0, 2), 65)
    assert np.abs(out - GOLD["gqa_out"]).max() < 1e-5
    assert np.abs(out * sigmoid(gate) - GOLD["gqa_gated_out"]).max() < 1e-5


def run(op: Op, case: Case, arrays: dict[str, Any], exact: bool) -> None:
    types = {name: TensorType(a.shape, "i32" if a.dtype == np.int32 else "f32" if "partial" in name else "bf16")
             for name, a in arrays.items()}  # fmt: skip
    context = VMContext(op, exact, case.lanes, case.width, case.active, lambda name: arrays[name], lambda name: types[name],
                        lambda name, rows: arrays[name])  # fmt: skip
    definition(op.kind).check(op, {name: types[ref.value] for name, ref in op.refs()})
    definition(op.kind).reference(op, context)


def operands(case: Case, dtype: Any) -> dict[str, Any]:
    floats = {name: from_bf16(getattr(case, source)).astype(dtype)
              for name, source in (("qr", "qr"), ("gate", "gate"), ("kv", "cache"))}  # fmt: skip
    tables = {"lane_ncols": case.active, "lane_len": case.before, "lane_page_row": case.page_row,
              "page_table": case.page_table, "work": np.zeros((999, 4), np.int32),
              "work_count": np.zeros(1, np.int32)}  # fmt: skip
    return {**floats, **tables, "o": np.full(case.qr.shape, np.nan, dtype)}


@pytest.mark.parametrize("exact", [True, False])
def test_lowered_decode_is_the_same_function(exact: bool) -> None:
    case = make_case([0, 70, 5000], [4, 0, 3], 4, row_pages=90)
    arrays = operands(case, np.float64 if exact else np.float32)
    run(case.op("decode"), case, arrays, exact)
    whole = arrays["o"].copy()
    types = {name: TensorType(a.shape, "i32" if a.dtype == np.int32 else "bf16") for name, a in arrays.items()}
    values, ops = lower_decode(case.op("decode"), types, "layer3")
    assert [op.kind for op in ops] == ["attention_partial", "attention_merge"]
    assert ops[0].int_attr("chunks") == 64 and chunk_keys(5003) == 128
    arrays |= {value.name: np.full(value.type.shape, np.nan, arrays["o"].dtype) for value in values}
    arrays["o"][:] = np.nan
    for op in ops:
        run(op, case, arrays, exact)
    rows = case.rows()
    assert np.isnan(np.delete(arrays["o"], rows, axis=0)).all()
    # engine numerics round at the same points; a last bit may flip where FP32 partials meet a tie
    assert np.abs(arrays["o"][rows] - whole[rows]).max() < (1e-12 if exact else 2.0**-8)
    assert np.abs(whole[rows] - case.reference()).max() < (1e-12 if exact else 2.0**-6)


def test_rules() -> None:
    case = make_case([0], [1], 1)
    types = case.types()
    check = definition("attention").check
    check(case.op("decode"), types)
    for wrong, message in [
        ({"kv": TensorType((4, 2, 2, 32, 32), "bf16")}, "kv is"),
        ({"gate": TensorType((1, 64), "bf16")}, "gate is"),
        ({"page_table": TensorType((8,), "i32")}, "page_table is"),
        ({"work_count": TensorType((2,), "i32")}, "work_count is"),
    ]:
        with pytest.raises(IRError, match=message):
            check(case.op("decode"), types | wrong)
    with pytest.raises(IRError, match="dim is 48; allowed: 32, 64, 128, 256"):
        check(replace(case.op("decode"), attrs={**case.op("decode").attrs, "dim": 48}), types)
    with pytest.raises(IRError, match="only decode attention is lowered"):
        lower_decode(case.op("prefill"), types, "a")
    op = case.op("decode")
    without = replace(op, inputs={name: Ref(name) for name in op.inputs if name != "work"})
    with pytest.raises(IRError, match="decode needs work"):
        check(without, {name: kind for name, kind in types.items() if name != "work"})
