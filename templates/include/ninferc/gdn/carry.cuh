// Second kernel of the chunked delta rule: carries the state across the chunks of a call and writes the outputs.
//
// A warp owns 16 of the Dv rows of one value head for the whole call.  Everything is computed transposed, so that the
// state (16 × Dk, FP32 accumulators of its own update) is also the left operand of the next products without leaving the
// registers, and warps need no exchange: only the tiles of K, Q, T, P and V pass through shared memory.  Each tile is
// requested again for the next chunk as soon as all warps have read it; K, read first and last, has two buffers.
#pragma once
#include <ninferc/base/async.cuh>
#include <ninferc/base/grid.cuh>
#include <ninferc/base/mma.cuh>
#include <ninferc/base/warp.cuh>
#include <ninferc/gdn/chunk.cuh>

namespace ninferc::gdn {

struct CarryOperands {
  const bf16* y;  // [columns, q | k | v]: v is read
  i32 y_stride;
  const u8 *matrices, *rows;  // of the kernel within chunks
  const i32 *lane_slot, *lane_ncols, *lane_len, *slot_pending, *slot_parity;
  f32* recurrent;                            // [slots, value heads, dv, dk]
  const f32 *rec_k, *rec_u, *rec_alpha;      // as in decode
  bf16* o;
  i32 o_stride, slots, records;
};

template <u32 dk, u32 warps>
struct CarryShared {
  static constexpr u32 pitch = dk + 8;
  static constexpr u32 v_pitch = 16 * warps + 8;
  static constexpr u32 o_pitch = 24;
  alignas(16) u16 k[2][chunk][pitch], q[chunk][pitch];
  alignas(16) u8 t[t_bytes];  // these three lie as in a record
  Coefficients c;
  u8 p[p_bytes];
  alignas(16) u16 v[chunk][v_pitch];
  alignas(16) u16 o[warps][chunk][o_pitch];
};

template <u32 dk_, u32 dv_, u32 key_heads_, u32 value_heads_, u32 warps_>
struct CarryShape {
  static constexpr u32 dk = dk_, dv = dv_, key_heads = key_heads_, value_heads = value_heads_, warps = warps_;
  static constexpr u32 threads = 32 * warps, splits = dv / (16 * warps), steps = dk / 16;
  static_assert(dk % 16 == 0 && dk <= 128, "a key head has 16 to 128 values, a multiple of 16");
  static_assert(dv % (16 * warps) == 0, "warps share the rows of a head evenly");
};

// Where a block reads its tiles of a chunk from.
template <class S>
struct TileSource {
  const CarryOperands& p;
  u32 head, key_head, first_row;
  i32 columns;

  // Addresses are made anew for each chunk, from the thread's number: kept across chunks they would take registers that the
  // state needs.  A thread's copies lie a constant number of bytes apart, so that one address each way serves all of them.
  NINFERC_DEVICE void rows(u16 (&tile)[chunk][S::dk + 8], u32 at, u32 which) const {
    constexpr u32 per_row = S::dk / 8, copies = chunk * per_row / S::threads;
    const u32 thread = opaque(threadIdx.x);
    const u8* const source = p.rows + (i64(at) * S::key_heads + key_head) * rows_bytes(S::dk) + which * chunk * S::dk * 2 +
                             thread * 16;
    const u32 target = shared_address(tile);
#pragma unroll
    for (u32 i = 0; i < copies; ++i) {
      const u32 piece = thread + i * S::threads;
      const u32 place = S::threads % per_row == 0
                            ? (thread / per_row + i * (S::threads / per_row)) * u32(sizeof(tile[0])) + thread % per_row * 16
                            : piece / per_row * u32(sizeof(tile[0])) + piece % per_row * 16;
      cp_async_16(SharedAddress(target + place), source + i * S::threads * 16);
    }
  }
  NINFERC_DEVICE void record(CarryShared<S::dk, S::warps>& m, u32 at, u32 begin, u32 end) const {
    const u8* const source = p.matrices + (i64(at) * S::value_heads + head) * record_bytes;
    const u32 target = shared_address(m.t);
    for (u32 i = begin + opaque(threadIdx.x) * 16; i < end; i += S::threads * 16)
      cp_async_16(SharedAddress(target + i), source + i);
  }
  // What steps 1, 2 and 3, and 4 and 5 read, one group of copies each.
  NINFERC_DEVICE void keys(CarryShared<S::dk, S::warps>& m, u32 at) const {
    if (at * chunk < u32(columns)) rows(m.k[at % 2], at, 0);
    cp_async_commit();
  }
  NINFERC_DEVICE void values(CarryShared<S::dk, S::warps>& m, u32 at) const {
    if (at * chunk < u32(columns)) {
      record(m, at, 0, t_bytes + x_coefficients);
      constexpr u32 per_row = 2 * S::warps;  // 16 rows of values at a time
      const u32 thread = opaque(threadIdx.x), part = thread % per_row * 8;
      const i32 row = i32(at * chunk + thread / per_row);
      const u32 target = shared_address(m.v) + thread / per_row * u32(sizeof(m.v[0])) + part * 2;
      const bf16* const values = p.y + 2 * S::key_heads * S::dk + head * S::dv + first_row + part;
#pragma unroll
      for (u32 i = 0; i < chunk; i += 16) {
        const i32 token = row + i32(i);
        cp_async_16_zfill(SharedAddress(target + i * u32(sizeof(m.v[0]))),
                          values + i64(token < columns ? token : columns - 1) * p.y_stride, token < columns);
      }
    }
    cp_async_commit();
  }
  NINFERC_DEVICE void queries(CarryShared<S::dk, S::warps>& m, u32 at) const {
    if (at * chunk < u32(columns)) {
      rows(m.q, at, 1);
      record(m, at, t_bytes + x_coefficients, record_bytes);
    }
    cp_async_commit();
  }
};

// Left operand of a product over 16 columns of a transposed 16-row matrix held as accumulators (two neighbouring tiles).
struct SplitOperand {
  u32 high[4], low[4], rest[4];
  NINFERC_DEVICE SplitOperand(const f32 (&left)[4], const f32 (&right)[4], f32 scale,
                              f32 lift) {
    const SplitPair part[4] = {split_f16x2(left[0] * scale, left[1] * scale, lift),
                               split_f16x2(left[2] * scale, left[3] * scale, lift),
                               split_f16x2(right[0] * scale, right[1] * scale, lift),
                               split_f16x2(right[2] * scale, right[3] * scale, lift)};
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      high[i] = part[i].high;
      low[i] = part[i].low;
      rest[i] = part[i].rest;
    }
  }
};

// The state of a warp: accumulators of 16 rows × dk columns in units of 1 / unit, and the largest magnitude among them.
template <u32 tiles>
struct CarriedState {
  f32 h[tiles][4];
  f32 unit, largest;

  NINFERC_DEVICE void measure() {
    f32 most = 0.0f;
#pragma unroll
    for (u32 t = 0; t < tiles; ++t)
#pragma unroll
      for (u32 e = 0; e < 4; ++e) most = fmaxf(most, fabsf(h[t][e]));
    largest = warp_max(most);
  }
};

// Loads the slot's state (zero at the start of a sequence) and folds the pending records in, as decode does.
template <class S>
NINFERC_DEVICE void load_state(CarriedState<S::dk / 8>& state, const CarryOperands& p, const Slot& slot, u32 head,
                               u32 key_head, u32 row) {
  const u32 group = lane_id() / 4, column = lane_id() % 4 * 2;
  const f32* const source = p.recurrent + ((i64(slot.slot) * S::value_heads + head) * S::dv + row + group) * S::dk + column;
#pragma unroll
  for (u32 t = 0; t < S::dk / 8; ++t)
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      const f32x2 x = slot.length > 0 ? ld_global<f32x2>(source + h * 8 * S::dk + t * 8) : f32x2{0.0f, 0.0f};
      state.h[t][2 * h] = x.x;
      state.h[t][2 * h + 1] = x.y;
    }
  const i64 first = (i64(slot.parity) * p.slots + slot.slot) * p.records;
  for (i64 record = first; record < first + slot.pending; ++record) {
    const f32 alpha = ld_global<f32>(p.rec_alpha + record * S::value_heads + head);
    const f32* const k = p.rec_k + (record * S::key_heads + key_head) * S::dk + column;
    const f32* const u = p.rec_u + (record * S::value_heads + head) * S::dv + row + group;
    const f32 u0 = ld_global<f32>(u), u8_ = ld_global<f32>(u + 8);
#pragma unroll
    for (u32 t = 0; t < S::dk / 8; ++t) {
      const f32x2 x = ld_global<f32x2>(k + t * 8);
      state.h[t][0] = update_element(state.h[t][0], alpha, u0, x.x);
      state.h[t][1] = update_element(state.h[t][1], alpha, u0, x.y);
      state.h[t][2] = update_element(state.h[t][2], alpha, u8_, x.x);
      state.h[t][3] = update_element(state.h[t][3], alpha, u8_, x.y);
    }
  }
  state.unit = 1.0f;
  state.measure();
}

template <class S>
NINFERC_DEVICE void store_state(const CarriedState<S::dk / 8>& state, const CarryOperands& p, const Slot& slot, u32 head,
                                u32 row) {
  const u32 lane = opaque(lane_id()), group = lane / 4, column = lane % 4 * 2;
  f32* const target = p.recurrent + ((i64(slot.slot) * S::value_heads + head) * S::dv + row + group) * S::dk + column;
  const f32 scale = power_inverse(state.unit);
#pragma unroll
  for (u32 t = 0; t < S::dk / 8; ++t)
#pragma unroll
    for (u32 h = 0; h < 2; ++h)
      st_global(target + h * 8 * S::dk + t * 8, f32x2{state.h[t][2 * h] * scale, state.h[t][2 * h + 1] * scale});
}

// Vᵀ of this warp's rows as pairs of tokens: [token tile][row half], largest magnitude over the warp.
NINFERC_DEVICE f32 load_values(u32 (&v)[8][2], SharedAddress first, u32 pitch_bytes) {
  const u32 lane = opaque(lane_id());
  const u32 address = first.value + (lane / 16 * 8 + lane % 8) * pitch_bytes + lane / 8 % 2 * 16;
  u32 most = 0;
#pragma unroll
  for (u32 n = 0; n < 8; n += 2) {
    u32 r[4];  // token tile n rows 0-7, 8-15; token tile n + 1 likewise
    ldmatrix_x4_trans(r, SharedAddress(address + n * 8 * pitch_bytes));
    v[n][0] = r[0], v[n][1] = r[1], v[n + 1][0] = r[2], v[n + 1][1] = r[3];
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {  // magnitudes of bf16 order like integers
      const u32 low = r[i] << 16 & 0x7fff0000u, high = r[i] & 0x7fff0000u;
      most = most < low ? low : most;
      most = most < high ? high : most;
    }
  }
  return warp_max(bits_float(most));
}

template <class S>
NINFERC_DEVICE void carry(const CarryOperands& p) {
  NINFERC_DYNAMIC_SMEM(raw);
  using Shared = CarryShared<S::dk, S::warps>;
  Shared& m = *reinterpret_cast<Shared*>(raw);
  const u32 head = blockIdx.x / S::splits, key_head = head * S::key_heads / S::value_heads;
  const u32 first_row = blockIdx.x % S::splits * 16 * S::warps;
  const u32 warp = warp_id_uniform(), lane = lane_id(), group = lane / 4, pair = lane % 4;
  const u32 row = first_row + 16 * warp;
  grid_dependency_wait();
  const Slot slot = read_slot(p.lane_slot, p.lane_ncols, p.lane_len, p.slot_pending, p.slot_parity, 0);
  if (slot.columns == 0) return;
  const u32 chunks = (u32(slot.columns) + chunk - 1) / chunk;
  const TileSource<S> source{p, head, key_head, first_row, slot.columns};
  source.keys(m, 0);
  source.values(m, 0);
  source.queries(m, 0);

  CarriedState<S::dk / 8> state;
  load_state<S>(state, p, slot, head, key_head, row);

  // ldmatrix offsets of a lane: rows of a B operand with the summed axis contiguous, and with it along the rows
  constexpr u32 pitch = (S::dk + 8) * 2;
  const auto plain = [](u32 l) { return (l / 16 * 8 + l % 8) * pitch + l / 8 % 2 * 16; };
  const auto across = [](u32 l) { return l % 16 * pitch + l / 16 * 16; };

  for (u32 at = 0; at < chunks; ++at) {
    cp_async_wait<1>();  // all but the queries
    sync_block();
    source.keys(m, at + 1);
    const u32 key_rows = shared_address(m.k[at % 2]) + plain(opaque(lane));

    // scales, powers of two: the state to below 2^12; X to below 2^8, by the bound |X| <= |v| + √Dk |H|
    u32 v[8][2];
    const f32 v_largest = load_values(v, SharedAddress(&m.v[0][16 * warp]), Shared::v_pitch * 2);
    const f32 unit_inverse = power_inverse(state.unit);
    const f32 state_scale = power_scale<12>(state.largest);
    const f32 bound = v_largest + state.largest * unit_inverse * (0.5f + __fsqrt_rn(f32(S::dk)));
    const f32 x_scale = power_scale<8>(bound);
    const f32 relative = x_scale * power_inverse(state_scale) * unit_inverse;

    // 1. (K H₀ᵀ)ᵀ
    f32 x[8][4] = {};
#pragma unroll
    for (u32 s = 0; s < S::steps; ++s) {
      const SplitOperand h(state.h[2 * s], state.h[2 * s + 1], state_scale, 1.0f);
#pragma unroll
      for (u32 n = 0; n < 8; n += 2) {
        u32 b[4];
        ldmatrix_x4(b, SharedAddress(key_rows + n * 8 * pitch + s * 32));
        const u32 b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
        mma_m16n8k16_f16(x[n], h.low, b0);
        mma_m16n8k16_f16(x[n + 1], h.low, b1);
        mma_m16n8k16_f16(x[n], h.high, b0);
        mma_m16n8k16_f16(x[n + 1], h.high, b1);
      }
    }

    // 2. Xᵀ, scaled
    const u32 tokens = opaque(pair) * 2;
#pragma unroll
    for (u32 n = 0; n < 8; ++n) {
      const f32x2 value = ld_shared<f32x2>(&m.c.value[8 * n + tokens]);
      const f32x2 carried = ld_shared<f32x2>(&m.c.carry[8 * n + tokens]);
      const f32 factor[2] = {value.x * x_scale, value.y * x_scale};
      const f32 minus[2] = {-carried.x * relative, -carried.y * relative};
#pragma unroll
      for (u32 e = 0; e < 4; ++e) {
        const u32 t = e % 2;
        x[n][e] = __fmaf_rn(minus[t], x[n][e], factor[t] * (t ? bf16x2_hi(v[n][e / 2]) : bf16x2_lo(v[n][e / 2])));
      }
    }

    // 3. Ṽᵀ = Xᵀ + Xᵀ (T − I)ᵀ, in place of Xᵀ, last rows first.  Here and in step 5 small products are summed apart from
    // large ones and added once, rounded to nearest, since the accumulators of the matrix cores truncate; for the same
    // reason the ones on the diagonal of T stay out of the product.
    {
      const SplitOperand a[4] = {{x[0], x[1], 1.0f, split_lift}, {x[2], x[3], 1.0f, split_lift},
                                 {x[4], x[5], 1.0f, split_lift}, {x[6], x[7], 1.0f, split_lift}};
      const u32 t_block = shared_address(m.t) + opaque(lane) * 16;
#pragma unroll
      for (u32 down = 0; down < 4; ++down) {
        const u32 bi = 3 - down;
        f32 large[2][4] = {}, small[2][4] = {};
#pragma unroll
        for (u32 bj = 0; bj <= bi; ++bj) {
          const u32 block = t_block + block_index(bi, bj) * 2 * block_bytes;
          const u32x4 high = ld_shared<u32x4>(SharedAddress(block));
          const u32x4 low = ld_shared<u32x4>(SharedAddress(block + block_bytes));
          const u32 high0[2] = {high.x, high.y}, high1[2] = {high.z, high.w};
          const u32 low0[2] = {low.x, low.y}, low1[2] = {low.z, low.w};
          mma_m16n8k16_f16(small[0], a[bj].rest, high0);
          mma_m16n8k16_f16(small[1], a[bj].rest, high1);
          mma_m16n8k16_f16(large[0], a[bj].high, high0);
          mma_m16n8k16_f16(large[1], a[bj].high, high1);
          mma_m16n8k16_f16(small[0], a[bj].low, high0);
          mma_m16n8k16_f16(small[1], a[bj].low, high1);
          mma_m16n8k16_f16(small[0], a[bj].high, low0);
          mma_m16n8k16_f16(small[1], a[bj].high, low1);
        }
#pragma unroll
        for (u32 h = 0; h < 2; ++h)
#pragma unroll
          for (u32 e = 0; e < 4; ++e)
            x[2 * bi + h][e] = __fmaf_rn(__fmaf_rn(small[h][e], 1.0f / split_lift, large[h][e]), 1.0f / matrix_scale,
                                         x[2 * bi + h][e]);
      }
    }
    cp_async_wait<1>();  // this chunk's queries; the next keys may be on their way
    sync_block();
    source.values(m, at + 1);

    // 4. Oᵀ = (Q H₀ᵀ)ᵀ + Ṽᵀ Pᵀ
    const u32 query_rows = shared_address(m.q) + plain(opaque(lane));
    const u32 p_block = shared_address(m.p) + opaque(lane) * 16;
    f32 o[8][4] = {};
#pragma unroll
    for (u32 s = 0; s < S::steps; ++s) {
      u32 a[4];
#pragma unroll
      for (u32 i = 0; i < 4; ++i)
        a[i] = pack_f16x2(state.h[2 * s + i / 2][i % 2 * 2] * state_scale, state.h[2 * s + i / 2][i % 2 * 2 + 1] * state_scale);
#pragma unroll
      for (u32 n = 0; n < 8; n += 2) {
        u32 b[4];
        ldmatrix_x4(b, SharedAddress(query_rows + n * 8 * pitch + s * 32));
        const u32 b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
        mma_m16n8k16_f16(o[n], a, b0);
        mma_m16n8k16_f16(o[n + 1], a, b1);
      }
    }
#pragma unroll
    for (u32 n = 0; n < 8; ++n) {
      const f32x2 query = ld_shared<f32x2>(&m.c.query[8 * n + tokens]);
#pragma unroll
      for (u32 e = 0; e < 4; ++e) o[n][e] *= (e % 2 ? query.y : query.x) * relative * matrix_scale;
    }
#pragma unroll
    for (u32 bj = 0; bj < 4; ++bj) {
      const u32 a[4] = {pack_f16x2(x[2 * bj][0], x[2 * bj][1]), pack_f16x2(x[2 * bj][2], x[2 * bj][3]),
                        pack_f16x2(x[2 * bj + 1][0], x[2 * bj + 1][1]), pack_f16x2(x[2 * bj + 1][2], x[2 * bj + 1][3])};
#pragma unroll
      for (u32 bi = bj; bi < 4; ++bi) {
        const u32x4 b = ld_shared<u32x4>(SharedAddress(p_block + block_index(bi, bj) * block_bytes));
        const u32 b0[2] = {b.x, b.y}, b1[2] = {b.z, b.w};
        mma_m16n8k16_f16(o[2 * bi], a, b0);
        mma_m16n8k16_f16(o[2 * bi + 1], a, b1);
      }
    }
#pragma unroll
    for (u32 n = 0; n < 8; ++n) {
      const f32x2 write = ld_shared<f32x2>(&m.c.write[8 * n + tokens]);
#pragma unroll
      for (u32 e = 0; e < 4; ++e) x[n][e] *= e % 2 ? write.y : write.x;
    }
    const f32 decay = m.c.decay;
    const f32 o_scale = power_inverse(x_scale) * (1.0f / matrix_scale);
    {
      const u32 l = opaque(lane);
      u16* const place = &m.o[warp][l % 4 * 2][l / 4];
#pragma unroll
      for (u32 n = 0; n < 8; ++n)
#pragma unroll
        for (u32 e = 0; e < 4; ++e)
          place[(8 * n + e % 2) * Shared::o_pitch + e / 2 * 8] = f32_to_bf16(o[n][e] * o_scale).bits;
    }
    sync_block();
    source.queries(m, at + 1);
    {
      const u32 l = opaque(lane), part = l % 2 * 8;
      const u16* const place = &m.o[warp][l / 2][part];
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const u32 column = at * chunk + i * 16 + l / 2;
        if (column < u32(slot.columns))
          st_global(p.o + i64(column) * p.o_stride + head * S::dv + row + part,
                    ld_shared<u32x4>(place + i * 16 * Shared::o_pitch));
      }
    }

    // 5. H₁ = e^{γ_C} H₀ + (weighted Ṽ)ᵀ K
    const u32 key_columns = shared_address(m.k[at % 2]) + across(opaque(lane));
    const f32 unit = x_scale * f32(1 << key_exponent);
    const f32 keep = decay * fminf(unit * unit_inverse, 0x1p120f);
    const SplitOperand a[4] = {{x[0], x[1], 1.0f, split_lift}, {x[2], x[3], 1.0f, split_lift},
                               {x[4], x[5], 1.0f, split_lift}, {x[6], x[7], 1.0f, split_lift}};
#pragma unroll
    for (u32 s = 0; s < S::steps; ++s) {
      f32 large[2][4] = {}, small[2][4] = {};
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        u32 b[4];
        ldmatrix_x4_trans(b, SharedAddress(key_columns + j * 16 * pitch + s * 32));
        const u32 b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
        mma_m16n8k16_f16(small[0], a[j].rest, b0);
        mma_m16n8k16_f16(small[1], a[j].rest, b1);
        mma_m16n8k16_f16(large[0], a[j].high, b0);
        mma_m16n8k16_f16(large[1], a[j].high, b1);
        mma_m16n8k16_f16(small[0], a[j].low, b0);
        mma_m16n8k16_f16(small[1], a[j].low, b1);
      }
#pragma unroll
      for (u32 t = 0; t < 2; ++t)
#pragma unroll
        for (u32 e = 0; e < 4; ++e)
          state.h[2 * s + t][e] = __fmaf_rn(keep, state.h[2 * s + t][e], small[t][e] * (1.0f / split_lift)) + large[t][e];
    }
    state.unit = unit;
    state.measure();
  }
  store_state<S>(state, p, slot, head, row);
}

}  // namespace ninferc::gdn
