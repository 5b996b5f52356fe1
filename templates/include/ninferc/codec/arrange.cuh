// Weights as kernels want them, brought into that order in place once they are on the device: NVFP4 codes word by word, and
// the matrices that products read in units (units.cuh).
//
// NVFP4 codes: the eight E2M1 codes of a word spread over it so that a shift and one mask give a pair of
// neighbouring columns, in both halves with sign and magnitude where bf16 has sign, lowest exponent bits and first mantissa bit.
//
// Even columns lie in the low half of the word, odd ones in the high half.  Of pair r = 0, 1, 2 the sign is bit 15 - 3 r of
// its half and the magnitude bits 8 - 3 r .. 6 - 3 r; pair 3 has what is left: sign 13, magnitude 11, 10, 14.
#pragma once
#include <ninferc/base/grid.cuh>
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>
#include <ninferc/codec/units.cuh>

namespace ninferc {

constexpr u32 arrange_threads = 256, units_threads = 1024;

// A word of the artifact (column i in bits 4 i .. 4 i + 3) in device order.
NINFERC_DEVICE u32 arrange_nvfp4(u32 codes) {
  u32 word = 0;
#pragma unroll
  for (u32 column = 0; column < 8; ++column) {
    const u32 code = codes >> (4 * column) & 15, pair = column / 2, half = column % 2 * 16;
    const u32 bits = pair < 3 ? (code >> 3) << (15 - 3 * pair) | (code & 7) << (6 - 3 * pair)
                              : (code >> 3) << 13 | (code >> 2 & 1) << 11 | (code >> 1 & 1) << 10 | (code & 1) << 14;
    word |= bits << half;
  }
  return word;
}

// In place, `pieces` of 16 bytes.
NINFERC_DEVICE void arrange_nvfp4(u32x4* words, u32 pieces) {
  grid_dependency_wait();
  for (u32 i = blockIdx.x * arrange_threads + threadIdx.x; i < pieces; i += gridDim.x * arrange_threads) {
    const u32x4 w = ld_global<u32x4>(words + i);
    st_global(words + i, u32x4{arrange_nvfp4(w.x), arrange_nvfp4(w.y), arrange_nvfp4(w.z), arrange_nvfp4(w.w)});
  }
}

// One plane's part of a block of rows: `bytes` at `plane`, by way of `scratch`.  What lies at place i, counted in T, goes to
// byte to(i).
template <class T, class To>
NINFERC_DEVICE void permute(u8* plane, u8* scratch, u32 bytes, To&& to) {
  for (u32 i = threadIdx.x * 16; i < bytes; i += units_threads * 16)
    st_global(scratch + i, ld_global<u32x4>(plane + i));
  sync_block();
  for (u32 i = threadIdx.x; i < bytes / sizeof(T); i += units_threads)
    st_global(plane + to(i), ld_global<T>(scratch + i * sizeof(T)));
  sync_block();
}

// In place, a matrix of `rows` x 128 `chunks`, block of rows by block of rows; each block of threads has its own part of
// `scratch`, as large as the codes of a block of rows.
template <Format format>
NINFERC_DEVICE void arrange_units(u8* codes, u8* high, u8* scales, u8* scratch, u32 rows, u32 chunks) {
  using U = Units<format>;
  using Traits = FormatTraits<format>;
  grid_dependency_wait();
  const u32 code_row = chunks * Traits::code_bytes_128, high_row = chunks * Traits::high_bytes_128;
  const u32 scale_row = chunks * U::scale_row;
  scratch += u64(blockIdx.x) * (U::block_rows * code_row);
  const auto unit = [&](u32 row, u32 chunk) { return u32(U::first(row, chunks)) + chunk; };  // counted in the block
  for (u32 block = blockIdx.x; block < rows / U::block_rows; block += gridDim.x) {
    permute<u32x4>(codes + u64(block) * (U::block_rows * code_row), scratch, U::block_rows * code_row, [&](u32 i) {
      const u32 row = i / (code_row / 16), at = i % (code_row / 16), pieces = Traits::code_bytes_128 / 16;
      return unit(row, at / pieces) * U::code_bytes + U::code_piece(U::in_band(row), at % pieces);
    });
    if constexpr (U::high_bytes != 0) {
      permute<u32x4>(high + u64(block) * (U::block_rows * high_row), scratch, U::block_rows * high_row, [&](u32 i) {
        const u32 row = i / (high_row / 16), at = i % (high_row / 16), pieces = Traits::high_bytes_128 / 16;
        return unit(row, at / pieces) * U::high_bytes + U::high_piece(U::in_band(row), at % pieces);
      });
    }
    if constexpr (U::scale_bytes != 0) {
      permute<u32>(scales + u64(block) * (U::block_rows * scale_row), scratch, U::block_rows * scale_row, [&](u32 i) {
        u32 row = i / (scale_row / 4), word = i % (scale_row / 4);
        if constexpr (U::quarters) row = i % 4 * 32 + i % 128 / 4, word = i / 128;  // tiles of 128 rows x 64 columns
        constexpr u32 words = U::scale_row / 4;
        return unit(row, word / words) * U::scale_bytes + U::scale_word(U::in_band(row), word % words);
      });
    }
  }
}

}  // namespace ninferc
