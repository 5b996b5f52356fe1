// The segments of a tile meet in shared memory where the blocks that compute them are a cluster.
//
// Each unit of a tile is finished by one of the blocks, in turn, which is its owner; the others store their sums into the
// owner's shared memory, and the owner's mbarrier of the unit counts the bytes.  A block works on one tile per team, so that
// every place is written once, and it ends when all that goes to it has arrived: the warp that finishes a unit waits for it.
#pragma once
#include <ninferc/base/cluster.cuh>
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>
#include <ninferc/linear/geometry.cuh>

namespace ninferc {

template <class G>
struct Meeting {
  u32 places, team, segment;  // shared memory of the team's places, which of the block's teams, the block's segment

  NINFERC_DEVICE Meeting(u32 base, u32 team_, u32 segment_)
      : places(base + G::meeting_base + team_ * G::team_places * G::place_bytes), team(team_), segment(segment_) {}

  // Of all units that a warp finishes it sends first what others wait for: one pass over them for each turn.
  static constexpr u32 passes = G::clustered && G::units > G::team_warps ? 2 : 1;
  NINFERC_DEVICE bool in_pass(u32 unit, u32 pass) const { return passes == 1 || owns(unit) == (pass == 1); }
  NINFERC_DEVICE bool owns(u32 unit) const { return owner(unit) == segment; }

#if NINFERC_HAS_BULK_COPY
  // Long before the first sum, by all threads; meet() before it.
  static NINFERC_DEVICE void open(u32 base) {
    if constexpr (G::clustered) {
      static_assert(G::teams * G::team_places <= G::threads, "a thread for each place");
      if (threadIdx.x < G::teams * G::team_places) {
        mbarrier_init(base + G::meeting_base + threadIdx.x * G::place_bytes + barrier_at, 1);
        fence_mbarrier_init();
      }
      cluster_arrive();
    }
  }
  static NINFERC_DEVICE void meet() {
    if constexpr (G::clustered) cluster_wait();
  }
  NINFERC_DEVICE void send(const f32 (&v)[4], u32 unit) const {
    const u32 to = place(unit), rank = owner(unit);
    if (lane_id() % 4 >= lanes_of_row) return;
#pragma unroll
    for (u32 e = 0; e < 4; e += step) st_async_4(word(to, segment, rank, e), bit_cast<u32>(v[e]), to + barrier_at, rank);
  }
  // Adds up the unit's segments, of which `v` is the block's own, in order.
  NINFERC_DEVICE void receive(f32 (&v)[4], u32 unit) const {
    const u32 at = place(unit);
    if (lane_id() == 0) mbarrier_arrive_expect(at + barrier_at, (G::segments - 1) * 8 * lanes_of_row * (4 / step) * 4);
    mbarrier_wait(at + barrier_at, 0);
    if (lane_id() % 4 >= lanes_of_row) return;
#pragma unroll
    for (u32 e = 0; e < 4; e += step) {
      f32 sum = 0;
#pragma unroll
      for (u32 s = 0; s < G::segments; ++s) {
        const f32 part = s == segment ? v[e] : ld_shared<f32>(word(at, s, segment, e));
        sum = s == 0 ? part : sum + part;
      }
      v[e] = sum;
    }
  }
#else
  static_assert(!G::clustered, "clusters need sm_90");
  static NINFERC_DEVICE void open(u32) {}
  static NINFERC_DEVICE void meet() {}
#endif

 private:
  // Of the eight columns only those that exist are sent: lanes of a row of outputs, one or both values of a pair.
  static constexpr u32 lanes_of_row = G::bucket < 8 ? ceil_div(G::bucket, 2u) : 4, step = G::bucket == 1 ? 2 : 1;
  static constexpr u32 barrier_at = (G::segments - 1) * 512;  // in a place, behind the sums of the other blocks

  // Neighbouring units and neighbouring teams have different owners, and each block has a place for the units it owns.
  NINFERC_DEVICE u32 owner(u32 unit) const { return (team + unit) % G::segments; }
  NINFERC_DEVICE u32 place(u32 unit) const { return places + unit / G::segments * G::place_bytes; }
  // Where value `e` of this lane of the sum of segment `s` lies in a place of block `rank`.
  static NINFERC_DEVICE u32 word(u32 at, u32 s, u32 rank, u32 e) {
    return at + (s < rank ? s : s - 1) * 512 + e * 128 + lane_id() * 4;
  }
};

}  // namespace ninferc
