"""Weights of two ranks on their way to the devices: the file is read once, each rank gets what its shard says."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from compiler.ir.types import Kind
from compiler.program.model import WEIGHTS
from runtime.cuda.driver import DeviceError, api
from runtime.cuda.pointers import check_pointers
from runtime.cuda.upload import upload
from runtime.open import ArtifactWeights
from runtime.vm.weights import WeightStore
from tests import models
from tests.tp.copies import Copies

OPTIONS: dict[str, Any] = {"max_context": 256, "prefill_chunk": 128, "pairs": ((1, 1),)}


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> Iterator[Copies]:
    yield Copies(monkeypatch)
    api.cache_clear()


class Counting(ArtifactWeights):
    """Counts how often each object is fetched, in order."""

    def __init__(self, artifact: Any) -> None:
        super().__init__(artifact)
        self.fetched: list[int] = []

    def object_bytes(self, index: int) -> np.ndarray[Any, Any]:
        self.fetched.append(index)
        return super().object_bytes(index)


def loaded(program: Any, store: WeightStore, machine: Copies, threads: int, progress: Any = lambda count: None) -> None:
    values = [(v, v.rank, machine.base(v.rank) + program.placements[v.name].offset)
              for v in program.values.values() if v.kind is Kind.WEIGHT]  # fmt: skip
    upload(values, store, machine.devices, progress, threads)


@pytest.mark.parametrize("threads", [1, 5])
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["dense-small", "example"])
def test_every_byte_arrives_and_each_object_is_read_once(tp: int, name: str, threads: int, copies: Copies) -> None:
    program = models.program(name, tp=tp, **OPTIONS)
    source = Counting(models.artifact(name))
    copies.allocate([sizes[WEIGHTS] for sizes in program.regions])
    counts: list[int] = []
    loaded(program, WeightStore(source), copies, threads, counts.append)
    values = [v for v in program.values.values() if v.kind is Kind.WEIGHT]
    assert len(source.fetched) == len(set(source.fetched)), "an object is fetched again"
    assert set(source.fetched) == {v.source.object_index for v in values if v.source}
    plain = WeightStore(ArtifactWeights(source.artifact))
    for value in values:
        place = program.placements[value.name]
        assert np.array_equal(copies.memory[value.rank][place.offset : place.end], plain.encoded(value)), value.name
    assert sum(counts) == sum(value.nbytes for value in values) and len(counts) > len(values)
    assert copies.open == 0, "an event, a stream or a buffer is left"


def test_an_artifact_that_cannot_be_read(copies: Copies) -> None:
    program = models.program("dense-small", "bf16", **OPTIONS)
    source = Counting(models.artifact("dense-small", "bf16"))
    copies.allocate([sizes[WEIGHTS] for sizes in program.regions])
    healthy = source.object_bytes

    def failing(index: int) -> np.ndarray[Any, Any]:
        if len(source.fetched) == 7:
            raise OSError(5, "Input/output error", "model.ninfer")
        return healthy(index)

    source.object_bytes = failing  # type: ignore[method-assign]
    with pytest.raises(OSError, match="model.ninfer"):
        loaded(program, WeightStore(source), copies, 4)
    assert copies.open == 0 and len(source.fetched) < 12


def test_a_device_that_fails(copies: Copies) -> None:
    program = models.program("dense-small", "bf16", **OPTIONS)
    copies.allocate([sizes[WEIGHTS] for sizes in program.regions])
    copies.fail_after = 20
    with pytest.raises(DeviceError, match="copy to the device: CUDA_ERROR_ILLEGAL_ADDRESS"):
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
