"""Weights of two ranks on their way to the devices: the file is read once, each rank gets what its shard says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from compiler.ir.types import Kind
from compiler.program.model import WEIGHTS
from runtime.cuda.driver import DeviceError
from runtime.cuda.pointers import check_pointers
from runtime.open import ArtifactWeights
from runtime.vm.weights import WeightStore, upload_order
from tests import models

OPTIONS: dict[str, Any] = {"max_context": 256, "prefill_chunk": 128, "pairs": ((1, 1),)}


class Counting(ArtifactWeights):
    """Counts how often each object is fetched, in order."""

    def __init__(self, artifact: Any) -> None:
        super().__init__(artifact)
        self.fetched: list[int] = []

    def object_bytes(self, index: int) -> np.ndarray[Any, Any]:
        self.fetched.append(index)
        return super().object_bytes(index)


class Memory:
    """A device that keeps what is uploaded, by address."""

    def __init__(self, nbytes: int) -> None:
        self.data = np.zeros(nbytes, np.uint8)

    def upload(self, address: int, data: np.ndarray[Any, Any]) -> None:
        self.data[address : address + data.size] = data


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", ["dense-small", "example"])
def test_each_object_is_read_once(tp: int, name: str) -> None:
    program = models.program(name, "bf16", tp=tp, **OPTIONS)
    source = Counting(models.artifact(name))
    store, plain = WeightStore(source), WeightStore(ArtifactWeights(source.artifact))
    devices = [Memory(sizes[WEIGHTS]) for sizes in program.regions]
    order = upload_order(program.values.values())
    for value in order:
        place = program.placements[value.name]
        list(store.upload(value, devices[value.rank], place.offset))
    assert source.fetched == sorted(set(source.fetched)), "an object is fetched again or out of the file's order"
    assert {value.name for value in order} == {v.name for v in program.values.values() if v.kind is Kind.WEIGHT}
    for value in order:
        place = program.placements[value.name]
        there = devices[value.rank].data[place.offset : place.end]
        assert np.array_equal(there, plain.encoded(value)), value.name


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
