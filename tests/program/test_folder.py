"""The program folder: what is written is what is read, and nothing altered, foreign or half-written is accepted."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import artifacts
from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import caps
from compiler.emit.cache import CacheError, Job, compile_all, ensure_private_dir, write_atomic
from compiler.emit.nvrtc import Resources
from compiler.program import io as program_io
from compiler.program.io import HEAD, MANIFEST, VERSION, ProgramError, load, save, to_json
from compiler.program.model import KernelImage, Program
from runtime.open import cached_program, match, open_program, relative, sample_digest
from tests import models

OPTIONS: dict[str, Any] = {"max_context": 128, "prefill_chunk": 128}


def build(max_context: int = 128) -> Program:
    """A planned program whose kernels carry made-up images."""
    artifact = models.artifact("dense-small", "bf16")
    made = compile_program(artifact, caps("sm_90a"), CompileOptions(**(OPTIONS | {"max_context": max_context})), images=False)
    made.kernels = {entry: KernelImage(kernel.spec, f"// {entry} µ\n", b"\x7fELF\n\r\n" + entry.encode(),
                                       Resources(40, 0, 0, 0, 128)) for entry, kernel in made.kernels.items()}  # fmt: skip
    made.options["artifact_path"] = str(artifact.path)
    made.options["artifact_sample"] = sample_digest(artifact)
    made.options = json.loads(json.dumps(made.options))  # tuples become lists in the manifest
    return made


@pytest.fixture(scope="module")
def made() -> Program:
    return build()


@pytest.fixture
def folder(made: Program, tmp_path: Path) -> Path:
    save(made, tmp_path / "p")
    return tmp_path / "p"


def rewrite(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest and give it a digest that fits."""
    raw = (folder / MANIFEST).read_bytes()
    data = json.loads(raw)["program"]
    change(data)
    content = json.dumps(data).encode()
    (folder / MANIFEST).write_bytes(HEAD.encode() % (VERSION, hashlib.sha256(content).hexdigest().encode()) + content + b"}")


def test_round_trip(made: Program, folder: Path, tmp_path: Path) -> None:
    loaded = load(folder)
    assert loaded == made and to_json(loaded) == to_json(made)
    save(loaded, tmp_path / "q")
    for path in folder.rglob("*"):
        other = tmp_path / "q" / path.relative_to(folder)
        assert other.is_dir() if path.is_dir() else other.read_bytes() == path.read_bytes()
    assert (folder / MANIFEST).stat().st_size < 4 << 20
    assert json.loads((folder / MANIFEST).read_bytes())["ninferc_program"] == VERSION


def test_nothing_of_the_artifact_enters_the_folder_but_its_ids(made: Program, folder: Path) -> None:
    """Tensor names are text of the artifact: they become numbers."""
    artifact = models.artifact("dense-small", "bf16")
    text = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    for name in artifact.objects:
        assert name.encode() not in text


@pytest.mark.parametrize("kind", ["cubin", "src"])
def test_altered_files(folder: Path, kind: str) -> None:
    path = sorted((folder / kind).iterdir())[3]
    data = path.read_bytes()
    for changed in (data[:-1], data + b" ", bytes([data[0] ^ 1]) + data[1:], b""):
        path.write_bytes(changed)
        with pytest.raises(ProgramError, match=rf"{path.name} was altered .*compile again"):
            load(folder)
    path.unlink()
    with pytest.raises(ProgramError, match=path.name):
        load(folder)


def test_every_byte_of_the_manifest_counts(folder: Path) -> None:
    manifest = folder / MANIFEST
    data = bytearray(manifest.read_bytes())
    rng = np.random.default_rng(3)
    spots = [*range(24), *(int(at) for at in rng.integers(24, len(data), 60)), len(data) - 1]
    for at in spots:
        data[at] ^= 1
        manifest.write_bytes(data)
        with pytest.raises(ProgramError, match=MANIFEST):
            load(folder)
        data[at] ^= 1
    for size in (0, 1, 30, 110, len(data) // 2, len(data) - 1):
        manifest.write_bytes(data[:size])
        with pytest.raises(ProgramError, match=MANIFEST):
            load(folder)


def test_other_versions(folder: Path) -> None:
    manifest = folder / MANIFEST
    data = manifest.read_bytes()
    head = b'{"ninferc_program":%d' % VERSION
    for version, text in ((1, "version 1"), (VERSION + 1, f"version {VERSION + 1}")):
        manifest.write_bytes(data.replace(head, b'{"ninferc_program":%d' % version, 1))
        with pytest.raises(ProgramError, match=rf"program {text}, this build reads version {VERSION}; compile again"):
            load(folder)
    manifest.write_bytes(b'{"ninferc_program":1,"spec":{}}')  # the first version had no digest
    with pytest.raises(ProgramError, match="program version 1"):
        load(folder)


def _drop(*path: str) -> Callable[[dict[str, Any]], None]:
    def change(data: dict[str, Any]) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


def _rename_kernel(data: dict[str, Any]) -> None:
    name = next(iter(data["kernels"]))
    data["kernels"]["../" + name] = data["kernels"].pop(name)


def _unknown_op(data: dict[str, Any]) -> None:
    data["phases"]["prefill"]["calls"][0]["ops"][0][0] = "system"


def _bad_shape(data: dict[str, Any]) -> None:
    next(iter(data["values"].values()))["shape"] = [-1]


@pytest.mark.parametrize(
    "change",
    [_drop("limits"), _drop("phases", "prefill", "calls"), _drop("spec", "hidden"), _rename_kernel, _unknown_op, _bad_shape,
     lambda data: data.update(phases=[]), lambda data: data.update(caps={"arch": "sm_90a"}),
     lambda data: data.update(kernels=3)],
)  # fmt: skip
def test_manifests_that_were_made_up(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """A digest that fits does not make a program."""
    rewrite(folder, change)
    with pytest.raises(ProgramError):
        load(folder)


@pytest.mark.parametrize("content", [b"[" * 200_000, b"3", b"null", b'{"a":1', b"\xff\xfe"])
def test_manifests_of_other_json(folder: Path, content: bytes) -> None:
    digest = hashlib.sha256(content).hexdigest().encode()
    (folder / MANIFEST).write_bytes(HEAD.encode() % (VERSION, digest) + content + b"}")
    with pytest.raises(ProgramError, match=MANIFEST):
        load(folder)


def test_a_manifest_without_bounds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_io, "MAX_MANIFEST", 1000)
    with pytest.raises(ProgramError, match="has more than"):
        load(folder)


# -- the artifact


def test_the_artifact_is_recognised(made: Program, folder: Path, tmp_path: Path) -> None:
    original = models.artifact("dense-small", "bf16")
    moved = tmp_path / "elsewhere.ninfer"
    shutil.copyfile(original.path, moved)
    with open_program(folder, moved).artifact as artifact:
        assert artifact.file_bytes == original.file_bytes
    with pytest.raises(ProgramError, match="is not at"):
        open_program(folder, tmp_path / "nothing.ninfer")
    with pytest.raises(ProgramError, match="is not the artifact of this program"):
        match(made, models.artifact("example", "bf16"))
    with artifacts.open(moved) as artifact:
        with pytest.raises(ProgramError, match="is not the artifact"):
            match(replace(made, artifact=replace(made.artifact, file_bytes=made.artifact.file_bytes + 4096)), artifact)


@pytest.mark.parametrize("place", ["first", "last"])
def test_a_replaced_payload_is_noticed(folder: Path, tmp_path: Path, place: str) -> None:
    """The same directory over other bytes: sampled pages tell."""
    moved = tmp_path / "replaced.ninfer"
    shutil.copyfile(models.artifact("dense-small", "bf16").path, moved)
    with artifacts.open(moved) as artifact:
        at = artifact.payload_start if place == "first" else artifact.payload_start + artifact.payload_bytes - 1
    with moved.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 255]))
    with pytest.raises(ProgramError, match="was replaced since the program was compiled"):
        open_program(folder, moved)


def test_relative_paths(tmp_path: Path) -> None:
    assert relative(tmp_path / "a" / "m.ninfer", tmp_path / "b" / "p") == "../../a/m.ninfer"
    assert relative(tmp_path / "m.ninfer", tmp_path) == "m.ninfer"


def test_the_cache_key_holds_what_a_program_depends_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other options, target or artifact: another folder. The same: the same, without compiling again."""
    monkeypatch.setenv("NINFERC_CACHE", str(tmp_path / "cache"))
    compiled: list[tuple[str, int]] = []

    def plan(artifact: Any, target: Any, options: CompileOptions, **_: Any) -> Program:
        compiled.append((target.arch, options.max_context))
        return compile_program(artifact, target, options, images=False)

    monkeypatch.setattr("runtime.open.compile_program", plan)
    artifact, other = models.artifact("dense-small", "bf16"), models.artifact("dense-prod-heads", "bf16")
    options = CompileOptions(**OPTIONS)
    folders = {cached_program(a, caps(arch), o)[1] for a, arch, o in (
        (artifact, "sm_90a", options), (artifact, "sm_90a", options), (artifact, "sm_80", options),
        (artifact, "sm_90a", replace(options, max_context=64)), (other, "sm_90a", options))}  # fmt: skip
    assert len(folders) == 4 and len(compiled) == 4
    assert all(path.parent == tmp_path / "cache" / "programs" for path in folders)


# -- writing


def _fail_after(count: int) -> Callable[..., Any]:
    real, calls = Path.write_bytes, [0]

    def write(self: Path, data: Any) -> int:
        calls[0] += 1
        if calls[0] > count:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, data)

    return write


@pytest.mark.parametrize("count", [0, 1, 7])
def test_a_full_disk_leaves_the_old_program(made: Program, folder: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    other = build(max_context=64)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", _fail_after(count))
        with pytest.raises(ProgramError, match="p: No space left on device"):
            save(other, folder)
    assert load(folder) == made and [path.name for path in folder.parent.iterdir()] == ["p"]


def test_an_interrupt_leaves_the_old_program(made: Program, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even between the two renames that replace it."""
    other, real = build(max_context=64), os.replace
    for moment in (1, 2):
        calls = [0]

        def interrupted(a: Any, b: Any, calls: list[int] = calls, moment: int = moment) -> None:
            calls[0] += 1
            if calls[0] == moment:
                raise KeyboardInterrupt
            real(a, b)

        with monkeypatch.context() as patch:
            patch.setattr(program_io.os, "replace", interrupted)
            with pytest.raises(KeyboardInterrupt):
                save(other, folder)
        assert load(folder) == made and [path.name for path in folder.parent.iterdir()] == ["p"]


def test_places_that_are_taken_or_cannot_be(made: Program, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ProgramError, match="file exists and is no program folder"):
        save(made, tmp_path / "file")
    with pytest.raises(ProgramError, match="file"):
        save(made, tmp_path / "file" / "p")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").write_text("x")
    with pytest.raises(ProgramError, match="full exists and is no program folder"):
        save(made, tmp_path / "full")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "x"]
    save(made, tmp_path / "new" / "deep" / "p")
    assert load(tmp_path / "new" / "deep" / "p") == made


def _save_often(source: Path, target: Path) -> None:
    made = load(source)
    for _ in range(8):
        save(made, target)


def test_two_writers_and_a_reader(made: Program, folder: Path, tmp_path: Path) -> None:
    """Two processes replace one folder again and again; whenever it is there, it is whole."""
    target, sources = tmp_path / "shared", (tmp_path / "a", tmp_path / "b")
    programs = made, build(max_context=64)
    for program, source in zip(programs, sources, strict=True):
        save(program, source)
    save(made, target)
    spawn = multiprocessing.get_context("spawn")
    writers = [spawn.Process(target=_save_often, args=(source, target)) for source in sources]
    for writer in writers:
        writer.start()
    seen = 0
    while any(writer.is_alive() for writer in writers):
        try:
            assert load(target) in programs
            seen += 1
        except ProgramError as error:  # moved away between two looks: a file is missing, never half there
            assert "No such file" in str(error) or "was altered" in str(error), error
        time.sleep(0.01)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert load(target) in programs and seen
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "p", "shared"]


# -- the cubin cache


def test_an_unwritable_cache(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CacheError, match="NINFERC_CACHE"):
            ensure_private_dir(folder)
        with pytest.raises(CacheError, match="NINFERC_CACHE"):
            compile_all([Job("k", 'extern "C" __global__ void k() {}', "sm_90a")], folder)


@pytest.mark.skipif(os.name == "nt", reason="POSIX rights")
def test_a_new_cache_is_private(tmp_path: Path) -> None:
    assert ensure_private_dir(tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_a_full_cache_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("compiler.emit.cache.os.replace", full)
    with pytest.raises(CacheError, match=r"No space left on device.*NINFERC_CACHE"):
        write_atomic(tmp_path / "x", b"data")
    with pytest.raises(CacheError, match="No space left on device"):
        compile_all([Job("k", 'extern "C" __global__ void k() {}', "sm_90a")], tmp_path)
    assert not list(tmp_path.iterdir())


def test_damaged_cache_entries_are_made_again(tmp_path: Path) -> None:
    job = Job("k", 'extern "C" __global__ void k() {}', "sm_90a")
    first = compile_all([job], tmp_path)["k"]
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:-5])
        assert compile_all([job], tmp_path)["k"].image == first.image
