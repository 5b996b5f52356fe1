// Offset RMSNorm of one row per block of 256 threads, and the copy of each lane's last active row.
#pragma once
#include <ninferc/base/grid.cuh>
#include <ninferc/norm/sumsq.cuh>

namespace ninferc {

constexpr u32 rmsnorm_threads = 256;
// Pairs of neighbouring columns that a thread holds: number i * 256 + thread, 0 past the end.
template <u32 width>
constexpr u32 rmsnorm_rounds = (width / 2 + rmsnorm_threads - 1) / rmsnorm_threads;

template <u32 width>
NINFERC_DEVICE void rmsnorm_gain(const bf16* w, u32 (&gain)[rmsnorm_rounds<width>]) {
#pragma unroll
  for (u32 i = 0; i < rmsnorm_rounds<width>; ++i) {
    const u32 pair = i * rmsnorm_threads + threadIdx.x;
    gain[i] = pair < width / 2 ? ld_nc<u32>(w + 2 * pair) : 0;
  }
}

// Of a row in registers; the additions are those of sumsq_part.
template <u32 width>
NINFERC_DEVICE void rmsnorm_held(const u32 (&held)[rmsnorm_rounds<width>], const u32 (&gain)[rmsnorm_rounds<width>], bf16* y,
                                 f32 eps, f32* parts) {
  constexpr u32 pairs = width / 2, rounds = rmsnorm_rounds<width>;
  const f32 sum = sumsq_held(held);
  if (lane_id() == 0) parts[warp_id()] = sum;
  sync_block();
  const f32 factor = rms_factor(sumsq_total(parts), width, eps);
#pragma unroll
  for (u32 i = 0; i < rounds; ++i) {
    const u32 pair = i * 256 + threadIdx.x;
    const f32x2 v = unpack_bf16x2(held[i]), g = unpack_bf16x2(gain[i]);
    if (pair < pairs) st_global(y + 2 * pair, pack_bf16x2(offset_norm(v.x, factor, g.x), offset_norm(v.y, factor, g.y)));
  }
}

// The row is read once: all loads are in flight together.
template <u32 width>
NINFERC_DEVICE void rmsnorm_row(const bf16* x, const bf16* w, bf16* y, f32 eps, f32* parts) {
  constexpr u32 rounds = rmsnorm_rounds<width>;
  u32 held[rounds], gain[rounds];
  rmsnorm_gain<width>(w, gain);
  grid_dependency_wait();
#pragma unroll
  for (u32 i = 0; i < rounds; ++i) {
    const u32 pair = i * rmsnorm_threads + threadIdx.x;
    held[i] = pair < width / 2 ? ld_global<u32>(x + 2 * pair) : 0;
  }
  rmsnorm_held<width>(held, gain, y, eps, parts);
}

template <u32 columns_per_lane, u32 width>
NINFERC_DEVICE void select_last(const bf16* x, u32 x_stride, const i32* lane_ncols, bf16* y, u32 y_stride) {
  const u32 lane = blockIdx.x;
  const i32 count = ld_global<i32>(lane_ncols + lane);
  if (count <= 0) return;
  const bf16* row = x + u64(lane * columns_per_lane + u32(count) - 1) * x_stride;
  for (u32 pair = threadIdx.x; pair < width / 2; pair += blockDim.x)
    st_global(y + u64(lane) * y_stride + 2 * pair, ld_global<u32>(row + 2 * pair));
}

}  // namespace ninferc
