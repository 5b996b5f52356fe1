// g = −exp(A_log)·softplus(a + dt_bias) and β = σ(b), with a and b the products of 2·Hv weight rows with the hidden rows.
//
// Columns are the 16 rows of a matrix-core tile, weight rows its 8 columns.  The eight warps of a block each sum a fixed
// eighth of K in a fixed order (GateSum) and warp 0..7 are added in that order, so a column's bits do not depend on how many
// columns or weight rows a block holds.  Within a group of 32 values of K, lane `pair` reads values 8 pair … 8 pair + 7 as
// 16 bytes; both operands permute K alike, which a sum over K allows.
#pragma once
#include <ninferc/base/grid.cuh>
#include <ninferc/base/mma.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>

namespace ninferc::gdn {

constexpr u32 gate_warps = 8;

struct GateOperands {
  const bf16* x;
  i32 x_stride;
  const bf16 *wa, *wb;  // row r of a, row r of b
  const f32 *a_log, *dt_bias;
  f32* gates;
  i32 gates_stride, columns;
};

NINFERC_DEVICE f32 softplus(f32 x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }
NINFERC_DEVICE f32 log_decay(f32 a, f32 a_log, f32 dt_bias) { return -expf(a_log) * softplus(a + dt_bias); }
NINFERC_DEVICE f32 write_strength(f32 b) { return 1.0f / (1.0f + expf(-b)); }

// One warp's part of the sums, in two chains that the matrix cores run side by side: the lower and the upper half of every
// 16 bytes.  a[h]: 16 bytes of column `group` + 8 h; b: of weight row `group`.
struct GateSum {
  f32 low[4] = {}, high[4] = {};
  NINFERC_DEVICE void add(const u32x4& a0, const u32x4& a1, const u32x4& b) {
    const u32 a_low[4] = {a0.x, a1.x, a0.y, a1.y}, a_high[4] = {a0.z, a1.z, a0.w, a1.w};
    const u32 b_low[2] = {b.x, b.y}, b_high[2] = {b.z, b.w};
    mma_m16n8k16_bf16(low, a_low, b_low);
    mma_m16n8k16_bf16(high, a_high, b_high);
  }
  // Element e: column `group` + 8 (e / 2), weight row 2 `pair` + e % 2.
  NINFERC_DEVICE f32 total(u32 e) const { return low[e] + high[e]; }
};

// `rows` weight rows per block (at most 8·tiles), `hidden` a multiple of 8.
template <u32 hidden, u32 heads, u32 tiles, u32 rows>
NINFERC_DEVICE void gates(const GateOperands& p) {
  static_assert(hidden % 8 == 0, "rows are read 16 bytes at a time");
  static_assert(rows <= 8 * tiles && rows > 8 * (tiles - 1), "a block's rows fill its tiles");
  constexpr u32 groups = (hidden + 31) / 32;
  constexpr u32 per_warp = (groups + gate_warps - 1) / gate_warps;
  constexpr u32 batch = tiles > 1 ? 2 : (per_warp < 10 ? per_warp : 10);
  __shared__ f32 partial[gate_warps][16][8 * tiles];

  const u32 warp = warp_id(), group = lane_id() / 4, pair = lane_id() % 4;
  const u32 first_row = blockIdx.x * rows, first_column = blockIdx.y * 16;
  const u32 begin = warp * per_warp;
  const u32 end = begin + per_warp < groups ? begin + per_warp : groups;

  const auto weight_row = [&](u32 row) { return row < heads ? p.wa + row * hidden : p.wb + (row - heads) * hidden; };
  const auto load_weights = [&](u32x4 (&b)[tiles], u32 g) {
    const u32 k = g * 32 + pair * 8;
#pragma unroll
    for (u32 t = 0; t < tiles; ++t) {
      const u32 within = t * 8 + group, row = first_row + within;
      b[t] = u32x4{0, 0, 0, 0};
      if (g < end && within < rows && row < 2 * heads && k < hidden) b[t] = ld_stream<u32x4>(weight_row(row) + k);
    }
  };
  const auto load_columns = [&](u32x4 (&a)[2], u32 g) {
    const u32 k = g * 32 + pair * 8;
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      const u32 column = first_column + group + 8 * h;
      a[h] = u32x4{0, 0, 0, 0};
      if (g < end && column < u32(p.columns) && k < hidden) a[h] = ld_global<u32x4>(p.x + i64(column) * p.x_stride + k);
    }
  };

  u32x4 b[batch][tiles];
#pragma unroll
  for (u32 i = 0; i < batch; ++i) load_weights(b[i], begin + i);
  grid_launch_dependents();  // first: a short kernel lets the next one fetch its weights meanwhile
  grid_dependency_wait();

  GateSum sum[tiles];
  for (u32 g = begin; g < begin + per_warp; g += batch) {
    u32x4 a[batch][2];
#pragma unroll
    for (u32 i = 0; i < batch; ++i) load_columns(a[i], g + i);
    if (g != begin) {
#pragma unroll
      for (u32 i = 0; i < batch; ++i) load_weights(b[i], g + i);
    }
#pragma unroll
    for (u32 i = 0; i < batch; ++i)
#pragma unroll
      for (u32 t = 0; t < tiles; ++t) sum[t].add(a[i][0], a[i][1], b[i][t]);
  }
#pragma unroll
  for (u32 t = 0; t < tiles; ++t)
#pragma unroll
    for (u32 e = 0; e < 4; ++e) partial[warp][group + 8 * (e / 2)][8 * t + 2 * pair + e % 2] = sum[t].total(e);
  sync_block();
  for (u32 i = threadIdx.x; i < 16 * rows; i += gate_warps * 32) {
    const u32 column = first_column + i / rows, row = first_row + i % rows;
    if (column >= u32(p.columns) || row >= 2 * heads) continue;
    f32 total = partial[0][i / rows][i % rows];
#pragma unroll
    for (u32 w = 1; w < gate_warps; ++w) total += partial[w][i / rows][i % rows];
    const f32 value = row < heads ? log_decay(total, ld_global<f32>(p.a_log + row), ld_global<f32>(p.dt_bias + row))
                                  : write_strength(total);
    st_global(p.gates + i64(column) * p.gates_stride + row, value);
  }
}

}  // namespace ninferc::gdn
