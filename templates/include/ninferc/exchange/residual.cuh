// Partial sums of two ranks, added in rank order with the residual and rounded once; optionally the norm of the result
// (compiler/ops/exchange_residual.py).
#pragma once
#include <ninferc/exchange/channel.cuh>
#include <ninferc/norm/rmsnorm.cuh>

namespace ninferc::exchange {

constexpr u32 residual_threads = 256;  // what rmsnorm_row is made for

struct Rows {
  const f32* partial;
  const bf16* residual;
  bf16* y;
  u32 partial_stride, residual_stride, y_stride, columns;
};

NINFERC_DEVICE f32 through_bf16(f32 value) { return bf16_to_f32(f32_to_bf16(value)); }

// Four neighbouring values are one unit: four words of FP32, or two of packed bf16.
template <bool half>
NINFERC_DEVICE void send_unit(const Channel& channel, u32 unit, const f32x4& v) {
  if constexpr (half) {
    channel.send(unit, pack_bf16x2(v.x, v.y), pack_bf16x2(v.z, v.w));
  } else {
    channel.send(2 * unit, float_bits(v.x), float_bits(v.y));
    channel.send(2 * unit + 1, float_bits(v.z), float_bits(v.w));
  }
}

template <bool half, u32 batch>
NINFERC_DEVICE void receive_units(const Channel& channel, u32 first_unit, u32 step, u32 count, f32x4 (&v)[batch]) {
  constexpr u32 pairs = half ? 1 : 2;
  const u64* from = channel.source();
  u64x2 words[batch][pairs];
#pragma unroll
  for (u32 j = 0; j < batch; ++j) {
#pragma unroll
    for (u32 i = 0; i < pairs; ++i) {
      if (j < count) words[j][i] = channel.probe(from + 2 * (u64(first_unit + j * step) * pairs + i));
    }
  }
#pragma unroll
  for (u32 j = 0; j < batch; ++j) {
    if (j >= count) continue;
#pragma unroll
    for (u32 i = 0; i < pairs; ++i) {
      if (!channel.wait(from + 2 * (u64(first_unit + j * step) * pairs + i), words[j][i])) words[j][i] = u64x2{0, 0};
    }
    if constexpr (half) {
      const f32x2 low = unpack_bf16x2(u32(words[j][0].x)), high = unpack_bf16x2(u32(words[j][0].y));
      v[j] = f32x4{low.x, low.y, high.x, high.y};
    } else {
      v[j] = f32x4{bits_float(u32(words[j][0].x)), bits_float(u32(words[j][0].y)), bits_float(u32(words[j][1].x)),
                   bits_float(u32(words[j][1].y))};
    }
  }
}

// grid (parts, columns or fewer): block (p, c) takes part p of the columns c, c + gridDim.y, ... Every block sends all it has
// before it waits, and all blocks are resident, so no order of blocks can lock the ranks against each other.
template <u32 width, u32 parts, bool half, bool first_rank>
NINFERC_DEVICE void residual(const Channel& channel, const Rows& rows) {
  static_assert(width % 4 == 0 && width / 4 % parts == 0);
  constexpr u32 units = width / 4, mine = units / parts, batch = 4;
  const u32 begin = blockIdx.x * mine;
  if (channel.transport != transport_staged) {
    for (u32 column = blockIdx.y; column < rows.columns; column += gridDim.y) {
      const f32* partial = rows.partial + u64(column) * rows.partial_stride;
      for (u32 unit = begin + threadIdx.x; unit < begin + mine; unit += residual_threads)
        send_unit<half>(channel, column * units + unit, ld_global<f32x4>(partial + 4 * unit));
    }
    if (channel.transport == transport_host && blockIdx.x == 0 && blockIdx.y == 0)
      channel.republish(rows.columns * units * (half ? 1 : 2));
  }
  for (u32 column = blockIdx.y; column < rows.columns; column += gridDim.y) {
    const f32* partial = rows.partial + u64(column) * rows.partial_stride;
    const bf16* residual = rows.residual + u64(column) * rows.residual_stride;
    bf16* y = rows.y + u64(column) * rows.y_stride;
    for (u32 unit = begin + threadIdx.x; unit < begin + mine; unit += batch * residual_threads) {
      const u32 left = ceil_div(begin + mine - unit, residual_threads), count = left < batch ? left : batch;
      f32x4 theirs[batch];
      if (channel.transport == transport_staged) {
#pragma unroll
        for (u32 j = 0; j < batch; ++j) {
          if (j >= count) continue;
          theirs[j] = ld_global<f32x4>(reinterpret_cast<const f32*>(channel.inbox) + u64(column) * width +
                                       4 * (unit + j * residual_threads));
          if constexpr (half)
            theirs[j] = f32x4{through_bf16(theirs[j].x), through_bf16(theirs[j].y), through_bf16(theirs[j].z),
                              through_bf16(theirs[j].w)};
        }
      } else {
        receive_units<half>(channel, column * units + unit, residual_threads, count, theirs);
      }
#pragma unroll
      for (u32 j = 0; j < batch; ++j) {
        if (j >= count) continue;
        const u32 at = 4 * (unit + j * residual_threads);
        f32x4 own = ld_global<f32x4>(partial + at);
        if constexpr (half) own = f32x4{through_bf16(own.x), through_bf16(own.y), through_bf16(own.z), through_bf16(own.w)};
        const f32x4 first = first_rank ? own : theirs[j], second = first_rank ? theirs[j] : own;
        const u32x2 old = ld_global<u32x2>(residual + at);
        const f32x2 low = unpack_bf16x2(old.x), high = unpack_bf16x2(old.y);
        st_global(y + at, u32x2{pack_bf16x2((first.x + second.x) + low.x, (first.y + second.y) + low.y),
                                pack_bf16x2((first.z + second.z) + high.x, (first.w + second.w) + high.y)});
      }
    }
  }
}

// The same with the norm of every column behind it: one block per column (parts = 1).
template <u32 width>
NINFERC_DEVICE void norm_columns(const Rows& rows, const bf16* w, bf16* normed, u32 normed_stride, f32 eps, f32* parts) {
  sync_block();
  for (u32 column = blockIdx.y; column < rows.columns; column += gridDim.y) {
    rmsnorm_row<width>(rows.y + u64(column) * rows.y_stride, w, normed + u64(column) * normed_stride, eps, parts);
    sync_block();
  }
}

}  // namespace ninferc::exchange
