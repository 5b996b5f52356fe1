// A warp's ring of stages: what fills them, and how the warp learns that one is full.
#pragma once
#include <ninferc/base/async.cuh>
#include <ninferc/base/types.cuh>
#include <ninferc/base/warp.cuh>
#include <ninferc/linear/geometry.cuh>
#include <ninferc/linear/weights.cuh>

namespace ninferc {

// Copies weights that lie in units: a stage is a unit of each plane for each matrix tile, whole or (`mixed`) half a unit of gate
// and half a unit of up rows.  One bulk copy each by one lane, announced on the stage's mbarrier; elsewhere lane by lane.
template <class G>
struct UnitCopier {
  using U = Units<G::format>;
  // A matrix tile is made of parts that are units or half units; what follows counts parts.
  static constexpr u32 halves = G::mixed ? 2 : 1, chunks = G::k / 128, bands = G::outputs / 16;
  static constexpr u32 of_chunk = halves, of_band = halves * chunks, up = bands * of_band;  // up: from gate to up rows
  const u8* codes;
  const u8* high;
  const u8* scales;
  u32 side;        // 1 where the warp takes the up tile of a pair
  u32 band, part;  // matrix tile 0 of the chunk to copy next

  NINFERC_DEVICE UnitCopier(const u8* codes_, const u8* high_, const u8* scales_, u32 side_)
      : codes(codes_ + lane_at(U::code_bytes / halves)), high(high_), scales(scales_), side(side_) {
    if constexpr (U::high_bytes != 0) high += lane_at(U::high_bytes / halves);
    if constexpr (U::scale_bytes != 0) scales += lane_at(U::scale_bytes / halves);
  }

  // Chunk `number` (counted over all segments) of tile `tile` is next.
  NINFERC_DEVICE void seek(u32 tile, u32 number) {
    band = G::mixed ? tile / 2 : tile * G::subtiles;
    part = band * of_band + number * of_chunk + tile % halves + side * up;
  }
  // The slice's next chunk is next.
  NINFERC_DEVICE void step() { part += G::slices * of_chunk; }

  NINFERC_DEVICE void copy(u32 stage, [[maybe_unused]] u32 landed) const {
#if NINFERC_HAS_BULK_COPY
    if (!elect_one()) return;  // the compiler knows that one lane is left, and needs no loop around a copy
    mbarrier_arrive_expect(landed, G::copied_bytes);
#endif
#pragma unroll
    for (u32 m = 0; m < G::mtiles; ++m) {
      const u32 from = part_of(m);
      plane<U::code_bytes>(stage + m * U::code_bytes, codes, from, landed);
      if constexpr (U::high_bytes != 0) plane<U::high_bytes>(stage + G::high_offset + m * U::high_bytes, high, from, landed);
      if constexpr (U::scale_bytes != 0)
        plane<U::scale_bytes>(stage + G::scale_offset + m * U::scale_bytes, scales, from, landed);
    }
  }

 private:
  NINFERC_DEVICE u32 part_of(u32 m) const {
    const u32 group = G::swiglu ? m / 2 : m;
    u32 further = group;  // bands past the end repeat the last one; nobody stores their rows
    if constexpr (!G::whole_rows) further = band + group < bands ? group : bands - 1 - band;
    return part + further * of_band + (G::swiglu ? m % 2 : 0) * up;
  }
  // A matrix tile's parts of one plane, whose units have `bytes`.
  template <u32 bytes>
  NINFERC_DEVICE void plane(u32 to, const u8* from, u32 first, u32 landed) const {
#pragma unroll
    for (u32 i = 0; i < halves; ++i)
      copy_part<bytes / halves>(to + i * (bytes / halves), from + u64(first + i * up) * (bytes / halves), landed);
  }

  // What a lane of its own copies of `bytes` that lie together: every 512 bytes 16 of them.  Where there are fewer, the first
  // lanes do.
  static NINFERC_DEVICE u32 lane_at(u32 bytes) { return NINFERC_HAS_BULK_COPY ? 0 : lane_id() * 16 % (bytes < 512 ? bytes : 512); }
  template <u32 bytes>
  static NINFERC_DEVICE void copy_part(u32 to, const u8* from, [[maybe_unused]] u32 landed) {
    static_assert(bytes % 512 == 0 || 512 % bytes == 0, "an even share for each lane");
#if NINFERC_HAS_BULK_COPY
    if constexpr (G::stream) bulk_copy_stream(to, from, bytes, landed);
    else bulk_copy(to, from, bytes, landed);
#else
    if (bytes < 512 && lane_id() * 16 >= bytes) return;
    to += lane_at(bytes);
#pragma unroll
    for (u32 at = 0; at < bytes; at += 512) cp_async_16(to + at, from + at);
#endif
  }
};

template <bool in_units, class G>
struct CopierOf { using Type = WeightCopier<G>; };
template <class G>
struct CopierOf<true, G> { using Type = UnitCopier<G>; };

// Of two products: the tiles of the second (geometry H) are counted behind those of the first.
template <class G, class H>
struct PairCopier {
  UnitCopier<G> first;
  UnitCopier<H> other;
  bool others = false;

  NINFERC_DEVICE void seek(u32 tile, u32 number) {
    others = tile >= G::tiles;
    if (others) other.seek(tile - G::tiles, number);
    else first.seek(tile, number);
  }
  NINFERC_DEVICE void step() {
    first.step();
    other.step();
  }
  NINFERC_DEVICE void copy(u32 stage, u32 landed) const {
    if (others) other.copy(stage, landed);
    else first.copy(stage, landed);
  }
};

template <class G, class Copier = typename CopierOf<G::in_units, G>::Type>
struct WeightRing {
  Copier copier;
  u32 first, barriers;                  // stage 0 and its mbarrier
  u32 at, fill;                         // the stage being multiplied, and the one before, which is refilled
  u32 landed, fill_landed, parity = 0;  // their mbarriers, and the phase of the former
  static constexpr u32 stages = G::stages;

  // `base`: the block's shared memory; `warp`: of the block.  By a whole warp.
  NINFERC_DEVICE WeightRing(u32 base, u32 warp, const Copier& copier_)
      : copier(copier_), first(base + G::ring_base + warp * G::ring_bytes),
        barriers(base + G::barriers_base + warp * G::warp_barriers), at(first), fill(first + (stages - 1) * G::stage_bytes),
        landed(barriers), fill_landed(barriers + (stages - 1) * 8) {
#if NINFERC_HAS_BULK_COPY
    if constexpr (G::bulk) {
      if (elect_one()) {  // without a loop over lanes, whose addresses would be made uniform one by one
#pragma unroll
        for (u32 stage = 0; stage < stages; ++stage) mbarrier_init(barriers + stage * 8, 1);
        fence_mbarrier_init();
      }
      sync_warp();
    }
#endif
  }

  // Copies the next chunk into stage number `stage`, before the first is multiplied.  `exists`: there is such a chunk.
  NINFERC_DEVICE void prime(u32 stage, bool exists) const {
    put(first + stage * G::stage_bytes, barriers + stage * 8, exists);
  }
  // The same into the stage that was multiplied last, with which all lanes have done.
  NINFERC_DEVICE void refill(bool exists) const { put(fill, fill_landed, exists); }
  // Bulk copies: until the stage multiplied next is full.
  NINFERC_DEVICE void wait() const {
#if NINFERC_HAS_BULK_COPY
    if constexpr (G::bulk) mbarrier_wait(landed, parity);
#endif
  }
  // The stage is multiplied.
  NINFERC_DEVICE void next() {
    fill = at;
    const bool last = at + G::stage_bytes == first + G::ring_bytes;
    at = last ? first : at + G::stage_bytes;
    if constexpr (G::bulk) {
      fill_landed = landed;
      landed = last ? barriers : landed + 8;
      parity ^= u32(last);
    }
  }

 private:
  NINFERC_DEVICE void put(u32 stage, [[maybe_unused]] u32 to_landed, bool exists) const {
    if constexpr (!G::in_units) {
      if (exists) copier.copy(stage);
    } else {
      if (exists) copier.copy(stage, to_landed);
#if NINFERC_HAS_BULK_COPY
      // Warps that share activations walk past the last tile, and wait there like everybody else.
      else if (!G::resident && lane_id() == 0) mbarrier_arrive(to_landed);
#endif
    }
  }
};

}  // namespace ninferc
