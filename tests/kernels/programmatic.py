"""Launches as behind a programmatic edge: the emulator refuses what a kernel may not do before its dependency wait."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from compiler.emit.arch import capability
from compiler.kernels.spec import KernelSpec
from tests.gpu_launch import EmulatorLauncher


class ProgrammaticEmulator(EmulatorLauncher):
    """Before its wait a kernel touches arguments named in ``constants`` (weights) and those its spec says it takes early."""

    def __init__(self, constants: Collection[str], seed: int = 1) -> None:
        super().__init__(seed)
        self.constants = frozenset(constants)

    def launch(self, spec: KernelSpec, source: str, args: list[Any], repeats: int = 1) -> None:
        from tests.emulator.emulator import compile_kernel, launch

        positions = [at for at, name in enumerate(spec.args) if name in self.constants or name in spec.early]
        kernel = compile_kernel(source, name=spec.entry, arch=10 * capability(self.caps()))
        for _ in range(repeats):
            launch(kernel, spec.grid, spec.block, args, spec.smem, self.seed, programmatic=True, cluster=spec.cluster[0],
                   constants=positions)  # fmt: skip
