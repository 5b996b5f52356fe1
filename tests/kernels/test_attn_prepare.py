"""Per-head norm, rope and cache append, on the emulator and on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiler.emit.arch import caps
from compiler.emit.nvrtc import compile_source
from compiler.emit.render import render
from compiler.ir.op import Op, definition
from compiler.ir.types import Ref, TensorType
from compiler.kernels.attn_prepare import prepare_spec
from compiler.kernels.spec import KernelSpec
from compiler.ops.attn_prepare import frequency_table, native_frequencies
from runtime.vm.context import VMContext
from tests.emulator import toolchain
from tests.emulator.harness import assert_close_to_fp64, from_bf16, poisoned, to_bf16
from tests.kernels.attention_cases import PAGE, run
from tests.kernels.fixture_vectors import vectors
from tests.kernels.programmatic import ProgrammaticEmulator

INPUTS = ("q", "k", "v", "wq", "wk", "inv_freq", "positions", "lane_ncols", "lane_len", "lane_page_row", "page_table")


class Problem:
    """Operands of one attn_prepare op; bf16 as bits. q, k and v are slices of one row, so that strides matter."""

    def __init__(self, before: list[int], active: list[int], width: int, *, heads: int = 6, kv_heads: int = 2,
                 dim: int = 32, rotary: int = 8, far: bool = False, seed: int = 0) -> None:  # fmt: skip
        random = np.random.default_rng(seed)
        lanes, columns = len(before), len(before) * width
        self.width, self.active = width, active
        self.offsets = {"q": (8, heads * dim), "k": (16 + heads * dim, kv_heads * dim),
                        "v": (16 + (heads + kv_heads) * dim, kv_heads * dim)}  # fmt: skip
        row = poisoned((columns, 24 + (heads + 2 * kv_heads) * dim))
        for lane in range(lanes):
            for offset, size in self.offsets.values():
                part = row[lane * width : lane * width + active[lane], offset : offset + size]
                part[...] = to_bf16(random.standard_normal(part.shape) * 3)
        pages = random.permutation(lanes * 4 + 2)
        table = pages[: lanes * 4].reshape(lanes, 4).astype(np.int32)
        positions = np.array([[before[lane] + t for lane in range(lanes) for t in range(width)]] * 3, np.int32)
        if far:  # three distinct axes beyond what an FP32 product carries
            positions += np.array([[0], [262143], [999_000]], np.int32)
        self.arrays: dict[str, Any] = {
            "row": row, "wq": to_bf16(random.standard_normal(dim) * 0.2), "wk": to_bf16(random.standard_normal(dim) * 0.2),
            "inv_freq": frequency_table(native_frequencies(1e7, rotary)), "positions": positions,
            "lane_ncols": np.array(active, np.int32), "lane_len": np.array(before, np.int32),
            "lane_page_row": random.permutation(lanes).astype(np.int32), "page_table": table,
            "kv": poisoned((len(pages), 2, kv_heads, PAGE, dim)), "qr": poisoned((columns, heads * dim)),
        }  # fmt: skip
        inputs = {name: Ref("row", *self.offsets[name]) if name in self.offsets else Ref(name) for name in INPUTS}
        sections = (rotary // 2 - 2 * (rotary // 6), rotary // 6, rotary // 6)
        attrs = {"eps": 1e-6, "heads": heads, "kv_heads": kv_heads, "dim": dim, "rotary": rotary,
                 "section_h": sections[1], "section_w": sections[2], "mscale": 1.0}  # fmt: skip
        self.op = Op("attn_prepare", inputs, {"qr": Ref("qr")}, {"kv": Ref("kv")}, attrs)

    def launch(self, backend: Any, early: bool = False, **attrs: float) -> dict[str, Any]:
        self.op = Op(self.op.kind, self.op.inputs, self.op.outputs, self.op.state, {**self.op.attrs, **attrs})
        values = {name: np.array(value, copy=True) for name, value in self.arrays.items()}
        types = {name: TensorType(a.shape, "i32" if a.dtype == np.int32 else "bf16") for name, a in values.items()}
        row = values["row"]
        for name, (offset, size) in self.offsets.items():
            values[name] = row.reshape(-1)[offset:]
            values[f"{name}_stride"] = row.shape[1]
            types[name] = TensorType((row.shape[0], size), "bf16")
        definition("attn_prepare").check(self.op, {n: types[n] for n in (*INPUTS, "qr", "kv")})
        run(backend, prepare_spec(self.op, types, self.width, backend.caps(), early), values)
        return values

    def reference(self) -> dict[str, Any]:
        """qr and kv in float64, nothing rounded."""
        values = {n: from_bf16(a).astype(np.float64) if a.dtype == np.uint16 else a for n, a in self.arrays.items()}
        context = VMContext(self.op, True, len(self.active), self.width, np.array(self.active), lambda name: values[name],
                            lambda name: TensorType(values[name].shape, "bf16"), lambda name, rows: values[name])  # fmt: skip
        definition("attn_prepare").reference(self.op, context)
        return values


SHAPES = [(6, 2, 32, 8), (3, 3, 64, 22), (4, 1, 128, 128), (24, 4, 256, 64)]


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary"), SHAPES)
@pytest.mark.parametrize("far", [False, True])
def test_against_fp64(kernel_backend: Any, heads: int, kv_heads: int, dim: int, rotary: int, far: bool) -> None:
    problem = Problem([0, 62, 100], [3, 4, 0], 4, heads=heads, kv_heads=kv_heads, dim=dim, rotary=rotary, far=far)
    out, want = problem.launch(kernel_backend, mscale=1.25 if far else 1.0), problem.reference()
    rows = [0, 1, 2, 4, 5, 6, 7]
    assert_close_to_fp64(out["qr"][rows], want["qr"][rows], "bf16", name="qr")
    assert (out["qr"][[3, 8, 9, 10, 11]] == 0xFFFF).all(), "an inactive column was written"
    written = ~np.isnan(want["kv"])
    assert (out["kv"][~written] == 0xFFFF).all() and written.sum() == 7 * 2 * kv_heads * dim
    keys, values = (np.broadcast_to(np.arange(2)[:, None, None, None], written.shape[1:]) == i for i in (0, 1))
    assert_close_to_fp64(out["kv"][written & keys], want["kv"][written & keys], "bf16", name="keys")
    assert (from_bf16(out["kv"][written & values]) == want["kv"][written & values]).all(), "values are copied"


@pytest.mark.parametrize(("heads", "kv_heads", "dim", "rotary"), SHAPES)
def test_early_kernels_have_the_same_bits(kernel_backend: Any, heads: int, kv_heads: int, dim: int, rotary: int) -> None:
    problem = Problem([0, 62, 100], [3, 4, 0], 4, heads=heads, kv_heads=kv_heads, dim=dim, rotary=rotary, far=True)
    plain, early = (problem.launch(kernel_backend, early=flag) for flag in (False, True))
    assert (plain["qr"] == early["qr"]).all() and (plain["kv"] == early["kv"]).all()


@pytest.mark.skipif(toolchain.missing_reason() is not None, reason=str(toolchain.missing_reason()))
@pytest.mark.parametrize("early", [False, True])
def test_waits_for_what_is_not_settled(early: bool) -> None:
    problem = Problem([0, 62, 100], [3, 4, 0], 4, heads=24, kv_heads=4, dim=256, rotary=64)
    problem.launch(ProgrammaticEmulator({"wq", "wk"}), early=early)


def test_golden_norm(kernel_backend: Any) -> None:
    """norm_offset_out: rows of 256, seen as nine key heads; dimensions beyond the rotary ones are only normed."""
    gold = vectors()
    problem = Problem([0], [1], 1, heads=9, kv_heads=9, dim=256, rotary=64)
    for name in ("q", "k"):
        offset, size = problem.offsets[name]
        problem.arrays["row"][0, offset : offset + size] = gold["norm_x"].reshape(-1)
        problem.arrays["w" + name] = np.array(gold["norm_w"])
    out = problem.launch(kernel_backend)
    page = problem.arrays["page_table"][problem.arrays["lane_page_row"][0], 0]
    for found in (out["qr"].reshape(9, 256), out["kv"][page, 0, :, 0]):
        assert_close_to_fp64(found[:, 64:], gold["norm_offset_out"][:, 64:], "bf16")


PHASES = """
#include <ninferc/attention/rope.cuh>
#include <ninferc/base/vec.cuh>
using namespace ninferc;
NINFERC_KERNEL(phases, 128, 1)(const i32* positions, const f32* inv_freq, f32* out, i32 count, i32 pairs) {
  for (i32 i = threadIdx.x; i < count * pairs; i += blockDim.x) {
    f32x2 value;
    attention::cos_sin_turns(attention::turns_at(positions[i / pairs], inv_freq[i % pairs], inv_freq[pairs + i % pairs]),
                             value.x, value.y);
    st_global(out + 2 * i, value);
  }
}
"""


def test_phases_up_to_a_million(kernel_backend: Any) -> None:
    """cos and sin within 10^-6 of the exact ones wherever a token can stand, negative rope positions included."""
    random = np.random.default_rng(5)
    chosen = [0, 1, -7, 262143, 262144, 999_999, (1 << 20) - 1]
    positions = np.concatenate([chosen, random.integers(0, 1 << 20, 200)]).astype(np.int32)
    frequencies = native_frequencies(1e7, 64)
    table, out = frequency_table(frequencies).view(np.float32), poisoned((len(positions), 32, 2), "f32")
    spec = KernelSpec("phases", "", {}, (1, 1, 1), 128, 0, ())
    kernel_backend.launch(spec, PHASES, [positions, table, out, len(positions), 32])
    exact = positions[:, None].astype(np.longdouble) * frequencies.astype(np.longdouble)
    error = np.abs(out - np.stack([np.cos(exact), np.sin(exact)], axis=-1))
    assert error.max() < 1e-6


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_resources(arch: str) -> None:
    problem = Problem([0], [1], 1, heads=24, kv_heads=4, dim=256, rotary=64)
    types = {name: TensorType(a.shape, "bf16") for name, a in problem.arrays.items()} | {"q": TensorType((1, 6144), "bf16")}
    spec = prepare_spec(problem.op, types, 1, caps(arch))
    found = compile_source(spec.entry, render(spec.template, spec.entry, spec.params), arch).resources
    assert (found.stack, found.spill_stores, found.local) == (0, 0, 0)
