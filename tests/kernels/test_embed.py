"""Embedding lookup: rows of the table, decoded and rounded once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiler.emit.arch import caps
from compiler.emit.nvrtc import compile_source
from compiler.emit.render import render
from compiler.ir.op import Op
from compiler.ir.types import IRError, Ref, TensorType
from compiler.kernels.embed import embed_spec
from compiler.kernels.linear_columns import FORMATS
from compiler.kernels.spec import DeviceCaps, KernelSpec
from tests.emulator.harness import poisoned, to_bf16
from tests.kernels.encoded_weights import random_weights

OP = Op("embed", {"tokens": Ref("tokens"), "w": Ref("w")}, {"x": Ref("x")})


def spec_for(format: str, rows: int, width: int, columns: int, target: DeviceCaps | None = None) -> KernelSpec:
    types = {"tokens": TensorType((columns,), "i32"), "w": TensorType((rows, width), "u8"),
             "x": TensorType((columns, width), "bf16")}  # fmt: skip
    return embed_spec(OP, types, format, target or caps("sm_90a"))


@pytest.mark.parametrize("width", [64, 192, 1088, 200, 512])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_bit_by_bit(kernel_backend: Any, format: str, width: int) -> None:
    """First, last, repeated and middle rows; the gap between rows of x stays untouched."""
    if format == "NVFP4" and width % 64:
        pytest.skip("no such NVFP4 matrix")
    rng = np.random.default_rng(1)
    weights = random_weights(rng, format, 256, width)
    tokens = np.array([0, 255, 7, 7, 128, 85], np.int32)
    x = poisoned((6, width + 8))
    spec = spec_for(format, 256, width, 6, kernel_backend.caps())
    source = render(spec.template, spec.entry, spec.params)
    kernel_backend.launch(spec, source, [tokens, *weights.pointers(), x, width + 8])
    assert np.all(x[:, width:] == 0xFFFF)
    assert np.array_equal(x[:, :width], to_bf16(weights.values[tokens].astype(np.float32)))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("arch", ["sm_75", "sm_90a"])
def test_no_local_memory(format: str, arch: str) -> None:
    spec = spec_for(format, 248320, 5120, 8, caps(arch))
    used = compile_source(spec.entry, render(spec.template, spec.entry, spec.params), arch).resources
    assert (used.stack, used.spill_stores, used.local) == (0, 0, 0)


def test_what_cannot_be_read_is_refused() -> None:
    with pytest.raises(IRError, match="the table is in I32"):
        spec_for("I32", 256, 64, 1)
    with pytest.raises(IRError, match="multiple of 8"):
        spec_for("BF16", 256, 60, 1)
    with pytest.raises(IRError, match="NVFP4 needs a multiple of 64"):
        spec_for("NVFP4", 256, 96, 1)
