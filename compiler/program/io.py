"""The program folder: ``program.json``, ``src/<kernel>.cu``, ``cubin/<kernel>.cubin``.

``program.json`` carries a version, a digest of its own content, the digests of every source and cubin, and the identity
of the artifact (SHA-256 of its directory, its size). A folder appears under its final name only when it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import compiler.ops  # noqa: F401  registers every op kind, which loading checks
from compiler.control import ControlLimits
from compiler.emit.nvrtc import Resources
from compiler.ir.op import Op, definition
from compiler.ir.types import IRError, Kind, Ref, TensorType, Value, WeightSource
from compiler.kernels.spec import DeviceCaps, KernelSpec
from compiler.model.spec import ModelSpec
from compiler.program.model import Arg, ArtifactIdentity, Call, KernelImage, Phase, Placement, Program

VERSION = 6
MANIFEST = "program.json"
HEAD = '{"ninferc_program":%d,"sha256":"%s","program":'  # then the content that the digest covers, then "}"
MAX_MANIFEST = 256 << 20
_HEAD = re.compile(rb'\{"ninferc_program":([0-9]{1,9}),(?:"sha256":"([0-9a-f]{64})","program":)?')
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,150}\Z")


class ProgramError(Exception):
    """A program folder is incomplete, altered, of another version, or in the way of a new one; names the file."""


def _refs(refs: Any) -> dict[str, list[str | int]]:
    return {name: ref.to_json() for name, ref in refs.items()}


def _op_json(op: Op) -> list[Any]:
    return [op.kind, _refs(op.inputs), _refs(op.outputs), _refs(op.state), dict(op.attrs), op.rank, op.layer]


def _value_json(value: Value) -> dict[str, Any]:
    data: dict[str, Any] = {"shape": value.type.shape, "dtype": value.type.dtype, "kind": value.kind.value}
    if value.rank:
        data["rank"] = value.rank
    if value.source:
        data["source"] = asdict(value.source)
        data["encoded_bytes"] = value.encoded_bytes
    return data


def _place_json(place: Placement) -> list[Any]:
    return [place.region, place.offset, place.nbytes, place.rank]


def _call_json(call: Call) -> dict[str, Any]:
    return {
        "rank": call.rank,
        "entry": call.entry,
        "args": [[a.name, a.kind, a.region, a.offset, a.number, a.rank] for a in call.args],
        "grid": call.grid,
        "block": call.block,
        "smem": call.smem,
        "cluster": call.cluster,
        "ops": [_op_json(op) for op in call.ops],
        "deps": call.deps,
        "scratch": {name: _place_json(p) for name, p in call.scratch.items()},
        "internal": {name: [kind.shape, kind.dtype] for name, kind in call.internal.items()},
        "programmatic": call.programmatic,
        "beside": call.beside,
    }


def to_json(program: Program) -> dict[str, Any]:
    """The manifest as plain data (without sources and images)."""
    return {
        "spec": program.spec.to_json(),
        "limits": asdict(program.limits),
        "caps": asdict(program.caps),
        "artifact": asdict(program.artifact),
        "tp": program.tp,
        "constants": program.constants,
        "options": program.options,
        "values": {name: _value_json(v) for name, v in program.values.items()},
        "placements": {name: _place_json(p) for name, p in program.placements.items()},
        "regions": program.regions,
        "phases": {
            name: {
                "phase": p.phase,
                "lanes": p.lanes,
                "width": p.width,
                "values": {n: _value_json(v) for n, v in p.values.items()},
                "placements": {n: _place_json(x) for n, x in p.placements.items()},
                "outputs": p.outputs,
                "kept": p.kept,
                "calls": [_call_json(call) for call in p.calls],
            }
            for name, p in program.phases.items()
        },
        "kernels": {
            entry: {
                "spec": asdict(kernel.spec) | {"zeroed": sorted(kernel.spec.zeroed)},
                "source_sha256": hashlib.sha256(kernel.source.encode()).hexdigest(),
                "cubin_sha256": hashlib.sha256(kernel.image).hexdigest(),
                "resources": asdict(kernel.resources),
            }
            for entry, kernel in program.kernels.items()
        },
    }


def check_target(folder: Path) -> None:
    """Raise ProgramError when ``folder`` exists and is neither empty nor a program folder, which may be replaced."""
    if os.path.lexists(folder) and not (folder / MANIFEST).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise ProgramError(f"{folder} exists and is no program folder; choose another -o")


def save(program: Program, folder: Path) -> None:
    """Write the folder. An existing program folder is replaced as a whole; any other existing path is refused.

    Raises ProgramError (also when the disk is full or the place cannot be written: nothing is left behind).
    """
    folder = folder.absolute()
    check_target(folder)
    temporary: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}.part-"))
        (temporary / "src").mkdir()
        (temporary / "cubin").mkdir()
        for entry, kernel in program.kernels.items():
            (temporary / "src" / f"{entry}.cu").write_bytes(kernel.source.encode())
            (temporary / "cubin" / f"{entry}.cubin").write_bytes(kernel.image)
        content = json.dumps(to_json(program), separators=(",", ":")).encode()
        head = HEAD % (VERSION, hashlib.sha256(content).hexdigest())
        (temporary / MANIFEST).write_bytes(head.encode() + content + b"}")
        temporary.chmod(0o777 & ~_umask())  # mkdtemp made it private
        _publish(temporary, folder)
    except OSError as error:
        raise ProgramError(f"program folder {folder}: {error.strerror or error}") from error
    finally:
        if temporary is not None and temporary.exists():
            shutil.rmtree(temporary, ignore_errors=True)


def _umask() -> int:
    current = os.umask(0o077)
    os.umask(current)
    return current


def _publish(temporary: Path, folder: Path) -> None:
    """Rename into place. With two compiles into one folder the last one wins as a whole."""
    for _ in range(8):
        old = folder.with_name(f".{folder.name}.old-{temporary.name[-8:]}")
        try:
            if folder.exists():
                os.replace(folder, old)
            os.replace(temporary, folder)
            return
        except OSError:
            if not temporary.exists():
                raise
        finally:
            if not folder.exists() and old.exists():  # interrupted between the two renames
                os.replace(old, folder)
            shutil.rmtree(old, ignore_errors=True)
    raise ProgramError(f"program folder {folder}: another process keeps replacing it")


def _value(name: str, data: dict[str, Any]) -> Value:
    source = None
    if "source" in data:
        s = data["source"]
        source = WeightSource(int(s["object_index"]), s["format"], s["layout"], tuple(s["object_shape"]),
                              tuple((int(a), int(b)) for a, b in s["rows"]),
                              tuple((int(a), int(b)) for a, b in s["cols"]))  # fmt: skip
    kind = TensorType(tuple(int(n) for n in data["shape"]), data["dtype"])
    return Value(name, kind, Kind(data["kind"]), data.get("rank", 0), source, data.get("encoded_bytes", 0))


def _op(data: list[Any]) -> Op:
    kind, inputs, outputs, state, attrs, rank, layer = data
    definition(kind)
    group = [{name: Ref(*ref) for name, ref in refs.items()} for refs in (inputs, outputs, state)]
    return Op(kind, group[0], group[1], group[2], attrs, rank, layer)


def _place(data: list[Any]) -> Placement:
    return Placement(data[0], int(data[1]), int(data[2]), int(data[3]))


def _call(index: int, data: dict[str, Any]) -> Call:
    grid, cluster = data["grid"], data["cluster"]
    return Call(
        index=index,
        rank=data["rank"],
        entry=data["entry"],
        args=tuple(Arg(*arg) for arg in data["args"]),
        grid=(grid[0], grid[1], grid[2]),
        block=data["block"],
        smem=data["smem"],
        cluster=(cluster[0], cluster[1], cluster[2]),
        ops=tuple(_op(op) for op in data["ops"]),
        deps=tuple(data["deps"]),
        scratch={name: _place(p) for name, p in data["scratch"].items()},
        internal={name: TensorType(tuple(shape), dtype) for name, (shape, dtype) in data["internal"].items()},
        programmatic=data["programmatic"],
        beside=data["beside"],
    )


def _spec(data: dict[str, Any]) -> KernelSpec:
    fields = dict(data)
    for name in ("grid", "cluster", "args", "published", "early"):
        fields[name] = tuple(fields[name])
    fields["zeroed"] = frozenset(fields["zeroed"])
    return KernelSpec(**fields)


def load(folder: Path) -> Program:
    """Read and verify a program folder: version, every digest, names. Raises ProgramError naming the file."""
    manifest = folder / MANIFEST
    try:
        if manifest.stat().st_size > MAX_MANIFEST:
            raise ProgramError(f"{manifest} has more than {MAX_MANIFEST >> 20} MiB")
        raw = manifest.read_bytes()
    except OSError as error:
        raise ProgramError(f"{manifest}: {error.strerror or error}; not a program folder") from error
    head = _HEAD.match(raw)
    if head is None:
        raise ProgramError(f"{manifest} is no program manifest; compile again")
    if int(head[1]) != VERSION or head[2] is None:
        raise ProgramError(f"{manifest}: program version {int(head[1])}, this build reads version {VERSION}; compile again")
    content = raw[head.end() : -1]
    if raw[-1:] != b"}" or hashlib.sha256(content).hexdigest().encode() != head[2]:
        raise ProgramError(f"{manifest} was altered or cut short (its SHA-256 differs); compile again")
    try:
        data = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ProgramError(f"{manifest} is not valid JSON ({error})") from error
    if not isinstance(data, dict):
        raise ProgramError(f"{manifest} is damaged; compile again")
    try:
        kernels = {name: _kernel(folder, name, item) for name, item in data["kernels"].items()}
        phases = {
            name: Phase(
                name,
                p["phase"],
                p["lanes"],
                p["width"],
                tuple(_call(i, call) for i, call in enumerate(p["calls"])),
                {n: _value(n, v) for n, v in p["values"].items()},
                {n: _place(x) for n, x in p["placements"].items()},
                tuple(p["outputs"]),
                tuple(p["kept"]),
            )
            for name, p in data["phases"].items()
        }
        return Program(
            spec=ModelSpec.from_json(data["spec"]),
            limits=ControlLimits(**data["limits"]),
            caps=DeviceCaps(**data["caps"]),
            artifact=ArtifactIdentity(**data["artifact"]),
            tp=data["tp"],
            values={name: _value(name, v) for name, v in data["values"].items()},
            placements={name: _place(p) for name, p in data["placements"].items()},
            regions=data["regions"],
            phases=phases,
            kernels=kernels,
            constants={name: [int(w) for w in words] for name, words in data["constants"].items()},
            options=data["options"],
        )
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, IRError) as error:
        raise ProgramError(f"{manifest} is damaged ({type(error).__name__}: {error}); compile again") from error


def _kernel(folder: Path, entry: str, data: dict[str, Any]) -> KernelImage:
    if not _NAME.match(entry):
        raise ProgramError(f"{folder / MANIFEST}: {entry!r} is no kernel name")
    source, cubin = folder / "src" / f"{entry}.cu", folder / "cubin" / f"{entry}.cubin"
    try:
        text, image = source.read_bytes(), cubin.read_bytes()
    except OSError as error:
        raise ProgramError(f"{error.filename}: {error.strerror}; compile again") from error
    for path, content, digest in ((source, text, data["source_sha256"]), (cubin, image, data["cubin_sha256"])):
        if hashlib.sha256(content).hexdigest() != digest:
            raise ProgramError(f"{path} was altered (SHA-256 differs from {MANIFEST}); compile again")
    return KernelImage(_spec(data["spec"]), text.decode(), image, Resources(**data["resources"]))
