// NVFP4 codes as kernels want them: the eight E2M1 codes of a word spread over it so that a shift and one mask give a pair of
// neighbouring columns, in both halves with sign and magnitude where bf16 has sign, lowest exponent bits and first mantissa bit.
//
// Even columns lie in the low half of the word, odd ones in the high half.  Of pair r = 0, 1, 2 the sign is bit 15 - 3 r of
// its half and the magnitude bits 8 - 3 r .. 6 - 3 r; pair 3 has what is left: sign 13, magnitude 11, 10, 14.
#pragma once
#include <ninferc/base/grid.cuh>
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>

namespace ninferc {

constexpr u32 arrange_threads = 256;

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

}  // namespace ninferc
