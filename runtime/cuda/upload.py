"""Weights to the devices: several threads read the file into page-locked buffers, the devices fetch from there.

One thread reads from the page cache at a fraction of what a PCIe link takes, and the driver's own path for pageable memory is
one thread. Each thread here has two buffers and a stream per device: it fills one buffer while the device reads the other.
Buffers are small: the device then fetches most bytes from the processor's cache, and page-locking them takes little time.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from compiler.ir.op import Array
from compiler.ir.types import Value
from runtime.cuda.device import Device, PinnedBuffer
from runtime.cuda.driver import api, call
from runtime.vm.weights import WeightReader, WeightStore

PIECE = 8 << 20  # bytes of one copy: with each of them threads meet at the locks of Python and of the driver
RUN = 2 * PIECE  # consecutive bytes that one thread takes on at a time
REPORT = 4 * RUN  # bytes after which a thread says so: it wakes the one that waits
MAX_THREADS = 16  # per device
BUFFERS = 2  # per thread


@dataclass(frozen=True)
class UploadTimes:
    """Where the time of an upload went, in seconds. ``prepare`` is that of the thread that was last to have its streams and
    page-locked buffers; the others are means over the threads: filling buffers, giving copies to the driver, waiting for a
    device, and giving streams and buffers back. What is missing to the whole is waiting for Python's lock, or for work."""

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


def tasks_of(values: Sequence[tuple[Value, int, int]]) -> list[_Task]:
    """Work for the threads, from (weight, device, address): in the order of the file, ranks of one object side by side."""
    tasks = [_Task(value, device, target, at, min(at + RUN, value.nbytes))
             for value, device, target in values for at in range(0, value.nbytes, RUN)]  # fmt: skip
    return sorted(tasks, key=lambda t: (t.value.source.object_index if t.value.source else 0, t.start, t.value.rank))


class _Stage:
    """A share of a page-locked buffer and, per device, an event that stands behind the last copy out of it."""

    def __init__(self, devices: Sequence[Device], array: Array, address: int) -> None:
        driver = api()
        self.array, self.address = array, address
        self.events: list[Any] = []
        self.pending: int | None = None  # the device that may still be reading
        for device in devices:
            device.activate()
            self.events.append(call(driver.cuEventCreate(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING.value), "event"))

    def wait(self) -> None:
        """Until the device has read what the buffer holds."""
        if self.pending is not None:
            call(api().cuEventSynchronize(self.events[self.pending]), "copy to the device")
            self.pending = None

    def close(self) -> None:
        for event in self.events:
            api().cuEventDestroy(event)


class _Worker(threading.Thread):
    """Takes tasks until there are none, or until told to stop; reports bytes, and an error if there was one."""

    def __init__(self, devices: Sequence[Device], tasks: queue.SimpleQueue[_Task], weights: WeightStore,
                 report: queue.SimpleQueue[int | BaseException | None], stop: threading.Event) -> None:  # fmt: skip
        super().__init__(daemon=True)
        self._devices, self._tasks, self._weights = devices, tasks, weights
        self._report, self._stopped = report, stop
        self.prepare = self.read = self.send = self.wait = self.finish = 0.0

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  raised again by the thread that waits
            self._report.put(error)
        self._report.put(None)

    def _work(self) -> None:
        driver, began = api(), perf_counter()
        buffer: PinnedBuffer | None = None
        stages: list[_Stage] = []
        streams: list[Any] = []
        reader = self._weights.reader()
        try:
            for device in self._devices:
                device.activate()
                streams.append(call(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value), "stream"))
            buffer = PinnedBuffer(BUFFERS * PIECE)
            for at in range(0, BUFFERS * PIECE, PIECE):
                stages.append(_Stage(self._devices, buffer.array[at : at + PIECE], buffer.address + at))
            self.prepare = perf_counter() - began
            self._copy(reader, stages, streams)
        finally:
            began = perf_counter()
            for stream in streams:
                driver.cuStreamSynchronize(stream)
                driver.cuStreamDestroy(stream)
            for stage in stages:
                stage.close()
            if buffer is not None:
                buffer.close()
            reader.close()
            self.finish = perf_counter() - began

    def _copy(self, reader: WeightReader, stages: list[_Stage], streams: list[Any]) -> None:
        driver, turn, unsaid = api(), 0, 0
        while not self._stopped.is_set():
            try:
                task = self._tasks.get_nowait()
            except queue.Empty:
                break
            self._devices[task.device].activate()
            stream = streams[task.device]
            for start in range(task.start, task.end, PIECE):
                if self._stopped.is_set():
                    return
                stage, size = stages[turn % BUFFERS], min(PIECE, task.end - start)
                t0 = perf_counter()
                stage.wait()
                t1 = perf_counter()
                reader.read_into(task.value, start, stage.array[:size])
                t2 = perf_counter()
                call(driver.cuMemcpyHtoDAsync(task.target + start, stage.address, size, stream), "copy to the device")
                call(driver.cuEventRecord(stage.events[task.device], stream), "copy to the device")
                stage.pending = task.device
                turn += 1
                self.wait, self.read, self.send = self.wait + t1 - t0, self.read + t2 - t1, self.send + perf_counter() - t2
            unsaid += task.end - task.start
            if unsaid >= REPORT:
                self._report.put(unsaid)
                unsaid = 0
        self._report.put(unsaid)
        began = perf_counter()
        for stage in stages:
            stage.wait()
        self.wait += perf_counter() - began


def thread_count(devices: int = 1) -> int:
    """Threads that an upload to so many devices uses on this machine, at most."""
    return min(os.cpu_count() or 1, MAX_THREADS * devices)


def upload(values: Sequence[tuple[Value, int, int]], weights: WeightStore, devices: Sequence[Device],
           progress: Callable[[int], None], threads: int | None = None) -> UploadTimes:  # fmt: skip
    """Bring weights, each with the position of its device in ``devices`` and its address there, to the devices; returns when
    all bytes have arrived. ``progress(bytes)`` is called in this thread as shares of them are on their way.

    A value that the store makes on the device itself (``WeightStore.fill``) is not copied. Raises DeviceError, and what
    reading the artifact raises; an interrupt ends the threads first.
    """
    rest = []
    for value, device, target in values:
        if weights.fill(value, devices[device], target):
            progress(value.nbytes)
        else:
            rest.append((value, device, target))
    todo = tasks_of(rest)
    tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
    for task in todo:
        tasks.put(task)
    report: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()
    count = min(threads or thread_count(len(devices)), len(todo))
    workers = [_Worker(devices, tasks, weights, report, stop) for _ in range(count)]
    failed: BaseException | None = None
    try:
        for worker in workers:
            worker.start()
        running = count
        while running:
            news = report.get()
            if news is None:
                running -= 1
            elif isinstance(news, BaseException):
                failed = failed or news
                stop.set()
            else:
                progress(news)
    finally:
        stop.set()
        for worker in workers:
            if worker.ident is not None:
                worker.join()
    if failed is not None:
        raise failed
    if not workers:
        return UploadTimes()
    read, send, wait, finish = (sum(getattr(worker, name) for worker in workers) / count
                                for name in ("read", "send", "wait", "finish"))  # fmt: skip
    return UploadTimes(count, max(worker.prepare for worker in workers), read, send, wait, finish)
