"""Kernels as sm_75 runs them: bf16 products on FP32 units, copies at once, 64 KiB of shared memory. Tests of the other
modules on the emulator as that architecture; ``NINFERC_TEST_AS=rtx2080ti`` runs all of them so."""

from __future__ import annotations

import numpy as np
import pytest

from compiler.emit.arch import caps
from compiler.kernels.linear_columns import FORMATS, Product
from compiler.kernels.linear_rows import linear_rows
from compiler.kernels.spec import DeviceCaps
from tests.emulator import toolchain
from tests.emulator.harness import assert_close_to_fp64
from tests.gpu_launch import EmulatorLauncher
from tests.kernels import (
    test_attention_decode,
    test_attention_prefill,
    test_gdn_decode,
    test_gdn_layer,
    test_gdn_prefill,
    test_linear_rows,
)
from tests.kernels import test_gdn_projections as projections
from tests.kernels.attention_cases import make_case, run_decode
from tests.kernels.encoded_weights import random_weights
from tests.kernels.test_linear_columns import check

pytestmark = pytest.mark.skipif(bool(toolchain.missing_reason()), reason=str(toolchain.missing_reason()))


class Turing(EmulatorLauncher):
    """The emulator as sm_75."""

    def caps(self, sms: int | None = None) -> DeviceCaps:
        return caps("sm_75", sms)


CASES = [(1, "store"), (3, "swiglu"), (9, "residual")]


# by default each format in one case, and one format in all
@pytest.mark.parametrize(("format", "columns", "epilogue"), [
    pytest.param(format, *case, marks=() if format == "NVFP4" or (i + j) % 3 == 0 else pytest.mark.slow)
    for i, format in enumerate(FORMATS) for j, case in enumerate(CASES)])  # fmt: skip
def test_products_of_columns(format: str, columns: int, epilogue: str) -> None:
    check(Turing(), Product(format, 256 if epilogue == "swiglu" else 128, 256, columns, 1, epilogue), 1, pad=8)


@pytest.mark.slow
def test_products_of_many_columns() -> None:
    for product in (Product("NVFP4", 128, 2560, 64, 2, "residual"), Product("Q6G64_F16S", 40, 1280, 33, 1, "store_f32")):
        check(Turing(), product, 2)


@pytest.mark.parametrize("format", [
    pytest.param(format, marks=() if format in ("NVFP4", "Q5G64_F16S") else pytest.mark.slow)
    for format in FORMATS])  # fmt: skip
def test_products_of_rows(format: str) -> None:
    spec = linear_rows(format, "bf16", 128, 384, 64, Turing().caps())
    weights = random_weights(np.random.default_rng(1), format, 128, 384)
    test_linear_rows.run(Turing(), spec, weights, "bf16", 64, 50, seed=2)


@pytest.mark.parametrize(("width", "heads", "kv_heads"), [(1, 24, 4), (8, 12, 2)])
def test_decode_attention(width: int, heads: int, kv_heads: int) -> None:
    """Passes of 32 rows at most: wide steps take several over the keys."""
    case = make_case([0, 61, 200], [width, 0, width - width // 8], width, dim=256, heads=heads, kv_heads=kv_heads)
    out = run_decode(Turing(), case, Turing().caps())
    assert_close_to_fp64(out[case.rows()], case.reference(), "bf16")


@pytest.mark.slow
def test_bits_of_decode_attention_do_not_depend_on_the_pass() -> None:
    """Six query heads to a KV head: eight columns take two passes, of five and of three."""
    test_attention_decode.test_bits_do_not_depend_on_neighbours(Turing(), 60, 256)


def test_prefill_attention() -> None:
    test_attention_prefill.test_against_fp64(Turing(), "mma", 256, 0, 65)


def test_gated_delta_net() -> None:
    """Decode steps in one kernel and in single ones; prefill in chunks where heads are small, else by the recurrence."""
    test_gdn_decode.test_golden_vectors(Turing(), 65)
    test_gdn_layer.test_production_heads(Turing())
    test_gdn_prefill.test_golden_vectors(Turing(), 65)
    test_gdn_prefill.test_lengths_and_tails(Turing(), test_gdn_prefill.SHAPES[1], 65)


def test_gates() -> None:
    projections.test_gates(Turing(), 5, 72, 3)
    projections.test_gates(Turing(), 33, 1032, 24)
