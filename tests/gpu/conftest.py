"""Programs compiled for the GPU at hand, and sessions on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from compiler.driver import CompileOptions
from compiler.program.model import Program
from runtime.cuda.backend import CudaBackend
from runtime.cuda.device import Device
from tests import card, models

ALL_PAIRS = ((1, 1), (1, 4), (1, 8), (1, 32), (8, 1), (8, 4), (8, 8))


@cache
def gpu_program(name: str, weights: str, **options: Any) -> Program:
    return card.compiled(models.artifact(name, weights), Device(0).caps(), CompileOptions(**options))


@pytest.fixture
def gpu() -> Iterator[Callable[..., CudaBackend]]:
    """``gpu(name, weights, eager=…, **compile options)`` gives a backend; all are closed at the end of the test."""
    opened: list[CudaBackend] = []

    def open_backend(name: str, weights: str = "bf16", eager: bool = False, **options: Any) -> CudaBackend:
        backend = CudaBackend(gpu_program(name, weights, **options), models.store(name, weights), [0], eager)
        opened.append(backend)
        return backend

    yield open_backend
    for backend in opened:
        backend.close()
