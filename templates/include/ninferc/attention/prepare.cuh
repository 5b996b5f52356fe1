// What stands between the projections and attention: per-head norm, rotation, append to the cache.
//
//   q, k  offset RMSNorm over each head (one shared weight vector each), rounded; then the first `rotary` dimensions are
//         rotated, pair i joining dimensions i and i + rotary / 2 and following axis i mod 3 of the position; rounded
//   k, v  appended at the column's token index;  q written to qr
// One warp per head and column; a lane holds dim / 32 neighbouring dimensions.
#pragma once
#include <ninferc/base/grid.cuh>
#include <ninferc/base/math.cuh>
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>
#include <ninferc/attention/rope.cuh>
#include <ninferc/kv/layout.cuh>

namespace ninferc::attention {

constexpr u32 prepare_warps = 4;

// n neighbouring bf16 values as floats.
template <u32 n>
NINFERC_DEVICE void load_bf16(const bf16* source, f32 (&values)[n]) {
  if constexpr (n == 1) {
    values[0] = bf16_to_f32(ld_global<bf16>(source));
  } else {
    struct alignas(n * 2) Pack { u32 words[n / 2]; };
    const Pack pack = ld_global<Pack>(source);
#pragma unroll
    for (u32 i = 0; i < n / 2; ++i) {
      values[2 * i] = bf16x2_lo(pack.words[i]);
      values[2 * i + 1] = bf16x2_hi(pack.words[i]);
    }
  }
}

// Axis of pair i of an interleaved three-axis rope: i mod 3 while the axis has pairs left, else temporal.
template <u32 height_pairs, u32 width_pairs>
NINFERC_DEVICE u32 pair_axis(u32 pair) {
  const u32 axis = pair % 3;
  return axis == 1 && pair < 3 * height_pairs ? 1 : axis == 2 && pair < 3 * width_pairs ? 2 : 0;
}

// Grid: x over groups of prepare_warps rows of a column (query heads, key heads, value heads), y over columns.
// positions[3][columns]; inv_freq[2][rotary / 2]: turns per position, high and low part; scale multiplies cos and sin.
// early: tables, positions and frequencies are complete when a block starts (compiler/passes/early.py), so that places and
// angles are found before the dependency wait; behind it stand one load, the norm and the rotation.
template <class Layout, u32 heads, u32 rotary, u32 height_pairs, u32 width_pairs, u32 lane_columns, u32 row_pages, bool early>
NINFERC_DEVICE void prepare(const bf16* q, i32 q_stride, const bf16* k, i32 k_stride, const bf16* v, i32 v_stride,
                            const bf16* wq, const bf16* wk, const f32* inv_freq, const i32* positions,
                            const i32* lane_ncols, const i32* lane_len, const i32* lane_page_row, const i32* page_table,
                            u8* cache, bf16* qr, i32 qr_stride, f32 eps, f32 scale) {
  constexpr u32 dim = Layout::dim, kv_heads = Layout::kv_heads, n = dim / 32, pairs = rotary / 2;
  static_assert(dim == 32 || dim == 64 || dim == 128 || dim == 256, "a lane holds 1, 2, 4 or 8 dimensions");
  static_assert(rotary % 2 == 0 && rotary <= dim, "rotary dimensions are even and within the head");
  __shared__ f32 rows[prepare_warps][rotary];   // what is rotated
  __shared__ f32x2 angles[prepare_warps][pairs];  // cosine and sine of each pair, times scale

  const u32 lane = lane_id(), first = lane * n, column = blockIdx.y, columns = gridDim.y, warp = warp_id();
  const u32 row = blockIdx.x * prepare_warps + warp;
  const bool is_query = row < heads, is_key = !is_query && row < heads + kv_heads, exists = row < heads + 2 * kv_heads;
  const u32 kv_head = row < heads + kv_heads ? row - heads : row - heads - kv_heads;
  f32 weight[n];
  if (is_query || is_key) load_bf16(is_query ? wq + first : wk + first, weight);

  grid_launch_dependents();  // first: a short kernel lets the next one fetch its weights meanwhile
  if constexpr (!early) grid_dependency_wait();
  const u32 batch_lane = column / lane_columns, t = column % lane_columns;
  const bool active = exists && i32(t) < ld_cg<i32>(lane_ncols + batch_lane);
  u32 token = 0;
  u8* page = nullptr;
  if (active && !is_query) {
    token = u32(ld_cg<i32>(lane_len + batch_lane)) + t;
    const u32 page_row = u32(ld_cg<i32>(lane_page_row + batch_lane));
    const u32 id = u32(ld_cg<i32>(page_table + u64(page_row) * row_pages + token / kv::page_tokens));
    page = cache + (is_key ? Layout::key_offset(id, kv_head) : Layout::value_offset(id, kv_head));
    token %= kv::page_tokens;
  }
  if (active && (is_query || is_key)) {
    for (u32 pair = lane; pair < pairs; pair += 32) {
      const u32 axis = pair_axis<height_pairs, width_pairs>(pair);
      const i32 position = ld_cg<i32>(positions + axis * columns + column);
      f32x2 angle;
      cos_sin_turns(turns_at(position, ld_nc<f32>(inv_freq + pair), ld_nc<f32>(inv_freq + pairs + pair)), angle.x, angle.y);
      angles[warp][pair] = f32x2{angle.x * scale, angle.y * scale};
    }
  }
  if constexpr (early) grid_dependency_wait();
  if (!active) return;

  f32 x[n];
  load_bf16((is_query ? q + u64(column) * q_stride + row * dim
             : is_key ? k + u64(column) * k_stride + kv_head * dim
                      : v + u64(column) * v_stride + kv_head * dim) + first, x);
  if (!is_query && !is_key) {
    Layout::ValueCodec::template store<dim>(page, token, first, x);
    return;
  }
  f32 squares = 0.0f;
#pragma unroll
  for (u32 i = 0; i < n; ++i) squares = fmaf(x[i], x[i], squares);
  const f32 inverse = rsqrt_fast(fmaf(warp_sum(squares), 1.0f / f32(dim), eps));
  f32* const shared = rows[warp];
#pragma unroll
  for (u32 i = 0; i < n; ++i) {
    x[i] = round_bf16(x[i] * inverse * (1.0f + weight[i]));
    if (first + i < rotary) shared[first + i] = x[i];
  }
  __syncwarp();
#pragma unroll
  for (u32 i = 0; i < n; ++i) {
    const u32 d = first + i;
    if (d < rotary) {
      const u32 pair = d < pairs ? d : d - pairs;
      const f32x2 angle = angles[warp][pair];
      x[i] = d < pairs ? x[i] * angle.x - shared[d + pairs] * angle.y : x[i] * angle.x + shared[d - pairs] * angle.y;
    }
  }
  if (is_query) {
    kv::Bf16::store<dim>(reinterpret_cast<u8*>(qr + u64(column) * qr_stride + row * dim), 0, first, x);
  } else {
    Layout::KeyCodec::template store<dim>(page, token, first, x);
  }
}

}  // namespace ninferc::attention
