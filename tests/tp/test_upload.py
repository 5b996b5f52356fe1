"""Weights of two ranks on their way to the devices: the file is read once, each rank gets what its shard says."""

from __future__ import annotations

import itertools
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

import artifacts
from artifacts.errors import PayloadError
from artifacts.layouts import get_layout
from compiler.ir.types import Kind
from compiler.program.model import WEIGHTS
from runtime.cuda import upload as upload_module
from runtime.cuda.device import HUGE_PAGE, RegisteredBuffer
from runtime.cuda.driver import DeviceError, api
from runtime.cuda.pointers import check_pointers
from runtime.cuda.upload import UploadTimes, upload
from runtime.open import ArtifactObjects, ArtifactWeights
from runtime.vm.weights import MadeObjects, WeightStore
from tests import models
from tests.cli.fake_driver import FakeDriver
from tests.tp.copies import OK, Copies

OPTIONS: dict[str, Any] = {"max_context": 256, "prefill_chunk": 128, "pairs": ((1, 1),)}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    yield Copies(monkeypatch)
    api.cache_clear()


class Counting(ArtifactWeights):
    """Notes what is read into buffers: (object, first byte, bytes); after ``fail_after`` reads the file cannot be read."""

    def __init__(self, artifact: Any, fail_after: int = 1 << 60) -> None:
        super().__init__(artifact)
        self.reads: list[tuple[int, int, int]] = []
        self.readers, self.fail_after = 0, fail_after

    def reader(self) -> ArtifactObjects:
        source, self.readers = self, self.readers + 1

        class Noting(ArtifactObjects):
            def read_into(self, index: int, begin: int, out: np.ndarray[Any, Any]) -> None:
                if len(source.reads) >= source.fail_after:
                    raise OSError(5, "Input/output error", "model.ninfer")
                source.reads.append((index, begin, out.size))
                super().read_into(index, begin, out)

            def close(self) -> None:
                source.readers -= 1
                super().close()

        return Noting(self.artifact, self._names)


class Making(ArtifactWeights):
    """A source whose objects are no ranges of a file."""

    def reader(self) -> MadeObjects:  # type: ignore[override]
        return MadeObjects(self)


def loaded(program: Any, store: WeightStore, machine: Copies, threads: int, progress: Any = lambda count: None,
           registered: bool = True) -> None:  # fmt: skip
    values = [(v, v.rank, machine.base(v.rank) + program.placements[v.name].offset)
              for v in program.values.values() if v.kind is Kind.WEIGHT]  # fmt: skip
    upload(values, store, machine.devices, progress, threads, registered=registered)


def arrived(program: Any, machine: Copies, artifact: Any) -> None:
    """Every weight is on its device, byte for byte."""
    plain = WeightStore(ArtifactWeights(artifact))
    for value in program.values.values():
        if value.kind is Kind.WEIGHT:
            place = program.placements[value.name]
            assert np.array_equal(machine.memory[value.rank][place.offset : place.end], plain.encoded(value)), value.name
    assert machine.open == 0, "a stream or a buffer is left"


@pytest.mark.parametrize("wide", [1, 100, 1 << 40])
@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["dense-small", "example"])
def test_every_byte_arrives_and_is_read_once(tp: int, name: str, threads: int, wide: int, copies: Copies,
                                             monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Whole objects in pieces, shards by reads of wide pieces and by gathering narrow ones."""
    monkeypatch.setattr("runtime.vm.weights.WIDE", wide)
    program = models.program(name, tp=tp, **OPTIONS)
    source = Counting(models.artifact(name))
    copies.allocate([sizes[WEIGHTS] for sizes in program.regions])
    for memory in copies.memory:
        memory[:] = 0xA5
    counts: list[int] = []
    store = WeightStore(source)
    loaded(program, store, copies, threads, counts.append)
    arrived(program, copies, source.artifact)
    values = [v for v in program.values.values() if v.kind is Kind.WEIGHT]
    assert sum(counts) == sum(value.nbytes for value in values)
    assert len(counts) > 20
    read = sum(size for _, _, size in source.reads)
    whole = sum(value.nbytes for value in values if store.whole(value))
    if wide == 1:
        padding = sum(length for v in values if v.source for _, length in
                      get_layout(v.source.layout).gaps(v.source.format, v.type.shape) if not store.whole(v))  # fmt: skip
        assert read == sum(counts) - padding
    else:
        assert read >= whole if wide == 100 else read == whole
    if tp == 1:
        assert len(set(source.reads)) == len(source.reads)
    assert max(size for _, _, size in source.reads) <= 1000 and source.readers == 0


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("filled", [0, 3])
def test_a_weight_is_complete_once_all_of_it_has_arrived(filled: int, tp: int, threads: int, copies: Copies) -> None:
    """Each is said to be once, while others may be on their way; what the store makes on the device as well."""
    program, artifact = models.program("dense-small", tp=tp, **OPTIONS), models.artifact("dense-small")
    copies.allocate([sizes[WEIGHTS] for sizes in program.regions])
    for memory in copies.memory:
        memory[:] = 0xA5
    weights = {v.name: v for v in program.values.values() if v.kind is Kind.WEIGHT}
    made = set(itertools.islice(weights, filled))
    plain, store = WeightStore(ArtifactWeights(artifact)), WeightStore(Counting(artifact))
    store.fill = lambda value, device, address: value.name in made  # type: ignore[method-assign]
    said: list[str] = []

    def complete(value: Any) -> None:
        said.append(value.name)
        place = program.placements[value.name]
        there = copies.memory[value.rank][place.offset : place.end]
        assert value.name in made or np.array_equal(there, plain.encoded(value)), value.name

    values = [(v, v.rank, copies.base(v.rank) + program.placements[v.name].offset) for v in weights.values()]
    upload(values, store, copies.devices, lambda count: None, threads, complete=complete)
    assert sorted(said) == sorted(weights)


@pytest.mark.parametrize("tp", [1, 2])
def test_what_is_said_to_have_arrived_has(tp: int, copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at by the thread that says so, before its next wait lets more copies happen; of each task at once."""
    program, artifact = models.program("dense-small", tp=tp, **OPTIONS), models.artifact("dense-small")
    copies.allocate([sizes[WEIGHTS] for sizes in program.regions])
    for memory in copies.memory:
        memory[:] = 0xA5
    plain, said, say = WeightStore(ArtifactWeights(artifact)), [], upload_module._Worker._say

    def checked(worker: Any, sent: int) -> None:
        for task in worker._arrived:
            first = task.target - copies.base(task.device)
            there = copies.memory[task.device][first + task.start : first + task.end]
            assert np.array_equal(there, plain.encoded(task.value)[task.start : task.end]), task
            said.append((task.value.name, task.start))
        say(worker, sent)

    monkeypatch.setattr(upload_module._Worker, "_say", checked)
    monkeypatch.setattr(upload_module, "REPORT", 1)
    loaded(program, WeightStore(Counting(artifact)), copies, 1)
    arrived(program, copies, artifact)
    assert len(said) == len(set(said)) > 20


def test_what_fails_behind_a_weight_ends_the_upload(copies: Copies) -> None:
    program = models.program("dense-small", **OPTIONS)
    copies.allocate([sizes[WEIGHTS] for sizes in program.regions])

    def complete(value: Any) -> None:
        raise DeviceError("no kernel")

    source = Counting(models.artifact("dense-small"))
    values = [(v, v.rank, copies.base(v.rank) + program.placements[v.name].offset)
              for v in program.values.values() if v.kind is Kind.WEIGHT]  # fmt: skip
    with pytest.raises(DeviceError, match="no kernel"):
        upload(values, WeightStore(source), copies.devices, lambda count: None, 3, complete=complete)
    assert copies.open == 0 and source.readers == 0


@pytest.mark.parametrize("tp", [1, 2])
def test_objects_that_are_made(tp: int, copies: Copies) -> None:
    program = models.program("dense-small", tp=tp, **OPTIONS)
    copies.allocate([sizes[WEIGHTS] for sizes in program.regions])
    loaded(program, WeightStore(Making(models.artifact("dense-small"))), copies, 3)
    arrived(program, copies, models.artifact("dense-small"))


def test_the_times_say_where_it_went(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that moves a second at each look: a look before and after each wait, read and copy."""
    program = models.program("dense-small", "bf16", **OPTIONS)
    copies.allocate([sizes[WEIGHTS] for sizes in program.regions])
    monkeypatch.setattr("runtime.cuda.upload.perf_counter", itertools.count().__next__)
    source = Counting(models.artifact("dense-small", "bf16"))
    values = [(v, v.rank, copies.base(v.rank) + program.placements[v.name].offset)
              for v in program.values.values() if v.kind is Kind.WEIGHT]  # fmt: skip
    times = upload(values, WeightStore(source), copies.devices, lambda count: None, 1)
    pieces = sum(-(-value.nbytes // 1000) for value, _, _ in values)
    assert times.threads == 1 and times.finish == 1.0
    assert times.prepare == upload_module.BUFFERS, "each buffer, its streams with it"
    assert (times.read, times.send, times.wait) == (pieces, pieces, pieces), "each piece is waited for once"
    assert upload([], WeightStore(source), copies.devices, lambda count: None) == UploadTimes()


@pytest.mark.parametrize("buffers", [1, 3])
@pytest.mark.parametrize("registered", [False, True])
def test_either_kind_of_buffer(registered: bool, buffers: int, copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    """Buffers that the driver allocates and pages of the process, on two devices."""
    monkeypatch.setattr(upload_module, "BUFFERS", buffers)
    taken: list[int] = []
    register = driver.cuMemHostRegister
    monkeypatch.setattr(driver, "cuMemHostRegister", lambda *args: (taken.append(args[1]), register(*args))[1])
    program = models.program("dense-small", tp=2, **OPTIONS)
    copies.allocate([sizes[WEIGHTS] for sizes in program.regions])
    loaded(program, WeightStore(ArtifactWeights(models.artifact("dense-small"))), copies, 4, registered=registered)
    arrived(program, copies, models.artifact("dense-small"))
    assert 1 <= copies.most_buffers <= 4 * buffers and set(taken) == ({1000} if registered else set())


def test_nobody_queues_for_a_second_buffer(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one thread page-locks its second buffer, the other goes on with the one that it has."""
    program = models.program("dense-small", "bf16", **OPTIONS)
    copies.allocate([sizes[WEIGHTS] for sizes in program.regions])
    first, inside, freed = threading.Barrier(2), threading.Event(), threading.Event()
    meanwhile: list[int] = []  # bytes of copies
    kind, copy = upload_module._Stage, driver.cuMemcpyHtoDAsync

    class Slow(kind):  # type: ignore[misc, valid-type]
        made: set[int] = set()

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            if threading.get_ident() in Slow.made:
                assert freed.is_set() or not inside.is_set(), "two are at it"
                inside.set()
                assert freed.wait(20)
            else:
                Slow.made.add(threading.get_ident())
                first.wait(20)  # both have one

    def noting(target: int, source: int, nbytes: int, stream: int) -> tuple[Any]:
        if inside.is_set() and not freed.is_set():
            meanwhile.append(nbytes)
        if len(meanwhile) == 20:
            freed.set()
        status: tuple[Any] = copy(target, source, nbytes, stream)
        return status

    monkeypatch.setattr(upload_module, "_Stage", Slow)
    monkeypatch.setattr(driver, "cuMemcpyHtoDAsync", noting)
    artifact = models.artifact("dense-small", "bf16")
    loaded(program, WeightStore(ArtifactWeights(artifact)), copies, 2)
    arrived(program, copies, artifact)
    assert len(meanwhile) == 20


def test_a_driver_that_gives_no_stream(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    """One clear line, and what was taken before is given back."""
    program = models.program("dense-small", "bf16", **OPTIONS)
    copies.allocate([sizes[WEIGHTS] for sizes in program.regions])
    real, calls = driver.cuStreamCreate, itertools.count()

    def refuse(*args: Any) -> Any:
        return real(*args) if next(calls) < 1 else (driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY, 0)

    monkeypatch.setattr(driver, "cuStreamCreate", refuse)
    with pytest.raises(DeviceError, match="CUDA_ERROR_OUT_OF_MEMORY"):
        loaded(program, WeightStore(ArtifactWeights(models.artifact("dense-small", "bf16"))), copies, 3)
    assert copies.open == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_a_driver_that_registers_no_memory(threads: int, copies: Copies, monkeypatch: pytest.MonkeyPatch,
                                           caplog: pytest.LogCaptureFixture) -> None:  # fmt: skip
    """Its own memory is taken instead, and the log says why."""
    program = models.program("dense-small", "bf16", **OPTIONS)
    copies.allocate([sizes[WEIGHTS] for sizes in program.regions])
    monkeypatch.setattr(driver, "cuMemHostRegister", lambda *args: (driver.CUresult.CUDA_ERROR_NOT_SUPPORTED,))
    artifact = models.artifact("dense-small", "bf16")
    with caplog.at_level("INFO", "ninferc"):
        loaded(program, WeightStore(ArtifactWeights(artifact)), copies, threads)
    arrived(program, copies, artifact)
    said = [record.getMessage() for record in caplog.records if "not registered" in record.getMessage()]
    assert 1 <= len(said) <= threads and "page-locked host memory: CUDA_ERROR_NOT_SUPPORTED" in said[0]


@pytest.mark.parametrize("missing", ["cuMemcpyHtoDAsync", "cuStreamQuery", "cuStreamSynchronize"])
@pytest.mark.parametrize("status", [OK, driver.CUresult.CUDA_ERROR_NOT_FOUND])
def test_a_driver_without_a_function(missing: str, status: Any, copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    """Said before anything is taken, whether the driver answers with an error or with no address."""
    real = driver.cuGetProcAddress
    monkeypatch.setattr(driver, "cuGetProcAddress", lambda name, version, flags: (status, 0, 0)
                        if name == missing.encode() else real(name, version, flags))  # fmt: skip
    program = models.program("dense-small", "bf16", **OPTIONS)
    copies.allocate([sizes[WEIGHTS] for sizes in program.regions])
    told = "has no function NAME" if status == OK else "'s function NAME: CUDA_ERROR_NOT_FOUND"
    with pytest.raises(DeviceError, match=f"the NVIDIA driver ?{told.replace('NAME', missing)}$"):
        loaded(program, WeightStore(ArtifactWeights(models.artifact("dense-small", "bf16"))), copies, 3)
    assert copies.open == 0 and not copies.most_buffers


@pytest.mark.parametrize("arrived_before", [False, True])
def test_only_what_has_not_arrived_is_waited_for(arrived_before: bool, copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    program = models.program("dense-small", "bf16", **OPTIONS)
    copies.allocate([sizes[WEIGHTS] for sizes in program.regions])
    waits: list[int] = []
    wait, query = driver.cuStreamSynchronize, driver.cuStreamQuery
    monkeypatch.setattr(driver, "cuStreamSynchronize", lambda stream: (waits.append(stream), wait(stream))[1])
    if arrived_before:  # by the time of the query the device has read everything
        monkeypatch.setattr(driver, "cuStreamQuery", lambda stream: (wait(stream), query(stream))[1])
    artifact = models.artifact("dense-small", "bf16")
    loaded(program, WeightStore(ArtifactWeights(artifact)), copies, 2)
    arrived(program, copies, artifact)
    at_the_end = set(waits[-len(set(waits)) :])  # closing waits for every stream once
    assert (len(waits) == len(at_the_end)) == arrived_before


@pytest.mark.parametrize("nbytes", [1, 4097, 3 << 20])
def test_registered_pages(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole buffers at addresses of huge pages, writable, one beside the other."""
    seen: list[tuple[str, Any]] = []
    FakeDriver().install(monkeypatch)
    monkeypatch.setattr(driver, "cuMemHostRegister", lambda *args: (seen.append(("register", args)), (OK,))[1])
    monkeypatch.setattr(driver, "cuMemHostUnregister", lambda *args: (seen.append(("unregister", args)), (OK,))[1])
    one, other = RegisteredBuffer(nbytes), RegisteredBuffer(nbytes)
    one.array[:], other.array[:] = 1, 2
    assert (one.array == 1).all() and one.array.size == one.nbytes == nbytes
    assert one.address == one.array.ctypes.data and one.address % HUGE_PAGE == 0
    one.close()
    assert seen == [("register", (one.address, nbytes, driver.CU_MEMHOSTREGISTER_PORTABLE)),
                    ("register", (other.address, nbytes, driver.CU_MEMHOSTREGISTER_PORTABLE)),
                    ("unregister", (one.address,))]  # fmt: skip
    other.close()
    api.cache_clear()


def test_an_artifact_that_cannot_be_read(copies: Copies) -> None:
    program = models.program("dense-small", "bf16", **OPTIONS)
    source = Counting(models.artifact("dense-small", "bf16"), fail_after=7)
    copies.allocate([sizes[WEIGHTS] for sizes in program.regions])
    with pytest.raises(OSError, match="model.ninfer"):
        loaded(program, WeightStore(source), copies, 4)
    assert copies.open == 0 and len(source.reads) == 7 and source.readers == 0


@pytest.mark.skipif(os.name == "nt", reason="Windows does not cut files that are mapped")
@pytest.mark.parametrize("wide", [1, 1 << 40])
@pytest.mark.parametrize("tp", [1, 2])
def test_a_file_that_is_cut_while_it_is_loaded(tp: int, wide: int, copies: Copies, tmp_path: Path,
                                               monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """A clear error, by reads as well as by the mapping, which would end the process when it is touched."""
    monkeypatch.setattr("runtime.vm.weights.WIDE", wide)
    program = models.program("example", tp=tp, **OPTIONS)
    copies.allocate([sizes[WEIGHTS] for sizes in program.regions])
    file = tmp_path / "model.ninfer"
    shutil.copy(models.EXAMPLE, file)
    with artifacts.open(file) as artifact:
        size = file.stat().st_size // 2
        os.truncate(file, size)
        with pytest.raises(PayloadError, match=rf"model.ninfer': the file ends at byte {size}, [0-9]+ are required"):
            loaded(program, WeightStore(ArtifactWeights(artifact)), copies, 3)
    assert copies.open == 0


def test_a_device_that_fails(copies: Copies) -> None:
    program = models.program("dense-small", "bf16", **OPTIONS)
    copies.allocate([sizes[WEIGHTS] for sizes in program.regions])
    copies.fail_after = 20
    with pytest.raises(DeviceError, match="copy to the device: CUDA_ERROR_ILLEGAL_ADDRESS"):
        loaded(program, WeightStore(ArtifactWeights(models.artifact("dense-small", "bf16"))), copies, 4)
    assert copies.open == 0


@pytest.mark.parametrize("failing", ["cuStreamQuery", "cuStreamSynchronize"])
def test_a_wait_that_fails(failing: str, copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the driver tells of the failure, it is told, and everything is given back."""
    program = models.program("dense-small", "bf16", **OPTIONS)
    copies.allocate([sizes[WEIGHTS] for sizes in program.regions])
    real, calls = getattr(driver, failing), itertools.count()
    monkeypatch.setattr(driver, failing, lambda *args: real(*args) if next(calls) < 10
                        else (real(*args), (driver.CUresult.CUDA_ERROR_LAUNCH_FAILED,))[1])  # fmt: skip
    with pytest.raises(DeviceError, match="copy to the device: CUDA_ERROR_LAUNCH_FAILED; a kernel failed"):
        loaded(program, WeightStore(ArtifactWeights(models.artifact("dense-small", "bf16"))), copies, 4)
    assert copies.open == 0


def test_an_interrupt_ends_the_threads(copies: Copies) -> None:
    program = models.program("dense-small", "bf16", **OPTIONS)
    copies.allocate([sizes[WEIGHTS] for sizes in program.regions])
    counts: list[int] = []

    def interrupting(count: int) -> None:
        counts.append(count)
        if len(counts) == 5:
            raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        loaded(program, WeightStore(ArtifactWeights(models.artifact("dense-small", "bf16"))), copies, 3, interrupting)
    assert threading.active_count() == before and copies.open == 0


class Made(WeightStore):
    """A store that makes large weights on the device."""

    def fill(self, value: Any, device: Any, address: int) -> bool:
        return value.nbytes > 10000


def test_what_the_device_makes_is_not_copied(copies: Copies) -> None:
    program = models.program("dense-small", "bf16", **OPTIONS)
    copies.allocate([sizes[WEIGHTS] for sizes in program.regions])
    counts: list[int] = []
    source = Counting(models.artifact("dense-small", "bf16"))
    loaded(program, Made(source), copies, 2, counts.append)
    values = [v for v in program.values.values() if v.kind is Kind.WEIGHT]
    assert sum(counts) == sum(v.nbytes for v in values)
    for value in values:
        place = program.placements[value.name]
        assert bool(copies.memory[0][place.offset : place.end].any()) == (value.nbytes <= 10000), value.name


def addresses(program: Any) -> tuple[list[dict[str, tuple[int, int]]], dict[tuple[str, int], int]]:
    """Made-up address ranges of both ranks, one beside the other, and their beginnings."""
    spans: list[dict[str, tuple[int, int]]] = []
    begin, at = {}, 1 << 32
    for rank, regions in enumerate(program.regions):
        mine = {}
        for name in (*regions, "hang", "inbox", "outbox"):
            size = max(regions.get(name, 0), 4096)
            mine[name], begin[name, rank] = (at, at + size), at
            at += size
        spans.append(mine)
    return spans, begin


def test_pointers_are_checked_by_address() -> None:
    """A sound program passes; a table of rank 0, and an offset past the region, are named."""
    program = models.program("dense-small", tp=2, **OPTIONS)
    spans, begin = addresses(program)
    phase = program.phases["decode1x1"]
    check_pointers(phase, spans, lambda arg: begin[arg.region, arg.rank] + arg.offset)
    with pytest.raises(DeviceError, match=r"rank 1 is 0x[0-9a-f]+, outside its state"):
        check_pointers(phase, spans, lambda arg: begin[arg.region, 0 if arg.region == "state" else arg.rank] + arg.offset)
    with pytest.raises(DeviceError, match="outside its weights"):
        check_pointers(phase, spans, lambda arg: begin[arg.region, arg.rank] + arg.offset
                       + (program.regions[0][WEIGHTS] if arg.region == WEIGHTS else 0))  # fmt: skip
