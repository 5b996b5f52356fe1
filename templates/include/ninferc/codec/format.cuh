// Weight formats as kernels see them (spec: tensor-formats.md, storage-layouts.md).
//
// A weight matrix [N, K] is four planes of the stored object, `codes`, `high`, `scales`, `divisor`:
//
//   format   codes, one row            high bits, one row        scales                              value
//   bf16     K bf16                    -                         -                                   code
//   q4g64    K_pad / 2 bytes           -                         f16 [N, K_pad / 64]                 code * scale
//   q5g64    K_pad / 2 bytes           K_pad / 8 bytes           f16 [N, K_pad / 64]                 code * scale
//   q6g64    K_pad / 2 bytes           K_pad / 4 bytes           f16 [N, K_pad / 64]                 code * scale
//   w8g32    K_pad bytes               -                         f16 [N, K_pad / 32]                 code * scale
//   nvfp4    K / 2 bytes               -                         e4m3, tiles of 128 rows x 64 cols   code * scale / divisor
//   fp8_row  K bytes                   -                         bf16 [N]                            code * scale
//
// K_pad is K rounded up to 128 columns; padding codes are zero.  nvfp4: N is a multiple of 128 and K of 64.
#pragma once
#include <ninferc/base/types.cuh>

namespace ninferc {

enum class Format : u32 { bf16, q4g64, q5g64, q6g64, w8g32, nvfp4, fp8_row };

template <Format format>
struct FormatTraits {
  static constexpr bool nibbles = format == Format::q4g64 || format == Format::q5g64 || format == Format::q6g64 ||
                                  format == Format::nvfp4;
  static constexpr bool grouped_int = format == Format::q4g64 || format == Format::q5g64 || format == Format::q6g64 ||
                                      format == Format::w8g32;
  // Columns that share a scale inside a row; 0 where a row has one scale or none.
  static constexpr u32 group = format == Format::w8g32 ? 32 : grouped_int ? 64 : format == Format::nvfp4 ? 16 : 0;
  // Bytes of 128 columns of one row in the code and high planes.
  static constexpr u32 code_bytes_128 = format == Format::bf16 ? 256 : nibbles ? 64 : 128;
  static constexpr u32 high_bytes_128 = format == Format::q5g64 ? 16 : format == Format::q6g64 ? 32 : 0;
  // Bytes of one row of the code plane of a matrix with `columns` columns.
  static constexpr u64 row_bytes(u32 columns) {
    const u64 padded = grouped_int ? u64(columns + 127) / 128 * 128 : columns;
    return padded * code_bytes_128 / 128;
  }
  // What one accumulated product of unpacked weights has to be multiplied by, besides scales and divisor (exact).
  static constexpr f32 unit = format == Format::nvfp4 ? 128.0f : format == Format::fp8_row ? 0x1p60f : 1.0f;
};

// Offset of the scale of (row, group of 16 columns) in the nvfp4 scale plane (storage-layouts.md section 3).
NINFERC_DEVICE u64 nvfp4_scale_offset(u32 row, u32 group, u32 columns) {
  return (u64(row / 128) * (columns / 64) + group / 4) * 512 + (row % 32) * 16 + (row % 128) / 32 * 4 + group % 4;
}

}  // namespace ninferc
