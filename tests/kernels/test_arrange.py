"""NVFP4 codes in device order: the kernel against the bit table, and that nothing of a code is lost."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import caps
from compiler.emit.render import render
from compiler.ir.types import Kind
from compiler.kernels.arrange import arrange_entry, arrange_spec, arranged_weights
from tests.compile import instantiations
from tests.kernels.encoded_weights import DEVICE_BITS, arranged


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
