"""Models that tests build: artifacts converted from fixtures, programs planned for the VM, sessions on it."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

import artifacts
from artifacts.convert import Options, convert
from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import caps
from compiler.program.model import Program
from runtime.backend import VMBackend
from runtime.open import ArtifactWeights
from runtime.session import Session
from runtime.vm import Machine
from runtime.vm.weights import WeightStore

DATA = Path(__file__).parent / "data"
ROOT = Path(__file__).parent.parent
SHARED = Path(os.environ.get("NINFERC_SHARED", ROOT.parent / "shared"))
EXAMPLE = ROOT / "examples" / "tiny-hybrid.ninfer"
_folder = tempfile.TemporaryDirectory(prefix="ninferc-tests-")


def artifact(name: str, weights: str = "bf16") -> artifacts.Artifact:
    """A fixture (``dense-small`` …), ``tiny-hybrid`` of ../shared, or ``example``, as an open artifact."""
    return _artifact(name, weights)  # one cache entry, with or without the default written out


@cache
def _artifact(name: str, weights: str) -> artifacts.Artifact:
    if name == "example":
        return artifacts.open(EXAMPLE)
    source = SHARED / "models" / name if name == "tiny-hybrid" else DATA / name
    out = Path(_folder.name) / f"{name}-{weights}.ninfer"
    convert(source, out, Options(weights=weights))
    return artifacts.open(out)


@cache
def program(name: str, weights: str = "bf16", **options: Any) -> Program:
    """The program of a model, planned for an sm_90a device without compiling kernels."""
    return compile_program(artifact(name, weights), caps("sm_90a"), CompileOptions(**options), images=False)


@cache
def store(name: str, weights: str = "bf16") -> WeightStore:
    return WeightStore(ArtifactWeights(artifact(name, weights)))


def machine(name: str, weights: str = "bf16", numerics: str = "exact", shuffle: int | None = None, **options: Any) -> Machine:
    return Machine(program(name, weights, **options), store(name, weights), numerics, shuffle)


def session(vm: Machine, **options: Any) -> Session:
    return Session(VMBackend(vm), **options)


@dataclass
class Goldens:
    """Golden numbers of a fixture: tensors by name, and its meta.json."""

    name: str

    def __post_init__(self) -> None:
        self.meta: dict[str, Any] = json.loads((DATA / self.name / "meta.json").read_text())
        self._file = safe_open(DATA / self.name / "goldens.safetensors", "numpy")
        self.names = set(self._file.keys())

    def __getitem__(self, key: str) -> np.ndarray[Any, Any]:
        tensor: np.ndarray[Any, Any] = self._file.get_tensor(key)
        return tensor

    def ids(self, n: int) -> list[int]:
        return [int(token) for token in self[f"prompt_{n}_ids"]]
