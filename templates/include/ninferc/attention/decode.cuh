// Decode attention over the paged cache: partial results per chunk of keys (attend), then their merge (merge).
//
// Persistent blocks walk the device-built work list.  An item is a chunk of one KV head's keys for up to `group` columns;
// its (column, query head) pairs are the rows of 16-row matrix tiles.  Rows never mix in a matrix product, keys are taken
// in order in tiles of 32, and a key beyond a column's length leaves that column's maximum and sum untouched and adds an
// exact zero to its output: a column's bits do not depend on the columns it shares a pass with.
//
// Key and value tiles alternate in one ring of shared memory that cp.async keeps full across items.  Scores and weights go
// through shared memory: the score product splits over keys and dimensions, the value product over dimensions (32 a warp).
#pragma once
#include <ninferc/base/async.cuh>
#include <ninferc/base/grid.cuh>
#include <ninferc/base/math.cuh>
#include <ninferc/base/mma.cuh>
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>
#include <ninferc/attention/tile.cuh>
#include <ninferc/attention/worklist.cuh>
#include <ninferc/kv/layout.cuh>

namespace ninferc::attention {

#define NINFERC_MINUS_INFINITY bits_float(0xff800000u)

// lane_columns: columns per lane (T).  group: columns per item.  row_pages: entries of a page-table row.
// early: work list and lane tables are complete when a block starts (compiler/passes/early.py).  Then tiles of keys and values
// that end before the lane's length are copied ahead of the dependency wait: earlier steps wrote them, this step appends behind.
template <class Layout_, u32 heads_, u32 lane_columns_, u32 group_, u32 row_pages_, u32 chunks_, u32 slots_, bool early_>
struct Decode {
  static constexpr bool early = early_;
  using Layout = Layout_;
  static constexpr u32 heads = heads_, lane_columns = lane_columns_, group = group_, row_pages = row_pages_;
  static constexpr u32 chunks = chunks_, slots = slots_;  // chunks a column can have; tiles in the ring
  static constexpr u32 dim = Layout::dim, share = heads / Layout::kv_heads;  // query heads of a KV head
  static constexpr u32 tile = 32;
  static constexpr u32 row_tiles = ceil_div(share * group, 16u), rows = 16 * row_tiles;
  static constexpr u32 warps = dim / 32, threads = 32 * warps;
  static constexpr u32 key_parts = warps < 4 ? warps : 4, dim_parts = warps / key_parts;  // of the score product
  static constexpr u32 key_tiles = tile / 8 / key_parts, depth = dim / 16 / dim_parts;    // per warp
  static constexpr u32 passes = ceil_div(rows * 8, threads);                              // 8 lanes to a row of scores
  static constexpr u32 resident = row_tiles == 2 ? 2 : row_tiles > 2 ? 1 : 0;  // row tiles with query values in registers
  static constexpr u32 tile_bytes = tile * dim * 2;
  static constexpr u32 score_pitch = tile + 8, weight_pitch = tile * 2 + 16;  // floats; bytes
  static constexpr u32 query_at = slots * tile_bytes, score_at = query_at + rows * dim * 2;
  static constexpr u32 weight_at = score_at + dim_parts * rows * score_pitch * 4, rescale_at = weight_at + rows * weight_pitch;
  static constexpr u32 shared_bytes = rescale_at + rows * 4;
  static_assert(dim == 32 || dim == 64 || dim == 128 || dim == 256, "a warp owns 32 dimensions of the output");
  static_assert(heads % Layout::kv_heads == 0, "query heads share KV heads equally");
  static_assert(slots >= 2 && chunks <= max_chunks && row_pages * kv::page_tokens <= kv::max_context, "limits");
};

// The loading side: walks items and tiles ahead of the computation.
template <class Config>
struct TileLoader {
  using Layout = typename Config::Layout;
  const u8* cache;
  const i32 *work, *lane_len, *page_table;
  u32 item, items, slot = 0;
  u32 key = 0, stop = 0, length = 0, kv_head = 0, page = 0, next_page = 0, entry = 0;  // entry: of `page` in the page table
  bool values = false;

  NINFERC_DEVICE void open() {
    if (item < items) open(ld_cg<WorkItem>(work + 4 * item));
  }
  NINFERC_DEVICE void open(const WorkItem& w) {
    length = u32(ld_cg<i32>(lane_len + w.lane()));
    key = w.first;
    stop = min(w.first + w.chunk(), length + w.last_column() + 1);
    kv_head = w.kv_head();
    entry = w.page_row() * Config::row_pages + key / kv::page_tokens;
    page = u32(ld_cg<i32>(page_table + entry));
    look_ahead();
  }
  NINFERC_DEVICE void look_ahead() {
    if (key + kv::page_tokens < stop) next_page = u32(ld_cg<i32>(page_table + ++entry));
  }
  // Whether earlier steps have written all of the next tile.
  NINFERC_DEVICE bool old() const { return item >= items || key + Config::tile <= length; }
  // Starts the copy of the next tile into the next slot of the ring; one commit group per call, empty at the end.
  NINFERC_DEVICE void issue(u32 ring) {
    if (item < items) {
      const u64 block = values ? Layout::value_offset(page, kv_head) : Layout::key_offset(page, kv_head);
      copy_rows<Config::dim, Config::tile, Config::threads>(
          ring + slot * Config::tile_bytes, cache + block + key % kv::page_tokens * (Config::dim * 2), stop - key, threadIdx.x);
      if (values) {
        key += Config::tile;
        if (key >= stop) {
          item += gridDim.x;
          open();
        } else if (key % kv::page_tokens == 0) {
          page = next_page;
          look_ahead();
        }
      }
      values = !values;
    }
    cp_async_commit();
    slot = slot + 1 == Config::slots ? 0 : slot + 1;
  }
};

// The (column, query head) pairs behind the rows of an item's matrix tiles.
template <class Config>
struct ItemRows {
  WorkItem item;
  u32 first;  // column of row 0 within the lane

  NINFERC_DEVICE explicit ItemRows(const WorkItem& w) : item(w), first(w.last_column() / Config::group * Config::group) {}
  NINFERC_DEVICE u32 lane_column(u32 row) const { return first + row / Config::share; }
  NINFERC_DEVICE bool active(u32 row) const {
    return row < Config::share * Config::group && ((item.columns >> lane_column(row)) & 1) != 0;
  }
  NINFERC_DEVICE u32 column(u32 row) const { return item.lane() * Config::lane_columns + lane_column(row); }
  NINFERC_DEVICE u32 head(u32 row) const { return item.kv_head() * Config::share + row % Config::share; }
};

// qr[columns][heads · dim] → partial_o[columns][heads][chunks][dim], not divided by the sum, and partial_ml[…][chunks][2]:
// maximum (base 2, scaled) and sum of weights.  scale = log2(e) / sqrt(dim).
template <class Config>
NINFERC_DEVICE void attend(const bf16* qr, i32 qr_stride, const u8* cache, const i32* lane_len, const i32* page_table,
                           const i32* work, const i32* work_count, f32* partial_o, f32* partial_ml, f32 scale) {
  constexpr u32 dim = Config::dim, rows = Config::rows, row_tiles = Config::row_tiles, threads = Config::threads;
  NINFERC_DYNAMIC_SMEM(memory);
  const u32 base = shared_address(memory), query = base + Config::query_at, scores = base + Config::score_at;
  const u32 weights = base + Config::weight_at, rescale = base + Config::rescale_at;
  const u32 thread = threadIdx.x, lane = lane_id(), warp = warp_id_uniform();
  const u32 group_row = lane / 4, pair = lane % 4;

  for (u32 i = thread; i < rows * Config::weight_pitch / 4; i += threads) st_shared(weights + 4 * i, 0u);
  grid_launch_dependents();  // first: a short kernel lets the next one fetch its weights meanwhile
  if constexpr (!Config::early) grid_dependency_wait();

  // The first item is fetched together with the count: the grid is no larger than the table.
  const WorkItem first_item = ld_cg<WorkItem>(work + 4 * blockIdx.x);
  const u32 items = u32(ld_cg<i32>(work_count));
  TileLoader<Config> loader{cache, work, lane_len, page_table, blockIdx.x, items};
  if (blockIdx.x < items) loader.open(first_item);
  u32 issued = 0;
  if constexpr (Config::early) {
#pragma unroll 1
    for (; issued + 1 < Config::slots && loader.old(); ++issued) loader.issue(base);
    grid_dependency_wait();
  }
#pragma unroll 1
  for (; issued + 1 < Config::slots; ++issued) loader.issue(base);

  u32 slot = 0;
  // Waits for the next tile, frees the one before it, and keeps the ring full.  Returns the tile's address.
  const auto next_tile = [&] {
    cp_async_wait<Config::slots - 2>();
    sync_block();
    loader.issue(base);
    const u32 address = base + slot * Config::tile_bytes;
    slot = slot + 1 == Config::slots ? 0 : slot + 1;
    return address;
  };

  for (u32 item = blockIdx.x; item < items; item += gridDim.x) {
    const ItemRows<Config> item_rows(ld_global<WorkItem>(work + 4 * item));
    const WorkItem& w = item_rows.item;
    const u32 length = u32(ld_global<i32>(lane_len + w.lane()));
    const u32 stop = min(w.first + w.chunk(), length + w.last_column() + 1);

    // query rows; absent ones are zeros
    constexpr u32 pieces = dim / 8;
#pragma unroll
    for (u32 i = 0; i < rows * pieces / threads; ++i) {
      const u32 index = i * threads + thread, row = index / pieces, piece = index % pieces;
      u32x4 value{0, 0, 0, 0};
      if (item_rows.active(row))
        value = ld_global<u32x4>(qr + u64(item_rows.column(row)) * qr_stride + item_rows.head(row) * dim + piece * 8);
      st_shared(query + swizzled<dim>(row, piece), value);
    }
    f32 maximum[Config::passes], sum[Config::passes];
    u32 visible[Config::passes];  // keys that the row of this thread's scores sees
#pragma unroll
    for (u32 p = 0; p < Config::passes; ++p) {
      const u32 row = p * (threads / 8) + thread / 8;
      maximum[p] = NINFERC_MINUS_INFINITY;
      sum[p] = 0.0f;
      visible[p] = item_rows.active(row) ? length + item_rows.lane_column(row) + 1 : 0;
    }
    f32 output[row_tiles][4][4] = {};
    // Wide passes keep this warp's part of the query rows in registers: shared memory is their bottleneck.
    const u32 key_part = warp % Config::key_parts, dim_part = warp / Config::key_parts;
    u32 resident[Config::resident + 1][Config::depth][4];
    const auto load_query = [&](u32 (&a)[4], u32 m, u32 step) {
      ldmatrix_x4(a, query + swizzled<dim>(m * 16 + lane % 16, (dim_part * Config::depth + step) * 2 + lane / 16));
    };
    if constexpr (Config::resident > 0) {
      sync_block();
#pragma unroll
      for (u32 i = 0; i < Config::resident * Config::depth; ++i)
        load_query(resident[i / Config::depth][i % Config::depth], i / Config::depth, i % Config::depth);
    }

    for (u32 key = w.first; key < stop; key += Config::tile) {
      // ---- scores: rows x 32 keys; this warp's keys and dimensions ----
      const u32 keys = next_tile();
      f32 score[row_tiles][Config::key_tiles][2][4] = {};
#pragma unroll
      for (u32 step = 0; step < Config::depth; step += 2) {
        const u32 piece = (dim_part * Config::depth + step) * 2;
        u32 b[Config::key_tiles][4];
#pragma unroll
        for (u32 n = 0; n < Config::key_tiles; ++n)
          ldmatrix_x4(b[n], keys + swizzled<dim>((key_part * Config::key_tiles + n) * 8 + lane % 8, piece + lane / 8));
#pragma unroll
        for (u32 m = 0; m < row_tiles; ++m)
#pragma unroll
          for (u32 half = 0; half < 2; ++half) {
            const bool held = i32(m) < i32(Config::resident);
            auto& a = resident[held ? m : Config::resident][step + half];
            if (!held) load_query(a, m, step + half);
#pragma unroll
            for (u32 n = 0; n < Config::key_tiles; ++n) {
              const u32 part[2] = {b[n][2 * half], b[n][2 * half + 1]};
              mma_m16n8k16_bf16(score[m][n][half], a, part);
            }
          }
      }
#pragma unroll
      for (u32 m = 0; m < row_tiles; ++m)
#pragma unroll
        for (u32 n = 0; n < Config::key_tiles; ++n)
#pragma unroll
          for (u32 low = 0; low < 2; ++low) {
            const u32 row = dim_part * rows + m * 16 + low * 8 + group_row;
            const u32 column = (key_part * Config::key_tiles + n) * 8 + pair * 2;
            st_shared(scores + (row * Config::score_pitch + column) * 4,
                      f32x2{score[m][n][0][2 * low] + score[m][n][1][2 * low],
                            score[m][n][0][2 * low + 1] + score[m][n][1][2 * low + 1]});
          }
      sync_block();

      // ---- weights: eight lanes to a row, four keys to a lane ----
#pragma unroll
      for (u32 p = 0; p < Config::passes; ++p) {
        const u32 row = p * (threads / 8) + thread / 8, part = lane % 8;
        if (row < rows) {
          f32x4 s = ld_shared<f32x4>(scores + (row * Config::score_pitch + part * 4) * 4);
#pragma unroll
          for (u32 d = 1; d < Config::dim_parts; ++d) {
            const f32x4 more = ld_shared<f32x4>(scores + ((d * rows + row) * Config::score_pitch + part * 4) * 4);
            s = f32x4{s.x + more.x, s.y + more.y, s.z + more.z, s.w + more.w};
          }
          const u32 at = key + part * 4;
          const f32 low = NINFERC_MINUS_INFINITY;
          const f32 x0 = at < visible[p] ? __fmul_rn(s.x, scale) : low, x1 = at + 1 < visible[p] ? __fmul_rn(s.y, scale) : low;
          const f32 x2 = at + 2 < visible[p] ? __fmul_rn(s.z, scale) : low, x3 = at + 3 < visible[p] ? __fmul_rn(s.w, scale) : low;
          const f32 highest = fmaxf(maximum[p], warp_max<8>(fmaxf(fmaxf(x0, x1), fmaxf(x2, x3))));
          const f32 anchor = highest == low ? 0.0f : highest;  // no key seen yet: every weight is exp2(-inf) = 0
          const f32 factor = highest == maximum[p] ? 1.0f : exp2_fast(__fsub_rn(maximum[p], anchor));
          const u32 w01 = pack_bf16x2(exp2_fast(__fsub_rn(x0, anchor)), exp2_fast(__fsub_rn(x1, anchor)));
          const u32 w23 = pack_bf16x2(exp2_fast(__fsub_rn(x2, anchor)), exp2_fast(__fsub_rn(x3, anchor)));
          // the sum is that of the rounded weights, so that they stay a partition of one
          const f32 added = (bf16x2_lo(w01) + bf16x2_hi(w01)) + (bf16x2_lo(w23) + bf16x2_hi(w23));
          sum[p] = fmaf(sum[p], factor, added);
          maximum[p] = highest;
          st_shared(weights + row * Config::weight_pitch + part * 8, u32x2{w01, w23});
          if (part == 0) st_shared(rescale + row * 4, factor);
        }
      }

      // ---- output += weights x values; this warp's 32 dimensions ----
      const u32 values = next_tile();
#pragma unroll
      for (u32 m = 0; m < row_tiles; ++m) {
        const f32 upper = ld_shared<f32>(rescale + (m * 16 + group_row) * 4);
        const f32 lower = ld_shared<f32>(rescale + (m * 16 + 8 + group_row) * 4);
#pragma unroll
        for (u32 n = 0; n < 4; ++n) {
          output[m][n][0] *= upper;
          output[m][n][1] *= upper;
          output[m][n][2] *= lower;
          output[m][n][3] *= lower;
        }
      }
#pragma unroll
      for (u32 step = 0; step < Config::tile / 16; ++step) {
        u32 b[2][4];
#pragma unroll
        for (u32 n = 0; n < 2; ++n)
          ldmatrix_x4_trans(b[n], values + swizzled<dim>(step * 16 + lane % 16, warp * 4 + n * 2 + lane / 16));
#pragma unroll
        for (u32 m = 0; m < row_tiles; ++m) {
          u32 a[4];
          ldmatrix_x4(a, weights + (m * 16 + lane % 16) * Config::weight_pitch + step * 32 + lane / 16 * 16);
#pragma unroll
          for (u32 n = 0; n < 4; ++n) {
            const u32 part[2] = {b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]};
            mma_m16n8k16_bf16(output[m][n], a, part);
          }
        }
      }
    }

    // ---- partial results; the item is read again, which frees its registers in the loop above ----
    const ItemRows<Config> target_rows(ld_global<WorkItem>(work + 4 * item));
    const u32 chunk = target_rows.item.first / target_rows.item.chunk();
    const auto place = [&](u32 row) {
      return (u64(target_rows.column(row)) * Config::heads + target_rows.head(row)) * Config::chunks + chunk;
    };
#pragma unroll
    for (u32 p = 0; p < Config::passes; ++p) {
      const u32 row = p * (threads / 8) + thread / 8;
      const f32 total = warp_sum<8>(sum[p]);
      if (lane % 8 == 0 && target_rows.active(row)) st_global(partial_ml + place(row) * 2, f32x2{maximum[p], total});
    }
#pragma unroll
    for (u32 m = 0; m < row_tiles; ++m)
#pragma unroll
      for (u32 low = 0; low < 2; ++low) {
        const u32 row = m * 16 + low * 8 + group_row;
        if (!target_rows.active(row)) continue;
        f32* const target = partial_o + place(row) * dim + warp * 32 + pair * 2;
#pragma unroll
        for (u32 n = 0; n < 4; ++n)  // + 0: a tile of masked keys would turn -0 into +0
          st_global(target + n * 8, f32x2{output[m][n][2 * low] + 0.0f, output[m][n][2 * low + 1] + 0.0f});
      }
  }
}

// Partial results of a column's chunks → o = bf16(bf16(attention) · sigmoid(gate)).  Grid: x heads, y columns.
//
// A group of threads holds four dimensions each and adds up merge_span chunks in chunk order, the groups are added in order: an
// order that depends on the column's own length only.  All loads of a thread are in flight at once.
// early: the lane tables are complete when a block starts.
constexpr u32 merge_span = 16;

template <u32 heads, u32 dim, u32 lane_columns, u32 chunks, bool early>
NINFERC_DEVICE void merge(const f32* partial_o, const f32* partial_ml, const bf16* gate, i32 gate_stride,
                          const i32* lane_ncols, const i32* lane_len, bf16* o, i32 o_stride) {
  constexpr u32 groups = ceil_div(chunks, merge_span), members = dim < 128 ? 32 : dim / 4;  // threads of a group: whole warps
  static_assert(dim % 4 == 0 && chunks <= 64, "a lane looks after two chunks, a thread after four dimensions");
  __shared__ f32x4 sums[groups][members];
  grid_launch_dependents();  // first: a short kernel lets the next one fetch its weights meanwhile
  if constexpr (!early) grid_dependency_wait();
  const u32 head = blockIdx.x, column = blockIdx.y, batch_lane = column / lane_columns, t = column % lane_columns;
  const bool active = i32(t) < ld_cg<i32>(lane_ncols + batch_lane);
  const u32 length = u32(ld_cg<i32>(lane_len + batch_lane)) + t + 1;
  const u32 count = ceil_div(length, chunk_keys(length)), lane = lane_id();
  if constexpr (early) grid_dependency_wait();
  if (!active) return;

  const u32 group = threadIdx.x / members, member = threadIdx.x % members, first = member * 4;
  const bool holds = first < dim;  // narrow heads leave lanes without dimensions
  const u64 row = (u64(column) * heads + head) * chunks;
  f32x2 ml[2];
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
    ml[i] = f32x2{NINFERC_MINUS_INFINITY, 0.0f};
    if (lane + 32 * i < count) ml[i] = ld_global<f32x2>(partial_ml + (row + lane + 32 * i) * 2);
  }
  const f32* const source = partial_o + (row + group * merge_span) * dim + (holds ? first : 0);
  f32x4 part[merge_span];
#pragma unroll
  for (u32 i = 0; i < merge_span; ++i) {
    part[i] = f32x4{0, 0, 0, 0};
    if (group * merge_span + i < count) part[i] = ld_global<f32x4>(source + i * dim);
  }
  u32x2 g{0, 0};
  if (group == 0 && holds) g = ld_global<u32x2>(gate + u64(column) * gate_stride + head * dim + first);

  const f32 highest = warp_max(fmaxf(ml[0].x, ml[1].x));
  const f32 w0 = exp2_fast(ml[0].x - highest), w1 = exp2_fast(ml[1].x - highest);
  const f32 inverse = 1.0f / warp_sum(fmaf(w0, ml[0].y, __fmul_rn(w1, ml[1].y)));
  f32x4 sum{0, 0, 0, 0};
#pragma unroll
  for (u32 i = 0; i < merge_span; ++i) {
    const u32 chunk = group * merge_span + i;
    const f32 weight = shfl(chunk < 32 ? w0 : w1, chunk % 32);
    sum = f32x4{fmaf(weight, part[i].x, sum.x), fmaf(weight, part[i].y, sum.y), fmaf(weight, part[i].z, sum.z),
                fmaf(weight, part[i].w, sum.w)};
  }
  if constexpr (groups > 1) {
    sums[group][member] = sum;
    sync_block();
    if (group != 0) return;
#pragma unroll
    for (u32 other = 1; other < groups; ++other) {
      const f32x4 more = sums[other][member];
      sum = f32x4{sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w};
    }
  }
  if (!holds) return;
  const auto gated = [&](f32 value, f32 by) { return round_bf16(__fmul_rn(value, inverse)) * sigmoid_fast(by); };
  st_global(o + u64(column) * o_stride + head * dim + first,
            u32x2{pack_bf16x2(gated(sum.x, bf16x2_lo(g.x)), gated(sum.y, bf16x2_hi(g.x))),
                  pack_bf16x2(gated(sum.z, bf16x2_lo(g.y)), gated(sum.w, bf16x2_hi(g.y)))});
}

}  // namespace ninferc::attention
