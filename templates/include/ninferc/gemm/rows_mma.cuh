// Row product on warp-level products, for GPUs without warpgroup products: y[tokens, n] = x W^T as y^T tiles.
//
// A warp owns 32 weight rows and all tokens of the tile, so every weight is unpacked once per block, into A fragments; B
// fragments come from the x tile.  A product does not care how columns of K are numbered as long as both operands agree: lane
// `pair` of a quad takes the 16 consecutive columns 16 pair .. 16 pair + 15 of a stage on both sides, so codes and activations
// are read with wide loads and NVFP4 has one scale per lane and row.
#pragma once
#include <ninferc/base/mma.cuh>
#include <ninferc/gemm/output.cuh>

namespace ninferc::gemm {

// A fragments of a stage's 64 columns for rows `row` and `row + 8`: four products of 16 columns.
template <class S>
NINFERC_DEVICE void unpack_rows(u32 (&a)[4][4], u32 stage, u32 row, u32 s) {
  constexpr Format f = S::format;
  using T = typename S::T;
  const u32 pair = lane_id() % 4;
#pragma unroll
  for (u32 side = 0; side < 2; ++side) {
    const u32 r = row + side * 8;
    const auto chunk = [&](u32 c) { return stage + S::codes_at + r * T::code_bytes + S::code_chunk(r, c) * 16; };
    u32 w[8], high = 0, scale_word = 0;
    if constexpr (f == Format::bf16) {
      const u32x4 lo = ld_shared<u32x4>(chunk(2 * pair)), hi = ld_shared<u32x4>(chunk(2 * pair + 1));
      w[0] = lo.x, w[1] = lo.y, w[2] = lo.z, w[3] = lo.w, w[4] = hi.x, w[5] = hi.y, w[6] = hi.z, w[7] = hi.w;
    } else if constexpr (T::nibbles) {
      const u32x2 codes = ld_shared<u32x2>(chunk(pair / 2) + pair % 2 * 8);
      w[0] = codes.x, w[1] = codes.y;
    } else {
      const u32x4 codes = ld_shared<u32x4>(chunk(pair));
      w[0] = codes.x, w[1] = codes.y, w[2] = codes.z, w[3] = codes.w;
    }
    if constexpr (f == Format::q5g64) high = ld_shared<u16>(stage + S::high_at + r * 8 + pair * 2);
    if constexpr (f == Format::q6g64) high = ld_shared<u32>(stage + S::high_at + r * 16 + pair * 4);
    if constexpr (T::scale_bytes != 0) scale_word = ld_shared<u32>(stage + S::scales_at + r * 4);
    Scale scale{0, 0};
    if constexpr (T::grouped) scale = scale_from_f16(f16{u16(scale_word >> ((f == Format::w8g32 ? pair / 2 : s % 2) * 16))});
    if constexpr (f == Format::nvfp4) scale = ScaleQuad(scale_word).get(scale_selector(pair));
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {  // columns 2 i and 2 i + 1 of the lane
      u32 value;
      if constexpr (f == Format::bf16) {
        value = w[i];
      } else {
        const u32 at = selector<f>(T::nibbles ? i % 4 : i % 2);
        const u32 codes = gather<f>(w[T::nibbles ? i / 4 : i / 2], 0, at);
        value = weight_pair<f>(codes, T::high_bytes != 0 ? high_of_pair<f>(high, i) : 0, scale);
      }
      a[i / 2][i % 2 * 2 + side] = value;
    }
  }
}

// One block.
template <class S>
NINFERC_DEVICE void rows_mma(const Operands& o, const bf16* residual, u32 residual_stride, void* y, u32 y_stride,
                             const i32* rows, const exchange::TilePush& push = {}) {
  static_assert(S::math_threads == S::tile_rows && S::tile_tokens % 16 == 0 && S::stages >= 2, "32 rows per warp");
  constexpr u32 blocks = S::tile_tokens / 8, ahead = S::stages - 1;
  NINFERC_DYNAMIC_SMEM(memory);
  const u32 shared = shared_address(memory);
  const u32 first = blockIdx.y * S::tile_outputs, token = blockIdx.x * S::tile_tokens;
  const u32 group = lane_id() / 4, pair = lane_id() % 4, row = warp_id() * 32;

  const WeightLoader<S, S::math_threads> weights(o, first, threadIdx.x);
#pragma unroll
  for (u32 s = 0; s < ahead; ++s)
    if (s < S::steps) weights.load(s, shared + s * S::stage_bytes);  // constants: before the wait
  grid_dependency_wait();
  const u32 count = u32(ld_global<i32>(rows));
  if (token >= count) {
    cp_async_commit();
    cp_async_wait<0>();
    return;
  }
  const u32 active = count - token < S::tile_tokens ? count - token : S::tile_tokens;
  const TokenLoader<S, S::math_threads> tokens(o, token, active, threadIdx.x);
#pragma unroll
  for (u32 s = 0; s < ahead; ++s) {
    if (s < S::steps) tokens.load(s, shared + s * S::stage_bytes);
    cp_async_commit();
  }

  f32 d[2][4 * blocks];
#pragma unroll
  for (u32 m = 0; m < 2; ++m)
#pragma unroll
    for (u32 i = 0; i < 4 * blocks; ++i) d[m][i] = 0;
  u32 slot = 0, next = ahead;
#pragma unroll 1
  for (u32 s = 0; s < S::steps; ++s) {
    cp_async_wait<ahead - 1>();
    sync_block();  // step s has landed for all, and all are through with step s - 1
    if (s + ahead < S::steps) {
      weights.load(s + ahead, shared + next * S::stage_bytes);
      tokens.load(s + ahead, shared + next * S::stage_bytes);
    }
    cp_async_commit();
    const u32 stage = shared + slot * S::stage_bytes;
    u32 a[2][4][4];
#pragma unroll
    for (u32 m = 0; m < 2; ++m) unpack_rows<S>(a[m], stage, row + m * 16 + group, s);
    const u32 low = stage + group * 128 + ((2 * pair) ^ group) * 16, high = stage + group * 128 + ((2 * pair + 1) ^ group) * 16;
#pragma unroll
    for (u32 j = 0; j < blocks; ++j) {
      const u32x4 first_half = ld_shared<u32x4>(low + j * 1024), second_half = ld_shared<u32x4>(high + j * 1024);
      const u32 b[4][2] = {{first_half.x, first_half.y}, {first_half.z, first_half.w},
                           {second_half.x, second_half.y}, {second_half.z, second_half.w}};
#pragma unroll
      for (u32 m = 0; m < 2; ++m) {
        f32 sum[4] = {d[m][4 * j], d[m][4 * j + 1], d[m][4 * j + 2], d[m][4 * j + 3]};
#pragma unroll
        for (u32 k = 0; k < 4; ++k) mma_m16n8k16_bf16(sum, a[m][k], b[k]);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) d[m][4 * j + i] = sum[i];
      }
    }
    slot = slot + 1 == S::stages ? 0 : slot + 1;
    next = next + 1 == S::stages ? 0 : next + 1;
  }
  cp_async_wait<0>();
  grid_launch_dependents();

  const Target target{residual, residual_stride, y, y_stride, push};
  if constexpr (S::store == Store::f32) {
    store_tile<S>(target, [&](void* to, u32 stride) {
#pragma unroll
      for (u32 m = 0; m < 2; ++m)
        put_f32<S, blocks>(d[m], row_scales<S>(o, first, row + m * 16 + group), static_cast<f32*>(to), stride,
                           first + row + m * 16, token, active);
    });
  } else {
    sync_block();  // the stages are free
    if constexpr (S::store == Store::residual) {
      load_residual<S>(shared, residual, residual_stride, first, token, active);
      sync_block();
    }
#pragma unroll
    for (u32 m = 0; m < 2; ++m)
      put<S, blocks>(d[m], row_scales<S>(o, first, row + m * 16 + group), shared, row + m * 16, 0);
    sync_block();
    store_tile<S>(target, [&](void* to, u32 stride) { copy_out<S>(shared, static_cast<bf16*>(to), stride, first, token, active); });
  }
}

}  // namespace ninferc::gemm
