"""Registers, spills and shared memory of the GDN kernels of the 27B models, from NVRTC's report."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from compiler.emit.arch import caps
from compiler.emit.nvrtc import compile_source
from compiler.emit.render import render
from compiler.ir.op import Op, definition
from compiler.ir.types import IRError, Ref, TensorType
from compiler.kernels.conv import conv_spec
from compiler.kernels.gated_norm import gated_norm_spec
from compiler.kernels.gdn_decode import recurrent_spec
from compiler.kernels.gdn_gates import gates_spec
from compiler.kernels.gdn_layer import LayerOps, layer_spec, obstacle
from compiler.kernels.gdn_prefill import carry_spec, chunked_fits, intra_spec
from compiler.kernels.spec import DeviceCaps, KernelSpec
from compiler.ops.gdn import lower_prefill

ARCHES = ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"]
HEADS = {"key_heads": 16, "value_heads": 48, "dk": 128, "dv": 128}


def site(kind: str, columns: int, **attrs: int | float | str) -> tuple[Op, dict[str, TensorType]]:
    """An op of a 27B layer for four slots of eight records, and its operand types."""
    rows = {"x": 5120, "y": 10240, "o": 6144, "z": 6144}
    if kind == "conv":
        rows["x"] = 10240
    if kind == "gated_norm":
        rows["y"] = 6144
    types = {name: TensorType((columns, width), "bf16") for name, width in rows.items()}
    types |= {"gates": TensorType((columns, 96), "f32"), "wa": TensorType((48, 5120), "bf16"),
              "wb": TensorType((48, 5120), "bf16"), "a_log": TensorType((48,), "f32"), "dt_bias": TensorType((48,), "f32"),
              "w": TensorType((128,), "bf16"), "window": TensorType((2, 4, 3, 10240), "bf16"),
              "record": TensorType((2, 4, 8, 10240), "bf16"), "recurrent": TensorType((4, 48, 128, 128), "f32"),
              "rec_k": TensorType((2, 4, 8, 16, 128), "f32"), "rec_u": TensorType((2, 4, 8, 48, 128), "f32"),
              "rec_alpha": TensorType((2, 4, 8, 48), "f32")}  # fmt: skip
    types |= {n: TensorType((4,), "i32") for n in ("lane_slot", "lane_ncols", "lane_len", "slot_pending", "slot_parity")}
    known = definition(kind)
    op = Op(kind, {n: Ref(n) for n in known.inputs if n != "x2"}, {n: Ref(n) for n in known.outputs},
            {n: Ref(n) for n in known.state}, attrs)  # fmt: skip
    return op, types


def decode_specs(target: DeviceCaps) -> list[KernelSpec]:
    """Every variant a decode graph of one or eight lanes uses."""
    one, eight = (site("gdn", lanes * 4, phase="decode", **HEADS) for lanes in (1, 8))
    return [
        recurrent_spec(*one, 1, 4, target),
        recurrent_spec(*eight, 8, 4, target),
        conv_spec(*site("conv", 4, phase="decode"), 1, 4, target),
        gates_spec(*site("gdn_gates", 4), target),
        gates_spec(*site("gdn_gates", 64), target),
        gated_norm_spec(*site("gated_norm", 4, eps=1e-6, heads=48, dim=128), target),
    ]


@pytest.mark.parametrize("arch", ARCHES)
def test_decode_kernels_keep_everything_in_registers(arch: str) -> None:
    target = caps(arch)
    specs = decode_specs(target)
    assert specs[0].entry != specs[1].entry, "one lane and eight lanes use different blocks"
    for spec in specs:
        used = compile_source(spec.entry, render(spec.template, spec.entry, spec.params), arch).resources
        assert (used.stack, used.spill_stores, used.spill_loads, used.local) == (0, 0, 0, 0), f"{spec.entry} {used}"
        assert used.static_smem + spec.smem <= target.smem_block


def layer_site(columns: int) -> tuple[LayerOps, dict[str, dict[str, TensorType]]]:
    """The four ops that the fused kernel replaces, and their operand types by kind."""
    sites = (site("gdn_gates", columns), site("conv", columns, phase="decode"), site("gdn", columns, phase="decode", **HEADS),
             site("gated_norm", columns, eps=1e-6, heads=48, dim=128))  # fmt: skip
    return LayerOps(*(op for op, _ in sites)), {op.kind: types for op, types in sites}


@pytest.mark.parametrize("arch", [arch if arch in ("sm_80", "sm_90a", "sm_120a") else pytest.param(arch, marks=pytest.mark.slow)
                                  for arch in ARCHES])  # fmt: skip
def test_the_fused_kernel_keeps_everything_in_registers(arch: str) -> None:
    """Every number of columns, whatever is settled; one column with everything settled fits beside products,
    which leave a quarter of the registers."""
    target = caps(arch)
    for width, settled in [(1, "hidden"), (1, "state"), (1, "nothing"), (8, "hidden"), (8, "nothing"), (32, "hidden")]:
        ops, types = layer_site(width)
        types["conv"]["record"] = TensorType((2, 4, 32, 10240), "bf16")
        for name in ("rec_k", "rec_u", "rec_alpha"):
            shape = types["gdn"][name].shape
            types["gdn"][name] = TensorType((*shape[:2], 32, *shape[3:]), "f32")
        assert obstacle(ops, types, width) == ""
        spec = layer_spec(ops, types, 1, width, settled, target)
        used = compile_source(spec.entry, render(spec.template, spec.entry, spec.params), arch).resources
        assert (used.stack, used.spill_stores, used.spill_loads, used.local) == (0, 0, 0, 0), f"{spec.entry} {used}"
        assert used.registers * spec.block <= 65536 and used.static_smem <= 48 << 10
        if target.clusters and (width, settled) == (1, "hidden"):
            assert used.registers * spec.block <= 16384 and used.static_smem <= 4096, used


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a"])
def test_prefill_kernels_fit(arch: str) -> None:
    target = caps(arch)
    op, types = site("gdn", 1024, phase="prefill", **HEADS)
    assert chunked_fits(op, types, target)
    values, (intra, carry) = lower_prefill(op, types, "t")
    types |= {name: value.type for name, value in zip(("matrices", "rows"), values, strict=True)}
    for spec in (intra_spec(intra, types, target), carry_spec(carry, types, target)):
        assert spec.smem <= target.smem_block
        used = compile_source(spec.entry, render(spec.template, spec.entry, spec.params), arch).resources
        assert used.registers * spec.block <= 65536, f"{spec.entry} {used}"
        assert used.spill_loads <= (0 if arch == "sm_90a" else 64), f"{spec.entry} {used}"


def test_small_targets_and_odd_chunks_use_the_recurrence() -> None:
    op, types = site("gdn", 1024, phase="prefill", **HEADS)
    assert not chunked_fits(op, types, caps("sm_75"))
    odd, odd_types = site("gdn", 100, phase="prefill", **HEADS)
    assert not chunked_fits(odd, odd_types, caps("sm_90a"))
    spec = recurrent_spec(op, types, 1, 1024, caps("sm_75"))
    assert spec.params["commit"] is True
    compile_source(spec.entry, render(spec.template, spec.entry, spec.params), "sm_75")


def test_what_no_kernel_serves_is_named() -> None:
    op, types = site("gdn", 9, phase="decode", **HEADS)
    with pytest.raises(IRError, match="9 columns per lane, but records hold 8"):
        recurrent_spec(op, types, 1, 9, caps("sm_90a"))
    with pytest.raises(IRError, match="dk is 136"):
        recurrent_spec(*site("gdn", 8, phase="decode", **{**HEADS, "dk": 136}), 1, 8, caps("sm_90a"))
    op, types = site("gated_norm", 4, eps=1e-6, heads=48, dim=128)
    shifted = replace(op, inputs={**op.inputs, "z": Ref("z", 4, 6144)})
    with pytest.raises(IRError, match="z begins at column 4"):
        gated_norm_spec(shifted, types, caps("sm_90a"))
    ops, kinds = layer_site(9)
    with pytest.raises(IRError, match="9 columns per lane, but records hold 8"):
        layer_spec(ops, kinds, 1, 9, "hidden", caps("sm_90a"))
    with pytest.raises(IRError, match="settled is 'soon'"):
        layer_spec(*layer_site(1), 1, 1, "soon", caps("sm_90a"))
    shifted = replace(ops, norm=replace(ops.norm, inputs={**ops.norm.inputs, "z": Ref("z", 4, 6144)}))
    with pytest.raises(IRError, match="z begins at column 4"):
        layer_spec(shifted, kinds, 1, 1, "hidden", caps("sm_90a"))
    assert obstacle(ops, kinds, 33) == "33 columns per lane"
    with pytest.raises(IRError, match="dim is 260"):
        gated_norm_spec(*site("gated_norm", 4, eps=1e-6, heads=48, dim=260), caps("sm_90a"))


def test_work_is_spread_over_the_device() -> None:
    """One sequence gives every multiprocessor of an H200 a block; the rows of a head are covered once."""
    target = caps("sm_90a", 132)
    for lanes in (1, 8, 64):
        spec = recurrent_spec(*site("gdn", lanes, phase="decode", **HEADS), lanes, 1, target)
        lane_rows = 8
        rows = int(spec.params["warps"]) * (32 // lane_rows) * int(spec.params["rows"])
        assert np.prod(spec.grid) * rows == lanes * 48 * 128 and np.prod(spec.grid) >= 132
