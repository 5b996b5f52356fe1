// Warp-level matrix products (mma.sync) and shared-memory matrix loads (ldmatrix), with their fragment layouts.
//
// Let group = lane / 4 (0..7) and pair = lane % 4 (0..3).  Packed 16-bit registers hold the lower column in the low half.
//
//   A 16x16 (row major), 4 registers      a[0] row group,     columns 2 pair, 2 pair + 1
//                                         a[1] row group + 8, columns 2 pair, 2 pair + 1
//                                         a[2] row group,     columns 2 pair + 8, 2 pair + 9
//                                         a[3] row group + 8, columns 2 pair + 8, 2 pair + 9
//   B 16x8 (column major), 2 registers    b[0] column group, rows 2 pair, 2 pair + 1
//                                         b[1] column group, rows 2 pair + 8, 2 pair + 9
//   C, D 16x8, 4 floats                   d[0], d[1] row group,     columns 2 pair, 2 pair + 1
//                                         d[2], d[3] row group + 8, columns 2 pair, 2 pair + 1
//
// With weights as A (16 output rows) and activations as B (8 columns of the step), D holds 16 outputs for 8 columns.
// All 32 lanes must execute each call together.
#pragma once
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>

namespace ninferc {

// d += A(16x16) * B(16x8), bf16 in, f32 accumulate.
#if NINFERC_HAS_BF16_MMA
NINFERC_DEVICE void mma_m16n8k16_bf16(f32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if defined(NINFERC_EMULATOR)
  ninferc_emulator_mma(ninferc_emulator::mma_bf16_k16, d, a, b);
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// d += A(16x8) * B(8x8), f32 values read as tf32 (the low 13 mantissa bits are ignored), f32 accumulate.  sm_80+.
//   A, 4 registers: a[0] (group, pair), a[1] (group + 8, pair), a[2] (group, pair + 4), a[3] (group + 8, pair + 4)
//   B, 2 registers: b[0] (row pair, column group), b[1] (row pair + 4, column group);  D as above
NINFERC_DEVICE void mma_m16n8k8_tf32(f32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if defined(NINFERC_EMULATOR)
  ninferc_emulator_mma(ninferc_emulator::mma_tf32_k8, d, a, b);
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}
// Round to nearest (ties away), the rounding tf32 operands should have.
NINFERC_DEVICE u32 f32_to_tf32(f32 v) {
#if defined(NINFERC_EMULATOR)
  return (float_bits(v) + 0x1000u) & 0xffffe000u;
#else
  u32 result;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(v));
  return result;
#endif
}
#else
// Below sm_80 on the FP32 units: a lane fetches the rows and columns of its four sums, four of K at a time.  (Halves would not
// do instead: they hold bf16 values of a small range only.)  A loop, since a kernel has hundreds of these.
NINFERC_DEVICE void mma_m16n8k16_bf16(f32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  const u32 column = lane_id() % 4 * 8;  // first of the lanes that hold B's column 2 pair
#pragma unroll 1
  for (u32 p = 0; p < 4; ++p) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const f32x2 upper = unpack_bf16x2(shfl(a[2 * half], p, 4)), lower = unpack_bf16x2(shfl(a[2 * half + 1], p, 4));
      const f32x2 left = unpack_bf16x2(shfl(b[half], column + p)), right = unpack_bf16x2(shfl(b[half], column + 4 + p));
      d[0] = fmaf(upper.y, left.y, fmaf(upper.x, left.x, d[0]));
      d[1] = fmaf(upper.y, right.y, fmaf(upper.x, right.x, d[1]));
      d[2] = fmaf(lower.y, left.y, fmaf(lower.x, left.x, d[2]));
      d[3] = fmaf(lower.y, right.y, fmaf(lower.x, right.x, d[3]));
    }
  }
}
#endif

// d += A(16x8) * B(8x8), f16 in, f32 accumulate: a[0], a[1] and b[0] of the 16-deep layout.  sm_75+.
NINFERC_DEVICE void mma_m16n8k8_f16(f32 (&d)[4], u32 a0, u32 a1, u32 b0) {
#if defined(NINFERC_EMULATOR)
  const u32 a[4] = {a0, a1, 0, 0};
  const u32 b[2] = {b0, 0};
  ninferc_emulator_mma(ninferc_emulator::mma_f16_k8, d, a, b);
#else
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b0));
#endif
}

// d += A(16x16) * B(16x8), f16 in, f32 accumulate.  sm_75 runs it as two 8-deep products, low half of K first.
NINFERC_DEVICE void mma_m16n8k16_f16(f32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if !NINFERC_HAS_BF16_MMA
  mma_m16n8k8_f16(d, a[0], a[1], b[0]);
  mma_m16n8k8_f16(d, a[2], a[3], b[1]);
#elif defined(NINFERC_EMULATOR)
  ninferc_emulator_mma(ninferc_emulator::mma_f16_k16, d, a, b);
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#endif
}

// d += A(16x32) * B(32x8), signed bytes in, i32 accumulate.  A register holds four columns of A (rows of B), the lowest in the
// lowest byte:
//   A, 4 registers   a[0] row group, columns 4 pair .. 4 pair + 3; a[1] row group + 8; a[2], a[3] the same rows, columns + 16
//   B, 2 registers   b[0] column group, rows 4 pair .. 4 pair + 3; b[1] rows + 16;  D as above
// sm_75 runs it as four 8x8x16 products.
NINFERC_DEVICE void mma_m16n8k32_s8(i32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if defined(NINFERC_EMULATOR)
  ninferc_emulator_mma(ninferc_emulator::mma_s8_k32, reinterpret_cast<f32*>(d), a, b);
#elif NINFERC_HAS_BF16_MMA
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
#pragma unroll
  for (u32 i = 0; i < 4; ++i)
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(d[i % 2 * 2]), "+r"(d[i % 2 * 2 + 1]) : "r"(a[i]), "r"(b[i / 2]));
#endif
}

// ldmatrix: loads 1, 2 or 4 matrices of 8x8 16-bit elements.  Lane i passes the address of a 16-byte row: lanes 0-7 the
// rows of matrix 0, 8-15 of matrix 1, and so on (only the first 8 * count lanes' addresses are read, but every lane must
// pass a valid one).  Register m of a lane receives, of matrix m, row group, columns 2 pair and 2 pair + 1; with _trans,
// rows 2 pair and 2 pair + 1 of column group.
//
// A 16x16 row-major tile at `base` with row pitch p bytes: x4 with address base + (lane % 16) * p + (lane / 16) * 16
// gives a[0..3].  A B tile stored as 8 rows of N with K contiguous: x2 with (lane % 8) * p + (lane / 8 % 2) * 16.
#if defined(NINFERC_EMULATOR)
NINFERC_DEVICE void ldmatrix_x1(u32& r, SharedAddress row) { ninferc_emulator_ldmatrix(&r, row.value, 1, 0); }
NINFERC_DEVICE void ldmatrix_x1_trans(u32& r, SharedAddress row) { ninferc_emulator_ldmatrix(&r, row.value, 1, 1); }
NINFERC_DEVICE void ldmatrix_x2(u32 (&r)[2], SharedAddress row) { ninferc_emulator_ldmatrix(r, row.value, 2, 0); }
NINFERC_DEVICE void ldmatrix_x2_trans(u32 (&r)[2], SharedAddress row) { ninferc_emulator_ldmatrix(r, row.value, 2, 1); }
NINFERC_DEVICE void ldmatrix_x4(u32 (&r)[4], SharedAddress row) { ninferc_emulator_ldmatrix(r, row.value, 4, 0); }
NINFERC_DEVICE void ldmatrix_x4_trans(u32 (&r)[4], SharedAddress row) { ninferc_emulator_ldmatrix(r, row.value, 4, 1); }
#else
#define NINFERC_LDMATRIX_(suffix, modifier)                                                                           \
  NINFERC_DEVICE void ldmatrix_x1##suffix(u32& r, SharedAddress row) {                                                \
    asm volatile("ldmatrix.sync.aligned.m8n8.x1" modifier ".shared.b16 {%0}, [%1];"                                   \
                 : "=r"(r) : "r"(row.value) : "memory");                                                              \
  }                                                                                                                   \
  NINFERC_DEVICE void ldmatrix_x2##suffix(u32 (&r)[2], SharedAddress row) {                                           \
    asm volatile("ldmatrix.sync.aligned.m8n8.x2" modifier ".shared.b16 {%0, %1}, [%2];"                               \
                 : "=r"(r[0]), "=r"(r[1]) : "r"(row.value) : "memory");                                               \
  }                                                                                                                   \
  NINFERC_DEVICE void ldmatrix_x4##suffix(u32 (&r)[4], SharedAddress row) {                                           \
    asm volatile("ldmatrix.sync.aligned.m8n8.x4" modifier ".shared.b16 {%0, %1, %2, %3}, [%4];"                       \
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(row.value) : "memory");                       \
  }
NINFERC_LDMATRIX_(, "")
NINFERC_LDMATRIX_(_trans, ".trans")
#undef NINFERC_LDMATRIX_
#endif

// stmatrix: the inverse of ldmatrix.  sm_90+.
#if NINFERC_ARCH >= 900
#if defined(NINFERC_EMULATOR)
NINFERC_DEVICE void stmatrix_x2_trans(SharedAddress row, const u32 (&r)[2]) { ninferc_emulator_stmatrix(r, row.value, 2, 1); }
NINFERC_DEVICE void stmatrix_x4(SharedAddress row, const u32 (&r)[4]) { ninferc_emulator_stmatrix(r, row.value, 4, 0); }
NINFERC_DEVICE void stmatrix_x4_trans(SharedAddress row, const u32 (&r)[4]) { ninferc_emulator_stmatrix(r, row.value, 4, 1); }
#else
NINFERC_DEVICE void stmatrix_x2_trans(SharedAddress row, const u32 (&r)[2]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};"
               :: "r"(row.value), "r"(r[0]), "r"(r[1]) : "memory");
}
NINFERC_DEVICE void stmatrix_x4(SharedAddress row, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(row.value), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
NINFERC_DEVICE void stmatrix_x4_trans(SharedAddress row, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               :: "r"(row.value), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]) : "memory");
}
#endif
#endif

}  // namespace ninferc
