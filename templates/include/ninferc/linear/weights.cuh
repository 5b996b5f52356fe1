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

template <bool small>
struct OffsetType { using Type = u32; };
template <>
struct OffsetType<false> { using Type = u64; };

// Copies the weights of one chunk after the other.  A slab (64 bytes of each of 16 rows) is two copies per lane: piece
// lane % 4 of rows lane / 4 and lane / 4 + 8.  Offsets into a plane are 32-bit where the plane allows: an add then takes one
// instruction, and there is an add for every copy.
template <class G>
struct WeightCopier {
  static constexpr Format format = G::format;
  static constexpr u32 high_pieces = G::Traits::high_bytes_128 / 16;
  static constexpr u64 high_row_bytes = u64(G::chunks) * G::segments * G::Traits::high_bytes_128;
  using Offset = typename OffsetType<(G::n * G::row_bytes >> 32) == 0>::Type;
  const u8* codes;
  const u8* high;
  const u8* scales;
  u32 lane;
  // Set for a tile: offsets of this lane's first copy of each kind.
  u32 first_subtile;
  Offset tile_codes, tile_high, tile_scales;

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
    tile_codes = code_offset(0, lane / 4);
    if constexpr (G::high_pitch != 0) tile_high = high_offset(lane);
    if constexpr (format == Format::nvfp4) {
      const u32 piece = lane % 8;  // two tiles of 64 columns, four rows of each quarter
      tile_scales = Offset(nvfp4_scale_offset(weight_row(lane / 8 % G::mtiles, 0), piece / 4 * 4, G::k)) + piece % 4 * 16;
    } else if constexpr (G::Traits::grouped_int) {
      tile_scales = scale_offset(lane);
    }
  }

  // Chunk `number` of the row (counted over all segments) into the stage at `stage`.
  NINFERC_DEVICE void copy(u32 stage, u32 number) const {
    const u32 begin = G::chunk_begin(number), end = G::chunk_end(number);
    const u32 code_bytes = begin / 8 * (G::Traits::code_bytes_128 / 16);
    const u32 to_codes = stage + stored_offset();
#pragma unroll
    for (u32 m = 0; m < G::mtiles; ++m) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        Offset from = tile_codes + Offset((G::rows_of_mtile(m) + half * G::rows_of_half) * G::row_bytes) + code_bytes;
        if constexpr (!G::whole_rows) from = code_offset(m, lane / 4 + 8 * half) + code_bytes;
#pragma unroll
        for (u32 slab = 0; slab < G::slabs; ++slab)
          copy_codes(to_codes + (m * G::slabs + slab) * 1024 + half * 512, codes + from + slab * 64,
                     begin + slab * (128 / G::slabs), end);
      }
    }
    if constexpr (G::high_pitch != 0) {
#pragma unroll
      for (u32 base = 0; base < G::mtiles * 16 * high_pieces; base += 32) {
        const u32 index = base + lane;
        const Offset from = (base == 0 ? tile_high : high_offset(index)) + number * G::Traits::high_bytes_128;
        if (G::mtiles * 16 * high_pieces % 32 == 0 || index < G::mtiles * 16 * high_pieces)
          cp_async_16(stage + G::high_offset + index / high_pieces * G::high_pitch + lane % high_pieces * 16, high + from);
      }
    }
    if constexpr (format == Format::nvfp4) {
      if (G::mtiles == 4 || lane < 8 * G::mtiles) {
        const u32 to = stage + G::scale_offset + lane * 16;
        const u8* from = scales + (tile_scales + begin / 64 * 512);
        const bool valid = G::whole_k || begin + lane % 8 / 4 * 64 < end;
        if constexpr (G::whole_k) cp_async_16(to, from);
        else cp_async_16_zfill(to, valid ? from : scales, valid);
      }
    } else if constexpr (G::Traits::grouped_int) {
#pragma unroll
      for (u32 base = 0; base < G::mtiles * 16; base += 32) {
        const u32 index = base + lane;
        const Offset from = (base == 0 ? tile_scales : scale_offset(index)) + number * G::scale_row;
        if (G::mtiles % 2 == 0 || index < G::mtiles * 16)
          cp_async_small<G::scale_row>(stage + G::scale_offset + index * G::scale_row, scales + from);
      }
    }
  }

 private:
  NINFERC_DEVICE Offset code_offset(u32 m, u32 r) const {
    return Offset(weight_row(m, r)) * Offset(G::row_bytes) + lane % 4 * 16;
  }
  // Copy `index` of the high bits or scales of a tile: row after row of one matrix tile after the other.
  NINFERC_DEVICE Offset high_offset(u32 index) const {
    const u32 row = index / high_pieces % (16 * G::mtiles);
    return Offset(weight_row(row / 16, row % 16)) * Offset(high_row_bytes) + index % high_pieces * 16;
  }
  NINFERC_DEVICE Offset scale_offset(u32 index) const {
    const u32 row = index % (16 * G::mtiles);
    return Offset(weight_row(row / 16, row % 16)) * Offset(G::groups * 2);
  }
  // Of the lane's first copy in a slab: 16 bytes per lane.  Lanes read eight bytes of a 32-byte group of grouped formats:
  // every other pair of rows swaps its groups there, so that the reads are free of bank conflicts.
  NINFERC_DEVICE u32 stored_offset() const {
    if constexpr (G::Traits::grouped_int) return (lane ^ (lane / 8 % 2 * 2)) * 16;
    else return lane * 16;
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
      const u32 swap = group / 2 % 2 * 32, lane_row = group * 64 + pair * 8;
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
#pragma unroll
        for (u32 slab = 0; slab < G::slabs; ++slab) {
          const u32 at = (m * G::slabs + slab) * 1024 + half * 512;
          if constexpr (G::Traits::grouped_int) {
            const u32x2 g0 = ld_shared<u32x2>(stage + (lane_row + swap) + at);
            const u32x2 g1 = ld_shared<u32x2>(stage + (lane_row + (swap ^ 32)) + at);
            words[half][slab] = u32x4{g0.x, g0.y, g1.x, g1.y};
          } else {
            words[half][slab] = ld_shared<u32x4>(stage + lane_id() * 16 + at);
          }
        }
        const u32 high_at = G::high_offset + (m * 16 + 8 * half) * G::high_pitch;
        if constexpr (format == Format::q5g64) {
          high[half][0] = ld_shared<u16>(stage + (group * G::high_pitch + pair * 2) + high_at);
          high[half][1] = ld_shared<u16>(stage + (group * G::high_pitch + pair * 2) + high_at + 8);
        } else if constexpr (format == Format::q6g64) {
          high[half][0] = ld_shared<u32>(stage + (group * G::high_pitch + pair * 4) + high_at);
          high[half][1] = ld_shared<u32>(stage + (group * G::high_pitch + pair * 4) + high_at + 16);
        }
        const u32 scale_at = G::scale_offset + m * G::scale_bytes + 8 * half * G::scale_row;
        if constexpr (format == Format::w8g32) {
          const u32x2 four = ld_shared<u32x2>(stage + group * 8 + scale_at);
          scales[half][0] = four.x;
          scales[half][1] = four.y;
        } else if constexpr (G::Traits::grouped_int) {
          scales[half][0] = ld_shared<u32>(stage + group * 4 + scale_at);
        } else if constexpr (format == Format::nvfp4) {
          const u32 lane_scale = group * 4 + pair / 2 * 64 + pair % 2 * 2;
          unpack_nvfp4_scales(ld_shared<u16>(stage + lane_scale + scale_at), scales[half][0], scales[half][1]);
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
