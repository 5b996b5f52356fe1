// Between blocks, kernels and devices: programmatic edges, atomics, acquire/release, fences, clocks, L2 prefetch.
//
// Polling loops must read with ld_acquire_*, ld_relaxed_* or ld_volatile: the emulator switches threads there.
#pragma once
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>

namespace ninferc {

// Waits for the kernels this one depends on through programmatic edges; every block must execute it, and before it only
// constants may be read.  Nothing below sm_90, where such edges do not exist.
NINFERC_DEVICE void grid_dependency_wait() {
#if defined(NINFERC_EMULATOR)
  ninferc_emulator_grid_wait();
#elif NINFERC_HAS_PROGRAMMATIC
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// Lets dependent kernels start (their waits still wait for the end of this one).
NINFERC_DEVICE void grid_launch_dependents() {
#if !defined(NINFERC_EMULATOR) && NINFERC_HAS_PROGRAMMATIC
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

#if defined(NINFERC_EMULATOR)
NINFERC_DEVICE void fence_gpu() {}
NINFERC_DEVICE void fence_sys() {}

#define NINFERC_ATOMIC_(name, T, update)                                         \
  NINFERC_DEVICE T name(T* pointer, T value) {                                   \
    ninferc_emulator_atomic(pointer, sizeof(T), #name);                          \
    const T old = *pointer;                                                      \
    *pointer = update;                                                           \
    return old;                                                                  \
  }
NINFERC_ATOMIC_(atomic_add, u32, old + value)
NINFERC_ATOMIC_(atomic_add, u64, old + value)
NINFERC_ATOMIC_(atomic_add, f32, old + value)
NINFERC_ATOMIC_(atomic_max, u32, old > value ? old : value)
NINFERC_ATOMIC_(atomic_max, u64, old > value ? old : value)
NINFERC_ATOMIC_(atomic_min, u32, old < value ? old : value)
NINFERC_ATOMIC_(atomic_or, u32, old | value)
NINFERC_ATOMIC_(atomic_exchange, u32, value)
NINFERC_ATOMIC_(atomic_exchange, u64, value)
// add with acquire and release: the last arriver sees what all earlier ones wrote
NINFERC_ATOMIC_(atomic_add_acq_rel_gpu, u32, old + value)
NINFERC_ATOMIC_(atomic_add_acq_rel_sys, u32, old + value)
#undef NINFERC_ATOMIC_
NINFERC_DEVICE u32 atomic_cas(u32* pointer, u32 expected, u32 value) {
  ninferc_emulator_atomic(pointer, sizeof(u32), "atomic_cas");
  const u32 old = *pointer;
  if (old == expected) *pointer = value;
  return old;
}
#define NINFERC_SCOPED_LOAD_(name)                                               \
  template <class T>                                                             \
  NINFERC_DEVICE T name(const void* pointer) {                                   \
    ninferc_emulator_check_global(pointer, sizeof(T), 2, #name);                 \
    ninferc_emulator_poll(#name);                                                \
    T value;                                                                     \
    __builtin_memcpy(&value, pointer, sizeof(T));                                \
    return value;                                                                \
  }
#define NINFERC_SCOPED_STORE_(name)                                              \
  template <class T>                                                             \
  NINFERC_DEVICE void name(void* pointer, const T& value) {                      \
    ninferc_emulator_check_global(pointer, sizeof(T), 3, #name);                 \
    __builtin_memcpy(pointer, &value, sizeof(T));                                \
    ninferc_emulator_progress();                                                 \
  }
NINFERC_SCOPED_LOAD_(ld_acquire_gpu)
NINFERC_SCOPED_LOAD_(ld_acquire_sys)
NINFERC_SCOPED_LOAD_(ld_relaxed_gpu)
NINFERC_SCOPED_LOAD_(ld_relaxed_sys)
NINFERC_SCOPED_STORE_(st_release_gpu)
NINFERC_SCOPED_STORE_(st_release_sys)
NINFERC_SCOPED_STORE_(st_relaxed_gpu)
NINFERC_SCOPED_STORE_(st_relaxed_sys)
#undef NINFERC_SCOPED_LOAD_
#undef NINFERC_SCOPED_STORE_

NINFERC_DEVICE u64 global_timer() { return ninferc_emulator_timer(); }
NINFERC_DEVICE void nano_sleep(u32 nanoseconds) { ninferc_emulator_sleep(nanoseconds); }
NINFERC_DEVICE void prefetch_l2(const void* pointer) { ninferc_emulator_check_global(pointer, 1, 0, "prefetch_l2"); }
NINFERC_DEVICE void prefetch_l2_bulk(const void* pointer, u32 bytes) {
  ninferc_emulator_check_global(pointer, bytes, 0, "prefetch_l2_bulk");
}

#else

NINFERC_DEVICE void fence_gpu() { __threadfence(); }
NINFERC_DEVICE void fence_sys() { __threadfence_system(); }

#define NINFERC_ATOMIC_(name, T, intrinsic) \
  NINFERC_DEVICE T name(T* pointer, T value) { return intrinsic(pointer, value); }
NINFERC_ATOMIC_(atomic_add, u32, atomicAdd)
NINFERC_ATOMIC_(atomic_add, u64, atomicAdd)
NINFERC_ATOMIC_(atomic_add, f32, atomicAdd)
NINFERC_ATOMIC_(atomic_max, u32, atomicMax)
NINFERC_ATOMIC_(atomic_max, u64, atomicMax)
NINFERC_ATOMIC_(atomic_min, u32, atomicMin)
NINFERC_ATOMIC_(atomic_or, u32, atomicOr)
NINFERC_ATOMIC_(atomic_exchange, u32, atomicExch)
NINFERC_ATOMIC_(atomic_exchange, u64, atomicExch)
#undef NINFERC_ATOMIC_
NINFERC_DEVICE u32 atomic_cas(u32* pointer, u32 expected, u32 value) { return atomicCAS(pointer, expected, value); }
NINFERC_DEVICE u32 atomic_add_acq_rel_gpu(u32* pointer, u32 value) {
  u32 old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(pointer), "r"(value) : "memory");
  return old;
}
NINFERC_DEVICE u32 atomic_add_acq_rel_sys(u32* pointer, u32 value) {
  u32 old;
  asm volatile("atom.acq_rel.sys.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(pointer), "r"(value) : "memory");
  return old;
}

// T has 4 or 8 bytes; 16 only for the relaxed forms, where each 8-byte half is one access of its own.
#define NINFERC_SCOPED_LOAD_(name, op)                                                                          \
  template <class T>                                                                                            \
  NINFERC_DEVICE T name(const void* pointer) {                                                                  \
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "scoped loads are of 4 or 8 bytes");                        \
    if constexpr (sizeof(T) == 8) {                                                                             \
      u64 v;                                                                                                    \
      asm volatile(op ".global.u64 %0, [%1];" : "=l"(v) : "l"(pointer) : "memory");                             \
      return bit_cast<T>(v);                                                                                    \
    } else {                                                                                                    \
      u32 v;                                                                                                    \
      asm volatile(op ".global.u32 %0, [%1];" : "=r"(v) : "l"(pointer) : "memory");                             \
      return bit_cast<T>(v);                                                                                    \
    }                                                                                                           \
  }
#define NINFERC_RELAXED_LOAD_(name, op)                                                                         \
  template <class T>                                                                                            \
  NINFERC_DEVICE T name(const void* pointer) {                                                                  \
    static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16, "relaxed loads are of 4, 8 or 16 bytes"); \
    if constexpr (sizeof(T) == 16) {                                                                            \
      u64x2 v;                                                                                                  \
      asm volatile(op ".global.v2.u64 {%0, %1}, [%2];" : "=l"(v.x), "=l"(v.y) : "l"(pointer) : "memory");       \
      return bit_cast<T>(v);                                                                                    \
    } else if constexpr (sizeof(T) == 8) {                                                                      \
      u64 v;                                                                                                    \
      asm volatile(op ".global.u64 %0, [%1];" : "=l"(v) : "l"(pointer) : "memory");                             \
      return bit_cast<T>(v);                                                                                    \
    } else {                                                                                                    \
      u32 v;                                                                                                    \
      asm volatile(op ".global.u32 %0, [%1];" : "=r"(v) : "l"(pointer) : "memory");                             \
      return bit_cast<T>(v);                                                                                    \
    }                                                                                                           \
  }
#define NINFERC_SCOPED_STORE_(name, op, largest)                                                                \
  template <class T>                                                                                            \
  NINFERC_DEVICE void name(void* pointer, const T& value) {                                                     \
    static_assert((sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16) && sizeof(T) <= largest,                \
                  "scoped stores are of 4 or 8 bytes (relaxed also 16)");                                       \
    if constexpr (sizeof(T) == 16) {                                                                            \
      const u64x2 v = bit_cast<u64x2>(value);                                                                   \
      asm volatile(op ".global.v2.u64 [%0], {%1, %2};" :: "l"(pointer), "l"(v.x), "l"(v.y) : "memory");         \
    } else if constexpr (sizeof(T) == 8) {                                                                      \
      asm volatile(op ".global.u64 [%0], %1;" :: "l"(pointer), "l"(bit_cast<u64>(value)) : "memory");           \
    } else {                                                                                                    \
      asm volatile(op ".global.u32 [%0], %1;" :: "l"(pointer), "r"(bit_cast<u32>(value)) : "memory");           \
    }                                                                                                           \
  }
NINFERC_SCOPED_LOAD_(ld_acquire_gpu, "ld.acquire.gpu")
NINFERC_SCOPED_LOAD_(ld_acquire_sys, "ld.acquire.sys")
NINFERC_RELAXED_LOAD_(ld_relaxed_gpu, "ld.relaxed.gpu")
NINFERC_RELAXED_LOAD_(ld_relaxed_sys, "ld.relaxed.sys")
NINFERC_SCOPED_STORE_(st_release_gpu, "st.release.gpu", 8)
NINFERC_SCOPED_STORE_(st_release_sys, "st.release.sys", 8)
NINFERC_SCOPED_STORE_(st_relaxed_gpu, "st.relaxed.gpu", 16)
NINFERC_SCOPED_STORE_(st_relaxed_sys, "st.relaxed.sys", 16)
#undef NINFERC_SCOPED_LOAD_
#undef NINFERC_RELAXED_LOAD_
#undef NINFERC_SCOPED_STORE_

// Nanoseconds; steps of about a microsecond on some cards.
NINFERC_DEVICE u64 global_timer() {
  u64 now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}
NINFERC_DEVICE void nano_sleep(u32 nanoseconds) { asm volatile("nanosleep.u32 %0;" :: "r"(nanoseconds)); }

NINFERC_DEVICE void prefetch_l2(const void* pointer) { asm volatile("prefetch.global.L2 [%0];" :: "l"(pointer)); }
// `bytes` and the address are multiples of 16.  Below sm_90 one prefetch per 128-byte line.
NINFERC_DEVICE void prefetch_l2_bulk(const void* pointer, u32 bytes) {
#if NINFERC_ARCH >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(pointer), "r"(bytes));
#else
  const char* line = static_cast<const char*>(pointer);
  for (u32 offset = 0; offset < bytes; offset += 128) prefetch_l2(line + offset);
#endif
}

#endif
}  // namespace ninferc
