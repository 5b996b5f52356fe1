// Decode products of grouped integers on the integer matrix units: sums of a group are exact.
//
// Activations.  64 neighbouring activations of a column share a power of two, which the largest of them chooses: x = unit * q
// with a whole q of 22 bits, sign included.  An x of at least 2^-13 of the largest keeps all its bits; what a smaller one
// loses is below 2^-21 of the largest.  A group with an infinity or a NaN has a NaN for its unit, and so have its sums.
// q = p0 + 2^8 p1 + 2^16 p2 with digits of a signed byte: three planes.
//
// A product's matrix tile has 16 rows, the 32 columns of K of a step, and in its eight columns the digits of two columns of
// activations: p0, p1, p2 and p2 again.  Lane pair 0 and 2 receive the sums of p0 and p1, pairs 1 and 3 those of p2 (and
// those again, which count for nothing); each adds up its part over the groups of a slice, and the two meet at its end.
//
// A column's 128 activations in shared memory: of each group of 64 the planes, of each plane four lanes' 16 bytes (eight
// weights' columns of one step, eight of the next; in the order of unpack.cuh), then the units of both groups.
#pragma once
#include <ninferc/base/mma.cuh>
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>
#include <ninferc/codec/unpack.cuh>
#include <ninferc/linear/geometry.cuh>

namespace ninferc {

namespace integers {
constexpr u32 plane_bytes = 64, group_bytes = 3 * plane_bytes, unit_offset = 2 * group_bytes;
constexpr u32 q_bits = 21;              // besides the sign
constexpr u32 smallest_exponent = 27;   // biased, of a group's largest: below, units would leave f32
constexpr f32 digits = 0x1p23f + 0x208080;  // added to q, leaves q + 0x208080 in the mantissa: its bytes are the digits, moved

// Bytes 0, 1, 2 of four words as three words, made digits.
NINFERC_DEVICE void planes_of(const u32 (&word)[4], u32 (&plane)[3]) {
  const u32 low = prmt(word[0], word[1], 0x5140), high = prmt(word[2], word[3], 0x5140);
  plane[0] = prmt(low, high, 0x5410) ^ 0x80808080u;
  plane[1] = prmt(low, high, 0x7632) ^ 0x80808080u;
  plane[2] = (prmt(prmt(word[0], word[1], 0x0062), prmt(word[2], word[3], 0x0062), 0x5410) + 0x60606060u) ^ 0x80808080u;
}
}  // namespace integers

// Eight activations of piece `q` (0..15) of a chunk, to their column's place `at`; eight neighbouring lanes have the pieces of
// a group, and all lanes of the warp call.  `mine`: this lane's piece exists.
template <class G>
NINFERC_DEVICE void put_digits(u32 at, u32 q, u32x4 x, bool mine) {
  const u32 pairs[4] = {x.x, x.y, x.z, x.w};
  u32 largest = 0;  // exponent in the top byte; what is below does not matter
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    const u32 even = pairs[i] << 17, odd = pairs[i] << 1;
    largest = largest > even ? largest : even;
    largest = largest > odd ? largest : odd;
  }
#pragma unroll
  for (u32 step = 1; step < 8; step *= 2) {
    const u32 other = shfl_xor(largest, step);
    largest = largest > other ? largest : other;
  }
  const u32 exponent = largest >> 24;
  const u32 limited = exponent > integers::smallest_exponent ? exponent : integers::smallest_exponent;
  const f32 factor = bits_float((254 + integers::q_bits - 1 - limited) << 23);
  u32 words[2][4];  // those of the first and of the second step's bytes of a matrix fragment
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    const u32 even = float_bits(fmaf(bits_float(pairs[i] << 16), factor, integers::digits));
    const u32 odd = float_bits(fmaf(bits_float(pairs[i] & 0xffff0000u), factor, integers::digits));
    if constexpr (G::Traits::nibbles) {
      words[0][i] = even;
      words[1][i] = odd;
    } else {
      words[i / 2][i % 2 * 2] = even;
      words[i / 2][i % 2 * 2 + 1] = odd;
    }
  }
  u32 first[3], second[3];
  integers::planes_of(words[0], first);
  integers::planes_of(words[1], second);
  if (!mine) return;
  const u32 slot = G::piece_slot(q), step = slot / 4, group = step / 2;
#pragma unroll
  for (u32 p = 0; p < 3; ++p)
    st_shared(at + group * integers::group_bytes + p * integers::plane_bytes + slot % 4 * 16 + step % 2 * 8, u32x2{first[p], second[p]});
  constexpr u32 scale = integers::q_bits - 1 + integer_shift<G::format>;
  if (q % 8 == 0) {
    const u32 unit = exponent == 255 ? 0x7fc00000u : (limited - scale) << 23;
    st_shared(at + integers::unit_offset + group * 4, unit);
  }
}

// Sums of a warp's slice.  Of other formats: nothing.
template <class G, bool integer = G::Traits::grouped_int>
struct IntegerSums {};
template <class G>
struct IntegerSums<G, true> {
  static constexpr u32 tiles = ceil_div(G::bucket, 2u);  // of two columns
  static constexpr u32 group_steps = G::format == Format::w8g32 ? 1 : 2;
  f32 part[G::mtiles][tiles][2];  // rows lane / 4 and lane / 4 + 8, column lane % 4 / 2 of each tile

  NINFERC_DEVICE void clear() {
#pragma unroll
    for (u32 m = 0; m < G::mtiles; ++m)
#pragma unroll
      for (u32 j = 0; j < tiles; ++j) part[m][j][0] = part[m][j][1] = 0;
  }

  // Where in a chunk of activations this lane reads.
  static NINFERC_DEVICE u32 lane_offset() {
    const u32 lane = lane_id(), plane = lane / 4 % 4;
    return lane / 16 % G::bucket * G::x_pitch + (plane < 2 ? plane : 2) * integers::plane_bytes + lane % 4 * 16;
  }

  template <class Rows>
  NINFERC_DEVICE void add(const Rows (&rows)[G::mtiles], u32 x) {
    const u32 units = x - lane_offset() + lane_id() % 4 / 2 % G::bucket * G::x_pitch + integers::unit_offset;
    const i32 high = lane_id() % 2 ? 0 : 256;  // of p1 over p0
    // Units are made for codes moved up as those of the format whose activations are staged.
    constexpr f32 moved = f32(1u << integer_shift<G::x_format>) / f32(1u << integer_shift<G::format>);
#pragma unroll
    for (u32 group = 0; group < 2; ++group) {
      u32 a[G::mtiles][2][4];
#pragma unroll
      for (u32 s = 0; s < 2; ++s)
#pragma unroll
        for (u32 m = 0; m < G::mtiles; ++m) rows[m].bytes(group * 2 + s, a[m][s]);
#pragma unroll
      for (u32 j = 0; j < tiles; ++j) {
        const u32x4 digits = ld_shared<u32x4>(x + j * 2 * G::x_pitch + group * integers::group_bytes);
        f32 unit = ld_shared<f32>(units + j * 2 * G::x_pitch + group * 4);
        if constexpr (moved != 1) unit *= moved;
        const u32 b[2][2] = {{digits.x, digits.y}, {digits.z, digits.w}};
#pragma unroll
        for (u32 first = 0; first < 2; first += group_steps) {
          i32 d[G::mtiles][4] = {};
#pragma unroll
          for (u32 s = first; s < first + group_steps; ++s)
#pragma unroll
            for (u32 m = 0; m < G::mtiles; ++m) mma_m16n8k32_s8(d[m], a[m][s], b[s]);
#pragma unroll
          for (u32 m = 0; m < G::mtiles; ++m) {
            const f32x2 scale = rows[m].scale(group * 2 + first);
            part[m][j][0] = fmaf(f32(d[m][1] * high + d[m][0]), scale.x * unit, part[m][j][0]);
            part[m][j][1] = fmaf(f32(d[m][3] * high + d[m][2]), scale.y * unit, part[m][j][1]);
          }
        }
      }
    }
  }

  // The sums as units of eight columns have them.
  NINFERC_DEVICE void settle(f32 (&sum)[G::mtiles][G::ntiles][4]) const {
    const u32 lane = lane_id(), pair = lane % 4;
#pragma unroll
    for (u32 m = 0; m < G::mtiles; ++m)
#pragma unroll
      for (u32 t = 0; t < G::ntiles; ++t)
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
          sum[m][t][2 * half] = sum[m][t][2 * half + 1] = 0;
#pragma unroll
          for (u32 j = 0; j < 4; ++j) {
            if (t * 4 + j >= tiles) break;
            const f32 mine = part[m][t * 4 + j][half], other = shfl_xor(mine, 1);
            const f32 total = fmaf(pair % 2 ? mine : other, 0x1p16f, pair % 2 ? other : mine);
            const f32 left = shfl(total, lane - pair), right = shfl(total, lane - pair + 2);
            if (pair == j) {
              sum[m][t][2 * half] = left;
              sum[m][t][2 * half + 1] = right;
            }
          }
        }
  }
};

}  // namespace ninferc
