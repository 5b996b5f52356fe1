// The token of a row from both ranks' candidates (compiler/ops/sample_merge.py).
#pragma once
#include <ninferc/exchange/channel.cuh>
#include <ninferc/sample/sample.cuh>

namespace ninferc::exchange {

constexpr u32 merge_threads = 64;

// grid (1, rows or fewer): rows are lanes, each with its last column (`last_rows`), or columns. Rows that do not run are
// exchanged too: their block on the other rank waits for them.
template <u32 width, bool last_rows>
NINFERC_DEVICE void merge(const Channel& channel, const f32* candidates, const i32* lane_sampling, const i32* run_len,
                          const i32* run_ncols, const i32* lane_prompt_len, const i32* pf_control, i32* token, u32 rows) {
  constexpr u32 most = sample::max_candidates, words = 2 * most, pairs = words / 2;
  static_assert(pairs <= merge_threads && words <= merge_threads);
  __shared__ f32 values[2][words];
  __shared__ u64 keys[2 * most];
  __shared__ u64 sorted[2 * most];
  const u32 i = threadIdx.x;
  for (u32 row = blockIdx.y; row < rows; row += gridDim.y) {
    const f32* own = candidates + u64(row) * words;
    if (i < words) values[0][i] = ld_global<f32>(own + i);
    if (channel.transport == transport_staged) {
      if (i < words) values[1][i] = ld_global<f32>(channel.received_bytes() + (u64(row) * words + i) * 4);
    } else if (i < pairs) {
      const u64 at = u64(row) * words + 2 * i;
      channel.send(at, u64x2{channel.word(ld_global<u32>(own + 2 * i)), channel.word(ld_global<u32>(own + 2 * i + 1))});
      u64x2 pair[1];
      receive(channel, channel.words(channel.inbox) + at, 0, 1, false, pair);
      values[1][2 * i] = bits_float(u32(pair[0].x));
      values[1][2 * i + 1] = bits_float(u32(pair[0].y));
    }
    sync_block();
    u64 key = 0;
    if (i < 2 * most) {
      const f32 value = values[i / most][i % most];
      if (value == value) key = sample::make_key(value, u32(values[i / most][most + i % most]));
      keys[i] = key;
    }
    sync_block();
    if (key != 0) {
      // Ranks have no id in common, but a lost peer's words are all alike: each has a place of its own, none stays unwritten.
      u32 place = 0;
      for (u32 other = 0; other < 2 * most; ++other) place += keys[other] > key || (keys[other] == key && other < i);
      sorted[place] = key;
    }
    sync_block();
    const u32 run_lane = last_rows ? row : row / width;
    const i32 active = ld_global<i32>(run_ncols + run_lane);
    const u32 column = last_rows ? u32(active) - 1 : row % width;
    if (i == 0 && active > 0 && (last_rows || i32(column) < active)) {
      const sample::Row place(lane_sampling, run_lane, pf_control);
      u32 found = 0;
      for (u32 other = 0; other < 2 * most; ++other) found += keys[other] != 0;
      const u32 count = found < place.keep() ? found : place.keep();
      const u32 length = u32(ld_global<i32>(run_len + run_lane)) + column;
      st_global(token + row, sample::choose(sorted, count, place, length, lane_prompt_len));
    }
    sync_block();
  }
}

}  // namespace ninferc::exchange
