"""Planted faults: each must be seen, and the same kernel without the fault must pass."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator import emulator
from tests.emulator.emulator import SHARED_LIMIT, EmulatorError, compile_kernel, launch
from tests.emulator.harness import poisoned, under_schedules

pytestmark = pytest.mark.skipif(emulator.missing_reason() is not None, reason=str(emulator.missing_reason()))
SEEDS = range(6)

HEAD = """
#include <ninferc/base/async.cuh>
#include <ninferc/base/grid.cuh>
#include <ninferc/base/mma.cuh>
#include <ninferc/base/warp.cuh>
using namespace ninferc;
"""


@pytest.fixture(autouse=True, params=["plain", "checked"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("NINFERC_EMULATOR_CHECKED", "1" if request.param == "checked" else "0")
    return str(request.param)


def seen(run, seeds=SEEDS) -> bool:  # type: ignore[no-untyped-def]
    """Whether at least one schedule gives a different or wrong result, or an error."""
    results = set()
    for seed in seeds:
        try:
            results.add(run(seed).tobytes())
        except EmulatorError:
            return True
    return len(results) > 1


REVERSE = HEAD + """
NINFERC_KERNEL(reverse, 256, 1)(const u32* in, u32* out, u32 rounds) {
  NINFERC_DYNAMIC_SMEM(smem);
  u32* tile = reinterpret_cast<u32*>(smem);
  u32 v = in[threadIdx.x];
  for (u32 i = 0; i < rounds; ++i) {
    tile[threadIdx.x] = v;
    FIRST;
    v = tile[255 - threadIdx.x] + 1;
    SECOND;
  }
  out[threadIdx.x] = v;
}
"""


@pytest.mark.parametrize(("first", "second", "sound"), [("sync_block()", "sync_block()", True),
                                                        ("", "sync_block()", False), ("sync_block()", "", False)])
def test_missing_block_barrier(first: str, second: str, sound: bool) -> None:
    kernel = compile_kernel(REVERSE.replace("FIRST", first).replace("SECOND", second))
    data = np.arange(256, dtype=np.uint32)

    def run(seed: int) -> np.ndarray:
        out = poisoned(256, np.uint32)
        launch(kernel, 1, 256, [data, out, 4], smem_bytes=1024, schedule_seed=seed)
        return out

    if sound:
        np.testing.assert_array_equal(under_schedules(lambda seed: [run(seed)], SEEDS)[0], data + 4)
    else:
        assert seen(run)


@pytest.mark.parametrize("sync", ["sync_warp()", ""])
def test_missing_warp_barrier(sync: str) -> None:
    kernel = compile_kernel(HEAD + """
NINFERC_KERNEL(rotate, 32, 1)(u32* out) {
  __shared__ u32 tile[32];
  tile[lane_id()] = lane_id();
  SYNC;
  out[lane_id()] = tile[(lane_id() + 1) % 32];
}""".replace("SYNC", sync))

    def run(seed: int) -> np.ndarray:
        out = poisoned(32, np.uint32)
        launch(kernel, 1, 32, [out], schedule_seed=seed)
        return out

    assert seen(run) == (sync == "")


PIPELINE = HEAD + """
// out[i] = sum over stages of in[stage][i], two stages in flight.
NINFERC_KERNEL(pipeline, 128, 1)(const u32* in, u32* out, u32 stages) {
  __shared__ __align__(16) u32 buffer[3][512];
  const u32 t = threadIdx.x;
  const auto issue = [&](u32 stage) {
    if (stage < stages) cp_async_16(&buffer[stage % BUFFERS][4 * t], in + stage * 512 + 4 * t);
    cp_async_commit();
  };
  issue(0);
  issue(1);
  u32 sum[4] = {0, 0, 0, 0};
  for (u32 stage = 0; stage < stages; ++stage) {
    WAIT;
    BARRIER;
    issue(stage + 2);
    for (u32 i = 0; i < 4; ++i) sum[i] += buffer[stage % BUFFERS][(t * 4 + i) ^ 64];
  }
  cp_async_wait<0>();
  for (u32 i = 0; i < 4; ++i) out[(t * 4 + i) ^ 64] = sum[i];
}
"""


@pytest.mark.parametrize(("wait", "barrier", "buffers", "sound"), [
    ("cp_async_wait<1>()", "sync_block()", "3", True),
    ("", "sync_block()", "3", False),
    ("cp_async_wait<2>()", "sync_block()", "3", False),
    ("cp_async_wait<1>()", "", "3", False),
    ("cp_async_wait<1>()", "sync_block()", "2", False),  # overwrites the stage being read
])
def test_asynchronous_pipeline(wait: str, barrier: str, buffers: str, sound: bool) -> None:
    source = PIPELINE.replace("WAIT", wait).replace("BARRIER", barrier).replace("BUFFERS", buffers)
    kernel = compile_kernel(source)
    data = np.random.default_rng(0).integers(0, 1000, (6, 512), dtype=np.uint32)

    def run(seed: int) -> np.ndarray:
        out = poisoned(512, np.uint32)
        launch(kernel, 1, 128, [data, out, 6], schedule_seed=seed)
        return out

    if sound:
        np.testing.assert_array_equal(under_schedules(lambda seed: [run(seed)], SEEDS)[0], data.sum(0))
    else:
        assert seen(run)


BULK = HEAD + """
NINFERC_KERNEL(bulk, 64, 1)(const u32* in, u32* out) {
  __shared__ __align__(16) u32 buffer[2][256];
  __shared__ u64 full[2];
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < 2; ++i) mbarrier_init(&full[i], 1);
    fence_mbarrier_init();
  }
  sync_block();
  u32 sum = 0;
  for (u32 step = 0; step < 6; ++step) {
    const u32 s = step % 2;
    if (threadIdx.x == 0) {
      mbarrier_arrive_expect(&full[s], EXPECTED);
      bulk_copy(buffer[s], in + step * 256, 1024, &full[s]);
    }
    WAIT;
    for (u32 i = 0; i < 4; ++i) sum += buffer[s][threadIdx.x + 64 * i];
    sync_block();
  }
  out[threadIdx.x] = sum;
}
"""


@pytest.mark.parametrize(("expected", "wait", "sound"), [
    ("1024", "mbarrier_wait(&full[s], step / 2 & 1)", True),
    ("1024", "sync_block()", False),
    ("1024", "mbarrier_wait(&full[s], 1)", False),  # parity of the phase before: returns too early
    ("512", "mbarrier_wait(&full[s], step / 2 & 1)", False),
    ("2048", "mbarrier_wait(&full[s], step / 2 & 1)", False),
])
def test_bulk_copies(expected: str, wait: str, sound: bool) -> None:
    kernel = compile_kernel(BULK.replace("EXPECTED", expected).replace("WAIT", wait))
    data = np.random.default_rng(0).integers(0, 1000, (6, 256), dtype=np.uint32)

    def run(seed: int) -> np.ndarray:
        out = poisoned(64, np.uint32)
        launch(kernel, 1, 64, [data, out], schedule_seed=seed)
        return out

    if sound:
        expect = data.sum(0).reshape(4, 64).sum(0)
        np.testing.assert_array_equal(under_schedules(lambda seed: [run(seed)], SEEDS)[0], expect)
    else:
        assert seen(run)


COPY = HEAD + """
NINFERC_KERNEL(copy, 64, 1)(const u32* in, u32* out, u32 n) {
  const u32 i = blockIdx.x * 64 + threadIdx.x;
  if (i < n) BODY;
}
"""


@pytest.mark.parametrize(("body", "n", "message"), [
    ("st_global(out + i, ld_nc<u32>(in + i))", 100, None),
    ("st_global(out + i, ld_nc<u32>(in + i))", 101, "ld_nc of 4 bytes out of bounds: byte 400 of argument 0"),
    ("st_global(out + i + 1, ld_nc<u32>(in + i))", 100, "st_global of 4 bytes out of bounds: byte 400 of argument 1"),
    ("out[i + 1] = in[i]", 100, "store.* out of bounds: byte 400 of argument 1"),
    ("out[int(i) - 1] = in[i]", 100, "out of bounds: (byte -4 of|4 bytes before the start of) .*argument 1"),
    ("out[i] = in[i + 4096]", 100, "load.* out of bounds"),
    ("out[i] = reinterpret_cast<const u32*>(u64(i))[0]", 100, "null pointer"),
    ("const_cast<u32*>(in)[i] = 1", 100, "store.* out of bounds|read-only"),
    ("st_global(out + i / 2, ld_nc<u32x2>(in + i))", 64, "not a multiple of 8"),
    ("cp_async_16(shared_address(out), in)", 64, "shared"),
    ("st_shared(1024 + 65536 + 4 * i, 1u)", 64, "st_shared out of bounds"),
    ("__trap()", 64, "__trap"),
    ("assert(i != 3)", 64, r"thread \(3,0,0\): device assertion failed: i != 3"),
    ("while (i == 5) { asm volatile(\"\"); }", 64, "without ending"),
    ("out[i] = in[i] / (i - 3)", 64, "division by zero"),
])
def test_out_of_bounds(body: str, n: int, message: str | None) -> None:
    kernel = compile_kernel(COPY.replace("BODY", body))
    data, out = np.arange(100, dtype=np.uint32), poisoned(100, np.uint32)
    data.flags.writeable = False
    if message is None:
        launch(kernel, 2, 64, [data, out, n])
        np.testing.assert_array_equal(out, data)
        return
    with pytest.raises(EmulatorError, match=message):
        launch(kernel, 2, 64, [data, out, n], limit_seconds=0.3)


@pytest.mark.parametrize(("size", "message"), [(252, None), (256, "dynamic shared memory"), (8192, "dynamic shared memory")])
def test_dynamic_shared_bounds(size: int, message: str | None) -> None:
    kernel = compile_kernel(HEAD + """
NINFERC_KERNEL(touch, 32, 1)(u32 offset) {
  NINFERC_DYNAMIC_SMEM(smem);
  if (threadIdx.x == 0) *reinterpret_cast<u32*>(smem + offset) = 7;
}""")
    if message is None:
        launch(kernel, 1, 32, [size], smem_bytes=256)
        return
    with pytest.raises(EmulatorError, match=message):
        launch(kernel, 1, 32, [size], smem_bytes=256)


def test_all_shared_memory_of_a_block() -> None:
    """A kernel without shared variables may have the last byte, none may have one more."""
    kernel = compile_kernel(HEAD + """
NINFERC_KERNEL(whole, 32, 1)(u32 bytes) {
  NINFERC_DYNAMIC_SMEM(smem);
  if (threadIdx.x == 0) smem[bytes - 1] = 7;
}""")
    whole = SHARED_LIMIT[kernel.arch]
    launch(kernel, 1, 32, [whole], smem_bytes=whole)
    with pytest.raises(EmulatorError, match=f" 0 bytes of static and {whole + 1} of dynamic shared memory"):
        launch(kernel, 1, 32, [whole], smem_bytes=whole + 1)


STUCK = HEAD + """
NINFERC_KERNEL(stuck, 64, 1)(u32* out) {
  __shared__ u64 bar;
  f32 d[4] = {0, 0, 0, 0};
  u32 a[4] = {0, 0, 0, 0}, b[2] = {0, 0};
  const u32 t = threadIdx.x;
  BODY;
  out[t] = float_bits(d[0]) + a[0] + b[0];
}
"""


@pytest.mark.parametrize(("body", "message"), [
    ("if (t < 32) sync_block()", r"deadlock.*32 threads \(first: 0\) wait at __syncthreads.*32 threads have exited"),
    ("if (t == 7) return; sync_block()", "63 threads .*1 threads have exited"),
    ("if (t < 16) mma_m16n8k16_bf16(d, a, b)", "deadlock.*wait at mma"),
    ("if (t % 2) shfl(t, 0); else mma_m16n8k16_bf16(d, a, b)", "divergent warp"),
    ("if (t < 16) out[t] = shfl(t, 20, 32, 0xffff)", "shuffle: lane 0 reads lane 20"),
    ("if (t == 16) shfl(t, 0, 32, 0xffff)", "not in mask"),
    ("if (t < 32) named_barrier_sync(1, 64)", "wait at named_barrier_sync"),
    ("named_barrier_sync(1, t < 32 ? 32 : 64)", "is used with|wait at named_barrier_sync, 32 threads have exited"),
    ("mbarrier_wait(&bar, 0)", "no mbarrier"),
    ("if (t == 0) mbarrier_init(&bar, 65); sync_block(); mbarrier_arrive(&bar); mbarrier_wait(&bar, 0)",
     "deadlock.*mbarrier_try_wait"),
    ("if (t == 0) mbarrier_init(&bar, 1); sync_block(); mbarrier_arrive(&bar); mbarrier_arrive(&bar); "
     "mbarrier_arrive(&bar); while (ld_acquire_gpu<u32>(out) != 5) {}", "deadlock.*ld_acquire_gpu"),
    ("ldmatrix_x4(a, shared_address(&bar) + 4)", "not a multiple of 16"),
])
@pytest.mark.parametrize("seed", [0, 1])
def test_stuck_or_divergent(body: str, message: str, seed: int) -> None:
    kernel = compile_kernel(STUCK.replace("BODY", body))
    with pytest.raises(EmulatorError, match=message):
        launch(kernel, 1, 64, [np.zeros(64, np.uint32)], schedule_seed=seed)


FLAGS = HEAD + """
// Every block adds its index; the last to arrive publishes, all wait for it.
NINFERC_KERNEL(flags, 64, 1)(u32* sum, u32* arrived, u32* ready, u32* out) {
  __shared__ u32 total;
  if (threadIdx.x == 0) {
    atomic_add(sum, blockIdx.x + 1);
    fence_gpu();
    if (atomic_add_acq_rel_gpu(arrived, 1u) == gridDim.x - 1) st_release_gpu(ready, 1u);
    while (ld_acquire_gpu<u32>(ready) == 0) nano_sleep(20);
    total = ld_cg<u32>(sum);
  }
  sync_block();
  out[blockIdx.x * 64 + threadIdx.x] = total;
}
"""


def test_whole_grid() -> None:
    kernel = compile_kernel(FLAGS)

    def run(seed: int, concurrency: int | str) -> np.ndarray:
        out = poisoned(12 * 64, np.uint32)
        launch(kernel, 12, 64, [np.zeros(1, np.uint32), np.zeros(1, np.uint32), np.zeros(1, np.uint32), out],
               schedule_seed=seed, concurrency=concurrency)
        return out

    np.testing.assert_array_equal(under_schedules(lambda seed: [run(seed, "grid")], SEEDS)[0], np.full(12 * 64, 78))
    with pytest.raises(EmulatorError, match="deadlock.*8 blocks have not started"):
        run(1, 4)


def test_static_shared_memory_is_per_block() -> None:
    kernel = compile_kernel(HEAD + """
NINFERC_KERNEL(mine, 32, 1)(u32* turn, u32* out) {
  __shared__ u32 own;
  if (threadIdx.x == 0) own = blockIdx.x;
  sync_block();
  while (ld_acquire_gpu<u32>(turn) != blockIdx.x) {}
  sync_block();
  out[blockIdx.x * 32 + threadIdx.x] = own;
  if (threadIdx.x == 0) st_release_gpu(turn, blockIdx.x + 1);
}""")
    for seed in SEEDS:
        out = poisoned(20 * 32, np.uint32)
        launch(kernel, 20, 32, [np.zeros(1, np.uint32), out], schedule_seed=seed, concurrency="grid")
        np.testing.assert_array_equal(out, np.repeat(np.arange(20), 32))


def test_shared_memory_starts_poisoned() -> None:
    kernel = compile_kernel(HEAD + """
NINFERC_KERNEL(peek, 32, 1)(f32* out) {
  NINFERC_DYNAMIC_SMEM(smem);
  __shared__ f32 tile[32];
  out += 64 * blockIdx.x;
  out[threadIdx.x] = tile[threadIdx.x] + 1;
  out[32 + threadIdx.x] = reinterpret_cast<f32*>(smem)[threadIdx.x] + 1;
  sync_block();
  tile[threadIdx.x] = 1;
  reinterpret_cast<f32*>(smem)[threadIdx.x] = 1;
}""")
    out = np.zeros(192, np.float32)
    launch(kernel, 3, 32, [out], smem_bytes=128)
    assert np.isnan(out).all()


@pytest.mark.parametrize(("before", "inside", "message"), [
    ("", "grid_dependency_wait()", None),
    ("ld_nc<u32>(constant)", "grid_dependency_wait()", None),
    ("ld_nc<u32>(data)", "grid_dependency_wait()", "argument 1 is touched before"),
    ("st_global(data, 1u)", "grid_dependency_wait()", "argument 1 is touched before"),
    ("", "if (blockIdx.x == 0) grid_dependency_wait()", "without grid_dependency_wait|touched before"),
])
def test_programmatic_edges(before: str, inside: str, message: str | None) -> None:
    kernel = compile_kernel(HEAD + """
NINFERC_KERNEL(edge, 32, 1)(const u32* constant, u32* data) {
  BEFORE;
  INSIDE;
  st_global(data + blockIdx.x * 32 + threadIdx.x, ld_nc<u32>(constant));
  grid_launch_dependents();
}""".replace("BEFORE", before).replace("INSIDE", inside))
    args = [np.array([9], np.uint32), poisoned(64, np.uint32)]
    if message is None:
        launch(kernel, 2, 32, args, programmatic=True, constants=[0])
        assert (args[1] == 9).all()
        return
    with pytest.raises(EmulatorError, match=message):
        launch(kernel, 2, 32, args, programmatic=True, constants=[0])


def test_arguments_are_checked() -> None:
    kernel = compile_kernel(HEAD + "NINFERC_KERNEL(three, 64, 1)(u32* p, i32 i, f32 f) { if (threadIdx.x == 0) p[0] = i + f; }")
    out = np.zeros(4, np.uint32)
    launch(kernel, 1, 64, [out, np.int32(3), 2])
    assert out[0] == 5
    with pytest.raises(TypeError, match="takes 3 arguments"):
        launch(kernel, 1, 64, [out, 3])
    with pytest.raises(TypeError, match="argument 0 is a pointer"):
        launch(kernel, 1, 64, [1, 3, 2])
    with pytest.raises(TypeError, match="argument 1 is an integer"):
        launch(kernel, 1, 64, [out, 1.5, 2])
    with pytest.raises(ValueError, match="does not fit"):
        launch(kernel, 1, 64, [out, 2**40, 2])
    with pytest.raises(EmulatorError, match="96 threads per block, 64 are allowed"):
        launch(kernel, 1, 96, [out, 3, 2])
    with pytest.raises(EmulatorError, match="shared memory"):
        launch(kernel, 1, 64, [out, 3, 2], smem_bytes=240000)
    with pytest.raises(ValueError, match="contiguous"):
        launch(kernel, 1, 64, [np.zeros((4, 4), np.uint32)[:, 1], 3, 2])


def test_aliasing_and_addresses_in_memory() -> None:
    kernel = compile_kernel(HEAD + """
NINFERC_KERNEL(follow, 32, 1)(const u64* table, u32* a, const u32* b) {
  u32* target = reinterpret_cast<u32*>(ld_nc<u64>(table));
  st_global(target + threadIdx.x, threadIdx.x);
  a[threadIdx.x] = b[threadIdx.x];
}""")
    target = emulator.DeviceArray(poisoned(32, np.uint32))
    arena = np.arange(64, dtype=np.uint32)
    launch(kernel, 1, 32, [np.array([target.address], np.uint64), arena[:32], arena[32:]], memory=[target, arena])
    np.testing.assert_array_equal(target.get(), np.arange(32))
    np.testing.assert_array_equal(arena[:32], np.arange(32, 64))
    with pytest.raises(EmulatorError, match="belongs to no argument|out of bounds"):
        launch(kernel, 1, 32, [np.array([target.address], np.uint64), arena[:32], arena[32:]])
