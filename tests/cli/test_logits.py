"""``ninferc logits``: the file is the goldens' logits, in both numerics and across chunks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from compiler.program.io import load, save
from runtime.cli.logits import npy_header
from tests import models
from tests.cli import small_model
from tests.cli.conftest import Result, plan_folder, rejected, run_cli

Ids = Callable[[Any], Path]
BOUND = 5e-4


def logits(program: Path, ids: Path, out: Path, *args: object) -> Result:
    return run_cli("logits", program, "--ids", ids, "-o", out, "--device", "cpu", *args)


@pytest.mark.parametrize("numerics", ["exact", "engine"])
def test_goldens(dense_program: Path, ids_file: Ids, tmp_path: Path, numerics: str) -> None:
    goldens, out = models.Goldens("dense-small"), tmp_path / "out.npy"
    for length in (7, 300 if numerics == "exact" else 65):  # 300: three chunks of 128
        result = logits(dense_program, ids_file(goldens.ids(length)), out, "--numerics", numerics)
        assert result.code == 0 and result.out == b"" and result.summary("tokens") == str(length)
        found = np.load(out)
        assert found.dtype == np.dtype("<f4") and found.flags.c_contiguous and found.shape[0] == length
        bound = BOUND if numerics == "exact" else 2 * goldens.meta["engine_profile"][str(length)]["max_abs"]
        assert np.all(np.isfinite(found)) and np.abs(found[-1] - goldens[f"logits_last_{length}"]).max() < bound
        if length == 7:
            assert np.abs(found - goldens["logits_all_7"]).max() < bound
    assert sorted(path.name for path in tmp_path.iterdir()) == ["ids.json", "out.npy"]


def test_the_numerics_differ(dense_program: Path, ids_file: Ids, tmp_path: Path) -> None:
    """engine is the default, and rounds."""
    ids, found = ids_file(models.Goldens("dense-small").ids(7)), []
    for index, args in enumerate(([], ["--numerics", "engine"], ["--numerics", "exact"])):
        assert logits(dense_program, ids, tmp_path / f"{index}.npy", *args).code == 0
        found.append(np.load(tmp_path / f"{index}.npy"))
    assert np.array_equal(found[0], found[1]) and not np.array_equal(found[0], found[2])
    assert np.all(found[0].view(np.uint32) & 0xFFFF == 0)  # logits are stored as bf16


def test_an_artifact_gets_the_context_that_the_ids_need(no_nvrtc: list[str], ids_file: Ids, tmp_path: Path) -> None:
    path = models.artifact("dense-small", "bf16").path
    rejected(logits(path, ids_file([1] * 200), tmp_path / "x.npy", "--max-context", 100), 1, "200 tokens", "--max-context 100")
    limit = load_limit(path)
    rejected(logits(path, ids_file([1] * (limit + 1)), tmp_path / "x.npy"), 1, f"{limit + 1} tokens", f"{limit}")
    assert logits(path, ids_file([1] * 3), tmp_path / "x.npy").code == 0 and no_nvrtc


def load_limit(path: Path) -> int:
    from artifacts import open as open_artifact
    from compiler.driver import model_of

    with open_artifact(path) as artifact:
        return model_of(artifact).max_position


def test_a_context_filled_to_the_last_token(ids_file: Ids, tmp_path: Path, untouched: Path) -> None:
    folder = plan_folder(tmp_path / "p", small_model.opened(), max_context=70, prefill_chunk=128)
    ids = list(range(70))
    assert logits(folder, ids_file(ids), tmp_path / "x.npy").code == 0
    assert np.load(tmp_path / "x.npy").shape == (70, 4224)
    rejected(logits(folder, ids_file([*ids, 1]), untouched / "x.npy"), 1, "71 tokens", "--max-context 70")
    rejected(logits(folder, ids_file([*ids[:-1], 4096]), untouched / "x.npy"), 1, "token 69", "4096")


def test_a_program_without_a_scoring_phase(dense_program: Path, ids_file: Ids, tmp_path: Path, untouched: Path) -> None:
    loaded = load(dense_program)
    del loaded.phases["score"]
    loaded.options["artifact_path"] = str(models.artifact("dense-small", "bf16").path)
    save(loaded, tmp_path / "p")
    rejected_last = logits(tmp_path / "p", ids_file([1]), untouched / "x.npy")
    assert rejected_last.code == 1 and "no scoring phase" in rejected_last.lines[-1] and rejected_last.out == b""


def test_the_header_is_numpys(tmp_path: Path) -> None:
    array = np.arange(15, dtype="<f4").reshape(3, 5)
    np.save(tmp_path / "a.npy", array)
    assert (tmp_path / "a.npy").read_bytes() == npy_header(3, 5) + array.tobytes()
