"""Clusters: blocks that run together, meet, and store into each other's shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.emulator import toolchain
from tests.emulator.emulator import EmulatorError, compile_kernel, launch
from tests.emulator.harness import under_schedules

pytestmark = pytest.mark.skipif(toolchain.missing_reason() is not None, reason=str(toolchain.missing_reason()))

# Every block sends its threads' values to the next block of its cluster, which writes them out.
SOURCE = """
#include <ninferc/base/cluster.cuh>
#include <ninferc/base/warp.cuh>
using namespace ninferc;
NINFERC_KERNEL(ring, 64, 1)(const u32* in, u32* out, u32 size, u32 meet, u32 wait) {
  __shared__ u32 inbox[64];
  __shared__ __align__(8) u64 arrived;
  if (threadIdx.x == 0) {
    mbarrier_init(&arrived, 1);
    fence_mbarrier_init();
  }
  cluster_arrive();
  if (meet) cluster_wait();
  const u32 place = blockIdx.x * 64 + threadIdx.x;
  st_async_4(&inbox[threadIdx.x], ld_global<u32>(in + place), &arrived, (blockIdx.x + 1) % size);
  if (!wait) return;
  if (threadIdx.x == 0) mbarrier_arrive_expect(&arrived, 64 * 4);
  mbarrier_wait(&arrived, 0);
  st_global(out + place, inbox[threadIdx.x]);
}
"""


def run(size: int, seed: int, meet: int = 1, wait: int = 1, cluster: int = 0) -> Any:
    values = np.arange(6 * 64, dtype=np.uint32)
    out = np.zeros_like(values)
    launch(compile_kernel(SOURCE), 6, 64, [values, out, size, meet, wait], schedule_seed=seed, cluster=cluster or size)
    return out.reshape(6, 64)


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_neighbours_of_a_cluster(size: int) -> None:
    (out,) = under_schedules(lambda seed: [run(size, seed)])
    for block in range(6):
        sender = block // size * size + (block % size - 1) % size
        assert np.array_equal(out[block], np.arange(64) + 64 * sender)


def test_a_store_before_the_cluster_has_met() -> None:
    with pytest.raises(EmulatorError, match="before the cluster has met"):
        run(2, 1, meet=0)


def test_a_block_that_ends_while_something_comes() -> None:
    with pytest.raises(EmulatorError, match="still in flight|has ended"):
        run(2, 0, wait=0)


def test_a_rank_outside_the_cluster() -> None:
    with pytest.raises(EmulatorError, match="none of rank 2"):
        run(3, 1, cluster=2)


def test_grids_that_no_cluster_divides() -> None:
    with pytest.raises(EmulatorError, match="does not consist of clusters of 4"):
        run(4, 1)
