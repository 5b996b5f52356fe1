// Tiles of 16-bit rows in shared memory: 16-byte pieces, swizzled so that eight rows at one piece index never share a bank.
#pragma once
#include <ninferc/base/async.cuh>
#include <ninferc/base/mma.cuh>
#include <ninferc/base/types.cuh>

namespace ninferc::attention {

// Byte offset of piece `piece` of row `row` in a tile of rows of `dim` 16-bit values.
template <u32 dim>
NINFERC_DEVICE constexpr u32 swizzled(u32 row, u32 piece) {
  constexpr u32 pieces = dim / 8, period = pieces < 8 ? pieces : 8, rows_per_line = 8 / period;
  return (row * pieces + (piece ^ (row / rows_per_line % period))) * 16;
}

// Starts copying rows 0 … rows - 1 of a contiguous block of bf16 rows into a swizzled tile; rows from `valid` on become
// zeros and are not read.  `threads` threads share the work.
template <u32 dim, u32 rows, u32 threads>
NINFERC_DEVICE void copy_rows(u32 tile, const u8* source, u32 valid, u32 thread) {
  constexpr u32 pieces = dim / 8, total = rows * pieces;
  static_assert(total % threads == 0, "every thread copies equally many pieces");
#pragma unroll
  for (u32 i = 0; i < total / threads; ++i) {
    const u32 index = i * threads + thread, row = index / pieces;
    cp_async_16_zfill(tile + swizzled<dim>(row, index % pieces), source + index * 16, row < valid);
  }
}

}  // namespace ninferc::attention
