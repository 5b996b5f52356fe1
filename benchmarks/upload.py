"""Speed of bringing weights to one device: what the threads, the size of a copy, the buffers and the calls change.

    python -m benchmarks.upload FILE.ninfer [--device 0] [-r 3] [-o FILE.json]

All tensors of the artifact go to one device by ``runtime.cuda.upload``, with nothing of a program around it, page-locking
included. The file is read once before, so that it lies in the page cache. Rows say where the threads' time went
(``runtime.cuda.upload.UploadTimes``), what page-locking alone costs, and the link's own rate; samples of every tensor are read
back. The last rows register the file's mapping instead of copying from it. One JSON row a line; what cannot be done is a row
with ``error``.
"""

from __future__ import annotations

import argparse
import json
import mmap
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

import artifacts
from artifacts.container.schema import TensorObject
from compiler.ir.types import Kind, TensorType, Value, WeightSource
from runtime.bench.environment import describe
from runtime.bench.load import pinned_rate, warm
from runtime.cuda.device import Device, PinnedBuffer, RegisteredBuffer
from runtime.cuda.driver import api, call
from runtime.cuda.upload import DEFAULT, UploadTimes, Way, thread_count, upload
from runtime.open import ArtifactWeights
from runtime.vm.weights import WeightStore

MIB = 1 << 20
SAMPLE = 4096  # bytes read back at both ends of a tensor
LOCKED = ((8 * MIB, 1), (64 * MIB, 1), (8 * MIB, 16))  # bytes of a buffer, threads that take one each
STRETCH, STRETCHED = 64 * MIB, 2048 * MIB  # of the file's mapping, registered at a time and in all

WAYS = (
    Way(16, 8 * MIB, 2),
    Way(16, 8 * MIB, 2, held=True),
    Way(16, 8 * MIB, 2, registered=True),
    Way(16, 8 * MIB, 2, registered=True, held=True),
    Way(16, 4 * MIB, 2),
    Way(16, 4 * MIB, 2, held=True),
    Way(16, 4 * MIB, 2, registered=True),
    Way(16, 4 * MIB, 2, registered=True, held=True),
    Way(16, 2 * MIB, 2, held=True),
    Way(16, 2 * MIB, 2, registered=True, held=True),
    Way(16, 1 * MIB, 2, registered=True, held=True),
    Way(16, 4 * MIB, 1, held=True),
    Way(16, 4 * MIB, 1, registered=True, held=True),
    Way(16, 4 * MIB, 3, registered=True, held=True),
    Way(16, 2 * MIB, 4, registered=True, held=True),
    Way(8, 4 * MIB, 2, registered=True, held=True),
    Way(12, 4 * MIB, 2, registered=True, held=True),
    Way(14, 4 * MIB, 2, registered=True, held=True),
    Way(8, 2 * MIB, 2, registered=True, held=True),
    Way(12, 2 * MIB, 2, registered=True, held=True),
    Way(12, 8 * MIB, 2, registered=True, held=True),
    Way(16, 8 * MIB, 2),
)  # the first again at the end: how far the machine drifts


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


def case(path: Path, device: Device, address: int, repeats: int, way: Way) -> dict[str, Any]:
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
            times = upload(placed, WeightStore(ArtifactWeights(artifact)), [device], lambda count: None, way=way)
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


def mapping(path: Path, device: Device, address: int, threads: int) -> dict[str, Any]:
    """Copies from the file's own pages, registered stretch by stretch. Not a way for the runtime unless far ahead: the open
    driver marks every page that it gives back as written to (os_unlock_user_pages), so the system writes the file again."""
    driver = api()
    attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED
    if not call(driver.cuDeviceGetAttribute(attribute, device.handle), "device attribute"):
        raise ValueError("the device registers no read-only memory (READ_ONLY_HOST_REGISTER_SUPPORTED is 0)")
    size = min(path.stat().st_size // STRETCH * STRETCH, STRETCHED)
    if not size:
        raise ValueError(f"the file has less than {STRETCH} bytes")
    with path.open("rb") as file:
        pages = np.frombuffer(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ), np.uint8)
    flags = driver.CU_MEMHOSTREGISTER_READ_ONLY | driver.CU_MEMHOSTREGISTER_PORTABLE

    def copy(begin: int) -> float:
        device.activate()
        source, start = int(pages.ctypes.data) + begin, time.perf_counter()
        call(driver.cuMemHostRegister(source, STRETCH, flags), "register the mapping")
        registered = time.perf_counter() - start
        try:
            stream = call(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value), "stream")
            try:
                call(driver.cuMemcpyHtoDAsync(address + begin, source, STRETCH, stream), "copy to the device")
                call(driver.cuStreamSynchronize(stream), "copy to the device")
            finally:
                driver.cuStreamDestroy(stream)
        finally:
            driver.cuMemHostUnregister(source)
        return registered

    began = time.perf_counter()
    with ThreadPoolExecutor(threads) as pool:
        parts = list(pool.map(copy, range(0, size, STRETCH)))
    seconds = time.perf_counter() - began
    return {"metric": "upload", "value": size / seconds / 1e9, "unit": "GB/s", "seconds": seconds, "bytes": size,
            "register_ms": statistics.median(parts) * 1e3}  # fmt: skip


def name_of(way: Way) -> str:
    locked, calls = "registered" if way.registered else "allocated", "held" if way.held else "released"
    return f"{way.threads} threads x {way.buffers} x {way.piece >> 10} KiB, {locked}, lock {calls}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("-r", "--repeats", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []

    def add(case: str, measure: Callable[[], dict[str, Any]]) -> None:
        try:
            rows.append({"case": case, **measure()})
        except Exception as error:  # the other rows are wanted all the same
            rows.append({"case": case, "error": f"{type(error).__name__}: {error}"})
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
                                       "huge_pages": huge.read_text().strip() if huge.is_file() else "unknown",
                                       "default": vars(DEFAULT), "threads": thread_count()}  # fmt: skip
        address = device.allocate(max(size, STRETCHED), "weights")
        device.synchronize()
        add("pinned copy", lambda: {"metric": "rate", "value": pinned_rate([device]) / 1e9, "unit": "GB/s"})
        for nbytes, threads in LOCKED:
            for name, kind in (("PinnedBuffer", PinnedBuffer), ("RegisteredBuffer", RegisteredBuffer)):
                add(f"{name} {threads} x {nbytes // MIB} MiB",
                    lambda kind=kind, nbytes=nbytes, threads=threads:  # type: ignore[misc]
                    page_lock(device, kind, nbytes, threads, args.repeats))  # fmt: skip
        for way in WAYS:
            add(name_of(way), lambda way=way: case(args.file, device, address, args.repeats, way))  # type: ignore[misc]
        for threads in (1, 8):
            add(f"mapping registered, {threads} threads",
                lambda threads=threads: mapping(args.file, device, address, threads))  # type: ignore[misc]  # fmt: skip
    finally:
        device.close()
    if args.output:
        args.output.write_text(json.dumps(record | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
