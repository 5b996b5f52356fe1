"""Weights rearranged after loading: NVFP4 codes against the bit table, units against NumPy; what is arranged and what not."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest

from artifacts.layouts import layout_of
from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import caps
from compiler.emit.render import render
from compiler.ir.op import Op
from compiler.ir.types import IRError, Kind, Ref, TensorType, Value, WeightSource
from compiler.kernels.arrange import (
    PLANES,
    READERS,
    SCRATCH,
    UNIT_FORMATS,
    arrange_entry,
    arrange_spec,
    arranged_weights,
    in_units,
    unit_weight,
    unit_weights,
    units_entry,
    units_spec,
)
from compiler.kernels.linear_columns import FORMATS
from compiler.program.model import DEVICE_REGIONS, EXCHANGE, Arg
from runtime.cuda import backend
from runtime.cuda.driver import DeviceError
from tests.cli.fake_driver import FakeDriver
from tests.compile import instantiations
from tests.kernels.encoded_weights import _PLANES, DEVICE_BITS, arranged, units


@pytest.mark.parametrize("pieces", [1, 37, 5000])
def test_arranged_in_place(kernel_backend: Any, pieces: int) -> None:
    rng = np.random.default_rng(pieces)
    codes = rng.integers(0, 256, 16 * pieces + 32).astype(np.uint8)  # what lies behind stays as it is
    words, spec = codes.copy(), arrange_spec(kernel_backend.caps(sms=2))
    kernel_backend.launch(spec, render(spec.template, spec.entry, spec.params), [words, pieces])
    assert np.array_equal(words[: 16 * pieces], arranged(codes[: 16 * pieces].copy()))
    assert np.array_equal(words[16 * pieces :], codes[16 * pieces :])


def test_every_bit_has_one_place() -> None:
    assert sorted(DEVICE_BITS) == list(range(16))
    assert sorted(DEVICE_BITS.values()) == [(pair, bit) for pair in range(4) for bit in range(4)]


@pytest.mark.parametrize(("name", "tp"), [("qwen3.6-27b/nvfp4", 1), ("qwen3.6-27b/nvfp4", 2), (instantiations.TINY, 1)])
def test_every_weight_that_is_read_is_arranged_once(name: str, tp: int) -> None:
    """Whole weights and shards: none is left out, no two share memory; programs without any have no such kernel."""
    options = CompileOptions(max_context=2048, pairs=((1, 1),), tp=tp)
    program = compile_program(instantiations.artifact(name), caps("sm_90a"), options, images=False)
    read = set()
    for phase in program.phases.values():
        for op in (op for item in phase.calls for op in item.ops):
            values = [program.value(phase, ref.value) for _, ref in op.refs()]
            read |= {v.name for v in values if v.kind is Kind.WEIGHT and v.source is not None and v.source.format == "NVFP4"}
    found = list(arranged_weights(program.values.values()))
    assert sorted(value.name for value, _ in found) == sorted(read)
    assert (arrange_entry("sm_90a") in program.kernels) == bool(read) == (name != instantiations.TINY)
    spans = sorted((p.rank, p.region, p.offset, p.offset + nbytes)
                   for p, nbytes in ((program.placements[value.name], nbytes) for value, nbytes in found))  # fmt: skip
    for before, after in itertools.pairwise(spans):
        assert before[:2] < after[:2] or before[3] <= after[2]
    assert all(2 * nbytes == value.type.shape[0] * value.type.shape[1] for value, nbytes in found)


def weight(format: str, n: int, k: int, name: str = "w1") -> Value:
    layout = layout_of(format)
    source = WeightSource(1, format, layout.name, (n, k), ((0, n),), ((0, k),))
    return Value(name, TensorType((n, k), "u8"), Kind.WEIGHT, 0, source, layout.encoded_size(format, (n, k)))


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize(("n", "k"), [(256, 256), (128, 768)])
@pytest.mark.parametrize("format", UNIT_FORMATS)
def test_units_in_place(kernel_backend: Any, format: str, n: int, k: int, blocks: int) -> None:
    """Every byte of the planes at its place, scales of rows and of the matrix untouched, and what lies between and behind."""
    rng = np.random.default_rng(n + k)
    value = weight(format, n, k)
    found = unit_weight(value)
    before = rng.integers(0, 256, value.nbytes + 64).astype(np.uint8)
    after = before.copy()
    pointers = [after[found.planes[name] :] if name in found.planes else None for name in ("w_codes", "w_high", "w_scales")]
    spec = replace(units_spec(format, kernel_backend.caps()), grid=(blocks, 1, 1))
    scratch = np.full(blocks * found.block_bytes, 0xFF, np.uint8)
    kernel_backend.launch(spec, render(spec.template, spec.entry, spec.params), [*pointers, scratch, found.rows, found.chunks])
    wanted = before.copy()
    for plane in layout_of(format).planes(format, (n, k)):
        part = wanted[plane.offset : plane.end]
        part[:] = units(format, _PLANES[plane.name], part.copy(), n, k)
    assert not np.array_equal(wanted, before)
    assert np.array_equal(after, wanted)
    assert found.blocks * found.block_bytes == layout_of(format).planes(format, (n, k))[0].nbytes  # one block for each


def test_units_are_told_from_the_shape() -> None:
    assert UNIT_FORMATS.keys() == FORMATS.keys() and set(PLANES) | {"divisor"} == set(_PLANES)
    assert all(UNIT_FORMATS[format] == FORMATS[format][:2] for format in FORMATS)
    assert in_units("BF16", 32, 256) and in_units("NVFP4", 34816, 5120) and in_units("Q5G64_F16S", 5120, 17408)
    assert not in_units("BF16", 48, 256) and not in_units("BF16", 32, 384) and not in_units("FP32", 32, 256)


def test_scratch_holds_a_block_of_rows_of_every_launch() -> None:
    for format in UNIT_FORMATS:
        for n, k in ((34816, 5120), (5120, 17408), (248320, 5120)):
            found = unit_weight(weight(format, n, k))
            assert 16 <= found.blocks and found.scratch == found.blocks * found.block_bytes <= SCRATCH
        assert unit_weight(weight(format, 128, 16 * SCRATCH)).blocks == 1


def test_a_weight_is_read_in_one_order() -> None:
    """Whatever reads a weight besides products is a reason not to compile; alone it leaves the weight in rows."""
    values = {name: weight("BF16", 64, 256, name) for name in ("w1", "w2")} | {"w3": weight("BF16", 64, 200, "w3")}
    ops = [Op("linear", {"x": Ref("x"), "w": Ref("w1")}, {"y": Ref("y")}), Op("embed", {"w": Ref("w1")}, {"x": Ref("x")}),
           Op("linear", {"x": Ref("x"), "w": Ref("w3")}, {"y": Ref("y")}),
           Op("gdn_gates", {"x": Ref("x"), "wa": Ref("w2")}, {"gates": Ref("g")})]  # fmt: skip
    assert [found.value.name for found in unit_weights(values, ops)] == ["w1"]
    with pytest.raises(IRError, match="weight w1: op gdn_gates reads rows, op embed units of 16 rows"):
        unit_weights(values, [*ops, Op("gdn_gates", {"wa": Ref("w1")}, {"gates": Ref("g")})])


@pytest.mark.parametrize(("name", "tp"), [("qwen3.6-27b/nvfp4", 1), ("qwen3.6-27b/nvfp4", 2), (instantiations.TINY, 1)])
def test_kernels_and_arrangement_agree(name: str, tp: int) -> None:
    """Every call that is compiled for units reads weights that are arranged, and no other does."""
    options = CompileOptions(max_context=2048, pairs=((1, 1), (1, 24)), tp=tp)
    program = compile_program(instantiations.artifact(name), caps("sm_90a"), options, images=False)
    ops = [op for phase in program.phases.values() for op in phase.ops()]
    found = {w.value.name: w for w in unit_weights(program.values, ops)}
    seen = set()
    for phase in program.phases.values():
        for item in phase.calls:
            read = {op.inputs["w"].value for op in item.ops if op.kind in READERS}
            params = program.kernels[item.entry].spec.params
            if read:
                assert len(read) == (2 if params.get("second_n") else 1), item.entry
                assert (read <= found.keys()) == params["in_units"], item.entry
                seen |= read
    assert found.keys() <= seen and len(found) > 2
    assert {units_entry(w.format, "sm_90a") for w in found.values()} == {e for e in program.kernels if "arrange_units" in e}
    if name != instantiations.TINY:
        assert found.keys() == seen


@pytest.mark.parametrize("tp", [1, 2])
def test_loading_arranges_every_weight_once(monkeypatch: pytest.MonkeyPatch, tp: int) -> None:
    """The launches of a backend: the planes of each weight in units, no more blocks than scratch memory has places."""
    FakeDriver(count=tp).install(monkeypatch)
    launched: list[tuple[str, int, dict[str, Arg]]] = []
    monkeypatch.setattr(backend, "PackedArgs", lambda args, address: args)
    monkeypatch.setattr(backend, "launch_kernel", lambda kernel, stream, grid, block, smem, args, what: launched.append(
        (what, grid[0], {arg.name: arg for arg in args})))  # fmt: skip
    for name in ("GraphPhase", "Exchange", "choose", "check_pointers"):
        monkeypatch.setattr(backend, name, MagicMock())
    monkeypatch.setattr(backend, "upload", lambda values, *rest, complete: [complete(value) for value, _, _ in values])
    artifact = instantiations.artifact(instantiations.TINY)
    program = compile_program(artifact, caps("sm_90a"), CompileOptions(max_context=512, tp=tp), images=False)
    loaded = backend.CudaBackend(program, MagicMock(), list(range(tp)))
    wanted = unit_weights(program.values, (op for phase in program.phases.values() for op in phase.ops()))
    assert {weight.value.rank for weight in wanted} == set(range(tp))
    expected = []
    for found in wanted:
        at = loaded.address(program.placements[found.value.name])
        planes = [at + found.planes[name] if name in found.planes else None for name in ("w_codes", "w_high", "w_scales")]
        expected.append((f"kernel {units_entry(found.format, 'sm_90a')}", planes, found.rows, found.chunks))
    seen = []
    for what, blocks, args in launched:
        planes = [args[name].offset if args[name].kind == "pointer" else None for name in ("w_codes", "w_high", "w_scales")]
        rows, chunks = int(args["rows"].number), int(args["chunks"].number)
        seen.append((what, planes, rows, chunks))
        bytes_of_block = {w.block_bytes for w in wanted if (w.rows, w.chunks) == (rows, chunks)}
        assert 1 <= blocks <= max(w.scratch for w in wanted) // max(bytes_of_block) and args["scratch"].kind == "pointer"
    assert sorted(map(str, seen)) == sorted(map(str, expected))


@pytest.mark.parametrize(("tp", "devices"), [(1, [0]), (2, [0, 1]), (2, [0, 0])])
def test_room_for_arranging_is_known_before_loading(monkeypatch: pytest.MonkeyPatch, tp: int, devices: list[int]) -> None:
    """What the largest weight of each rank needs counts: weights are arranged while others of both ranks arrive."""
    fake = FakeDriver(count=2).install(monkeypatch)
    read = MagicMock()
    for name in ("GraphPhase", "Exchange", "choose", "check_pointers"):
        monkeypatch.setattr(backend, name, MagicMock())
    monkeypatch.setattr(backend, "upload", read)
    artifact = instantiations.artifact(instantiations.TINY)
    target = replace(caps("sm_90a"), sms=66)
    program = compile_program(artifact, target, CompileOptions(max_context=512, tp=tp), images=False)
    shared = [rank for rank in range(tp) if devices[rank] == devices[0]]
    plan = sum(program.regions[rank].get(name, 0) for name in (*DEVICE_REGIONS, EXCHANGE) for rank in shared)
    wanted = unit_weights(program.values, (op for phase in program.phases.values() for op in phase.ops()))
    of_ranks = [max(weight.scratch for weight in wanted if weight.value.rank == rank) for rank in shared]
    scratch = sum(of_ranks)
    assert 0 < max(of_ranks) <= SCRATCH
    fake.free = plan + scratch - 1
    with pytest.raises(DeviceError, match="GiB are needed"):
        backend.CudaBackend(program, MagicMock(), devices)
    assert not fake.allocated and not read.called
    fake.free = plan + scratch
    backend.CudaBackend(program, MagicMock(), devices)
    assert read.called
