// Plain RMSNorm per head, gated: y = bf(o · (mean(o²) + ε)^(-1/2) · w · silu(z)).
//
// A group of `lanes` lanes owns one head of one column, eight values (16 bytes) per lane.
#pragma once
#include <ninferc/base/grid.cuh>
#include <ninferc/base/math.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>

namespace ninferc::gdn {

constexpr u32 lanes_for(u32 vectors) {
  u32 lanes = 1;
  while (lanes < vectors) lanes *= 2;
  return lanes;
}

// Eight values of a head, with the gate and the weight beside them, → eight values of y.  All lanes of the head take part;
// those beyond it bring zeros.
template <u32 dim>
NINFERC_DEVICE u32x4 gated_norm_part(const u32x4& value, const u32x4& gate, const u32x4& weight, f32 eps) {
  const u32 v[4] = {value.x, value.y, value.z, value.w};
  const u32 g[4] = {gate.x, gate.y, gate.z, gate.w};
  const u32 c[4] = {weight.x, weight.y, weight.z, weight.w};
  f32 sum = 0.0f;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    sum = __fmaf_rn(bf16x2_lo(v[i]), bf16x2_lo(v[i]), sum);
    sum = __fmaf_rn(bf16x2_hi(v[i]), bf16x2_hi(v[i]), sum);
  }
  const f32 scale = rsqrt_fast(warp_sum<lanes_for(dim / 8)>(sum) * (1.0f / dim) + eps);
  u32 out[4];
#pragma unroll
  for (u32 i = 0; i < 4; ++i)
    out[i] = pack_bf16x2(bf16x2_lo(v[i]) * scale * bf16x2_lo(c[i]) * silu_fast(bf16x2_lo(g[i])),
                         bf16x2_hi(v[i]) * scale * bf16x2_hi(c[i]) * silu_fast(bf16x2_hi(g[i])));
  return u32x4{out[0], out[1], out[2], out[3]};
}

template <u32 dim, u32 heads>
NINFERC_DEVICE void gated_norm(const bf16* o, i32 o_stride, const bf16* z, i32 z_stride, const bf16* w, bf16* y,
                               i32 y_stride, i32 columns, f32 eps) {
  constexpr u32 lanes = lanes_for(dim / 8);
  static_assert(dim % 8 == 0 && lanes <= 32, "a head is at most 256 values, a multiple of 8");
  const u32 unit = (blockIdx.x * blockDim.x + threadIdx.x) / lanes;
  const u32 part = threadIdx.x % lanes;
  const u32 column = unit / heads, head = unit % heads;
  const bool active = column < u32(columns) && part * 8 < dim;
  u32x4 weight{};
  if (active) weight = ld_nc<u32x4>(w + part * 8);
  grid_launch_dependents();  // first: a short kernel lets the next one fetch its weights meanwhile
  grid_dependency_wait();
  u32x4 value{}, gate{};
  if (active) {
    const u32 offset = head * dim + part * 8;
    value = ld_global<u32x4>(o + i64(column) * o_stride + offset);
    gate = ld_global<u32x4>(z + i64(column) * z_stride + offset);
  }
  const u32x4 out = gated_norm_part<dim>(value, gate, weight, eps);
  if (active) st_global(y + i64(column) * y_stride + head * dim + part * 8, out);
}

}  // namespace ninferc::gdn
