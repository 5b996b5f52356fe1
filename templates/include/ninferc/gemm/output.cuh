// From accumulators to y: scales of whole rows or matrices, SwiGLU, residual, one rounding, coalesced stores.
//
// A warp holds 16 weight rows x 8 tokens per four accumulators (mma.cuh's D): rows `group` and `group + 8`, tokens 2 pair and
// 2 pair + 1.  y is token-major, so bf16 tiles pass through shared memory, transposed on the way in; f32 needs no detour, as
// eight lanes write one 32-byte sector.
#pragma once
#include <ninferc/base/math.cuh>
#include <ninferc/base/mma.cuh>
#include <ninferc/exchange/push.cuh>
#include <ninferc/gemm/tile.cuh>

namespace ninferc::gemm {

struct RowScales { f32 low, high; };

// Where results go; `push`: of a shape that sends its tiles.
struct Target {
  const bf16* residual;
  u32 residual_stride;
  void* y;
  u32 y_stride;
  exchange::TilePush push = {};
};

// What the f32 sums of tile rows `row` and `row + 8` still need: FP8 row scales, or 2^8 / divisor for NVFP4 (unpack.cuh).
template <class S>
NINFERC_DEVICE RowScales row_scales(const Operands& o, u32 first, u32 row) {
  if constexpr (S::format == Format::fp8_row) {
    return {bf16_to_f32(ld_nc<bf16>(o.scales + S::weight_row(first, row) * 2)),
            bf16_to_f32(ld_nc<bf16>(o.scales + S::weight_row(first, row + 8) * 2))};
  } else if constexpr (S::format == Format::nvfp4) {
    const f32 scale = 256.0f / ld_nc<f32>(o.divisor);
    return {scale, scale};
  } else {
    return {1.0f, 1.0f};
  }
}

// Two or four 8x8 blocks of bf16, fragments with a weight row per lane group, to token-major shared memory.  Lane l passes the
// address of token l % 8 of block l / 8.
template <u32 count>
NINFERC_DEVICE void store_transposed(u32 address, const u32 (&r)[count]) {
#if NINFERC_ARCH >= 900
  if constexpr (count == 2) stmatrix_x2_trans(address, r);
  else stmatrix_x4_trans(address, r);
#else
  const u32 group = lane_id() / 4, pair = lane_id() % 4;
#pragma unroll
  for (u32 block = 0; block < count; ++block)
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 row = shfl(address, block * 8 + 2 * pair + half);
      st_shared<u16>(row + group * 2, u16(r[block] >> (16 * half)));
    }
#endif
}

// The residual tile into the staging area, token by token.
template <class S>
NINFERC_DEVICE void load_residual(u32 staging, const bf16* residual, u32 stride, u32 first, u32 token, u32 active) {
  constexpr u32 per_token = S::tile_outputs / 8;
  for (u32 i = threadIdx.x; i < active * per_token; i += S::math_threads) {
    const u32 t = i / per_token, c = i % per_token;
    if (first + c * 8 < S::outputs)
      cp_async_16(staging + t * S::pitch + c * 16, residual + u64(token + t) * stride + first + c * 8);
  }
  cp_async_commit();
  cp_async_wait<0>();
}

// Accumulators of one warp's 16 rows (from tile row `row`) and 8 `blocks` tokens (from tile token `column`).
template <class S, u32 blocks>
NINFERC_DEVICE void put(const f32 (&d)[4 * blocks], RowScales scale, u32 staging, u32 row, u32 column) {
  const u32 lane = lane_id();
  if constexpr (S::swiglu) {
    const u32 address = staging + (column + lane) * S::pitch + row;  // 8 outputs of 2 bytes per 16 rows
    static_assert(blocks % 4 == 0 || blocks % 4 == 2, "blocks come in pairs");
#pragma unroll
    for (u32 j = 0; j < blocks; j += 4) {
      u32 r[4] = {0, 0, 0, 0};
#pragma unroll
      for (u32 i = 0; i < 4 && j + i < blocks; ++i) {
        const u32 e = 4 * (j + i);
        r[i] = pack_bf16x2(silu_fast(d[e] * scale.low) * (d[e + 2] * scale.high),
                           silu_fast(d[e + 1] * scale.low) * (d[e + 3] * scale.high));
      }
      if (blocks % 4 != 0 && j + 4 > blocks) {
        const u32 left[2] = {r[0], r[1]};
        store_transposed(staging + (column + j * 8 + lane % 16) * S::pitch + row, left);
      } else {
        store_transposed(address + j * 8 * S::pitch, r);
      }
    }
  } else {
    const u32 address = staging + (column + lane / 16 * 8 + lane % 8) * S::pitch + (row + lane / 8 % 2 * 8) * 2;
#pragma unroll
    for (u32 j = 0; j < blocks; j += 2) {
      u32 r[4];
      if constexpr (S::store == Store::residual) ldmatrix_x4_trans(r, address + j * 8 * S::pitch);
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const u32 e = 4 * j + 2 * i;
        f32 a = d[e] * (i % 2 ? scale.high : scale.low), b = d[e + 1] * (i % 2 ? scale.high : scale.low);
        if constexpr (S::store == Store::residual) a += bf16x2_lo(r[i]), b += bf16x2_hi(r[i]);
        r[i] = pack_bf16x2(a, b);
      }
      if constexpr (S::store == Store::residual) sync_warp();  // results take the place of what other lanes read
      store_transposed(address + j * 8 * S::pitch, r);
    }
  }
}

// The same, straight to f32 memory.
template <class S, u32 blocks>
NINFERC_DEVICE void put_f32(const f32 (&d)[4 * blocks], RowScales scale, f32* y, u32 stride, u32 output, u32 token, u32 left) {
  const u32 group = lane_id() / 4, pair = lane_id() % 4;
#pragma unroll
  for (u32 e = 0; e < 4 * blocks; ++e) {
    const u32 t = e / 4 * 8 + 2 * pair + e % 2, o = output + group + (e / 2 % 2) * 8;
    if (t < left && o < S::outputs) st_global<f32>(y + u64(token + t) * stride + o, d[e] * (e / 2 % 2 ? scale.high : scale.low));
  }
}

// Staged bf16 tile to y.
template <class S>
NINFERC_DEVICE void copy_out(u32 staging, bf16* y, u32 stride, u32 first, u32 token, u32 active) {
  constexpr u32 per_token = S::tile_outputs / 8;
  for (u32 i = threadIdx.x; i < active * per_token; i += S::math_threads) {
    const u32 t = i / per_token, c = i % per_token;
    if (first + c * 8 < S::outputs)
      st_global<u32x4>(y + u64(token + t) * stride + first + c * 8, ld_shared<u32x4>(staging + t * S::pitch + c * 16));
  }
}

// The block's finished tile to y and, of a shape that sends, first to the other rank: `store(to, stride)` writes it to rows that
// are `stride` values apart. All math threads take part. The barrier stands between all their stores and the line's release,
// which covers them.
template <class S, class StoreTile>
NINFERC_DEVICE void store_tile(const Target& target, const StoreTile& store) {
  if constexpr (S::push) {
    if (target.push.tiles != 0) {
      const exchange::Channel channel = target.push.open();
      if (!channel.dead) store(channel.sent_bytes(), S::outputs);
      store(target.y, target.y_stride);
      named_barrier_sync(1, S::math_threads);
      if (threadIdx.x == 0 && !channel.dead)
        exchange::publish_slice(channel, blockIdx.x * ceil_div(S::outputs, S::tile_outputs) + blockIdx.y);
      return;
    }
  }
  store(target.y, target.y_stride);
}

}  // namespace ninferc::gemm
