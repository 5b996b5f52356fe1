"""Devices that only have memory, and copies to it that happen as late as CUDA allows: when their stream is waited for. What a
staging buffer holds by then is what arrives."""

from __future__ import annotations

import ctypes
import itertools
import threading
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from runtime.cuda import upload as uploading
from tests.cli.fake_driver import FakeDriver

OK = driver.CUresult.CUDA_SUCCESS
Array = np.ndarray[Any, Any]


class Copies:
    """Installs the copies. ``memory`` by device; ``open`` counts streams and buffers that were not given back;
    copies after the first ``fail_after`` fail; ``most_buffers``: of those there were at a time."""

    def __init__(self, patch: pytest.MonkeyPatch, piece: int = 1000) -> None:
        FakeDriver().install(patch)
        self.memory: list[Array] = []
        self.devices: list[Any] = []
        self.open, self.fail_after, self.most_buffers, self._done = 0, 1 << 60, 0, 0
        self._lock = threading.Lock()
        self._current = threading.local()  # .device: whose context the thread has
        self._homes: dict[int, int] = {}  # of streams
        self._numbers = itertools.count(1)
        self._queues: dict[int, list[tuple[int, int, int]]] = {}
        self._buffers: dict[int, Array] = {}
        for name in ("cuStreamCreate", "cuStreamDestroy", "cuStreamSynchronize", "cuStreamQuery", "cuMemcpyHtoDAsync",
                     "cuMemHostRegister", "cuMemHostUnregister"):  # fmt: skip
            patch.setattr(driver, name, getattr(self, name))
        patch.setattr(uploading, "PinnedBuffer", self.pinned)
        patch.setattr(uploading, "PIECE", piece)
        patch.setattr(uploading, "RUN", 4 * piece)
        patch.setattr(uploading, "REPORT", 6 * piece)

    def allocate(self, sizes: list[int]) -> None:
        self.memory = [np.zeros(size, np.uint8) for size in sizes]
        self.devices = [type("Memory", (), {"activate": lambda device, number=number: self._activate(number)})()
                        for number in range(len(sizes))]  # fmt: skip

    def _activate(self, number: int) -> None:
        self._current.device = number

    @staticmethod
    def base(device: int) -> int:
        return (device + 1) << 40

    def _number(self) -> int:
        with self._lock:
            self.open += 1
            return next(self._numbers)

    def _given_back(self) -> tuple[Any]:
        with self._lock:
            self.open -= 1
        return (OK,)

    def pinned(self, nbytes: int, clear: bool = True) -> Any:
        """In place of ``PinnedBuffer``."""
        address = self._number() << 20
        self._held(address, np.full(nbytes, 0 if clear else 0x5A, np.uint8))
        return type("Pinned", (), {"address": address, "array": self._buffers[address],
                                   "close": lambda buffer: self.cuMemHostUnregister(address)})()  # fmt: skip

    def _held(self, address: int, array: Array) -> None:
        with self._lock:
            self._buffers[address] = array
            self.most_buffers = max(self.most_buffers, len(self._buffers))

    def cuMemHostRegister(self, address: int, nbytes: int, flags: int) -> tuple[Any]:
        with self._lock:
            self.open += 1
        self._held(address, np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address)))
        return (OK,)

    def cuMemHostUnregister(self, address: int) -> tuple[Any]:
        del self._buffers[address]
        return self._given_back()

    def cuStreamCreate(self, flags: int) -> tuple[Any, ...]:
        number = self._number()
        self._queues[number], self._homes[number] = [], self._current.device
        return OK, number

    def cuStreamDestroy(self, stream: int) -> tuple[Any]:
        assert not self._queues[stream], "a stream is destroyed with copies outstanding"
        return self._given_back()

    def cuMemcpyHtoDAsync(self, target: int, source: int, nbytes: int, stream: int) -> tuple[Any]:
        with self._lock:
            self._done += 1
            if self._done > self.fail_after:
                return (driver.CUresult.CUDA_ERROR_ILLEGAL_ADDRESS,)
        assert self._homes[stream] == self._current.device == (target >> 40) - 1, "not the context of the copy's device"
        self._queues[stream].append((target, source, nbytes))
        return (OK,)

    def cuStreamQuery(self, stream: int) -> tuple[Any]:
        """Nothing has happened as long as nobody waits."""
        return (driver.CUresult.CUDA_ERROR_NOT_READY if self._queues[stream] else OK,)

    def cuStreamSynchronize(self, stream: Any) -> tuple[Any]:
        if isinstance(stream, int):
            self._run(stream)
        return (OK,)

    def _run(self, stream: int) -> None:
        """Carry out the copies that are queued."""
        for target, source, nbytes in self._queues[stream]:
            device, at = (target >> 40) - 1, target & ((1 << 40) - 1)
            begin = max(address for address in list(self._buffers) if address <= source)
            held = self._buffers[begin][source - begin : source - begin + nbytes]
            assert held.size == nbytes, "a copy leaves its buffer"
            self.memory[device][at : at + nbytes] = held
        self._queues[stream].clear()
