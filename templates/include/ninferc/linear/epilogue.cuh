// From slice sums to outputs: slices, segments, row scale or divisor, then swiglu or residual and the one rounding.
#pragma once
#include <ninferc/base/grid.cuh>
#include <ninferc/base/math.cuh>
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>
#include <ninferc/exchange/push.cuh>
#include <ninferc/linear/geometry.cuh>
#include <ninferc/linear/meeting.cuh>
#include <ninferc/linear/weights.cuh>

namespace ninferc {

struct LinearArguments {
  const bf16* x;
  u32 x_stride;
  u32 columns;  // 1 .. bucket
  u32 first_column;  // of x, residual and y, where a block takes only some of the columns
  const u8* codes;
  const u8* high;
  const u8* scales;
  const f32* divisor;
  f32 factor;  // nvfp4: of the sums, made of the divisor, which is read with the activations
  const bf16* norm_w;
  bf16* normed;
  f32 eps;
  const bf16* residual;
  u32 residual_stride;
  void* y;
  u32 y_stride;
  f32* partials;  // split, not clustered: [segment][block of columns][tile][unit][lane][4]
  u32* arrivals;  // likewise: [block of columns][tile][unit], zero before and after
  u32* claims;    // claimed: two words, zero before and after
  exchange::Push push;
};

// A unit is a matrix tile of 16 weight rows times eight columns.  Its lane holds four values: rows lane / 4 and
// lane / 4 + 8 (`half` 0 and 1), of each the columns 2 (lane % 4) and the next.
template <class G>
struct LinearEpilogue {
  const LinearArguments& args;
  u32 tile;
  u32 segment;  // split: of this block
  Meeting<G> meeting;
  // A warp that finishes at most one unit of a tile asks for the scales of its rows when the tile begins: after the sums
  // nothing would hide the way from the L2 cache.
  static constexpr bool early_scales = G::format == Format::fp8_row && G::reduce && G::subtiles * G::ntiles <= G::team_warps;
  bf16 scales[early_scales ? G::group_tiles : 1][2];

  // `turn`: number of the unit that this warp finishes, where there is one.
  NINFERC_DEVICE LinearEpilogue(const LinearArguments& args_, u32 tile_, u32 segment_, const Meeting<G>& meeting_, u32 turn)
      : args(args_), tile(tile_), segment(segment_), meeting(meeting_) {
    if constexpr (early_scales) {
      if (!G::resident && tile >= G::tiles) return;
      const u32 first = (turn < G::subtiles * G::ntiles ? turn : 0) / G::ntiles * G::group_tiles;
#pragma unroll
      for (u32 i = 0; i < G::group_tiles; ++i)
#pragma unroll
        for (u32 half = 0; half < 2; ++half) scales[i][half] = row_scale(first + i, half);
    }
  }

  // Outputs past the end are recognised in output_row; the weight rows that stand in for them are those of the copier.
  NINFERC_DEVICE u32 output_row(u32 group, u32 half) const {
    return G::output_row(tile * G::subtiles + group, lane_id() / 4 + (G::mixed ? 0 : 8 * half));
  }
  NINFERC_DEVICE u32 weight_row(u32 m, u32 half) const {
    return WeightCopier<G>::clamped(output_row(G::swiglu ? m / 2 : m, half)) + ((G::mixed ? half : G::swiglu && m % 2) ? G::n / 2 : 0);
  }

  NINFERC_DEVICE bf16 row_scale(u32 m, u32 half) const { return ld_nc<bf16>(args.scales + 2 * u64(weight_row(m, half))); }

  // What all columns of a segment's sum share.
  NINFERC_DEVICE void finish_segment(f32 (&v)[4], u32 m) const {
    if constexpr (G::format == Format::fp8_row) {
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        const f32 scale = bf16_to_f32(early_scales ? scales[m % G::group_tiles][half] : row_scale(m, half));
        v[2 * half] = v[2 * half] * G::Traits::unit * scale;
        v[2 * half + 1] = v[2 * half + 1] * G::Traits::unit * scale;
      }
    } else if constexpr (G::format == Format::nvfp4) {
#pragma unroll
      for (u32 e = 0; e < 4; ++e) v[e] *= args.factor;
    }
  }

  // The sum of this block's segments: stored, sent to the block that finishes the unit, or left in memory for the last segment
  // of the unit to arrive; who finishes a unit adds all segments.
  NINFERC_DEVICE void deliver(f32 (&v)[4], const f32 (&up)[4], u32 group, u32 t) const {
    bf16 before[4];  // of the residual: clustered blocks load it while sums are on their way
    if constexpr (G::clustered) {
      const u32 unit = group * G::ntiles + t;
      if (!meeting.owns(unit)) return meeting.send(v, unit);
      if constexpr (G::epilogue == Epilogue::residual) {
#pragma unroll
        for (u32 e = 0; e < 4; ++e)
          if (exists(e, group, t)) before[e] = residual(args.first_column + column(e, t), output_row(group, e / 2));
      }
      meeting.receive(v, unit);
    } else if constexpr (G::split) {
      const u32 units = G::column_blocks * G::tiles * G::units;
      const u32 unit = (args.first_column / G::bucket * G::tiles + tile) * G::units + group * G::ntiles + t;
      f32x4* mine = reinterpret_cast<f32x4*>(args.partials) + (u64(segment) * units + unit) * 32 + lane_id();
      st_global(mine, f32x4{v[0], v[1], v[2], v[3]});
      fence_gpu();
      sync_warp();
      u32 arrived = 0;
      if (lane_id() == 0) arrived = atomic_add_acq_rel_gpu(args.arrivals + unit, 1);
      if (shfl(arrived, 0) != G::segments - 1) return;
      fence_gpu();
#pragma unroll
      for (u32 s = 0; s < G::segments; ++s) {
        const f32x4 part = ld_cg<f32x4>(reinterpret_cast<f32x4*>(args.partials) + (u64(s) * units + unit) * 32 + lane_id());
        v[0] = s == 0 ? part.x : v[0] + part.x;
        v[1] = s == 0 ? part.y : v[1] + part.y;
        v[2] = s == 0 ? part.z : v[2] + part.z;
        v[3] = s == 0 ? part.w : v[3] + part.w;
      }
      if (lane_id() == 0) st_global<u32>(args.arrivals + unit, 0);
    }
    store(v, up, before, group, t);
  }

 private:
  static constexpr u32 lane_outputs = G::mixed ? 2 : 4;  // of a lane and unit: `e` below
  NINFERC_DEVICE u32 column(u32 e, u32 t) const { return t * 8 + lane_id() % 4 * 2 + e % 2; }
  NINFERC_DEVICE bool exists(u32 e, u32 group, u32 t) const {
    if (G::bucket == 1 && e % 2 != 0) return false;  // known to the compiler, which leaves out what leads there
    return column(e, t) < args.columns && (G::whole_rows || output_row(group, e / 2) < G::outputs);
  }

  NINFERC_DEVICE bf16 residual(u32 row, u32 output) const {
    return ld_cg<bf16>(args.residual + u64(row) * args.residual_stride + output);
  }

  // The outputs of a group of matrix tiles: one tile, or a gate and an up tile (mixed: one tile, gate and up halves).
  NINFERC_DEVICE void store(const f32 (&v)[4], const f32 (&up)[4], const bf16 (&before)[4], u32 group, u32 t) const {
#pragma unroll
    for (u32 e = 0; e < lane_outputs; ++e) {
      if (!exists(e, group, t)) continue;
      const u32 output = output_row(group, e / 2), row = args.first_column + column(e, t);
      const u64 at = u64(row) * args.y_stride + output;
      if constexpr (G::epilogue == Epilogue::store_f32 || G::epilogue == Epilogue::push_f32) {
        st_global(static_cast<f32*>(args.y) + at, v[e]);
        if constexpr (G::epilogue == Epilogue::push_f32) args.push.send(u64(row) * G::outputs + output, v[e]);
      } else {
        f32 value = v[e];
        if constexpr (G::swiglu) value = silu_fast(v[e]) * (G::mixed ? v[e + 2] : up[e]);
        if constexpr (G::epilogue == Epilogue::residual) value += bf16_to_f32(G::clustered ? before[e] : residual(row, output));
        st_global(static_cast<bf16*>(args.y) + at, f32_to_bf16(value));
      }
    }
  }
};

// A lane's values of a unit in shared memory, where only columns of the bucket have a place.  Lanes without one read a
// neighbour's, and nobody stores what they make of it.
template <class G>
struct UnitPlace {
  static NINFERC_DEVICE u32 of_lane() { return (lane_id() / 4 * G::sum_lanes + lane_id() % 4 % G::sum_lanes) * G::sum_values * 4; }
  static NINFERC_DEVICE void put(u32 unit, const f32 (&v)[4]) {
    if (G::sum_lanes < 4 && lane_id() % 4 >= G::sum_lanes) return;
    if constexpr (G::sum_values == 2) st_shared(unit + of_lane(), f32x2{v[0], v[2]});
    else st_shared(unit + of_lane(), f32x4{v[0], v[1], v[2], v[3]});
  }
  // `at`: the unit plus of_lane().
  static NINFERC_DEVICE f32x4 load(u32 at) {
    if constexpr (G::sum_values == 2) {
      const f32x2 v = ld_shared<f32x2>(at);
      return {v.x, v.x, v.y, v.y};  // no zeros: dividing them takes long
    } else {
      return ld_shared<f32x4>(at);
    }
  }
};

// Sums of the slices that the warps of a tile have just computed, in shared memory, [warp of the team][unit][lane]; every
// warp finishes some units.  The warps of a pair stand side by side: gate, then up.
template <class G>
struct SharedTotal {
  static constexpr u32 group_tiles = G::group_tiles;

  static NINFERC_DEVICE void put(u32 sums, u32 member, const ChunkProduct<G>& product) {
#pragma unroll
    for (u32 m = 0; m < G::mtiles; ++m) {
#pragma unroll
      for (u32 t = 0; t < G::ntiles; ++t) {
        UnitPlace<G>::put(sums + (member * G::units + m * G::ntiles + t) * G::unit_bytes, product.sum[m][t]);
      }
    }
  }
  // `turn`: the warp's first task.
  static NINFERC_DEVICE void finish(const LinearEpilogue<G>& epilogue, u32 sums, u32 turn) {
    constexpr u32 tasks = G::subtiles * G::ntiles;
#pragma unroll 1
    for (u32 pass = 0; pass < Meeting<G>::passes; ++pass) {
#pragma unroll 1
      for (u32 task = turn; task < tasks; task += G::team_warps) {
        if (!epilogue.meeting.in_pass(task, pass)) continue;
        const u32 group = task / G::ntiles, t = task % G::ntiles;
        f32 v[group_tiles][4];
#pragma unroll
        for (u32 i = 0; i < group_tiles; ++i) {
          const u32 m = group * group_tiles + i;
          total(epilogue, sums + (m * G::ntiles + t) * G::unit_bytes + UnitPlace<G>::of_lane(), m, v[i]);
        }
        epilogue.deliver(v[0], v[group_tiles - 1], group, t);
      }
    }
  }

 private:
  static NINFERC_DEVICE void total(const LinearEpilogue<G>& epilogue, u32 at, u32 m, f32 (&total)[4]) {
#pragma unroll
    for (u32 segment = 0; segment < G::block_segments; ++segment) {
      f32 v[4] = {0, 0, 0, 0};
#pragma unroll
      for (u32 s = 0; s < G::slices; ++s) {
        const f32x4 part = UnitPlace<G>::load(at + (segment * G::slices + s) * (G::pair * G::units * G::unit_bytes));
        v[0] = s == 0 ? part.x : v[0] + part.x;
        v[1] = s == 0 ? part.y : v[1] + part.y;
        v[2] = s == 0 ? part.z : v[2] + part.z;
        v[3] = s == 0 ? part.w : v[3] + part.w;
      }
      epilogue.finish_segment(v, m);
#pragma unroll
      for (u32 e = 0; e < 4; ++e) total[e] = segment == 0 ? v[e] : total[e] + v[e];
    }
  }
};

// The same where every warp computes several slices: after each round of slices their sums are added to the units' totals,
// in registers of the warp that finishes the unit.
template <class G>
struct RoundTotal {
  static constexpr u32 group_tiles = G::group_tiles, tasks = G::subtiles * G::ntiles;
  static constexpr u32 own = ceil_div(tasks, G::team_warps);
  static constexpr bool one_segment = G::block_segments == 1;
  f32 sum[own][group_tiles][4];  // of the segment
  f32 total[one_segment ? 1 : own][group_tiles][4];  // of the segments before

  // Slices `first` .. first + warps_k - 1 stand in shared memory.
  NINFERC_DEVICE void add(const LinearEpilogue<G>& epilogue, u32 sums, u32 first, u32 turn) {
#pragma unroll
    for (u32 o = 0; o < own; ++o) {
      const u32 task = turn + o * G::team_warps, group = task / G::ntiles, t = task % G::ntiles;
      if (task >= tasks) break;
#pragma unroll
      for (u32 i = 0; i < group_tiles; ++i) {
        const u32 m = group * group_tiles + i, at = sums + (m * G::ntiles + t) * G::unit_bytes + UnitPlace<G>::of_lane();
#pragma unroll
        for (u32 w = 0; w < G::warps_k; ++w) {
          const u32 slice = first + w, s = slice % G::slices;
          const f32x4 part = UnitPlace<G>::load(at + w * (G::pair * G::units * G::unit_bytes));
          f32(&v)[4] = sum[o][i];
          v[0] = s == 0 ? part.x : v[0] + part.x;
          v[1] = s == 0 ? part.y : v[1] + part.y;
          v[2] = s == 0 ? part.z : v[2] + part.z;
          v[3] = s == 0 ? part.w : v[3] + part.w;
          if constexpr (!one_segment) {
            if (s != G::slices - 1) continue;
            epilogue.finish_segment(v, m);
#pragma unroll
            for (u32 e = 0; e < 4; ++e) total[o][i][e] = slice < G::slices ? v[e] : total[o][i][e] + v[e];
          }
        }
      }
    }
  }
  NINFERC_DEVICE void store(const LinearEpilogue<G>& epilogue, u32 turn) {
#pragma unroll
    for (u32 pass = 0; pass < Meeting<G>::passes; ++pass) {
#pragma unroll
      for (u32 o = 0; o < own; ++o) {
        const u32 task = turn + o * G::team_warps, group = task / G::ntiles, t = task % G::ntiles;
        if (task >= tasks) break;
        if (!epilogue.meeting.in_pass(task, pass)) continue;
        if constexpr (one_segment) {
#pragma unroll
          for (u32 i = 0; i < group_tiles; ++i) epilogue.finish_segment(sum[o][i], group * group_tiles + i);
          epilogue.deliver(sum[o][0], sum[o][group_tiles - 1], group, t);
        } else {
          epilogue.deliver(total[o][0], total[o][group_tiles - 1], group, t);
        }
      }
    }
  }
};

// One warp computes all slices of its tile, one after the other, and adds them up in registers.
template <class G>
struct RegisterTotal {
  static constexpr u32 group_tiles = G::group_tiles;
  f32 sum[G::mtiles][G::ntiles][4];    // of the segment; with one segment of everything
  static constexpr bool one_segment = G::block_segments == 1;
  f32 total[one_segment ? 1 : G::mtiles][one_segment ? 1 : G::ntiles][4];  // of the segments before

  NINFERC_DEVICE void add(const LinearEpilogue<G>& epilogue, const ChunkProduct<G>& product, u32 slice) {
    const u32 segment = slice / G::slices, s = slice % G::slices;
#pragma unroll
    for (u32 m = 0; m < G::mtiles; ++m) {
#pragma unroll
      for (u32 t = 0; t < G::ntiles; ++t) {
#pragma unroll
        for (u32 e = 0; e < 4; ++e) sum[m][t][e] = s == 0 ? product.sum[m][t][e] : sum[m][t][e] + product.sum[m][t][e];
        if constexpr (!one_segment) {
          if (s != G::slices - 1) continue;
          epilogue.finish_segment(sum[m][t], m);
#pragma unroll
          for (u32 e = 0; e < 4; ++e) total[m][t][e] = segment == 0 ? sum[m][t][e] : total[m][t][e] + sum[m][t][e];
        }
      }
    }
  }
  NINFERC_DEVICE void store(const LinearEpilogue<G>& epilogue) {
#pragma unroll
    for (u32 pass = 0; pass < Meeting<G>::passes; ++pass) {
#pragma unroll
      for (u32 task = 0; task < G::subtiles * G::ntiles; ++task) {
        const u32 group = task / G::ntiles, t = task % G::ntiles;
        const u32 first = group * group_tiles, last = first + group_tiles - 1;
        if (!epilogue.meeting.in_pass(task, pass)) continue;
        if constexpr (!one_segment) {
          epilogue.deliver(total[first][t], total[last][t], group, t);
        } else {
#pragma unroll
          for (u32 m = first; m <= last; ++m) epilogue.finish_segment(sum[m][t], m);
          epilogue.deliver(sum[first][t], sum[last][t], group, t);
        }
      }
    }
  }
};

template <class G, bool reduce = G::reduce>
struct TotalOf {
  using Type = RoundTotal<G>;
};
template <class G>
struct TotalOf<G, false> {
  using Type = RegisterTotal<G>;
};

}  // namespace ninferc
