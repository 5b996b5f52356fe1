"""Speed of everything that reads and writes artifacts, on this machine and this disk.

    python -m benchmarks.artifacts [-o FILE.json] [--folder DIR] [--layers N | --sections LIST]

Formats: encode (BF16 words to stored bytes) and decode (stored bytes to float32), on one core and on all. Files: `synth` of
qwen3.8-27b/nvfp4 (20.02 GiB) beside a plain write of the same disk, verify, verify --deep, upgrade, diff, migrate; time and
peak memory of a conversion at the size of the 27B models. Opening: all registered identities in every version, as a library
call and as a whole `ninferc inspect --json` process. Rows that read a file say how much of it lay in the page cache. Needs
41 GiB in DIR (default: the current folder) and two to three minutes on 16 cores. --layers N takes models of N layers
instead; --sections names what is to be measured (opening, formats, synth, rewriting, conversion, migrate).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import artifacts
from artifacts import ArtifactWriter, Identity
from artifacts.container.output import OutputFile
from artifacts.container.schema import TensorObject, place
from artifacts.container.writer_v3 import ArtifactWriterV3
from artifacts.formats import FORMATS, SCALE_METHODS, f32_to_bf16
from artifacts.formats.base import default_threads
from artifacts.formats.bench import cpu_name, measure
from artifacts.identities import TextDims, plan_objects
from artifacts.identities.plan import CONFIG_RESOURCE
from artifacts.identities.registry import DENSE_27B, REGISTRY, RegisteredIdentity, registered
from artifacts.tools.diff import compare
from artifacts.tools.migrate import migrate
from artifacts.tools.synth import pieces, synthesize, synthesize_registered, tasks_of
from artifacts.tools.synth_bits import WordSource
from artifacts.tools.synth_frontend import frontend
from artifacts.tools.upgrade import plan_upgrade, upgrade
from artifacts.tools.verify import verify
from runtime.bench.environment import commit

ROOT = Path(__file__).resolve().parents[1]
FULL = Identity("qwen3.8-27b", "nvfp4")
PLAIN_BYTES = 4 << 30
SECTIONS = ("opening", "formats", "synth", "rewriting", "conversion", "migrate")
# Runs a command and prints the peak of its resident memory in KiB. (What wait4 reports includes the process that started it.)
WITH_PEAK = """
import sys
from runtime.cli.main import main
code = main(sys.argv[1:])
print(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
sys.exit(code)
"""
Row = dict[str, Any]


def environment(folder: Path) -> Row:
    """What a record of a CPU and a disk must carry to be comparable."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
    mounts = subprocess.run(["df", "-T", str(folder)], capture_output=True, text=True).stdout if os.name == "posix" else ""
    return {
        "cpu": cpu_name(),
        "cores": default_threads(),
        "memory_bytes": memory,
        "file_system": mounts.splitlines()[-1].split()[1] if mounts else "",
        "free_bytes": shutil.disk_usage(folder).free,
        "os": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in ("numpy", "typer")},
        "bytecode_cached": not sys.dont_write_bytecode,
        "commit": commit(),
    }


def cached_share(path: Path) -> float | None:
    """Share of a file's pages that are in the page cache; None where the system does not say."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    data = np.frombuffer(mapping, np.uint8)
    pages = np.zeros(-(-data.size // mmap.PAGESIZE), np.uint8)
    pointer = ctypes.c_void_p
    failed = libc.mincore(pointer(data.ctypes.data), ctypes.c_size_t(data.size), pointer(pages.ctypes.data))
    return None if failed else round(float((pages & 1).mean()), 3)


def drop_cache(path: Path) -> None:
    """Ask the system to forget a file's pages."""
    if hasattr(os, "posix_fadvise"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def timed(what: str, size: int | None, run: Callable[[], object], read: Path | None = None) -> Row:
    """One row: wall time of `run`, which moves `size` bytes (None: metadata only); `read`: the file that it reads."""
    row: Row = {"what": what} | ({} if size is None else {"bytes": size})
    if read is not None:
        row["cached_before"] = cached_share(read)
    start = time.perf_counter()
    found = run()
    row["seconds"] = round(time.perf_counter() - start, 4)
    if size is not None:
        row["gb_per_s"] = round(size / 1e9 / max(row["seconds"], 1e-9), 3)
    if isinstance(found, list) and found:
        row["findings"] = [str(item) for item in found[:3]]
    say(f"{what}: {row['seconds']} s" + (f", {row['gb_per_s']} GB/s" if size is not None else ""))
    return row


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# Formats


def codecs() -> Iterator[Row]:
    """Throughput of every format on one core and on all cores, each over enough rows."""
    for threads in sorted({1, default_threads()}):
        rows = 1024 if threads == 1 else 1024 * threads
        words = f32_to_bf16(np.random.default_rng(0).standard_normal((rows, 5120), np.float32))
        for name in FORMATS:
            for scale in SCALE_METHODS if name == "NVFP4" else ("",):
                if name != "I32":
                    yield {"rows": rows, "columns": 5120, **measure(name, words, threads, scale)}
    say("formats: done")


# Files


def plain_write(folder: Path, size: int) -> Row:
    """The disk alone: one block written again and again, then flushed."""
    path, block = folder / "plain", memoryview(np.ones(1 << 20, np.uint8))

    def run() -> None:
        file = OutputFile(path, size)
        try:
            for offset in range(0, size, len(block)):
                file.write_at(offset, block[: size - offset])
            file.flush()
        finally:
            file.discard()

    return timed("write of constant bytes and flush, one thread", size, run)


def generator(identity: Identity) -> Row:
    """Random weights made and thrown away, one core."""
    tensor = next(o for o in place(registered(identity).plan()) if isinstance(o, TensorObject) and o.bytes > 1 << 26)

    def run() -> None:
        for _ in pieces(tensor, 0, 0, 1000, tasks_of(tensor), WordSource()):
            pass

    return timed("synth: generator alone, one core", tensor.bytes, run)


def make(path: Path, layers: int | None) -> None:
    """The synthetic artifact that is measured: registered, or of a few layers."""
    if layers is None:
        synthesize_registered(FULL, path)
        return
    dims = TextDims(**{**DENSE_27B.__dict__, "layer_types": DENSE_27B.layer_types[:layers]})
    data = {CONFIG_RESOURCE: json.dumps(dims.to_config()).encode()}
    plans = plan_objects(dims, "nvfp4-fp8", resources={name: len(value) for name, value in data.items()})
    synthesize(path, Identity("cut", "nvfp4"), plans, data)


def large_file(folder: Path, layers: int | None, sections: frozenset[str]) -> Iterator[Row]:
    """Synth and verify of one large file, upgrade and diff (rewriting), and a conversion."""
    path, new = folder / "large.ninfer", folder / "large-v3.ninfer"
    if sections & {"synth", "rewriting"}:
        yield plain_write(folder, PLAIN_BYTES if layers is None else 1 << 28)
        yield generator(FULL)
        start = time.perf_counter()
        make(path, layers)
        size, seconds = path.stat().st_size, time.perf_counter() - start
        what = f"synth {FULL}" if layers is None else f"synth, {layers} layers"
        yield {"what": what, "bytes": size, "seconds": round(seconds, 3), "gb_per_s": round(size / 1e9 / seconds, 3),
               "workers": default_threads()}  # fmt: skip
        say(f"synth: {seconds:.1f} s, {size / 1e9 / seconds:.2f} GB/s")
        with artifacts.open(path) as artifact:
            yield timed("verify", None, lambda: verify(artifact), path)
            yield timed("verify --deep", size, lambda: verify(artifact, deep=True), path)
    if "rewriting" in sections:
        drop_cache(path)
        with artifacts.open(path) as artifact:
            yield timed("verify --deep, cache dropped", size, lambda: verify(artifact, deep=True), path)
            yield timed("upgrade", size, lambda: str(upgrade(artifact, new)), path)
            with artifacts.open(new) as other:
                yield timed("diff of version 2 and 3", 2 * size, lambda: identical(artifact, other), new)
        new.unlink()
    path.unlink(missing_ok=True)
    if "conversion" in sections and sys.platform == "linux":
        yield conversion(folder, 64 if layers is None else layers)


def identical(a: artifacts.Artifact, b: artifacts.Artifact) -> list[str]:
    """Differences of objects; versions 2 and 3 differ in their identity."""
    return [str(difference) for difference in compare(a, b) if difference.kind != "identity"]


def conversion(folder: Path, layers: int) -> Row:
    """`convert` of a checkpoint of the 27B widths (a sparse file of zeros) as a process, for its peak memory."""
    from tests.convert.headers_27b import write_sparse

    directory, out = write_sparse(folder / "checkpoint", layers), folder / "converted.ninfer"
    source = (directory / "model.safetensors").stat().st_size
    arguments = ["convert", str(directory), "-o", str(out), "--vision"]
    start = time.perf_counter()
    report = subprocess.run([sys.executable, "-c", WITH_PEAK, *arguments], check=True, capture_output=True, text=True, cwd=ROOT)
    seconds = time.perf_counter() - start
    row = {"what": f"convert to groupwise-int, 27B widths, {layers} layers of zeros", "source_bytes": source,
           "bytes": out.stat().st_size, "seconds": round(seconds, 2), "peak_rss_bytes": 1024 * int(report.stdout)}  # fmt: skip
    out.unlink()
    shutil.rmtree(directory)
    say(f"convert: {seconds:.1f} s, peak {row['peak_rss_bytes'] / 1e6:.0f} MB")
    return row


def in_place(folder: Path) -> Row:
    """`migrate` touches metadata only, so a sparse file of full length shows its time."""
    entry = registered(Identity("qwen3.6-27b", "groupwise-int"))
    path = header_only(folder / "v1.ninfer", entry, 1)
    row = timed("migrate", None, lambda: str(migrate(path)), path)
    path.unlink()
    return row


# Opening


def header_only(path: Path, entry: RegisteredIdentity, container: int) -> Path:
    """A sparse file of an identity: directory, frontend files and scalars only."""
    if container == 2:
        synthesize_registered(entry.identity, path, header_only=True)
    elif container == 1:
        data = frontend(entry.resources)
        with ArtifactWriter(path, Identity(entry.identity.model_id), entry.plan(), sparse=True) as writer:
            for name, value in data.items():
                writer.write(name, value)
    else:
        old = header_only(path.with_suffix(".old"), entry, 2)
        with artifacts.open(old) as artifact:
            plan = plan_upgrade(artifact, path.name)
            with ArtifactWriterV3(path, plan.directory, sparse=True) as new:
                for name, stored in artifact.objects.items():
                    if not isinstance(stored, TensorObject) or stored.shape == ():
                        new.write(name, artifact.read(stored.offset, stored.bytes))
        old.unlink()
    return path


def opening(folder: Path, repeats: int) -> Iterator[Row]:
    """Time to open and to inspect all identities in all versions; the directory is in the page cache."""
    for entry in REGISTRY.values():
        for container in (1, 2, 3) if entry.v1_sha256 else (2, 3):
            path = header_only(folder / "opened.ninfer", entry, container)
            calls, runs = [], []
            command = [sys.executable, "-m", "runtime.cli.main", "inspect", str(path), "--json"]
            for _ in range(repeats):
                start = time.perf_counter()
                with artifacts.open(path) as artifact:
                    directory = artifact.directory_bytes
                calls.append(time.perf_counter() - start)
                start = time.perf_counter()
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT)
                runs.append(time.perf_counter() - start)
            row = {
                "identity": str(entry.identity),
                "version": container,
                "file_bytes": path.stat().st_size,
                "directory_bytes": directory,
                "open_ms": round(1000 * min(calls), 2),
                "inspect_process_ms": round(1000 * min(runs), 1),
                "inspect_process_median_ms": round(1000 * statistics.median(runs), 1),
            }
            path.unlink()
            say(f"open {row['identity']} v{container}: {row['open_ms']} ms, process {row['inspect_process_ms']} ms")
            yield row


def main(arguments: list[str] | None = None) -> int:
    """Measure and print, or write to -o FILE, the record as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="write the record here instead of to stdout")
    parser.add_argument("--folder", type=Path, default=Path("."), help="disk to measure; default: the current folder")
    parser.add_argument("--layers", type=int, help="a model of so many layers instead of the whole one")
    parser.add_argument("--sections", default=",".join(SECTIONS), help=f"some of {', '.join(SECTIONS)}; default: all")
    parser.add_argument("--repeats", type=int, default=3, help="runs of every opening; the least time is reported")
    options = parser.parse_args(arguments)
    sections = frozenset(options.sections.split(","))
    if unknown := sections - set(SECTIONS):
        parser.error(f"--sections: {', '.join(sorted(unknown))}; allowed are {', '.join(SECTIONS)}")
    start = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="ninferc-benchmark-", dir=options.folder))
    try:
        record: Row = {"benchmark": "artifacts", "environment": environment(folder)}
        record["opening"] = list(opening(folder, max(1, options.repeats))) if "opening" in sections else []
        record["formats"] = list(codecs()) if "formats" in sections else []
        record["files"] = list(large_file(folder, options.layers, sections))
        if "migrate" in sections:
            record["files"].append(in_place(folder))
    finally:
        shutil.rmtree(folder)
    record["seconds"] = round(time.perf_counter() - start, 1)
    text = json.dumps(record, indent=1) + "\n"
    if options.output is None:
        sys.stdout.write(text)
    else:
        options.output.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
