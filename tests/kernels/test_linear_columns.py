"""Decode products against FP64 references, and the equality of their bits over columns, tiles, slices and segments."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import pytest

from compiler.emit.arch import caps
from compiler.emit.nvrtc import compile_source
from compiler.emit.render import render
from compiler.ir.op import Op
from compiler.ir.types import IRError, Ref, TensorType
from compiler.kernels.control import rmsnorm_spec
from compiler.kernels.linear_columns import (
    BUCKETS,
    FORMATS,
    Product,
    Tile,
    candidates,
    choose,
    fits,
    linear_spec,
    problem,
    slices_of,
    spec_of,
)
from compiler.kernels.spec import BLOCK_RESERVED, DeviceCaps, KernelSpec
from tests.emulator.harness import assert_close_to_fp64, from_bf16, poisoned, to_bf16, under_schedules
from tests.gpu_launch import EmulatorLauncher
from tests.kernels.encoded_weights import Weights, random_weights

Array = np.ndarray[Any, Any]
H200 = caps("sm_90a")
EPS = 1e-6
# An FP32 output carries the error of its own sum, which an output rounded to bf16 hides.
F32_FACTOR = 60.0
SMALL = 99 << 10  # bytes of shared memory of a block, below which not all of these tests' tiles fit


def label(value: Product | Tile) -> str:
    """Of a test's parameter."""
    if isinstance(value, Product):
        return f"{value.kernel_format}-{value.n}x{value.k}-c{value.columns}-s{value.segments}-{value.epilogue}"
    return f"{value.mtiles}x{value.warps_r}x{value.warps_k}"


def activations(rng: np.random.Generator, columns: int, k: int) -> Array:
    """bf16 bits [columns, k]; columns differ in size."""
    return to_bf16(rng.standard_normal((columns, k)) * np.exp2(rng.integers(-3, 4, (columns, 1))))


def skip_large(product: Product, tile: Tile, target: DeviceCaps) -> None:
    """Skips the test on a card with too little shared memory for a tile that it names."""
    if target.smem_block < SMALL and not fits(product, tile, target):
        pytest.skip(f"{tile} does not fit the {target.smem_block} bytes of shared memory of {target.arch}")


def launch(backend: Any, product: Product, weights: Weights, x: Array, tile: Tile | None = None, residual: Array | None = None,
           norm_w: Array | None = None, normed: Array | None = None, pad: int = 0) -> Array:  # fmt: skip
    """The output [columns, outputs] of one launch; ``pad`` more elements per row on every strided operand, checked to be
    untouched."""
    target = backend.caps()
    if tile:
        skip_large(product, tile, target)
    spec = spec_of(product, tile or choose(product, target), target, EPS)
    return launch_spec(backend, spec, product, weights, x, residual, norm_w, normed, pad)


def launch_spec(backend: Any, spec: KernelSpec, product: Product, weights: Weights, x: Array, residual: Array | None = None,
                norm_w: Array | None = None, normed: Array | None = None, pad: int = 0,
                as_units: bool = True) -> Array:  # fmt: skip
    def padded(array: Array) -> Array:
        wide = poisoned((array.shape[0], array.shape[1] + pad), "bf16")
        wide[:, : array.shape[1]] = array
        return wide

    wide_x = padded(x)
    y = poisoned((product.columns, product.outputs + pad), "f32" if product.epilogue == "store_f32" else "bf16")
    values: dict[str, Any] = {"x": wide_x, "x_stride": wide_x.shape[1], "norm_w": norm_w, "normed": normed, "y": y,
                              "y_stride": y.shape[1], **spec.scalars}  # fmt: skip
    values |= zip(("w_codes", "w_high", "w_scales", "w_divisor"), weights.pointers(as_units), strict=True)
    if residual is not None:
        values["residual"] = padded(residual)
        values["residual_stride"] = values["residual"].shape[1]
    for name, nbytes in spec.scratch.items():
        values[name] = np.full(nbytes, 0 if name in spec.zeroed else 0xFF, np.uint8)
    backend.launch(spec, render(spec.template, spec.entry, spec.params), [values[name] for name in spec.args])
    for name in spec.zeroed:
        assert not values[name].any(), f"{name} is not left zero"
    untouched = y.view(np.uint8).reshape(product.columns, -1)[:, product.outputs * y.itemsize :]
    assert np.all(untouched == 0xFF)
    return y[:, : product.outputs]


def normalised(backend: Any, x: Array, norm_w: Array) -> Array:
    """x by the rmsnorm kernel."""
    types = {name: TensorType(x.shape, "bf16") for name in ("x", "y")}
    op = Op("rmsnorm", {"x": Ref("x"), "w": Ref("w")}, {"y": Ref("y")}, attrs={"eps": EPS})
    spec, y, width = rmsnorm_spec(op, types, backend.caps()), poisoned(x.shape), x.shape[1]
    backend.launch(spec, render(spec.template, spec.entry, spec.params), [x, width, norm_w, y, width, EPS])
    return y


def reference(product: Product, weights: Weights, x: Array, residual: Array | None = None) -> Array:
    y = from_bf16(x).astype(np.float64) @ weights.values.T
    if product.epilogue == "swiglu":
        gate, up = y[:, : product.outputs], y[:, product.outputs :]
        return np.asarray(gate / (1 + np.exp(-gate)) * up)
    return np.asarray(y + from_bf16(residual)) if residual is not None else np.asarray(y)


def check(backend: Any, product: Product, seed: int, tile: Tile | None = None, pad: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    weights = random_weights(rng, product.format, product.n, product.k)
    x = activations(rng, product.columns, product.k)
    residual = activations(rng, product.columns, product.outputs) if product.epilogue == "residual" else None
    y = launch(backend, product, weights, x, tile, residual, pad=pad)
    wanted = reference(product, weights, x, residual)
    if product.epilogue == "store_f32":
        assert_close_to_fp64(y, wanted, "f32", factor=F32_FACTOR)
    else:
        assert_close_to_fp64(y, wanted, "bf16")
    return y


@pytest.mark.parametrize("epilogue", ["store", "store_f32", "swiglu", "residual"])
@pytest.mark.parametrize("format", FORMATS)
def test_every_format_and_epilogue(kernel_backend: Any, format: str, epilogue: str) -> None:
    check(kernel_backend, Product(format, 256 if epilogue == "swiglu" else 128, 256, 3, 1, epilogue), 1, pad=8)


@pytest.mark.parametrize("format", FORMATS)
def test_bits_do_not_depend_on_the_number_of_columns(kernel_backend: Any, format: str) -> None:
    """Column c of a product at 64 columns equals the same column at any other count, for counts inside buckets too."""
    rng, n = np.random.default_rng(2), 128 if format == "NVFP4" else 32
    weights, x = random_weights(rng, format, n, 1280), activations(rng, 64, 1280)
    wide = Product(format, n, 1280, 64)
    assert wide.slices == 2
    all_columns = launch(kernel_backend, wide, weights, x)
    assert_close_to_fp64(all_columns, reference(wide, weights, x), "bf16")
    for columns in (1, 3, 8, 13, 27, 33) if format == "NVFP4" else (1, 13, 33):
        some = launch(kernel_backend, replace(wide, columns=columns), weights, x[64 - columns :])
        assert np.array_equal(some, all_columns[64 - columns :]), columns


@pytest.mark.parametrize("format", FORMATS)
def test_half_k_launches_add_up_to_the_full_product(kernel_backend: Any, format: str) -> None:
    """tp 2: each rank's FP32 partial sum is the segment of the full product, so partial sums in rank order, then the
    residual, then one rounding give the bits of the product with two segments."""
    rng, n = np.random.default_rng(3), 128 if format == "NVFP4" else 32
    full = Product(format, n, 2560, 2, 2, "residual")
    weights, x, residual = (random_weights(rng, format, n, 2560), activations(rng, 2, 2560), activations(rng, 2, n))
    y = launch(kernel_backend, full, weights, x, residual=residual)
    assert_close_to_fp64(y, reference(full, weights, x, residual), "bf16")
    split = Tile(1, 1, 2, 3, True, 0, split=True)
    for tile in (split, replace(split, clustered=True)):
        if fits(full, tile, kernel_backend.caps()):
            assert np.array_equal(y, launch(kernel_backend, full, weights, x, tile, residual)), tile
    half = replace(full, k=1280, segments=1, epilogue="store_f32")
    first, second = (
        launch(kernel_backend, half, weights.columns(b, b + 1280), np.ascontiguousarray(x[:, b : b + 1280]))
        for b in (0, 1280)
    )
    assert np.array_equal(y, to_bf16((first + second) + from_bf16(residual)))


@pytest.mark.parametrize("format, columns", [("NVFP4", 1), ("NVFP4", 16), ("Q5G64_F16S", 8), ("FP8_E4M3FN_ROW_BF16S", 2)])
def test_bits_do_not_depend_on_the_tile(kernel_backend: Any, format: str, columns: int) -> None:
    rng = np.random.default_rng(4)
    product = Product(format, 128, 1280, columns)
    weights, x = random_weights(rng, format, 128, 1280), activations(rng, columns, 1280)
    tiles = [Tile(1, 1, 2, 3, False, 0), Tile(2, 2, 1, 4, False, 1), Tile(1, 3, 2, 3, False, 0), Tile(4, 1, 2, 3, True, 0),
             Tile(1, 2, 2, 4, True, 1), Tile(2, 1, 1, 3, True, 0), Tile(1, 2, 2, 3, True, 1, claimed=True),
             Tile(1, 3, 1, 4, True, 1, claimed=True), Tile(1, 1, 2, 4, True, 1, primed=1),
             Tile(1, 2, 1, 3, True, 1, primed=3), Tile(1, 2, 2, 4, True, 1, claimed=True, primed=2)]  # fmt: skip
    outputs = []
    for i, tile in enumerate(tiles):
        target = kernel_backend.caps(sms=1 + i % 3)  # few multiprocessors: blocks walk over several tiles
        if fits(product, tile, target):
            spec = spec_of(product, tile, target)
            outputs.append(launch_spec(kernel_backend, spec, product, weights, x))
    assert len(outputs) >= (4 if target.smem_block < SMALL else 5)
    assert_close_to_fp64(outputs[0], reference(product, weights, x), "bf16")
    for other in outputs[1:]:
        assert np.array_equal(outputs[0], other)


@pytest.mark.parametrize("tile", [
    Tile(1, 2, 2, 3, True, 0), Tile(1, 2, 1, 3, True, 1, split=True), Tile(2, 1, 2, 3, False, 0, split=True),
    Tile(1, 3, 1, 3, False, 1, split=True), Tile(1, 4, 4, 3, False, 0), Tile(1, 2, 2, 3, True, 0, split=True, clustered=True),
])  # fmt: skip
@pytest.mark.parametrize("columns", [3, 40])
def test_bits_do_not_depend_on_who_computes_a_segment(kernel_backend: Any, tile: Tile, columns: int) -> None:
    """Segments in one block or in several that meet in memory; 40 columns are two blocks of columns."""
    rng, target = np.random.default_rng(9), kernel_backend.caps(sms=3)
    product = Product("W8G32_F16S", 80, 2560, columns, 2, "residual")
    weights, x = random_weights(rng, product.format, 80, 2560), activations(rng, columns, 2560)
    residual = activations(rng, columns, 80)
    if not fits(product, tile, target):
        pytest.skip("the activations of 32 columns are not resident, two blocks of columns are no cluster")
    y = launch_spec(kernel_backend, spec_of(product, tile, target), product, weights, x, residual, pad=8)
    assert_close_to_fp64(y, reference(product, weights, x, residual), "bf16")
    plain = launch(kernel_backend, product, weights, x, Tile(1, 1, 1, 3, False, 0), residual)
    assert np.array_equal(y, plain)


CLUSTERED = [  # sums of a tile in shared memory, in registers, in both; several units per warp; rows, tiles that do not exist
    (Product("W8G32_F16S", 80, 2560, 3, 2, "residual"), Tile(1, 2, 2, 3, True, 0)),
    (Product("W8G32_F16S", 50, 2560, 8, 2, "store"), Tile(4, 2, 2, 3, False, 0)),
    (Product("BF16", 40, 5120, 17, 2, "store_f32"), Tile(2, 2, 2, 3, False, 0)),
    (Product("FP8_E4M3FN_ROW_BF16S", 100, 1920, 8, 3, "store_f32"), Tile(2, 2, 1, 3, True, 0)),
    (Product("FP8_E4M3FN_ROW_BF16S", 33, 336, 1, 2, "residual"), Tile(1, 2, 1, 2, True, 0)),
    (Product("NVFP4", 128, 2560, 1, 2, "residual"), Tile(1, 3, 2, 4, True, 0)),
    (Product("NVFP4", 128, 2560, 17, 2, "residual"), Tile(1, 5, 1, 3, False, 0)),
    (Product("Q5G64_F16S", 17, 5120, 2, 4, "residual"), Tile(1, 1, 2, 3, False, 0)),
    (Product("FP8_E4M3FN_ROW_BF16S", 144, 2560, 24, 2, "residual"), Tile(1, 4, 2, 3, False, 0, warpgroup=True)),
]


@pytest.mark.parametrize("product, tile", CLUSTERED, ids=label)
def test_segments_meet_in_a_cluster(kernel_backend: Any, product: Product, tile: Tile) -> None:
    """The blocks of a tile exchange sums through shared memory: the bits of one block that computes all segments."""
    target, tile = kernel_backend.caps(), replace(tile, split=True, clustered=True)
    if not target.clusters:
        pytest.skip("the target has no clusters")
    rng = np.random.default_rng(10)
    weights = random_weights(rng, product.format, product.n, product.k)
    x = activations(rng, product.columns, product.k)
    residual = activations(rng, product.columns, product.n) if product.epilogue == "residual" else None
    spec = spec_of(product, tile, target)
    assert spec.cluster == (product.segments, 1, 1) and not spec.scratch and spec.grid[0] % product.segments == 0
    y = launch_spec(kernel_backend, spec, product, weights, x, residual, pad=8)
    plain = launch(kernel_backend, product, weights, x, Tile(1, 1, 1, 3, False, 0), residual)
    assert_close_to_fp64(plain, reference(product, weights, x, residual), "f32" if product.epilogue == "store_f32" else "bf16",
                         factor=F32_FACTOR)  # fmt: skip
    assert np.array_equal(y, plain)


@pytest.mark.parametrize("product", [
    Product("NVFP4", 128, 2560, 11), Product("NVFP4", 256, 1280, 20, 1, "swiglu"), Product("BF16", 80, 1280, 30, 1, "swiglu"),
    Product("FP8_E4M3FN_ROW_BF16S", 144, 2560, 24, 2, "residual"), Product("NVFP4", 128, 2560, 33, 2, "residual"),
    Product("BF16", 40, 2560, 9, 1, "store_f32"), Product("FP8_E4M3FN_ROW_BF16S", 96, 1280, 17, 1, "swiglu"),
], ids=label)  # fmt: skip
def test_many_columns(kernel_backend: Any, product: Product) -> None:
    """Streamed activations, in one or several rounds of slices, gate and up tile in one warp or in two, and warpgroup
    products where the target has them: the same bits as the plainest tile."""
    rng = np.random.default_rng(11)
    weights = random_weights(rng, product.format, product.n, product.k)
    x, residual = activations(rng, product.columns, product.k), None
    if product.epilogue == "residual":
        residual = activations(rng, product.columns, product.n)
    both = 2 if product.epilogue == "swiglu" else 1
    tiles = [Tile(both, 1, 1, 3, False, 0), Tile(both, 3, 2, 3, False, 1),
             Tile(1, 6, 1, 3, False, 0), Tile(1, 2, 2, 4, False, 1),
             Tile(1, 2, 1, 3, False, 1), Tile(both, 2, 1, 3, False, 0),  # for little shared memory
             Tile(1, 4, 1, 3, False, 0, warpgroup=True), Tile(1, 8, 1, 4, False, 1, warpgroup=True),
             Tile(1, 4, 2, 3, False, 1, warpgroup=True), Tile(1, 4, 4, 3, False, 0, split=True, warpgroup=True)]  # fmt: skip
    outputs = {}
    for i, tile in enumerate(tiles):
        target = kernel_backend.caps(sms=1 + i % 3)
        if fits(product, tile, target):
            spec = spec_of(product, tile, target)
            outputs[tile] = launch_spec(kernel_backend, spec, product, weights, x, residual, pad=8)
    first = outputs.pop(tiles[0] if tiles[0] in outputs else next(iter(outputs)))
    wanted = reference(product, weights, x, residual)
    if product.epilogue == "store_f32":
        assert_close_to_fp64(first, wanted, "f32", factor=F32_FACTOR)
    else:
        assert_close_to_fp64(first, wanted, "bf16")
    assert len(outputs) >= (0 if target.smem_block < SMALL else 2)
    assert any(tile.warpgroup for tile in outputs) == kernel_backend.caps().wgmma
    for tile, other in outputs.items():
        assert np.array_equal(first, other), tile


ODD = [
    Product("BF16", 40, 200, 2),
    Product("BF16", 96, 48, 1, 2, "residual"),
    Product("BF16", 24, 8, 5),
    Product("BF16", 72, 1000, 9),
    Product("Q4G64_F16S", 50, 200, 3),
    Product("Q5G64_F16S", 100, 136, 1, 1, "swiglu"),
    Product("Q6G64_F16S", 17, 64, 8),
    Product("W8G32_F16S", 50, 200, 17),
    Product("W8G32_F16S", 1, 32, 1),
    Product("NVFP4", 256, 192, 4, 1, "swiglu"),
    Product("NVFP4", 128, 128, 1, 2, "residual"),
    Product("NVFP4", 384, 64, 20),
    Product("FP8_E4M3FN_ROW_BF16S", 50, 200, 2),
    Product("FP8_E4M3FN_ROW_BF16S", 30, 1040, 10, 1, "swiglu"),
    Product("FP8_E4M3FN_ROW_BF16S", 33, 336, 1, 2, "residual"),
]


@pytest.mark.parametrize("product", ODD, ids=label)
def test_odd_shapes(kernel_backend: Any, product: Product) -> None:
    check(kernel_backend, product, 5, pad=16)


@pytest.mark.parametrize("mtiles", [1, 2, 4])
@pytest.mark.parametrize("format", ["BF16", "Q6G64_F16S", "W8G32_F16S"])
def test_rows_past_the_end_of_a_tile(kernel_backend: Any, format: str, mtiles: int) -> None:
    """40 rows in tiles of up to 64: rows that do not exist are neither read nor written."""
    check(kernel_backend, Product(format, 40, 128, 2), 6, Tile(mtiles, 1, 1, 3, mtiles != 2, 0))
    if mtiles > 1:
        check(kernel_backend, Product(format, 80, 128, 2, 1, "swiglu"), 6, Tile(mtiles, 2, 1, 3, mtiles == 2, 0))


@pytest.mark.parametrize("format, outputs, columns", [
    ("BF16", 44, 1), ("Q4G64_F16S", 40, 4), ("Q5G64_F16S", 20, 7), ("Q6G64_F16S", 12, 1), ("W8G32_F16S", 36, 4),
    ("NVFP4", 256, 1), ("NVFP4", 256, 7), ("FP8_E4M3FN_ROW_BF16S", 42, 4),
])  # fmt: skip
def test_gate_and_up_rows_in_one_matrix_tile(kernel_backend: Any, format: str, outputs: int, columns: int) -> None:
    """Mixed tiles of eight outputs, the last cut short: the bits of gate and up tiles in turn."""
    rng = np.random.default_rng(outputs + columns)
    product = Product(format, 2 * outputs, 1280, columns, 1, "swiglu")
    weights, x = random_weights(rng, format, 2 * outputs, 1280), activations(rng, columns, 1280)
    plain = launch(kernel_backend, product, weights, x, Tile(2, 2, 1, 3, True, 0))
    assert_close_to_fp64(plain, reference(product, weights, x), "bf16")
    for i, tile in enumerate((Tile(1, 3, 2, 3, True, 1, mixed=True), Tile(1, 2, 1, 3, False, 0, mixed=True))):
        target = kernel_backend.caps(sms=1 + i)
        skip_large(product, tile, target)
        spec = spec_of(product, tile, target)
        assert np.array_equal(plain, launch_spec(kernel_backend, spec, product, weights, x, pad=8)), tile


def in_rows(spec: KernelSpec, product: Product, tile: Tile, target: DeviceCaps) -> KernelSpec:
    """The kernel of a product whose weight's shape allows units, for a weight in rows."""
    smem = int(spec.params["smem"]) - (8 * tile.stages * tile.warps_r * tile.warps_k if target.bulk_copy else 0)
    return replace(spec, entry=f"{spec.entry}_rows", smem=smem, params={**spec.params, "in_units": False, "smem": smem})


@pytest.mark.parametrize("format", [pytest.param(name, marks=[pytest.mark.slow] if name[:2] in ("Q4", "Q5") else [])
                                    for name in FORMATS])  # fmt: skip
def test_bits_do_not_depend_on_how_weights_lie(kernel_backend: Any, format: str) -> None:
    """In rows and in units, whole and half ones, one and several matrix tiles, bands that do not exist, warps past the end."""
    rng, n = np.random.default_rng(12), 256 if format == "NVFP4" else 96
    product = Product(format, n, 1280, 3, 1, "swiglu")
    weights, x = random_weights(rng, format, n, 1280), activations(rng, 3, 1280)
    mixed = Tile(1, 3, 2, 2, True, 1, mixed=True)
    target = kernel_backend.caps(sms=1)
    assert product.in_units and fits(product, mixed, target)
    spec = in_rows(spec_of(product, mixed, target), product, mixed, target)
    rows = launch_spec(kernel_backend, spec, product, weights, x, pad=8, as_units=False)
    assert_close_to_fp64(rows, reference(product, weights, x), "bf16")
    for tile in (mixed, Tile(4, 1, 2, 2, True, 1), Tile(1, 4, 1, 3, False, 1), Tile(4, 2, 1, 3, False, 1)):
        if fits(product, tile, target):
            found = launch_spec(kernel_backend, spec_of(product, tile, target), product, weights, x, pad=8)
            assert np.array_equal(rows, found), tile


@pytest.mark.parametrize("columns", [1, 3, 8])
def test_norm_prologue(kernel_backend: Any, columns: int) -> None:
    """The fused norm gives the bits of the stand-alone norm followed by the product."""
    rng = np.random.default_rng(7)
    product = Product("NVFP4", 256, 640, columns, 1, "swiglu", norm=True)
    weights, x = random_weights(rng, "NVFP4", 256, 640), activations(rng, columns, 640)
    norm_w = to_bf16(rng.standard_normal(640) / 4)
    kept = poisoned((columns, 640))
    fused = launch(kernel_backend, replace(product, keep=True), weights, x, norm_w=norm_w, normed=kept)
    assert np.array_equal(fused, launch(kernel_backend, product, weights, x, norm_w=norm_w))
    normed = normalised(kernel_backend, x, norm_w)
    plain = replace(product, norm=False)
    assert np.array_equal(kept, normed)
    assert np.array_equal(fused, launch(kernel_backend, plain, weights, normed))
    assert_close_to_fp64(fused, reference(plain, weights, normed), "bf16")


@pytest.mark.parametrize("product, tile", [
    (Product("NVFP4", 512, 640, 3, 1, "swiglu"), Tile(2, 2, 1, 3, True, 1)),
    (Product("NVFP4", 128, 1280, 2), Tile(1, 2, 2, 3, True, 1)),
    (Product("Q5G64_F16S", 128, 1280, 16), Tile(1, 4, 2, 3, False, 1)),
    (Product("W8G32_F16S", 64, 1280, 8), Tile(1, 1, 2, 3, False, 1)),
    (Product("FP8_E4M3FN_ROW_BF16S", 48, 2560, 2, 2), Tile(1, 2, 2, 3, True, 0, split=True)),
    (Product("FP8_E4M3FN_ROW_BF16S", 48, 2560, 2, 2), Tile(1, 2, 2, 3, True, 0, split=True, clustered=True)),
    (Product("BF16", 80, 1280, 9, 2), Tile(2, 2, 1, 3, False, 0, split=True, clustered=True)),
    (Product("NVFP4", 128, 1280, 2), Tile(1, 2, 2, 3, True, 1, claimed=True)),
    (Product("Q4G64_F16S", 256, 640, 1, 1, "swiglu"), Tile(1, 2, 1, 4, True, 1, mixed=True, claimed=True)),
    (Product("NVFP4", 128, 1280, 2), Tile(1, 2, 2, 5, True, 1, primed=2)),
    (Product("NVFP4", 128, 1280, 20), Tile(1, 4, 1, 3, False, 1, warpgroup=True)),
    (Product("Q6G64_F16S", 160, 2560, 1), Tile(2, 2, 4, 2, True, 1)),
])  # fmt: skip
def test_no_race(product: Product, tile: Tile) -> None:
    """Any order of warps and any landing time of the copies gives the same bits (emulator only)."""
    rng = np.random.default_rng(8)
    weights = random_weights(rng, product.format, product.n, product.k)
    x = activations(rng, product.columns, product.k)
    target = EmulatorLauncher().caps(sms=2)
    if not fits(product, tile, target):
        pytest.skip(f"{tile} does not fit {target.arch}")
    spec = spec_of(product, tile, target)
    run = under_schedules(lambda seed: [launch_spec(EmulatorLauncher(seed), spec, product, weights, x)])
    assert_close_to_fp64(run[0], reference(product, weights, x), "bf16")


# ---- selection ---------------------------------------------------------------------------------------------------


def test_slices_depend_on_k_of_one_segment() -> None:
    assert [slices_of(k) for k in (128, 640, 1280, 3072, 5120, 6144, 8704, 17408)] == [1, 1, 2, 4, 8, 8, 4, 8]
    for chunks in range(1, 300):  # equal slices: warps that claim tiles must come to the end of one in the same round
        assert chunks % slices_of(128 * chunks) == 0 and slices_of(128 * chunks) == slices_of(128 * chunks - 8)


@pytest.mark.parametrize("arch", ["sm_75", "sm_86", "sm_90a", pytest.param("sm_80", marks=pytest.mark.slow),
                                  pytest.param("sm_120a", marks=pytest.mark.slow)])  # fmt: skip
def test_a_tile_fits_every_production_shape(arch: str) -> None:
    target = caps(arch)
    shapes = [(34816, 5120, 1, "swiglu"), (5120, 17408, 2, "residual"), (5120, 6144, 2, "residual"), (16384, 5120, 1, "store"),
              (248320, 5120, 1, "store")]  # fmt: skip
    for format in ("BF16", "NVFP4", "Q5G64_F16S"):
        for n, k, segments, epilogue in shapes:
            for columns in (1, 8, 64):
                product = Product(format, n, k, columns, segments, epilogue)
                tile = choose(product, target)
                assert fits(product, tile, target)
                assert spec_of(product, tile, target).block <= 1024


def test_candidates_are_legal_and_distinct() -> None:
    product = Product("NVFP4", 34816, 5120, 4, 1, "swiglu")
    tiles = list(candidates(product, H200))
    assert len(tiles) == len(set(tiles)) > 5
    assert all(fits(product, tile, H200) for tile in tiles)


@pytest.mark.parametrize("arch", ["sm_75", "sm_86", "sm_90a", "sm_120a"])
@pytest.mark.parametrize("columns", [1, 8, 24])
def test_no_multiprocessor_holds_two_blocks_where_each_gets_one(arch: str, columns: int) -> None:
    """Two blocks on one multiprocessor take twice as long while another has none."""
    target = caps(arch)
    alone = 0
    shapes = (("NVFP4", 5120, 17408, 2), ("Q4G64_F16S", 5120, 6144, 2), ("FP8_E4M3FN_ROW_BF16S", 8192, 5120, 1))
    for format, n, k, segments in shapes:
        product = Product(format, n, k, columns, segments)
        for tile in islice(candidates(product, target), 60):
            spec = spec_of(product, tile, target)
            if spec.grid[0] <= target.sms:
                alone += 1
                assert 2 * (spec.smem + BLOCK_RESERVED) > target.smem_sm and spec.smem <= target.smem_block, tile
    assert alone > 0


def test_clusters_are_the_segments_of_a_tile() -> None:
    """A target without clusters, blocks of several tiles, blocks of columns and more segments than blocks are refused."""
    product, tile = Product("FP8_E4M3FN_ROW_BF16S", 96, 2560, 1, 2), Tile(1, 1, 1, 3, True, 0, split=True, clustered=True)
    assert fits(product, tile, H200) and not fits(product, tile, caps("sm_86"))
    assert not fits(product, replace(tile, split=False), H200)
    assert not fits(product, replace(tile, blocks_per_sm=1), H200)
    for other in (replace(product, columns=40), replace(product, segments=10)):
        streamed = replace(tile, resident=False)
        assert fits(other, replace(streamed, clustered=False), H200) and not fits(other, streamed, H200)
    with pytest.raises(IRError, match="clustered=True.* does not fit sm_86"):
        spec_of(product, tile, caps("sm_86"))


@pytest.mark.parametrize("format, k", [("NVFP4", 17408), ("FP8_E4M3FN_ROW_BF16S", 6144)])
@pytest.mark.parametrize("columns", [1, 4, 8])
def test_clusters_are_among_the_first_candidates(format: str, k: int, columns: int) -> None:
    product = Product(format, 5120, k, columns, 2, "residual")
    assert sum(tile.clustered for tile in islice(candidates(product, H200), 12)) >= 3
    assert not any(tile.clustered for tile in islice(candidates(product, caps("sm_86")), 40))


def linear_op(kind: str = "linear", offset: int = 0, k: int = 256, **attrs: Any) -> tuple[Op, dict[str, TensorType]]:
    types = {"x": TensorType((2, k), "bf16"), "w": TensorType((128, k), "u8"), "y": TensorType((2, 128), "bf16")}
    inputs = {"x": Ref("h", offset, k), "w": Ref("w")}
    return Op(kind, inputs, {"y": Ref("y")}, attrs=attrs or {"segments": 1, "f32": False}), types


def test_spec_names_its_kernel_and_arguments() -> None:
    op, types = linear_op()
    spec = linear_spec(op, types, "Q4G64_F16S", 256, H200)
    assert spec.entry == "linear_q4g64_n128_k256_c2_sm90a"
    assert spec.args == ("x", "x_stride", "w_codes", "w_high", "w_scales", "w_divisor", "y", "y_stride", "columns")
    assert spec.scalars == {"columns": 2}
    norm = Op("rmsnorm", {"x": Ref("x"), "w": Ref("nw")}, {"y": Ref("h")}, attrs={"eps": EPS})
    fused = linear_spec(op, types, "Q4G64_F16S", 256, H200, norm)
    assert fused.entry == "linear_q4g64_n128_k256_c2_norm_sm90a"
    assert fused.args[6] == "norm_w" and fused.args[-1] == "eps" and fused.scalars["eps"] == EPS


@pytest.mark.parametrize("change, arch, message", [
    ({"format": "I32"}, "sm_90a", "weights in I32"),
    ({"columns": 65}, "sm_90a", "65 columns"),
    ({"k": 250}, "sm_90a", "K = 250 in 1 segments"),
    ({"k": 384, "segments": 2, "format": "Q4G64_F16S"}, "sm_90a", "multiples of 128"),
    ({"k": 1280, "segments": 4, "format": "BF16"}, "sm_90a", "in units needs multiples of 128"),
    ({"n": 192}, "sm_90a", "outputs in multiples of 128"),
    ({"n": 128, "epilogue": "swiglu"}, "sm_90a", "outputs in multiples of 128"),
    ({"n": 7, "epilogue": "swiglu", "format": "BF16"}, "sm_90a", "7 rows of gate and up"),
])  # fmt: skip
def test_what_cannot_be_computed_is_refused(change: dict[str, Any], arch: str, message: str) -> None:
    product = replace(Product("NVFP4", 128, 256, 1), **change)
    assert message in str(problem(product))
    with pytest.raises(IRError, match=message):
        spec_of(product, Tile(1, 1, 1, 3, True, 0), caps(arch))


def test_misaligned_activations_are_refused() -> None:
    op, types = linear_op(offset=4)
    with pytest.raises(IRError, match="multiples of 8"):
        linear_spec(op, types, "BF16", 512, H200)
    op, types = linear_op()
    with pytest.raises(IRError, match="multiples of 8"):
        linear_spec(op, types, "BF16", 258, H200)


def assert_no_local_memory(product: Product, arch: str, tile: Tile | None = None) -> None:
    target = caps(arch)
    spec = spec_of(product, tile or choose(product, target), target, EPS)
    used = compile_source(spec.entry, render(spec.template, spec.entry, spec.params), arch).resources
    assert (used.stack, used.spill_stores, used.spill_loads, used.local) == (0, 0, 0, 0), (spec.entry, used)
    assert used.static_smem + spec.smem <= target.smem_block


@pytest.mark.parametrize("format", FORMATS)
def test_no_local_memory(format: str) -> None:
    assert_no_local_memory(Product(format, 34816, 5120, 8, 1, "swiglu"), "sm_90a")
    assert_no_local_memory(Product(format, 5120, 17408, 1, 2, "residual"), "sm_86")


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_no_local_memory_in_clusters(arch: str) -> None:
    for format, k, columns in (("NVFP4", 17408, (1,)), ("FP8_E4M3FN_ROW_BF16S", 6144, (1, 4, 8))):
        for count in columns:
            product = Product(format, 5120, k, count, 2, "residual")
            tile = next(tile for tile in candidates(product, caps(arch)) if tile.clustered)
            assert_no_local_memory(product, arch, tile)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("columns", BUCKETS)
@pytest.mark.parametrize("format", FORMATS)
def test_no_local_memory_anywhere(format: str, columns: int, arch: str) -> None:
    assert_no_local_memory(Product(format, 34816, 5120, columns, 1, "swiglu"), arch)
    assert_no_local_memory(Product(format, 5120, 17408, columns, 2, "residual"), arch)
    if columns <= 8:
        assert_no_local_memory(Product(format, 16384, 5120, columns, norm=True), arch)
