// Typed loads and stores of 1, 2, 4, 8 or 16 bytes with a cache policy.  The address must be a multiple of sizeof(T).
//
//   ld_global     coherent within the rules of the memory model; what the kernel itself or a running peer may write
//   ld_nc         read-only for the whole kernel (ld.global.nc)
//   ld_stream     read-only, used once: not kept in L1, L2 fetches 256 bytes ahead (weights)
//   ld_cg         from L2, never L1 (data another block of this kernel wrote before a fence)
//   ld_volatile   exactly one access per call
//   st_global / st_stream (evict first) / st_volatile
//   ld_shared / st_shared take a SharedAddress
#pragma once
#include <ninferc/base/types.cuh>

namespace ninferc {

struct alignas(8) u32x2 { u32 x, y; };
struct alignas(16) u32x4 { u32 x, y, z, w; };
struct alignas(16) f32x4 { f32 x, y, z, w; };
struct alignas(16) u64x2 { u64 x, y; };

// 32-bit address in the shared window.  Made from a pointer to shared memory, or from an address already computed.
struct SharedAddress {
  u32 value;
  NINFERC_DEVICE SharedAddress(u32 address) : value(address) {}
  NINFERC_DEVICE SharedAddress(const void* pointer)
#if defined(NINFERC_EMULATOR)
      : value(ninferc_emulator_shared_address(pointer)) {}
#else
      : value(u32(__cvta_generic_to_shared(pointer))) {}
#endif
};
NINFERC_DEVICE u32 shared_address(const void* pointer) { return SharedAddress(pointer).value; }

#if defined(NINFERC_EMULATOR)

#define NINFERC_EMULATED_LOAD_(name)                                                   \
  template <class T>                                                                   \
  NINFERC_DEVICE T name(const void* pointer) {                                         \
    ninferc_emulator_check_global(pointer, sizeof(T), 0, #name);                       \
    T value;                                                                           \
    __builtin_memcpy(&value, pointer, sizeof(T));                                      \
    return value;                                                                      \
  }
NINFERC_EMULATED_LOAD_(ld_global)
NINFERC_EMULATED_LOAD_(ld_nc)
NINFERC_EMULATED_LOAD_(ld_stream)
NINFERC_EMULATED_LOAD_(ld_cg)
#undef NINFERC_EMULATED_LOAD_
template <class T>
NINFERC_DEVICE T ld_volatile(const void* pointer) {
  ninferc_emulator_check_global(pointer, sizeof(T), 2, "ld_volatile");
  ninferc_emulator_poll("ld_volatile");
  T value;
  __builtin_memcpy(&value, pointer, sizeof(T));
  return value;
}
#define NINFERC_EMULATED_STORE_(name, mode)                                            \
  template <class T>                                                                   \
  NINFERC_DEVICE void name(void* pointer, const T& value) {                            \
    ninferc_emulator_check_global(pointer, sizeof(T), mode, #name);                    \
    __builtin_memcpy(pointer, &value, sizeof(T));                                      \
  }
NINFERC_EMULATED_STORE_(st_global, 1)
NINFERC_EMULATED_STORE_(st_stream, 1)
NINFERC_EMULATED_STORE_(st_volatile, 3)
#undef NINFERC_EMULATED_STORE_
template <class T>
NINFERC_DEVICE T ld_shared(SharedAddress address) {
  T value;
  __builtin_memcpy(&value, ninferc_emulator_shared_pointer(address.value, sizeof(T), "ld_shared"), sizeof(T));
  return value;
}
template <class T>
NINFERC_DEVICE void st_shared(SharedAddress address, const T& value) {
  __builtin_memcpy(ninferc_emulator_shared_pointer(address.value, sizeof(T), "st_shared"), &value, sizeof(T));
}

#else

// One function per policy; the size of T picks the instruction.
#define NINFERC_LOAD_BODY_(op, op_vector, volatility, space, pointer)                                             \
  static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16,          \
                "loads are of 1, 2, 4, 8 or 16 bytes");                                                           \
  if constexpr (sizeof(T) == 16) {                                                                                \
    u32x4 v;                                                                                                      \
    asm volatility(op_vector ".v4.u32 {%0, %1, %2, %3}, [%4];"                                                    \
                   : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : space(pointer) NINFERC_CLOBBER_##volatility);   \
    return bit_cast<T>(v);                                                                                        \
  } else if constexpr (sizeof(T) == 8) {                                                                          \
    u64 v;                                                                                                        \
    asm volatility(op ".u64 %0, [%1];" : "=l"(v) : space(pointer) NINFERC_CLOBBER_##volatility);                  \
    return bit_cast<T>(v);                                                                                        \
  } else if constexpr (sizeof(T) == 4) {                                                                          \
    u32 v;                                                                                                        \
    asm volatility(op ".u32 %0, [%1];" : "=r"(v) : space(pointer) NINFERC_CLOBBER_##volatility);                  \
    return bit_cast<T>(v);                                                                                        \
  } else if constexpr (sizeof(T) == 2) {                                                                          \
    u16 v;                                                                                                        \
    asm volatility(op ".u16 %0, [%1];" : "=h"(v) : space(pointer) NINFERC_CLOBBER_##volatility);                  \
    return bit_cast<T>(v);                                                                                        \
  } else {                                                                                                        \
    u16 v;                                                                                                        \
    asm volatility(op ".u8 %0, [%1];" : "=h"(v) : space(pointer) NINFERC_CLOBBER_##volatility);                   \
    return bit_cast<T>(u8(v));                                                                                    \
  }
#define NINFERC_CLOBBER_volatile : "memory"
#define NINFERC_CLOBBER_

#define NINFERC_STORE_BODY_(op, space, pointer, value)                                                            \
  static_assert(sizeof(T) == 1 || sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 16,          \
                "stores are of 1, 2, 4, 8 or 16 bytes");                                                          \
  if constexpr (sizeof(T) == 16) {                                                                                \
    const u32x4 v = bit_cast<u32x4>(value);                                                                       \
    asm volatile(op ".v4.u32 [%0], {%1, %2, %3, %4};"                                                             \
                 :: space(pointer), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");                           \
  } else if constexpr (sizeof(T) == 8) {                                                                          \
    asm volatile(op ".u64 [%0], %1;" :: space(pointer), "l"(bit_cast<u64>(value)) : "memory");                    \
  } else if constexpr (sizeof(T) == 4) {                                                                          \
    asm volatile(op ".u32 [%0], %1;" :: space(pointer), "r"(bit_cast<u32>(value)) : "memory");                    \
  } else if constexpr (sizeof(T) == 2) {                                                                          \
    asm volatile(op ".u16 [%0], %1;" :: space(pointer), "h"(bit_cast<u16>(value)) : "memory");                    \
  } else {                                                                                                        \
    asm volatile(op ".u8 [%0], %1;" :: space(pointer), "h"(u16(bit_cast<u8>(value))) : "memory");                 \
  }

template <class T>
NINFERC_DEVICE T ld_global(const void* pointer) {
  NINFERC_LOAD_BODY_("ld.global", "ld.global", volatile, "l", pointer)
}
// Not volatile: the data does not change while the kernel runs, so the compiler may move or merge the load.
template <class T>
NINFERC_DEVICE T ld_nc(const void* pointer) {
  NINFERC_LOAD_BODY_("ld.global.nc", "ld.global.nc", , "l", pointer)
}
// Volatile keeps streaming loads in program order, so that all loads of a batch are in flight before the first use.
template <class T>
NINFERC_DEVICE T ld_stream(const void* pointer) {
#if NINFERC_ARCH >= 800
  NINFERC_LOAD_BODY_("ld.global.nc.L1::no_allocate.L2::256B", "ld.global.nc.L1::no_allocate.L2::256B", volatile, "l",
                     pointer)
#else
  NINFERC_LOAD_BODY_("ld.global.nc.L1::no_allocate.L2::128B", "ld.global.nc.L1::no_allocate.L2::128B", volatile, "l",
                     pointer)
#endif
}
template <class T>
NINFERC_DEVICE T ld_cg(const void* pointer) {
  NINFERC_LOAD_BODY_("ld.global.cg", "ld.global.cg", volatile, "l", pointer)
}
template <class T>
NINFERC_DEVICE T ld_volatile(const void* pointer) {
  NINFERC_LOAD_BODY_("ld.volatile.global", "ld.volatile.global", volatile, "l", pointer)
}
template <class T>
NINFERC_DEVICE void st_global(void* pointer, const T& value) { NINFERC_STORE_BODY_("st.global", "l", pointer, value) }
template <class T>
NINFERC_DEVICE void st_stream(void* pointer, const T& value) { NINFERC_STORE_BODY_("st.global.cs", "l", pointer, value) }
template <class T>
NINFERC_DEVICE void st_volatile(void* pointer, const T& value) {
  NINFERC_STORE_BODY_("st.volatile.global", "l", pointer, value)
}
template <class T>
NINFERC_DEVICE T ld_shared(SharedAddress address) {
  NINFERC_LOAD_BODY_("ld.shared", "ld.shared", volatile, "r", address.value)
}
template <class T>
NINFERC_DEVICE void st_shared(SharedAddress address, const T& value) {
  NINFERC_STORE_BODY_("st.shared", "r", address.value, value)
}

#endif
}  // namespace ninferc
