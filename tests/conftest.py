"""Fixtures shared by all tests: where kernels run."""

from __future__ import annotations

import pytest

from tests.gpu_launch import EmulatorLauncher, GpuLauncher

_gpu: list[GpuLauncher] = []


@pytest.fixture(params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def kernel_backend(request: pytest.FixtureRequest) -> EmulatorLauncher | GpuLauncher:
    """Runs a kernel: on the CPU emulator (always), on a GPU under ``-m gpu``."""
    if request.param == "emulator":
        from tests.emulator import toolchain

        if reason := toolchain.missing_reason():
            pytest.skip(reason)
        return EmulatorLauncher()
    if not _gpu:
        _gpu.append(GpuLauncher())
    return _gpu[0]
