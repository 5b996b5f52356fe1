// Synthetic weights and a read kernel for measurements. The words are those of artifacts/tools/synth_bits.py: splitmix64 of
// a counter under a key, masked, plus a constant, so that a device fills what the CPU would have written.
#pragma once
#include <ninferc/base/async.cuh>
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>

namespace ninferc::synth {

constexpr u64 golden = 0x9E3779B97F4A7C15ull;

NINFERC_DEVICE u64 mix(u64 z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// Bytes 0 … bytes-1 of a plane; `out` is 4-byte aligned. The words are 64-bit, the last one is cut off at the end.
NINFERC_DEVICE void fill(u8* out, u64 bytes, u64 key, u64 mask, u64 add) {
  const u64 words = (bytes + 7) / 8, step = u64(gridDim.x) * blockDim.x;
  for (u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x; i < words; i += step) {
    const u64 word = (mix(key + golden * (i + 1)) & mask) + add;
    if (8 * i + 8 <= bytes) {
      st_global(out + 8 * i, u32(word));
      st_global(out + 8 * i + 4, u32(word >> 32));
    } else {
      for (u64 b = 8 * i; b < bytes; ++b) st_global(out + b, u8(word >> (8 * (b % 8))));
    }
  }
}

// Reads every 16 bytes once and keeps one bit, so that nothing can be left out: the roofline of this device.
NINFERC_DEVICE void read_all(const u8* data, u64 bytes, u32* sink) {
  const u64 vectors = bytes / 16, step = u64(gridDim.x) * blockDim.x;
  u32 seen = 0;
  u64 i = u64(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; i + 15 * step < vectors; i += 16 * step) {
    u32x4 v[16];
#pragma unroll
    for (u32 j = 0; j < 16; ++j) v[j] = ld_stream<u32x4>(data + 16 * (i + j * step));
#pragma unroll
    for (u32 j = 0; j < 16; ++j) seen ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < vectors; i += step) {
    const u32x4 v = ld_stream<u32x4>(data + 16 * i);
    seen ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (seen == 0x12345678u) st_global(sink, seen);
}

#if NINFERC_HAS_BULK_COPY
// The same through bulk copies: one thread of a block keeps `stages` pieces in flight, which is what it takes to see all of
// the memory's rate.  Bytes behind the last whole piece are left out.
constexpr u32 bulk_piece = 16384, bulk_stages = 12;
NINFERC_DEVICE void read_bulk(const u8* data, u64 bytes, u32* sink) {
  NINFERC_DYNAMIC_SMEM(smem);
  __shared__ u64 landed[bulk_stages];
  if (threadIdx.x != 0) return;
  for (u32 i = 0; i < bulk_stages; ++i) mbarrier_init(shared_address(&landed[i]), 1);
  fence_mbarrier_init();
  const u64 pieces = bytes / bulk_piece;
  const auto start = [&](u64 piece, u32 stage) {
    if (piece >= pieces) return;
    mbarrier_arrive_expect(shared_address(&landed[stage]), bulk_piece);
    bulk_copy(shared_address(smem) + stage * bulk_piece, data + piece * bulk_piece, bulk_piece, shared_address(&landed[stage]));
  };
  for (u32 i = 0; i < bulk_stages; ++i) start(blockIdx.x + u64(i) * gridDim.x, i);
  u32 seen = 0, stage = 0, parity = 0;
  for (u64 piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
    mbarrier_wait(shared_address(&landed[stage]), parity);
    seen ^= ld_shared<u32>(shared_address(smem) + stage * bulk_piece);
    fence_proxy_async_shared();
    start(piece + u64(bulk_stages) * gridDim.x, stage);
    if (++stage == bulk_stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  if (seen == 0x12345678u) st_global(sink, seen);
}
#endif

}  // namespace ninferc::synth
