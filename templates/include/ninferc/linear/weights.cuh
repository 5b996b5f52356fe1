// Weights of a decode product: from global memory through one warp's ring in shared memory to matrix fragments.
#pragma once
#include <ninferc/base/async.cuh>
#include <ninferc/base/mma.cuh>
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>
#include <ninferc/codec/unpack.cuh>
#include <ninferc/linear/geometry.cuh>
#include <ninferc/linear/integers.cuh>

namespace ninferc {

// Copies the weights of one chunk after the other, in steps of `slices` chunks.  A slab (64 bytes of each of 16 rows) is
// two copies per lane: piece lane % 4 of rows lane / 4 and lane / 4 + 8.  High bits and scales of all matrix tiles are shared
// out over the lanes without a remainder (where there are fewer pieces than lanes, two lanes copy the same one), so that no
// copy is conditional.
template <class G>
struct WeightCopier {
  static constexpr Format format = G::format;
  static constexpr u32 high_bytes = G::Traits::high_bytes_128, high_pieces = high_bytes / 16;
  static constexpr u64 high_row_bytes = u64(G::chunks) * G::segments * high_bytes;
  static constexpr u32 high_rows = G::mtiles * 16;
  using U = Units<format>;
  const u8* codes;
  const u8* high;
  const u8* scales;
  u32 lane, side;  // side: 1 where the warp takes the up tile of a pair
  // The chunk to copy next: this lane's first copy of each kind, the tile's first subtile, the chunk's columns.
  const u8* codes_at;
  const u8* high_at;
  const u8* scales_at;
  u32 first_subtile, begin, end;

  NINFERC_DEVICE WeightCopier(const u8* codes_, const u8* high_, const u8* scales_, u32 side_)
      : codes(codes_), high(high_), scales(scales_), lane(lane_id()), side(side_) {}

  static NINFERC_DEVICE u32 clamped(u32 output) {  // rows past the end repeat the last one; nobody stores them
    if constexpr (G::whole_rows) return output;
    else return output < G::outputs ? output : G::outputs - 1;
  }
  NINFERC_DEVICE u32 weight_row(u32 m, u32 r) const {
    if constexpr (G::mixed) return clamped(G::output_row(first_subtile, r % 8)) + r / 8 * (G::n / 2);
    const u32 subtile = first_subtile + (G::swiglu ? m / 2 : m);
    return clamped(G::output_row(subtile, r)) + (G::swiglu && (m + side) % 2 ? G::n / 2 : 0);
  }

  // Chunk `number` (counted over all segments) of tile `tile` is next.
  NINFERC_DEVICE void seek(u32 tile, u32 number) {
    first_subtile = tile * G::subtiles;
    begin = G::chunk_begin(number);
    end = G::chunk_end(number);
    codes_at = code_row(0, 0);
    if constexpr (high_bytes != 0) {
      const u32 row = lane / high_pieces % high_rows;
      high_at = high + weight_row(row / 16, row % 16) * high_row_bytes + lane % high_pieces * 16 + number * high_bytes;
    }
    if constexpr (format == Format::nvfp4) {
      const u32 offset = lane * (4 * G::mtiles), inside = offset % 128;
      const u32 row = weight_row(offset / 128, inside / 64 * 8);  // 32 bytes of eight rows lie side by side, for 64 columns
      scales_at = scales + nvfp4_scale_offset(row, begin / 16 + inside % 64 / 32 * 4, G::k) + inside % 32;
    } else if constexpr (G::Traits::grouped_int) {
      const u32 row = lane % (G::mtiles * 16);
      scales_at = scales + u64(weight_row(row / 16, row % 16)) * (G::groups * 2) + number * G::scale_row;
    }
  }
  // The slice's next chunk is next.
  NINFERC_DEVICE void step() {
    codes_at += G::slices * G::Traits::code_bytes_128;
    if constexpr (high_bytes != 0) high_at += G::slices * high_bytes;
    if constexpr (format == Format::nvfp4) scales_at += G::slices * 1024;
    else if constexpr (G::Traits::grouped_int) scales_at += G::slices * G::scale_row;
    begin += G::slices * 128;
  }

  // Where a chunk has less of a kind than 32 lanes copy, the first lanes do.
  NINFERC_DEVICE void copy(u32 stage) const {
    const u32 to = stage + stored_offset();
#pragma unroll
    for (u32 m = 0; m < G::mtiles; ++m) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        const u8* row = codes_at + (G::rows_of_mtile(m) + half * G::rows_of_half) * G::row_bytes;
        if constexpr (!G::whole_rows) row = code_row(m, half);
#pragma unroll
        for (u32 slab = 0; slab < G::slabs; ++slab)
          copy_codes(to + ((m * 2 + half) * G::slabs + slab) * 512, row + slab * 64, slab);
      }
    }
    if constexpr (high_bytes != 0) {
      const u32 row = lane / high_pieces % high_rows;
      const u32 to_high = stage + G::high_offset + row / 16 * U::high_bytes + U::high_piece(row % 16, lane % high_pieces);
#pragma unroll
      for (u32 base = 0; base < high_rows; base += 32 / high_pieces) {
        const u8* from = high_at + G::rows_of_mtile(base / 16) * high_row_bytes;
        if (!G::whole_rows && base > 0)
          from = high_at + (i64(weight_row((base + row) / 16, row % 16)) - i64(weight_row(row / 16, row % 16))) *
                               i64(high_row_bytes);
        if (high_rows * high_pieces < 32 && lane >= high_rows * high_pieces) break;
        cp_async_16(to_high + base * high_bytes, from);
      }
    }
    if constexpr (format == Format::nvfp4) {
      const u32 to_scales = stage + G::scale_offset + lane * (4 * G::mtiles);
      const bool inside = G::whole_k || begin + lane * (4 * G::mtiles) % 64 / 32 * 64 < end;
      if (!inside) {
        if constexpr (G::mtiles == 4) st_shared(to_scales, u32x4{0, 0, 0, 0});
        else if constexpr (G::mtiles == 2) st_shared<u64>(to_scales, 0);
        else st_shared<u32>(to_scales, 0);
      } else if constexpr (G::mtiles == 4) {
        cp_async_16(to_scales, scales_at);
      } else {
        cp_async_small<4 * G::mtiles>(to_scales, scales_at);
      }
    } else if constexpr (G::Traits::grouped_int) {
      const u32 row = lane % (G::mtiles * 16);
#pragma unroll
      for (u32 base = 0; base < G::mtiles * 16; base += 32) {
        const u8* from = scales_at + u64(G::rows_of_mtile(base / 16)) * (G::groups * 2);
        if (!G::whole_rows && base > 0)
          from = scales_at + (i64(weight_row((base + row) / 16, row % 16)) - i64(weight_row(row / 16, row % 16))) *
                                 i64(G::groups * 2);
        if (G::mtiles == 1 && lane >= 16) break;
        cp_async_small<G::scale_row>(stage + G::scale_offset + (base + row) * G::scale_row, from);
      }
    }
  }

 private:
  NINFERC_DEVICE const u8* code_row(u32 m, u32 half) const {
    return codes + weight_row(m, lane / 4 + 8 * half) * G::row_bytes + begin / 8 * (G::Traits::code_bytes_128 / 16) +
           lane % 4 * 16;
  }
  // Of the lane's first copy in a slab: 16 bytes per lane.  Lanes read eight bytes of a 32-byte group of grouped formats:
  // every other pair of rows swaps its groups there, so that the reads are free of bank conflicts.
  NINFERC_DEVICE u32 stored_offset() const {
    if constexpr (G::Traits::grouped_int) return (lane ^ (lane / 8 % 2 * 2)) * 16;
    else return lane * 16;
  }
  // The lane's piece of slab `slab`; what lies past the end of the segment reads as zero.
  NINFERC_DEVICE void copy_codes(u32 to, const u8* from, u32 slab) const {
    constexpr u32 columns_8 = 1024 / G::Traits::code_bytes_128;  // columns in eight bytes
    if constexpr (G::whole_k) {
      cp_async_16(to, from);
    } else {
      const u32 column = begin + (slab * 4 + lane % 4) * 2 * columns_8;
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
  f32 sum[G::mtiles][G::ntiles][4];
  IntegerSums<G> whole;  // integer products: the sums until they settle

  NINFERC_DEVICE void clear() {
    if constexpr (G::Traits::grouped_int) {
      whole.clear();
    } else {
#pragma unroll
      for (u32 m = 0; m < G::mtiles; ++m)
#pragma unroll
        for (u32 t = 0; t < G::ntiles; ++t)
#pragma unroll
          for (u32 e = 0; e < 4; ++e) sum[m][t][e] = 0;
    }
  }

  // Where in a chunk of activations this lane reads: of each tile of eight columns its own column, its piece of a step.
  static NINFERC_DEVICE u32 lane_offset() {
    if constexpr (G::Traits::grouped_int) return IntegerSums<G>::lane_offset();
    else return lane_id() / 4 % G::bucket * G::x_pitch + lane_id() % 4 * 16;
  }

  // `x`: the chunk of column 0 (columns are x_pitch apart), at lane_offset.
  NINFERC_DEVICE void add(u32 stage, u32 x) {
    Rows rows[G::mtiles];
#pragma unroll
    for (u32 m = 0; m < G::mtiles; ++m) rows[m].load(stage, m);
    if constexpr (G::Traits::grouped_int) {
      whole.add(rows, x);
    } else {
#pragma unroll
      for (u32 step = 0; step < 4; ++step) {
        u32 a[G::mtiles][2][4];
#pragma unroll
        for (u32 m = 0; m < G::mtiles; ++m) rows[m].unpack(step, a[m]);
#pragma unroll
        for (u32 t = 0; t < G::ntiles; ++t) {
          const u32x4 b = ld_shared<u32x4>(x + t * 8 * G::x_pitch + step * 64);
          // Products that add to the same sum do not follow each other: each takes long, several can be on their way.
#pragma unroll
          for (u32 half = 0; half < 2; ++half)
#pragma unroll
            for (u32 m = 0; m < G::mtiles; ++m) multiply(sum[m][t], a[m], b, half);
        }
      }
    }
  }

  // After the last chunk of a slice.
  NINFERC_DEVICE void settle() {
    if constexpr (G::Traits::grouped_int) whole.settle(sum);
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
          const u32 at = ((m * 2 + half) * G::slabs + slab) * 512;
          if constexpr (G::Traits::grouped_int) {
            const u32x2 g0 = ld_shared<u32x2>(stage + (lane_row + swap) + at);
            const u32x2 g1 = ld_shared<u32x2>(stage + (lane_row + (swap ^ 32)) + at);
            words[half][slab] = u32x4{g0.x, g0.y, g1.x, g1.y};
          } else {
            words[half][slab] = ld_shared<u32x4>(stage + lane_id() * 16 + at);
          }
        }
        const u32 high_at = G::high_offset + (m * 2 + half) * (Units<format>::high_bytes / 2);
        if constexpr (format == Format::q5g64) {
          high[half][0] = ld_shared<u16>(stage + (group * 16 + pair * 2) + high_at);
          high[half][1] = ld_shared<u16>(stage + (group * 16 + pair * 2) + high_at + 8);
        } else if constexpr (format == Format::q6g64) {
          high[half][0] = ld_shared<u32>(stage + lane_id() * 4 + high_at);
          high[half][1] = ld_shared<u32>(stage + lane_id() * 4 + high_at + 128);
        }
        const u32 scale_at = G::scale_offset + (m * 2 + half) * (G::scale_bytes / 2);
        if constexpr (format == Format::w8g32) {
          const u32x2 four = ld_shared<u32x2>(stage + group * 8 + scale_at);
          scales[half][0] = four.x;
          scales[half][1] = four.y;
        } else if constexpr (G::Traits::grouped_int) {
          scales[half][0] = ld_shared<u32>(stage + group * 4 + scale_at);
        } else if constexpr (format == Format::nvfp4) {
          const u32 lane_scale = group * 4 + pair / 2 * 32 + pair % 2 * 2;
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
        } else if constexpr (format == Format::nvfp4) {
          unpack_nvfp4(word[step], scales[half][step / 2], out[half]);
        } else {
          unpack_fp8(word[step % 2 * 2], word[step % 2 * 2 + 1], out[half]);
        }
      }
    }

    // Integer codes of a step as a fragment of signed bytes.
    NINFERC_DEVICE void bytes(u32 step, u32 (&out)[4]) const {
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        const u32x4& slab = words[half][G::slabs == 2 ? step / 2 : 0];
        const u32 word[4] = {slab.x, slab.y, slab.z, slab.w};
        u32 &first = out[half], &second = out[half + 2];
        if constexpr (format == Format::q4g64) {
          bytes_q4(word[step], first, second);
        } else if constexpr (format == Format::q5g64) {
          bytes_q5(word[step], step % 2 ? high[half][step / 2] >> 8 : high[half][step / 2], first, second);
        } else if constexpr (format == Format::q6g64) {
          if (step % 2) bytes_q6<2>(word[step], high[half][step / 2], first, second);
          else bytes_q6<0>(word[step], high[half][step / 2], first, second);
        } else {
          first = word[step % 2 * 2];
          second = word[step % 2 * 2 + 1];
        }
      }
    }

    // Keeps what is made of the words of step `step` behind this call.
    NINFERC_DEVICE void hold(u32 step) {
#if !defined(NINFERC_EMULATOR)
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        u32x4& w = words[half][G::slabs == 4 ? step : G::slabs == 2 ? step / 2 : 0];
        if (G::slabs == 4 || step % 2 == 0 || G::slabs == 1) asm volatile("" : "+r"(w.x), "+r"(w.y) :: "memory");
        if (G::slabs == 4 || step % 2 == 1 || G::slabs == 1) asm volatile("" : "+r"(w.z), "+r"(w.w) :: "memory");
      }
#endif
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

 private:
  // The first or the second 16 of the 32 columns.
  static NINFERC_DEVICE void multiply(f32 (&d)[4], const u32 (&a)[2][4], const u32x4& b, u32 half) {
    const u32 first = half * 2;
    const u32 fragment[4] = {a[0][first], a[1][first], a[0][first + 1], a[1][first + 1]};
    const u32 columns[2] = {half ? b.z : b.x, half ? b.w : b.y};
    mma_m16n8k16_bf16(d, fragment, columns);
  }
};

}  // namespace ninferc
