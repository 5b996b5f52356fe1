"""Two products of the same activations in one kernel: each against FP64, and with the bits of a kernel of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compiler.emit.arch import caps
from compiler.emit.render import render
from compiler.ir.types import IRError
from compiler.kernels import linear_columns
from compiler.kernels.linear_columns import Product, Tile, best_tile, choose, fits, problem, spec_of, tiles_of
from tests.emulator.harness import assert_close_to_fp64, poisoned
from tests.kernels.encoded_weights import Weights, random_weights
from tests.kernels.test_linear_columns import EPS, H200, Array, activations, launch, normalised, reference, skip_large

Q4, Q5, Q6 = "Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S"


def launch_two(backend: Any, product: Product, weights: tuple[Weights, Weights], x: Array, tile: Tile | None = None,
               norm_w: Array | None = None, normed: Array | None = None, pad: int = 8) -> tuple[Array, Array]:  # fmt: skip
    """Both results of one launch; ``pad`` more elements per row of each, checked to be untouched."""
    target = backend.caps()
    if tile:
        skip_large(product, tile, target)
    spec = spec_of(product, tile or choose(product, target), target, EPS)
    results = [poisoned((product.columns, part.n + pad), "bf16") for part in product.parts]
    values: dict[str, Any] = {"x": x, "x_stride": x.shape[1], "norm_w": norm_w, "normed": normed, **spec.scalars}
    for suffix, of, y in zip(("", "2"), weights, results, strict=True):
        values |= {f"y{suffix}": y, f"y{suffix}_stride": y.shape[1]}
        values |= zip((f"w{suffix}_{plane}" for plane in ("codes", "high", "scales", "divisor")), of.pointers(), strict=True)
    backend.launch(spec, render(spec.template, spec.entry, spec.params), [values[name] for name in spec.args])
    for part, y in zip(product.parts, results, strict=True):
        assert np.all(y[:, part.n :].view(np.uint8) == 0xFF)
    return results[0][:, : product.n], results[1][:, : product.parts[1].n]


def random_two(rng: np.random.Generator, product: Product) -> tuple[Weights, Weights]:
    first, second = (random_weights(rng, part.format, part.n, part.k) for part in product.parts)
    return first, second


@pytest.mark.parametrize("formats", [(Q4, Q5), (Q5, Q4), (Q4, Q4), (Q6, Q5), (Q4, Q6)])
@pytest.mark.parametrize("columns", [1, 3, 8])
def test_two_products_have_the_bits_of_each_alone(kernel_backend: Any, formats: tuple[str, str], columns: int) -> None:
    rng = np.random.default_rng(columns)
    product = Product(formats[0], 64, 1280, columns, second=(formats[1], 96))
    weights, x = random_two(rng, product), activations(rng, columns, 1280)
    for part, of, y in zip(product.parts, weights, launch_two(kernel_backend, product, weights, x), strict=True):
        assert_close_to_fp64(y, reference(part, of, x), "bf16")
        assert np.array_equal(y, launch(kernel_backend, part, of, x))


@pytest.mark.parametrize("tile", [
    Tile(1, 1, 1, 3, True, 1), Tile(1, 3, 2, 4, True, 1), Tile(2, 2, 2, 2, True, 1), Tile(2, 1, 2, 3, True, 0),
    Tile(1, 2, 1, 3, True, 2, release="end"),
], ids=lambda tile: f"{tile.mtiles}x{tile.warps_r}x{tile.warps_k}")  # fmt: skip
def test_every_way_to_deal_tiles(kernel_backend: Any, tile: Tile) -> None:
    """Teams with tiles of the first product, of the second and of both; copies of the second while the first is multiplied."""
    rng = np.random.default_rng(7)
    for rows in ((32, 160), (160, 32), (96, 96)):
        product = Product(Q4, rows[0], 1280, 2, second=(Q5, rows[1]))
        assert tiles_of(product, tile) == sum(-(-n // (16 * tile.mtiles)) for n in rows)
        weights, x = random_two(rng, product), activations(rng, 2, 1280)
        for part, of, y in zip(product.parts, weights, launch_two(kernel_backend, product, weights, x, tile), strict=True):
            assert_close_to_fp64(y, reference(part, of, x), "bf16")


@pytest.mark.parametrize("keep", [False, True])
def test_norm_in_front(kernel_backend: Any, keep: bool) -> None:
    rng = np.random.default_rng(3)
    product = Product(Q4, 64, 1280, 3, norm=True, keep=keep, second=(Q5, 32))
    weights, x, norm_w = random_two(rng, product), activations(rng, 3, 1280), activations(rng, 1, 1280)[0]
    h = normalised(kernel_backend, x, norm_w)
    kept = poisoned((3, 1280), "bf16") if keep else None
    results = launch_two(kernel_backend, product, weights, x, norm_w=norm_w, normed=kept)
    for part, of, y in zip(product.parts, weights, results, strict=True):
        plain = replace(part, norm=False, keep=False)
        assert_close_to_fp64(y, reference(plain, of, h), "bf16")
        assert np.array_equal(y, launch(kernel_backend, plain, of, h))
    assert kept is None or np.array_equal(kept, h)


@pytest.mark.parametrize("change, message", [
    ({"second": ("NVFP4", 128)}, "4 to 6 bits"),
    ({"second": ("W8G32_F16S", 64)}, "4 to 6 bits"),
    ({"format": "BF16"}, "4 to 6 bits"),
    ({"epilogue": "residual"}, "stored as they are"),
    ({"segments": 2}, "stored as they are"),
    ({"second": (Q5, 40)}, "lie in units"),
    ({"n": 24}, "lie in units"),
    ({"columns": 9}, "9 columns; a block has 8"),
])  # fmt: skip
def test_what_two_products_cannot_be(change: dict[str, Any], message: str) -> None:
    product = replace(Product(Q4, 64, 1280, 1, second=(Q5, 64)), **change)
    assert message in str(problem(product))
    with pytest.raises(IRError, match=message):
        spec_of(product, Tile(1, 1, 1, 3, True, 1), H200)


def test_tiles_of_two_products_hold_their_activations() -> None:
    product, tile = Product(Q4, 4096, 5120, 1, second=(Q5, 12288)), Tile(1, 2, 8, 3, True, 1)
    assert fits(product, tile, H200)
    assert not fits(product, replace(tile, resident=False), H200) and not fits(product, replace(tile, claimed=True), H200)
    with pytest.raises(IRError, match="no tile fits"):
        choose(replace(product, columns=8), caps("sm_86"))


def test_tiles_are_weighed_once_even_where_none_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer asks for the same product."""
    weighed: list[Product] = []
    monkeypatch.setattr(linear_columns, "_tiles", lambda product, target: weighed.append(product) or iter(()))
    for _ in range(3):
        with pytest.raises(IRError, match="no tile fits"):
            choose(Product(Q4, 4096, 5120, 7, second=(Q5, 12288)), replace(H200, sms=1))
    assert len(weighed) == 1
    best_tile.cache_clear()


def test_one_key_and_one_kernel_for_both() -> None:
    product = Product(Q4, 4096, 5120, 1, norm=True, second=(Q5, 12288))
    assert product.key == "q4g64+q5g64 4096+12288x5120 c1 s1 store+norm"
    assert spec_of(product, choose(product, H200), H200).entry == "linear_q4g64_n4096_q5g64_n12288_k5120_c1_norm_sm90a"
