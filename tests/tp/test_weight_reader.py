"""Shards read in pieces are the shards that are cut as a whole, gaps between planes included."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from artifacts.layouts import layout_of
from compiler.ir.types import Kind, TensorType, Value, WeightSource
from runtime.vm.weights import MadeObjects, WeightStore

ROWS, COLS = ((0, 128), (256, 384)), ((256, 640),)


class Objects:
    """Two objects of random bytes."""

    def __init__(self, nbytes: int) -> None:
        self._data = np.random.default_rng(3).integers(1, 256, (2, nbytes), np.uint8)

    def object_bytes(self, index: int) -> np.ndarray[Any, Any]:
        return self._data[index]

    def reader(self) -> MadeObjects:
        return MadeObjects(self)


def value_of(name: str, index: int, shape: tuple[int, int], rows: Any, cols: Any) -> Value:
    layout = layout_of(name)
    rows, cols = rows or ((0, shape[0]),), cols or ((0, shape[1]),)
    shard = layout.shard(name, shape, list(rows), list(cols))
    return Value(f"w{index}", TensorType(shard.shape, "u8"), Kind.WEIGHT, 0,
                 WeightSource(index, name, layout.name, shape, rows, cols), shard.nbytes)  # fmt: skip


@pytest.mark.parametrize("wide", [1, 200, 1 << 40])
@pytest.mark.parametrize("cut", ["whole", "rows", "columns", "both"])
@pytest.mark.parametrize("name", ["NVFP4", "FP8_E4M3FN_ROW_BF16S", "Q5G64_F16S", "W8G32_F16S", "BF16"])
def test_pieces_of_a_shard(name: str, cut: str, wide: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.vm.weights.WIDE", wide)
    shape = (384, 640 if name == "NVFP4" else 650)
    rows = (ROWS if name == "NVFP4" else ((3, 100), (120, 131))) if cut in ("rows", "both") else None
    cols = COLS if cut in ("columns", "both") else None
    layout = layout_of(name)
    store = WeightStore(Objects(layout.encoded_size(name, shape)))
    reader = store.reader()
    gaps = 0
    for index, size in ((0, 10007), (1, 400), (0, 1 << 20)):
        value = value_of(name, index, shape, rows, cols)
        assert store.whole(value) == (cut == "whole")
        want = store.encoded(value)
        gaps += sum(length for _, length in layout.gaps(name, value.type.shape))
        for begin in range(0, value.nbytes, size):
            out = np.full(min(size, value.nbytes - begin), 0xA5, np.uint8)
            reader.read_into(value, begin, out)
            assert np.array_equal(out, want[begin : begin + out.size]), (index, begin)
    assert gaps or cut != "rows" or name[:2] not in ("FP", "Q5"), "no padding between the planes of these shards"
    reader.close()
