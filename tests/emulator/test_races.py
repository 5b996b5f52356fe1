"""Checked kernels: races are reported whatever the schedule, and synchronised kernels are not accused."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pytest

from tests.emulator import emulator
from tests.emulator.emulator import EmulatorError, compile_kernel, launch
from tests.emulator.harness import poisoned
from tests.emulator.test_faults import BULK, FLAGS, HEAD, PIPELINE, REVERSE

pytestmark = pytest.mark.skipif(emulator.missing_reason() is not None, reason=str(emulator.missing_reason()))


def verdict(source: str, grid: int, block: int, args: Sequence[object], seed: int, smem: int = 0,
            concurrency: int | str = 1) -> str:
    try:
        launch(compile_kernel(source, checked=True), grid, block, args, smem, seed, concurrency=concurrency)
    except EmulatorError as error:
        return str(error)
    return "sound"


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("first", "second", "expected"), [
    ("sync_block()", "sync_block()", "sound"),
    ("", "sync_block()", "dynamic shared memory"),
    ("sync_block()", "", "race: (store|load) of byte .* of dynamic shared memory and (load|store) by thread"),
    ("sync_warp()", "sync_block()", "race"),
    ("named_barrier_sync(2, 256)", "named_barrier_sync(3, 256)", "sound"),
])
def test_block_barriers(first: str, second: str, expected: str, seed: int) -> None:
    source = REVERSE.replace("FIRST", first).replace("SECOND", second)
    args: list[object] = [np.arange(256, dtype=np.uint32), poisoned(256, np.uint32), 3]
    result = verdict(source, 1, 256, args, seed, smem=1024)
    assert (result == "sound") if expected == "sound" else re.search(expected, result), result


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("body", "sound"), [
    ("tile[t] = t; sync_warp(); v = tile[t ^ 1];", True),
    ("tile[t] = t; v = tile[t ^ 1];", False),
    ("tile[t] = t; v = shfl(t, 0); v = tile[t ^ 1];", False),  # a shuffle orders no memory
    ("v = tile[t ^ 1]; tile[t] = t;", False),
    ("tile[t] = t; v = tile[t];", True),
    ("tile[0] = t; sync_warp(); v = tile[0];", False),
    ("tile[0] = 1; sync_warp(); v = tile[0];", False),  # of equal values too
    ("tile[0] = 1 + t / 31; sync_warp(); v = tile[0];", False),
    ("if (t == 0) tile[0] = 1; sync_warp(); v = tile[0];", True),
    ("atomicAdd(&tile[64], 1u);", True),
    ("reinterpret_cast<u8*>(tile)[t] = 1;", True),  # neighbouring bytes
    ("reinterpret_cast<u16*>(tile)[t / 2 * 2 + 1 - t % 2] = 1;", True),
])
def test_within_a_warp(body: str, sound: bool, seed: int) -> None:
    source = HEAD + """
NINFERC_KERNEL(lanes, 32, 1)(u32* out) {
  __shared__ u32 tile[65];
  const u32 t = threadIdx.x;
  if (t == 0) tile[64] = 0;
  sync_warp();
  u32 v = 0;
  BODY
  out[t] = v;
}""".replace("BODY", body)
    result = verdict(source, 1, 32, [poisoned(32, np.uint32)], seed)
    assert (result == "sound") == sound, result


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("wait", "barrier", "buffers", "sound"), [
    ("cp_async_wait<1>()", "sync_block()", "3", True),
    ("cp_async_wait<1>()", "", "3", False),
    ("cp_async_wait<1>()", "sync_block()", "2", False),
])
def test_asynchronous_pipeline(wait: str, barrier: str, buffers: str, sound: bool, seed: int) -> None:
    source = PIPELINE.replace("WAIT", wait).replace("BARRIER", barrier).replace("BUFFERS", buffers)
    result = verdict(source, 1, 128, [np.ones((6, 512), np.uint32), poisoned(512, np.uint32), 6], seed)
    assert (result == "sound") == sound, result


RING = HEAD + """
// Warp 0 loads, warps 1 to 3 consume, over a ring of two buffers with full and empty barriers.
NINFERC_KERNEL(ring, 128, 1)(const u32* in, u32* out, u32 steps) {
  __shared__ __align__(16) u32 buffer[2][96];
  __shared__ u64 full[2], empty[2];
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < 2; ++i) { mbarrier_init(&full[i], 1); mbarrier_init(&empty[i], 96); }
    fence_mbarrier_init();
  }
  sync_block();
  if (warp_id() == 0) {
    if (lane_id() == 0)
      for (u32 step = 0; step < steps; ++step) {
        const u32 s = step % 2;
        EMPTY;
        mbarrier_arrive_expect(&full[s], 384);
        bulk_copy(buffer[s], in + step * 96, 384, &full[s]);
      }
  } else {
    u32 sum = 0;
    for (u32 step = 0; step < steps; ++step) {
      const u32 s = step % 2;
      mbarrier_wait(&full[s], step / 2 & 1);
      sum += buffer[s][threadIdx.x - 32];
      mbarrier_arrive(&empty[s]);
    }
    out[threadIdx.x - 32] = sum;
  }
}
"""


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("empty", "sound"), [("mbarrier_wait(&empty[s], (step / 2 & 1) ^ 1)", True), ("", False)])
def test_bulk_ring(empty: str, sound: bool, seed: int) -> None:
    data, out = np.arange(8 * 96, dtype=np.uint32).reshape(8, 96), poisoned(96, np.uint32)
    result = verdict(RING.replace("EMPTY", empty), 1, 128, [data, out, 8], seed)
    if sound:
        assert result == "sound"
        np.testing.assert_array_equal(out, data.sum(0))
    else:
        assert result != "sound" or (out != data.sum(0)).any()


def test_bulk_copy_over_a_buffer_in_use() -> None:
    source = BULK.replace("EXPECTED", "1024").replace("WAIT", "mbarrier_wait(&full[s], step / 2 & 1)")
    args = [np.ones((6, 256), np.uint32), poisoned(64, np.uint32)]
    assert verdict(source, 1, 64, args, 0) == "sound"
    # Without the closing barrier thread 0 loads the next data over what others read, or runs a whole phase ahead of them.
    assert verdict(source.replace("sync_block();\n  }\n  out", "}\n  out"), 1, 64, args, 0) != "sound"


@pytest.mark.parametrize(("store", "sound"), [
    ("out[blockIdx.x * 32 + threadIdx.x] = 1", True),
    ("out[blockIdx.x * 16 + threadIdx.x] = blockIdx.x", False),
    ("if (blockIdx.x == 0) out[threadIdx.x] = 1; else out[32 + threadIdx.x] = out[threadIdx.x]", False),
    ("atomic_add(out, 1u)", True),
    ("out[threadIdx.x / 2] = 1", True),
    ("out[threadIdx.x / 2] = threadIdx.x", False),
    ("out[threadIdx.x / 2] += blockIdx.x + 1", False),
])
def test_global_memory(store: str, sound: bool) -> None:
    source = HEAD + "NINFERC_KERNEL(stores, 32, 1)(u32* out) { " + store + "; }"
    result = verdict(source, 2, 32, [np.zeros(64, np.uint32)], 0)
    assert (result == "sound") == sound, result


def test_flags_between_blocks() -> None:
    args = [np.zeros(1, np.uint32), np.zeros(1, np.uint32), np.zeros(1, np.uint32), poisoned(8 * 64, np.uint32)]
    assert verdict(FLAGS, 8, 64, args, 1, concurrency="grid") == "sound"


def test_exact_bounds_of_plain_loads() -> None:
    """A plain load just behind an array, which no guard page can catch."""
    source = HEAD + "NINFERC_KERNEL(peek, 32, 1)(const u32* in, u32* out) { out[threadIdx.x] = in[threadIdx.x + 1]; }"
    result = verdict(source, 1, 32, [np.zeros(32, np.uint32), poisoned(32, np.uint32)], 0)
    assert "load of 4 bytes out of bounds: byte 128 of argument 0" in result
