// Warp and block collectives.  Reductions add in a fixed order, so their bits do not depend on timing.
#pragma once
#include <ninferc/base/types.cuh>

namespace ninferc {

constexpr u32 full_mask = 0xffffffffu;

// Lane and warp of a one-dimensional block.
NINFERC_DEVICE u32 lane_id() { return threadIdx.x & 31u; }
NINFERC_DEVICE u32 warp_id() { return threadIdx.x >> 5; }
// The same, as a value the compiler can prove equal in all lanes (branches on it stay converged).
NINFERC_DEVICE u32 warp_id_uniform() { return __shfl_sync(full_mask, threadIdx.x >> 5, 0); }

NINFERC_DEVICE void sync_block() { __syncthreads(); }
NINFERC_DEVICE void sync_warp(u32 mask = full_mask) { __syncwarp(mask); }

// Named barriers 1..15 (0 is __syncthreads) for `threads` participants, a multiple of 32.
NINFERC_DEVICE void named_barrier_sync(u32 id, u32 threads) {
#if defined(NINFERC_EMULATOR)
  ninferc_emulator_barrier(id, threads, 1, 0, 0, "named_barrier_sync", 0);
#else
  asm volatile("bar.sync %0, %1;" :: "r"(id), "r"(threads) : "memory");
#endif
}
NINFERC_DEVICE void named_barrier_arrive(u32 id, u32 threads) {
#if defined(NINFERC_EMULATOR)
  ninferc_emulator_barrier(id, threads, 0, 0, 0, "named_barrier_arrive", 0);
#else
  asm volatile("bar.arrive %0, %1;" :: "r"(id), "r"(threads) : "memory");
#endif
}

// Shuffles of any 4- or 8-byte type.  `width` (a power of two) splits the warp into independent segments.
#define NINFERC_SHUFFLE_(name, intrinsic, argument)                                             \
  template <class T>                                                                            \
  NINFERC_DEVICE T name(T value, u32 argument, u32 width = 32, u32 mask = full_mask) {          \
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");              \
    if constexpr (sizeof(T) == 4) {                                                             \
      return bit_cast<T>(intrinsic(mask, bit_cast<u32>(value), argument, width));               \
    } else {                                                                                    \
      const u64 bits = bit_cast<u64>(value);                                                    \
      const u32 low = intrinsic(mask, u32(bits), argument, width);                              \
      const u32 high = intrinsic(mask, u32(bits >> 32), argument, width);                       \
      return bit_cast<T>((u64(high) << 32) | low);                                              \
    }                                                                                           \
  }
NINFERC_SHUFFLE_(shfl, __shfl_sync, source)
NINFERC_SHUFFLE_(shfl_xor, __shfl_xor_sync, lane_bits)
NINFERC_SHUFFLE_(shfl_down, __shfl_down_sync, delta)
NINFERC_SHUFFLE_(shfl_up, __shfl_up_sync, delta)
#undef NINFERC_SHUFFLE_

NINFERC_DEVICE u32 warp_ballot(bool predicate, u32 mask = full_mask) { return __ballot_sync(mask, predicate); }
NINFERC_DEVICE bool warp_any(bool predicate, u32 mask = full_mask) { return __any_sync(mask, predicate) != 0; }
NINFERC_DEVICE bool warp_all(bool predicate, u32 mask = full_mask) { return __all_sync(mask, predicate) != 0; }

// True in exactly one lane of a converged, full warp.
NINFERC_DEVICE bool elect_one() {
#if NINFERC_ARCH < 900
  __syncwarp();
  return lane_id() == 0;
#elif defined(NINFERC_EMULATOR)
  return __ballot_sync(full_mask, 1) != 0 && lane_id() == 0;  // orders no memory
#else
  u32 elected;
  asm volatile("{\n .reg .pred p;\n elect.sync _|p, 0xffffffff;\n selp.u32 %0, 1, 0, p;\n}\n" : "=r"(elected));
  return elected != 0;
#endif
}

// Reductions over aligned groups of `width` lanes (butterfly: all lanes of a group get the same bits).
template <u32 width = 32>
NINFERC_DEVICE f32 warp_sum(f32 value) {
#pragma unroll
  for (u32 step = width / 2; step > 0; step /= 2) value += shfl_xor(value, step);
  return value;
}
template <u32 width = 32>
NINFERC_DEVICE f32 warp_max(f32 value) {
#pragma unroll
  for (u32 step = width / 2; step > 0; step /= 2) value = fmaxf(value, shfl_xor(value, step));
  return value;
}
template <u32 width = 32>
NINFERC_DEVICE u32 warp_sum(u32 value) {
#pragma unroll
  for (u32 step = width / 2; step > 0; step /= 2) value += shfl_xor(value, step);
  return value;
}

// Sum over a one-dimensional block of `threads`; every thread gets the result.  `scratch`: threads / 32 floats of shared
// memory.  The barriers at both ends make back-to-back calls with one scratch safe.
template <u32 threads>
NINFERC_DEVICE f32 block_sum(f32 value, f32* scratch) {
  static_assert(threads % 32 == 0 && threads <= 1024, "a block is 1 to 32 whole warps");
  value = warp_sum(value);
  if constexpr (threads == 32) return value;
  __syncthreads();
  if (lane_id() == 0) scratch[warp_id()] = value;
  __syncthreads();
  f32 total = scratch[0];
#pragma unroll
  for (u32 warp = 1; warp < threads / 32; ++warp) total += scratch[warp];
  return total;
}
template <u32 threads>
NINFERC_DEVICE f32 block_max(f32 value, f32* scratch) {
  static_assert(threads % 32 == 0 && threads <= 1024, "a block is 1 to 32 whole warps");
  value = warp_max(value);
  if constexpr (threads == 32) return value;
  __syncthreads();
  if (lane_id() == 0) scratch[warp_id()] = value;
  __syncthreads();
  f32 total = scratch[0];
#pragma unroll
  for (u32 warp = 1; warp < threads / 32; ++warp) total = fmaxf(total, scratch[warp]);
  return total;
}

}  // namespace ninferc
