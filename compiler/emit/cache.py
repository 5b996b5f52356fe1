"""Content-keyed cubin cache: private folder, atomic writes, safe with several processes at once.

Key = digest of the source, every header it can include, the options, the architecture and the compiler version; the
file name starts with the readable kernel name.
"""

from __future__ import annotations

import hashlib
import json
import os
import queue
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from compiler.emit import nvrtc
from compiler.emit.render import INCLUDE_DIR

_INCLUDE = re.compile(r'^\s*#\s*include\s+["<](ninferc/[A-Za-z0-9_/.]+)[">]', re.MULTILINE)


class CacheError(Exception):
    """The cache folder cannot be used; names the folder and the fix."""


def default_cache_dir() -> Path:
    """``$NINFERC_CACHE``, else the user cache folder of the platform plus ``ninferc``."""
    if override := os.environ.get("NINFERC_CACHE"):
        return Path(override)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "ninferc" / "cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "ninferc"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ninferc"


def ensure_private_dir(path: Path) -> Path:
    """Create ``path`` readable by its owner only; raises CacheError when it cannot be written."""
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise CacheError(
            f"cache folder {path}: {error.strerror or error}; set NINFERC_CACHE to a writable folder"
        ) from error
    return path


@cache
def _header(name: str) -> tuple[bytes, tuple[str, ...]]:
    data = (INCLUDE_DIR / name).read_bytes()
    return hashlib.sha256(data).digest(), tuple(_INCLUDE.findall(data.decode()))


def headers_of(source: str) -> list[str]:
    """All project headers that ``source`` includes, directly or not, sorted."""
    seen: set[str] = set()
    queue = _INCLUDE.findall(source)
    while queue:
        name = queue.pop()
        if name not in seen:
            seen.add(name)
            queue.extend(_header(name)[1])
    return sorted(seen)


def source_key(source: str, arch: str) -> str:
    """Hex digest that names the cubin of ``source`` for ``arch``."""
    digest = hashlib.sha256()
    for part in (source, nvrtc.version(), *nvrtc.options(arch)):
        digest.update(part.encode() + b"\0")
    for name in headers_of(source):
        digest.update(name.encode() + b"\0" + _header(name)[0])
    return digest.hexdigest()


def write_atomic(path: Path, data: bytes) -> None:
    """Write beside and rename, so that a reader or a second writer never sees half a file. Raises CacheError."""
    temporary: str | None = None
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".part-")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise CacheError(f"cache folder {path.parent}: {error.strerror or error}; make room or set NINFERC_CACHE to another "
                         "folder") from error  # fmt: skip
    finally:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)


@dataclass(frozen=True)
class Job:
    entry: str
    source: str
    arch: str


def _paths(folder: Path, job: Job, key: str) -> tuple[Path, Path]:
    stem = f"{job.entry[:100]}-{key[:16]}"
    return folder / f"{stem}.cubin", folder / f"{stem}.json"


def _lookup(folder: Path, job: Job, key: str) -> nvrtc.Cubin | None:
    cubin, meta = _paths(folder, job, key)
    try:
        image, record = cubin.read_bytes(), json.loads(meta.read_text())
        if record["key"] != key or record["image_sha256"] != hashlib.sha256(image).hexdigest():
            return None
        return nvrtc.Cubin(image, nvrtc.Resources(**record["resources"]), record["log"])
    except (OSError, ValueError, KeyError, TypeError):
        return None  # absent, or cut short by a crash: compile again


def compile_job(folder: Path, job: Job, key: str) -> nvrtc.Cubin:
    """Compile one job and store it. Raises CompileError or OSError."""
    built = nvrtc.compile_source(job.entry, job.source, job.arch)
    cubin, meta = _paths(folder, job, key)
    write_atomic(cubin, built.image)
    record = {
        "key": key,
        "entry": job.entry,
        "image_sha256": hashlib.sha256(built.image).hexdigest(),
        "resources": asdict(built.resources),
        "log": built.log,
    }
    write_atomic(meta, json.dumps(record).encode())
    return built


def compile_all(jobs: Iterable[Job], folder: Path | None = None, workers: int | None = None,
                progress: object | None = None) -> dict[str, nvrtc.Cubin]:  # fmt: skip
    """Cubins of all ``jobs`` by entry name, from the cache or compiled in parallel processes.

    Two jobs of one entry must have one source. ``progress`` is called as ``progress(done, total, entry)``.
    Raises CompileError or CacheError.
    """
    folder = ensure_private_dir(folder or default_cache_dir())
    todo: dict[str, tuple[Job, str]] = {}
    done: dict[str, nvrtc.Cubin] = {}
    sources: dict[str, str] = {}
    for job in jobs:
        if sources.setdefault(job.entry, job.source) != job.source:
            raise nvrtc.CompileError(f"kernel {job.entry}: two different sources carry this name")
        if job.entry in done or job.entry in todo:
            continue
        key = source_key(job.source, job.arch)
        found = _lookup(folder, job, key)
        if found:
            done[job.entry] = found
        else:
            todo[job.entry] = (job, key)
    total = len(done) + len(todo)

    def report(entry: str) -> None:
        if callable(progress):
            progress(len(done), total, entry)

    report("")
    count = workers or min(len(todo), os.cpu_count() or 1)
    if count <= 1 or len(todo) <= 2:
        for entry, (job, key) in todo.items():
            done[entry] = compile_job(folder, job, key)
            report(entry)
        return done
    for entry, cubin in _compile_in_processes(folder, todo, count):
        done[entry] = cubin
        report(entry)
    return done


def _compile_in_processes(folder: Path, todo: dict[str, tuple[Job, str]], count: int) -> Iterator[tuple[str, nvrtc.Cubin]]:
    """Feed ``count`` worker processes; yields cubins as they are ready. The first error ends all workers."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for entry in todo:
        waiting.put(entry)
    ready: queue.SimpleQueue[tuple[str, nvrtc.Cubin | Exception]] = queue.SimpleQueue()
    workers = [_start_worker() for _ in range(min(count, len(todo)))]

    def serve(worker: subprocess.Popen[str]) -> None:
        while True:
            try:
                entry = waiting.get_nowait()
            except queue.Empty:
                return
            job, key = todo[entry]
            ready.put((entry, _ask(worker, folder, job, key)))

    threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        for _ in todo:
            entry, result = ready.get()
            if isinstance(result, Exception):
                raise result
            yield entry, result
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def _start_worker() -> subprocess.Popen[str]:
    """A compile process. It finds this package wherever the caller found it, never in the current folder (``-P``), and is
    in a process group of its own: Ctrl-C reaches the caller alone, which ends its workers."""
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    command, environment = [sys.executable, "-P", "-m", "compiler.emit.worker"], os.environ | {"PYTHONPATH": path}
    pipe = subprocess.PIPE
    if sys.platform == "win32":
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, encoding="utf-8", env=environment,
                                creationflags=subprocess.CREATE_NEW_PROCESS_GROUP)  # fmt: skip
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, encoding="utf-8", env=environment, process_group=0)


def _ask(worker: subprocess.Popen[str], folder: Path, job: Job, key: str) -> nvrtc.Cubin | Exception:
    """One job on one worker: its cubin, or the error to raise."""
    assert worker.stdin and worker.stdout
    try:
        item = {"folder": str(folder), "entry": job.entry, "source": job.source, "arch": job.arch, "key": key}
        worker.stdin.write(json.dumps(item) + "\n")
        worker.stdin.flush()
        answer = json.loads(worker.stdout.readline() or "{}")
    except (OSError, ValueError) as error:
        return nvrtc.CompileError(f"kernel {job.entry}: the compile process failed ({error})")
    if answer.get("ok"):
        found = _lookup(folder, job, key)
        return found or CacheError(f"cache folder {folder}: a file that was just written cannot be read")
    if "cache" in answer:
        return CacheError(answer["cache"])
    return nvrtc.CompileError(answer.get("compile", f"kernel {job.entry}: the compile process ended"))
