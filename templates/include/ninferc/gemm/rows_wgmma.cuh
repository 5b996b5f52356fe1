// Row product on wgmma (sm_90a): y[tokens, n] = x W^T, as y^T tiles with weights as the A operand.
//
// Two warpgroups share a tile of 128 weight rows; each unpacks its own 64 rows straight into A fragments, so every weight is
// unpacked once per block.  B is the x tile.  Products run asynchronously: while those of one half of a stage (32 columns) run,
// a warpgroup unpacks the next half into the other set of A registers, which takes about a third of the time of the products
// at 256 tokens.
//
// Up to four more warps load.  Each takes every fourth step by itself, so four steps are on their way at once, and waits for
// its own copies before it hands the stage over: ordinary copies need the proxy fence before wgmma may read them.
#pragma once
#include <ninferc/base/wgmma.cuh>
#include <ninferc/gemm/output.cuh>

#if NINFERC_HAS_WGMMA
namespace ninferc::gemm {

// A fragments of 32 columns (half a stage), made from the codes by the lane that needs them.
template <class S>
struct WarpgroupUnpack {
  static constexpr Format f = S::format;
  using T = typename S::T;
  u32 row, select;  // the lane's first tile row; its pair among the eight codes of a k8 group

  NINFERC_DEVICE u32x4 code_words(u32 stage, u32 r, u32 chunk) const {
    return ld_shared<u32x4>(stage + S::codes_at + r * T::code_bytes + S::code_chunk(r, chunk) * 16);
  }
  template <u32 half>
  NINFERC_DEVICE void unpack(u32 (&a)[2][4], u32 stage, u32 s) const {
    const u32 pair = lane_id() % 4;
#pragma unroll
    for (u32 side = 0; side < 2; ++side) {  // rows `row` and `row + 8`
      const u32 r = row + side * 8;
      u32 scale_word = 0;
      if constexpr (T::scale_bytes != 0) scale_word = ld_shared<u32>(stage + S::scales_at + r * 4);
      Scale scale{0, 0};
      if constexpr (T::grouped) scale = scale_from_f16(f16{u16(scale_word >> ((f == Format::w8g32 ? half : s % 2) * 16))});
      if constexpr (T::nibbles) {
        const ScaleQuad quad(scale_word);
        const u32x4 words = code_words(stage, r, half);
        const u32 w[4] = {words.x, words.y, words.z, words.w};
        u32 high[4] = {0, 0, 0, 0};
        if constexpr (f == Format::q5g64) {
          const HighPairs<f> pairs(ld_shared<u32>(stage + S::high_at + r * 8 + half * 4), pair);
#pragma unroll
          for (u32 i = 0; i < 4; ++i) high[i] = pairs.group(i);
        } else if constexpr (f == Format::q6g64) {
          const u32x2 bits = ld_shared<u32x2>(stage + S::high_at + r * 16 + half * 8);
          const HighPairs<f> first(bits.x, pair), second(bits.y, pair);
          high[0] = first.group(0), high[1] = first.group(1), high[2] = second.group(0), high[3] = second.group(1);
        }
#pragma unroll
        for (u32 i = 0; i < 4; ++i) {  // k8 group i of the half
          if constexpr (f == Format::nvfp4) scale = quad.get(scale_selector(2 * half + i / 2));
          a[i / 2][i % 2 * 2 + side] = weight_pair<f>(gather<f>(w[i], 0, select), high[i], scale);
        }
      } else {
#pragma unroll
        for (u32 k = 0; k < 2; ++k) {
          const u32x4 w = code_words(stage, r, 2 * half + k);
          a[k][side] = weight_pair<f>(gather<f>(w.x, w.y, select), 0, scale);
          a[k][2 + side] = weight_pair<f>(gather<f>(w.z, w.w, select), 0, scale);
        }
      }
    }
  }
};

// Barriers behind the stages: stage filled, stage free again.
template <class S>
struct Ring {
  u32 shared;
  NINFERC_DEVICE u32 stage(u32 slot) const { return shared + slot * S::stage_bytes; }
  NINFERC_DEVICE u32 full(u32 slot) const { return shared + S::shared_bytes + slot * 16; }
  NINFERC_DEVICE u32 free(u32 slot) const { return full(slot) + 8; }
  // No more loaders than stages: one that had just loaded step s would ask for a phase of a `free` barrier two ahead of the
  // running one, which has the same parity as the one before it.
  static constexpr u32 loaders = S::stages < 4 ? S::stages : 4;
  static constexpr u32 bytes = S::shared_bytes + S::stages * 16;
};

// The math warps' part of a block: `parts` products of `columns` tokens per 16 columns of K, then the output.
template <class S, u32 columns, u32 parts>
NINFERC_DEVICE void multiply_tile(const Operands& o, const Target& target, const Ring<S>& ring, u32 first, u32 token, u32 active) {
  constexpr bool direct = S::format == Format::bf16;  // nothing to unpack: A comes from shared memory too
  const u32 warp = warp_id_uniform(), lane = lane_id();
  f32 d[parts][columns / 2];
#pragma unroll
  for (u32 p = 0; p < parts; ++p)
#pragma unroll
    for (u32 i = 0; i < columns / 2; ++i) d[p][i] = 0;
  u32 a[2][2][4];
  const WarpgroupUnpack<S> unpacker{warp * 16 + lane / 4, selector<S::format>(lane % 4)};
  WgmmaPipe pipe;
  const auto multiply = [&](u32 stage, u32 half) {
    pipe.fence();
#pragma unroll
    for (u32 k = 0; k < 2; ++k)
#pragma unroll
      for (u32 p = 0; p < parts; ++p) {
        const u64 b = wgmma_descriptor(stage + p * columns * 128) + 4 * half + 2 * k;
        if constexpr (direct)
          pipe.template multiply<columns>(d[p], wgmma_descriptor(stage + S::codes_at + warp / 4 * 8192) + 4 * half + 2 * k, b);
        else
          pipe.template multiply<columns>(d[p], a[half][k], b);
      }
    pipe.commit();
  };

  u32 slot = 0, parity = 0;
  mbarrier_wait(ring.full(0), 0);
  if constexpr (!direct) unpacker.template unpack<0>(a[0], ring.stage(0), 0);
#pragma unroll 1
  for (u32 s = 0; s < S::steps; ++s) {
    const u32 stage = ring.stage(slot), before = slot == 0 ? S::stages - 1 : slot - 1;
    multiply(stage, 0);
    pipe.template wait<1>();  // the products of the step before are done
    if (s > 0 && lane == 0) mbarrier_arrive(ring.free(before));
    if constexpr (!direct) unpacker.template unpack<1>(a[1], stage, s);
    multiply(stage, 1);
    if (++slot == S::stages) slot = 0, parity ^= 1;
    if (s + 1 < S::steps) {
      mbarrier_wait(ring.full(slot), parity);
      pipe.template wait<1>();
      if constexpr (!direct) unpacker.template unpack<0>(a[0], ring.stage(slot), s + 1);
    }
  }
  pipe.template wait<0>();
#pragma unroll
  for (u32 p = 0; p < parts; ++p) pipe.hold(d[p]);
  grid_launch_dependents();

  const u32 row = warp * 16;
  const RowScales scale = row_scales<S>(o, first, row + lane / 4);
  if constexpr (S::store == Store::f32) {
    store_tile<S>(target, [&](void* to, u32 stride) {
#pragma unroll
      for (u32 p = 0; p < parts; ++p) {
        if (p * columns < active)
          put_f32<S, columns / 8>(d[p], scale, static_cast<f32*>(to), stride, first + row, token + p * columns,
                                  active - p * columns);
      }
    });
  } else {
    named_barrier_sync(1, S::math_threads);  // the stages are free
    if constexpr (S::store == Store::residual) {
      load_residual<S>(ring.shared, target.residual, target.residual_stride, first, token, active);
      named_barrier_sync(1, S::math_threads);
    }
#pragma unroll
    for (u32 p = 0; p < parts; ++p) put<S, columns / 8>(d[p], scale, ring.shared, row, p * columns);
    named_barrier_sync(1, S::math_threads);
    store_tile<S>(target, [&](void* to, u32 stride) {
      copy_out<S>(ring.shared, static_cast<bf16*>(to), stride, first, token, active);
    });
  }
}

// The load warps' part.
template <class S>
NINFERC_DEVICE void load_tile(const Operands& o, const Ring<S>& ring, const i32* rows, u32 first, u32 token, u32 mine) {
  const u32 lane = lane_id();
  const WeightLoader<S, 32> weights(o, first, lane);
  const bool works = mine < ring.loaders;
  if (works && mine < S::steps) weights.load(mine, ring.stage(mine));  // constants: before the wait
  grid_dependency_wait();
  const u32 count = u32(ld_global<i32>(rows));
  if (works && token < count) {
    const TokenLoader<S, 32> tokens(o, token, count - token < S::tile_tokens ? count - token : S::tile_tokens, lane);
#pragma unroll 1
    for (u32 s = mine; s < S::steps; s += ring.loaders) {
      const u32 slot = s % S::stages;
      if (s >= S::stages) mbarrier_wait(ring.free(slot), (s / S::stages + 1) & 1);
      if (s != mine) weights.load(s, ring.stage(slot));
      tokens.load(s, ring.stage(slot));
      cp_async_commit();
      cp_async_wait<0>();
      fence_proxy_async_shared();
      sync_warp();
      if (lane == 0) mbarrier_arrive(ring.full(slot));
    }
  }
  cp_async_commit();
  cp_async_wait<0>();
}

// One block of math_threads + 128 threads.  Products of `columns` tokens make the tile; a tile with no more than `narrow`
// active tokens, as short prompts and the ends of long ones have, takes products of that width instead.
template <class S, u32 columns>
NINFERC_DEVICE void rows_wgmma(const Operands& o, const Target& target, const i32* rows) {
  static_assert(S::math_threads == 256 && S::tile_rows == 128 && S::tile_tokens % columns == 0, "two warpgroups of 64 rows");
  constexpr u32 math_warps = S::math_threads / 32, narrow = 128;
  NINFERC_DYNAMIC_SMEM(memory);
  const Ring<S> ring{shared_address(memory)};
  const u32 first = blockIdx.y * S::tile_outputs, token = blockIdx.x * S::tile_tokens;
  const u32 warp = warp_id_uniform();

  if (threadIdx.x == 0) {
    for (u32 slot = 0; slot < S::stages; ++slot) {
      mbarrier_init(ring.full(slot), 1);
      mbarrier_init(ring.free(slot), math_warps);
    }
    fence_mbarrier_init();
  }
  sync_block();

  if (warp >= math_warps) {
    lower_registers<40>();
    load_tile(o, ring, rows, first, token, warp - math_warps);
  } else {
    raise_registers<232>();
    grid_dependency_wait();
    const u32 count = u32(ld_global<i32>(rows));
    if (token >= count) return;
    const u32 active = count - token < S::tile_tokens ? count - token : S::tile_tokens;
    if constexpr (S::tile_tokens > narrow) {
      if (active <= narrow) {
        multiply_tile<S, narrow, 1>(o, target, ring, first, token, active);
        return;
      }
    }
    multiply_tile<S, columns, S::tile_tokens / columns>(o, target, ring, first, token, active);
  }
}

}  // namespace ninferc::gemm
#endif
