// Weights of a decode product: from global memory through one warp's ring in shared memory to matrix fragments.
#pragma once
#include <ninferc/base/async.cuh>
#include <ninferc/base/mma.cuh>
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>
#include <ninferc/codec/unpack.cuh>
#include <ninferc/linear/geometry.cuh>

namespace ninferc {

// Copies the weights of one chunk after the other.  A slab (64 bytes of each of 16 rows) is two copies per lane: piece
// lane % 4 of rows lane / 4 and lane / 4 + 8.
template <class G>
struct WeightCopier {
  static constexpr Format format = G::format;
  const u8* codes;
  const u8* high;
  const u8* scales;
  u32 lane;
  // Set for a tile:
  u32 first_subtile;
  const u8* tile_codes;   // row lane / 4 of matrix tile 0, with the piece's offset
  const u8* tile_high;    // of this lane's first copy of each kind
  const u8* tile_scales;

  NINFERC_DEVICE WeightCopier(const u8* codes_, const u8* high_, const u8* scales_)
      : codes(codes_), high(high_), scales(scales_), lane(lane_id()) {}

  static NINFERC_DEVICE u32 clamped(u32 output) {  // rows past the end repeat the last one; nobody stores them
    if constexpr (G::whole_rows) return output;
    else return output < G::outputs ? output : G::outputs - 1;
  }
  NINFERC_DEVICE u32 weight_row(u32 m, u32 r) const {
    const u32 subtile = first_subtile + (G::swiglu ? m / 2 : m);
    return clamped(G::output_row(subtile, r)) + (G::swiglu && m % 2 ? G::n / 2 : 0);
  }
  NINFERC_DEVICE void set_tile(u32 tile) {
    first_subtile = tile * G::subtiles;
    if constexpr (G::whole_rows) tile_codes = codes + weight_row(0, lane / 4) * G::row_bytes + lane % 4 * 16;
    if constexpr (G::high_pitch != 0) {
      constexpr u32 pieces = G::Traits::high_bytes_128 / 16;
      const u32 row = lane / pieces % 16, m = lane / (16 * pieces);
      tile_high = high + u64(weight_row(m, row)) * (G::chunks * G::segments * G::Traits::high_bytes_128) +
                  lane % pieces * 16;
    }
    if constexpr (format == Format::nvfp4) {
      const u32 m = lane / 8, piece = lane % 8;
      const u32 row = weight_row(m % G::mtiles, 0);
      tile_scales = scales + nvfp4_scale_offset(row, piece / 4 * 4, G::k) + piece % 4 * 16;
    } else if constexpr (G::Traits::grouped_int) {
      tile_scales = scales + u64(weight_row(lane / 16 % G::mtiles, lane % 16)) * (G::groups * 2);
    }
  }

  // Chunk `number` of the row (counted over all segments) into the stage at `stage`.
  NINFERC_DEVICE void copy(u32 stage, u32 number) const {
    const u32 begin = G::chunk_begin(number), end = G::chunk_end(number);
#pragma unroll
    for (u32 m = 0; m < G::mtiles; ++m) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        const u8* row = tile_codes + (G::rows_of_mtile(m) + half * G::rows_of_half) * G::row_bytes;
        if constexpr (!G::whole_rows) row = codes + weight_row(m, lane / 4 + 8 * half) * G::row_bytes + lane % 4 * 16;
        row += begin / 8 * (G::Traits::code_bytes_128 / 16);
#pragma unroll
        for (u32 slab = 0; slab < G::slabs; ++slab) {
          const u32 to = stage + (m * G::slabs + slab) * 1024 + (lane / 4 + 8 * half) * 64 + stored_piece() * 16;
          copy_codes(to, row + slab * 64, begin + slab * (128 / G::slabs), end);
        }
      }
    }
    if constexpr (G::high_pitch != 0) {
      constexpr u32 pieces = G::Traits::high_bytes_128 / 16;
#pragma unroll
      for (u32 base = 0; base < G::mtiles * 16 * pieces; base += 32) {
        const u32 index = base + lane, row = index / pieces;
        const u8* from = tile_high + number * G::Traits::high_bytes_128;
        if (base > 0) {
          from = high + u64(weight_row(row / 16, row % 16)) * (G::chunks * G::segments * G::Traits::high_bytes_128) +
                 lane % pieces * 16 + number * G::Traits::high_bytes_128;
        }
        if (G::mtiles * 16 * pieces % 32 == 0 || index < G::mtiles * 16 * pieces)
          cp_async_16(stage + G::high_offset + row * G::high_pitch + lane % pieces * 16, from);
      }
    }
    if constexpr (format == Format::nvfp4) {
      if (G::mtiles == 4 || lane < 8 * G::mtiles) {
        const u32 to = stage + G::scale_offset + lane * 16;
        const u8* from = tile_scales + begin / 64 * 512;
        if constexpr (G::whole_k) {
          cp_async_16(to, from);
        } else {
          const bool valid = begin + lane % 8 / 4 * 64 < end;
          cp_async_16_zfill(to, valid ? from : scales, valid);
        }
      }
    } else if constexpr (G::Traits::grouped_int) {
#pragma unroll
      for (u32 base = 0; base < G::mtiles * 16; base += 32) {
        const u32 index = base + lane;
        const u8* from = tile_scales + number * G::scale_row;
        if (base > 0) from = scales + u64(weight_row(index / 16, index % 16)) * (G::groups * 2) + number * G::scale_row;
        if (G::mtiles % 2 == 0 || index < G::mtiles * 16)
          cp_async_small<G::scale_row>(stage + G::scale_offset + index * G::scale_row, from);
      }
    }
  }

 private:
  // Lanes read eight bytes of a 32-byte group of grouped formats: every other pair of rows swaps its groups, so that the
  // reads are free of bank conflicts.
  NINFERC_DEVICE u32 stored_piece() const {
    if constexpr (G::Traits::grouped_int) return lane % 4 ^ (lane / 8 % 2 * 2);
    else return lane % 4;
  }
  // The lane's piece of a slab that begins at column `begin`; what lies past column `end` reads as zero.
  NINFERC_DEVICE void copy_codes(u32 to, const u8* from, u32 begin, u32 end) const {
    constexpr u32 columns_8 = 1024 / G::Traits::code_bytes_128;  // columns in eight bytes
    if constexpr (G::whole_k) {
      cp_async_16(to, from);
    } else {
      const u32 column = begin + lane % 4 * 2 * columns_8;
      if constexpr (G::aligned_16) {
        cp_async_16_zfill(to, column < end ? from : codes, column < end);
      } else {
#pragma unroll
        for (u32 half = 0; half < 2; ++half) {
          if (column + half * columns_8 < end) cp_async_small<8>(to + 8 * half, from + 8 * half);
          else st_shared<u64>(to + 8 * half, 0);
        }
      }
    }
  }
};

// Multiplies chunks in shared memory.  Step i (0..3) of a chunk is 32 columns: eight per lane, two matrix instructions.
template <class G>
struct ChunkProduct {
  static constexpr Format format = G::format;
  static constexpr u32 group_steps = format == Format::w8g32 ? 1 : G::Traits::grouped_int ? 2 : 1;
  f32 sum[G::mtiles][G::ntiles][4];

  NINFERC_DEVICE void clear() {
#pragma unroll
    for (u32 m = 0; m < G::mtiles; ++m)
#pragma unroll
      for (u32 t = 0; t < G::ntiles; ++t)
#pragma unroll
        for (u32 e = 0; e < 4; ++e) sum[m][t][e] = 0;
  }

  // `x`: this lane's activations of column 0 of each tile of eight (x_pitch apart: columns), at the chunk.
  NINFERC_DEVICE void add(u32 stage, u32 x) {
    Rows rows[G::mtiles];
#pragma unroll
    for (u32 m = 0; m < G::mtiles; ++m) rows[m].load(stage, m);
#pragma unroll
    for (u32 first = 0; first < 4; first += group_steps) {
      u32 a[G::mtiles][group_steps][2][4];
#pragma unroll
      for (u32 s = 0; s < group_steps; ++s)
#pragma unroll
        for (u32 m = 0; m < G::mtiles; ++m) rows[m].unpack(first + s, a[m][s]);
#pragma unroll
      for (u32 t = 0; t < G::ntiles; ++t) {
        u32x4 b[group_steps];
#pragma unroll
        for (u32 s = 0; s < group_steps; ++s) b[s] = ld_shared<u32x4>(x + t * 8 * G::x_pitch + (first + s) * 64);
#pragma unroll
        for (u32 m = 0; m < G::mtiles; ++m) {
          if constexpr (G::Traits::grouped_int) {
            f32 part[4] = {0, 0, 0, 0};
#pragma unroll
            for (u32 s = 0; s < group_steps; ++s) multiply(part, a[m][s], b[s]);
            const f32x2 scale = rows[m].scale(first);
            sum[m][t][0] = fmaf(part[0], scale.x, sum[m][t][0]);
            sum[m][t][1] = fmaf(part[1], scale.x, sum[m][t][1]);
            sum[m][t][2] = fmaf(part[2], scale.y, sum[m][t][2]);
            sum[m][t][3] = fmaf(part[3], scale.y, sum[m][t][3]);
          } else {
            multiply(sum[m][t], a[m][0], b[0]);
          }
        }
      }
    }
  }

 private:
  static NINFERC_DEVICE void multiply(f32 (&d)[4], const u32 (&a)[2][4], const u32x4& b) {
    const u32 a0[4] = {a[0][0], a[1][0], a[0][1], a[1][1]}, b0[2] = {b.x, b.y};
    const u32 a1[4] = {a[0][2], a[1][2], a[0][3], a[1][3]}, b1[2] = {b.z, b.w};
    mma_m16n8k16_bf16(d, a0, b0);
    mma_m16n8k16_bf16(d, a1, b1);
  }

  // One lane's share of a matrix tile: rows lane / 4 and lane / 4 + 8 (index `half`).
  struct Rows {
    u32x4 words[2][G::slabs];
    u32 high[2][2];
    u32 scales[2][2];

    NINFERC_DEVICE void load(u32 stage, u32 m) {
      const u32 group = lane_id() / 4, pair = lane_id() % 4;
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        const u32 row = group + 8 * half;
#pragma unroll
        for (u32 slab = 0; slab < G::slabs; ++slab) {
          const u32 at = stage + (m * G::slabs + slab) * 1024 + row * 64;
          if constexpr (G::Traits::grouped_int) {
            const u32 swap = group / 2 % 2 * 32;
            const u32x2 g0 = ld_shared<u32x2>(at + swap + pair * 8), g1 = ld_shared<u32x2>(at + (swap ^ 32) + pair * 8);
            words[half][slab] = u32x4{g0.x, g0.y, g1.x, g1.y};
          } else {
            words[half][slab] = ld_shared<u32x4>(at + pair * 16);
          }
        }
        const u32 high_row = stage + G::high_offset + (m * 16 + row) * G::high_pitch;
        if constexpr (format == Format::q5g64) {
          high[half][0] = ld_shared<u16>(high_row + pair * 2);
          high[half][1] = ld_shared<u16>(high_row + 8 + pair * 2);
        } else if constexpr (format == Format::q6g64) {
          high[half][0] = ld_shared<u32>(high_row + pair * 4);
          high[half][1] = ld_shared<u32>(high_row + 16 + pair * 4);
        }
        const u32 scale_row = stage + G::scale_offset + m * G::scale_bytes + row * G::scale_row;
        if constexpr (format == Format::w8g32) {
          const u32x2 four = ld_shared<u32x2>(scale_row);
          scales[half][0] = four.x;
          scales[half][1] = four.y;
        } else if constexpr (G::Traits::grouped_int) {
          scales[half][0] = ld_shared<u32>(scale_row);
        } else if constexpr (format == Format::nvfp4) {
          unpack_nvfp4_scales(ld_shared<u16>(scale_row + pair / 2 * 64 + pair % 2 * 2), scales[half][0], scales[half][1]);
        }
      }
    }

    NINFERC_DEVICE void unpack(u32 step, u32 (&out)[2][4]) const {
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        const u32x4& slab = words[half][G::slabs == 4 ? step : G::slabs == 2 ? step / 2 : 0];
        const u32 word[4] = {slab.x, slab.y, slab.z, slab.w};
        if constexpr (format == Format::bf16) {
#pragma unroll
          for (u32 i = 0; i < 4; ++i) out[half][i] = word[i];
        } else if constexpr (format == Format::q4g64) {
          unpack_q4(word[step], out[half]);
        } else if constexpr (format == Format::q5g64) {
          unpack_q5(word[step], step % 2 ? high[half][step / 2] >> 8 : high[half][step / 2], out[half]);
        } else if constexpr (format == Format::q6g64) {
          if (step % 2) unpack_q6<2>(word[step], high[half][step / 2], out[half]);
          else unpack_q6<0>(word[step], high[half][step / 2], out[half]);
        } else if constexpr (format == Format::w8g32) {
          unpack_w8(word[step % 2 * 2], word[step % 2 * 2 + 1], out[half]);
        } else if constexpr (format == Format::nvfp4) {
          unpack_nvfp4(word[step], scales[half][step / 2], out[half]);
        } else {
          unpack_fp8(word[step % 2 * 2], word[step % 2 * 2 + 1], out[half]);
        }
      }
    }

    // Scales of the group that begins at step `step`, for the two rows.
    NINFERC_DEVICE f32x2 scale(u32 step) const {
      if constexpr (format == Format::w8g32) return pick(step / 2, step % 2);
      else return pick(0, step / 2);
    }
    NINFERC_DEVICE f32x2 pick(u32 word, u32 upper) const {
      return upper ? f32x2{f16x2_hi(scales[0][word]), f16x2_hi(scales[1][word])}
                   : f32x2{f16x2_lo(scales[0][word]), f16x2_lo(scales[1][word])};
    }
  };
};

}  // namespace ninferc
