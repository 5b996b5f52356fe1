// First kernel of the chunked delta rule: everything that does not need the state, one block per chunk and value head.
#pragma once
#include <ninferc/base/grid.cuh>
#include <ninferc/base/mma.cuh>
#include <ninferc/base/warp.cuh>
#include <ninferc/gdn/chunk.cuh>

namespace ninferc::gdn {

constexpr u32 intra_threads = 128;

struct IntraOperands {
  const bf16* y;     // [columns, q | k | v]
  i32 y_stride;
  const f32* gates;  // [columns, g | beta]
  i32 gates_stride;
  const i32* lane_ncols;
  u8 *matrices, *rows;  // records [chunks, value heads], scaled rows [chunks, key heads]
};

template <u32 dk>
struct IntraShared {
  static constexpr u32 pitch = dk + 8;  // halves; an odd number of 16-byte units, so ldmatrix has no bank conflicts
  static constexpr u32 a_pitch = 68;
  alignas(16) u16 k[chunk][pitch], q[chunk][pitch];
  alignas(16) f32 a[chunk][a_pitch];  // A below the diagonal; becomes T
  f32x2 gamma[chunk];  // γ as a float and the rest
  f32 beta[chunk], key_factor[chunk], query_factor[chunk];
};

// Brings the rows of one operand to halves of norm about 2^8; row factor × half = normalised value.
template <u32 dk>
NINFERC_DEVICE void load_scaled(const bf16* first_row, i64 stride, i32 valid, u16 (&tile)[chunk][dk + 8],
                                f32 (&factor)[chunk], u8* copy) {
  constexpr u32 passes = chunk / (intra_threads / 16);
  const u32 part = threadIdx.x % 16 * 8;
  u32x4 raw[passes];
#pragma unroll
  for (u32 i = 0; i < passes; ++i) {
    const u32 row = i * (intra_threads / 16) + threadIdx.x / 16;
    raw[i] = u32x4{0, 0, 0, 0};
    if (i32(row) < valid && part < dk) raw[i] = ld_global<u32x4>(first_row + row * stride + part);
  }
#pragma unroll
  for (u32 i = 0; i < passes; ++i) {
    const u32 row = i * (intra_threads / 16) + threadIdx.x / 16;
    const u32 x[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
    f32 sum = 0.0f;
#pragma unroll
    for (u32 e = 0; e < 4; ++e) {
      sum = __fmaf_rn(bf16x2_lo(x[e]), bf16x2_lo(x[e]), sum);
      sum = __fmaf_rn(bf16x2_hi(x[e]), bf16x2_hi(x[e]), sum);
    }
    const f32 norm = l2_scale(warp_sum<16>(sum));
    // norm = m · 2^e with 1 <= m < 2: the halves are x · 2^(e+8), the factor is m · 2^-8
    const u32 biased = (float_bits(norm) >> 23) + u32(key_exponent);
    const f32 scale = bits_float(biased << 23);
    u32x4 scaled;
    scaled.x = pack_f16x2(bf16x2_lo(x[0]) * scale, bf16x2_hi(x[0]) * scale);
    scaled.y = pack_f16x2(bf16x2_lo(x[1]) * scale, bf16x2_hi(x[1]) * scale);
    scaled.z = pack_f16x2(bf16x2_lo(x[2]) * scale, bf16x2_hi(x[2]) * scale);
    scaled.w = pack_f16x2(bf16x2_lo(x[3]) * scale, bf16x2_hi(x[3]) * scale);
    if (part < dk) {
      st_shared(&tile[row][part], scaled);
      if (copy != nullptr) st_global(copy + (row * dk + part) * 2, scaled);
    }
    if (part == 0) factor[row] = norm * power_inverse(scale);
  }
}

// Product of rows [16·bi, +16) of `left` with rows [16·bj, +16) of `right` over dk.
template <u32 dk>
NINFERC_DEVICE void block_product(f32 (&d)[2][4], const u16 (&left)[chunk][dk + 8], const u16 (&right)[chunk][dk + 8],
                                  u32 bi, u32 bj) {
  const u32 lane = lane_id();
  const SharedAddress a_row(&left[16 * bi + lane % 16][lane / 16 * 8]);
  const SharedAddress b_row(&right[16 * bj + lane / 16 * 8 + lane % 8][lane / 8 % 2 * 8]);
#pragma unroll
  for (u32 s = 0; s < dk / 16; ++s) {
    u32 a[4], b[4];
    ldmatrix_x4(a, SharedAddress(a_row.value + s * 32));
    ldmatrix_x4(b, SharedAddress(b_row.value + s * 32));
    const u32 b0[2] = {b[0], b[1]}, b1[2] = {b[2], b[3]};
    mma_m16n8k16_f16(d[0], a, b0);
    mma_m16n8k16_f16(d[1], a, b1);
  }
}

NINFERC_DEVICE f32x2 two_floats(f64 x) { return f32x2{f32(x), f32(x - f64(f32(x)))}; }
// e^(a − b), the error of the difference being relative to the difference
NINFERC_DEVICE f32 decay_between(f32x2 a, f32x2 b) { return expf((a.x - b.x) + (a.y - b.y)); }

// Inverts I + A for the 32x32 block of the diagonal at `base`, in place; lane c computes column c of T by forward
// substitution, T_ic = δ_ic − Σ_{j<i} A_ij T_jc, j ascending.
template <u32 pitch>
NINFERC_DEVICE void invert_diagonal(f32 (&a)[chunk][pitch], u32 base) {
  const u32 c = lane_id();
  f32 t[32];
#pragma unroll
  for (u32 i = 0; i < 32; ++i) {
    f32 sum = i == c ? 1.0f : 0.0f;
#pragma unroll
    for (u32 j = 0; j < i; j += 4) {
      const f32x4 row = ld_shared<f32x4>(&a[base + i][base + j]);
      sum = __fmaf_rn(-row.x, t[j], sum);
      if (j + 1 < i) sum = __fmaf_rn(-row.y, t[j + 1], sum);
      if (j + 2 < i) sum = __fmaf_rn(-row.z, t[j + 2], sum);
      if (j + 3 < i) sum = __fmaf_rn(-row.w, t[j + 3], sum);
    }
    t[i] = sum;
  }
  sync_warp();
#pragma unroll
  for (u32 i = 0; i < 32; ++i) a[base + i][base + c] = t[i];
}

// Eight neighbouring values of row r, columns c … c + 7, of the 32x32 product left · right.
template <u32 pitch>
NINFERC_DEVICE void product_row(f32 (&sum)[8], const f32 (&a)[chunk][pitch], u32 left_row, u32 left_column,
                                u32 right_row, u32 right_column) {
#pragma unroll
  for (u32 e = 0; e < 8; ++e) sum[e] = 0.0f;
#pragma unroll 8
  for (u32 k = 0; k < 32; ++k) {
    const f32 l = a[left_row][left_column + k];
    const f32x4 x = ld_shared<f32x4>(&a[right_row + k][right_column]);
    const f32x4 y = ld_shared<f32x4>(&a[right_row + k][right_column + 4]);
    sum[0] = __fmaf_rn(l, x.x, sum[0]);
    sum[1] = __fmaf_rn(l, x.y, sum[1]);
    sum[2] = __fmaf_rn(l, x.z, sum[2]);
    sum[3] = __fmaf_rn(l, x.w, sum[3]);
    sum[4] = __fmaf_rn(l, y.x, sum[4]);
    sum[5] = __fmaf_rn(l, y.y, sum[5]);
    sum[6] = __fmaf_rn(l, y.z, sum[6]);
    sum[7] = __fmaf_rn(l, y.w, sum[7]);
  }
}

template <u32 dk, u32 key_heads, u32 value_heads>
NINFERC_DEVICE void intra(const IntraOperands& p) {
  static_assert(dk % 16 == 0 && dk <= 128, "a key head has 16 to 128 values, a multiple of 16");
  NINFERC_DYNAMIC_SMEM(raw);
  IntraShared<dk>& m = *reinterpret_cast<IntraShared<dk>*>(raw);
  const u32 at = blockIdx.x, head = blockIdx.y;
  const u32 key_head = head * key_heads / value_heads;
  const u32 warp = warp_id_uniform(), lane = lane_id(), group = lane / 4, pair = lane % 4;
  grid_dependency_wait();
  const i32 columns = ld_global<i32>(p.lane_ncols);
  const i32 valid = columns - i32(at * chunk);  // rows of this chunk that exist; the others act as g = β = k = q = 0
  if (valid <= 0) return;

  const bf16* const row = p.y + i64(at) * chunk * p.y_stride;
  const bool copies = head % (value_heads / key_heads) == 0;
  u8* const copy = p.rows + (i64(at) * key_heads + key_head) * rows_bytes(dk);
  load_scaled<dk>(row + key_heads * dk + key_head * dk, p.y_stride, valid, m.k, m.key_factor, copies ? copy : nullptr);
  load_scaled<dk>(row + key_head * dk, p.y_stride, valid, m.q, m.query_factor,
                  copies ? copy + chunk * dk * 2 : nullptr);
  if (warp == 0) {
    // γ: inclusive sums of g, two rows per lane.  In FP64, and kept as two floats, since the error of a sum of 64 is a
    // relative error of every e^γ.
    const f32* const gate = p.gates + (i64(at) * chunk + 2 * lane) * p.gates_stride + head;
    f32 g[2] = {0.0f, 0.0f}, beta[2] = {0.0f, 0.0f};
#pragma unroll
    for (u32 i = 0; i < 2; ++i) {
      if (i32(2 * lane + i) < valid) {
        g[i] = ld_global<f32>(gate + i * p.gates_stride);
        beta[i] = ld_global<f32>(gate + i * p.gates_stride + value_heads);
      }
    }
    f64 sum = f64(g[0]) + f64(g[1]);
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
      const f64 below = shfl_up(sum, step);
      if (lane >= step) sum += below;
    }
    const f64 before = shfl_up(sum, 1);
    m.gamma[2 * lane] = two_floats((lane > 0 ? before : 0.0) + f64(g[0]));
    m.gamma[2 * lane + 1] = two_floats(sum);
    m.beta[2 * lane] = beta[0];
    m.beta[2 * lane + 1] = beta[1];
  }
  sync_block();

  u8* const record = p.matrices + (i64(at) * value_heads + head) * record_bytes;
  Coefficients* const c = reinterpret_cast<Coefficients*>(record + t_bytes);
  const f32 root = __frsqrt_rn(f32(dk));
  if (threadIdx.x < chunk) {
    const u32 i = threadIdx.x;
    const f32 beta = m.beta[i];
    const f32 grown = decay_between(m.gamma[i], f32x2{0.0f, 0.0f}), left = decay_between(m.gamma[chunk - 1], m.gamma[i]);
    st_global(&c->value[i], beta);
    st_global(&c->carry[i], beta * grown * m.key_factor[i]);
    st_global(&c->query[i], grown * root * m.query_factor[i]);
    st_global(&c->write[i], left * m.key_factor[i] * f32(1 << key_exponent));
    if (i == chunk - 1) st_global(&c->decay, grown);
  }
  for (u32 block = warp; block < chunk_blocks; block += 4) {
    const u32 bi = block_row(block), bj = block - block_index(bi, 0);
    f32 d[2][4] = {};
    block_product<dk>(d, m.k, m.k, bi, bj);
#pragma unroll
    for (u32 h = 0; h < 2; ++h)
#pragma unroll
      for (u32 e = 0; e < 4; ++e) {
        const u32 i = 16 * bi + group + e / 2 * 8, j = 16 * bj + 8 * h + 2 * pair + e % 2;
        f32 value = 0.0f;
        if (i > j) value = m.beta[i] * (m.key_factor[i] * m.key_factor[j]) * d[h][e] * decay_between(m.gamma[i], m.gamma[j]);
        m.a[i][j] = value;
      }
  }
  sync_block();

  if (warp < 2) {
    invert_diagonal(m.a, 32 * warp);
  } else {
    for (u32 block = warp - 2; block < chunk_blocks; block += 2) {
      const u32 bi = block_row(block), bj = block - block_index(bi, 0);
      f32 d[2][4] = {};
      block_product<dk>(d, m.q, m.k, bi, bj);
#pragma unroll
      for (u32 h = 0; h < 2; ++h)
#pragma unroll
        for (u32 e = 0; e < 4; ++e) {
          const u32 i = 16 * bi + group + e / 2 * 8, j = 16 * bj + 8 * h + 2 * pair + e % 2;
          const f32 value = (root * m.query_factor[i]) * m.key_factor[j] * d[h][e];
          d[h][e] = i >= j ? value * decay_between(m.gamma[i], m.gamma[j]) * matrix_scale : 0.0f;
        }
      st_global(record + t_bytes + sizeof(Coefficients) + block * block_bytes + lane * 16,
                u32x4{pack_f16x2(d[0][0], d[0][1]), pack_f16x2(d[1][0], d[1][1]), pack_f16x2(d[0][2], d[0][3]),
                      pack_f16x2(d[1][2], d[1][3])});
    }
  }
  sync_block();

  // T₂₁ = −T₂₂ (A₂₁ T₁₁); the upper right quadrant of `a` is free and holds the inner product
  const u32 r = threadIdx.x / 4, c8 = threadIdx.x % 4 * 8;
  f32 sum[8];
  product_row(sum, m.a, 32 + r, 0, 0, c8);
#pragma unroll
  for (u32 e = 0; e < 8; ++e) m.a[r][32 + c8 + e] = sum[e];
  sync_block();
  product_row(sum, m.a, 32 + r, 32, 0, 32 + c8);
#pragma unroll
  for (u32 e = 0; e < 8; ++e) m.a[32 + r][c8 + e] = -sum[e];
  sync_block();

  for (u32 block = warp; block < chunk_blocks; block += 4) {
    const u32 bi = block_row(block), bj = block - block_index(bi, 0);
    SplitPair part[4];
#pragma unroll
    for (u32 h = 0; h < 2; ++h)
#pragma unroll
      for (u32 w = 0; w < 2; ++w) {
        const u32 i = 16 * bi + 8 * h + group, j = 16 * bj + 8 * w + 2 * pair;
        f32x2 t = ld_shared<f32x2>(&m.a[i][j]);
        if (i == j) t.x = 0.0f;  // T − I
        if (i == j + 1) t.y = 0.0f;
        part[2 * h + w] = split_f16x2(t.x * matrix_scale, t.y * matrix_scale, split_lift);
      }
    u8* const out = record + block * 2 * block_bytes + lane * 16;
    st_global(out, u32x4{part[0].high, part[1].high, part[2].high, part[3].high});
    st_global(out + block_bytes, u32x4{part[0].low, part[1].low, part[2].low, part[3].low});
  }
}

}  // namespace ninferc::gdn
