// Prefill attention of one lane on mma.sync: causal, over the paged cache, output gate fused.
//
// A warp owns 16 query rows of one head: scores, softmax state and output stay in its registers.  Query rows lie in shared
// memory for the whole tile; key and value tiles alternate in a ring that cp.async fills.
#pragma once
#include <ninferc/base/async.cuh>
#include <ninferc/base/grid.cuh>
#include <ninferc/base/math.cuh>
#include <ninferc/base/mma.cuh>
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>
#include <ninferc/attention/prefill_plan.cuh>
#include <ninferc/attention/tile.cuh>
#include <ninferc/kv/layout.cuh>

namespace ninferc::attention {

// warps: 16 query rows each.  tile: keys of a shared-memory tile.  slots: tiles in the ring.  partials: room for partial
// results of split tiles.  row_pages: entries of a page-table row.
template <class Layout_, u32 heads_, u32 warps_, u32 tile_, u32 slots_, u32 partials_, u32 row_pages_>
struct PrefillMma {
  using Layout = Layout_;
  static constexpr u32 heads = heads_, dim = Layout::dim, warps = warps_, threads = 32 * warps, rows = 16 * warps;
  static constexpr u32 tile = tile_, slots = slots_, partials = partials_, row_pages = row_pages_;
  static constexpr u32 tile_bytes = tile * dim * 2, ring_at = rows * dim * 2, shared_bytes = ring_at + slots * tile_bytes;
  using Plan = PrefillPlan<heads, Layout::kv_heads, rows, tile, partials>;
  static_assert(slots >= 2 && kv::page_tokens % tile == 0 && tile % 16 == 0, "a tile lies within a page");
  static_assert(heads % Layout::kv_heads == 0 && row_pages * kv::page_tokens <= kv::max_context, "limits");
};

template <class Config>
NINFERC_DEVICE void prefill_mma(const bf16* qr, i32 qr_stride, const u8* cache, const bf16* gate, i32 gate_stride,
                                const i32* lane_ncols, const i32* lane_len, const i32* lane_page_row, const i32* page_table,
                                f32* partial_o, f32* partial_ml, u32* counters, bf16* o, i32 o_stride, f32 scale) {
  using Layout = typename Config::Layout;
  constexpr u32 dim = Config::dim, pieces = dim / 8, tile = Config::tile, threads = Config::threads;
  NINFERC_DYNAMIC_SMEM(memory);
  const u32 query = shared_address(memory), ring = query + Config::ring_at;
  const u32 thread = threadIdx.x, lane = lane_id(), warp = warp_id_uniform();
  const PrefillOutput<Config::heads, Config::rows, dim, threads> out{gate, gate_stride, o, o_stride, partial_o, partial_ml,
                                                                     counters, scale};

  grid_dependency_wait();
  const u32 active = u32(ld_global<i32>(lane_ncols)), before = u32(ld_global<i32>(lane_len));
  const i32* const pages = page_table + u64(u32(ld_global<i32>(lane_page_row))) * Config::row_pages;
  const typename Config::Plan plan(active, before, gridDim.x);

  for (u32 index = blockIdx.x; index < plan.items; index += gridDim.x) {
    const PrefillItem it = plan.item(index);
    const u32 kv_head = it.head / (Config::heads / Layout::kv_heads), first_row = it.tile * Config::rows;

    // ---- loads: query rows with the first key tile, then keys and values in turn ----
    u32 next = it.first * 2, into = 0;  // next tile: key · 2 + (values)
    const auto issue = [&] {
      const u32 key = next / (2 * tile) * tile;
      if (key < it.stop) {
        const bool values = next / tile % 2 != 0;
        const u32 page = u32(ld_global<i32>(pages + key / kv::page_tokens));
        const u8* const block = cache + (values ? Layout::value_offset(page, kv_head) : Layout::key_offset(page, kv_head));
        copy_rows<dim, tile, threads>(ring + into * Config::tile_bytes, block + key % kv::page_tokens * (dim * 2), it.stop - key, thread);
        next += tile;
        into = into + 1 == Config::slots ? 0 : into + 1;
      }
      cp_async_commit();
    };
#pragma unroll
    for (u32 i = 0; i < Config::rows * pieces / threads; ++i) {
      const u32 at = i * threads + thread, row = at / pieces, piece = at % pieces;
      const bool present = first_row + row < active;
      const u64 token = present ? first_row + row : first_row;
      cp_async_16_zfill(query + swizzled<dim>(row, piece), qr + token * qr_stride + it.head * dim + piece * 8, present);
    }
#pragma unroll 1
    for (u32 i = 0; i + 1 < Config::slots; ++i) issue();
    u32 slot = 0;
    const auto next_tile = [&] {
      cp_async_wait<Config::slots - 2>();
      sync_block();
      issue();
      const u32 address = ring + slot * Config::tile_bytes;
      slot = slot + 1 == Config::slots ? 0 : slot + 1;
      return address;
    };

    const u32 top = before + first_row + warp * 16;  // last key that the warp's first row sees
    RowSoftmax softmax;
    f32 output[dim / 8][4] = {};

    for (u32 key = it.first; key < it.stop; key += tile) {
      const bool visible = key <= top + 15;  // for the warp as a whole
      u32 weights[tile / 16][4];
      const u32 keys = next_tile();
      if (visible) {
        f32 score[tile / 8][4] = {};
#pragma unroll
        for (u32 step = 0; step < dim / 16; ++step) {
          u32 a[4];
          ldmatrix_x4(a, query + swizzled<dim>(warp * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
          for (u32 n = 0; n < tile / 16; ++n) {
            u32 b[4];
            ldmatrix_x4(b, keys + swizzled<dim>(n * 16 + lane / 16 * 8 + lane % 8, step * 2 + lane / 8 % 2));
            mma_m16n8k16_bf16(score[2 * n], a, {b[0], b[1]});
            mma_m16n8k16_bf16(score[2 * n + 1], a, {b[2], b[3]});
          }
        }
        f32 factor[2];
        softmax.update(score, key, top, scale, factor);
        pack_weights(score, weights);
        rescale(output, factor);
      }
      const u32 values = next_tile();
      if (visible) {
#pragma unroll
        for (u32 step = 0; step < tile / 16; ++step) {
#pragma unroll
          for (u32 n = 0; n < dim / 16; ++n) {
            u32 b[4];
            ldmatrix_x4_trans(b, values + swizzled<dim>(step * 16 + lane % 16, n * 2 + lane / 16));
            mma_m16n8k16_bf16(output[2 * n], weights[step], {b[0], b[1]});
            mma_m16n8k16_bf16(output[2 * n + 1], weights[step], {b[2], b[3]});
          }
        }
      }
    }
    cp_async_wait<0>();
    sync_block();  // query rows and ring are free for the next item

    out.store(it, plan.splits, active, warp * 16, softmax, output);
    out.finish(it, plan.splits, active, thread, [] { sync_block(); });
  }
}

}  // namespace ninferc::attention
