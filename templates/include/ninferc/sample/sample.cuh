// Token choice per row of logits (compiler/ops/sample.py): exact argmax, or the processed distribution of at most twenty
// candidates. Blocks scan slices of the vocabulary and leave their best candidates; the block of a row that arrives last
// merges them. A candidate is one 64-bit key, value in order-preserving bits above the complement of the id, so the larger
// key is the larger value or, at a tie, the smaller id, and the result does not depend on who arrives when.
#pragma once
#include <ninferc/base/grid.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>
#include <ninferc/control/words.cuh>

namespace ninferc::sample {

constexpr u32 max_candidates = 20;
constexpr u32 threads = 256;
constexpr u32 per_thread = 16;  // logits of one thread: a block scans 4096

NINFERC_DEVICE u64 make_key(f32 value, u32 id) {
  if (!(value == value)) return 0;  // NaN is never chosen before a number
  const u32 bits = float_bits(value + 0.0f);  // -0 counts as +0
  const u32 ordered = (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
  return (u64(ordered) << 32) | (0xffffffffu - id);
}

NINFERC_DEVICE f32 key_value(u64 key) {
  const u32 ordered = u32(key >> 32);
  return bits_float((ordered & 0x80000000u) ? ordered & 0x7fffffffu : ~ordered);
}

NINFERC_DEVICE u32 key_id(u64 key) { return 0xffffffffu - u32(key); }

NINFERC_DEVICE u64 block_max_key(u64 key, u64* parts) {
#pragma unroll
  for (u32 offset = 16; offset > 0; offset /= 2) {
    const u32 high = shfl_xor(u32(key >> 32), offset), low = shfl_xor(u32(key), offset);
    const u64 other = (u64(high) << 32) | low;
    key = key > other ? key : other;
  }
  if (lane_id() == 0) parts[warp_id()] = key;
  sync_block();
  u64 best = parts[0];
#pragma unroll
  for (u32 i = 1; i < threads / 32; ++i) best = best > parts[i] ? best : parts[i];
  sync_block();
  return best;
}

NINFERC_DEVICE u64 mix(u64 key) {
  key += 0x9E3779B97F4A7C15ull;
  key = (key ^ (key >> 30)) * 0xBF58476D1CE4E5B9ull;
  key = (key ^ (key >> 27)) * 0x94D049BB133111EBull;
  return key ^ (key >> 31);
}

// Stateless uniform in [0, 1) with 24 bits (spec: mtp.md section 7).
NINFERC_DEVICE f64 uniform(u64 seed, u32 position, u32 purpose) {
  const u64 key = mix(mix(seed ^ (u64(position) * 0xD1B54A32D192ED03ull)) ^ (u64(purpose) << 21));
  return f64(key >> 40) * (1.0 / 16777216.0);
}

// One thread: the draw among `count` candidates in order (value descending, id ascending).
NINFERC_DEVICE i32 draw(const u64* keys, u32 count, const i32* params, u64 seed, u32 position, u32 purpose) {
  const f64 temperature = bits_float(u32(params[control::temperature]));
  const f64 top_p = bits_float(u32(params[control::top_p])), min_p = bits_float(u32(params[control::min_p]));
  const f64 top = key_value(keys[0]);
  f64 total = 0;
  for (u32 i = 0; i < count; ++i) total += exp((f64(key_value(keys[i])) - top) / temperature);
  const f64 limit = top_p * total;
  f64 mass = 1.0;
  u32 kept = 1;
  for (; kept < count; ++kept) {
    const f64 weight = exp((f64(key_value(keys[kept])) - top) / temperature);
    if (!(mass < limit) || weight < min_p) break;
    mass += weight;
  }
  const f64 target = uniform(seed, position, purpose) * mass;
  f64 running = 0;
  for (u32 i = 0; i < kept; ++i) {
    running += exp((f64(key_value(keys[i])) - top) / temperature);
    if (target < running) return i32(key_id(keys[i]));
  }
  return i32(key_id(keys[kept - 1]));
}

// A lane's sampling parameters.
struct Row {
  u32 lane;
  const i32* params;

  NINFERC_DEVICE Row(const i32* lane_sampling, u32 run_lane, const i32* pf_control)
      : lane(pf_control ? u32(ld_global<i32>(pf_control + control::pf_lane)) : run_lane),
        params(lane_sampling + lane * control::sampling_words) {}
  NINFERC_DEVICE bool greedy() const { return !(bits_float(u32(ld_global<i32>(params + control::temperature))) > 0.0f); }
  NINFERC_DEVICE u32 keep() const {
    const i32 wanted = ld_global<i32>(params + control::top_k);
    return greedy() ? 1 : (wanted >= 1 && wanted < i32(max_candidates) ? u32(wanted) : max_candidates);
  }
};

// One thread: the token chosen from the best `found` keys, in order; `consumed` tokens stand before the column.
NINFERC_DEVICE i32 choose(const u64* best, u32 found, const Row& row, u32 consumed, const i32* lane_prompt_len) {
  if (found == 0) return 0;
  if (row.greedy()) return i32(key_id(best[0]));
  i32 words[control::sampling_words];
#pragma unroll
  for (u32 i = 0; i < control::sampling_words; ++i) words[i] = ld_global<i32>(row.params + i);
  const bool first = i32(consumed) + 1 == ld_global<i32>(lane_prompt_len + row.lane);
  const u64 seed = (u64(u32(words[control::seed_high])) << 32) | u32(words[control::seed_low]);
  return draw(best, found, words, seed, first ? consumed + 1 : consumed, first ? 0 : 1);
}

// grid (slices, rows). `last_rows`: rows are lanes, each with its last column; else row = lane * width + column.
// `share`: logits are those of ids first_id ... of a larger vocabulary, and the best of them, values then ids, go to `token`,
// f32 [rows, 2 * max_candidates], in place of a choice.
template <u32 vocab, u32 count_stride, u32 width, bool last_rows, u32 first_id = 0, bool share = false>
NINFERC_DEVICE void run(const bf16* logits, u32 logits_stride, const i32* lane_sampling, const i32* run_slot, const i32* run_len,
                        const i32* run_ncols, const i32* lane_prompt_len, const i32* token_counts, const i32* pf_control,
                        i32* token, u64* candidates, u32* arrivals) {
  __shared__ u64 parts[threads / 32];
  __shared__ u64 best[max_candidates];
  __shared__ u32 rank;
  const u32 row = blockIdx.y, run_lane = last_rows ? row : row / width;
  const i32 active = ld_global<i32>(run_ncols + run_lane);
  const u32 column = last_rows ? u32(active) - 1 : row % width;
  if (active <= 0 || (!last_rows && i32(column) >= active)) return;  // every slice of the row agrees
  const Row place(lane_sampling, run_lane, pf_control);
  const i32* params = place.params;
  const bool greedy = place.greedy();
  const u32 keep = place.keep();
  const f32 presence = bits_float(u32(ld_global<i32>(params + control::presence)));
  const f32 frequency = bits_float(u32(ld_global<i32>(params + control::frequency)));
  const i32* counts = token_counts + u64(u32(ld_global<i32>(run_slot + run_lane))) * count_stride;

  u64 keys[per_thread];
#pragma unroll
  for (u32 i = 0; i < per_thread; ++i) {
    const u32 id = (blockIdx.x * per_thread + i) * threads + threadIdx.x;
    keys[i] = 0;
    if (id < vocab) {
      f32 x = bf16_to_f32(ld_global<bf16>(logits + u64(row) * logits_stride + id));
      if (!greedy) {
        const i32 seen = ld_global<i32>(counts + first_id + id);
        if (seen > 0) x = x - presence - frequency * f32(seen);
      }
      keys[i] = make_key(x, first_id + id);
    }
  }
  u64* mine = candidates + (u64(row) * gridDim.x + blockIdx.x) * max_candidates;
  for (u32 n = 0; n < keep; ++n) {
    u64 local = 0;
#pragma unroll
    for (u32 i = 0; i < per_thread; ++i) local = keys[i] > local ? keys[i] : local;
    const u64 top = block_max_key(local, parts);
    if (threadIdx.x == 0) st_global(mine + n, top);
#pragma unroll
    for (u32 i = 0; i < per_thread; ++i) keys[i] = keys[i] == top ? 0 : keys[i];
  }
  fence_gpu();
  sync_block();
  if (threadIdx.x == 0) rank = atomic_add(arrivals + row, 1u);
  sync_block();
  if (rank != gridDim.x - 1) return;
  fence_gpu();
  // the last block of the row: the best of all slices, by repeated extraction below the previous key
  u64 below = ~0ull;
  const u32 total = gridDim.x * keep;
  for (u32 n = 0; n < keep; ++n) {
    u64 local = 0;
    for (u32 i = threadIdx.x; i < total; i += threads) {
      const u64 key = ld_cg<u64>(candidates + (u64(row) * gridDim.x + i / keep) * max_candidates + i % keep);
      if (key < below && key > local) local = key;
    }
    below = block_max_key(local, parts);
    if (threadIdx.x == 0) best[n] = below;
  }
  sync_block();
  if constexpr (share) {
    if (threadIdx.x < max_candidates) {
      const u64 key = threadIdx.x < keep ? best[threadIdx.x] : 0;
      f32* out = reinterpret_cast<f32*>(token) + u64(row) * (2 * max_candidates) + threadIdx.x;
      st_global(out, key != 0 ? key_value(key) : bits_float(0x7fc00000u));
      st_global(out + max_candidates, key != 0 ? f32(key_id(key)) : 0.0f);
    }
    if (threadIdx.x == 0) st_global(arrivals + row, 0u);
  } else if (threadIdx.x == 0) {
    u32 found = 0;
    while (found < keep && best[found] != 0) ++found;
    const u32 consumed = u32(ld_global<i32>(run_len + run_lane)) + column;
    st_global(token + row, choose(best, found, place, consumed, lane_prompt_len));
    st_global(arrivals + row, 0u);  // zero again for the next launch
  }
}

}  // namespace ninferc::sample
