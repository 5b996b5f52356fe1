// Partial sums of two ranks, added in rank order with the residual and rounded once; optionally the norm of the result
// (compiler/ops/exchange_residual.py).
#pragma once
#include <ninferc/base/warp.cuh>
#include <ninferc/exchange/channel.cuh>
#include <ninferc/norm/rmsnorm.cuh>

namespace ninferc::exchange {

constexpr u32 residual_threads = rmsnorm_threads;

template <bool condition, class A, class B> struct Either { using type = A; };
template <class A, class B> struct Either<false, A, B> { using type = B; };

struct Rows {
  const void* partial;  // FP32, or bf16 when that is what travels
  const bf16* residual;
  bf16* y;
  u32 partial_stride, residual_stride, y_stride, columns;
};
struct NormRows {
  bf16* y;
  u32 y_stride;
  f32 eps;
};
// What a block does: part of the columns column, column + columns_step, ... `sender`: it only sends slices. `tiles`: what is
// exchanged are tiles that the products send.
struct Site {
  u32 part, column, columns_step;
  bool sender, tiles = false;
};

// Config: width; parts (blocks of one column); half (bf16 travels); first_rank; norm (of the result, parts = 1); pushed (the
// product that made the partial sums has sent them, as words); host_slices, peer_slices (the payload travels as slices there);
// sparing (so many words that failed probes of host memory would hold up the data); settled (sequence, step and residual are
// complete when a block starts, and are taken before the dependency wait); tile_tokens, tile_rows (of a product that can
// send its tiles: columns and values of a column that one holds; else 0).
template <class Config>
struct ResidualShape : Config {
  static constexpr u32 pairs = Config::width / 2 / Config::parts;  // pairs of values of one block
  static constexpr u32 rounds = ceil_div(pairs, residual_threads);
  static constexpr u32 pair_bytes = Config::half ? 4 : 8;
  static constexpr u32 bytes = pairs * pair_bytes;  // of a slice
  static constexpr bool slices = Config::host_slices || Config::peer_slices;
  static constexpr bool words = !(Config::host_slices && Config::peer_slices);
  using Pair = typename Either<Config::half, u32, f32x2>::type;   // as it lies in memory
  using Words = typename Either<Config::half, u64, u64x2>::type;  // as it travels in words
  static_assert(Config::width % (2 * Config::parts) == 0 && (!Config::norm || Config::parts == 1));
  static constexpr bool tiles = Config::tile_rows != 0;
  static_assert(!Config::pushed || (!Config::half && !slices && !tiles), "products push words of FP32, or tiles");

  static NINFERC_DEVICE bool in_slices(u32 transport) {
    return transport == transport_host ? Config::host_slices : transport == transport_peer && Config::peer_slices;
  }
  static NINFERC_DEVICE f32x2 values(const Pair& pair) {
    if constexpr (Config::half) return unpack_bf16x2(pair);
    else return pair;
  }
  static NINFERC_DEVICE Pair pair_of(const Words& words) {
    if constexpr (Config::half) return u32(words);
    else return f32x2{bits_float(u32(words.x)), bits_float(u32(words.y))};
  }
  static NINFERC_DEVICE Words words_of(const Channel& channel, const Pair& pair) {
    if constexpr (Config::half) return channel.word(pair);
    else return u64x2{channel.word(float_bits(pair.x)), channel.word(float_bits(pair.y))};
  }
  static NINFERC_DEVICE const u8* partial(const Rows& rows, const Site& site, u32 column) {
    return static_cast<const u8*>(rows.partial) + (u64(column) * rows.partial_stride / 2 + site.part * pairs) * pair_bytes;
  }
  // Of this block's part of a column, counted in pairs from the first of the exchange.
  static NINFERC_DEVICE u64 place(const Site& site, u32 column) {
    return u64(column) * (Config::width / 2) + site.part * pairs;
  }
};

// All slices of a block, one after the other; it waits for nothing.
template <class S>
NINFERC_DEVICE void send_slices(const Channel& channel, const Rows& rows, const Site& site) {
  using Piece = typename Either<S::bytes % 16 == 0, u32x4, u32>::type;
  constexpr u32 pieces = S::bytes / sizeof(Piece), batch = 4;
  for (u32 column = site.column; column < rows.columns; column += site.columns_step) {
    const u8* from = S::partial(rows, site, column);
    u8* to = channel.sent_bytes() + S::place(site, column) * S::pair_bytes;
    for (u32 first = threadIdx.x; first < pieces; first += batch * residual_threads) {
      Piece held[batch];
#pragma unroll
      for (u32 j = 0; j < batch; ++j) {
        const u32 i = first + j * residual_threads;
        if (i < pieces) held[j] = ld_global<Piece>(from + u64(i) * sizeof(Piece));
      }
#pragma unroll
      for (u32 j = 0; j < batch; ++j) {
        const u32 i = first + j * residual_threads;
        if (i < pieces && !channel.dead) st_global(to + u64(i) * sizeof(Piece), held[j]);
      }
    }
    sync_block();
    if (threadIdx.x == 0 && !channel.dead) publish_slice(channel, column * S::parts + site.part);
  }
}

// The block waits until all tiles are there that hold its part of a column: each of some threads for one of them, before a
// barrier. False when the peer is lost.
template <class S>
NINFERC_DEVICE bool await_tiles(const Channel& channel, const Site& site, u32 column) {
  constexpr u32 across = ceil_div(S::width, S::tile_rows);  // tiles that hold a whole column
  const u32 first = site.part * S::pairs * 2 / S::tile_rows, end = ceil_div((site.part + 1) * S::pairs * 2, S::tile_rows);
  const u32 line = column / S::tile_tokens * across;
  bool there = true;
  for (u32 i = first + threadIdx.x; i < end; i += residual_threads) there = await_slice(channel, line + i) && there;
  return __syncthreads_and(there) != 0;
}

// The other rank's pairs of a block's part of a column. `held`: the tile of columns that the block waited for last.
template <class S>
NINFERC_DEVICE void receive_pairs(const Channel& channel, const Site& site, u32 column, u32& held,
                                  typename S::Pair (&theirs)[S::rounds]) {
  const u32 thread = threadIdx.x, count = thread < S::pairs ? ceil_div(S::pairs - thread, residual_threads) : 0;
  const u64 place = S::place(site, column) + thread;
  const bool tiles = S::tiles && site.tiles;
  const bool slices = !tiles && S::slices && S::in_slices(channel.transport);
  if (!S::words || slices || tiles || channel.transport == transport_staged) {
    bool there = true;
    if constexpr (S::tiles) {
      if (tiles && column / S::tile_tokens != held) {
        there = await_tiles<S>(channel, site, column);
        if (there) held = column / S::tile_tokens;
      }
    }
    if (slices) {
      __shared__ u32 arrived;
      if (thread == 0) arrived = await_slice(channel, column * S::parts + site.part);
      sync_block();
      there = arrived != 0;
      sync_block();
    }
    const u8* from = channel.received_bytes() + place * S::pair_bytes;
#pragma unroll
    for (u32 j = 0; j < S::rounds; ++j) {
      theirs[j] = typename S::Pair{};
      if (j >= count || !there) continue;
      const void* at = from + u64(j) * residual_threads * S::pair_bytes;
      if constexpr (S::half) theirs[j] = ld_relaxed_sys<u32>(at);
      else theirs[j] = bit_cast<f32x2>(ld_relaxed_sys<u64>(at));
    }
  } else if constexpr (S::words) {
    constexpr u32 each = sizeof(typename S::Words) / sizeof(u64);
    typename S::Words words[S::rounds];
    const bool sparing = S::sparing && channel.transport == transport_host;
    if (count != 0)
      receive(channel, channel.words(channel.inbox) + place * each, residual_threads * each, count, sparing, words);
#pragma unroll
    for (u32 j = 0; j < S::rounds; ++j) theirs[j] = j < count ? S::pair_of(words[j]) : typename S::Pair{};
  }
}

// Every block that waits is resident, and waits for what the same block of the peer sends before it waits (or for a sender
// that never waits), so no order of blocks can lock the ranks against each other. `parts`: shared memory of the norm.
//
// `apart`: each rank has a device. Dependents then start as soon as all blocks have, and fetch their weights while these wait
// for the other rank. On one device they start when the wait is over: they could take the room that the other rank's product
// needs, for which these blocks wait.
template <class Config>
NINFERC_DEVICE void residual(const Channel& channel, const Rows& rows, const NormRows& norm,
                             const u32 (&gain)[ResidualShape<Config>::rounds], const Site& site, bool apart, f32* parts) {
  using S = ResidualShape<Config>;
  u32 old[S::rounds];
  const auto load_residual = [&](u32 column) {
    const bf16* row = rows.residual + u64(column) * rows.residual_stride + site.part * S::pairs * 2;
#pragma unroll
    for (u32 j = 0; j < S::rounds; ++j) {
      const u32 i = threadIdx.x + j * residual_threads;
      if (i < S::pairs) old[j] = ld_cg<u32>(row + 2 * i);
    }
  };
  if constexpr (S::settled) {
    if (!site.sender && site.column < rows.columns) load_residual(site.column);
    grid_dependency_wait();
  }
  if (apart) grid_launch_dependents();
  if constexpr (S::slices) {
    if (site.sender) {
      if (S::in_slices(channel.transport) && !site.tiles) send_slices<S>(channel, rows, site);
      return;
    }
  }
  const bool sends = S::words && !S::pushed && !site.tiles && channel.transport != transport_staged &&
                     !S::in_slices(channel.transport);
  const u32 thread = threadIdx.x;
  u32 held = ~0u;
  for (u32 column = site.column; column < rows.columns; column += site.columns_step) {
    const u8* partial = S::partial(rows, site, column);
    typename S::Pair own[S::rounds], theirs[S::rounds];
    u32 sum[S::rounds];
#pragma unroll
    for (u32 j = 0; j < S::rounds; ++j) {
      const u32 i = thread + j * residual_threads;
      if (i < S::pairs) own[j] = ld_global<typename S::Pair>(partial + u64(i) * S::pair_bytes);
    }
    if (sends) {
      constexpr u32 each = sizeof(typename S::Words) / sizeof(u64);
#pragma unroll
      for (u32 j = 0; j < S::rounds; ++j) {
        const u32 i = thread + j * residual_threads;
        if (i < S::pairs) channel.send((S::place(site, column) + i) * each, S::words_of(channel, own[j]));
      }
    }
    if (!S::settled || column != site.column) load_residual(column);
    receive_pairs<S>(channel, site, column, held, theirs);
    const bool last = rows.columns - column <= site.columns_step;
    if (last && !apart) grid_launch_dependents();
#pragma unroll
    for (u32 j = 0; j < S::rounds; ++j) {
      const u32 i = thread + j * residual_threads;
      sum[j] = 0;
      if (i >= S::pairs) continue;
      const f32x2 mine = S::values(own[j]), other = S::values(theirs[j]), low = unpack_bf16x2(old[j]);
      const f32x2 first = S::first_rank ? mine : other, second = S::first_rank ? other : mine;
      sum[j] = pack_bf16x2((first.x + second.x) + low.x, (first.y + second.y) + low.y);
      st_global(rows.y + u64(column) * rows.y_stride + (site.part * S::pairs + i) * 2, sum[j]);
    }
    if constexpr (S::norm) {
      rmsnorm_held<S::width>(sum, gain, norm.y + u64(column) * norm.y_stride, norm.eps, parts);
      if (!last) sync_block();
    }
  }
}

}  // namespace ninferc::exchange
