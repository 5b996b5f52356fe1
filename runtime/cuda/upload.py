"""Weights to the devices: several threads read the file into page-locked buffers, the devices fetch from there.

One thread reads from the page cache at a fraction of what a PCIe link takes, and the driver's own path for pageable memory is
one thread. Each thread here has buffers with a stream per device: it fills one buffer while the device reads another. It starts
with one buffer and takes another when no other thread is page-locking memory.

Measured on an H200 whose link carries 55 GB/s, page-locking included (``benchmarks/h200-upload.json``): 16 threads with two
buffers of 4 MiB brought 37 and 43 GB/s when the buffers were pages registered with the driver, 25 when it had allocated them;
12 threads 48, 4 threads 21. Pieces of 2 MiB brought 14.

What is called for every piece is called through ctypes (through cuda.bindings it brought 23 in place of 38 GB/s), and each call
costs the 16 threads that wait for the driver's lock: where pieces of 4 MiB with an event behind each copy brought 24 GB/s,
streams without events brought 26, and pieces of 8 MiB 35 to 38 (``benchmarks/h200-input-pair-trials.json``).
"""

from __future__ import annotations

import ctypes
import logging
import os
import queue
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from compiler.ir.types import Value
from runtime.cuda.device import Device, PinnedBuffer, RegisteredBuffer
from runtime.cuda.driver import DeviceError, api, call
from runtime.vm.weights import WeightReader, WeightStore

_log = logging.getLogger("ninferc")
PIECE = 8 << 20  # bytes of one copy, which are a buffer's
RUN = 16 << 20  # consecutive bytes that one thread takes on at a time
REPORT = 64 << 20  # bytes after which a thread says so: it wakes the one that waits
MAX_THREADS = 16  # per device
BUFFERS = 2  # of a thread at most
CUDA_VERSION = 12000  # whose declarations of the functions in ``_Calls`` are meant


@dataclass(frozen=True)
class UploadTimes:
    """Where the time of an upload went, in seconds. ``prepare`` is that of the thread that took longest for its page-locked
    buffers and their streams; the others are means over the threads: filling buffers, giving copies to the driver, waiting for
    a device, and giving buffers and streams back. What is missing to the whole is waiting for Python's lock, or for work."""

    threads: int = 0
    prepare: float = 0.0
    read: float = 0.0
    send: float = 0.0
    wait: float = 0.0
    finish: float = 0.0


@dataclass(frozen=True)
class _Task:
    """Bytes [start, end) of a weight for address ``target + start`` of a device."""

    value: Value
    device: int
    target: int
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class _News:
    """``sent`` bytes are on their way since the last news of a thread, and the tasks ``arrived`` have reached their device."""

    sent: int
    arrived: tuple[_Task, ...]


def tasks_of(values: Sequence[tuple[Value, int, int]]) -> list[_Task]:
    """Work for the threads, from (weight, device, address): in the order of the file, ranks of one object side by side."""
    tasks = [_Task(value, device, target, at, min(at + RUN, value.nbytes))
             for value, device, target in values for at in range(0, value.nbytes, RUN)]  # fmt: skip
    return sorted(tasks, key=lambda t: (t.value.source.object_index if t.value.source else 0, t.start, t.value.rank))


class _Calls:
    """The driver's functions that are called for every piece, by their addresses; Python's lock is released meanwhile."""

    def __init__(self) -> None:
        pointer = ctypes.c_void_p
        self._copy = _function("cuMemcpyHtoDAsync", ctypes.c_uint64, pointer, ctypes.c_size_t, pointer)
        self._query = _function("cuStreamQuery", pointer)
        self._wait = _function("cuStreamSynchronize", pointer)
        self._busy = int(api().CUresult.CUDA_ERROR_NOT_READY)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy to the device."""
        _check(self._copy(target, source, nbytes, stream))

    def wait(self, stream: int) -> None:
        """Until the stream's copies have arrived."""
        status = self._query(stream)
        _check(self._wait(stream) if status == self._busy else status)


def _function(name: str, *arguments: Any) -> Any:
    address, _ = call(api().cuGetProcAddress(name.encode(), CUDA_VERSION, 0), f"the NVIDIA driver's function {name}")
    if not address:
        raise DeviceError(f"the NVIDIA driver has no function {name}")
    return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(int(address))


def _check(status: int) -> None:
    if status:
        call((api().CUresult(status),), "copy to the device")


class _Stage:
    """A page-locked buffer and, per device, the stream of the copies out of it."""

    def __init__(self, devices: Sequence[Device], buffer: PinnedBuffer | RegisteredBuffer) -> None:
        driver = api()
        self.pending: int | None = None  # the stream of the device that may still be reading
        self.filled = 0  # number of the piece that it holds, counted by its thread
        self.streams: list[int] = []
        self.buffer = buffer
        try:
            for device in devices:
                device.activate()
                flags = driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value
                self.streams.append(int(call(driver.cuStreamCreate(flags), "stream")))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for stream in self.streams:
            api().cuStreamSynchronize(stream)
            api().cuStreamDestroy(stream)
        self.buffer.close()


class _Shared:
    """What the threads of one upload have in common. ``locking`` has an entry for each that is page-locking memory."""

    def __init__(self, devices: Sequence[Device], weights: WeightStore, piece: int, registered: bool) -> None:
        self.devices, self.weights, self.piece = devices, weights, piece
        self.tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
        self.report: queue.SimpleQueue[_News | BaseException | None] = queue.SimpleQueue()
        self.stop = threading.Event()
        self.locking: list[None] = []
        self.calls = _Calls()
        self._registered = registered

    def buffer(self) -> PinnedBuffer | RegisteredBuffer:
        """Page-locked memory for a piece: the driver's own where it registers none (cuMemHostRegister is not everywhere)."""
        if self._registered:
            try:
                return RegisteredBuffer(self.piece)
            except DeviceError as error:
                if self._registered:
                    _log.info("buffers are allocated by the driver, not registered with it: %s", error)
                self._registered = False
        return PinnedBuffer(self.piece, clear=False)


class _Worker(threading.Thread):
    """Takes tasks until there are none, or until told to stop; reports bytes, and an error if there was one."""

    def __init__(self, shared: _Shared) -> None:
        super().__init__(daemon=True)
        self._shared = shared
        self._stages: deque[_Stage] = deque()  # the one that was filled longest ago is first
        self._pieces = 0
        self._sent: deque[tuple[int, _Task]] = deque()  # with the number of its last piece, not known to have arrived
        self._arrived: list[_Task] = []  # not reported
        self.prepare = self.read = self.send = self.wait = self.finish = 0.0

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  raised again by the thread that waits
            self._shared.report.put(error)
        self._shared.report.put(None)

    def _work(self) -> None:
        reader = self._shared.weights.reader()
        try:
            self._copy(reader)
        finally:
            began = perf_counter()
            for stage in self._stages:
                stage.close()
            reader.close()
            self.finish = perf_counter() - began

    def _copy(self, reader: WeightReader) -> None:
        shared, piece, unsaid, current = self._shared, self._shared.piece, 0, -1
        while not shared.stop.is_set():
            try:
                task = shared.tasks.get_nowait()
            except queue.Empty:
                break
            if task.device != current:
                shared.devices[task.device].activate()
                current = task.device
            for start in range(task.start, task.end, piece):
                if shared.stop.is_set():
                    return
                stage, size = self._stage(current), min(piece, task.end - start)
                began = perf_counter()
                reader.read_into(task.value, start, stage.buffer.array[:size])
                filled = perf_counter()
                stream = stage.streams[current]
                shared.calls.copy(task.target + start, stage.buffer.address, size, stream)
                self._pieces += 1
                stage.pending, stage.filled = stream, self._pieces
                self.read, self.send = self.read + filled - began, self.send + perf_counter() - filled
            self._sent.append((self._pieces, task))
            unsaid += task.nbytes
            if unsaid >= REPORT:
                self._say(unsaid)
                unsaid = 0
        for stage in self._stages:
            self._empty(stage)
        self._say(unsaid)

    def _say(self, sent: int) -> None:
        self._shared.report.put(_News(sent, tuple(self._arrived)))
        self._arrived = []

    def _stage(self, device: int) -> _Stage:
        """The next buffer to fill: another one as long as there may be more and no thread is page-locking one, the first in
        any case; else the one that was filled longest ago, when its device has read it. ``device`` is current afterwards."""
        locking, stages = self._shared.locking, self._stages
        if len(stages) < BUFFERS:
            began = perf_counter()
            locking.append(None)
            try:
                if not stages or len(locking) == 1:
                    stages.append(_Stage(self._shared.devices, self._shared.buffer()))
                    self._shared.devices[device].activate()
                    return stages[-1]
            finally:
                locking.pop()
                self.prepare += perf_counter() - began
        stages.rotate(-1)
        self._empty(stages[-1])
        return stages[-1]

    def _empty(self, stage: _Stage) -> None:
        """Wait until the device has read what the buffer holds."""
        if stage.pending is not None:
            began = perf_counter()
            self._shared.calls.wait(stage.pending)
            stage.pending = None
            self.wait += perf_counter() - began
            # A buffer is emptied before it is filled again: every piece has arrived but those that buffers still hold.
            held = min((other.filled for other in self._stages if other.pending is not None), default=self._pieces + 1)
            while self._sent and self._sent[0][0] < held:
                self._arrived.append(self._sent.popleft()[1])


def thread_count(devices: int = 1) -> int:
    """Threads that an upload to so many devices uses on this machine, at most."""
    return min(os.cpu_count() or 1, MAX_THREADS * devices)


def upload(values: Sequence[tuple[Value, int, int]], weights: WeightStore, devices: Sequence[Device],
           progress: Callable[[int], None], threads: int | None = None, piece: int | None = None,
           registered: bool = True, complete: Callable[[Value], None] = lambda value: None) -> UploadTimes:  # fmt: skip
    """Bring weights, each with the position of its device in ``devices`` and its address there, to the devices; returns when
    all bytes have arrived. ``progress(bytes)`` is called in this thread as shares of them are on their way, and
    ``complete(weight)`` when all bytes of a weight have arrived, or making it is queued on its device's stream: what else is to
    be done with it can be queued there, beside the copies of others.
    ``threads``, bytes of a ``piece`` and ``registered``, whether buffers are registered pages or the driver's, are for
    measurements.

    A value that the store makes on the device itself (``WeightStore.fill``) is not copied. Raises DeviceError, and what
    reading the artifact raises; an interrupt ends the threads first.
    """
    rest = []
    for value, device, target in values:
        if weights.fill(value, devices[device], target):
            progress(value.nbytes)
            complete(value)
        else:
            rest.append((value, device, target))
    todo = tasks_of(rest)
    if not todo:
        return UploadTimes()
    count = min(threads or thread_count(len(devices)), len(todo))
    shared = _Shared(devices, weights, piece or PIECE, registered)
    missing = {value.name: value.nbytes for value, _, _ in rest}
    for task in todo:
        shared.tasks.put(task)
    workers = [_Worker(shared) for _ in range(count)]
    failed: BaseException | None = None
    try:
        for worker in workers:
            worker.start()
        running = count
        while running:
            news = shared.report.get()
            if news is None:
                running -= 1
            elif isinstance(news, BaseException):
                failed = failed or news
                shared.stop.set()
            else:
                progress(news.sent)
                for task in news.arrived:
                    missing[task.value.name] -= task.nbytes
                    if missing[task.value.name] == 0:
                        complete(task.value)
    finally:
        shared.stop.set()
        for worker in workers:
            if worker.ident is not None:
                worker.join()
    if failed is not None:
        raise failed
    read, send, wait, finish = (sum(getattr(worker, name) for worker in workers) / count
                                for name in ("read", "send", "wait", "finish"))  # fmt: skip
    return UploadTimes(count, max(worker.prepare for worker in workers), read, send, wait, finish)
