"""Speed of bringing weights to one device: what the kind of buffers, the size of a copy and the number of threads change.

    python -m benchmarks.upload FILE.ninfer [--device 0] [-r 3] [-o FILE.json]

All tensors of the artifact go to one device by ``runtime.cuda.upload``, with nothing of a program around it, page-locking
included. The file is read once before, so that it lies in the page cache. Rows say where the threads' time went
(``runtime.cuda.upload.UploadTimes``), what page-locking alone costs, and the link's own rate; samples of every tensor are read
back. One JSON row a line; what cannot be done is a row with ``error``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import artifacts
from artifacts.container.schema import TensorObject
from compiler.ir.types import Kind, TensorType, Value, WeightSource
from runtime.bench.environment import describe
from runtime.bench.load import pinned_rate, warm
from runtime.cuda.device import Device, PinnedBuffer, RegisteredBuffer
from runtime.cuda.driver import api, call
from runtime.cuda.upload import BUFFERS, MAX_THREADS, PIECE, UploadTimes, upload
from runtime.open import ArtifactWeights
from runtime.vm.weights import WeightStore

MIB = 1 << 20
SAMPLE = 4096  # bytes read back at both ends of a tensor
LOCKED = ((8 * MIB, 1), (64 * MIB, 1), (8 * MIB, 16))  # bytes of a buffer, threads that take one each


class Case(NamedTuple):
    """Threads; bytes of a copy; whether buffers are registered pages, or the driver's."""

    threads: int = MAX_THREADS
    piece: int = PIECE
    registered: bool = True

    def __str__(self) -> str:
        kind = "registered" if self.registered else "allocated"
        return f"{self.threads} threads x {BUFFERS} x {self.piece >> 10} KiB, {kind}"


CASES = (
    *(Case(piece=size * MIB, registered=kind) for kind in (True, False) for size in (4, 2, 8)),
    *(Case(threads=count) for count in (1, 4, 8, 12)),
    Case(),
)  # the first is what the runtime does; again at the end: how far the machine drifts


def weights(artifact: artifacts.Artifact) -> list[Value]:
    """Every tensor of the artifact as a weight that is the whole of it."""
    found = []
    for index, entry in enumerate(artifact.objects.values()):
        if isinstance(entry, TensorObject):
            shape = entry.shape or (1,)
            source = WeightSource(index, entry.format, entry.layout, shape, ((0, shape[0]),), ((0, shape[-1]),))
            found.append(Value(entry.name, TensorType((entry.bytes,), "u8"), Kind.WEIGHT, 0, source, entry.bytes))
    return found


def place(values: list[Value], address: int) -> tuple[list[tuple[Value, int, int]], int]:
    """Addresses for all values from ``address``, as ``upload`` takes them, and the bytes that takes."""
    placed, at = [], 0
    for value in values:
        placed.append((value, 0, address + at))
        at += -(-value.nbytes // 256) * 256
    return placed, at


def compare(device: Device, artifact: artifacts.Artifact, placed: list[tuple[Value, int, int]]) -> None:
    """Raise ValueError unless both ends of every tensor have arrived."""
    for value, _, target in placed:
        size = min(SAMPLE, value.nbytes)
        for begin in (0, value.nbytes - size):
            want = artifact.tensor_bytes(value.name, begin, begin + size)
            if not np.array_equal(device.download(target + begin, size), want):
                raise ValueError(f"{value.name}: bytes from {begin} are not those of the file")


def measure(path: Path, device: Device, address: int, repeats: int, case: Case) -> dict[str, Any]:
    """Loads of the artifact at ``path`` to ``address``: bytes/s, and the parts of the median one."""
    runs: list[tuple[float, UploadTimes]] = []
    for _ in range(repeats):
        with artifacts.open(path) as artifact:
            artifact.open_parts()
            placed, size = place(weights(artifact), address)
            device.activate()
            call(api().cuMemsetD8Async(address, 0, size, device.stream), "clear")
            device.synchronize()
            began = time.perf_counter()
            times = upload(placed, WeightStore(ArtifactWeights(artifact)), [device], lambda count: None, *case)
            runs.append((time.perf_counter() - began, times))
            compare(device, artifact, placed)
    runs.sort(key=lambda run: run[0])
    seconds, times = runs[len(runs) // 2]
    nbytes = sum(value.nbytes for value, _, _ in placed)
    return {"metric": "upload", "value": nbytes / seconds / 1e9, "unit": "GB/s",
            "spread": [nbytes / runs[-1][0] / 1e9, nbytes / runs[0][0] / 1e9], "seconds": seconds, **vars(times)}  # fmt: skip


def page_lock(device: Device, kind: type[PinnedBuffer] | type[RegisteredBuffer], nbytes: int, threads: int,
              repeats: int) -> dict[str, Any]:  # fmt: skip
    """Page-locking a buffer in each of so many threads, and giving them back."""

    def take(_: int) -> PinnedBuffer | RegisteredBuffer:
        device.activate()
        return kind(nbytes)

    taken, freed = [], []
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda _: time.sleep(0.01), range(threads)))  # the threads exist
        for _ in range(repeats):
            began = time.perf_counter()
            buffers = list(pool.map(take, range(threads)))
            held = time.perf_counter()
            for buffer in buffers:
                buffer.close()
            taken.append((held - began) * 1e3)
            freed.append((time.perf_counter() - held) * 1e3)
            del buffer, buffers
    return {"metric": "time", "value": statistics.median(taken), "unit": "ms", "spread": [min(taken), max(taken)],
            "free_ms": statistics.median(freed)}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("-r", "--repeats", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []

    def add(name: str, row: Callable[[], dict[str, Any]]) -> None:
        try:
            rows.append({"case": name, **row()})
        except Exception as error:  # the other rows are wanted all the same
            rows.append({"case": name, "error": f"{type(error).__name__}: {error}"})
        print(json.dumps(rows[-1]), flush=True)

    with artifacts.open(args.file) as artifact:
        artifact.open_parts()
        _, size = place(weights(artifact), 0)
        warmed = warm(artifact)
    device = Device(args.device)
    try:
        huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
        record = describe([device]) | {"command": ["python", "-m", "benchmarks.upload", *(argv or sys.argv[1:])],
                                       "bytes": size, "page_cache": f"{warmed} bytes read once before",
                                       "huge_pages": huge.read_text().strip() if huge.is_file() else "unknown"}  # fmt: skip
        address = device.allocate(size, "weights")
        device.synchronize()
        add("pinned copy", lambda: {"metric": "rate", "value": pinned_rate([device]) / 1e9, "unit": "GB/s"})
        for nbytes, threads in LOCKED:
            for name, kind in (("PinnedBuffer", PinnedBuffer), ("RegisteredBuffer", RegisteredBuffer)):
                add(f"{name} {threads} x {nbytes // MIB} MiB",
                    lambda kind=kind, nbytes=nbytes, threads=threads:  # type: ignore[misc]
                    page_lock(device, kind, nbytes, threads, args.repeats))  # fmt: skip
        for case in CASES:
            add(str(case), lambda case=case: measure(args.file, device, address, args.repeats, case))  # type: ignore[misc]
    finally:
        device.close()
    if args.output:
        args.output.write_text(json.dumps(record | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
