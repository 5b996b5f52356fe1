"""Fixtures shared by all tests: where kernels run."""

from __future__ import annotations

import os
import signal

# before NumPy is imported: two test processes with a thread per core each would fight over the cores
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

# a shell that starts the tests in the background ignores Ctrl-C for them, and the commands that tests interrupt would too
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

from collections.abc import Generator  # noqa: E402
from typing import Any  # noqa: E402

import pytest  # noqa: E402

from tests.emulator.toolchain import NoCompiler  # noqa: E402
from tests.gpu_launch import EmulatorLauncher, GpuLauncher  # noqa: E402

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


def _skip_without_compiler() -> Generator[None, Any, Any]:
    try:
        return (yield)
    except NoCompiler as reason:
        pytest.skip(str(reason))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test whose fixtures compile for the emulator is skipped where nothing can."""
    return (yield from _skip_without_compiler())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """A test that compiles for the emulator is skipped where nothing can."""
    return (yield from _skip_without_compiler())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked ``shared`` are skipped where the checkpoint is not beside the repository."""
    from tests.models import SHARED

    folder = SHARED / "models" / "tiny-hybrid"
    if not folder.is_dir():
        for item in items:
            if "shared" in item.keywords:
                item.add_marker(pytest.mark.skip(reason=f"{folder} is not there"))
