// Embedding lookup: one row of the table per column, decoded and rounded to bf16 once.
#pragma once
#include <ninferc/base/grid.cuh>
#include <ninferc/codec/unpack.cuh>
#include <ninferc/codec/units.cuh>

namespace ninferc {

constexpr u32 embed_threads = 128;

// Offset of the codes of eight consecutive columns of one row, whether weights lie in rows or in units.
template <Format format, bool in_units>
NINFERC_DEVICE u64 code_offset(u32 row, u32 column, u32 width) {
  using Traits = FormatTraits<format>;
  using U = Units<format>;
  constexpr u32 eight = Traits::code_bytes_128 / 16;  // bytes
  if constexpr (!in_units) return u64(row) * Traits::row_bytes(width) + column / 8 * eight;
  const u32 inside = column % 128 / 8 * eight;
  return (U::first(row, width / 128) + column / 128) * U::code_bytes + U::code_piece(U::in_band(row), inside / 16) + inside % 16;
}

// Eight consecutive columns of one row as floats, scale and divisor applied.
template <Format format, bool in_units>
NINFERC_DEVICE void decode_eight(const u8* codes, const u8* high, const u8* scales, const f32* divisor, u32 row, u32 column,
                                 u32 width, f32 (&out)[8]) {
  using Traits = FormatTraits<format>;
  using U = Units<format>;
  const u8* code = codes + code_offset<format, in_units>(row, column, width);
  // Of the eight columns' high bits and of the scale of their group.
  u64 high_at = 0, scale_at = 0;
  if constexpr (in_units) {
    constexpr u32 high_eight = Traits::high_bytes_128 / 16;  // bytes of eight columns
    const u64 unit = U::first(row, width / 128) + column / 128;
    const u32 r = U::in_band(row), inside = column % 128 / 8 * high_eight;
    if constexpr (high_eight != 0) high_at = unit * U::high_bytes + U::high_piece(r, inside / 16) + inside % 16;
    if constexpr (U::scale_bytes != 0) {
      constexpr u32 group_bytes = format == Format::nvfp4 ? 1 : 2;
      const u32 at = column % 128 / Traits::group * group_bytes;
      scale_at = unit * U::scale_bytes + U::scale_word(r, at / 4) + at % 4;
    }
  } else {
    const u64 eight = (u64(row) * ((width + 127) / 128 * 128) + column) / 8;  // in planes padded to 128 columns
    high_at = eight * (Traits::high_bytes_128 / 16);
    if constexpr (format == Format::nvfp4) scale_at = nvfp4_scale_offset(row, column / 16, width);
    else if constexpr (Traits::grouped_int) scale_at = eight * 8 / Traits::group * 2;
  }
  u32 pairs[4];
  f32 scale = 1.0f;
  if constexpr (format == Format::nvfp4) {
    const u32 group_scale = ld_nc<u8>(scales + scale_at);
    u32 first, second;
    unpack_nvfp4_scales(group_scale, first, second);
    unpack_nvfp4(ld_nc<u32>(code), first, pairs);
  } else if constexpr (format == Format::q4g64) {
    unpack_q4(ld_nc<u32>(code), pairs);
  } else if constexpr (format == Format::q5g64) {
    unpack_q5(ld_nc<u32>(code), ld_nc<u8>(high + high_at), pairs);
  } else if constexpr (format == Format::q6g64) {
    unpack_q6(ld_nc<u32>(code), ld_nc<u16>(high + high_at), pairs);
  } else {
    const u32x2 words = ld_nc<u32x2>(code);
    if constexpr (format == Format::w8g32) unpack_w8(words.x, words.y, pairs);
    else unpack_fp8(words.x, words.y, pairs);
  }
  if constexpr (Traits::grouped_int) scale = f16_to_f32(ld_nc<f16>(scales + scale_at));
  if constexpr (format == Format::fp8_row) scale = bf16_to_f32(ld_nc<bf16>(scales + 2 * u64(row)));
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    constexpr bool pairs_in_order = format == Format::nvfp4;  // the column order
    const u32 low = pairs_in_order ? 2 * i : Traits::nibbles ? i : i / 2 * 4 + i % 2;
    const u32 up = low + (pairs_in_order ? 1 : Traits::nibbles ? 4 : 2);
    out[low] = bf16x2_lo(pairs[i]);
    out[up] = bf16x2_hi(pairs[i]);
  }
#pragma unroll
  for (u32 i = 0; i < 8; ++i) {
    if constexpr (format == Format::nvfp4) out[i] = out[i] * Traits::unit / ld_nc<f32>(divisor);
    else if constexpr (format == Format::fp8_row) out[i] = out[i] * fp8_value * scale;
    else out[i] *= scale;
  }
}

// Grid: (width / 8 threads in blocks of embed_threads, columns).
template <Format format, u32 width, bool in_units>
NINFERC_DEVICE void embed(const i32* tokens, const u8* codes, const u8* high, const u8* scales, const f32* divisor, bf16* x,
                          u32 x_stride) {
  static_assert(width % 8 == 0, "rows are read eight columns at a time");
  grid_launch_dependents();
  grid_dependency_wait();
  const u32 column = (blockIdx.x * embed_threads + threadIdx.x) * 8;
  if (column >= width) return;
  const u32 row = u32(ld_global<i32>(tokens + blockIdx.y));
  u32x4 out;
  if constexpr (format == Format::bf16) {
    out = ld_nc<u32x4>(codes + code_offset<format, in_units>(row, column, width));
  } else {
    f32 v[8];
    decode_eight<format, in_units>(codes, high, scales, divisor, row, column, width, v);
    out = u32x4{pack_bf16x2(v[0], v[1]), pack_bf16x2(v[2], v[3]), pack_bf16x2(v[4], v[5]), pack_bf16x2(v[6], v[7])};
  }
  st_global(x + u64(blockIdx.y) * x_stride + column, out);
}

}  // namespace ninferc
