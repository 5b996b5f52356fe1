"""Weights to the devices: several threads copy from the mapped file into page-locked buffers, the devices fetch from there.

One thread reads a mapped file at a fraction of what a PCIe link takes, and the driver's own path for pageable memory is one
thread. Each thread here has two buffers and a stream per device: it fills one buffer while the device reads the other.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from compiler.ir.op import Array
from compiler.ir.types import Value
from runtime.cuda.device import Device, PinnedBuffer
from runtime.cuda.driver import api, call
from runtime.vm.weights import WeightStore

PIECE = 8 << 20  # bytes of one copy
RUN = 16 * PIECE  # consecutive bytes that one thread takes on at a time
MAX_THREADS = 12
BUFFERS = 2  # per thread


class _Object:
    """An object of the artifact while values are cut from it: fetched once, let go with its last task."""

    def __init__(self, weights: WeightStore) -> None:
        self._weights, self._lock = weights, threading.Lock()
        self._raw: Array | None = None
        self.tasks = 0

    def bytes_of(self, value: Value) -> Array:
        with self._lock:
            if self._raw is None:
                self._raw = self._weights.raw(value)
            raw = self._raw
        return self._weights.cut(value, raw)

    def done(self) -> None:
        with self._lock:
            self.tasks -= 1
            if not self.tasks:
                self._raw = None


@dataclass(frozen=True)
class _Task:
    """Bytes [start, end) of a weight for address ``target`` of a device; the whole weight where a thread has to cut it."""

    source: _Object
    value: Value
    device: int
    target: int
    start: int
    end: int


def tasks_of(values: Sequence[tuple[Value, int, int]], weights: WeightStore) -> list[_Task]:
    """Work for the threads, from (weight, device, address): in the order of the file, those of one object together; but
    large weights that one thread has to cut come first, since the last of them would be waited for."""
    objects: dict[int, _Object] = {}
    tasks = []
    for value, device, target in values:
        assert value.source is not None
        source = objects.setdefault(value.source.object_index, _Object(weights))
        length = RUN if weights.whole(value) else max(value.nbytes, 1)
        tasks += [_Task(source, value, device, target, at, min(at + length, value.nbytes))
                  for at in range(0, value.nbytes, length)]  # fmt: skip
    for task in tasks:
        task.source.tasks += 1

    def order(task: _Task) -> tuple[bool, int, int, int]:
        index = task.value.source.object_index if task.value.source else 0
        return task.end - task.start <= RUN, index, task.value.rank, task.start

    return sorted(tasks, key=order)


class _Stage:
    """A page-locked buffer and, per device, an event that stands behind the last copy out of it."""

    def __init__(self, devices: Sequence[Device]) -> None:
        driver = api()
        self.buffer = PinnedBuffer(PIECE)
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
        self.buffer.close()


class _Worker(threading.Thread):
    """Takes tasks until there are none, or until told to stop; reports bytes, and an error if there was one."""

    def __init__(self, devices: Sequence[Device], tasks: queue.SimpleQueue[_Task],
                 report: queue.SimpleQueue[int | BaseException | None], stop: threading.Event) -> None:  # fmt: skip
        super().__init__(daemon=True)
        self._devices, self._tasks, self._report, self._stopped = devices, tasks, report, stop

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # noqa: BLE001  raised again by the thread that waits
            self._report.put(error)
        self._report.put(None)

    def _work(self) -> None:
        driver = api()
        stages: list[_Stage] = []
        streams: list[Any] = []
        try:
            for device in self._devices:
                device.activate()
                streams.append(call(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value), "stream"))
            stages += [_Stage(self._devices) for _ in range(BUFFERS)]
            turn = 0
            while not self._stopped.is_set():
                try:
                    task = self._tasks.get_nowait()
                except queue.Empty:
                    break
                data = task.source.bytes_of(task.value)
                self._devices[task.device].activate()
                for start in range(task.start, task.end, PIECE):
                    if self._stopped.is_set():
                        break
                    end = min(start + PIECE, task.end)
                    stage = stages[turn % BUFFERS]
                    self._send(stage, streams[task.device], task, data[start:end], start)
                    self._report.put(end - start)
                    turn += 1
                task.source.done()
            for stage in stages:
                stage.wait()
        finally:
            for stream in streams:
                driver.cuStreamSynchronize(stream)
                driver.cuStreamDestroy(stream)
            for stage in stages:
                stage.close()

    @staticmethod
    def _send(stage: _Stage, stream: Any, task: _Task, data: Array, start: int) -> None:
        driver = api()
        stage.wait()
        np.copyto(stage.buffer.array[: data.size], data)  # without the interpreter's lock
        call(driver.cuMemcpyHtoDAsync(task.target + start, stage.buffer.address, data.size, stream), "copy to the device")
        call(driver.cuEventRecord(stage.events[task.device], stream), "copy to the device")
        stage.pending = task.device


def upload(values: Sequence[tuple[Value, int, int]], weights: WeightStore, devices: Sequence[Device],
           progress: Callable[[int], None], threads: int | None = None) -> None:  # fmt: skip
    """Bring weights, each with the position of its device in ``devices`` and its address there, to the devices; returns when
    all bytes have arrived. ``progress(bytes)`` is called in this thread as pieces are on their way.

    A value that the store makes on the device itself (``WeightStore.fill``) is not copied. Raises DeviceError, and what
    reading the artifact raises; an interrupt ends the threads first.
    """
    rest = []
    for value, device, target in values:
        if weights.fill(value, devices[device], target):
            progress(value.nbytes)
        else:
            rest.append((value, device, target))
    todo = tasks_of(rest, weights)
    tasks: queue.SimpleQueue[_Task] = queue.SimpleQueue()
    for task in todo:
        tasks.put(task)
    report: queue.SimpleQueue[int | BaseException | None] = queue.SimpleQueue()
    stop = threading.Event()
    count = min(threads or min(os.cpu_count() or 1, MAX_THREADS), len(todo))
    workers = [_Worker(devices, tasks, report, stop) for _ in range(count)]
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
