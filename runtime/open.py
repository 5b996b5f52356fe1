"""Open what the user names, a program folder or an artifact, and join a program with its artifact."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

import artifacts
from artifacts.errors import LayoutError, quoted
from compiler.driver import CompileOptions, compile_program
from compiler.emit import nvrtc
from compiler.emit.cache import default_cache_dir, ensure_private_dir
from compiler.emit.render import TEMPLATE_DIR
from compiler.ir.op import Array
from compiler.kernels.spec import DeviceCaps
from compiler.program.io import MANIFEST, ProgramError, load, save
from compiler.program.model import Program

SAMPLED_PAGES = 16  # pages of the payload whose digest binds a program to the very bytes of its artifact
PAGE_BYTES = 4096


class ArtifactWeights:
    """Objects of an artifact by directory index (runtime.vm.weights.Source)."""

    def __init__(self, artifact: artifacts.Artifact) -> None:
        self.artifact = artifact
        self._names = list(artifact.objects)

    def object_bytes(self, index: int) -> Array:
        data: Array = np.asarray(self.artifact.tensor_bytes(self._names[index]))
        return data

    def reader(self) -> ArtifactObjects:
        return ArtifactObjects(self.artifact, self._names)


class ArtifactObjects:
    """Reads an artifact's objects into memory of the caller (runtime.vm.weights.ObjectReader), with its own file handles."""

    def __init__(self, artifact: artifacts.Artifact, names: list[str]) -> None:
        self._artifact, self._names = artifact, names
        self._payload = artifact.reader()

    def read_into(self, index: int, begin: int, out: Array) -> None:
        """Errors: LayoutError when the range leaves the object, PayloadError when the file was cut or cannot be read."""
        entry = self._artifact.tensor(self._names[index])
        if not 0 <= begin <= begin + out.size <= entry.bytes:
            raise LayoutError(f"object {quoted(entry.name)}: bytes [{begin}, {begin + out.size}) leave its {entry.bytes} bytes")
        self._payload.read_into(entry.offset + begin, out)

    def view(self, index: int) -> Array:
        """A view of the mapping, after a look whether the file still reaches that far: touching it past the end would end
        the process. Errors: PayloadError."""
        entry = self._artifact.tensor(self._names[index])
        self._payload.check(entry.offset, entry.bytes)
        return self._artifact.tensor_bytes(entry.name)

    def close(self) -> None:
        self._payload.close()


def sample_digest(artifact: artifacts.Artifact) -> str:
    """SHA-256 over evenly spaced pages of the payload: notices a file replaced by one with the same directory."""
    digest = hashlib.sha256()
    total = artifact.payload_bytes
    for i in range(SAMPLED_PAGES):
        start = max(0, total - PAGE_BYTES) * i // max(SAMPLED_PAGES - 1, 1)
        digest.update(np.asarray(artifact.read(start, min(PAGE_BYTES, total - start))).tobytes())
    return digest.hexdigest()


def match(program: Program, artifact: artifacts.Artifact) -> None:
    """Raise ProgramError unless ``artifact`` is the one the program was compiled from."""
    want = program.artifact
    if artifact.directory_digest != want.directory_sha256 or artifact.file_bytes != want.file_bytes:
        raise ProgramError(f"{artifact.path} is not the artifact of this program (directory or size differ); "
                           "give the right one with --artifact or compile again")  # fmt: skip
    if program.options.get("artifact_sample") != sample_digest(artifact):
        raise ProgramError(f"{artifact.path} was replaced since the program was compiled (sampled pages differ)")


@dataclass
class Opened:
    program: Program
    artifact: artifacts.Artifact
    path: Path


def relative(artifact: Path, folder: Path) -> str:
    """Path of the artifact as seen from the program folder, absolute where no relative one exists."""
    import os

    try:
        return Path(os.path.relpath(artifact.absolute(), folder.absolute())).as_posix()
    except ValueError:  # another drive
        return artifact.absolute().as_posix()


def compile_to(artifact: artifacts.Artifact, folder: Path, caps: DeviceCaps, options: CompileOptions,
               progress: Callable[[int, int, str], None] | None = None, workers: int | None = None) -> Program:  # fmt: skip
    """Compile and save a program folder; records where the artifact lies and what it held."""
    program = compile_program(artifact, caps, options, progress=progress, workers=workers)
    program.options["artifact_path"] = relative(artifact.path, folder)
    program.options["artifact_sample"] = sample_digest(artifact)
    save(program, folder)
    return program


def _templates_digest() -> str:
    digest = hashlib.sha256()
    root = TEMPLATE_DIR.parent
    files = [*TEMPLATE_DIR.rglob("*.j2"), *TEMPLATE_DIR.rglob("*.cuh"), *(root / "compiler").rglob("*.py"),
             *(root / "compiler").rglob("*.json")]  # fmt: skip
    for file in sorted(files):
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()


def cached_program(artifact: artifacts.Artifact, caps: DeviceCaps, options: CompileOptions,
                   progress: Callable[[int, int, str], None] | None = None) -> tuple[Program, Path]:  # fmt: skip
    """The program of an artifact in the user cache, compiled at first use. The key holds everything it depends on."""
    key: dict[str, Any] = {"directory": artifact.directory_digest, "bytes": artifact.file_bytes, "caps": asdict(caps),
                           "sample": sample_digest(artifact), "options": asdict(options), "nvrtc": nvrtc.version(),
                           "compiler": _templates_digest()}  # fmt: skip
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:24]
    folder = ensure_private_dir(default_cache_dir() / "programs") / name
    if (folder / MANIFEST).is_file():
        try:
            return load(folder), folder
        except ProgramError:
            pass  # damaged: compile again, which replaces it as a whole
    return compile_to(artifact, folder, caps, options, progress), folder


def is_program(path: Path) -> bool:
    return path.is_dir() and (path / MANIFEST).is_file()


def open_program(path: Path, artifact_path: Path | None) -> Opened:
    """A program folder joined with its artifact: ``artifact_path``, else the recorded path. Raises ProgramError."""
    program = load(path)
    recorded = str(program.options.get("artifact_path", ""))
    chosen = artifact_path or (path / recorded)
    if not chosen.is_file():
        raise ProgramError(f"the artifact of {path} is not at {chosen}; name it with --artifact")
    artifact = artifacts.open(chosen)
    try:
        match(program, artifact)
    except BaseException:
        artifact.close()
        raise
    return Opened(program, artifact, path)
