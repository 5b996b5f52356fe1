// The gated delta rule as a recurrence: folds the pending records into the state, stores it, runs this step's columns and
// writes their records (decode); or runs the columns and stores the state they lead to (commit).
//
// A block owns `block_rows` of the Dv rows of one value head of one lane; a row of Dk values lies in the registers of 4 or
// 8 neighbouring lanes.  Every sum over Dk has one order, whatever the number of rows, columns or blocks, so states and
// outputs depend on the tokens only.  Columns and records pass through shared memory, `stage` at a time.
#pragma once
#include <ninferc/base/grid.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>
#include <ninferc/gdn/common.cuh>

namespace ninferc::gdn {

struct DecodeOperands {
  const bf16* y;     // [columns, q | k | v]
  i32 y_stride;
  const f32* gates;  // [columns, g | beta]
  i32 gates_stride;
  const i32 *lane_slot, *lane_ncols, *lane_len, *slot_pending, *slot_parity;
  f32* recurrent;                      // [slots, value heads, dv, dk]
  f32 *rec_k, *rec_u, *rec_alpha;      // [2, slots, records, key heads, dk], [… value heads, dv], [… value heads]
  bf16* o;
  i32 o_stride, width, slots, records;
};

template <u32 dk_, u32 dv_, u32 key_heads_, u32 value_heads_, u32 warps_, u32 rows_, bool commit_>
struct DecodeShape {
  static constexpr u32 dk = dk_, dv = dv_, key_heads = key_heads_, value_heads = value_heads_;
  static constexpr u32 warps = warps_, rows = rows_, threads = 32 * warps_;
  static constexpr bool commit = commit_;
  static constexpr u32 lanes = dk % 32 == 0 ? 8 : 4;  // that share a row
  static constexpr u32 vectors = dk / (4 * lanes);    // 16-byte parts of a row per lane
  static constexpr u32 pass_rows = warps * (32 / lanes);
  static constexpr u32 block_rows = pass_rows * rows;
  static constexpr u32 splits = dv / block_rows;
  static constexpr u32 stage = 8;
  static_assert(dk % 16 == 0 && dk <= 128, "a key head has 16 to 128 values, a multiple of 16");
  static_assert(dv % block_rows == 0, "blocks share the rows of a head evenly");
};

template <class S>
struct DecodeShared {
  f32x4 k[S::stage][S::dk / 4], q[S::stage][S::dk / 4], fold_k[S::stage][S::dk / 4];
  f32 v[S::stage][S::block_rows], fold_u[S::stage][S::block_rows];
  f32 alpha[S::stage], beta[S::stage], fold_alpha[S::stage];
};

// Where this block works.
struct DecodePlace {
  u32 lane, head, key_head, first_row;
  bool writes_k, writes_alpha;  // one block per key head, one per value head records what blocks share
};

// What a stage reads from global memory, in registers: requested for a whole stage at once, used later.
template <class S>
struct RecordLoads {
  static constexpr u32 k_parts = S::stage * (S::dk / 4), u_parts = S::stage * S::block_rows;
  f32x4 k[ceil_div(k_parts, S::threads)];
  f32 u[ceil_div(u_parts, S::threads)];
  f32 alpha;

  NINFERC_DEVICE void request(const DecodeOperands& p, const DecodePlace& at, i64 record, u32 count) {
#pragma unroll
    for (u32 n = 0; n < ceil_div(k_parts, S::threads); ++n) {
      const u32 i = n * S::threads + threadIdx.x, r = i / (S::dk / 4), part = i % (S::dk / 4);
      if (r < count) k[n] = ld_cg<f32x4>(p.rec_k + ((record + r) * S::key_heads + at.key_head) * S::dk + part * 4);
    }
#pragma unroll
    for (u32 n = 0; n < ceil_div(u_parts, S::threads); ++n) {
      const u32 i = n * S::threads + threadIdx.x, r = i / S::block_rows, row = i % S::block_rows;
      if (r < count) u[n] = ld_cg<f32>(p.rec_u + ((record + r) * S::value_heads + at.head) * S::dv + at.first_row + row);
    }
    if (threadIdx.x < count) alpha = ld_cg<f32>(p.rec_alpha + (record + threadIdx.x) * S::value_heads + at.head);
  }
  NINFERC_DEVICE void place(DecodeShared<S>& m, u32 count) const {
#pragma unroll
    for (u32 n = 0; n < ceil_div(k_parts, S::threads); ++n) {
      const u32 i = n * S::threads + threadIdx.x, r = i / (S::dk / 4);
      if (r < count) m.fold_k[r][i % (S::dk / 4)] = k[n];
    }
#pragma unroll
    for (u32 n = 0; n < ceil_div(u_parts, S::threads); ++n) {
      const u32 i = n * S::threads + threadIdx.x, r = i / S::block_rows;
      if (r < count) m.fold_u[r][i % S::block_rows] = u[n];
    }
    if (threadIdx.x < count) m.fold_alpha[threadIdx.x] = alpha;
  }
};

template <class S>
struct ColumnLoads {
  static constexpr u32 passes = ceil_div(2 * S::stage, S::warps), v_parts = S::stage * S::block_rows;
  u32x2 raw[passes];  // a quarter of a lane's share of q or k
  bf16 v[ceil_div(v_parts, S::threads)];
  f32 g, beta;

  NINFERC_DEVICE void request(const DecodeOperands& p, const DecodePlace& at, u32 first, u32 count) {
    const i64 column = i64(at.lane) * p.width + first;
    const bf16* const row = p.y + column * p.y_stride;
    const u32 part = lane_id() * 4;
#pragma unroll
    for (u32 i = 0; i < passes; ++i) {
      const u32 item = i * S::warps + warp_id(), t = item / 2;
      raw[i] = u32x2{0, 0};
      if (t < count && part < S::dk)
        raw[i] = ld_global<u32x2>(row + i64(t) * p.y_stride + ((item & 1) ? S::key_heads * S::dk : 0) +
                                  at.key_head * S::dk + part);
    }
#pragma unroll
    for (u32 n = 0; n < ceil_div(v_parts, S::threads); ++n) {
      const u32 i = n * S::threads + threadIdx.x, t = i / S::block_rows;
      if (t < count)
        v[n] = ld_global<bf16>(row + i64(t) * p.y_stride + 2 * S::key_heads * S::dk + at.head * S::dv + at.first_row +
                               i % S::block_rows);
    }
    if (threadIdx.x < count) {
      const f32* const gate = p.gates + (column + threadIdx.x) * p.gates_stride + at.head;
      g = ld_global<f32>(gate);
      beta = ld_global<f32>(gate + S::value_heads);
    }
  }
  // Normalises q and k, converts v and the gates of columns first … first + count − 1; records k and α.
  NINFERC_DEVICE void place(const DecodeOperands& p, DecodeShared<S>& m, const DecodePlace& at, i64 record, u32 first,
                            u32 count) const {
    const u32 part = lane_id() * 4;
#pragma unroll
    for (u32 n = 0; n < ceil_div(v_parts, S::threads); ++n) {
      const u32 i = n * S::threads + threadIdx.x, t = i / S::block_rows;
      if (t < count) m.v[t][i % S::block_rows] = bf16_to_f32(v[n]);
    }
    if (threadIdx.x < count) {
      const u32 t = threadIdx.x;
      const f32 alpha = decay_exp(g);
      m.alpha[t] = alpha;
      m.beta[t] = beta;
      if (!S::commit && at.writes_alpha) st_global(p.rec_alpha + (record + first + t) * S::value_heads + at.head, alpha);
    }
#pragma unroll
    for (u32 i = 0; i < passes; ++i) {
      const u32 item = i * S::warps + warp_id(), t = item / 2;
      if (t >= count) break;
      const f32 x[4] = {bf16x2_lo(raw[i].x), bf16x2_hi(raw[i].x), bf16x2_lo(raw[i].y), bf16x2_hi(raw[i].y)};
      const f32 scale = l2_scale(warp_sum(head_squares(x)));
      if (part >= S::dk) continue;
      if (item & 1) {
        const f32x4 k{x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale};
        m.k[t][part / 4] = k;
        if (!S::commit && at.writes_k)
          st_global(p.rec_k + ((record + first + t) * S::key_heads + at.key_head) * S::dk + part, k);
      } else {
        const f32 s = query_scale<S::dk>(scale);
        m.q[t][part / 4] = f32x4{x[0] * s, x[1] * s, x[2] * s, x[3] * s};
      }
    }
  }
};

// Columns or records of the stage that begins at `begin`.
template <class S>
NINFERC_DEVICE u32 stage_count(u32 total, u32 begin) {
  return total <= begin ? 0 : (total - begin < S::stage ? total - begin : S::stage);
}

template <class S>
NINFERC_DEVICE f32 dot_row(const f32x4 (&s)[S::vectors], const f32x4 (&x)[S::vectors]) {
  f32x4 sum{0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
  for (u32 c = 0; c < S::vectors; ++c) {
    sum.x = __fmaf_rn(s[c].x, x[c].x, sum.x);
    sum.y = __fmaf_rn(s[c].y, x[c].y, sum.y);
    sum.z = __fmaf_rn(s[c].z, x[c].z, sum.z);
    sum.w = __fmaf_rn(s[c].w, x[c].w, sum.w);
  }
  return warp_sum<S::lanes>((sum.x + sum.y) + (sum.z + sum.w));
}

template <class S>
NINFERC_DEVICE void update_row(f32x4 (&s)[S::vectors], const f32x4 (&k)[S::vectors], f32 alpha, f32 u) {
#pragma unroll
  for (u32 c = 0; c < S::vectors; ++c)
    s[c] = f32x4{update_element(s[c].x, alpha, u, k[c].x), update_element(s[c].y, alpha, u, k[c].y),
                 update_element(s[c].z, alpha, u, k[c].z), update_element(s[c].w, alpha, u, k[c].w)};
}

template <class S>
NINFERC_DEVICE void load_row(f32x4 (&x)[S::vectors], const f32x4 (&row)[S::dk / 4], u32 sub) {
#pragma unroll
  for (u32 c = 0; c < S::vectors; ++c) x[c] = row[c * S::lanes + sub];
}

template <class S>
NINFERC_DEVICE void decode(const DecodeOperands& p) {
  __shared__ DecodeShared<S> m;
  DecodePlace at;
  at.lane = blockIdx.y;
  at.head = blockIdx.x / S::splits;
  at.key_head = at.head * S::key_heads / S::value_heads;
  at.first_row = blockIdx.x % S::splits * S::block_rows;
  at.writes_alpha = at.first_row == 0;
  at.writes_k = at.writes_alpha && at.head % (S::value_heads / S::key_heads) == 0;
  const u32 sub = threadIdx.x % S::lanes;
  const u32 first = threadIdx.x / S::lanes;  // row within a pass

  grid_dependency_wait();
  const Slot slot = read_slot(p.lane_slot, p.lane_ncols, p.lane_len, p.slot_pending, p.slot_parity, at.lane);
  if (slot.columns == 0) return;
  const u32 columns = u32(slot.columns);
  ColumnLoads<S> fresh;
  fresh.request(p, at, 0, stage_count<S>(columns, 0));

  f32* state[S::rows];
  f32x4 s[S::rows][S::vectors];
#pragma unroll
  for (u32 r = 0; r < S::rows; ++r) {
    const u32 row = at.first_row + r * S::pass_rows + first;
    state[r] = p.recurrent + ((i64(slot.slot) * S::value_heads + at.head) * S::dv + row) * S::dk + sub * 4;
#pragma unroll
    for (u32 c = 0; c < S::vectors; ++c)
      s[r][c] = slot.length > 0 ? ld_cg<f32x4>(state[r] + c * S::lanes * 4) : f32x4{0.0f, 0.0f, 0.0f, 0.0f};
  }
  grid_launch_dependents();

  // 1. fold what the last step recorded
  const u32 pending = u32(slot.pending);
  const i64 old_record = (i64(slot.parity) * p.slots + slot.slot) * p.records;
  const i64 new_record = (i64(1 - slot.parity) * p.slots + slot.slot) * p.records;
  RecordLoads<S> recorded;
  recorded.request(p, at, old_record, stage_count<S>(pending, 0));
  fresh.place(p, m, at, new_record, 0, stage_count<S>(columns, 0));
  for (u32 begin = 0; begin < pending; begin += S::stage) {
    const u32 count = stage_count<S>(pending, begin);
    if (begin > 0) sync_block();
    recorded.place(m, count);
    sync_block();
    recorded.request(p, at, old_record + begin + S::stage, stage_count<S>(pending, begin + S::stage));
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) {
      f32x4 k[S::vectors];
      load_row<S>(k, m.fold_k[i], sub);
#pragma unroll
      for (u32 r = 0; r < S::rows; ++r)
        update_row<S>(s[r], k, m.fold_alpha[i], m.fold_u[i][r * S::pass_rows + first]);
    }
  }
  if (!S::commit && (pending > 0 || slot.length == 0)) {
#pragma unroll
    for (u32 r = 0; r < S::rows; ++r)
#pragma unroll
      for (u32 c = 0; c < S::vectors; ++c) st_global(state[r] + c * S::lanes * 4, s[r][c]);
  }

  // 2. this step's columns
  for (u32 begin = 0; begin < columns; begin += S::stage) {
    const u32 count = stage_count<S>(columns, begin);
    if (begin > 0) {
      sync_block();
      fresh.place(p, m, at, new_record, begin, count);
    }
    if (begin > 0 || pending == 0) sync_block();
    fresh.request(p, at, begin + S::stage, stage_count<S>(columns, begin + S::stage));
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) {
      f32x4 k[S::vectors], q[S::vectors];
      load_row<S>(k, m.k[i], sub);
      load_row<S>(q, m.q[i], sub);
      const f32 alpha = m.alpha[i], beta = m.beta[i];
      f32 u[S::rows], o[S::rows];
#pragma unroll
      for (u32 r = 0; r < S::rows; ++r)
        u[r] = __fmul_rn(beta, __fmaf_rn(-alpha, dot_row<S>(s[r], k), m.v[i][r * S::pass_rows + first]));
#pragma unroll
      for (u32 r = 0; r < S::rows; ++r) {
        update_row<S>(s[r], k, alpha, u[r]);
        o[r] = dot_row<S>(s[r], q);
      }
      if (sub == 0) {
        bf16* const out = p.o + (i64(at.lane) * p.width + begin + i) * p.o_stride + at.head * S::dv + at.first_row;
        f32* const record = p.rec_u + ((new_record + begin + i) * S::value_heads + at.head) * S::dv + at.first_row;
#pragma unroll
        for (u32 r = 0; r < S::rows; ++r) {
          st_global(out + r * S::pass_rows + first, f32_to_bf16(o[r]));
          if (!S::commit) st_global(record + r * S::pass_rows + first, u[r]);
        }
      }
    }
  }
  if (S::commit) {
#pragma unroll
    for (u32 r = 0; r < S::rows; ++r)
#pragma unroll
      for (u32 c = 0; c < S::vectors; ++c) st_global(state[r] + c * S::lanes * 4, s[r][c]);
  }
}

}  // namespace ninferc::gdn
