// Decode product y[C, N] = x[C, K] W^T for up to 64 columns: the weights pass through once, at the speed of memory.
// Geometry and order of the sum: geometry.cuh.
#pragma once
#include <ninferc/base/grid.cuh>
#include <ninferc/linear/activations.cuh>
#include <ninferc/linear/claims.cuh>
#include <ninferc/linear/epilogue.cuh>
#include <ninferc/linear/geometry.cuh>
#include <ninferc/linear/ring.cuh>
#include <ninferc/linear/weights.cuh>

namespace ninferc {

// Where a warp is in its sequence of chunks: tile after tile, of each its slices in turn, of these chunk by chunk.
template <class G>
struct ChunkWalk {
  static constexpr u32 unclaimed = ~0u;
  u32 first_chunk, warp_k, tile, tile_step;
  u32 slice, number, left;  // of this slice: the chunk's number over all segments, chunks from it to the end

  // `first_chunk_`: of the block's first segment.
  NINFERC_DEVICE ChunkWalk(u32 first_chunk_, u32 warp_k_, u32 first_tile, u32 tile_step_)
      : first_chunk(first_chunk_), warp_k(warp_k_), tile(first_tile), tile_step(tile_step_), slice(warp_k_) {
    begin_slice();
  }
  NINFERC_DEVICE void begin_slice() {
    const u32 first = slice % G::slices;
    number = first_chunk + slice / G::slices * G::chunks + first;
    left = G::chunks / G::slices;
  }
  // `count` chunks on, at most to the end of the slice.  True when another slice begins, of a claimed tile perhaps: `unclaimed`.
  NINFERC_DEVICE bool advance(u32 count = 1) {
    number += count * G::slices;
    if ((left -= count) != 0) return false;
    slice += G::warps_k;
    if (slice >= G::all_slices) {
      slice = warp_k;
      tile = G::claimed ? unclaimed : tile + tile_step;
    }
    begin_slice();
    return true;
  }
};

// The block's share of the work.  Tiles are dealt to blocks first, so that every block has work before any has twice.  Warps
// that share a ring of activations walk in step, past the last tile if need be: then without copies and without storing.
template <class G>
struct Dealing {
  static constexpr u32 sharers = G::column_blocks * (G::split ? G::segments : 1);  // neighbouring blocks of one tile
  u32 tile_step, first_tile, end_tile, segment, first_chunk;

  NINFERC_DEVICE explicit Dealing(u32 team) {
    const u32 blocks = gridDim.x / sharers;
    tile_step = blocks * G::teams;
    first_tile = team * blocks + blockIdx.x / sharers;
    end_tile = G::resident ? G::all_tiles : ceil_div(G::tiles, tile_step) * tile_step;
    segment = G::split ? blockIdx.x / G::column_blocks % G::segments : 0;
    first_chunk = segment * G::chunks;
  }
  // Narrows the arguments to the block's columns. Of the last blocks there may be none: they read the first and store nothing.
  NINFERC_DEVICE Activations columns(LinearArguments& args) const {
    if constexpr (G::column_blocks > 1) {
      args.first_column = blockIdx.x % G::column_blocks * G::bucket;
      const u32 left = args.columns > args.first_column ? args.columns - args.first_column : 0;
      args.columns = left < G::bucket ? left : G::bucket;
      if (left == 0) return {args.x, args.x_stride, 1, 0};
    }
    return {args.x, args.x_stride, args.columns, args.first_column};
  }
};

// Where a team puts its slices together.
template <class G>
struct Team {
  u32 sums, number, member;  // shared memory of all teams, this team, this warp in it
  u32 buffer = 0, finisher = 0;

  // The first unit that this warp finishes.
  NINFERC_DEVICE u32 turn() const { return member >= finisher ? member - finisher : member + G::team_warps - finisher; }

  // This warp's slice is done.  `exists`: the tile is one.
  template <class P, class Total>
  NINFERC_DEVICE void add(Total& total, const LinearEpilogue<P>& epilogue, const ChunkProduct<P>& product, u32 slice,
                          u32 first_slice, bool exists) {
    if constexpr (G::reduce) {
      // With two buffers one barrier per round is enough: these sums are overwritten in the round after the next, and the
      // warps that read them here reach the barrier of the next round only afterwards.
      const u32 at = sums + (number * G::sums_buffers + buffer) * G::sums_bytes;
      SharedTotal<P>::put(at, member, product);
      named_barrier_sync(1 + number, 32 * G::team_warps);
      if (G::resident || exists) {
        if constexpr (G::slices_per_warp > 1) total.add(epilogue, at, first_slice, turn());
        else SharedTotal<P>::finish(epilogue, at, turn());
      }
      if constexpr (G::sums_buffers == 2) buffer ^= 1;
      else named_barrier_sync(1 + number, 32 * G::team_warps);
    } else if (G::resident || exists) {
      total.add(epilogue, product, slice);
    }
  }
  // All slices of the tile are.
  template <class P, class Total>
  NINFERC_DEVICE void finish(Total& total, const LinearEpilogue<P>& epilogue, bool exists) {
    if constexpr (!G::reduce) {
      if (G::resident || exists) total.store(epilogue);
    } else if constexpr (G::slices_per_warp > 1) {
      if (G::resident || exists) total.store(epilogue, turn());
    }
    finisher = finisher + 1 == G::team_warps ? 0 : finisher + 1;
  }
};

// What only the end of a tile reads, row scales and the divisor, comes as far as L2 while the block waits: after the last tile
// nothing would hide the way from memory. By the first warp of a team.
template <class G>
NINFERC_DEVICE void prefetch_scales(const LinearArguments& args, const Dealing<G>& dealt, u32 member) {
  if (member != 0) return;
  if constexpr (G::format == Format::nvfp4) {
    if (lane_id() == 0) prefetch_l2(args.divisor);
  } else if constexpr (G::format == Format::fp8_row) {
    for (u32 tile = dealt.first_tile + lane_id() * dealt.tile_step; tile < G::tiles; tile += 32 * dealt.tile_step) {
#pragma unroll
      for (u32 group = 0; group < G::subtiles; ++group) {
        const u32 row = G::output_row(tile * G::subtiles + group, 0);
        if (!G::whole_rows && row >= G::outputs) break;
        prefetch_l2(args.scales + 2 * u64(row));
        if constexpr (G::swiglu) prefetch_l2(args.scales + 2 * u64(row + G::n / 2));
      }
    }
  }
}

template <class G>
NINFERC_DEVICE auto copier_of(const LinearArguments& args, const LinearArguments& second, u32 side) {
  if constexpr (G::paired) {
    using H = LinearGeometry<SecondOf<typename G::Given>>;
    return PairCopier<G, H>{{args.codes, args.high, args.scales, side}, {second.codes, second.high, second.scales, side}};
  } else {
    return typename CopierOf<G::in_units, G>::Type(args.codes, args.high, args.scales, side);
  }
}

// `second`: of two products, that of the second.
template <class Config>
NINFERC_DEVICE void linear_columns(LinearArguments args, const LinearArguments& second = {}) {
  using G = LinearGeometry<Config>;
  constexpr u32 stages = G::stages;
  NINFERC_DYNAMIC_SMEM(smem);
  const u32 base = shared_address(smem);
  const u32 warp = warp_id_uniform(), warp_r = warp / G::warps_k, warp_k = warp % G::warps_k;
  const u32 team = warp_r / G::pair, side = warp_r % G::pair, member = warp_k * G::pair + side;
  const auto x_stage = [&](u32 stage) { return base + G::x_base + (stage * G::warps_k + warp_k) * G::x_bytes; };

  const Dealing<G> dealt(team);
  const u32 first_tile = dealt.first_tile, tile_step = dealt.tile_step, first_chunk = dealt.first_chunk;
  const Activations in = dealt.columns(args);
  const ActivationCopier<G> x_copier{in, warp_r * 32 + lane_id()};
  WeightRing<G, decltype(copier_of<G>(args, second, side))> ring(base, warp, copier_of<G>(args, second, side));
  ChunkWalk<G> next(first_chunk, warp_k, first_tile, tile_step);
  if (next.tile < G::all_tiles) ring.copier.seek(next.tile, next.number);
  const auto advance = [&]() {
    ring.copier.step();
    if (next.advance() && next.tile < G::all_tiles) ring.copier.seek(next.tile, next.number);
  };

  // Weights do not depend on earlier kernels: fill the ring before all else.
  const auto prime = [&](u32 first, u32 end) {
#pragma unroll 1
    for (u32 stage = first; stage < end; ++stage) {
      ring.prime(stage, next.tile < G::all_tiles);
      if constexpr (G::resident && !G::bulk) cp_async_commit();
      advance();
    }
  };
  prime(0, G::primed);
  Meeting<G>::open(base);
  if constexpr (G::claimed) ClaimsOf<G>::open(base);
  prefetch_scales<G>(args, dealt, member);
  if constexpr (G::resident) {
    const Prologue norm{args.norm_w, args.normed, reinterpret_cast<f32*>(smem + G::norm_base), args.eps};
    stage_resident<G>(base + G::x_base, in, first_chunk, norm, [&]() {
      grid_dependency_wait();
      if constexpr (G::release == Release::early && !G::keep) grid_launch_dependents();
      if constexpr (G::format == Format::nvfp4) args.factor = G::Traits::unit / ld_nc<f32>(args.divisor);
    }, [&]() {
      if constexpr (G::bulk) prime(G::primed, stages);
    });
    if constexpr (G::release == Release::early && G::keep) grid_launch_dependents();
  } else {
    grid_dependency_wait();
    if constexpr (G::release == Release::early) grid_launch_dependents();
    if constexpr (G::format == Format::nvfp4) args.factor = G::Traits::unit / ld_nc<f32>(args.divisor);
    ChunkWalk<G> walk(first_chunk, warp_k, first_tile, tile_step);
#pragma unroll 1
    for (u32 stage = 0; stage + 1 < stages; ++stage) {
      x_copier.copy(x_stage(stage), walk.number);
      cp_async_commit();
      walk.advance();
    }
    cp_async_wait<stages - 2>();
    x_copier.order(x_stage(0));
  }
  if constexpr (G::epilogue == Epilogue::push_f32) args.push.open();
  Meeting<G>::meet();

  const u32 x_lane = ChunkProduct<G>::lane_offset();
  const bool has_column = G::zero_bytes == 0 || lane_id() / 4 < G::bucket;
  const u32 x_next = has_column ? G::slices * G::x_chunk_bytes : 0;  // from a chunk of a slice to the next
  Team<G> sums{base + G::sums_base, team, member};
  // Of activations: stage being multiplied and stage being filled, which is the one before.
  constexpr u32 x_step = G::warps_k * G::x_bytes;
  const u32 x_end = x_stage(stages);
  u32 x_at = x_stage(0), x_fill_at = x_stage(stages - 1);
  [[maybe_unused]] ClaimsOf<G> claims(args.claims, base, team, member);
  // Tile `tile` of a product, whose geometry the type of `shape` names.
  const auto multiply_tile = [&](auto shape, const LinearArguments& of, u32 tile) {
    using P = decltype(shape);
    const LinearEpilogue<P> epilogue(of, tile, dealt.segment, {base, team, dealt.segment}, sums.turn());
    typename TotalOf<P>::Type total;
#pragma unroll 1
    for (u32 slice = warp_k; slice < G::all_slices; slice += G::warps_k) {
      ChunkProduct<P> product;
      product.clear();
      const ChunkWalk<G> here(0, slice, 0, 0);
      u32 x_chunk = base + (has_column ? G::x_base + here.number * G::x_chunk_bytes + x_lane : G::zero_base + lane_id() % 4 * 16);
      if constexpr (G::resident) {
#pragma unroll 1
        for (u32 left = here.left; left != 0;) {
          const u32 run = left < next.left ? left : next.left;  // to the end of the slice multiplied or of the slice copied
          const bool copies = next.tile < G::all_tiles;
#pragma unroll 1
          for (u32 i = run; i != 0; --i) {
            if constexpr (G::bulk) {
              ring.wait();
            } else {
              // All lanes have done with the stage before, which is refilled, and landed this stage's.
              cp_async_wait<stages - 2>();
              sync_warp();
              ring.refill(copies);
              cp_async_commit();
            }
            product.add(ring.at, x_chunk);
            x_chunk += x_next;
            ring.next();
            if constexpr (G::bulk) {
              sync_warp();  // all lanes have done with the stage, which is refilled at once
              ring.refill(copies);
            }
            ring.copier.step();
          }
          left -= run;
          if (next.advance(run)) {
            if constexpr (G::claimed) {
              if (next.tile == ChunkWalk<G>::unclaimed) next.tile = claims.take();
            }
            if (next.tile < G::all_tiles) ring.copier.seek(next.tile, next.number);
          }
        }
      } else {
#pragma unroll 1
        for (u32 left = here.left; left != 0; --left) {
          // All have landed this stage's weights (activations: when these were put in order) and have done with the stage
          // before, which is refilled.
          if constexpr (G::warps_r == 1) sync_warp();
          else named_barrier_sync(1 + G::teams + warp_k, 32 * G::warps_r);
          ring.refill(next.tile < G::all_tiles);
          const u32 x_after = x_at + x_step == x_end ? x_stage(0) : x_at + x_step;
          x_copier.copy(x_fill_at, next.number);
          cp_async_commit();
          cp_async_wait<stages - 2>();
          x_copier.order(x_after);
          ring.wait();
          product.add(ring.at, x_at + x_lane);
          x_fill_at = x_at;
          x_at = x_after;
          advance();
          ring.next();
        }
      }
      product.settle();
      sums.add(total, epilogue, product, slice, slice - warp_k, tile < P::tiles);
    }
    sums.finish(total, epilogue, tile < P::tiles);
  };
#pragma unroll 1
  for (u32 tile = first_tile; tile < dealt.end_tile; tile = G::claimed ? next.tile : tile + tile_step) {
    if constexpr (G::release == Release::late) {
      if (tile + tile_step >= dealt.end_tile) grid_launch_dependents();
    }
    if constexpr (G::claimed) claims.ask();
    if constexpr (G::paired) {
      if (tile >= G::tiles) {
        multiply_tile(LinearGeometry<SecondOf<Config>>{}, second, tile - G::tiles);
        continue;
      }
    }
    multiply_tile(G{}, args, tile);
  }
  if constexpr (G::claimed) claims.close();
  cp_async_wait<0>();
}

}  // namespace ninferc
