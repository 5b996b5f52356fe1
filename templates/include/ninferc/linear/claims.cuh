// Tiles dealt while a product runs (`claimed`): multiprocessors do not start together, since a block waits for the shared memory
// of one before it, nor is memory equally near to all; who is early takes more.
//
// A team's first tile is fixed; each further one it claims from a counter in global memory, asked for when the team begins a
// tile and known long before the copies of the next begin.  Its first warp claims, the others wait at an mbarrier for the
// number.  They come to it in the same round of slices, which are equal, so that nobody waits for a number whose claimer waits at
// the meeting of that round.  The last team to end leaves the counter as it was.
#pragma once
#include <ninferc/base/async.cuh>
#include <ninferc/base/grid.cuh>
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>
#include <ninferc/linear/geometry.cuh>

namespace ninferc {

// Where tiles are dealt beforehand: nothing.
struct NoClaims {
  NINFERC_DEVICE NoClaims(u32*, u32, u32, u32) {}
};
template <class G, bool claimed = G::claimed>
struct ClaimsOrNone {
  using Type = NoClaims;
};

#if NINFERC_HAS_BULK_COPY
template <class G>
struct Claims {
  static constexpr u32 number_at = 8;  // behind the mbarrier
  u32* counter;  // claims so far, teams that have ended
  u32 at;        // shared memory of the team
  bool first;    // this warp claims
  u32 pending = 0, phase = 0;

  NINFERC_DEVICE Claims(u32* counter_, u32 base, u32 team, u32 member)
      : counter(counter_), at(base + G::claims_base + team * G::claims_bytes), first(member == 0) {}

  // By all threads, before a barrier of the block.
  static NINFERC_DEVICE void open(u32 base) {
    static_assert(G::teams <= G::threads, "a thread for each team");
    if (threadIdx.x < G::teams) {
      mbarrier_init(base + G::claims_base + threadIdx.x * G::claims_bytes, 1);
      fence_mbarrier_init();
    }
  }
  // At the beginning of a tile: the number that `take` gives will be on its way.
  NINFERC_DEVICE void ask() {
    if (first && lane_id() == 0) pending = atomic_add(counter, 1);
  }
  // The team's next tile, from the first of those that are not dealt at the start.
  NINFERC_DEVICE u32 take() {
    u32 claimed;
    if (first) {
      claimed = shfl(pending, 0);
      if (lane_id() == 0) {
        // Those that read the number before have been at the barrier of the tile before since.
        st_shared(at + number_at, claimed);
        mbarrier_arrive(at);
      }
    } else {
      mbarrier_wait(at, phase);
      claimed = ld_shared<u32>(at + number_at);
    }
    phase ^= 1;
    return G::teams * gridDim.x + claimed;
  }
  NINFERC_DEVICE void close() {
    if (!first || lane_id() != 0) return;
    if (atomic_add_acq_rel_gpu(counter + 1, 1) == G::teams * gridDim.x - 1) {
      st_global<u32>(counter, 0);
      st_global<u32>(counter + 1, 0);
    }
  }
};
template <class G>
struct ClaimsOrNone<G, true> {
  using Type = Claims<G>;
};
#endif
template <class G>
using ClaimsOf = typename ClaimsOrNone<G>::Type;

}  // namespace ninferc
