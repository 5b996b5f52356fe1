"""Programmatic edges: every block of a GDN kernel waits, and before that it touches nothing but weights."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator import toolchain
from tests.emulator.harness import to_bf16
from tests.kernels.gdn_cases import Layer, Shape, random_tokens
from tests.kernels.programmatic import ProgrammaticEmulator
from tests.kernels.test_gdn_projections import ConvLayer, gates_case, run_gates, run_norm

pytestmark = pytest.mark.skipif(toolchain.missing_reason() is not None, reason=str(toolchain.missing_reason()))
WEIGHTS = {"w", "wa", "wb"}


def test_recurrence_and_chunks_wait() -> None:
    shape, rng, backend = Shape(2, 6, 16, 16), np.random.default_rng(1), ProgrammaticEmulator(WEIGHTS)
    layer = Layer(shape, slots=2, records=4, backend=backend)
    layer.step([1, 0], [random_tokens(shape, 3, rng), random_tokens(shape, 0, rng)], 4, [3, 0])
    layer.prefill(1, random_tokens(shape, 70, rng), 192)  # the last chunk of the call has no columns
    layer.prefill(1, random_tokens(shape, 0, rng), 64)
    layer.prefill(1, random_tokens(shape, 9, rng), 16, chunked=False)


def test_projections_wait() -> None:
    rng, backend = np.random.default_rng(2), ProgrammaticEmulator(WEIGHTS)
    x = to_bf16(rng.normal(size=(20, 320)))
    layer = ConvLayer(rng.normal(size=(4, 320)), slots=2, records=4, backend=backend)
    layer.call("decode", [1, 0], [x[:3], x[:0]], 4, [2, 0])
    layer.call("prefill", [1], [x], 48, [20])
    run_gates(backend, gates_case(rng, 3, 72, 3), fused=False)
    o = to_bf16(rng.normal(size=(3, 3, 48)))
    run_norm(backend, o, o, o[0, 0])
