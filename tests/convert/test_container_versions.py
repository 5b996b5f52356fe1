"""Conversions straight to version 3 hold what converting to version 2 and upgrading gives."""

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import artifacts
from artifacts.convert import Options, convert
from artifacts.errors import OutputError
from artifacts.tools.diff import compare
from artifacts.tools.upgrade import upgrade
from artifacts.tools.verify import verify
from tests.convert import checkpoints as make
from tests.convert.test_convert_command import app  # noqa: F401  (a fixture)
from tests.convert.test_sources import mixed_checkpoint, packed_checkpoint

COMPOSITE = {"model_type": "qwen3_5", "text_config": make.TEXT_CONFIG, "vision_config": make.VISION_CONFIG}
FILES = {
    "tokenizer.json": "{}", "tokenizer_config.json": '{"chat_template": "{{ x }}"}', "generation_config.json": "{}",
    "preprocessor_config.json": "{}",
}  # fmt: skip


def checkpoint(tmp_path: Path, kind: str) -> tuple[Path, dict[str, Any]]:
    """A checkpoint directory and the options that belong to it."""
    options: dict[str, Any] = {"weights": kind, "threads": 2}
    base = make.text_tensors("model.language_model.") | make.vision_tensors()
    if kind in ("nvfp4-packed", "nvfp4-mixed"):
        options["base"] = make.write_checkpoint(tmp_path / "base", base, COMPOSITE, files=FILES)
        tensors = packed_checkpoint() if kind == "nvfp4-packed" else mixed_checkpoint()
        return make.write_checkpoint(tmp_path / "m", tensors, COMPOSITE), options
    if kind == "vision":
        options |= {"weights": "groupwise-int", "vision": True}
    return make.write_checkpoint(tmp_path / "m", base, COMPOSITE, files=FILES), options


@pytest.mark.parametrize("kind", ["bf16", "groupwise-int", "nvfp4", "nvfp4-packed", "nvfp4-mixed", "vision"])
@pytest.mark.parametrize("limit", [32_000_000_000, 1 << 19])
def test_both_versions_hold_the_same_model(tmp_path: Path, kind: str, limit: int) -> None:
    directory, options = checkpoint(tmp_path, kind)
    old, upgraded, new = (tmp_path / f"{name}.ninfer" for name in ("old", "upgraded", "new"))
    convert(directory, old, Options(**options))
    report = convert(directory, new, Options(**options, container=3, file_limit=limit))
    with artifacts.open(old) as artifact:
        assert artifact.version == 2 and verify(artifact, deep=True) == []
        upgrade(artifact, upgraded, limit=limit)
    with artifacts.open(upgraded) as a, artifacts.open(new) as b:
        assert b.version == 3 and verify(b, deep=True) == []
        assert list(compare(a, b)) == []
        x, y = a.directory_v3, b.directory_v3
        assert (x.components, x.bindings, x.uses, x.metadata) == (y.components, y.bindings, y.uses, y.metadata)
        assert list(a.objects.values()) == list(b.objects.values())  # order and offsets too
        assert y.provenance is not None and y.provenance["converted"]["model_id"] == "m"
        assert len(b.files) == 1 if limit > 1 << 20 else len(b.files) > 1
        assert a.model.dims == b.model.dims and a.model.vision == b.model.vision
        sizes = [(tmp_path / (file.path or new.name)).stat().st_size for file in b.files]
        assert report["file"]["bytes"] == b.file_bytes == sum(sizes)


def test_other_versions_are_refused(tmp_path: Path) -> None:
    directory, options = checkpoint(tmp_path, "bf16")
    for version in (1, 4):
        with pytest.raises(OutputError, match="2 and 3 are"):
            convert(directory, tmp_path / "x.ninfer", Options(**options, container=version))
    assert not (tmp_path / "x.ninfer").exists()


def test_outputs_in_parts_are_kept_or_replaced(tmp_path: Path) -> None:
    directory, options = checkpoint(tmp_path, "bf16")
    out = tmp_path / "x.ninfer"
    part = tmp_path / "x.ninfer.part-0001"
    part.write_bytes(b"precious")
    with pytest.raises(OutputError, match="part-0001' exists already"):
        convert(directory, out, Options(**options, container=3, file_limit=1 << 19))
    assert part.read_bytes() == b"precious" and not out.exists()
    convert(directory, out, Options(**options, container=3, file_limit=1 << 19, overwrite=True))
    with artifacts.open(out) as artifact:
        assert verify(artifact) == []


def test_interruption_leaves_no_part(tmp_path: Path) -> None:
    directory, options = checkpoint(tmp_path, "bf16")
    target = tmp_path / "out"
    target.mkdir()

    def stop(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(directory, target / "x.ninfer", Options(**options, container=3, file_limit=1 << 19), progress=lambda _: stop)
    assert list(target.iterdir()) == []


def test_the_command(app: Any, tmp_path: Path) -> None:  # noqa: F811
    directory, _ = checkpoint(tmp_path, "bf16")
    command = [str(directory), "-o", str(tmp_path / "x.ninfer"), "--threads", "1"]
    for wrong in (["--container", "1"], ["--file-limit", "100000"], ["--container", "3", "--file-limit", "1"]):
        assert CliRunner().invoke(app, [*command, *wrong]).exit_code == 2
    result = CliRunner().invoke(app, [*command, "--container", "3", "--file-limit", "300000"])
    assert result.exit_code == 0 and result.stdout == ""
    with artifacts.open(tmp_path / "x.ninfer") as artifact:
        assert artifact.version == 3 and len(artifact.files) > 1 and verify(artifact) == []
