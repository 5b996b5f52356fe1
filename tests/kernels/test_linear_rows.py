"""Row products against FP64: every format, store and tile; odd counts, ragged shapes, poisoned outputs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compiler.emit.arch import caps, supported
from compiler.emit.nvrtc import compile_source
from compiler.emit.render import render
from compiler.ir.types import IRError
from compiler.kernels.linear_rows import FORMATS, STORES, Tile, choose, linear_rows, shared_bytes, tiles
from compiler.kernels.spec import DeviceCaps, KernelSpec
from tests.emulator.harness import assert_close_to_fp64, decode, encode, error_ratio, from_bf16, poisoned
from tests.kernels.encoded_weights import Weights, random_weights

Array = np.ndarray[Any, Any]


def target(backend: Any, family: str) -> DeviceCaps:
    """Capabilities of the backend's device, without warpgroup products for the portable family."""
    found = backend.caps()
    if family == "wgmma" and not found.wgmma:
        pytest.skip(f"{backend.arch} has no warpgroup products")
    return found if family == "wgmma" else replace(found, wgmma=False)


def pick(fmt: str, store: str, device: DeviceCaps, tokens: int) -> Tile:
    """The tile of this many tokens with the fewest rows."""
    found = [t for t in tiles(fmt, store, device) if t.tokens == tokens]
    if not found and device.smem_block < 99 << 10:
        pytest.skip(f"no tile of {tokens} tokens fits the {device.smem_block} bytes of shared memory of {device.arch}")
    return min(found, key=lambda t: t.rows)


def expected(x: Array, weights: Weights, store: str, residual: Array | None) -> Array:
    """float64 rows of y from bf16 words of x."""
    y = from_bf16(x).astype(np.float64) @ weights.values.T
    if store == "swiglu":
        gate, up = np.split(y, 2, axis=1)
        return gate / (1 + np.exp(-gate)) * up
    return y if residual is None else y + from_bf16(residual)


def run(backend: Any, spec: KernelSpec, weights: Weights, store: str, rows: int, count: int, seed: int) -> None:
    """Launch with strided, poisoned operands and compare: the first ``count`` rows within bounds, the rest untouched."""
    rng = np.random.default_rng(seed)
    n, k = weights.values.shape
    outputs = n // 2 if store == "swiglu" else n
    scale = 1 / np.sqrt(np.mean(weights.values**2) * k)  # sums of unit size: SwiGLU then bends
    x = poisoned((rows, k + 8))
    x[:count, :k] = encode(rng.standard_normal((count, k)) * scale, "bf16")
    y = poisoned((rows, outputs + 16), "f32" if store == "f32" else "bf16")
    args: list[Any] = [x, x.shape[1], *weights.pointers()]
    residual = None
    if store == "residual":
        residual = poisoned((rows, outputs + 8))
        residual[:count] = encode(rng.standard_normal((count, outputs + 8)), "bf16")
        args += [residual, residual.shape[1]]
        residual = residual[:count, :outputs]
    args += [y, y.shape[1], np.array([count], np.int32)]
    backend.launch(spec, render(spec.template, spec.entry, spec.params), args)
    assert (y[count:].view(np.uint8) == 0xFF).all() and (y[:, outputs:].view(np.uint8) == 0xFF).all()
    if count == 0:
        return
    out, reference = y[:count, :outputs], expected(x[:count, :k], weights, store, residual)
    # Integer weights are rounded to bf16 on their way to the matrix cores, and nothing else but the output is.
    multiplied = weights
    if weights.format.endswith("_F16S"):
        multiplied = replace(weights, values=decode(encode(weights.values, "bf16"), "bf16"))
    close = expected(x[:count, :k], multiplied, store, residual)
    if store == "f32":
        assert np.isfinite(out).all()
        assert np.linalg.norm(out - close) < 2.0**-20 * np.linalg.norm(close)
        assert np.linalg.norm(out - reference) < 2.0**-9 * np.linalg.norm(reference)  # the size of a bf16 output's rounding
    else:
        assert_close_to_fp64(out, close, "bf16", factor=1.1, name=f"{spec.entry} rows {count}")
        ratio = error_ratio(out, reference, "bf16")
        assert ratio < 2.5, f"{spec.entry} rows {count}: L2 error is {ratio:.2f} x that of rounding the output"


@pytest.mark.parametrize("family, k", [("wgmma", 768), ("mma", 640), ("mma", 768),
                                       pytest.param("wgmma", 640, marks=pytest.mark.slow)])  # fmt: skip
@pytest.mark.parametrize("fmt", FORMATS)
def test_every_format(kernel_backend: Any, fmt: str, family: str, k: int) -> None:
    """Three stages' worth of steps and more, a whole number of tiles in n but not in rows; weights in rows and in units."""
    device = target(kernel_backend, family)
    weights = random_weights(np.random.default_rng(1), fmt, 128, k)
    spec = linear_rows(fmt, "bf16", 128, k, 64, device, pick(fmt, "bf16", device, 64))
    assert spec.params["in_units"] == (k == 768)
    run(kernel_backend, spec, weights, "bf16", 64, 50, seed=2)


@pytest.mark.parametrize("family", ["wgmma", "mma"])
@pytest.mark.parametrize(("fmt", "store"), [
    ("NVFP4", "swiglu"), ("NVFP4", "residual"), ("FP8_E4M3FN_ROW_BF16S", "swiglu"), ("FP8_E4M3FN_ROW_BF16S", "f32"),
    ("Q5G64_F16S", "residual"), ("Q4G64_F16S", "swiglu"), ("BF16", "residual"), ("BF16", "swiglu"),
])  # fmt: skip
def test_every_store(kernel_backend: Any, fmt: str, store: str, family: str) -> None:
    """Two row tiles; SwiGLU rows pair up across the halves of the matrix."""
    device = target(kernel_backend, family)
    weights = random_weights(np.random.default_rng(3), fmt, 256, 256)
    spec = linear_rows(fmt, store, 256, 256, 64, device, pick(fmt, store, device, 64))
    run(kernel_backend, spec, weights, store, 64, 64, seed=4)


@pytest.mark.parametrize("family", ["wgmma", "mma"])
@pytest.mark.parametrize(("fmt", "n", "k", "store"), [
    ("Q4G64_F16S", 176, 200, "swiglu"), ("Q6G64_F16S", 16, 200, "bf16"), ("W8G32_F16S", 144, 136, "residual"),
    ("BF16", 48, 200, "swiglu"), ("FP8_E4M3FN_ROW_BF16S", 80, 208, "f32"), ("NVFP4", 128, 64, "bf16"),
    ("Q5G64_F16S", 96, 256, "swiglu"), ("W8G32_F16S", 160, 256, "bf16"), ("FP8_E4M3FN_ROW_BF16S", 288, 256, "swiglu"),
])  # fmt: skip
def test_ragged_shapes(kernel_backend: Any, fmt: str, n: int, k: int, store: str, family: str) -> None:
    """Columns padded to 128 or cut inside a stage, rows cut inside a tile; in units too."""
    device = target(kernel_backend, family)
    weights = random_weights(np.random.default_rng(5), fmt, n, k)
    spec = linear_rows(fmt, store, n, k, 64, device, pick(fmt, store, device, 64))
    run(kernel_backend, spec, weights, store, 64, 17, seed=6)


@pytest.mark.parametrize("family", ["wgmma", "mma"])
@pytest.mark.parametrize("count", [0, 1, 64, 100, 128, 129, 250])
def test_counts(kernel_backend: Any, count: int, family: str) -> None:
    """The device-side count ends inside, at and past tiles; blocks past it do nothing."""
    device = target(kernel_backend, family)
    weights = random_weights(np.random.default_rng(7), "Q4G64_F16S", 128, 256)
    spec = linear_rows("Q4G64_F16S", "residual", 128, 256, 256, device, pick("Q4G64_F16S", "residual", device, 128))
    run(kernel_backend, spec, weights, "residual", 256, count, seed=count)


@pytest.mark.parametrize(("fmt", "tokens", "store"), [
    ("NVFP4", 256, "swiglu"), ("NVFP4", 352, "swiglu"), ("Q6G64_F16S", 352, "residual"), ("BF16", 352, "f32"),
    ("W8G32_F16S", 256, "bf16"),
])  # fmt: skip
def test_wide_warpgroup_tiles(kernel_backend: Any, fmt: str, tokens: int, store: str) -> None:
    device = target(kernel_backend, "wgmma")
    weights = random_weights(np.random.default_rng(8), fmt, 128, 384)
    spec = linear_rows(fmt, store, 128, 384, tokens + 33, device, pick(fmt, store, device, tokens))
    run(kernel_backend, spec, weights, store, tokens + 33, tokens + 20, seed=9)


@pytest.mark.parametrize(("family", "stages"), [("wgmma", 2), ("wgmma", 3), ("wgmma", 5), ("mma", 2), ("mma", 3)])
def test_schedules_agree(family: str, stages: int) -> None:
    """Any order of threads and of asynchronous copies gives the same bits."""
    from tests.emulator import toolchain
    from tests.emulator.emulator import compile_kernel, launch
    from tests.emulator.harness import under_schedules

    if reason := toolchain.missing_reason():
        pytest.skip(reason)
    device = replace(caps("sm_90a"), wgmma=family == "wgmma")
    tile = replace(pick("NVFP4", "bf16", device, 64), stages=stages)
    spec = linear_rows("NVFP4", "bf16", 128, 640, 64, device, tile)
    weights = random_weights(np.random.default_rng(10), "NVFP4", 128, 640)
    x = encode(np.random.default_rng(11).standard_normal((64, 640)), "bf16")
    kernel = compile_kernel(render(spec.template, spec.entry, spec.params), name=spec.entry)

    def once(seed: int) -> list[Array]:
        y = poisoned((64, 128))
        args = [x, 640, *weights.pointers(), y, 128, np.array([64], np.int32)]
        launch(kernel, spec.grid, spec.block, args, spec.smem, seed, programmatic=True, constants=(2, 3, 4, 5))
        return [y]

    under_schedules(once, range(6))


@pytest.mark.parametrize("arch", supported())
def test_choice_fits_every_target(arch: str) -> None:
    """Whatever is chosen stays inside the target's shared memory, for one and for several blocks per multiprocessor."""
    device = caps(arch)
    for fmt in FORMATS:
        for store in STORES:
            for n, k in ((34816, 5120), (5120, 17408), (1024, 256)):
                for rows in (16, 64, 128, 512, 1024):
                    tile = choose(fmt, store, n, k, rows, device)
                    used = shared_bytes(fmt, store, tile)
                    assert used <= device.smem_block and (used + 1024) * tile.blocks_per_sm <= device.smem_sm


@pytest.mark.parametrize("push", [None, 0], ids=["", "push"])
@pytest.mark.parametrize(("arch", "fmt", "store", "n", "k"), [
    ("sm_80", "Q6G64_F16S", "residual", 5120, 17408), ("sm_86", "BF16", "bf16", 14336, 5120),
    ("sm_89", "NVFP4", "swiglu", 34816, 5120), ("sm_120a", "W8G32_F16S", "f32", 5120, 6144),
    ("sm_90a", "NVFP4", "swiglu", 34816, 5120), ("sm_90a", "Q6G64_F16S", "residual", 5120, 17408),
    ("sm_90a", "W8G32_F16S", "residual", 5120, 17408), ("sm_90a", "BF16", "bf16", 14336, 5120),
    ("sm_90a", "NVFP4", "bf16", 5120, 8704), ("sm_90a", "BF16", "f32", 5120, 3072),
    ("sm_100a", "Q5G64_F16S", "bf16", 5120, 8704), ("sm_120a", "NVFP4", "bf16", 5120, 8704),
])  # fmt: skip
def test_no_spills(arch: str, fmt: str, store: str, n: int, k: int, push: int | None) -> None:
    """Production shapes keep accumulators in registers, and warpgroup products stay asynchronous; so where they send tiles."""
    if push is not None and store not in ("bf16", "f32"):
        pytest.skip("only partial sums are sent")
    spec = linear_rows(fmt, store, n, k, 1024, caps(arch), push=push)
    cubin = compile_source(spec.entry, render(spec.template, spec.entry, spec.params), arch)
    used = cubin.resources
    assert (used.stack, used.spill_stores, used.spill_loads, used.local) == (0, 0, 0, 0), spec.entry
    assert "serialized" not in cubin.log


def test_refusals() -> None:
    device = caps("sm_90a")
    with pytest.raises(IRError, match="n must be a multiple of 128"):
        linear_rows("NVFP4", "bf16", 130, 128, 64, device)
    with pytest.raises(IRError, match="k of 16"):
        linear_rows("FP8_E4M3FN_ROW_BF16S", "bf16", 128, 72, 64, device)
    with pytest.raises(IRError, match="unknown"):
        linear_rows("Q3G64", "bf16", 128, 128, 64, device)
    with pytest.raises(IRError, match="no tile fits the 32768 bytes of shared memory of sm_75"):
        linear_rows("BF16", "bf16", 128, 128, 64, replace(caps("sm_75"), smem_block=32768))
