// Sum of squares of a row of bf16, in one fixed order whatever kernel computes it and with however many warps.
//
// The order is that of a block of 256 threads: thread i adds the squares of the pairs i, i + 256, ... (columns 2j and
// 2j + 1 of pair j, low one first), a warp adds its lanes by an xor tree of 16, 8, 4, 2, 1, and the eight warps are added
// in order.  A kernel with another number of warps computes the eight parts one after the other, with the same bits.
#pragma once
#include <ninferc/base/math.cuh>
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>

namespace ninferc {

constexpr u32 sumsq_parts = 8;

// Of the pairs that a thread holds, summed over its warp.
template <u32 rounds>
NINFERC_DEVICE f32 sumsq_held(const u32 (&held)[rounds]) {
  f32 sum = 0;
#pragma unroll
  for (u32 i = 0; i < rounds; ++i) {
    const f32x2 x = unpack_bf16x2(held[i]);
    sum = fmaf(x.x, x.x, sum);
    sum = fmaf(x.y, x.y, sum);
  }
  return warp_sum(sum);
}

// Part 0..7 of a row of `width` columns (even), for all lanes of a full warp, all loads in flight together.  The row is 4-byte
// aligned.
template <u32 width>
NINFERC_DEVICE f32 sumsq_part(const bf16* row, u32 part) {
  constexpr u32 rounds = (width / 2 + 32 * sumsq_parts - 1) / (32 * sumsq_parts);
  u32 held[rounds];
#pragma unroll
  for (u32 i = 0; i < rounds; ++i) {
    const u32 pair = (i * sumsq_parts + part) * 32 + lane_id();
    held[i] = pair < width / 2 ? ld_global<u32>(row + 2 * pair) : 0;
  }
  return sumsq_held(held);
}

// All parts, in order.
NINFERC_DEVICE f32 sumsq_total(const f32* parts) {
  f32 total = parts[0];
#pragma unroll
  for (u32 i = 1; i < sumsq_parts; ++i) total += parts[i];
  return total;
}

// (mean of the squares + eps)^(-1/2).
NINFERC_DEVICE f32 rms_factor(f32 sumsq, u32 width, f32 eps) { return rsqrt_fast(fmaf(sumsq, 1.0f / f32(width), eps)); }

// x * factor * (1 + w), before its one rounding (spec: model-dense.md section 2, offset norm).
NINFERC_DEVICE f32 offset_norm(f32 x, f32 factor, f32 w) { return (x * factor) * (1.0f + w); }

}  // namespace ninferc
