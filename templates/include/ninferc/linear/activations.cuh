// Activations of a decode product in shared memory, in the order in which a lane's matrix fragments take them: all of them
// once per block (resident), or chunk by chunk in a ring shared by the warps that work on the same slice.
#pragma once
#include <ninferc/base/async.cuh>
#include <ninferc/base/grid.cuh>
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>
#include <ninferc/codec/unpack.cuh>
#include <ninferc/linear/geometry.cuh>
#include <ninferc/linear/integers.cuh>
#include <ninferc/norm/sumsq.cuh>

namespace ninferc {

// x is [columns, K] bf16 with rows x_stride apart.  Columns past the end repeat the last one: their sums are not stored.
struct Activations {
  const bf16* x;
  u32 stride;
  u32 columns;
  u32 first_column;
  NINFERC_DEVICE const bf16* at(u32 column, u32 k) const {
    return x + u64(first_column + (column < columns ? column : columns - 1)) * stride + k;
  }
};

// ---- resident ----------------------------------------------------------------------------------------------------

// Factors of the rms norm of every column, by all threads; ends with a barrier.  `scratch`: 9 floats per column, the last
// `bucket` of which are the factors; of one column each thread makes the factor itself (norm_factor).
template <class G>
NINFERC_DEVICE void norm_factors(f32* scratch, const Activations& in, f32 eps) {
  for (u32 task = warp_id(); task < G::bucket * sumsq_parts; task += G::threads / 32) {
    const f32 part = sumsq_part<G::k>(in.at(task / sumsq_parts, 0), task % sumsq_parts);
    if (lane_id() == 0) scratch[task] = part;
  }
  sync_block();
  if constexpr (G::bucket == 1) return;
  if (threadIdx.x < G::bucket) {
    scratch[G::bucket * sumsq_parts + threadIdx.x] =
        rms_factor(sumsq_total(scratch + threadIdx.x * sumsq_parts), G::k, eps);
  }
  sync_block();
}

template <class G>
NINFERC_DEVICE f32 norm_factor(const f32* scratch, u32 column, f32 eps) {
  if constexpr (G::bucket == 1) return rms_factor(sumsq_total(scratch), G::k, eps);
  else return scratch[G::bucket * sumsq_parts + column];
}

NINFERC_DEVICE u32 norm_pair(u32 x, u32 w, f32 factor) {
  const f32x2 a = unpack_bf16x2(x), b = unpack_bf16x2(w);
  return pack_bf16x2(offset_norm(a.x, factor, b.x), offset_norm(a.y, factor, b.y));
}

// The norm of a product's activations in its prologue.
struct Prologue {
  const bf16* weight;
  bf16* kept;    // the normalised rows [columns, K], which the blocks store in turn; or null
  f32* scratch;  // of norm_factors
  f32 eps;
};

// Brings the activations of the block's segments into shared memory, normalised if the geometry says so, by all threads;
// ends with a barrier.  `ready` returns when they may be read; weights of the norm are loaded before.  `asked` is called once,
// behind the first loads.
template <class G, class Ready, class Asked>
NINFERC_DEVICE void stage_resident(u32 to, const Activations& in, u32 first_chunk, const Prologue& norm, Ready&& ready, Asked&& asked) {
  constexpr u32 pieces = G::block_segments * G::chunks * 16, total = G::bucket * pieces;
  constexpr u32 batch = total >= 4 * G::threads ? 4 : ceil_div(total, G::threads);
  constexpr u32 rounds = ceil_div(total, batch * G::threads);
  const auto column_of = [&](u32 piece) { return G::chunk_begin(first_chunk + piece / 16) + piece % 16 * 8; };
  const auto inside = [&](u32 index) {
    const u32 piece = index % pieces;
    return index < total && (G::whole_x || column_of(piece) < G::chunk_end(first_chunk + piece / 16));
  };
  u32x4 w[G::norm ? batch : 1];
  [[maybe_unused]] f32 factor = 0;
  [[maybe_unused]] bool kept = false;  // something was stored by this thread
  const auto load_weights = [&](u32 first) {
    if constexpr (G::norm) {
#pragma unroll
      for (u32 i = 0; i < batch; ++i) {
        const u32 index = first + i * G::threads;
        w[i] = inside(index) ? ld_nc<u32x4>(norm.weight + column_of(index % pieces)) : u32x4{0, 0, 0, 0};
      }
    }
  };
  load_weights(threadIdx.x);
  ready();
#pragma unroll 1
  for (u32 round = 0; round < rounds; ++round) {
    const u32 first = threadIdx.x + round * batch * G::threads;
    u32x4 x[batch];
#pragma unroll
    for (u32 i = 0; i < batch; ++i) {  // all loads of a batch before the first store
      const u32 index = first + i * G::threads;
      x[i] = inside(index) ? ld_global<u32x4>(in.at(index / pieces, column_of(index % pieces))) : u32x4{0, 0, 0, 0};
    }
    if (round == 0) asked();
    if (round != 0) load_weights(first);
    else if constexpr (G::norm) norm_factors<G>(norm.scratch, in, norm.eps);
#pragma unroll
    for (u32 i = 0; i < batch; ++i) {
      const u32 index = first + i * G::threads, column = index / pieces, piece = index % pieces;
      if (!G::Traits::grouped_int && index >= total) break;
      if constexpr (G::norm) {
        if (G::bucket > 1 || i == 0) factor = norm_factor<G>(norm.scratch, index < total ? column : 0, norm.eps);
        x[i] = u32x4{norm_pair(x[i].x, w[i].x, factor), norm_pair(x[i].y, w[i].y, factor),
                     norm_pair(x[i].z, w[i].z, factor), norm_pair(x[i].w, w[i].w, factor)};
        if constexpr (G::keep) {  // every block has the whole rows, and stores neighbouring pieces: few warps have to fence
          const u32 share = ceil_div(total, gridDim.x);
          if (index - blockIdx.x * share < share && column < in.columns && inside(index)) {
            st_global(norm.kept + u64(column) * G::k + column_of(piece), x[i]);
            kept = true;
          }
        }
      }
      const u32 chunk_at = to + column * G::x_pitch + piece / 16 * G::x_chunk_bytes;
      if constexpr (G::Traits::grouped_int) put_digits<G>(chunk_at, piece % 16, x[i], index < total);
      else st_shared(chunk_at + G::piece_slot(piece % 16) * 16, order_columns<G::format>(x[i]));
    }
  }
  if (threadIdx.x < G::zero_bytes / 16) st_shared(to - G::x_base + G::zero_base + threadIdx.x * 16, u32x4{0, 0, 0, 0});
  if (kept) fence_gpu();  // dependents, which start after this, may read the rows before they wait
  sync_block();
}

// ---- ring --------------------------------------------------------------------------------------------------------

// The pieces of a chunk are copied by the `warps_r` warps that share it; `rank` is the thread's number among them.
template <class G>
struct ActivationCopier {
  static constexpr u32 workers = 32 * G::warps_r, total = G::bucket * 16;
  Activations in;
  u32 rank;

  static constexpr bool digits = G::Traits::grouped_int;

  // Digits of integer products take the place of the activations they are made of.
  static NINFERC_DEVICE u32 offset(u32 index) {
    return index / 16 * G::x_pitch + (digits ? index % 16 : G::piece_slot(index % 16)) * 16;
  }

  NINFERC_DEVICE void copy(u32 stage, u32 number) const {
#pragma unroll
    for (u32 base = 0; base < total; base += workers) {
      const u32 index = base + rank, k = G::chunk_begin(number) + index % 16 * 8;
      if (total % workers != 0 && index >= total) break;
      if constexpr (G::whole_x) cp_async_16(stage + offset(index), in.at(index / 16, k));
      else cp_async_16_zfill(stage + offset(index), in.at(index / 16, k < G::chunk_end(number) ? k : 0), k < G::chunk_end(number));
    }
  }
  // Brings this thread's own pieces, once landed, into the column order of the format.
  NINFERC_DEVICE void order(u32 stage) const {
    if constexpr (G::format == Format::bf16) return;
#pragma unroll
    for (u32 base = 0; base < total; base += workers) {
      const u32 index = base + rank;
      if constexpr (digits) {
        const bool mine = total % workers == 0 || index < total;
        const u32x4 x = mine ? ld_shared<u32x4>(stage + offset(index)) : u32x4{0, 0, 0, 0};
        sync_warp();  // half a warp has the pieces of a column: all are read before digits take their place
        put_digits<G>(stage + index / 16 * G::x_pitch, index % 16, x, mine);
      } else {
        if (total % workers != 0 && index >= total) break;
        st_shared(stage + offset(index), order_columns<G::format>(ld_shared<u32x4>(stage + offset(index))));
      }
    }
  }
};

}  // namespace ninferc
