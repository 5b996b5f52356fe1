// One decode step of a GDN layer between its two projections: gates, convolution, delta rule with lazy commit, gated norm.
//
// A cluster of `parts` blocks (or a single block) owns one value head of one lane, each block an equal share of its rows: their
// state lies in its registers, everything else passes through shared memory, and the outputs that the norm adds up go to all
// blocks.  What several blocks need (gates, q and k, which value heads share) each computes for itself, with the same bits;
// the first of them writes what is recorded of it, which no block of this step reads (parity, conv.cuh).  All sums are those
// of the single kernels (gates.cuh, conv.cuh, decode.cuh, gated_norm.cuh), and so are the bits.
//
// What a block needs before the projection ends it takes before the dependency wait (`settled`, chosen by the compiler,
// compiler/passes/early.py).  That is safe for what was complete before any block of this kernel could start:
//   tables          written by `begin` and by the last step's `advance`
//   state, records  of this layer, written by this kernel in the last step only: the fold of the last step's records and
//                   the store of the folded state need nothing of this step (decision 5 of the design: a step folds what
//                   the last one recorded, and what it records itself has the other parity)
//   hidden rows     written by the norm in front of the projection, or by the projection's kernel before it let this one start
// A kernel between them and this one lets its dependents start only after its own wait has returned, that is when every
// kernel before it is complete and its stores are in L2; all loads before the wait pass L1 by.
#pragma once
#include <ninferc/base/cluster.cuh>
#include <ninferc/gdn/conv.cuh>
#include <ninferc/gdn/decode.cuh>
#include <ninferc/gdn/gated_norm.cuh>
#include <ninferc/gdn/gates.cuh>

namespace ninferc::gdn {

// What is complete when a block starts: nothing, tables and this layer's state, or these and the hidden rows.
enum class Settled { nothing, state, hidden };

struct LayerOperands {
  ConvOperands conv;  // without y
  const bf16* z;
  i32 z_stride;
  const bf16* h;  // normalised hidden rows
  i32 h_stride;
  const bf16 *wa, *wb;
  const f32 *a_log, *dt_bias;
  const bf16* norm_w;
  f32* recurrent;
  f32 *rec_k, *rec_u, *rec_alpha;
  bf16* y;
  i32 y_stride;
  f32 eps;
};

// `bucket`: columns per lane, at most.
template <u32 hidden_, u32 dk_, u32 dv_, u32 key_heads_, u32 value_heads_, u32 bucket_, u32 parts_, u32 warps_, Settled settled_>
struct LayerShape {
  static constexpr u32 hidden = hidden_, dk = dk_, dv = dv_, key_heads = key_heads_, value_heads = value_heads_;
  static constexpr u32 bucket = bucket_, parts = parts_, own = dv / parts;  // rows of the state that a block owns
  static constexpr Settled settled = settled_;
  static constexpr u32 share = value_heads / key_heads;
  static constexpr u32 warps = warps_, threads = 32 * warps;
  static constexpr u32 lanes = dk % 32 == 0 ? 8 : 4;  // that share a row of the state, as in DecodeShape
  static constexpr u32 vectors = dk / (4 * lanes);
  static constexpr u32 pass_rows = warps * (32 / lanes), rows = ceil_div(own, pass_rows);
  static constexpr u32 stage = bucket < 8 ? bucket : 8, fold_stage = bucket == 1 ? 2 : 8;  // columns, records in shared memory
  static constexpr u32 gate_tile = bucket > 8 ? 16 : 8;                  // columns of one pass of the gates
  static constexpr u32 turns = warps / 3;                                // warps that share the columns of q, k or v
  static_assert(dk % 16 == 0 && dk <= 128 && dv % 16 == 0 && dv <= 128, "heads have 16 to 128 values, a multiple of 16");
  static_assert(gate_warps % warps == 0 && warps > 3, "a warp sums whole eighths of K; three convolve q, k and v");
  static_assert(own * parts == dv && own % 8 == 0, "blocks share a head evenly, in pieces that the norm stores");
  static_assert(stage * lanes_for(dv / 8) <= threads, "one pass of the norm per stage");
};

template <class S>
struct LayerShared {
  f32x4 k[S::stage][S::dk / 4], q[S::stage][S::dk / 4], fold_k[S::fold_stage][S::dk / 4];
  alignas(16) f32 v[S::stage][S::own];
  alignas(16) f32 fold_u[S::fold_stage][S::own];
  // Two stages in turn, each with its mbarrier: another block may store into the second while the norm still reads the first.
  alignas(16) bf16 o[2][S::stage][S::dv];
  alignas(8) u64 arrived[2];
  f32 gate_parts[gate_warps][S::gate_tile][2];
  f32 alpha[S::bucket], beta[S::bucket], fold_alpha[S::fold_stage];
};

// Where the block works.
struct LayerPlace {
  u32 lane, head, key_head;
  u32 first_row;  // of the state
  bool first_part;
  i64 old_record, new_record;  // first record of this step's parity and of the other
  // Offset of column t of the lane in rows of `stride` values: a step has few columns, 32 bits hold it.
  NINFERC_DEVICE u32 row(const LayerOperands& p, u32 t, i32 stride) const { return (lane * u32(p.conv.width) + t) * u32(stride); }
};

// Records begin … begin + count - 1 on their way to shared memory; returns the α that this thread has to put there.
template <class S>
NINFERC_DEVICE f32 copy_records(const LayerOperands& p, LayerShared<S>& m, const LayerPlace& at, u32 begin, u32 count) {
  const i64 first = at.old_record + begin;
#pragma unroll 1
  for (u32 i = threadIdx.x; i < count * (S::dk / 4); i += S::threads) {
    const u32 r = i / (S::dk / 4), piece = i % (S::dk / 4);
    cp_async_16(&m.fold_k[r][piece], p.rec_k + ((first + r) * S::key_heads + at.key_head) * S::dk + piece * 4);
  }
#pragma unroll 1
  for (u32 i = threadIdx.x; i < count * (S::own / 4); i += S::threads) {
    const u32 r = i / (S::own / 4), piece = i % (S::own / 4);
    cp_async_16(&m.fold_u[r][piece * 4],
                p.rec_u + ((first + r) * S::value_heads + at.head) * S::dv + at.first_row + piece * 4);
  }
  return threadIdx.x < count ? ld_cg<f32>(p.rec_alpha + (first + threadIdx.x) * S::value_heads + at.head) : 0.0f;
}

// The head's row of a and of b.
template <class S>
NINFERC_DEVICE const bf16* gate_row(const LayerOperands& p, u32 head, u32 which) {
  return (which == 0 ? p.wa : p.wb) + head * S::hidden;
}
template <class S>
NINFERC_DEVICE void prefetch_gate_rows(const LayerOperands& p, u32 head) {
  constexpr u32 lines = ceil_div(S::hidden, 64u);
#pragma unroll 1
  for (u32 i = threadIdx.x; i < 2 * lines; i += S::threads) prefetch_l2(gate_row<S>(p, head, i / lines) + i % lines * 64);
}

// α and β of all columns into shared memory, α into the records.
template <class S>
NINFERC_DEVICE void layer_gates(const LayerOperands& p, LayerShared<S>& m, const LayerPlace& at, u32 columns, f32 a_log,
                                f32 dt_bias) {
  constexpr u32 groups = (S::hidden + 31) / 32, per_eighth = ceil_div(groups, gate_warps), halves = S::gate_tile / 8;
  constexpr u32 most = (S::settled == Settled::hidden ? 10 : 5) / halves;  // loads in flight: fewer beside a state in registers
  constexpr u32 batch = per_eighth < most ? per_eighth : most;
  constexpr bool even = groups % gate_warps == 0 && per_eighth % batch == 0 && S::hidden % 32 == 0;  // no group is cut off
  const u32 group = lane_id() / 4, pair = lane_id() % 4;
  const bf16* const weight = gate_row<S>(p, at.head, group % 2);
#pragma unroll 1
  for (u32 first = 0; first < columns; first += S::gate_tile) {
    if (first > 0) sync_block();  // the parts of the tile before have been added
    const bf16* const row = p.h + at.row(p, first + group, p.h_stride);
#pragma unroll 1
    for (u32 eighth = warp_id(); eighth < gate_warps; eighth += S::warps) {
      const u32 begin = eighth * per_eighth, end = begin + per_eighth < groups ? begin + per_eighth : groups;
      GateSum sum;
#pragma unroll 1
      for (u32 g = begin; g < begin + per_eighth; g += batch) {
        u32x4 a[batch][halves], b[batch];
#pragma unroll
        for (u32 i = 0; i < batch; ++i) {
          const u32 k = (g + i) * 32 + pair * 8;
          const bool inside = even || (g + i < end && k < S::hidden);
          b[i] = u32x4{0, 0, 0, 0};
          if (group < 2 && inside) b[i] = ld_nc<u32x4>(weight + k);
#pragma unroll
          for (u32 h = 0; h < halves; ++h) {
            a[i][h] = u32x4{0, 0, 0, 0};
            if (first + group + 8 * h < columns && inside) a[i][h] = ld_cg<u32x4>(row + 8 * h * u32(p.h_stride) + k);
          }
        }
#pragma unroll
        for (u32 i = 0; i < batch; ++i) sum.add(a[i][0], halves > 1 ? a[i][halves - 1] : u32x4{0, 0, 0, 0}, b[i]);
      }
      if (pair == 0) {
#pragma unroll
        for (u32 e = 0; e < 2 * halves; ++e) m.gate_parts[eighth][group + 8 * (e / 2)][e % 2] = sum.total(e);
      }
    }
    sync_block();
    const u32 t = first + threadIdx.x / 2;
    if (threadIdx.x < 2 * S::gate_tile && t < columns) {
      const u32 which = threadIdx.x % 2;  // a, b
      f32 total = m.gate_parts[0][threadIdx.x / 2][which];
#pragma unroll
      for (u32 w = 1; w < gate_warps; ++w) total += m.gate_parts[w][threadIdx.x / 2][which];
      if (which == 0) {
        const f32 alpha = decay_exp(log_decay(total, a_log, dt_bias));
        m.alpha[t] = alpha;
        if (at.first_part) st_global(p.rec_alpha + (at.new_record + t) * S::value_heads + at.head, alpha);
      } else {
        m.beta[t] = write_strength(total);
      }
    }
  }
}

// A warp's share of the convolution: four neighbouring channels per lane of q, k or the block's v, of every `turns`-th column.
template <class S>
struct LayerConv {
  const bool active, owner;
  const u32 part, turn;  // part: 0 q, 1 k, 2 v
  const i32 channel;
  const bf16* const source;  // of the raw columns
  const i32 stride;
  Taps<4> taps;
  Channels<4> history[3], raw[S::stage];

  NINFERC_DEVICE LayerConv(const LayerOperands& p, const LayerPlace& at)
      : active(warp_id() < 3 * S::turns && lane_id() * 4 < (warp_id() % 3 == 2 ? S::own : S::dk)),
        owner(active && (warp_id() % 3 == 2 || (at.head % S::share == 0 && at.first_part))),
        part(warp_id() % 3),
        turn(warp_id() / 3),
        channel(active ? i32((part == 2 ? 2 * S::key_heads * S::dk + at.head * S::dv + at.first_row
                                        : (part * S::key_heads + at.key_head) * S::dk) + lane_id() * 4) : 0),
        source(raw_column(p.conv, channel, 0)),
        stride(channel < p.conv.split ? p.conv.x_stride : p.conv.x2_stride) {}

  // What is loaded behind the fold, when there are registers for it, comes as far as L2.
  NINFERC_DEVICE void prefetch(const LayerOperands& p, const Slot& s) const {
    if (!active) return;
#pragma unroll
    for (u32 j = 0; j < 4; ++j) prefetch_l2(p.conv.w + j * p.conv.channels + channel);
#pragma unroll
    for (i32 j = 0; j < 3; ++j)
      if (s.length > 0) prefetch_l2(committed_column(p.conv, s, s.pending + j) + channel);
  }
  NINFERC_DEVICE void load_taps(const LayerOperands& p) { taps = Taps<4>(p.conv.w, p.conv.channels, channel); }
  NINFERC_DEVICE void load_history(const LayerOperands& p, const Slot& s) {
#pragma unroll
    for (i32 j = 0; j < 3; ++j) history[j] = active ? history_column<4>(p.conv, s, channel, s.pending + j) : Channels<4>{};
  }
  // Raw columns begin … begin + count - 1 of the lane.
  NINFERC_DEVICE void request(const LayerOperands& p, const LayerPlace& at, u32 begin, u32 count) {
#pragma unroll
    for (u32 t = 0; t < S::stage; ++t)
      raw[t] = active && t < count ? load_channels<4>(source + at.row(p, begin + t, stride)) : Channels<4>{};
  }
  // Convolves the columns of the stage: normalised q and k and v into shared memory, k into the records.
  NINFERC_DEVICE void place(const LayerOperands& p, LayerShared<S>& m, const LayerPlace& at, u32 begin, u32 count) {
    const u32 piece = lane_id();
#pragma unroll
    for (u32 t = 0; t < S::stage; ++t) {
      if (t >= count || t % S::turns != turn || warp_id() >= 3 * S::turns) continue;
      Channels<4> u[4];
#pragma unroll
      for (u32 j = 0; j < 4; ++j) u[j] = t + j < 3 ? history[t + j < 3 ? t + j : 0] : raw[t + j < 3 ? 0 : t + j - 3];
      const Channels<4> y = active ? taps.column(u) : Channels<4>{};
      const f32 x[4] = {bf16x2_lo(y.pair[0]), bf16x2_hi(y.pair[0]), bf16x2_lo(y.pair[1]), bf16x2_hi(y.pair[1])};
      if (part == 2) {
        if (active) *reinterpret_cast<f32x4*>(&m.v[t][piece * 4]) = f32x4{x[0], x[1], x[2], x[3]};
        continue;
      }
      const f32 scale = l2_scale(warp_sum(head_squares(x)));
      if (!active) continue;
      if (part == 1) {
        const f32x4 k{x[0] * scale, x[1] * scale, x[2] * scale, x[3] * scale};
        m.k[t][piece] = k;
        if (owner) st_global(p.rec_k + ((at.new_record + begin + t) * S::key_heads + at.key_head) * S::dk + piece * 4, k);
      } else {
        const f32 scaled = query_scale<S::dk>(scale);
        m.q[t][piece] = f32x4{x[0] * scaled, x[1] * scaled, x[2] * scaled, x[3] * scaled};
      }
    }
  }
  // Records the raw columns of the stage, and with the first stage the window they follow, both of the other parity.
  NINFERC_DEVICE void record(const LayerOperands& p, const Slot& s, u32 begin, u32 count) {
    if (begin == 0 && turn == 0 && owner) {
#pragma unroll
      for (i32 j = 0; j < 3; ++j) store_channels<4>(window_column(p.conv, s, 1 - s.parity, j) + channel, history[j]);
    }
#pragma unroll
    for (u32 t = 0; t < S::stage; ++t)
      if (owner && t < count && t % S::turns == turn)
        store_channels<4>(record_column(p.conv, s, 1 - s.parity, i32(begin + t)) + channel, raw[t]);
    if constexpr (S::bucket > S::stage) {  // a stage that another one follows is full
#pragma unroll
      for (u32 j = 0; j < 3; ++j) history[j] = raw[S::stage - 3 + j];
    }
  }
};

// The outputs of a head, which the norm needs whole: stored by the lane that has them, in every block of the cluster.
template <class S>
struct HeadOutputs {
  LayerShared<S>& m;
  u32 stage = 0;
#if NINFERC_HAS_BULK_COPY
  static constexpr bool several = S::parts > 1;
#else
  static constexpr bool several = false;
  static_assert(S::parts == 1, "clusters need sm_90");
#endif

  // Long before the first output; meet() before it.
  NINFERC_DEVICE void open() {
#if NINFERC_HAS_BULK_COPY
    if constexpr (several) {
      if (threadIdx.x < 2) {
        mbarrier_init(&m.arrived[threadIdx.x], 1);
        fence_mbarrier_init();
      }
      cluster_arrive();
    }
#endif
  }
  NINFERC_DEVICE void meet() {
#if NINFERC_HAS_BULK_COPY
    if constexpr (several) cluster_wait();
#endif
  }
  // Output `row` of the head, of column t of the stage. Whole warps call it; lane `sub` of those that hold the row.
  NINFERC_DEVICE void put(u32 t, u32 row, u32 sub, bool holds, bf16 o) {
    bf16* const place = &m.o[stage % 2][t][row];
#if NINFERC_HAS_BULK_COPY
    if constexpr (several) {  // two rows to a word, one lane for each block
      const u32 pair = u32(o.bits) | shfl_xor(u32(o.bits), S::lanes) << 16;
      if (holds && row % 2 == 0 && sub < S::parts) st_async_4(place, pair, &m.arrived[stage % 2], sub);
      return;
    }
#endif
    if (holds && sub == 0) *place = o;
  }
  // Waits for all outputs of the stage's `count` columns.
  NINFERC_DEVICE void wait(u32 count) {
#if NINFERC_HAS_BULK_COPY
    if constexpr (several) {
      if (threadIdx.x == 0) mbarrier_arrive_expect(&m.arrived[stage % 2], count * S::dv * 2);
      mbarrier_wait(&m.arrived[stage % 2], stage / 2 % 2);
      return;
    }
#endif
    sync_block();
  }
  NINFERC_DEVICE u32x4 piece(u32 t, u32 part) const { return *reinterpret_cast<const u32x4*>(&m.o[stage % 2][t][part * 8]); }
};

template <class S>
NINFERC_DEVICE void layer(const LayerOperands& p) {
  __shared__ LayerShared<S> m;
  LayerPlace at;
  at.lane = blockIdx.y;
  at.head = blockIdx.x / S::parts;
  at.key_head = at.head / S::share;
  at.first_row = blockIdx.x % S::parts * S::own;
  at.first_part = at.first_row == 0;
  const u32 sub = threadIdx.x % S::lanes, first = threadIdx.x / S::lanes;  // place in a row, row within a pass
  const auto holds = [&](u32 r) { return S::own % S::pass_rows == 0 || r * S::pass_rows + first < S::own; };

  prefetch_gate_rows<S>(p, at.head);
  const f32 a_log = ld_nc<f32>(p.a_log + at.head), dt_bias = ld_nc<f32>(p.dt_bias + at.head);
  if constexpr (S::settled == Settled::nothing) grid_dependency_wait();
  const Slot slot = read_slot(p.conv.lane_slot, p.conv.lane_ncols, p.conv.lane_len, p.conv.slot_pending, p.conv.slot_parity,
                              at.lane);
  if (slot.columns == 0) {
    if constexpr (S::settled != Settled::nothing) grid_dependency_wait();
    return;
  }
  HeadOutputs<S> outputs{m};
  outputs.open();
  const u32 columns = S::bucket == 1 ? 1 : u32(slot.columns), pending = u32(slot.pending);
  at.old_record = (i64(slot.parity) * p.conv.slots + slot.slot) * p.conv.records;
  at.new_record = (i64(1 - slot.parity) * p.conv.slots + slot.slot) * p.conv.records;
  f32* const state = p.recurrent + ((i64(slot.slot) * S::value_heads + at.head) * S::dv + at.first_row + first) * S::dk + sub * 4;
  f32 fold_alpha = copy_records<S>(p, m, at, 0, pending < S::fold_stage ? pending : S::fold_stage);
  cp_async_commit();
  LayerConv<S> conv(p, at);
  conv.prefetch(p, slot);

  if constexpr (S::settled == Settled::hidden) {
    // the state comes as far as L2 meanwhile: the registers are those of the gates
    if (slot.length > 0)
      for (u32 line = threadIdx.x; line < S::own * S::dk / 32; line += S::threads)
        prefetch_l2(state - sub * 4 - first * S::dk + line * 32);
    grid_launch_dependents();
    layer_gates<S>(p, m, at, columns, a_log, dt_bias);
  }
  f32x4 s[S::rows][S::vectors];
#pragma unroll
  for (u32 r = 0; r < S::rows; ++r)
#pragma unroll
    for (u32 c = 0; c < S::vectors; ++c) {
      s[r][c] = f32x4{0.0f, 0.0f, 0.0f, 0.0f};
      if (slot.length > 0 && holds(r)) s[r][c] = ld_cg<f32x4>(state + r * S::pass_rows * S::dk + c * S::lanes * 4);
    }
  // 1. fold what the last step recorded: a stage of it lies in shared memory
  const auto fold = [&](u32 count) {
    if (threadIdx.x < count) m.fold_alpha[threadIdx.x] = fold_alpha;
    cp_async_wait<0>();
    sync_block();
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) {
      f32x4 k[S::vectors];
      load_row<S>(k, m.fold_k[i], sub);
#pragma unroll
      for (u32 r = 0; r < S::rows; ++r)
        if (holds(r)) update_row<S>(s[r], k, m.fold_alpha[i], m.fold_u[i][r * S::pass_rows + first]);
    }
  };
  u32 folded = 0;
#pragma unroll 1
  for (; pending - folded > S::fold_stage; folded += S::fold_stage) {
    fold(S::fold_stage);
    sync_block();
    const u32 left = pending - folded - S::fold_stage;
    fold_alpha = copy_records<S>(p, m, at, folded + S::fold_stage, left < S::fold_stage ? left : S::fold_stage);
    cp_async_commit();
  }
  if constexpr (S::settled != Settled::hidden) grid_launch_dependents();
  fold(pending - folded);
  if (pending > 0 || slot.length == 0) {
#pragma unroll
    for (u32 r = 0; r < S::rows; ++r)
#pragma unroll
      for (u32 c = 0; c < S::vectors; ++c)
        if (holds(r)) st_global(state + r * S::pass_rows * S::dk + c * S::lanes * 4, s[r][c]);
  }
  conv.load_history(p, slot);
  conv.load_taps(p);
  constexpr u32 norm_lanes = lanes_for(S::dv / 8);
  const u32 norm_column = threadIdx.x / norm_lanes, norm_part = threadIdx.x % norm_lanes;
  const bool norm_active = norm_part * 8 < S::dv;
  const bool norm_stores = norm_active && norm_part * 8 / S::own == blockIdx.x % S::parts;
  u32x4 norm_weight{0, 0, 0, 0};
  if (norm_active) norm_weight = ld_nc<u32x4>(p.norm_w + norm_part * 8);
  outputs.meet();
  if constexpr (S::settled != Settled::nothing) grid_dependency_wait();

  // 2. this step's columns
  conv.request(p, at, 0, stage_count<S>(columns, 0));
#pragma unroll 1
  for (u32 begin = 0; begin < columns; begin += S::stage) {
    const u32 count = stage_count<S>(columns, begin);
    if (begin > 0) {
      sync_block();  // the columns of the stage before have been read
      conv.load_taps(p);  // not kept over a stage: the registers are short
      conv.request(p, at, begin, count);
    }
    const bool normalises = norm_active && norm_column < count;
    u32x4 gate{0, 0, 0, 0};
    if (normalises)
      gate = ld_global<u32x4>(p.z + at.row(p, begin + norm_column, p.z_stride) + at.head * S::dv + norm_part * 8);
    if constexpr (S::settled != Settled::hidden) {
      if (begin == 0) layer_gates<S>(p, m, at, columns, a_log, dt_bias);
    }
    conv.place(p, m, at, begin, count);
    conv.record(p, slot, begin, count);
    sync_block();
#pragma unroll 1
    for (u32 i = 0; i < count; ++i) {
      f32x4 x[S::vectors];
      load_row<S>(x, m.k[i], sub);
      const f32 alpha = m.alpha[begin + i], beta = m.beta[begin + i];
      f32 u[S::rows];
#pragma unroll
      for (u32 r = 0; r < S::rows; ++r)
        u[r] = __fmul_rn(beta, __fmaf_rn(-alpha, dot_row<S>(s[r], x), holds(r) ? m.v[i][r * S::pass_rows + first] : 0.0f));
#pragma unroll
      for (u32 r = 0; r < S::rows; ++r) update_row<S>(s[r], x, alpha, u[r]);
      load_row<S>(x, m.q[i], sub);
      f32* const record = p.rec_u + ((at.new_record + begin + i) * S::value_heads + at.head) * S::dv + at.first_row;
#pragma unroll
      for (u32 r = 0; r < S::rows; ++r) {
        const u32 row = r * S::pass_rows + first;
        outputs.put(i, at.first_row + row, sub, holds(r), f32_to_bf16(dot_row<S>(s[r], x)));
        if (holds(r) && sub == 0) st_global(record + row, u[r]);
      }
    }
    outputs.wait(count);
    const u32x4 value = normalises ? outputs.piece(norm_column, norm_part) : u32x4{0, 0, 0, 0};
    const u32x4 out = gated_norm_part<S::dv>(value, gate, norm_weight, p.eps);
    ++outputs.stage;
    if (normalises && norm_stores)
      st_global(p.y + at.row(p, begin + norm_column, p.y_stride) + at.head * S::dv + norm_part * 8, out);
    if constexpr (S::bucket <= S::stage) break;  // says that nothing above is needed again
  }
}

}  // namespace ninferc::gdn
