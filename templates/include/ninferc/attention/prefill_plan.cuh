// How prefill attention is cut into work for persistent blocks, and how split tiles are put together again.
//
// A tile is `tile_rows` tokens of one query head.  When tiles alone fill the card badly (few rows, or a little more than a
// whole wave), the keys of every tile are cut into `splits` ranges; partial results go to memory, and the block that
// finishes a tile's last range merges them in order.  The cut depends on the row count, the length and the grid only.
#pragma once
#include <ninferc/base/grid.cuh>
#include <ninferc/base/math.cuh>
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>

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

// One thread's pair of neighbouring outputs, gated and rounded: bf16(bf16(value) · sigmoid(gate)).
NINFERC_DEVICE u32 gated_pair(f32 low, f32 high, u32 gate) {
  return pack_bf16x2(round_bf16(low) * sigmoid_fast(bf16x2_lo(gate)), round_bf16(high) * sigmoid_fast(bf16x2_hi(gate)));
}

// Called by all threads of a block after they stored the partial result of `it`: partial_o[index][row][dim] (not divided),
// partial_ml[index][row][2] (maximum, sum; an empty range has sum 0 and no output).  The last block of a tile merges.
template <u32 heads, u32 tile_rows, u32 dim, u32 threads>
NINFERC_DEVICE void finish_split(const PrefillItem& it, u32 splits, u32 rows, const f32* partial_o, const f32* partial_ml,
                                 u32* counters, const bf16* gate, i32 gate_stride, bf16* o, i32 o_stride) {
  __shared__ u32 arrived;
  u32* const counter = counters + it.tile * heads + it.head;
  fence_gpu();
  sync_block();
  if (threadIdx.x == 0) {
    arrived = atomic_add_acq_rel_gpu(counter, 1u);
    if (arrived == splits - 1) st_global(counter, 0u);  // ready for the next launch
  }
  sync_block();
  if (arrived != splits - 1) return;
  const u32 base = it.index - it.split, lane = lane_id();
  const u32 count = min(tile_rows, rows - it.tile * tile_rows);
  for (u32 row = warp_id(); row < count; row += threads / 32) {
    f32 m = bits_float(0xff800000u), l = 0.0f;
    if (lane < splits) {
      const f32x2 ml = ld_cg<f32x2>(partial_ml + (u64(base + lane) * tile_rows + row) * 2);
      m = ml.x;
      l = ml.y;
    }
    const f32 highest = warp_max(m);
    const f32 weight = l == 0.0f ? 0.0f : exp2_fast(m - highest);
    const f32 inverse = 1.0f / warp_sum(weight * l);
    const u64 token = it.tile * tile_rows + row;
#pragma unroll
    for (u32 block = 0; block < dim; block += 64) {
      const u32 first = block + lane * 2;
      f32x2 sum{0, 0};
      for (u32 s = 0; s < splits; ++s) {
        const f32 w = shfl(weight, s);
        if (w == 0.0f || first >= dim) continue;
        const f32x2 part = ld_cg<f32x2>(partial_o + (u64(base + s) * tile_rows + row) * dim + first);
        sum = f32x2{fmaf(w, part.x, sum.x), fmaf(w, part.y, sum.y)};
      }
      if (first >= dim) continue;
      const u32 g = ld_global<u32>(gate + token * gate_stride + it.head * dim + first);
      st_global(o + token * o_stride + it.head * dim + first, gated_pair(sum.x * inverse, sum.y * inverse, g));
    }
  }
  sync_block();  // `arrived` is free again
}

}  // namespace ninferc::attention
