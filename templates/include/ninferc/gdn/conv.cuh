// Depthwise causal convolution with 4 taps and SiLU, its window of three columns, lazy and direct commit.
//
// A thread owns `vector` neighbouring channels of one lane.  Window and records are kept twice, by parity: decode reads
// those of the slot's parity and writes the others, so that any number of threads may read a channel while one writes it.
// Prefill, whose advance keeps the parity, writes the window it has read.  The first `split` channels come from x, the
// others from x2.
#pragma once
#include <ninferc/base/grid.cuh>
#include <ninferc/base/math.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/gdn/common.cuh>

namespace ninferc::gdn {

struct ConvOperands {
  const bf16 *x, *x2;
  i32 x_stride, x2_stride, split;
  const bf16* w;  // [4, channels], tap major
  const i32 *lane_slot, *lane_ncols, *lane_len, *slot_pending, *slot_parity;
  bf16 *window, *record;  // [2, slots, 3, channels], [2, slots, records, channels]
  bf16* y;
  i32 y_stride, width, slots, records, channels;
};

template <u32 vector>
struct Channels {
  u32 pair[vector / 2];
};

template <u32 vector>
NINFERC_DEVICE Channels<vector> load_channels(const bf16* pointer) {
  static_assert(vector == 2 || vector == 4 || vector == 8, "2, 4 or 8 channels per thread");
  if constexpr (vector == 2) return bit_cast<Channels<vector>>(ld_global<u32>(pointer));
  else if constexpr (vector == 4) return bit_cast<Channels<vector>>(ld_global<u32x2>(pointer));
  else return bit_cast<Channels<vector>>(ld_global<u32x4>(pointer));
}
// Past L1, for what a kernel may read before its dependency wait.
template <u32 vector>
NINFERC_DEVICE Channels<vector> load_committed(const bf16* pointer) {
  if constexpr (vector == 2) return bit_cast<Channels<vector>>(ld_cg<u32>(pointer));
  else if constexpr (vector == 4) return bit_cast<Channels<vector>>(ld_cg<u32x2>(pointer));
  else return bit_cast<Channels<vector>>(ld_cg<u32x4>(pointer));
}
template <u32 vector>
NINFERC_DEVICE void store_channels(bf16* pointer, const Channels<vector>& value) {
  if constexpr (vector == 2) st_global(pointer, bit_cast<u32>(value));
  else if constexpr (vector == 4) st_global(pointer, bit_cast<u32x2>(value));
  else st_global(pointer, bit_cast<u32x4>(value));
}

template <u32 vector>
struct Taps {
  Channels<vector> w[4];
  Taps() = default;
  NINFERC_DEVICE Taps(const bf16* weights, i32 channels, i32 channel) {
#pragma unroll
    for (u32 j = 0; j < 4; ++j) w[j] = load_channels<vector>(weights + j * channels + channel);
  }
  // One output column from the three columns before it and its own, oldest first, FP32, tap order fixed.
  NINFERC_DEVICE Channels<vector> column(const Channels<vector> (&u)[4]) const {
    Channels<vector> out;
#pragma unroll
    for (u32 i = 0; i < vector / 2; ++i) {
      f32 low = bf16x2_lo(u[0].pair[i]) * bf16x2_lo(w[0].pair[i]);
      f32 high = bf16x2_hi(u[0].pair[i]) * bf16x2_hi(w[0].pair[i]);
#pragma unroll
      for (u32 j = 1; j < 4; ++j) {
        low = __fmaf_rn(bf16x2_lo(u[j].pair[i]), bf16x2_lo(w[j].pair[i]), low);
        high = __fmaf_rn(bf16x2_hi(u[j].pair[i]), bf16x2_hi(w[j].pair[i]), high);
      }
      out.pair[i] = pack_bf16x2(silu_fast(low), silu_fast(high));
    }
    return out;
  }
};

// Where raw column `row` of this thread's channels lies.
NINFERC_DEVICE const bf16* raw_column(const ConvOperands& p, i32 channel, i64 row) {
  return channel < p.split ? p.x + row * p.x_stride + channel : p.x2 + row * p.x2_stride + (channel - p.split);
}

// Column i of the window, and of the records, of one parity.
NINFERC_DEVICE bf16* window_column(const ConvOperands& p, const Slot& s, i32 parity, i32 i) {
  return p.window + ((i64(parity) * p.slots + s.slot) * 3 + i) * p.channels;
}
NINFERC_DEVICE bf16* record_column(const ConvOperands& p, const Slot& s, i32 parity, i32 i) {
  return p.record + ((i64(parity) * p.slots + s.slot) * p.records + i) * p.channels;
}

// Column i of (window ++ records) of the slot's parity.
NINFERC_DEVICE const bf16* committed_column(const ConvOperands& p, const Slot& s, i32 i) {
  return i < 3 ? window_column(p, s, s.parity, i) : record_column(p, s, s.parity, i - 3);
}

// The same in registers, zero at the start of a sequence.
template <u32 vector>
NINFERC_DEVICE Channels<vector> history_column(const ConvOperands& p, const Slot& s, i32 channel, i32 i) {
  if (s.length == 0) return Channels<vector>{};
  return load_committed<vector>(committed_column(p, s, i) + channel);
}

template <u32 vector>
NINFERC_DEVICE void conv_decode(const ConvOperands& p) {
  constexpr i32 batch = 4;  // columns whose loads are in flight together
  const i32 channel = i32(blockIdx.x * blockDim.x + threadIdx.x) * i32(vector);
  const u32 lane = blockIdx.y;
  const bool owner = channel < p.channels;
  const Taps<vector> taps(p.w, p.channels, owner ? channel : 0);
  grid_launch_dependents();  // first: a short kernel lets the next one fetch its weights meanwhile
  grid_dependency_wait();
  if (!owner) return;
  const Slot s = read_slot(p.lane_slot, p.lane_ncols, p.lane_len, p.slot_pending, p.slot_parity, lane);
  if (s.columns == 0) return;

  Channels<vector> u[4];
#pragma unroll
  for (i32 j = 0; j < 3; ++j) u[j] = history_column<vector>(p, s, channel, s.pending + j);
#pragma unroll
  for (i32 j = 0; j < 3; ++j) store_channels(window_column(p, s, 1 - s.parity, j) + channel, u[j]);
  for (i32 begin = 0; begin < s.columns; begin += batch) {
    Channels<vector> fresh[batch];
#pragma unroll
    for (i32 j = 0; j < batch; ++j)
      if (begin + j < s.columns)
        fresh[j] = load_channels<vector>(raw_column(p, channel, i64(lane) * p.width + begin + j));
#pragma unroll
    for (i32 j = 0; j < batch; ++j) {
      if (begin + j < s.columns) {
        u[3] = fresh[j];
        store_channels(record_column(p, s, 1 - s.parity, begin + j) + channel, u[3]);
        store_channels(p.y + (i64(lane) * p.width + begin + j) * p.y_stride + channel, taps.column(u));
#pragma unroll
        for (u32 i = 0; i < 3; ++i) u[i] = u[i + 1];
      }
    }
  }
}

// blockIdx.y counts tiles of `rows` columns.  Only the threads of tile 0 touch window and records.
template <u32 vector, i32 rows>
NINFERC_DEVICE void conv_prefill(const ConvOperands& p) {
  const i32 channel = i32(blockIdx.x * blockDim.x + threadIdx.x) * i32(vector);
  const bool owner = channel < p.channels;
  const Taps<vector> taps(p.w, p.channels, owner ? channel : 0);
  grid_dependency_wait();
  if (!owner) return;
  const Slot s = read_slot(p.lane_slot, p.lane_ncols, p.lane_len, p.slot_pending, p.slot_parity, 0);
  const i32 begin = i32(blockIdx.y) * rows;
  if (begin >= s.columns) return;

  Channels<vector> u[4];
  if (begin == 0) {
    Channels<vector> last[3];
#pragma unroll
    for (i32 j = 0; j < 3; ++j) u[j] = history_column<vector>(p, s, channel, s.pending + j);
#pragma unroll
    for (i32 j = 0; j < 3; ++j) {
      const i32 row = s.columns + j - 3;  // of the last three of (history ++ this call)
      last[j] = row < 0 ? history_column<vector>(p, s, channel, s.pending + s.columns + j)
                        : load_channels<vector>(raw_column(p, channel, row));
    }
#pragma unroll
    for (i32 j = 0; j < 3; ++j) store_channels(window_column(p, s, s.parity, j) + channel, last[j]);
  } else {
#pragma unroll
    for (i32 j = 0; j < 3; ++j) u[j] = load_channels<vector>(raw_column(p, channel, begin + j - 3));
  }
  const i32 end = begin + rows < s.columns ? begin + rows : s.columns;
#pragma unroll 4
  for (i32 row = begin; row < end; ++row) {
    u[3] = load_channels<vector>(raw_column(p, channel, row));
    store_channels(p.y + i64(row) * p.y_stride + channel, taps.column(u));
#pragma unroll
    for (u32 i = 0; i < 3; ++i) u[i] = u[i + 1];
  }
}

}  // namespace ninferc::gdn
