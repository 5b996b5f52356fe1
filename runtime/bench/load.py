"""How long it takes from opening an artifact to the first token, with the file in the page cache and its program compiled."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

import artifacts
from runtime.cuda.backend import CudaBackend
from runtime.cuda.device import Device, PinnedBuffer
from runtime.cuda.driver import api, call
from runtime.cuda.upload import UploadTimes, thread_count
from runtime.session import Request, Session

COPY = 256 << 20  # bytes of one copy of the rate measurement
COPIES = 8
STRETCH = 64 << 20
PAGE = 4096
PROMPT = 20  # tokens


@dataclass(frozen=True)
class Load:
    """Seconds from opening to the backend (``ready``), of it the weights (``upload``, in parts ``times``), and to the first
    token."""

    ready: float
    upload: float
    first_token: float
    nbytes: int
    times: UploadTimes

    @property
    def rate(self) -> float:
        return self.nbytes / self.upload


def warm(artifact: artifacts.Artifact) -> int:
    """Touch every page of the payload once, so that it lies in the page cache as far as that has room. Returns its bytes."""

    def touch(start: int) -> int:
        view = artifact.read(start, min(STRETCH, artifact.payload_bytes - start))
        np.add.reduce(view[::PAGE], dtype=np.int64)
        return int(view.size)

    with ThreadPoolExecutor(thread_count()) as pool:
        return sum(pool.map(touch, range(0, artifact.payload_bytes, STRETCH)))


def pinned_rate(devices: Sequence[Device]) -> float:
    """Bytes/s of plain copies from page-locked memory to all distinct devices at once: what their links carry."""
    distinct = list({device.index: device for device in devices}.values())
    source = PinnedBuffer(COPY)
    targets = [device.allocate(COPY, "copy measurement") for device in distinct]
    try:
        best = 0.0
        for _ in range(3):
            for device in distinct:
                device.synchronize()
            start = time.perf_counter()
            for _ in range(COPIES):
                for device, target in zip(distinct, targets, strict=True):
                    device.activate()
                    call(api().cuMemcpyHtoDAsync(target, source.address, COPY, device.stream), "copy to the device")
            for device in distinct:
                device.synchronize()
            best = max(best, COPY * COPIES * len(distinct) / (time.perf_counter() - start))
        return best
    finally:
        for device, target in zip(distinct, targets, strict=True):
            device.release(target)
        source.close()


def measure(opening: Callable[[], CudaBackend], repeats: int, seed: int = 0) -> tuple[list[Load], CudaBackend]:
    """Load ``repeats`` times and answer a short prompt each time. Returns the times and the last backend, which is open."""
    draw = random.Random(seed)
    loads: list[Load] = []
    while True:
        began = time.perf_counter()
        backend = opening()
        ready = time.perf_counter()
        try:
            prompt = [draw.randrange(backend.program.limits.vocab_ids) for _ in range(PROMPT)]
            next(iter(Session(backend).generate(Request(prompt, 1))))
            first = time.perf_counter()
            nbytes, seconds = backend.uploaded
            loads.append(Load(ready - began, seconds, first - began, nbytes, backend.upload_times))
        except BaseException:
            backend.close()
            raise
        if len(loads) == repeats:
            return loads, backend
        backend.close()
