// Offset RMSNorm of one row per block of 256 threads, and the copy of each lane's last active row.
#pragma once
#include <ninferc/base/grid.cuh>
#include <ninferc/norm/sumsq.cuh>

namespace ninferc {

template <u32 width>
NINFERC_DEVICE void rmsnorm_row(const bf16* x, const bf16* w, bf16* y, f32 eps, f32* parts) {
  parts[warp_id()] = sumsq_part(x, width, warp_id());
  sync_block();
  const f32 factor = rms_factor(sumsq_total(parts), width, eps);
  for (u32 pair = threadIdx.x; pair < width / 2; pair += 256) {
    const f32x2 v = unpack_bf16x2(ld_global<u32>(x + 2 * pair)), g = unpack_bf16x2(ld_nc<u32>(w + 2 * pair));
    st_global(y + 2 * pair, pack_bf16x2(offset_norm(v.x, factor, g.x), offset_norm(v.y, factor, g.y)));
  }
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
