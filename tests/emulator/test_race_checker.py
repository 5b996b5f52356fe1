"""Checked kernels list the accesses of shared memory that nothing orders: every kind is found, no ordered access accused."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

from tests.emulator import emulator
from tests.emulator.emulator import EmulatorError, Kernel, compile_kernel, compile_module, launch
from tests.emulator.harness import poisoned
from tests.emulator.hazards import Hazard

pytestmark = pytest.mark.skipif(emulator.missing_reason() is not None, reason=str(emulator.missing_reason()))

HEAD = """
#include <ninferc/base/cluster.cuh>
#include <ninferc/base/grid.cuh>
#include <ninferc/base/mma.cuh>
#include <ninferc/base/warp.cuh>
using namespace ninferc;
"""
# Two warps. Shuffles let all lanes of a warp come to a place, and order nothing.
KERNEL = """
NINFERC_KERNEL(NAME, 64, 1)(const u32* in, u32* out) {
  NINFERC_DYNAMIC_SMEM(memory);
  __shared__ u64 bars[2];
  u32* const tile = reinterpret_cast<u32*>(memory);
  const u32 t = threadIdx.x, lane = t % 32, warp = t / 32, row = shared_address(memory + t * 16);
  u32 v = 0, r[4] = {t, t, t, t};
  BODY
  out[t] = v + r[0];
}"""
INIT = "if (t == 0) { mbarrier_init(&bars[0], %d); fence_mbarrier_init(); } sync_block();"
COPY, LAND = "cp_async_16(row, in + 4 * t); cp_async_commit();", "cp_async_wait<0>();"
BULK = "{ mbarrier_arrive_expect(&bars[0], 256); bulk_copy(tile, in, 256, &bars[0]); }"
ARRIVE, WAIT, ONE_LANE = "mbarrier_arrive(&bars[0]);", "mbarrier_wait(&bars[0], 0);", "if (lane == 0)"
SEND, GET = "if (warp == 0) { tile[lane] = t; %s }", "else { %s v = tile[lane]; }"
HALF = "sync_warp(lane < 16 ? 0xffffu : 0xffff0000u);"
WITHIN, ACROSS = True, False  # one warp, two warps
RAW, WAR, WAW = {("RAW", WITHIN)}, {("WAR", WITHIN)}, {("WAW", WITHIN)}
RAW_ACROSS, WAR_ACROSS, WAW_ACROSS = {("RAW", ACROSS)}, {("WAR", ACROSS)}, {("WAW", ACROSS)}
CLEAN: set[tuple[str, bool]] = set()
CASES: dict[str, tuple[str, set[tuple[str, bool]]]] = {
    "raw": ("tile[t] = t; shfl(t, 0); v = tile[t ^ 1];", RAW),
    "war": ("v = tile[t ^ 1]; shfl(t, 0); tile[t] = t;", WAR),
    "waw": ("tile[t] = t; shfl(t, 0); tile[t ^ 1] = t;", WAW),
    "voted": ("tile[t] = t; warp_any(t == 5); v = tile[t ^ 1];", RAW),
    "equal": ("tile[warp] = 7; shfl(t, 0);", WAW),
    "own": ("tile[t] = t; shfl(t, 0); v = tile[t]; tile[t] = v + 1;", CLEAN),
    "synced": ("tile[t] = t; sync_warp(); v = tile[t ^ 1]; sync_warp(); tile[t] = v;", CLEAN),
    "bytes": ("reinterpret_cast<u8*>(tile)[t ^ 1] = 1; shfl(t, 0); reinterpret_cast<u8*>(tile)[t ^ 1] = 2;", CLEAN),
    "half": (f"tile[t] = t; {HALF} v = tile[t ^ 1];", CLEAN),
    "halves": (f"tile[t] = t; {HALF} v = tile[t ^ 16];", RAW | WAR),
    "later": ("if (lane == 3) tile[warp] = t; sync_warp(); v = tile[warp]; shfl(t, 0); if (lane == 5) tile[warp] = 1;", WAR),
    "elected": ("if (elect_one()) tile[t] = t; v = shfl(t, 0) + tile[t & ~31u];", RAW),
    "raw2": ("if (warp == 0) tile[lane] = t; else v = tile[lane];", RAW_ACROSS),
    "war2": ("if (warp == 0) v = tile[lane]; else tile[lane] = t;", WAR_ACROSS),
    "waw2": ("tile[lane] = t;", WAW_ACROSS),
    "block": ("tile[t] = t; sync_block(); v = tile[63 - t]; sync_block(); tile[t] = v;", CLEAN),
    "once": ("tile[t] = t; sync_block(); v = tile[63 - t]; tile[t] = v;", WAR_ACROSS | RAW_ACROSS),
    "named": ("tile[t] = t; named_barrier_sync(3, 64); v = tile[63 - t];", CLEAN),
    "apart": ("tile[t] = t; named_barrier_sync(3 + warp, 32); v = tile[t ^ 33];", RAW_ACROSS | WAR_ACROSS),
    "arrive": (SEND % "named_barrier_arrive(2, 64);" + GET % "named_barrier_sync(2, 64);", CLEAN),
    "arrived": (SEND % "named_barrier_sync(2, 64);" + GET % "named_barrier_arrive(2, 64);", RAW_ACROSS),
    "after": ("if (warp == 0) named_barrier_arrive(2, 64), tile[lane] = t;" + GET % "named_barrier_sync(2, 64);", RAW_ACROSS),
    "atomics": ("atomicAdd(&tile[0], t);", CLEAN),
    "counted": ("if (t == 0) tile[0] = 0; sync_block(); atomicAdd(&tile[0], 1u); sync_block(); v = tile[0];", CLEAN),
    "peeked": ("if (warp == 0) atomicAdd(&tile[0], 1u); else v = tile[0];", RAW_ACROSS),
    "copied": (COPY + LAND + "v = tile[4 * t];", CLEAN),
    "in_flight": (COPY + "v = tile[4 * t];" + LAND, RAW),
    "overwritten": (COPY + "tile[4 * t] = t;" + LAND, WAW),
    "of_another": (COPY + LAND + "shfl(t, 0); v = tile[4 * t ^ 4];", RAW),
    "for_another": (COPY + LAND + "sync_warp(); v = tile[4 * t ^ 4];", CLEAN),
    "synced_first": (COPY + "sync_warp();" + LAND + "shfl(t, 0); v = tile[4 * t ^ 4];", RAW),
    "in_use": ("v = tile[4 * t ^ 4]; shfl(t, 0);" + COPY + LAND, WAR),
    "twice": ("cp_async_16(memory + t / 2 * 16, in + t / 2 * 4); cp_async_commit();" + LAND, WAW),
    "read": ("ldmatrix_x4(r, row); st_shared<u16>(row, u16(t));", WAR),
    "read_transposed": ("ldmatrix_x4_trans(r, row); st_shared<u16>(row, u16(t));", WAR),
    "read_synced": ("ldmatrix_x4(r, row); sync_warp(); st_shared<u16>(row, u16(t));", CLEAN),
    "written": ("stmatrix_x4(row, r); v = ld_shared<u32>(row);", RAW),
    "written_synced": ("stmatrix_x4(row, r); sync_warp(); v = ld_shared<u32>(row);", CLEAN),
    "fed": ("st_shared<u32x4>(row, {t, t, t, t}); ldmatrix_x4(r, row);", RAW),
    "sent": (INIT % 32 + SEND % ARRIVE + GET % WAIT, CLEAN),
    "not_waited": (INIT % 32 + SEND % ARRIVE + GET % (ONE_LANE + WAIT + "shfl(t, 0);"), RAW_ACROSS),
    "sent_late": (INIT % 32 + "if (warp == 0) { mbarrier_arrive(&bars[0]); tile[lane] = t; }" + GET % WAIT, RAW_ACROSS),
    "for_all": (INIT % 1 + SEND % ("sync_warp();" + ONE_LANE + ARRIVE) + GET % WAIT, CLEAN),
    "for_one": (INIT % 1 + SEND % ("shfl(t, 0);" + ONE_LANE + ARRIVE) + GET % WAIT, RAW_ACROSS),
    "uninitialised": ("if (lane == 0) mbarrier_init(&bars[warp], 32); shfl(t, 0); mbarrier_arrive(&bars[warp]);", RAW),
    "bulk": (INIT % 1 + "if (t == 0)" + BULK + WAIT + "v = tile[t];", CLEAN),
    "bulk_not_waited": (INIT % 1 + "if (t == 0)" + BULK + ONE_LANE + WAIT + "shfl(t, 0); v = tile[t];", RAW_ACROSS),
    "bulk_in_use": (INIT % 1 + "if (warp == 0) v = tile[lane]; shfl(t, 0); if (t == 1)" + BULK + WAIT, WAR),
}  # fmt: skip


@cache
def kernels(arch: int) -> dict[str, Kernel]:
    """All cases in one object."""
    text = [KERNEL.replace("NAME", name).replace("BODY", body) for name, (body, _) in CASES.items()]
    return compile_module(HEAD + "".join(text), arch=arch, checked=True)


def found(kernel: Kernel, seed: int = 0, block: int = 64, grid: int = 1, smem: int = 1024, cluster: int = 1) -> list[Hazard]:
    hazards: list[Hazard] = []
    args = [np.arange(4 * block, dtype=np.uint32), poisoned(block * grid, np.uint32)]
    launch(kernel, grid, block, args, smem, seed, cluster=cluster, hazards=hazards)
    return hazards


@pytest.mark.parametrize("name", CASES)
def test_hazards_of_shared_memory(name: str) -> None:
    expected = CASES[name][1]
    assert {(h.kind, h.same_warp) for h in found(kernels(900)[name])} == expected
    for seed in (1, 2):  # in another order of threads a hazard may be of another kind
        assert bool(found(kernels(900)[name], seed)) == bool(expected)


def test_stores_of_equal_values_are_told_apart() -> None:
    assert all(h.equal for h in found(kernels(900)["equal"]))
    assert not any(h.equal for h in found(kernels(900)["waw"]))


def test_a_hazard_names_threads_and_places() -> None:
    source = HEAD + KERNEL.replace("NAME", "two").replace("BODY", "if (t == 40) tile[7] = 1;\n\n  if (t == 41) v = tile[7];")
    (hazard,) = found(compile_kernel(source, checked=True))
    assert (hazard.memory, hazard.byte, hazard.thread, hazard.other, hazard.count) == ("dynamic", 28, 41, 40, 1)
    at = 1 + source[: source.index("tile[7] = 1")].count("\n")
    if not hazard.place.startswith("offset"):  # there is a program that reads line tables
        assert hazard.other_place == f"kernel.cu:{at}" and hazard.place == f"kernel.cu:{at + 2}"
    assert "RAW in a warp, byte 28 of dynamic shared memory, 1 times: thread 41 at" in str(hazard)


def test_without_a_list_the_first_hazard_ends_the_launch() -> None:
    args = [np.zeros(256, np.uint32), poisoned(64, np.uint32)]
    with pytest.raises(EmulatorError, match="race: load of byte 0 of dynamic shared memory and store by thread 0"):
        launch(kernels(900)["raw2"], 1, 64, args, 1024)


def test_every_block_begins_anew() -> None:
    """Blocks that run in one place after the other do not meet in shared memory."""
    assert not found(kernels(900)["own"], grid=3)


CLUSTER = HEAD + """
NINFERC_KERNEL(pair, 32, 1)(const u32* in, u32* out) {
  __shared__ u64 bar;
  __shared__ u32 got[32];
  if (threadIdx.x == 0) { mbarrier_init(&bar, 1); fence_mbarrier_init(); mbarrier_arrive_expect(&bar, 128); }
  BEFORE
  sync_warp();
  cluster_arrive();
  cluster_wait();
  st_async_4(&got[threadIdx.x], in[threadIdx.x], &bar, blockIdx.x ^ 1);
  WAIT
  out[blockIdx.x * 32 + threadIdx.x] = got[threadIdx.x ^ 1];
  if (threadIdx.x < 32) mbarrier_wait(&bar, 0);
}"""


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("before", "wait", "kinds"), [
    ("", "mbarrier_wait(&bar, 0);", set()),
    ("got[threadIdx.x] = 0;", "mbarrier_wait(&bar, 0);", {"WAW"}),  # the meeting orders nothing
    ("", "if (threadIdx.x == 0) mbarrier_wait(&bar, 0); shfl(0u, 0);", {"RAW"}),
])  # fmt: skip
def test_stores_of_the_cluster(before: str, wait: str, kinds: set[str], seed: int) -> None:
    kernel = compile_kernel(CLUSTER.replace("BEFORE", before).replace("WAIT", wait), checked=True)
    assert {h.kind for h in found(kernel, seed, block=32, grid=2, smem=0, cluster=2)} == kinds
