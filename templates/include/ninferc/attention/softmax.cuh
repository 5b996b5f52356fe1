// Online softmax of query rows whose scores lie in matrix accumulators: a thread holds, of rows group_row and group_row + 8
// of its warp's 16, two neighbouring keys in every eight (mma.cuh's D layout).
#pragma once
#include <ninferc/base/math.cuh>
#include <ninferc/base/types.cuh>
#include <ninferc/base/warp.cuh>

namespace ninferc::attention {

struct RowSoftmax {
  f32 maximum[2], sum[2];  // per row: largest score so far, this thread's part of the sum of weights

  NINFERC_DEVICE RowSoftmax() : maximum{bits_float(0xff800000u), bits_float(0xff800000u)}, sum{0.0f, 0.0f} {}

  // Scores of keys key … key + 8 n - 1 become weights exp2((score - maximum) · scale); `factor` is what earlier output and
  // sums must be multiplied by.  The warp's row r sees keys up to top + r.
  template <u32 n>
  NINFERC_DEVICE void update(f32 (&score)[n][4], u32 key, u32 top, f32 scale, f32 (&factor)[2]) {
    const u32 group_row = lane_id() / 4, pair = lane_id() % 4;
    const f32 low = bits_float(0xff800000u);
    if (key + 8 * n > top + 1) {
#pragma unroll
      for (u32 i = 0; i < n; ++i)
#pragma unroll
        for (u32 e = 0; e < 4; ++e)
          if (key + i * 8 + pair * 2 + e % 2 > top + group_row + e / 2 * 8) score[i][e] = low;
    }
    f32 anchor[2];
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      f32 highest = maximum[h];
#pragma unroll
      for (u32 i = 0; i < n; ++i) highest = fmaxf(highest, fmaxf(score[i][2 * h], score[i][2 * h + 1]));
      highest = warp_max<4>(highest);
      anchor[h] = highest == low ? 0.0f : highest * scale;  // a row that has seen no key keeps weights of zero
      factor[h] = exp2_fast(fmaf(maximum[h], scale, -anchor[h]));
      maximum[h] = highest;
      sum[h] *= factor[h];
    }
#pragma unroll
    for (u32 i = 0; i < n; ++i)
#pragma unroll
      for (u32 e = 0; e < 4; ++e) {
        score[i][e] = exp2_fast(fmaf(score[i][e], scale, -anchor[e / 2]));
        sum[e / 2] += score[i][e];
      }
  }
};

// output rows *= factor, unless that changes nothing in the whole warp.
template <u32 n>
NINFERC_DEVICE void rescale(f32 (&output)[n][4], const f32 (&factor)[2]) {
  if (warp_all(factor[0] == 1.0f && factor[1] == 1.0f)) return;
#pragma unroll
  for (u32 i = 0; i < n; ++i)
#pragma unroll
    for (u32 e = 0; e < 4; ++e) output[i][e] *= factor[e / 2];
}

// Weights of 16 n / 2 keys as A fragments of n / 2 products of depth 16.
template <u32 n>
NINFERC_DEVICE void pack_weights(const f32 (&weight)[n][4], u32 (&packed)[n / 2][4]) {
#pragma unroll
  for (u32 i = 0; i < n; ++i) {
    packed[i / 2][i % 2 * 2] = pack_bf16x2(weight[i][0], weight[i][1]);
    packed[i / 2][i % 2 * 2 + 1] = pack_bf16x2(weight[i][2], weight[i][3]);
  }
}

}  // namespace ninferc::attention
