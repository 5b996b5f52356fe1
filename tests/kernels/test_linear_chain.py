"""Chains of decode products: every link against FP64, and the bits of the products in kernels of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from compiler.emit.arch import caps
from compiler.emit.nvrtc import compile_source
from compiler.emit.render import kernel_source
from compiler.ir.op import Op
from compiler.ir.types import IRError, Ref, TensorType
from compiler.kernels.control import rmsnorm_spec
from compiler.kernels.linear_chain import (
    ChainTile,
    Link,
    LinkTile,
    candidates,
    chain_spec,
    chainable,
    choose,
    fits,
    shared_bytes,
)
from compiler.kernels.linear_columns import FORMATS, Product
from compiler.kernels.spec import DeviceCaps, KernelSpec
from tests.emulator.harness import assert_close_to_fp64, from_bf16, poisoned, to_bf16, under_schedules
from tests.gpu_launch import EmulatorLauncher
from tests.kernels.encoded_weights import Weights, random_weights
from tests.kernels.test_linear_columns import activations, launch, reference

Array = np.ndarray[Any, Any]
EPS = 1e-6


def layer(hidden: int, attention: int, inner: int, rows: tuple[int, ...], columns: int, formats: tuple[str, ...]) -> list[Link]:
    """Output product, norm, gate and up, down, norm, the projections of the next layer."""
    out, up, down, *heads = formats
    links = [
        Link(Product(out, hidden, attention, columns, 2, "residual"), "before"),
        Link(Product(up, 2 * inner, hidden, columns, 1, "swiglu", True), "chain"),
        Link(Product(down, hidden, inner, columns, 2, "residual"), "chain"),
    ]
    for i, (n, format) in enumerate(zip(rows, heads, strict=True)):
        links.append(Link(Product(format, n, hidden, columns, 1, "store", True), "same" if i else "chain", keep=i == 0))
    return links


@dataclass
class Case:
    """Operands of a chain and what a launch wrote."""

    links: list[Link]
    weights: list[Weights]
    norms: list[Array | None]
    x: Array
    residual: Array

    @classmethod
    def draw(cls, links: list[Link], seed: int) -> Case:
        rng = np.random.default_rng(seed)
        products = [link.product for link in links]
        norms = [to_bf16(rng.standard_normal(p.k) / 4) if p.norm else None for p in products]
        for i, link in enumerate(links):
            if link.source == "same":
                norms[i] = norms[i - 1]
        added = next(p.outputs for p in products if p.epilogue == "residual")
        return cls(links, [random_weights(rng, p.format, p.n, p.k) for p in products], norms,
                   activations(rng, products[0].columns, products[0].k),
                   activations(rng, products[0].columns, added))  # fmt: skip

    def launch(self, backend: Any, spec: KernelSpec, repeats: int = 1) -> tuple[list[Array], list[Array | None]]:
        """Output and kept norm of every link."""
        values: dict[str, Any] = dict(spec.scalars)
        outputs: list[Array] = []
        kept: list[Array | None] = []
        residual = self.residual
        for i, (link, weights) in enumerate(zip(self.links, self.weights, strict=True)):
            p = link.product
            y = poisoned((p.columns, p.outputs), "bf16")
            x = self.x if i == 0 else values[f"l{i - 1}_x"] if link.source == "same" else outputs[-1]
            normed = poisoned((p.columns, p.k), "bf16") if link.keep else None
            values |= {f"l{i}_x": x, f"l{i}_x_stride": p.k, f"l{i}_norm_w": self.norms[i], f"l{i}_normed": normed,
                       f"l{i}_y": y, f"l{i}_y_stride": p.outputs}  # fmt: skip
            values |= {f"l{i}_w_{name}": plane for name, plane in
                       zip(("codes", "high", "scales", "divisor"), weights.pointers(), strict=True)}  # fmt: skip
            if p.epilogue == "residual":
                values |= {f"l{i}_residual": residual, f"l{i}_residual_stride": p.outputs}
                residual = y
            outputs.append(y)
            kept.append(normed)
        for name, nbytes in spec.scratch.items():
            values[name] = np.full(nbytes, 0 if name in spec.zeroed else 0xFF, np.uint8)
        backend.launch(spec, kernel_source(spec, backend.caps()), [values[name] for name in spec.args], repeats)
        for name in spec.zeroed - {"barrier"}:
            assert not values[name].any(), f"{name} is not left zero"
        barriers = sum(link.source == "chain" for link in self.links)
        assert values["barrier"].view(np.uint64)[0] == spec.grid[0] * barriers * repeats
        return outputs, kept

    def verify(self, backend: Any, outputs: list[Array], kept: list[Array | None]) -> None:
        """Every link against FP64 of its own operands, and bit for bit against the kernels that compute it alone."""
        residual, before = self.residual, self.x
        for i, link in enumerate(self.links):
            p = link.product
            x = (self.x if i == 0 else outputs[i - 1]) if link.source != "same" else before
            before = x
            normed = self.normed(backend, x, i) if p.norm else x
            if (stored := kept[i]) is not None:
                assert np.array_equal(stored, normed)
            plain = replace(p, norm=False)
            added = residual if p.epilogue == "residual" else None
            assert_close_to_fp64(outputs[i], reference(plain, self.weights[i], normed, added), "bf16")
            assert np.array_equal(outputs[i], launch(backend, plain, self.weights[i], normed, residual=added)), i
            if p.epilogue == "residual":
                residual = outputs[i]

    def normed(self, backend: Any, x: Array, i: int) -> Array:
        columns, width = x.shape
        types = {name: TensorType((columns, width), "bf16") for name in ("x", "y")}
        op = Op("rmsnorm", {"x": Ref("x"), "w": Ref("w")}, {"y": Ref("y")}, attrs={"eps": EPS})
        spec = rmsnorm_spec(op, types, backend.caps())
        y = poisoned((columns, width), "bf16")
        backend.launch(spec, kernel_source(spec, backend.caps()), [x, width, self.norms[i], y, width, EPS])
        x64, w64 = from_bf16(x).astype(np.float64), from_bf16(self.norms[i]).astype(np.float64)
        assert_close_to_fp64(y, x64 / np.sqrt((x64**2).mean(1, keepdims=True) + EPS) * (1 + w64), "bf16")
        return y


def small(target: DeviceCaps, sms: int) -> DeviceCaps:
    return replace(target, sms=min(target.sms, sms))


def check(backend: Any, links: list[Link], tile: ChainTile, seed: int, sms: int = 4, repeats: int = 1) -> list[Array]:
    case = Case.draw(links, seed)
    spec = chain_spec(links, tile, small(backend.caps(), sms), EPS)
    outputs, kept = case.launch(backend, spec, repeats)
    case.verify(backend, outputs, kept)
    return outputs


NVFP4 = ("FP8_E4M3FN_ROW_BF16S", "NVFP4", "NVFP4", "FP8_E4M3FN_ROW_BF16S")
INT = ("Q5G64_F16S", "Q4G64_F16S", "Q5G64_F16S", "Q4G64_F16S", "Q5G64_F16S")


@pytest.mark.parametrize("columns", [1, 2, 3, 8])
def test_a_layer_of_nvfp4(kernel_backend: Any, columns: int) -> None:
    links = layer(256, 384, 384, (208,), columns, NVFP4)
    tile = ChainTile(4, 3, (LinkTile(1, 1, 2), LinkTile(2, 1, 1), LinkTile(2, 1, 2), LinkTile(1, 1, 1)))
    check(kernel_backend, links, tile, 1)


@pytest.mark.parametrize("columns", [1, 5])
def test_a_layer_of_integers(kernel_backend: Any, columns: int) -> None:
    """Two projections that share their activations; several slices to a segment."""
    links = layer(640, 2560, 1280, (40, 72), columns, INT)
    tile = ChainTile(2, 4, (LinkTile(1, 2, 1), LinkTile(2, 1, 1), LinkTile(1, 1, 2), LinkTile(1, 1, 1), LinkTile(1, 1, 1)))
    check(kernel_backend, links, tile, 2, repeats=3)


@pytest.mark.parametrize("formats", [
    ("BF16", "BF16", "BF16", "NVFP4", "BF16"),
    ("W8G32_F16S", "W8G32_F16S", "W8G32_F16S", "Q6G64_F16S", "W8G32_F16S"),
    ("Q6G64_F16S", "FP8_E4M3FN_ROW_BF16S", "Q6G64_F16S", "BF16", "Q6G64_F16S"),
])  # fmt: skip
def test_formats_that_order_activations_differently(kernel_backend: Any, formats: tuple[str, ...]) -> None:
    links = layer(256, 256, 256, (128, 48), 2, formats)
    tile = ChainTile(2, 3, (LinkTile(1, 1, 1), LinkTile(2, 1, 1), LinkTile(1, 2, 1), LinkTile(1, 1, 1), LinkTile(1, 1, 1)))
    assert fits(links, tile, small(kernel_backend.caps(), 4))
    check(kernel_backend, links, tile, 3)


def two(format: str, k: int, columns: int) -> list[Link]:
    """Two products with 2 x 2 slices of K."""
    return [Link(Product(format, 2 * k, 256, columns, 1, "swiglu"), "before"),
            Link(Product(format, 256, k, columns, 2, "residual"), "chain")]  # fmt: skip


@pytest.mark.parametrize("format", ["NVFP4", "Q5G64_F16S", "FP8_E4M3FN_ROW_BF16S"])
def test_bits_do_not_depend_on_the_tile(kernel_backend: Any, format: str) -> None:
    """Whole segments, parts of a segment and single slices to a group; teams of one to four warps; odd numbers of blocks."""
    links = two(format, 2432 if format == "NVFP4" else 2560, 3)  # 2432: the last chunk of a segment is cut short
    case = Case.draw(links, 4)
    first = None
    for tile, sms in [
        (ChainTile(4, 3, (LinkTile(2, 1, 1), LinkTile(1, 4, 1))), 5),
        (ChainTile(4, 4, (LinkTile(2, 1, 1), LinkTile(1, 2, 2))), 6),
        (ChainTile(2, 3, (LinkTile(2, 1, 1), LinkTile(2, 1, 4))), 4),
        (ChainTile(8, 3, (LinkTile(4, 1, 1), LinkTile(1, 1, 4))), 132),
    ]:
        spec = chain_spec(links, tile, small(kernel_backend.caps(), sms), EPS)
        outputs, kept = case.launch(kernel_backend, spec)
        if first is None:
            case.verify(kernel_backend, outputs, kept)
            first = outputs
        assert all(np.array_equal(a, b) for a, b in zip(first, outputs, strict=True)), tile


def test_a_warp_without_work_and_a_ring_longer_than_a_link(kernel_backend: Any) -> None:
    """More warps than items, fewer chunks than stages: the ring carries over links that a warp has no part in."""
    links = layer(128, 256, 128, (16,), 1, NVFP4)
    tile = ChainTile(6, 8, (LinkTile(1, 1, 2), LinkTile(2, 1, 1), LinkTile(1, 1, 1), LinkTile(1, 1, 1)))
    check(kernel_backend, links, tile, 5, sms=6)


@pytest.mark.parametrize("groups", [1, 4])
def test_no_race(groups: int) -> None:
    """Any order of blocks, warps and lanes and any landing time of the copies gives the same bits (emulator only)."""
    links = two("FP8_E4M3FN_ROW_BF16S", 2560, 2)
    case = Case.draw(links, 6)
    spec = chain_spec(links, ChainTile(2, 3, (LinkTile(2, 1, 1), LinkTile(1, 1, groups))), caps("sm_90a", sms=4), EPS)
    outputs = under_schedules(lambda seed: case.launch(EmulatorLauncher(seed), spec)[0])
    case.verify(EmulatorLauncher(), outputs, [None, None])


# ---- selection ---------------------------------------------------------------------------------------------------


def production(columns: int, format: str) -> list[Link]:
    if format == "nvfp4":
        return layer(5120, 6144, 17408, (16384,), columns, NVFP4)
    return layer(5120, 6144, 17408, (4096, 12288), columns, INT)


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_120a"])
@pytest.mark.parametrize("columns", [1, 4, 8])
def test_production_layers_have_a_tile_and_no_spills(arch: str, columns: int) -> None:
    target = caps(arch)
    for format in ("nvfp4", "int"):
        links = tuple(production(columns, format))
        tile = choose(links, target)
        if tile is None:  # 99 KiB do not hold eight columns of activations beside a ring: the products keep their own kernels
            assert target.smem_block < 128 << 10
            continue
        spec = chain_spec(links, tile, target, EPS)
        assert spec.grid[0] <= target.sms and spec.smem == shared_bytes(links, tile) <= target.smem_block
        used = compile_source(spec.entry, kernel_source(spec, target), arch).resources
        assert (used.stack, used.spill_stores, used.spill_loads, used.local) == (0, 0, 0, 0), (spec.entry, used)


def test_candidates_are_legal_and_distinct() -> None:
    target = caps("sm_90a")
    tiles = candidates(production(1, "nvfp4"), target)
    assert len(tiles) == len(set(tiles)) > 5
    assert all(fits(production(1, "nvfp4"), tile, target) for tile in tiles)


def test_what_cannot_be_a_link_is_refused() -> None:
    assert chainable(Product("NVFP4", 128, 256, 8), caps("sm_90a"))
    assert not chainable(Product("NVFP4", 128, 256, 9), caps("sm_90a"))
    assert not chainable(Product("NVFP4", 128, 256, 1), caps("sm_75"))
    assert not chainable(Product("I32", 128, 256, 1), caps("sm_90a"))
    links = two("NVFP4", 2560, 1)
    for warps, first, second in [(4, (1, 1, 1), (1, 1, 1)), (4, (2, 3, 1), (1, 1, 1)), (64, (2, 1, 1), (1, 1, 1)),
                                 (4, (2, 1, 1), (1, 1, 3))]:  # fmt: skip
        tile = ChainTile(warps, 3, (LinkTile(*first), LinkTile(*second)))
        with pytest.raises(IRError, match="does not fit"):
            chain_spec(links, tile, caps("sm_90a"), EPS)


def test_every_format_can_be_a_link() -> None:
    assert all(chainable(Product(format, 128, 256, 1), caps("sm_90a")) for format in FORMATS)
