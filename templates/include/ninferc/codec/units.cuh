// Weights in units: what a warp multiplies at once, 16 rows by 128 columns, lies together, so that one copy fetches it.
//
// Planes have the places and sizes of the artifact.  Inside the planes of codes, of high bits and of group scales the order is
// [band][chunk of 128 columns][unit] in place of [row][column]; a band is 16 rows, of nvfp4 those whose scales lie side by side
// in the artifact: four of each quarter of a block of 128.  So a block of `block_rows` rows takes up the same bytes before and
// after (arrange.cuh).  A unit is as products want it in shared memory (linear/weights.cuh): [half: 8 rows][slab][row][64 bytes]
// of codes, [half][row][16 bytes] of high bits, two such slabs for q6, and [row][scales of 128 columns]; nvfp4 has
// [half][64 columns][row][4 scales].  The halves are whole, as the smallest tile takes one of a gate and one of an up band.
// In grouped integer formats every other pair of rows swaps the 32-byte halves of a slab.
#pragma once
#include <ninferc/codec/format.cuh>

namespace ninferc {

template <Format format>
struct Units {
  using Traits = FormatTraits<format>;
  static constexpr bool quarters = format == Format::nvfp4;
  static constexpr u32 block_rows = quarters ? 128 : 16;
  // Bytes of scales of 128 columns of one row; rows and tensors have scales of their own, which keep their order.
  static constexpr u32 scale_row = format == Format::w8g32 || format == Format::nvfp4 ? 8 : Traits::grouped_int ? 4 : 0;
  // Bytes of a unit in each plane.
  static constexpr u32 code_bytes = 16 * Traits::code_bytes_128, high_bytes = 16 * Traits::high_bytes_128;
  static constexpr u32 scale_bytes = 16 * scale_row;

  static NINFERC_DEVICE constexpr u32 band(u32 row) { return quarters ? row / 128 * 8 + row % 32 / 4 : row / 16; }
  static NINFERC_DEVICE constexpr u32 in_band(u32 row) { return quarters ? row % 4 * 4 + row % 128 / 32 : row % 16; }
  // Number of the unit of `row` in chunk 0 of a matrix with `chunks` chunks; those of the following chunks follow it.
  static NINFERC_DEVICE constexpr u64 first(u32 row, u32 chunks) { return u64(band(row)) * chunks; }

  // Places in a unit of what row r of the band has there: 16 bytes of codes, 16 of high bits, four of scales.
  static NINFERC_DEVICE constexpr u32 code_piece(u32 r, u32 piece) {
    const u32 stored = Traits::grouped_int ? piece ^ (r / 2 % 2 * 2) : piece;
    return r / 8 * (code_bytes / 2) + stored / 4 * 512 + r % 8 * 64 + stored % 4 * 16;
  }
  static NINFERC_DEVICE constexpr u32 high_piece(u32 r, u32 piece) {
    return r / 8 * (high_bytes / 2) + piece * 128 + r % 8 * 16;
  }
  static NINFERC_DEVICE constexpr u32 scale_word(u32 r, u32 word) {
    return quarters ? r / 8 * 64 + word * 32 + r % 8 * 4 : r * scale_row + word * 4;
  }
};

}  // namespace ninferc
