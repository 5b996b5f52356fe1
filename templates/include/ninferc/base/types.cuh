// Scalar types, number formats and bit utilities.  Needs no CUDA or standard header.
//
// Every primitive of this folder has two bodies: PTX for the device, and a hook for the CPU emulator that the tests use
// (NINFERC_EMULATOR).  Code outside this folder contains no inline assembly, so all of it runs in both.
#pragma once

// NINFERC_CODE_ARCH (emit/render.py): take the code paths of that architecture, whatever is compiled for.
#if defined(NINFERC_EMULATOR)
#define NINFERC_DEVICE inline
#define NINFERC_ARCH NINFERC_EMULATOR_ARCH
#else
#define NINFERC_DEVICE __device__ __forceinline__
#if defined(NINFERC_CODE_ARCH)
#define NINFERC_ARCH NINFERC_CODE_ARCH
#elif defined(__CUDA_ARCH__)
#define NINFERC_ARCH __CUDA_ARCH__
#else
#define NINFERC_ARCH 0
#endif
#endif

// extern "C" __global__ void NAME with launch bounds; the parameter list and the body follow the macro.
#if defined(NINFERC_EMULATOR)
#define NINFERC_KERNEL(name, threads, min_blocks)                                                       \
  extern "C" unsigned ninferc_emulator_bounds_##name() { return (threads); }                            \
  extern "C" void name
#define NINFERC_DYNAMIC_SMEM(pointer) \
  unsigned char* const pointer = static_cast<unsigned char*>(ninferc_emulator_thread->dynamic_shared)
#else
#define NINFERC_KERNEL(name, threads, min_blocks) \
  extern "C" __global__ void __launch_bounds__(threads, min_blocks) name
#define NINFERC_DYNAMIC_SMEM(pointer)                               \
  extern __shared__ __align__(1024) unsigned char ninferc_smem_[];  \
  unsigned char* const pointer = ninferc_smem_
#endif

// Capabilities of the architecture being compiled for (decided by features, never by a list of names).
#define NINFERC_HAS_BF16_MMA (NINFERC_ARCH >= 800)
#define NINFERC_HAS_CP_ASYNC (NINFERC_ARCH >= 800)
#define NINFERC_HAS_FP8_CVT (NINFERC_ARCH >= 890)
#define NINFERC_HAS_BULK_COPY (NINFERC_ARCH >= 900)
#define NINFERC_HAS_PROGRAMMATIC (NINFERC_ARCH >= 900)
#if (defined(__CUDA_ARCH_FEAT_SM90_ALL) && !defined(NINFERC_CODE_ARCH)) || (defined(NINFERC_EMULATOR) && NINFERC_EMULATOR_ARCH == 900)
#define NINFERC_HAS_WGMMA 1
#else
#define NINFERC_HAS_WGMMA 0
#endif

namespace ninferc {

using i8 = signed char;
using u8 = unsigned char;
using i16 = short;
using u16 = unsigned short;
using i32 = int;
using u32 = unsigned int;
using i64 = long long;
using u64 = unsigned long long;
using f32 = float;
using f64 = double;

// Raw-bit numbers: the bits are what memory holds; arithmetic goes through the conversions below.
struct bf16 { u16 bits; };
struct f16 { u16 bits; };
struct alignas(8) f32x2 { f32 x, y; };

template <class To, class From>
NINFERC_DEVICE To bit_cast(const From& value) {
  static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
  return __builtin_bit_cast(To, value);
}

#if defined(NINFERC_EMULATOR)
NINFERC_DEVICE u32 float_bits(f32 v) { return bit_cast<u32>(v); }
NINFERC_DEVICE f32 bits_float(u32 v) { return bit_cast<f32>(v); }
#else
NINFERC_DEVICE u32 float_bits(f32 v) { return __float_as_uint(v); }
NINFERC_DEVICE f32 bits_float(u32 v) { return __uint_as_float(v); }
#endif

// The same value, of which the compiler knows nothing: what is computed from it is not kept in registers across a loop.
NINFERC_DEVICE u32 opaque(u32 value) {
#if !defined(NINFERC_EMULATOR)
  asm volatile("" : "+r"(value));
#endif
  return value;
}

// ---- bit utilities ---------------------------------------------------------------------------------------------

// prmt.b32: byte i of the result is byte (selector nibble i) of the eight bytes {b, a}; nibble bit 3 replicates the sign.
NINFERC_DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
#if defined(NINFERC_EMULATOR)
  u32 result = 0;
  const u64 bytes = (u64(b) << 32) | a;
  for (u32 i = 0; i < 4; ++i) {
    const u32 nibble = (selector >> (4 * i)) & 15;
    u32 byte = u32(bytes >> (8 * (nibble & 7))) & 255;
    if (nibble & 8) byte = (byte & 128) ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
#else
  u32 result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
#endif
}

// lop3.b32: bitwise function of three inputs.  table = f(0xF0, 0xCC, 0xAA) of the wanted f(a, b, c).
template <u32 table>
NINFERC_DEVICE u32 lop3(u32 a, u32 b, u32 c) {
  static_assert(table < 256, "a lop3 table has 8 bits");
#if defined(NINFERC_EMULATOR)
  u32 result = 0;
  for (u32 i = 0; i < 8; ++i)
    if ((table >> i) & 1) result |= ((i & 4) ? a : ~a) & ((i & 2) ? b : ~b) & ((i & 1) ? c : ~c);
  return result;
#else
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(result) : "r"(a), "r"(b), "r"(c), "n"(table));
  return result;
#endif
}

// Low word of {high, low} >> shift, for shift modulo 32 (shf.r.wrap).
NINFERC_DEVICE u32 funnel_right(u32 low, u32 high, u32 shift) {
#if defined(NINFERC_EMULATOR)
  return u32(((u64(high) << 32) | low) >> (shift & 31));
#else
  u32 result;
  asm("shf.r.wrap.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(shift));
  return result;
#endif
}

// High word of {high, low} << shift, for shift modulo 32 (shf.l.wrap).
NINFERC_DEVICE u32 funnel_left(u32 low, u32 high, u32 shift) {
#if defined(NINFERC_EMULATOR)
  return u32((((u64(high) << 32) | low) << (shift & 31)) >> 32);
#else
  u32 result;
  asm("shf.l.wrap.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(low), "r"(high), "r"(shift));
  return result;
#endif
}

template <class T>
NINFERC_DEVICE constexpr T ceil_div(T a, T b) { return (a + b - 1) / b; }
template <class T>
NINFERC_DEVICE constexpr T round_up(T a, T b) { return (a + b - 1) / b * b; }

// ---- bfloat16 --------------------------------------------------------------------------------------------------

NINFERC_DEVICE f32 bf16_to_f32(bf16 v) { return bits_float(u32(v.bits) << 16); }
// The two halves of a packed pair; the low half is the lower address.
NINFERC_DEVICE f32 bf16x2_lo(u32 pair) { return bits_float(pair << 16); }
NINFERC_DEVICE f32 bf16x2_hi(u32 pair) { return bits_float(pair & 0xffff0000u); }

// Round to nearest even; every NaN becomes 0x7fff, as the hardware conversion does.
NINFERC_DEVICE u16 f32_to_bf16_bits_integer(f32 v) {
  const u32 bits = float_bits(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return u16((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

NINFERC_DEVICE bf16 f32_to_bf16(f32 v) {
#if defined(NINFERC_EMULATOR) || NINFERC_ARCH < 800
  return bf16{f32_to_bf16_bits_integer(v)};
#else
  bf16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(v));
  return result;
#endif
}

NINFERC_DEVICE u32 pack_bf16x2(f32 lo, f32 hi) {
#if defined(NINFERC_EMULATOR) || NINFERC_ARCH < 800
  return u32(f32_to_bf16_bits_integer(lo)) | (u32(f32_to_bf16_bits_integer(hi)) << 16);
#else
  u32 result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(hi), "f"(lo));
  return result;
#endif
}
NINFERC_DEVICE u32 pack_bf16x2(bf16 lo, bf16 hi) { return u32(lo.bits) | (u32(hi.bits) << 16); }
NINFERC_DEVICE f32x2 unpack_bf16x2(u32 pair) { return f32x2{bf16x2_lo(pair), bf16x2_hi(pair)}; }
// The value that survives a store as bf16.
NINFERC_DEVICE f32 round_bf16(f32 v) { return bf16_to_f32(f32_to_bf16(v)); }

// ---- half ------------------------------------------------------------------------------------------------------

NINFERC_DEVICE f32 f16_to_f32(f16 v) {
#if defined(NINFERC_EMULATOR)
  return ninferc_emulator::half_to_float(v.bits);
#else
  f32 result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(v.bits));
  return result;
#endif
}

NINFERC_DEVICE f16 f32_to_f16(f32 v) {
#if defined(NINFERC_EMULATOR)
  return f16{ninferc_emulator::float_to_half(v)};
#else
  f16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(v));
  return result;
#endif
}

NINFERC_DEVICE u32 pack_f16x2(f16 lo, f16 hi) { return u32(lo.bits) | (u32(hi.bits) << 16); }
NINFERC_DEVICE u32 pack_f16x2(f32 lo, f32 hi) {
#if defined(NINFERC_EMULATOR) || NINFERC_ARCH < 800
  return pack_f16x2(f32_to_f16(lo), f32_to_f16(hi));
#else
  u32 result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(hi), "f"(lo));
  return result;
#endif
}
NINFERC_DEVICE f32 f16x2_lo(u32 pair) { return f16_to_f32(f16{u16(pair)}); }
NINFERC_DEVICE f32 f16x2_hi(u32 pair) { return f16_to_f32(f16{u16(pair >> 16)}); }
NINFERC_DEVICE f32x2 unpack_f16x2(u32 pair) { return f32x2{f16x2_lo(pair), f16x2_hi(pair)}; }

// ---- packed arithmetic: each half is rounded once ----------------------------------------------------------------

NINFERC_DEVICE u32 hfma2_f16(u32 a, u32 b, u32 c) {
#if defined(NINFERC_EMULATOR)
  return ninferc_emulator::packed_fma_f16(a, b, c);
#else
  u32 result;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
#endif
}
NINFERC_DEVICE u32 hadd2_f16(u32 a, u32 b) {
#if defined(NINFERC_EMULATOR)
  return ninferc_emulator::packed_fma_f16(a, 0x3c003c00u, b);
#else
  u32 result;
  asm("add.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#endif
}
NINFERC_DEVICE u32 hsub2_f16(u32 a, u32 b) { return hadd2_f16(a, b ^ 0x80008000u); }
NINFERC_DEVICE u32 hmul2_f16(u32 a, u32 b) {
#if defined(NINFERC_EMULATOR)
  return ninferc_emulator::packed_fma_f16(a, b, 0x80008000u);
#else
  u32 result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
#endif
}

// bf16: fused multiply-add is native from sm_80 and is also the add and the multiply (times one, plus minus zero).
// Below sm_80 the work is done in f32 and then rounded to bf16, which may differ in the last bit at a tie.
NINFERC_DEVICE u32 hfma2_bf16(u32 a, u32 b, u32 c) {
#if NINFERC_ARCH < 800
  return pack_bf16x2(fmaf(bf16x2_lo(a), bf16x2_lo(b), bf16x2_lo(c)), fmaf(bf16x2_hi(a), bf16x2_hi(b), bf16x2_hi(c)));
#elif defined(NINFERC_EMULATOR)
  return ninferc_emulator::packed_fma_bf16(a, b, c);
#else
  u32 result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
#endif
}
// The same where both results are known to be bf16 numbers, as in unpacking: rounding would be most of the work below sm_80.
NINFERC_DEVICE u32 hfma2_bf16_exact(u32 a, u32 b, u32 c) {
#if NINFERC_ARCH < 800
  return prmt(float_bits(fmaf(bf16x2_lo(a), bf16x2_lo(b), bf16x2_lo(c))),
              float_bits(fmaf(bf16x2_hi(a), bf16x2_hi(b), bf16x2_hi(c))), 0x7632);
#else
  return hfma2_bf16(a, b, c);
#endif
}
// A pair's low (0) or high (1) number twice, in a form that the compiler folds into the instruction which multiplies by it.
template <u32 half>
NINFERC_DEVICE u32 twice(u32 pair) {
#if defined(NINFERC_EMULATOR)
  return prmt(pair, pair, half ? 0x3232 : 0x1010);
#else
  u32 result;
  asm("{\n .reg .b16 n0, n1;\n mov.b32 {n0, n1}, %1;\n mov.b32 %0, {n%2, n%2};\n}" : "=r"(result) : "r"(pair), "n"(half));
  return result;
#endif
}
NINFERC_DEVICE u32 hadd2_bf16_exact(u32 a, u32 b) { return hfma2_bf16_exact(a, 0x3f803f80u, b); }
NINFERC_DEVICE u32 hmul2_bf16_exact(u32 a, u32 b) { return hfma2_bf16_exact(a, b, 0x80008000u); }
NINFERC_DEVICE u32 hadd2_bf16(u32 a, u32 b) { return hfma2_bf16(a, 0x3f803f80u, b); }
NINFERC_DEVICE u32 hsub2_bf16(u32 a, u32 b) { return hadd2_bf16(a, b ^ 0x80008000u); }
NINFERC_DEVICE u32 hmul2_bf16(u32 a, u32 b) { return hfma2_bf16(a, b, 0x80008000u); }

// ---- FP8 e4m3 (finite, no infinity; 0x7f and 0xff are NaN) -----------------------------------------------------

// Two codes (low byte first) to two halves, exact, NaN kept.
NINFERC_DEVICE u32 e4m3x2_to_f16x2(u32 codes) {
#if !defined(NINFERC_EMULATOR) && NINFERC_HAS_FP8_CVT
  u32 result;
  const u16 low = u16(codes);
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(result) : "h"(low));
  return result;
#else
  // A code's seven low bits, moved to where a half keeps exponent and mantissa, read as value * 2^-8 (bias 7 against 15).
  const u32 spread = (codes & 0xffu) | ((codes & 0xff00u) << 8);
  const u32 sign = (spread & 0x00800080u) << 8;
  const u32 magnitude = (spread & 0x007f007fu) << 7;
  u32 result = hmul2_f16(magnitude, 0x5c005c00u);  // times 256, exact, subnormal codes included
  if ((spread & 0x7fu) == 0x7fu) result |= 0x00007fffu;
  if ((spread & 0x7f0000u) == 0x7f0000u) result |= 0x7fff0000u;
  return result | sign;
#endif
}
NINFERC_DEVICE f32 e4m3_to_f32(u8 code) { return f16x2_lo(e4m3x2_to_f16x2(code)); }

// The same for codes known to be finite and not negative (group scales): no NaN test, works on any architecture.
NINFERC_DEVICE f32 e4m3_scale_to_f32(u32 code) { return bits_float(code << 20) * 0x1p120f; }

}  // namespace ninferc
