// How prefill attention is cut into work for persistent blocks, and how split tiles are put together again.
//
// A tile is `tile_rows` tokens of one query head.  When tiles alone fill the card badly (few rows, or a little more than a
// whole wave), the keys of every tile are cut into `splits` ranges; partial results go to memory, and the block that
// finishes a tile last merges them in order.  The cut depends on the row count, the length and the grid only.
#pragma once
#include <ninferc/base/grid.cuh>
#include <ninferc/base/math.cuh>
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>
#include <ninferc/attention/softmax.cuh>

namespace ninferc::attention {

constexpr u32 max_splits = 16;
constexpr u32 split_keys = 512;  // a range shorter than this is not worth a merge

struct PrefillItem {
  u32 head, tile, split, index;  // index: place of the partial result
  u32 first, stop;               // keys of this range, first a multiple of key_tile
};

template <u32 heads, u32 kv_heads, u32 tile_rows, u32 key_tile, u32 partials>
struct PrefillPlan {
  u32 rows, before, tiles, splits, items;

  // `rows` tokens after `before` cached ones, `blocks` persistent blocks.
  NINFERC_DEVICE PrefillPlan(u32 rows_, u32 before_, u32 blocks) : rows(rows_), before(before_), splits(1) {
    tiles = ceil_div(rows, tile_rows);
    const u32 base = tiles * heads;
    if (base > 0) {
      const u32 keys = before + rows, most = min(min(max_splits, keys / split_keys), partials / base);
      u32 best = ~0u;
      for (u32 s = 1; s == 1 || s <= most; ++s) {
        const u32 cost = ceil_div(base * s, blocks) * (ceil_div(keys, key_tile * s) + 2);  // 2: a tile's fixed cost
        if (cost < best) {
          best = cost;
          splits = s;
        }
      }
    }
    items = base * splits;
  }
  // Blocks that run together share keys: the heads of one KV head vary fastest, long tiles come first.
  NINFERC_DEVICE PrefillItem item(u32 i) const {
    constexpr u32 share = heads / kv_heads;
    PrefillItem it;
    const u32 in_group = i % share;
    i /= share;
    it.tile = tiles - 1 - i % tiles;
    i /= tiles;
    it.split = i % splits;
    it.head = i / splits * share + in_group;
    it.index = (it.tile * heads + it.head) * splits + it.split;
    const u32 keys = before + min(rows, (it.tile + 1) * tile_rows), key_tiles = ceil_div(keys, key_tile);
    it.first = key_tiles * it.split / splits * key_tile;
    it.stop = min(keys, key_tiles * (it.split + 1) / splits * key_tile);
    return it;
  }
};

// Where prefill results go: gated to o, or partial results and, by the block that finishes a tile last, their merge.
template <u32 heads, u32 tile_rows, u32 dim, u32 threads>
struct PrefillOutput {
  const bf16* gate;
  i32 gate_stride;
  bf16* o;
  i32 o_stride;
  f32 *partial_o, *partial_ml;  // [index][row][dim], not divided; [index][row][2]: maximum (scaled), sum
  u32* counters;                // [tile][head], left zero
  f32 scale;

  // bf16(bf16(value) · sigmoid(gate)) of two neighbouring dimensions.
  NINFERC_DEVICE void store_pair(u64 token, u32 column, f32 low, f32 high) const {
    const u32 g = ld_global<u32>(gate + token * gate_stride + column);
    st_global(o + token * o_stride + column,
              pack_bf16x2(round_bf16(low) * sigmoid_fast(bf16x2_lo(g)), round_bf16(high) * sigmoid_fast(bf16x2_hi(g))));
  }

  // The 16 rows of a warp from row `first` of the tile on.  An empty range of keys leaves a sum of zero and no output.
  NINFERC_DEVICE void store(const PrefillItem& it, u32 splits, u32 rows, u32 first, const RowSoftmax& softmax,
                            const f32 (&output)[dim / 8][4]) const {
    const u32 group_row = lane_id() / 4, pair = lane_id() % 4;
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      const f32 total = warp_sum<4>(softmax.sum[h]);
      const u32 row = first + group_row + h * 8, token = it.tile * tile_rows + row;
      if (token >= rows) continue;
      if (splits == 1) {
        const f32 inverse = 1.0f / total;
#pragma unroll
        for (u32 n = 0; n < dim / 8; ++n)
          store_pair(token, it.head * dim + n * 8 + pair * 2, output[n][2 * h] * inverse, output[n][2 * h + 1] * inverse);
        continue;
      }
      const u64 place = u64(it.index) * tile_rows + row;
      if (pair == 0) st_global(partial_ml + place * 2, f32x2{total == 0.0f ? bits_float(0xff800000u) : softmax.maximum[h] * scale, total});
      if (it.first >= it.stop) continue;
#pragma unroll
      for (u32 n = 0; n < dim / 8; ++n)
        st_global(partial_o + place * dim + n * 8 + pair * 2, f32x2{output[n][2 * h], output[n][2 * h + 1]});
    }
  }

  // After store, by the `threads` threads that stored, numbered by `thread`; `sync` is a barrier among them.
  template <class Sync>
  NINFERC_DEVICE void finish(const PrefillItem& it, u32 splits, u32 rows, u32 thread, Sync&& sync) const {
    __shared__ u32 arrived;
    if (splits == 1) return;
    u32* const counter = counters + it.tile * heads + it.head;
    fence_gpu();
    sync();
    if (thread == 0) {
      arrived = atomic_add_acq_rel_gpu(counter, 1u);
      if (arrived == splits - 1) st_global(counter, 0u);  // ready for the next launch
    }
    sync();
    const bool last = arrived == splits - 1;
    sync();  // `arrived` is free again
    if (!last) return;
    fence_gpu();
    const u32 base = it.index - it.split, lane = lane_id(), count = min(tile_rows, rows - it.tile * tile_rows);
    for (u32 row = thread / 32; row < count; row += threads / 32) {
      f32x2 ml{bits_float(0xff800000u), 0.0f};
      if (lane < splits) ml = ld_cg<f32x2>(partial_ml + (u64(base + lane) * tile_rows + row) * 2);
      const f32 highest = warp_max(ml.x);
      const f32 weight = ml.y == 0.0f ? 0.0f : exp2_fast(ml.x - highest);
      const f32 inverse = 1.0f / warp_sum(weight * ml.y);
#pragma unroll
      for (u32 block = 0; block < dim; block += 64) {
        const u32 column = block + lane * 2;
        f32x2 sum{0, 0};
        for (u32 s = 0; s < splits; ++s) {
          const f32 w = shfl(weight, s);
          if (w == 0.0f || column >= dim) continue;  // what an empty range left is not read
          const f32x2 part = ld_cg<f32x2>(partial_o + (u64(base + s) * tile_rows + row) * dim + column);
          sum = f32x2{fmaf(w, part.x, sum.x), fmaf(w, part.y, sum.y)};
        }
        if (column < dim) store_pair(it.tile * tile_rows + row, it.head * dim + column, sum.x * inverse, sum.y * inverse);
      }
    }
  }
};

}  // namespace ninferc::attention
