// Decode product of 16 to 32 columns on warpgroup products (wgmma): the order of work and of the sum is that of columns.cuh,
// but four neighbouring warps of one slice multiply together, and take their activations from shared memory by themselves.
//
// Many columns cost a warp that multiplies alone as many fragment reads and matrix instructions as unpacking costs; here both
// run beside the unpacking.  Activations of a chunk are brought into the K-major tiles of wgmma.cuh in the order in which the
// weights' fragments come out of their codes: word p (pair p of eight columns) of piece (step, lane) lies in product
// 2 step + p / 2, half p % 2, at the lane's four bytes.
#pragma once
#include <ninferc/base/wgmma.cuh>
#include <ninferc/linear/columns.cuh>

#if NINFERC_HAS_WGMMA
namespace ninferc {

// One thread's share of a chunk's activations: held in registers for a chunk before they are stored.
template <class G>
struct TileActivations {
  static constexpr u32 workers = 32 * G::warps_r, pieces = G::bucket * 16, share = ceil_div(pieces, workers);
  static constexpr u32 tile_bytes = G::bucket * 128;  // 64 columns of K
  const bf16* from[share];  // of chunk 0
  u32 to[share];            // of word 0 in a tile; word p lies p pieces of 16 bytes away, exclusive or
  u32x4 held[share];
  u32 rank;

  NINFERC_DEVICE TileActivations(const Activations& in, u32 rank_) : rank(rank_) {
#pragma unroll
    for (u32 i = 0; i < share; ++i) {
      const u32 index = rank + i * workers, column = index / 16, slot = G::piece_slot(index % 16), step = slot / 4;
      from[i] = in.at(column, index % 16 * 8);
      const u32 piece = step % 2 * 4;  // of 16 bytes
      to[i] = column * 128 + step / 2 * tile_bytes + (piece ^ column % 8) * 16 + slot % 4 * 4;
    }
  }
  NINFERC_DEVICE bool exists(u32 i) const { return pieces % workers == 0 || rank + i * workers < pieces; }

  NINFERC_DEVICE void load(u32 begin) {  // the chunk that begins at column `begin` of K
#pragma unroll
    for (u32 i = 0; i < share; ++i)
      if (exists(i)) held[i] = ld_global<u32x4>(from[i] + begin);
  }
  NINFERC_DEVICE void store(u32 tile) const {
#pragma unroll
    for (u32 i = 0; i < share; ++i) {
      if (!exists(i)) break;
      const u32x4 x = order_columns<G::format>(held[i]);
      const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
      for (u32 p = 0; p < 4; ++p) st_shared<u32>((tile + to[i]) ^ (p * 16), words[p]);
    }
  }
};

template <class Config>
NINFERC_DEVICE void linear_warpgroup(LinearArguments args) {
  using G = LinearGeometry<Config>;
  using Rows = typename ChunkProduct<G>::Rows;
  constexpr u32 stages = G::stages, tile_bytes = TileActivations<G>::tile_bytes;
  NINFERC_DYNAMIC_SMEM(smem);
  const u32 base = shared_address(smem);
  const u32 warp = warp_id_uniform(), warp_r = warp % G::warps_r, warp_k = warp / G::warps_r;
  const u32 team = warp_r / G::pair, side = warp_r % G::pair, member = warp_k * G::pair + side;
  const auto x_tile = [&](u32 number) { return base + G::x_base + (number * G::warps_k + warp_k) * G::x_bytes; };

  const u32 x_end = x_tile(G::x_tiles);

  Meeting<G>::open(base);
  const Dealing<G> dealt(team);
  const Activations in = dealt.columns(args);
  WeightRing<G> ring(base, warp, {args.codes, args.high, args.scales, side});
  ChunkWalk<G> next(dealt.first_chunk, warp_k, dealt.first_tile, dealt.tile_step);
  if (next.tile < G::tiles) ring.copier.seek(next.tile, next.number);
  // Weights do not depend on earlier kernels: fill the ring before waiting for these.
#pragma unroll 1
  for (u32 stage = 0; stage + 1 < stages; ++stage) {
    ring.prime(stage, next.tile < G::tiles);
    if constexpr (!G::bulk) cp_async_commit();
    ring.copier.step();
    if (next.advance() && next.tile < G::tiles) ring.copier.seek(next.tile, next.number);
  }
  prefetch_scales<G>(args, dealt, member);
  grid_dependency_wait();
  if constexpr (G::release == Release::early) grid_launch_dependents();
  if constexpr (G::format == Format::nvfp4) args.factor = G::Traits::unit / ld_nc<f32>(args.divisor);

  TileActivations<G> x(in, warp_r * 32 + lane_id());
  ChunkWalk<G> x_walk(dealt.first_chunk, warp_k, dealt.first_tile, dealt.tile_step);  // what is loaded next
  x.load(G::chunk_begin(x_walk.number));
  x_walk.advance();
  x.store(x_tile(0));
  fence_proxy_async_shared();
  x.load(G::chunk_begin(x_walk.number));
  x_walk.advance();
  if constexpr (G::epilogue == Epilogue::push_f32) args.push.open();
  Meeting<G>::meet();

  WgmmaPipe pipe;
  Team<G> sums{base + G::sums_base, team, member};
  u32 x_at = x_tile(0);
  u32 a[2][2][4];  // step in turn, product, fragment
#pragma unroll 1
  for (u32 tile = dealt.first_tile; tile < dealt.end_tile; tile += dealt.tile_step) {
    if constexpr (G::release == Release::late) {
      if (tile + dealt.tile_step >= dealt.end_tile) grid_launch_dependents();
    }
    const LinearEpilogue<G> epilogue(args, tile, dealt.segment, {base, team, dealt.segment}, sums.turn());
    typename TotalOf<G>::Type total;
#pragma unroll 1
    for (u32 slice = warp_k; slice < G::all_slices; slice += G::warps_k) {
      f32 d[G::bucket / 2];
#pragma unroll
      for (u32 i = 0; i < G::bucket / 2; ++i) d[i] = 0;
      const ChunkWalk<G> here(0, slice, 0, 0);
#pragma unroll 1
      for (u32 left = here.left; left != 0;) {
        // To the end of the slice multiplied, of the one copied or of the one whose activations are loaded.
        const u32 of_weights = left < next.left ? left : next.left, run = of_weights < x_walk.left ? of_weights : x_walk.left;
        const bool copies = next.tile < G::tiles;
        u32 x_begin = G::chunk_begin(x_walk.number);
#pragma unroll 1
        for (u32 i = run; i != 0; --i) {
          // Everybody's share of this chunk's activations is stored; everybody's products of the chunk before the last are
          // done, whose tile is overwritten; this warp has done with the stage before, which is refilled.
          named_barrier_sync(1 + G::teams + warp_k, 32 * G::warps_r);
          ring.refill(copies);
          if constexpr (!G::bulk) cp_async_commit();
          ring.copier.step();
          const u32 x_after = x_at + G::warps_k * G::x_bytes == x_end ? x_tile(0) : x_at + G::warps_k * G::x_bytes;
          x.store(x_after);
          fence_proxy_async_shared();
          x.load(x_begin);
          x_begin += G::slices * 128;
          if constexpr (!G::bulk) {
            cp_async_wait<stages - 1>();
            sync_warp();
          }
          ring.wait();
          // Fragments are written only when no product reads them any more.  Words that are fragments as they are (bf16) wait
          // before they are loaded; others before they are unpacked, which `hold` keeps behind the wait.
          if constexpr (G::format == Format::bf16) pipe.template wait<0>();
          Rows rows;
          rows.load(ring.at, 0);
#pragma unroll
          for (u32 step = 0; step < 4; ++step) {
            u32(&fragments)[2][4] = a[step % 2];
            pipe.template wait<1>();
            if constexpr (G::format != Format::bf16) rows.hold(step);
            u32 out[2][4];
            rows.unpack(step, out);
#pragma unroll
            for (u32 i = 0; i < 8; ++i) fragments[i / 4][i % 4] = out[i % 2][i / 4 * 2 + i % 4 / 2];
            pipe.fence();
            const u64 b = wgmma_descriptor(x_at + step / 2 * tile_bytes) + step % 2 * 4;
#pragma unroll
            for (u32 j = 0; j < 2; ++j) pipe.template multiply<G::bucket>(d, fragments[j], b + 2 * j);
            pipe.commit();
          }
          x_at = x_after;
          ring.next();
        }
        left -= run;
        if (next.advance(run) && next.tile < G::tiles) ring.copier.seek(next.tile, next.number);
        x_walk.advance(run);
      }
      pipe.template wait<0>();
      pipe.hold(d);
      ChunkProduct<G> product;
#pragma unroll
      for (u32 i = 0; i < G::bucket / 2; ++i) product.sum[0][i / 4][i % 4] = d[i];
      sums.add(total, epilogue, product, slice, slice - warp_k, tile < G::tiles);
    }
    sums.finish(total, epilogue, tile < G::tiles);
  }
  cp_async_wait<0>();
}

}  // namespace ninferc
#endif
