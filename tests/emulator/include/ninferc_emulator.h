// What CUDA device code finds predefined, for a host compiler.  Included before every kernel source by emulator.py.
// The functions declared extern "C" in the interface live in engine/.
#pragma once
#if !defined(__cplusplus) || __cplusplus < 202002L
#error "the emulator needs C++20"
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// One copy per block: thread-local storage of this shared object, which the runtime fills and swaps.
#define __shared__ static thread_local
#define __constant__ static const

#include "ninferc_emulator_interface.h"

extern "C" {
int printf(const char* format, ...);
float fmaf(float, float, float) noexcept;
float fabsf(float) noexcept;
float fminf(float, float) noexcept;
float fmaxf(float, float) noexcept;
float sqrtf(float) noexcept;
float expf(float) noexcept;
float exp2f(float) noexcept;
float logf(float) noexcept;
float log2f(float) noexcept;
float log1pf(float) noexcept;
float expm1f(float) noexcept;
float powf(float, float) noexcept;
float sinf(float) noexcept;
float cosf(float) noexcept;
float tanhf(float) noexcept;
float floorf(float) noexcept;
float ceilf(float) noexcept;
float truncf(float) noexcept;
float rintf(float) noexcept;
float roundf(float) noexcept;
float fmodf(float, float) noexcept;
float copysignf(float, float) noexcept;
double exp(double) noexcept;
double log(double) noexcept;
double sqrt(double) noexcept;
double fma(double, double, double) noexcept;
double fabs(double) noexcept;
double sin(double) noexcept;
double cos(double) noexcept;
double pow(double, double) noexcept;
double floor(double) noexcept;
double rint(double) noexcept;
}

#define threadIdx (ninferc_emulator_thread->thread_index)
#define blockIdx (ninferc_emulator_thread->block_index)
#define blockDim ninferc_emulator_block_dim
#define gridDim ninferc_emulator_grid_dim
constexpr int warpSize = 32;

namespace ninferc_emulator {
// a * b + c with the product exact in f32 (operands of at most 12 bits) and the sum rounded to odd, so that a following
// rounding to 8 or 11 bits equals one rounding of the exact value.
inline float fma_round_to_odd(float a, float b, float c) {
  // Volatile copies keep the compiler from contracting the error-free transformation below.
  const volatile float product = a * b;
  const volatile float sum = product + c;
  const volatile float part = sum - product;
  const volatile float rest = sum - part;
  const volatile float error_product = product - rest;
  const volatile float error_c = c - part;
  const float error = error_product + error_c;
  unsigned bits = __builtin_bit_cast(unsigned, static_cast<float>(sum));
  if (error == error && error != 0.0f && (bits & 1u) == 0 && (bits & 0x7fffffffu) < 0x7f800000u) {
    // The exact value lies beyond or short of the sum: step to the odd neighbour on its side.
    const bool away = (error > 0.0f) == ((bits >> 31) == 0);
    bits = away ? bits + 1 : bits - 1;
  }
  return __builtin_bit_cast(float, bits);
}
inline unsigned packed_fma_f16(unsigned a, unsigned b, unsigned c) {
  unsigned result = 0;
  for (int half = 0; half < 2; ++half) {
    const auto part = [half](unsigned v) { return half_to_float(static_cast<unsigned short>(v >> (16 * half))); };
    result |= unsigned(float_to_half(fma_round_to_odd(part(a), part(b), part(c)))) << (16 * half);
  }
  return result;
}
inline unsigned packed_fma_bf16(unsigned a, unsigned b, unsigned c) {
  unsigned result = 0;
  for (int half = 0; half < 2; ++half) {
    const auto part = [half](unsigned v) { return bf16_to_float(static_cast<unsigned short>(v >> (16 * half))); };
    result |= unsigned(float_to_bf16(fma_round_to_odd(part(a), part(b), part(c)))) << (16 * half);
  }
  return result;
}

// 4- and 8-byte values through the 4-byte shuffle.
template <class T>
inline T shuffle(int kind, unsigned mask, T value, unsigned argument, unsigned width) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
  if constexpr (sizeof(T) == 4) {
    return __builtin_bit_cast(
        T, ninferc_emulator_shuffle(kind, mask, __builtin_bit_cast(unsigned, value), argument, width));
  } else {
    const auto bits = __builtin_bit_cast(unsigned long long, value);
    const unsigned low = ninferc_emulator_shuffle(kind, mask, unsigned(bits), argument, width);
    const unsigned high = ninferc_emulator_shuffle(kind, mask, unsigned(bits >> 32), argument, width);
    return __builtin_bit_cast(T, (static_cast<unsigned long long>(high) << 32) | low);
  }
}

// Calls a kernel from an array of pointers to its arguments, and describes its parameters: 'p' pointer, 'f' floating,
// 'i' signed, 'u' unsigned, 's' structure, each followed by the size in bytes.
template <class T>
constexpr char type_code() {
  if constexpr (__is_enum(T)) return 'i';
  else if constexpr (__is_class(T) || __is_union(T)) return 's';
  else if constexpr (static_cast<T>(1.5) == static_cast<T>(1)) return static_cast<T>(-1) < static_cast<T>(0) ? 'i' : 'u';
  else return 'f';
}
template <class T> struct Code { static constexpr char value = type_code<T>(); };
template <class T> struct Code<T*> { static constexpr char value = 'p'; };
template <class... A>
int describe(void (*)(A...), char* codes, int* sizes) {
  int n = 0;
  ((codes[n] = Code<A>::value, sizes[n] = int(sizeof(A)), ++n), ...);
  return n;
}
template <unsigned index, class First, class... Rest>
struct TypeAt : TypeAt<index - 1, Rest...> {};
template <class First, class... Rest>
struct TypeAt<0, First, Rest...> { using type = First; };
// Not instrumented: the arguments lie in host memory.
template <class... A, class... Values>
__attribute__((no_sanitize("thread"))) void invoke(void (*kernel)(A...), void** arguments, Values... values) {
  if constexpr (sizeof...(Values) == sizeof...(A)) {
    kernel(values...);
  } else {
    using Next = typename TypeAt<sizeof...(Values), A...>::type;
    invoke(kernel, arguments, values..., *static_cast<Next*>(arguments[sizeof...(Values)]));
  }
}
}  // namespace ninferc_emulator

// ---- vector types ----------------------------------------------------------------------------------------------
#define NINFERC_EMULATOR_VECTOR_(T, name, align2, align4)                                        \
  struct alignas(align2) name##2 { T x, y; };                                                    \
  struct name##3 { T x, y, z; };                                                                 \
  struct alignas(align4) name##4 { T x, y, z, w; };                                              \
  inline name##2 make_##name##2(T x, T y) { return {x, y}; }                                     \
  inline name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; }                             \
  inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
NINFERC_EMULATOR_VECTOR_(float, float, 8, 16)
NINFERC_EMULATOR_VECTOR_(int, int, 8, 16)
NINFERC_EMULATOR_VECTOR_(unsigned, uint, 8, 16)
NINFERC_EMULATOR_VECTOR_(unsigned short, ushort, 4, 8)
NINFERC_EMULATOR_VECTOR_(unsigned char, uchar, 2, 4)
#undef NINFERC_EMULATOR_VECTOR_
struct alignas(16) ulonglong2 { unsigned long long x, y; };
using dim3 = ninferc_emulator_dim3;

// ---- intrinsics ------------------------------------------------------------------------------------------------
inline void __syncthreads_at(const char* file, int line) {
  ninferc_emulator_barrier(0, 0, 1, 0, file, "__syncthreads", line);
}
#define __syncthreads() __syncthreads_at(__builtin_FILE(), __builtin_LINE())
inline int __syncthreads_count(int p) { return int(ninferc_emulator_barrier(0, 0, 1, p != 0, nullptr, "__syncthreads_count", 0)); }
inline int __syncthreads_or(int p) { return __syncthreads_count(p) != 0; }
inline int __syncthreads_and(int p) { return __syncthreads_count(p == 0) == 0; }
inline void __syncwarp(unsigned mask = 0xffffffffu) { ninferc_emulator_sync_warp(mask); }
template <class T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return ninferc_emulator::shuffle(ninferc_emulator::shuffle_index, mask, value, unsigned(source), unsigned(width));
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return ninferc_emulator::shuffle(ninferc_emulator::shuffle_up, mask, value, delta, unsigned(width));
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  return ninferc_emulator::shuffle(ninferc_emulator::shuffle_down, mask, value, delta, unsigned(width));
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  return ninferc_emulator::shuffle(ninferc_emulator::shuffle_xor, mask, value, unsigned(bits), unsigned(width));
}
inline unsigned __ballot_sync(unsigned mask, int predicate) { return ninferc_emulator_vote(mask, predicate != 0); }
inline int __any_sync(unsigned mask, int predicate) { return ninferc_emulator_vote(mask, predicate != 0) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return ninferc_emulator_vote(mask, predicate == 0) == 0; }
inline unsigned __match_any_sync(unsigned mask, unsigned value) { return ninferc_emulator_match(mask, value); }

inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline int __clz(int v) { return v == 0 ? 32 : __builtin_clz(unsigned(v)); }
inline int __clzll(long long v) { return v == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(v)); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline unsigned __brev(unsigned v) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= ((v >> i) & 1u) << (31 - i);
  return r;
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const unsigned long long bytes = (static_cast<unsigned long long>(b) << 32) | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) r |= (unsigned(bytes >> (8 * ((selector >> (4 * i)) & 7))) & 255u) << (8 * i);
  return r;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned(((static_cast<unsigned long long>(high) << 32) | low) >> (shift & 31));
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return unsigned((((static_cast<unsigned long long>(high) << 32) | low) << (shift & 31)) >> 32);
}
inline int __mul24(int a, int b) { return a * b; }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((static_cast<unsigned long long>(a) * b) >> 32); }
inline int __mulhi(int a, int b) { return int((static_cast<long long>(a) * b) >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>((static_cast<unsigned __int128>(a) * b) >> 64);
}
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) c += int(static_cast<signed char>(a >> (8 * i))) * int(static_cast<signed char>(b >> (8 * i)));
  return c;
}
inline unsigned __float_as_uint(float v) { return __builtin_bit_cast(unsigned, v); }
inline int __float_as_int(float v) { return __builtin_bit_cast(int, v); }
inline float __uint_as_float(unsigned v) { return __builtin_bit_cast(float, v); }
inline float __int_as_float(int v) { return __builtin_bit_cast(float, v); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
// Volatile results: the _rn forms are never contracted into a fused multiply-add.
inline float __fadd_rn(float a, float b) { volatile float r = a + b; return r; }
inline float __fsub_rn(float a, float b) { volatile float r = a - b; return r; }
inline float __fmul_rn(float a, float b) { volatile float r = a * b; return r; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float a) { return 1.0f / a; }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float rsqrtf(float a) { return 1.0f / sqrtf(a); }
inline float __frsqrt_rn(float a) { return 1.0f / sqrtf(a); }
inline float __expf(float a) { return expf(a); }
inline float __exp2f(float a) { return exp2f(a); }
inline float __logf(float a) { return logf(a); }
inline float __log2f(float a) { return log2f(a); }
inline float __powf(float a, float b) { return powf(a, b); }
inline float __sinf(float a) { return sinf(a); }
inline float __cosf(float a) { return cosf(a); }
inline float __saturatef(float a) { return a != a ? 0.0f : (a < 0.0f ? 0.0f : (a > 1.0f ? 1.0f : a)); }
inline void sincosf(float a, float* s, float* c) { *s = sinf(a); *c = cosf(a); }
inline float __int2float_rn(int a) { return float(a); }
inline float __uint2float_rn(unsigned a) { return float(a); }
inline int __float2int_rn(float a) { return int(rintf(a)); }
inline int __float2int_rz(float a) { return int(a); }
inline int __float2int_rd(float a) { return int(floorf(a)); }
inline unsigned __float2uint_rn(float a) { return unsigned(rintf(a)); }
inline bool isnan(float a) { return a != a; }
inline bool isinf(float a) { return fabsf(a) == __builtin_inff(); }
inline bool isfinite(float a) { return fabsf(a) < __builtin_inff(); }
template <class T> constexpr T min(T a, T b) { return b < a ? b : a; }
template <class T> constexpr T max(T a, T b) { return a < b ? b : a; }
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline int abs(int a) { return a < 0 ? -a : a; }
template <class T>
inline T __ldg(const T* pointer) {
  ninferc_emulator_check_global(pointer, sizeof(T), 0, "__ldg");
  return *pointer;
}
template <class T>
inline T atomicAdd(T* pointer, T value) {
  ninferc_emulator_atomic(pointer, sizeof(T), "atomicAdd");
  const T old = *pointer;
  *pointer = old + value;
  return old;
}
template <class T>
inline T atomicMax(T* pointer, T value) {
  ninferc_emulator_atomic(pointer, sizeof(T), "atomicMax");
  const T old = *pointer;
  if (old < value) *pointer = value;
  return old;
}
template <class T>
inline T atomicMin(T* pointer, T value) {
  ninferc_emulator_atomic(pointer, sizeof(T), "atomicMin");
  const T old = *pointer;
  if (value < old) *pointer = value;
  return old;
}
template <class T>
inline T atomicExch(T* pointer, T value) {
  ninferc_emulator_atomic(pointer, sizeof(T), "atomicExch");
  const T old = *pointer;
  *pointer = value;
  return old;
}
template <class T>
inline T atomicOr(T* pointer, T value) {
  ninferc_emulator_atomic(pointer, sizeof(T), "atomicOr");
  const T old = *pointer;
  *pointer = old | value;
  return old;
}
template <class T>
inline T atomicCAS(T* pointer, T expected, T value) {
  ninferc_emulator_atomic(pointer, sizeof(T), "atomicCAS");
  const T old = *pointer;
  if (old == expected) *pointer = value;
  return old;
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned ns) { ninferc_emulator_sleep(ns); }
[[noreturn]] inline void __trap() { ninferc_emulator_trap("the kernel executed __trap"); }
#define assert(condition) \
  ((condition) ? static_cast<void>(0) : ninferc_emulator_trap("device assertion failed: " #condition))
