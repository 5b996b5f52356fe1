"""Products on the emulator's race checker: what the lanes of a warp leave each other in shared memory is ordered."""

from __future__ import annotations

import numpy as np
import pytest

from compiler.emit.arch import caps
from compiler.kernels.linear_columns import Product, Tile, spec_of
from compiler.kernels.linear_rows import linear_rows
from compiler.kernels.spec import DeviceCaps
from tests.emulator import emulator
from tests.gpu_launch import EmulatorLauncher
from tests.kernels.encoded_weights import random_weights
from tests.kernels.test_linear_columns import activations, launch_spec
from tests.kernels.test_linear_rows import pick, run

pytestmark = pytest.mark.skipif(emulator.missing_reason() is not None, reason=str(emulator.missing_reason()))


class Checked(EmulatorLauncher):
    """Checked kernels as ``target`` has them."""

    def __init__(self, target: str) -> None:
        self.target = target
        super().__init__(seed=3, checked=True)

    def caps(self, sms: int | None = None) -> DeviceCaps:
        return caps(self.target, 2)


@pytest.mark.parametrize("target", ["sm_86", pytest.param("sm_90a", marks=pytest.mark.slow)])
@pytest.mark.parametrize("product, tile", [
    (Product("Q5G64_F16S", 32, 256, 17), Tile(1, 2, 1, 3, False, 1)),  # digits take the place of activations
    (Product("Q4G64_F16S", 32, 256, 1), Tile(1, 2, 1, 3, True, 1)),  # fewer bytes of scales than lanes copy
    (Product("NVFP4", 256, 256, 2, 1, "swiglu"), Tile(2, 1, 1, 3, True, 1)),
    (Product("W8G32_F16S", 24, 200, 1), Tile(1, 1, 1, 3, True, 1)),  # weights in rows
    (Product("FP8_E4M3FN_ROW_BF16S", 32, 2560, 1, 2), Tile(1, 2, 2, 3, True, 0, split=True)),
], ids=lambda value: value.kernel_format if isinstance(value, Product) else "")  # fmt: skip
def test_columns(product: Product, tile: Tile, target: str) -> None:
    rng, launcher = np.random.default_rng(1), Checked(target)
    weights, x = random_weights(rng, product.format, product.n, product.k), activations(rng, product.columns, product.k)
    launch_spec(launcher, spec_of(product, tile, launcher.caps()), product, weights, x)


@pytest.mark.parametrize("fmt, store, tokens, target", [
    ("Q5G64_F16S", "residual", 64, "sm_86"), ("BF16", "swiglu", 64, "sm_86"),
    pytest.param("Q5G64_F16S", "residual", 64, "sm_90a", marks=pytest.mark.slow),
    ("NVFP4", "swiglu", 352, "sm_90a"),  # the last tokens are half of what one store takes
])  # fmt: skip
def test_rows(fmt: str, store: str, tokens: int, target: str) -> None:
    launcher = Checked(target)
    weights = random_weights(np.random.default_rng(2), fmt, 128, 256)
    spec = linear_rows(fmt, store, 128, 256, tokens, launcher.caps(), pick(fmt, store, launcher.caps(), tokens))
    run(launcher, spec, weights, store, tokens, tokens - 3, seed=3)
