// Work list of decode attention, built on the device once per step by `begin` and walked by persistent blocks.
//
// A column that sees L keys splits them into chunks of chunk_keys(L), aligned at 0: a function of its own length only, so
// the split, and with it every bit of the result, is the same whoever its neighbours are.  Columns of one lane whose chunk
// sizes agree share one pass over the keys.
#pragma once
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/kv/layout.cuh>

namespace ninferc::attention {

constexpr u32 max_chunks = 64;  // per column
constexpr u32 max_columns = 32;  // per lane: bits of a column mask

// 64 · 2^i keys, the smallest with at most max_chunks chunks over `length` ≥ 1 keys.
NINFERC_DEVICE u32 chunk_keys(u32 length) {
  constexpr u32 unit = kv::page_tokens * max_chunks;
  static_assert((unit & (unit - 1)) == 0, "a power of two");
  const u32 multiple = (length - 1) / unit;
  return kv::page_tokens << (32 - __clz(i32(multiple)));
}

// One entry of the table `work`, 16 bytes: a chunk of keys of one KV head, for the columns of a mask.
struct alignas(16) WorkItem {
  u32 lane_row;    // lane | page row << 16
  u32 head_chunk;  // kv head | chunk size (a multiple of 64)
  u32 first;       // first key of the chunk
  u32 columns;     // bit t: column t of the lane sees at least one key of the chunk

  NINFERC_DEVICE u32 lane() const { return lane_row & 0xffffu; }
  NINFERC_DEVICE u32 page_row() const { return lane_row >> 16; }
  NINFERC_DEVICE u32 kv_head() const { return head_chunk % kv::page_tokens; }
  NINFERC_DEVICE u32 chunk() const { return head_chunk / kv::page_tokens * kv::page_tokens; }
  NINFERC_DEVICE u32 last_column() const { return 31 - __clz(i32(columns)); }
};

// Fills work[] and work_count[0] for `lanes` lanes of up to `width` columns.  All threads of one block call it, with the
// lane tables visible to the block.  A lane's columns are taken in groups of `group` (the columns one pass can hold).
template <u32 lanes, u32 width, u32 kv_heads, u32 group>
NINFERC_DEVICE void build_work_list(const i32* lane_ncols, const i32* lane_len, const i32* lane_page_row, i32* work,
                                    i32* work_count) {
  static_assert(width <= max_columns && kv_heads < kv::page_tokens && lanes <= 0xffff && group >= 1, "word layout");
  u32 base = 0;
  for (u32 lane = 0; lane < lanes; ++lane) {
    const u32 active = u32(ld_global<i32>(lane_ncols + lane)), length = u32(ld_global<i32>(lane_len + lane));
    const u32 page_row = u32(ld_global<i32>(lane_page_row + lane));
    for (u32 begin = 0; begin < active;) {
      // columns begin … end - 1: one group, one chunk size
      const u32 chunk = chunk_keys(length + begin + 1);
      u32 end = begin + 1;
      const u32 group_end = min(active, begin / group * group + group);
      while (end < group_end && chunk_keys(length + end + 1) == chunk) ++end;
      const u32 items = ceil_div(length + end, chunk) * kv_heads;
      for (u32 i = threadIdx.x; i < items; i += blockDim.x) {
        const u32 first = i / kv_heads * chunk;
        const u32 from = max(begin, first > length ? first - length : 0u);  // column t sees keys 0 … length + t
        const u32 columns = (end < 32 ? (1u << end) - 1 : ~0u) & ~((1u << from) - 1);
        st_global(work + 4 * (base + i), WorkItem{lane | page_row << 16, i % kv_heads | chunk, first, columns});
      }
      base += items;
      begin = end;
    }
  }
  if (threadIdx.x == 0) st_global(work_count, i32(base));
}

}  // namespace ninferc::attention
