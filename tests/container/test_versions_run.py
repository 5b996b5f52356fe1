"""One model in every container version is the same program with the same logits."""

from pathlib import Path

import numpy as np
import pytest

import artifacts
from artifacts import ArtifactWriter, Identity
from artifacts.convert import Options, convert
from artifacts.tools.migrate import migrate
from artifacts.tools.upgrade import upgrade
from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import caps
from runtime.open import ArtifactWeights
from runtime.vm import Machine
from runtime.vm.weights import WeightStore
from tests import models


def version_1(path: Path, source: Path) -> Path:
    with artifacts.open(source) as old:
        with ArtifactWriter(path, Identity(old.identity.model_id), old.objects.values()) as writer:
            for name, entry in old.objects.items():
                writer.write(name, old.read(entry.offset, entry.bytes))
    return path


def logits(path: Path) -> np.ndarray:
    """Logits of a few tokens, computed by a program compiled from this file."""
    with artifacts.open(path) as artifact:
        program = compile_program(artifact, caps("sm_90a"), CompileOptions(max_context=256), images=False)
        session = models.session(Machine(program, WeightStore(ArtifactWeights(artifact)), "engine"))
        return np.concatenate(list(session.score([5, 9, 2, 40, 7, 7, 1])))


@pytest.mark.parametrize("weights", ["groupwise-int", "bf16"])
def test_every_version_gives_the_same_logits(tmp_path: Path, weights: str) -> None:
    checkpoint = models.DATA / "dense-small"
    files = {name: tmp_path / f"{name}.ninfer" for name in ("two", "three", "parts", "upgraded")}
    overrides = {"text/layers/*/mlp/*": "FP8_E4M3FN_ROW_BF16S"} if weights == "bf16" else None
    for name, container in (("two", 2), ("three", 3), ("parts", 3)):
        limit = 1 << 18 if name == "parts" else 1 << 40
        convert(checkpoint, files[name], Options(weights, overrides=overrides, container=container, file_limit=limit))
    with artifacts.open(files["two"]) as old:
        upgrade(old, files["upgraded"], limit=1 << 18)
    if weights == "groupwise-int":  # version 1 knows no FP8
        files["one"] = version_1(tmp_path / "one.ninfer", files["two"])
        files["migrated"] = version_1(tmp_path / "migrated.ninfer", files["two"])
        migrate(files["migrated"])
    versions, found = [], []
    for path in files.values():
        with artifacts.open(path) as artifact:
            versions.append((artifact.version, len(artifact.files) > 1))
        found.append(logits(path))
    assert {(2, False), (3, False), (3, True)} <= set(versions) and len(found) == len(files)
    assert all(np.isfinite(values).all() and np.array_equal(values, found[0]) for values in found)
