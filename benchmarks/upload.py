"""Speed of bringing weights to one device: what the threads, the size of a copy and the way of reading change.

    python -m benchmarks.upload FILE.ninfer [--device 0] [-r 3] [-o FILE.json]

All tensors of the artifact go to one device by ``runtime.cuda.upload``, with nothing of a program around it. The file is read
once before, so that it lies in the page cache. Varied one at a time around what the runtime does: threads, bytes of a copy,
and bytes read from the file or copied from its mapping, which is new for each load, as when a program is opened. Rows say
where the threads' time went (``runtime.cuda.upload.UploadTimes``), what page-locking alone costs, and the link's own rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import artifacts
from artifacts.container.schema import TensorObject
from compiler.ir.op import Array
from compiler.ir.types import Kind, TensorType, Value, WeightSource
from runtime.bench.environment import describe
from runtime.bench.load import pinned_rate, warm
from runtime.cuda import upload as uploading
from runtime.cuda.device import Device, PinnedBuffer
from runtime.open import ArtifactObjects, ArtifactWeights
from runtime.vm.weights import WeightStore

MIB = 1 << 20
PIECES = (MIB // 2, MIB, 2 * MIB, 4 * MIB, 8 * MIB)
THREADS = (1, 4, 8, 12, 16)
LOCKED = (4 * MIB, 64 * MIB, 192 * MIB)


class MappedObjects(ArtifactObjects):
    """Copies from the mapping instead of reading."""

    def read_into(self, index: int, begin: int, out: Array) -> None:
        np.copyto(out, self._artifact.tensor_bytes(self._names[index], begin, begin + out.size))


class MappedWeights(ArtifactWeights):
    def reader(self) -> ArtifactObjects:
        return MappedObjects(self.artifact, self._names)


def weights(artifact: artifacts.Artifact) -> list[Value]:
    """Every tensor of the artifact as a weight that is the whole of it."""
    found = []
    for index, entry in enumerate(artifact.objects.values()):
        if isinstance(entry, TensorObject):
            shape = entry.shape or (1,)
            source = WeightSource(index, entry.format, entry.layout, shape, ((0, shape[0]),), ((0, shape[-1]),))
            found.append(Value(entry.name, TensorType((entry.bytes,), "u8"), Kind.WEIGHT, 0, source, entry.bytes))
    return found


def case(path: Path, device: Device, address: int, repeats: int, threads: int, piece: int, mapped: bool) -> dict[str, Any]:
    """Loads of the artifact at ``path`` to ``address``: bytes/s, and the parts of the median one."""
    uploading.PIECE, uploading.RUN, uploading.REPORT = piece, max(piece, uploading.RUN), max(piece, uploading.REPORT)
    runs: list[tuple[float, uploading.UploadTimes]] = []
    for _ in range(repeats):
        with artifacts.open(path) as artifact:
            artifact.open_parts()
            values, at, placed = weights(artifact), 0, []
            for value in values:
                placed.append((value, 0, address + at))
                at += -(-value.nbytes // 256) * 256
            store = WeightStore((MappedWeights if mapped else ArtifactWeights)(artifact))
            began = time.perf_counter()
            times = uploading.upload(placed, store, [device], lambda count: None, threads)
            runs.append((time.perf_counter() - began, times))
    runs.sort(key=lambda run: run[0])
    seconds, times = runs[len(runs) // 2]
    nbytes = sum(value.nbytes for value in values)
    name = f"{threads} threads, {piece >> 10} KiB, {'mapping' if mapped else 'read'}"
    return {"case": name, "metric": "upload", "value": nbytes / seconds / 1e9, "unit": "GB/s",
            "spread": [nbytes / runs[-1][0] / 1e9, nbytes / runs[0][0] / 1e9], "seconds": seconds, **vars(times)}  # fmt: skip


def page_lock(nbytes: int, repeats: int) -> dict[str, Any]:
    """Allocating, clearing and freeing a page-locked buffer."""
    taken, freed = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        buffer = PinnedBuffer(nbytes)
        held = time.perf_counter()
        buffer.close()
        taken.append((held - began) * 1e3)
        freed.append((time.perf_counter() - held) * 1e3)
    return {"case": f"page-lock {nbytes // MIB} MiB", "metric": "time", "value": statistics.median(taken), "unit": "ms",
            "spread": [min(taken), max(taken)], "free_ms": statistics.median(freed)}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("-r", "--repeats", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args(argv)
    threads, piece = uploading.thread_count(), uploading.PIECE
    with artifacts.open(args.file) as artifact:
        artifact.open_parts()
        size = sum(-(-value.nbytes // 256) * 256 for value in weights(artifact))
        warmed = warm(artifact)
    device = Device(args.device)
    try:
        record = describe([device]) | {"command": ["python", "-m", "benchmarks.upload", *(argv or sys.argv[1:])],
                                       "bytes": size, "page_cache": f"{warmed} bytes read once before"}  # fmt: skip
        rows: list[dict[str, Any]] = [page_lock(nbytes, args.repeats) for nbytes in LOCKED]
        rows.append({"case": "pinned copy", "metric": "rate", "value": pinned_rate([device]) / 1e9, "unit": "GB/s"})
        address = device.allocate(size, "weights")
        device.synchronize()
        variants = [(threads, piece, False), *((threads, p, False) for p in PIECES), *((t, piece, False) for t in THREADS),
                    (threads, piece, True), (12, 8 * MIB, True), (threads, piece, False)]  # fmt: skip
        for count, copy, mapped in variants:
            rows.append(case(args.file, device, address, args.repeats, count, copy, mapped))
            print(json.dumps(rows[-1]), file=sys.stderr)
    finally:
        device.close()
    text = json.dumps(record | {"rows": rows}, indent=1)
    print(text)
    if args.output:
        args.output.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
