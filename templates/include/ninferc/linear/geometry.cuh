// Geometry of a decode product y[C, N] = x[C, K] W^T, fixed at compile time.
//
// Order of the sum.  K is cut into `segments` equal parts and these into chunks of 128 columns.  Slice s of a segment takes
// its chunks s, s + slices, s + 2 slices, ...; a warp adds them up in that order on matrix cores.  A segment is the sum of
// its slices in order, the result the sum of the segments in order.  Nothing of this depends on the number of columns, on
// the tile or on the grid, and a half-K product with one segment has the bits of one segment of a product with two.
//
// Work.  A tile is `mtiles` matrix tiles of 16 weight rows (swiglu: gate and up rows alternate; with one matrix
// tile per warp, two neighbouring warps take a gate and its up tile, or, `mixed`, the matrix tile has eight rows of each:
// the smallest tile, dealt to multiprocessors most evenly).  A block of warps_r x warps_k warps works on warps_r
// tiles, or on half as many pairs, at once, with the slices of each spread over warps_k warps; it walks over
// tiles with the stride of the grid.  Each warp streams its weights through a ring of `stages` chunks in shared memory.  A
// block has at most 32 columns: for more, `column_blocks` neighbouring blocks take the same tile, and all but one find its
// weights in the L2 cache.  With `split` a block computes one segment only; the segments of a tile meet in global memory,
// where the last to arrive adds them up: smaller pieces to deal to the multiprocessors, and half the activations in each.
// With `claimed` teams take further tiles while they run (claims.cuh) instead of walking with the stride of the grid.
// With `clustered` these blocks are a cluster, work on one tile per team, and meet in shared memory (meeting.cuh).
//
// Two products of the same x in one kernel (`second_n` > 0): the tiles of the second are counted behind those of the first, and a
// warp's ring goes from one to the other without a stop.  SecondOf is the second's geometry: the same but for format and rows.
#pragma once
#include <ninferc/base/types.cuh>
#include <ninferc/codec/units.cuh>

namespace ninferc {

// push_f32: store_f32, and every value sent to the other rank as it is finished.
enum class Epilogue : u32 { store, store_f32, push_f32, swiglu, residual };
// When dependent kernels may start: at once (short kernels), with the block's last tile, or at the end of the kernel.
enum class Release : u32 { early, late, end };

// Config: format, n, k, second_format, second_n, x_format (whose order of activations is staged), stage_pitch (bytes from a stage to the next, of both products), bucket (columns of a block), column_blocks, segments, slices, epilogue, mtiles, warps_r, warps_k, stages, primed (0: all but one), resident, split, clustered, mixed, stream (weights leave L2 first), claimed, warpgroup
// (warpgroup.cuh instead of columns.cuh), in_units (weights lie in units, see codec/units.cuh), norm, keep (the normalised activations are stored as well), release.
template <class Config>
struct LinearGeometry : Config {
  using Given = Config;
  using Traits = FormatTraits<Config::format>;
  static constexpr Format format = Config::format;
  static constexpr u32 n = Config::n, k = Config::k, segments = Config::segments, slices = Config::slices;
  static constexpr u32 mtiles = Config::mtiles, warps_r = Config::warps_r, warps_k = Config::warps_k;
  static constexpr bool swiglu = Config::epilogue == Epilogue::swiglu;

  static constexpr u32 outputs = swiglu ? n / 2 : n;
  static constexpr bool mixed = Config::mixed;
  static constexpr u32 pair = swiglu && mtiles == 1 && !mixed ? 2 : 1;  // warps that make a tile together
  static constexpr u32 group_tiles = swiglu && !mixed ? 2 : 1;          // matrix tiles that make outputs together
  static constexpr u32 subtile_rows = mixed ? 8 : 16;                   // outputs
  static constexpr u32 subtiles = swiglu && pair == 1 && !mixed ? mtiles / 2 : mtiles;
  static constexpr u32 tiles = ceil_div(outputs, subtile_rows * subtiles);
  static constexpr bool paired = Config::second_n != 0;
  static constexpr u32 all_tiles = tiles + ceil_div(Config::second_n, subtile_rows * subtiles);
  static constexpr bool whole_rows = outputs % (subtile_rows * subtiles) == 0;
  static constexpr u32 ntiles = ceil_div(Config::bucket, 8u);
  static constexpr u32 threads = 32 * warps_r * warps_k;
  static constexpr u32 teams = warps_r / pair, team_warps = warps_k * pair;  // a team works on one tile

  static constexpr u32 k_segment = k / segments;
  static constexpr u32 chunks = ceil_div(k_segment, 128u);  // of one segment
  static constexpr u32 block_segments = Config::split ? 1 : segments;
  static constexpr u32 all_slices = block_segments * slices;  // of a block
  static constexpr u32 slices_per_warp = all_slices / warps_k;
  // Grouped integer planes are padded to 128 columns; elsewhere the last chunk may be cut short.
  static constexpr bool whole_x = k_segment % 128 == 0;
  static constexpr bool whole_k = Traits::grouped_int || whole_x;
  static constexpr u64 row_bytes = Traits::row_bytes(k);
  // Pieces of 16 bytes are whole: they begin at multiples of 16 bytes, and no segment ends inside one.
  static constexpr bool aligned_16 = whole_k || k_segment * Traits::code_bytes_128 / 128 % 16 == 0;
  static constexpr u32 groups = Traits::group == 0 ? 0 : (k + 127) / 128 * 128 / Traits::group;  // of one row

  // One stage of one warp in shared memory: codes, high bits and scales of its matrix tiles, each as in a unit of the plane.
  static constexpr u32 slabs = Traits::code_bytes_128 / 64;
  static constexpr u32 scale_row = Units<format>::scale_row, scale_bytes = Units<format>::scale_bytes;
  static constexpr u32 high_offset = mtiles * slabs * 1024;
  static constexpr u32 scale_offset = high_offset + mtiles * Units<format>::high_bytes;
  static constexpr u32 copied_bytes = scale_offset + mtiles * scale_bytes, stage_bytes = Config::stage_pitch;

  // Activations of a column and chunk: 256 bytes, of integer products 400 (integers.cuh).  Columns lie 64 bytes past a multiple
  // of 128 apart, where lanes read those of several at once: no bank conflicts.
  static constexpr u32 x_chunk_bytes = Traits::grouped_int ? 400 : 256;
  static constexpr u32 x_tiles = 3;  // warpgroup products: being multiplied, perhaps still multiplied, being stored
  static constexpr u32 x_pitch = (Config::resident ? block_segments * chunks : 1) * x_chunk_bytes + (Traits::grouped_int ? 0 : 64);
  // Lanes of columns that the bucket lacks read zeros, resident ones: matrix instructions take less power with them.
  static constexpr u32 zero_bytes = Config::resident && !Traits::grouped_int && Config::bucket < 8 ? 256 : 0;
  static constexpr u32 x_bytes = Config::bucket * (Config::warpgroup ? 256 : x_pitch);  // resident: once per block; else per stage and warp of K

  // Sums of the slices that the warps of a tile compute at once: of a matrix tile's eight columns those that exist, held by
  // the first lanes of each four; of one column every other value of these.
  static constexpr bool reduce = team_warps > 1;
  static constexpr u32 units = mtiles * ntiles;
  static constexpr u32 sum_lanes = Config::bucket < 8 ? ceil_div(Config::bucket, 2u) : 4, sum_values = Config::bucket == 1 ? 2 : 4;
  static constexpr u32 unit_bytes = 32 * sum_lanes * sum_values;
  static constexpr u32 sums_bytes = reduce ? team_warps * units * unit_bytes : 0;
  static constexpr u32 sums_buffers = Config::resident ? 2 : 1;

  static constexpr u32 x_base = 0;
  static constexpr u32 norm_bytes = Config::norm ? Config::bucket * 9 * 4 : 0;
  static constexpr u32 zero_base = x_base + x_bytes;
  static constexpr u32 norm_base = zero_bytes + x_base + (Config::resident ? x_bytes : (Config::warpgroup ? x_tiles : Config::stages) * warps_k * x_bytes);
  static constexpr u32 ring_base = round_up(norm_base + norm_bytes, 128u);
  static constexpr u32 ring_bytes = Config::stages * stage_bytes;
  static constexpr u32 sums_base = ring_base + warps_r * warps_k * ring_bytes;

  // Where the segments of a tile meet: places for the units that a block finishes, of other blocks' sums and an mbarrier.
  static constexpr bool clustered = Config::clustered;
  static constexpr u32 team_places = clustered ? ceil_div(units, segments) : 0;
  static constexpr u32 place_bytes = (segments - 1) * 512 + 8;
  static constexpr u32 meeting_base = sums_base + teams * sums_buffers * sums_bytes;
  static constexpr bool claimed = Config::claimed;
  static constexpr u32 claims_base = meeting_base + teams * team_places * place_bytes;
  static constexpr u32 claims_bytes = claimed ? 16 : 0;
  static constexpr u32 barriers_base = claims_base + teams * claims_bytes;

  // Units come by bulk copies where there are such: an mbarrier per stage.
  static constexpr bool in_units = Config::in_units, bulk = in_units && NINFERC_HAS_BULK_COPY;
  static constexpr u32 warp_barriers = bulk ? Config::stages * 8 : 0;
  // Stages filled before the wait for earlier kernels.  Resident units: the others behind the loads of the activations, which
  // would come behind the weights; else they are refilled by the loop.
  static constexpr u32 primed = Config::resident && bulk && Config::primed != 0 ? Config::primed : Config::stages - 1;
  static constexpr u32 smem_bytes = barriers_base + warps_r * warps_k * warp_barriers;

  static_assert(copied_bytes <= stage_bytes, "a stage has room for the weights of a chunk");
  static_assert(!paired || (Config::resident && in_units && !Config::split && Config::column_blocks == 1 && !claimed && Config::epilogue == Epilogue::store),
                "two products share resident activations, and differ in their weights alone");
  static_assert(Traits::grouped_int == FormatTraits<Config::x_format>::grouped_int && Traits::nibbles == FormatTraits<Config::x_format>::nibbles &&
                    (format == Config::x_format || Traits::grouped_int), "activations of the second product are in the order of the first");
  static_assert(all_slices % warps_k == 0, "every warp takes the same number of slices");
  static_assert(k % (8 * segments) == 0, "activations are read eight at a time");
  static_assert(segments == 1 || whole_x || !Traits::grouped_int, "segments of grouped integers are whole chunks");
  static_assert(slices <= chunks && (!swiglu || (mtiles * pair % group_tiles == 0 && n % 2 == 0 && warps_r % pair == 0)), "no empty slice, gate with up");
  static_assert(!mixed || (swiglu && mtiles == 1 && !Config::warpgroup), "gate and up rows mix in the one tile of a warp");
  static_assert(format != Format::nvfp4 || (outputs % 128 == 0 && 8 % subtiles == 0), "nvfp4 scales come in 128 rows");
  static_assert(Config::resident || Config::stages >= 3, "ordering activations takes one stage of the ring");
  static_assert(!Config::split || (segments > 1 && !swiglu && !Config::norm), "only rows of parallel parts are split");
  static_assert(!clustered || (Config::split && Config::column_blocks == 1), "a cluster is the segments of a tile");
  static_assert(!claimed || (Config::resident && !Config::split && Config::column_blocks == 1), "resident blocks take any tile");
  static_assert(chunks % slices == 0, "slices are equal: the warps of a team come to the end of a tile in the same round");
  static_assert(primed <= Config::stages, "of the ring");
  static_assert(!claimed || Config::stages < chunks / slices * slices_per_warp, "copies are less than a tile ahead");
  static_assert(!Config::norm || Config::resident, "the norm needs the whole activations");
  static_assert(!Config::warpgroup || (!Config::resident && whole_x && mtiles == 1 && warps_r % 4 == 0 && !Traits::grouped_int),
                "warpgroup products take one matrix tile per warp, whole chunks, scales on weights or on rows");
  static_assert(!in_units || (whole_x && k % 128 == 0 && outputs % 16 == 0), "units are whole, in every segment, of gate and of up");
  static_assert(!Config::keep || (Config::norm && Config::column_blocks == 1), "normalised rows are stored whole");

  // Weight row of output r of subtile `subtile`.  nvfp4 takes four rows (mixed: two) of each quarter of a block of 128, whose
  // scales lie side by side.
  static NINFERC_DEVICE u32 output_row(u32 subtile, u32 r) {
    constexpr u32 of_block = 128 / subtile_rows;
    if constexpr (format == Format::nvfp4)
      return subtile / of_block * 128 + r % 4 * 32 + subtile % of_block * (subtile_rows / 4) + r / 4;
    else return subtile * subtile_rows + r;
  }
  // First column of chunk `number` (counted over all segments), and the end of its segment.
  static NINFERC_DEVICE u32 chunk_begin(u32 number) {
    if constexpr (whole_x || segments == 1) return number * 128;
    else return number / chunks * k_segment + number % chunks * 128;
  }
  static NINFERC_DEVICE u32 chunk_end(u32 number) {
    if constexpr (segments == 1) return k;
    else return (number / chunks + 1) * k_segment;
  }
  // Rows between matrix tile 0 and matrix tile m of a tile, and between rows r and r + 8.
  static constexpr u32 rows_of_mtile(u32 m) {
    return (swiglu ? m / 2 : m) * (format == Format::nvfp4 ? 4 : 16) + (swiglu && m % 2 ? n / 2 : 0);
  }
  static constexpr u32 rows_of_half = mixed ? n / 2 : format == Format::nvfp4 ? 2 : 8;

  // Where eight consecutive activations, number q of a chunk, stand in it: step * 4 + lane % 4 of the fragment's owner.
  static NINFERC_DEVICE u32 piece_slot(u32 q) {
    if constexpr (format == Format::nvfp4) return q % 4 * 4 + q / 4;
    else if constexpr (format == Format::w8g32 || format == Format::bf16) return q;
    else return (q / 8 * 2 + q % 2) * 4 + q % 8 / 2;
  }
};

// Config of the second product: the first stages the activations, keeps what is normalised, and comes first.
template <class Config>
struct SecondOf : Config {
  static constexpr Format format = Config::second_format;
  static constexpr u32 n = Config::second_n, second_n = 0;
};

}  // namespace ninferc
