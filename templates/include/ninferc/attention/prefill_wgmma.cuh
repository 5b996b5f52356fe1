// Prefill attention of one lane on warpgroup products (sm_90a): causal, over the paged cache, output gate fused.
//
// One warpgroup copies key and value tiles into a ring, in the order in which they are used (K0, K1, V0, K2, V1, …); two
// warpgroups compute 64 query rows of one head each.  The scores of the next tile and the output of the one before run on
// the tensor cores while weights are computed.
#pragma once
#include <ninferc/base/async.cuh>
#include <ninferc/base/grid.cuh>
#include <ninferc/base/math.cuh>
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>
#include <ninferc/base/wgmma.cuh>
#include <ninferc/attention/prefill_plan.cuh>
#include <ninferc/kv/layout.cuh>

#if NINFERC_HAS_WGMMA
namespace ninferc::attention {

// slots: tiles of 64 keys in the ring.  partials: room for partial results.  row_pages: entries of a page-table row.
template <class Layout_, u32 heads_, u32 slots_, u32 partials_, u32 row_pages_>
struct PrefillWgmma {
  using Layout = Layout_;
  static constexpr u32 heads = heads_, dim = Layout::dim, slots = slots_, partials = partials_, row_pages = row_pages_;
  static constexpr u32 groups = 2, rows = 64 * groups, consumers = 128 * groups, threads = 128 + consumers;
  static constexpr u32 tile = kv::page_tokens, panel_bytes = tile * 128, tile_bytes = tile * dim * 2;
  static constexpr u32 ring_at = groups * tile_bytes, shared_bytes = ring_at + slots * tile_bytes;
  static constexpr u32 lag = 2;  // tiles that a producer thread has in flight before it publishes the oldest
  using Plan = PrefillPlan<heads, Layout::kv_heads, rows, tile, partials>;
  static_assert(tile == 64 && (dim == 64 || dim == 128 || dim == 256), "tiles are panels of 64 rows by 64 values");
  static_assert(slots >= 4, "two tiles are in use while others arrive, of which the last `lag` are not yet published");
  static_assert(heads % Layout::kv_heads == 0 && row_pages * kv::page_tokens <= kv::max_context, "limits");
};

// Byte offset of 16-byte piece `piece` of row `row` in a tile of panels of 64 rows by 128 bytes, 128-byte swizzle.
NINFERC_DEVICE constexpr u32 panel_offset(u32 row, u32 piece) {
  return piece / 8 * (64 * 128) + row * 128 + ((piece ^ row) % 8) * 16;
}

// A position in a ring of slots and the parity of the barrier phase it stands for.
template <u32 slots>
struct RingPosition {
  u32 slot = 0, parity = 0;
  NINFERC_DEVICE void advance() {
    if (++slot == slots) {
      slot = 0;
      parity ^= 1;
    }
  }
};

template <class Config>
NINFERC_DEVICE void produce(u32 ring, u64* full, u64* empty, const u8* cache, const i32* pages, const typename Config::Plan& plan) {
  using Layout = typename Config::Layout;
  constexpr u32 dim = Config::dim, tile = Config::tile, pieces = dim / 8, pass_rows = 128 / pieces;
  const u32 first = threadIdx.x / pieces, piece = threadIdx.x % pieces;  // of every pass: row, piece
  const u32 offset = panel_offset(first, piece), flipped = offset ^ (4 * 16);  // four rows on, the swizzle flips bit 2
  RingPosition<Config::slots> filling, published;
  u32 pending = 0;
  const auto publish = [&] {
    fence_proxy_async_shared();  // this thread's copies, which have landed, before the products that read them
    mbarrier_arrive(full + published.slot);
    published.advance();
  };
#pragma unroll 1
  for (u32 index = blockIdx.x; index < plan.items; index += gridDim.x) {
    const PrefillItem it = plan.item(index);
    const u32 kv_head = it.head / (Config::heads / Layout::kv_heads), steps = ceil_div(it.stop - min(it.first, it.stop), tile) * 2;
#pragma unroll 1
    for (u32 step = 0; step < steps; ++step) {
      // K0 K1 V0 K2 V1 … V(last): odd steps and the first are keys, but for the last
      const bool values = step > 0 && (step % 2 == 0 || step + 1 == steps);
      const u32 key = it.first + (values ? (step - 1) / 2 : (step + 1) / 2) * tile;
      const u32 page = u32(ld_global<i32>(pages + key / tile));
      const u8* source = cache + (values ? Layout::value_offset(page, kv_head) : Layout::key_offset(page, kv_head)) + threadIdx.x * 16;
      const u32 valid = it.stop - key, target = ring + filling.slot * Config::tile_bytes;
      mbarrier_wait(empty + filling.slot, filling.parity ^ 1);
#pragma unroll
      for (u32 i = 0; i < tile / pass_rows; ++i)
        cp_async_16_zfill(target + (i * pass_rows % 8 == 0 ? offset : flipped) + i * pass_rows * 128, source + i * 128 * 16,
                          first + i * pass_rows < valid);
      cp_async_commit();
      filling.advance();
      if (pending < Config::lag) {
        ++pending;
      } else {
        cp_async_wait<Config::lag>();
        publish();
      }
    }
  }
  cp_async_wait<0>();
  for (; pending > 0; --pending) publish();
}

template <class Config>
NINFERC_DEVICE void consume(u32 query, u32 ring, u64* full, u64* empty, const bf16* qr, i32 qr_stride,
                            const typename Config::Plan& plan,
                            const PrefillOutput<Config::heads, Config::rows, Config::dim, Config::consumers>& out) {
  constexpr u32 dim = Config::dim, tile = Config::tile, pieces = dim / 8;
  const u32 thread = threadIdx.x - 128, group = warp_id_uniform() / 4 - 1, lane = lane_id();
  const u32 own = query + group * Config::tile_bytes;
  RingPosition<Config::slots> position;
  WgmmaPipe pipe;
  // Waits for the next tile of the ring; the result is its address.
  const auto arrive = [&] {
    mbarrier_wait(full + position.slot, position.parity);
    return ring + position.slot * Config::tile_bytes;
  };

  for (u32 index = blockIdx.x; index < plan.items; index += gridDim.x) {
    const PrefillItem it = plan.item(index);
    const u32 first_row = it.tile * Config::rows;
    named_barrier_sync(2 + group, 128);  // all of the group are done with the rows of the item before
#pragma unroll
    for (u32 i = 0; i < 64 * pieces / 128; ++i) {
      const u32 at = i * 128 + thread % 128, row = at / pieces, piece = at % pieces, token = first_row + group * 64 + row;
      const bool present = token < plan.rows;
      cp_async_16_zfill(own + panel_offset(row, piece), qr + u64(present ? token : first_row) * qr_stride + it.head * dim + piece * 8, present);
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_proxy_async_shared();
    named_barrier_sync(2 + group, 128);

    const u32 warp_row = group * 64 + thread / 32 % 4 * 16, top = plan.before + first_row + warp_row;
    RowSoftmax softmax;
    f32 output[dim / 8][4] = {};
    f32 score[tile / 8][4];
    u32 weights[tile / 16][4];
    auto& flat_output = reinterpret_cast<f32(&)[dim / 2]>(output);
    auto& flat_score = reinterpret_cast<f32(&)[tile / 2]>(score);
    const auto multiply_scores = [&](u32 keys) {
#pragma unroll
      for (u32 i = 0; i < tile / 2; ++i) flat_score[i] = 0.0f;
      const u64 a = wgmma_descriptor(own), b = wgmma_descriptor(keys);
      pipe.fence();
#pragma unroll
      for (u32 step = 0; step < dim / 16; ++step) {
        const u32 offset = step / 4 * (Config::panel_bytes / 16) + step % 4 * 2;
        pipe.template multiply<tile>(flat_score, a + offset, b + offset);
      }
      pipe.commit();
    };
    const auto multiply_values = [&](u32 values) {
      const u64 b = wgmma_descriptor_transposed(values, Config::panel_bytes);
      pipe.fence();
#pragma unroll
      for (u32 step = 0; step < tile / 16; ++step)
        pipe.template multiply_transposed<dim>(flat_output, weights[step], b + step * 128);
      pipe.commit();
    };
    const auto release = [&](u32 slot) {
      if (lane == 0) mbarrier_arrive(empty + slot);
    };

    if (it.first < it.stop) {
      f32 factor[2];
      u32 key_slot = position.slot;
      multiply_scores(arrive());
      position.advance();
      pipe.template wait<0>();
      pipe.hold(flat_score);
      release(key_slot);
      softmax.update(score, it.first, top, out.scale, factor);
      pack_weights(score, weights);
#pragma unroll 1
      for (u32 key = it.first + tile; key < it.stop; key += tile) {
        key_slot = position.slot;
        multiply_scores(arrive());
        position.advance();
        const u32 value_slot = position.slot;
        multiply_values(arrive());
        position.advance();
        pipe.template wait<1>();
        pipe.hold(flat_score);
        release(key_slot);
        softmax.update(score, key, top, out.scale, factor);
        pipe.template wait<0>();
        pipe.hold(flat_output);
        release(value_slot);
        rescale(output, factor);
        pack_weights(score, weights);
      }
      const u32 value_slot = position.slot;
      multiply_values(arrive());
      position.advance();
      pipe.template wait<0>();
      pipe.hold(flat_output);
      release(value_slot);
    }
    out.store(it, plan.splits, plan.rows, warp_row, softmax, output);
    out.finish(it, plan.splits, plan.rows, thread, [] { named_barrier_sync(1, Config::consumers); });
  }
}

template <class Config>
NINFERC_DEVICE void prefill_wgmma(const bf16* qr, i32 qr_stride, const u8* cache, const bf16* gate, i32 gate_stride,
                                  const i32* lane_ncols, const i32* lane_len, const i32* lane_page_row, const i32* page_table,
                                  f32* partial_o, f32* partial_ml, u32* counters, bf16* o, i32 o_stride, f32 scale) {
  NINFERC_DYNAMIC_SMEM(memory);
  __shared__ u64 full[Config::slots], empty[Config::slots];
  const u32 query = shared_address(memory), ring = query + Config::ring_at;
  if (threadIdx.x == 0) {
    for (u32 i = 0; i < Config::slots; ++i) {
      mbarrier_init(full + i, 128);
      mbarrier_init(empty + i, Config::consumers / 32);
    }
    fence_mbarrier_init();
  }
  sync_block();
  grid_dependency_wait();
  const u32 active = u32(ld_global<i32>(lane_ncols)), before = u32(ld_global<i32>(lane_len));
  const i32* const pages = page_table + u64(u32(ld_global<i32>(lane_page_row))) * Config::row_pages;
  const typename Config::Plan plan(active, before, gridDim.x);
  if (warp_id_uniform() < 4) {
    lower_registers<24>();
    produce<Config>(ring, full, empty, cache, pages, plan);
  } else {
    raise_registers<240>();
    const PrefillOutput<Config::heads, Config::rows, Config::dim, Config::consumers> out{
        gate, gate_stride, o, o_stride, partial_o, partial_ml, counters, scale};
    consume<Config>(query, ring, full, empty, qr, qr_stride, plan, out);
  }
}

}  // namespace ninferc::attention
#endif  // NINFERC_HAS_WGMMA
