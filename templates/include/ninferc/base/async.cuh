// Asynchronous copies from global to shared memory: cp.async (sm_80+) and bulk copies on an mbarrier (sm_90+).
//
// A copy may land at any time between its issue and its wait: before the wait the destination may not be read, and from
// the issue on it may not hold anything that is still needed.  cp_async_wait covers the calling thread's own copies; other
// threads need a barrier after it.
#pragma once
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>

namespace ninferc {

// 16 bytes, both addresses multiples of 16.  Below sm_80 the copy happens at once.
NINFERC_DEVICE void cp_async_16(SharedAddress destination, const void* source) {
#if !NINFERC_HAS_CP_ASYNC
  st_shared<u32x4>(destination, ld_global<u32x4>(source));
#elif defined(NINFERC_EMULATOR)
  ninferc_emulator_cp_async(destination.value, source, 16, 16);
#else
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" :: "r"(destination.value), "l"(source) : "memory");
#endif
}

// The same, writing 16 zero bytes and reading nothing where `valid` is false (the source must still be a valid pointer).
NINFERC_DEVICE void cp_async_16_zfill(SharedAddress destination, const void* source, bool valid) {
#if !NINFERC_HAS_CP_ASYNC
  st_shared<u32x4>(destination, valid ? ld_global<u32x4>(source) : u32x4{0, 0, 0, 0});
#elif defined(NINFERC_EMULATOR)
  ninferc_emulator_cp_async(destination.value, source, 16, valid ? 16 : 0);
#else
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :: "r"(destination.value), "l"(source), "r"(valid ? 16 : 0) : "memory");
#endif
}

// 4 or 8 bytes, both addresses multiples of that.
template <u32 bytes>
NINFERC_DEVICE void cp_async_small(SharedAddress destination, const void* source) {
  static_assert(bytes == 4 || bytes == 8, "small asynchronous copies are of 4 or 8 bytes");
#if !NINFERC_HAS_CP_ASYNC
  if constexpr (bytes == 4) st_shared<u32>(destination, ld_global<u32>(source));
  else st_shared<u64>(destination, ld_global<u64>(source));
#elif defined(NINFERC_EMULATOR)
  ninferc_emulator_cp_async(destination.value, source, bytes, bytes);
#else
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
               :: "r"(destination.value), "l"(source), "n"(bytes) : "memory");
#endif
}

NINFERC_DEVICE void cp_async_commit() {
#if NINFERC_HAS_CP_ASYNC && defined(NINFERC_EMULATOR)
  ninferc_emulator_cp_async_commit();
#elif NINFERC_HAS_CP_ASYNC
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until at most `pending` of the calling thread's committed groups are unfinished.
template <u32 pending>
NINFERC_DEVICE void cp_async_wait() {
#if NINFERC_HAS_CP_ASYNC && defined(NINFERC_EMULATOR)
  ninferc_emulator_cp_async_wait(pending);
#elif NINFERC_HAS_CP_ASYNC
  asm volatile("cp.async.wait_group %0;" :: "n"(pending) : "memory");
#endif
}

#if NINFERC_HAS_BULK_COPY
// ---- mbarrier: an 8-byte object in shared memory (declare as u64, aligned to 8) -----------------------------------
// A phase completes when `count` arrivals and all expected bytes have come.  Waiting takes the parity of the phase: 0 for
// the first, then alternating.

// By one thread; follow with fence_mbarrier_init and __syncthreads before any other use.
NINFERC_DEVICE void mbarrier_init(SharedAddress barrier, u32 count) {
#if defined(NINFERC_EMULATOR)
  ninferc_emulator_mbarrier_init(barrier.value, count);
#else
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier.value), "r"(count) : "memory");
#endif
}
NINFERC_DEVICE void fence_mbarrier_init() {
#if !defined(NINFERC_EMULATOR)
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
NINFERC_DEVICE void mbarrier_invalidate(SharedAddress barrier) {
#if defined(NINFERC_EMULATOR)
  ninferc_emulator_mbarrier_invalidate(barrier.value);
#else
  asm volatile("mbarrier.inval.shared::cta.b64 [%0];" :: "r"(barrier.value) : "memory");
#endif
}
NINFERC_DEVICE void mbarrier_arrive(SharedAddress barrier) {
#if defined(NINFERC_EMULATOR)
  ninferc_emulator_mbarrier_arrive(barrier.value, 0);
#else
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier.value) : "memory");
#endif
}
// Adds `bytes` to what the phase waits for, then arrives.
NINFERC_DEVICE void mbarrier_arrive_expect(SharedAddress barrier, u32 bytes) {
#if defined(NINFERC_EMULATOR)
  ninferc_emulator_mbarrier_arrive(barrier.value, bytes);
#else
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier.value), "r"(bytes) : "memory");
#endif
}
// True when the phase of this parity has completed (may suspend the thread for a while first).
NINFERC_DEVICE bool mbarrier_try_wait(SharedAddress barrier, u32 parity) {
#if defined(NINFERC_EMULATOR)
  return ninferc_emulator_mbarrier_try_wait(barrier.value, parity);
#else
  u32 done;
  asm volatile(
      "{\n .reg .pred p;\n mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n selp.u32 %0, 1, 0, p;\n}\n"
      : "=r"(done) : "r"(barrier.value), "r"(parity) : "memory");
  return done != 0;
#endif
}
NINFERC_DEVICE void mbarrier_wait(SharedAddress barrier, u32 parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// Orders this thread's ordinary accesses to shared memory before later asynchronous-proxy ones (bulk copies, wgmma).
NINFERC_DEVICE void fence_proxy_async_shared() {
#if !defined(NINFERC_EMULATOR)
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Bulk copy by one thread: `bytes` and both addresses are multiples of 16; the barrier receives the byte count.
NINFERC_DEVICE void bulk_copy(SharedAddress destination, const void* source, u32 bytes, SharedAddress barrier) {
#if defined(NINFERC_EMULATOR)
  ninferc_emulator_bulk_copy(destination.value, source, bytes, barrier.value);
#else
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               :: "r"(destination.value), "l"(source), "r"(bytes), "r"(barrier.value) : "memory");
#endif
}
// The same for data used once: L2 may drop it first.
NINFERC_DEVICE void bulk_copy_stream(SharedAddress destination, const void* source, u32 bytes, SharedAddress barrier) {
#if defined(NINFERC_EMULATOR)
  ninferc_emulator_bulk_copy(destination.value, source, bytes, barrier.value);
#else
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
               :: "r"(destination.value), "l"(source), "r"(bytes), "r"(barrier.value), "l"(policy) : "memory");
#endif
}
#endif  // NINFERC_HAS_BULK_COPY

}  // namespace ninferc
