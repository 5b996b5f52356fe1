// A chain: several decode products of one step in one persistent kernel, each taking the one before (normalised, or as it is)
// as its activations.  Blocks walk through the products ("links") together; between two links that depend on each other stands
// a barrier of the grid.  What a chain is for: every warp keeps streaming weights through its ring across links, so that the
// end of one product, the barrier, the norm and the start of the next cost no memory time as long as the ring holds out.
//
// Order of the sum: that of geometry.cuh, bit for bit.  Work: an item is one tile (mtiles matrix tiles) and one group of its
// slices; items are dealt to the blocks in turn, beginning at block `first_block`, so that the blocks with an item less in one
// link can be those with one more in the next.  A block's warps_r teams of warps_k warps take its items in turn.  With one
// group the slice sums of an item meet in shared memory; with more, they meet in global memory, where the warp that arrives
// last adds them up: smaller pieces to deal, and only the activations of its own group in each block.
//
// All blocks must be resident at once: the compiler launches at most one per multiprocessor.
#pragma once
#include <ninferc/base/grid.cuh>
#include <ninferc/linear/activations.cuh>
#include <ninferc/linear/epilogue.cuh>
#include <ninferc/linear/geometry.cuh>
#include <ninferc/linear/weights.cuh>
#include <ninferc/norm/sumsq.cuh>

namespace ninferc {

// What all links share: warps, stages, stage_bytes (of a warp's ring), x_bytes, sums_bytes (largest of all links), blocks.
template <class Config>
struct ChainShape : Config {
  static constexpr u32 threads = Config::warps * 32, ring_bytes = Config::stages * Config::stage_bytes;
  static constexpr u32 x_base = 0;
  static constexpr u32 norm_base = round_up(Config::x_bytes, 128u);
  static constexpr u32 norm_bytes = 8 * (sumsq_parts + 1) * 4;
  static constexpr u32 ring_base = round_up(norm_base + norm_bytes, 128u);
  static constexpr u32 sums_base = ring_base + Config::warps * ring_bytes;
  static constexpr u32 smem_bytes = sums_base + Config::sums_bytes;
  static_assert(Config::stage_bytes % 16 == 0 && Config::stages >= 2, "stages are copied in pieces of 16 bytes");
};

// Config: that of LinearGeometry with bucket <= 8, resident, not split, and besides: k_groups, blocks, first_block.
template <class Config>
struct LinkGeometry : LinearGeometry<Config> {
  using Base = LinearGeometry<Config>;
  static constexpr u32 k_groups = Config::k_groups, blocks = Config::blocks, first_block = Config::first_block;
  static constexpr u32 total_slices = Base::segments * Base::slices, group_slices = total_slices / k_groups;
  static constexpr u32 slice_chunks = Base::chunks / Base::slices;
  static constexpr u32 items = Base::tiles * k_groups, item_step = blocks * Base::warps_r;
  // A group is some slices of one segment, or all slices of some segments.  Its chunks lie in shared memory row by row: one of
  // each slice in turn.
  static constexpr u32 row = group_slices < Base::slices ? group_slices : Base::slices;
  static constexpr u32 group_segments = group_slices / row;
  static constexpr u32 part_chunks = slice_chunks * row;  // of one segment's part
  static constexpr u32 local_chunks = group_segments * part_chunks;
  static constexpr u32 x_pitch = local_chunks * 256 + 64;
  static constexpr u32 x_bytes = Config::bucket * x_pitch;
  // Of a matrix tile's sums only the lanes that hold a real column are kept: 16 bytes each.
  static constexpr u32 lane_pairs = Config::bucket <= 2 ? 1 : Config::bucket / 2;
  static constexpr u32 unit_bytes = lane_pairs * 128;
  static constexpr bool shared_sums = k_groups == 1;
  static constexpr u32 team_sums = shared_sums ? group_slices * Base::mtiles * unit_bytes : 0;
  static constexpr u32 sums_bytes = 2 * Base::warps_r * team_sums;

  static_assert(Config::bucket <= 8 && Config::column_blocks == 1 && Config::resident && !Config::split,
                "a link takes up to eight columns");
  static_assert(Base::chunks % Base::slices == 0, "slices of a segment are of one length");
  static_assert(total_slices % k_groups == 0 && (group_slices % Base::slices == 0 || Base::slices % group_slices == 0),
                "a group is part of a segment or whole segments");
  static_assert(group_slices % Base::warps_k == 0, "every warp takes the same number of slices");
  static_assert(blocks % k_groups == 0 && first_block % k_groups == 0, "a block keeps to one group");
  static_assert(Base::warps_k == 1 || k_groups > 1 || Base::warps_r <= 15, "a team's barrier has a number of its own");
};

// Where a warp's copies are: item after item, of each its slices in turn, of these chunk by chunk.
struct LinkWalk {
  u32 item, slice, left;  // slice: within the group; left: chunks of the slice
};

// One warp's ring and what is being copied into it.
struct ChainRing {
  u32 base, stage_at, ahead;  // the stage multiplied next; bytes of stages filled from there on
  LinkWalk walk;
  WeightCursor cursor;
};

template <class Shape>
NINFERC_DEVICE u32 next_stage(const ChainRing& ring, u32 at) {
  return at + Shape::stage_bytes == ring.base + Shape::ring_bytes ? ring.base : at + Shape::stage_bytes;
}

// Work and copies of a link.
struct NoLink {};
template <class G>
struct LinkFill {
  static constexpr bool exists = true;
  static NINFERC_DEVICE u32 group(u32 item) { return G::k_groups == 1 ? 0 : item % G::k_groups; }
  static NINFERC_DEVICE u32 first_item(u32 warp) {
    const u32 block = (blockIdx.x + G::blocks - G::first_block) % G::blocks;
    return block + G::blocks * (warp / G::warps_k);
  }
  static NINFERC_DEVICE bool live(const ChainRing& ring) { return ring.walk.item < G::items; }
  static NINFERC_DEVICE void seek(ChainRing& ring, const LinearArguments& args) {
    ring.walk.left = G::slice_chunks;
    if (!live(ring)) return;
    const u32 slice = group(ring.walk.item) * G::group_slices + ring.walk.slice;
    WeightCopier<G> copier(args.codes, args.high, args.scales);
    copier.seek(ring.walk.item / G::k_groups, slice / G::slices * G::chunks + slice % G::slices);
    ring.cursor = copier;
  }
  static NINFERC_DEVICE void begin(ChainRing& ring, const LinearArguments& args, u32 warp) {
    ring.walk = LinkWalk{first_item(warp), warp % G::warps_k, 0};
    seek(ring, args);
  }
  // The slice has been copied: the next one.
  static NINFERC_DEVICE void next_slice(ChainRing& ring, const LinearArguments& args, u32 warp) {
    ring.walk.slice += G::warps_k;
    if (ring.walk.slice >= G::group_slices) {
      ring.walk.slice = warp % G::warps_k;
      ring.walk.item += G::item_step;
    }
    seek(ring, args);
  }
  // Copies the next chunk of the slice.
  static NINFERC_DEVICE void copy(ChainRing& ring, const LinearArguments& args, u32 to) {
    WeightCopier<G> copier(ring.cursor, args.codes, args.high, args.scales);
    copier.copy(to);
    copier.step();
    ring.cursor = copier;
  }
};
template <>
struct LinkFill<NoLink> {
  static constexpr bool exists = false;
  static NINFERC_DEVICE bool live(const ChainRing&) { return false; }
  static NINFERC_DEVICE void begin(ChainRing&, const LinearArguments&, u32) {}
  static NINFERC_DEVICE void next_slice(ChainRing&, const LinearArguments&, u32) {}
  static NINFERC_DEVICE void copy(ChainRing&, const LinearArguments&, u32) {}
};

// Fills the ring up to one free stage, as far as the link has chunks.  One group is committed per stage, filled or not, and one
// per product of a chunk: so the oldest chunk always has at least stages - 2 groups behind it.
template <class Shape, class G>
NINFERC_DEVICE void top_up(ChainRing& ring, const LinearArguments& args, u32 warp) {
#pragma unroll 1
  for (u32 filled = ring.ahead; filled < (Shape::stages - 1) * Shape::stage_bytes; filled += Shape::stage_bytes) {
    if (LinkFill<G>::live(ring)) {
      const u32 to = ring.stage_at + ring.ahead;
      LinkFill<G>::copy(ring, args, to >= ring.base + Shape::ring_bytes ? to - Shape::ring_bytes : to);
      ring.ahead += Shape::stage_bytes;
      if (--ring.walk.left == 0) LinkFill<G>::next_slice(ring, args, warp);
    }
    cp_async_commit();
  }
}

// All blocks have come here, and see what the others wrote before.  `arrivals` counts for good.
template <u32 blocks>
NINFERC_DEVICE void grid_barrier(u64* arrivals) {
  sync_block();
  if (threadIdx.x == 0) {
    fence_gpu();
    const u64 before = atomic_add_acq_rel_gpu(arrivals, u64(1)), target = before - before % blocks + blocks;
    while (ld_acquire_gpu<u64>(arrivals) < target) {
    }
    fence_gpu();
  }
  sync_block();
}

// Activations of the block's group into shared memory by all threads, normalised where the link says so; ends with a barrier.
// `ready` returns once they may be read; what does not depend on it is loaded before.
template <class Shape, class G, class Ready>
NINFERC_DEVICE void stage_link(u32 smem_x, f32* scratch, const LinearArguments& args, bf16* normed, Ready&& ready) {
  constexpr u32 pieces = G::local_chunks * 16, total = G::bucket * pieces;
  constexpr u32 rounds = ceil_div(total, Shape::threads), batch = rounds < 4 ? rounds : 4;
  const Activations in{args.x, args.x_stride, args.columns, 0};
  const u32 first_slice = LinkFill<G>::group(LinkFill<G>::first_item(0)) * G::group_slices;
  const u32 first_part = first_slice / G::slices * G::chunks, inner = first_slice % G::slices;
  // Column of x of piece `piece`, or K where it stands for no chunk.
  const auto column_of = [&](u32 piece) {
    const u32 local = piece / 16;
    u32 number = first_part + local;
    if constexpr (G::row != G::slices) {
      const u32 chunk = local % G::part_chunks / G::row * G::slices + inner + local % G::row;
      if (chunk >= G::chunks) return G::k;
      number = first_part + chunk;
    }
    const u32 k = G::chunk_begin(number) + piece % 16 * 8;
    return G::whole_x || k < G::chunk_end(number) ? k : G::k;
  };
  u32x4 gain[G::norm ? batch : 1];
  if constexpr (G::norm && rounds <= batch) {
#pragma unroll
    for (u32 i = 0; i < batch; ++i) {
      const u32 index = threadIdx.x + i * Shape::threads, k = column_of(index % pieces);
      gain[i] = index < total && k < G::k ? ld_nc<u32x4>(args.norm_w + k) : u32x4{0, 0, 0, 0};
    }
  }
  ready();
  for (u32 first = threadIdx.x; first < round_up(total, Shape::threads); first += batch * Shape::threads) {
    u32x4 x[batch];
#pragma unroll
    for (u32 i = 0; i < batch; ++i) {  // all loads of a batch before their first use
      const u32 index = first + i * Shape::threads, k = column_of(index % pieces);
      x[i] = index < total && k < G::k ? ld_cg<u32x4>(in.at(index / pieces, k)) : u32x4{0, 0, 0, 0};
      if constexpr (G::norm && rounds > batch)
        gain[i] = index < total && k < G::k ? ld_nc<u32x4>(args.norm_w + k) : u32x4{0, 0, 0, 0};
    }
    if constexpr (G::norm) {
      if (first < batch * Shape::threads) {  // once
        for (u32 task = warp_id(); task < G::bucket * sumsq_parts; task += Shape::warps) {
          const f32 part = sumsq_part_all<G::k>(in.at(task / sumsq_parts, 0), task % sumsq_parts);
          if (lane_id() == 0) scratch[task] = part;
        }
        sync_block();
        if (threadIdx.x < G::bucket)
          scratch[G::bucket * sumsq_parts + threadIdx.x] =
              rms_factor(sumsq_total(scratch + threadIdx.x * sumsq_parts), G::k, args.eps);
        sync_block();
      }
    }
#pragma unroll
    for (u32 i = 0; i < batch; ++i) {
      const u32 index = first + i * Shape::threads, column = index / pieces, piece = index % pieces;
      if (index >= total) break;
      if constexpr (G::norm) {
        const f32 factor = scratch[G::bucket * sumsq_parts + column];
        x[i] = u32x4{norm_pair(x[i].x, gain[i].x, factor), norm_pair(x[i].y, gain[i].y, factor),
                     norm_pair(x[i].z, gain[i].z, factor), norm_pair(x[i].w, gain[i].w, factor)};
        if constexpr (G::keep) {  // every block has the whole row: they store it in turn
          if (index % G::blocks == blockIdx.x && column < args.columns && column_of(piece) < G::k)
            st_global(normed + u64(column) * G::k + column_of(piece), x[i]);
        }
      }
      st_shared(smem_x + column * G::x_pitch + piece / 16 * 256 + G::piece_slot(piece % 16) * 16,
                order_columns<G::format>(x[i]));
    }
  }
  sync_block();
}

// From slice sums to outputs.  Lanes without a real column have no part in it.
template <class G>
struct LinkTotal {
  static constexpr u32 group_tiles = G::swiglu ? 2 : 1;
  static NINFERC_DEVICE bool holds() { return lane_id() % 4 < G::lane_pairs; }
  static NINFERC_DEVICE u32 offset() { return (lane_id() / 4 * G::lane_pairs + lane_id() % 4) * 16; }

  // `load(slice, m)`: this lane's four sums of a matrix tile in one slice, counted over all segments.
  template <class Load>
  static NINFERC_DEVICE void finish(const LinearEpilogue<G>& epilogue, u32 group, Load&& load) {
    f32 total[group_tiles][4];
#pragma unroll
    for (u32 i = 0; i < group_tiles; ++i) {
      const u32 m = group * group_tiles + i;
      f32x4 parts[G::total_slices];  // all loads before the first sum
#pragma unroll
      for (u32 s = 0; s < G::total_slices; ++s) parts[s] = load(s, m);
#pragma unroll
      for (u32 segment = 0; segment < G::segments; ++segment) {
        f32 v[4];
#pragma unroll
        for (u32 s = 0; s < G::slices; ++s) {
          const f32x4 part = parts[segment * G::slices + s];
          v[0] = s == 0 ? part.x : v[0] + part.x;
          v[1] = s == 0 ? part.y : v[1] + part.y;
          v[2] = s == 0 ? part.z : v[2] + part.z;
          v[3] = s == 0 ? part.w : v[3] + part.w;
        }
        epilogue.finish_segment(v, m);
#pragma unroll
        for (u32 e = 0; e < 4; ++e) total[i][e] = segment == 0 ? v[e] : total[i][e] + v[e];
      }
    }
    epilogue.store(total[0], total[group_tiles - 1], group, 0);
  }

  // Slice sums of an item in shared memory: [slice of the group][matrix tile][lane].
  static NINFERC_DEVICE void put(u32 sums, u32 slice, const ChunkProduct<G>& product) {
#pragma unroll
    for (u32 m = 0; m < G::mtiles; ++m) {
      const f32(&v)[4] = product.sum[m][0];
      if (holds()) st_shared(sums + (slice * G::mtiles + m) * G::unit_bytes + offset(), f32x4{v[0], v[1], v[2], v[3]});
    }
  }
  static NINFERC_DEVICE void finish_shared(const LinearEpilogue<G>& epilogue, u32 sums, u32 turn) {
#pragma unroll 1
    for (u32 group = turn; group < G::subtiles; group += G::warps_k) {
      if (holds())
        finish(epilogue, group,
               [&](u32 s, u32 m) { return ld_shared<f32x4>(sums + (s * G::mtiles + m) * G::unit_bytes + offset()); });
    }
  }

  // The same in global memory: [tile][slice over all segments][matrix tile][lane].
  static NINFERC_DEVICE u8* partial(const LinearArguments& args, u32 tile, u32 slice, u32 m) {
    return reinterpret_cast<u8*>(args.partials) +
           (u64(tile) * G::total_slices + slice) * (G::mtiles * G::unit_bytes) + m * G::unit_bytes + offset();
  }
  static NINFERC_DEVICE void publish(const LinearArguments& args, u32 tile, u32 slice, const ChunkProduct<G>& product) {
#pragma unroll
    for (u32 m = 0; m < G::mtiles; ++m) {
      const f32(&v)[4] = product.sum[m][0];
      if (holds()) st_global(partial(args, tile, slice, m), f32x4{v[0], v[1], v[2], v[3]});
    }
  }
  // After all of the warp's slices of the item: the last warp of the tile to arrive finishes it.
  static NINFERC_DEVICE void arrive(const LinearEpilogue<G>& epilogue) {
    const LinearArguments& args = epilogue.args;
    fence_gpu();
    sync_warp();
    u32 before = 0;
    if (lane_id() == 0) before = atomic_add_acq_rel_gpu(args.arrivals + epilogue.tile, 1);
    if (shfl(before, 0) != G::k_groups * G::warps_k - 1) return;
    fence_gpu();
    if (lane_id() == 0) st_global<u32>(args.arrivals + epilogue.tile, 0);
#pragma unroll 1
    for (u32 group = 0; group < G::subtiles; ++group) {
      if (holds())
        finish(epilogue, group, [&](u32 s, u32 m) { return ld_cg<f32x4>(partial(args, epilogue.tile, s, m)); });
    }
  }
};

// `count` chunks of a slice: product of the oldest stage, copy of a chunk of link F into the stage freed before.  The ring is
// full but for one stage, unless F copies nothing.
template <class Shape, class G, class F>
NINFERC_DEVICE void run_chunks(ChunkProduct<G>& product, ChainRing& ring, const LinearArguments& args, u32& x, u32 count) {
  u32 freed = ring.stage_at == ring.base ? ring.base + Shape::ring_bytes - Shape::stage_bytes : ring.stage_at - Shape::stage_bytes;
#pragma unroll 1
  for (; count != 0; --count) {
    // All lanes have landed their copies of this stage and have done with the one before.
    cp_async_wait<Shape::stages - 2>();
    sync_warp();
    LinkFill<F>::copy(ring, args, freed);
    cp_async_commit();
    freed = ring.stage_at;
    product.add(ring.stage_at, x);
    x += G::row * 256;
    ring.stage_at = next_stage<Shape>(ring, ring.stage_at);
  }
}

// One link by one warp; on return the ring holds the first chunks of the link behind it.
template <class Shape, class G, class Next>
NINFERC_DEVICE void run_link(const LinearArguments& args, const LinearArguments& next_args, ChainRing& ring, u32 warp,
                             u32 smem_x, u32 smem_sums) {
  static_assert(G::stage_bytes <= Shape::stage_bytes && G::x_bytes <= Shape::x_bytes && G::sums_bytes <= Shape::sums_bytes &&
                G::warps_r * G::warps_k == Shape::warps && G::blocks == Shape::blocks, "the link does not fit its chain");
  const u32 team = warp / G::warps_k, warp_k = warp % G::warps_k;
  const u32 x_lane = smem_x + lane_id() / 4 % G::bucket * G::x_pitch + lane_id() % 4 * 16;  // column and piece of this lane
  bool in_next = false;
  u32 buffer = 0, finisher = 0;
#pragma unroll 1
  for (u32 item = LinkFill<G>::first_item(warp); item < G::items; item += G::item_step) {
    const u32 tile = item / G::k_groups, first_slice = LinkFill<G>::group(item) * G::group_slices;
    const u32 sums = smem_sums + (team * 2 + buffer) * G::team_sums;
    const LinearEpilogue<G> epilogue{args, tile, 0};
#pragma unroll 1
    for (u32 slice = warp_k; slice < G::group_slices; slice += G::warps_k) {
      ChunkProduct<G> product;
      product.clear();
      u32 x = x_lane + (slice / G::row * G::part_chunks + slice % G::row) * 256;
#pragma unroll 1
      for (u32 left = G::slice_chunks; left != 0;) {
        if (!in_next && !LinkFill<G>::live(ring)) {
          in_next = true;
          LinkFill<Next>::begin(ring, next_args, warp);
          if constexpr (LinkFill<Next>::exists) top_up<Shape, Next>(ring, next_args, warp);
        }
        u32 count = left;
        if (!in_next) {
          count = count < ring.walk.left ? count : ring.walk.left;
          run_chunks<Shape, G, G>(product, ring, args, x, count);
          if ((ring.walk.left -= count) == 0) LinkFill<G>::next_slice(ring, args, warp);
        } else if (LinkFill<Next>::live(ring)) {
          count = count < ring.walk.left ? count : ring.walk.left;
          run_chunks<Shape, G, Next>(product, ring, next_args, x, count);
          if ((ring.walk.left -= count) == 0) LinkFill<Next>::next_slice(ring, next_args, warp);
        } else {
          run_chunks<Shape, G, NoLink>(product, ring, args, x, count);
          ring.ahead -= count * Shape::stage_bytes;
        }
        left -= count;
      }
      if constexpr (G::shared_sums) LinkTotal<G>::put(sums, slice, product);
      else LinkTotal<G>::publish(args, tile, first_slice + slice, product);
    }
    if constexpr (G::shared_sums) {
      // Two buffers: these sums are overwritten by the item after the next, and the warps that read them here reach the
      // barrier of the next item only afterwards.
      if constexpr (G::warps_k == 1) sync_warp();
      else named_barrier_sync(1 + team, 32 * G::warps_k);
      LinkTotal<G>::finish_shared(epilogue, sums, warp_k >= finisher ? warp_k - finisher : warp_k + G::warps_k - finisher);
      buffer ^= 1;
      finisher = finisher + 1 == G::warps_k ? 0 : finisher + 1;
    } else {
      LinkTotal<G>::arrive(epilogue);
    }
  }
  if (!in_next) LinkFill<Next>::begin(ring, next_args, warp);
  if constexpr (LinkFill<Next>::exists) top_up<Shape, Next>(ring, next_args, warp);
}

}  // namespace ninferc
