// One block's tile of a row product and its stages in shared memory, common to all row kernels.
//
// A block computes `tile_rows` weight rows x `tile_tokens` tokens and walks K in stages of 64 columns: a tile of x, tokens
// by 128 bytes, in the 128-byte swizzle (chunk c of token t at c ^ (t % 8)), and the same columns of the weight planes,
// rows one after another (in memory they may lie in units) with the 16-byte code chunks swizzled so that eight rows never
// meet in a bank.
#pragma once
#include <ninferc/base/async.cuh>
#include <ninferc/base/grid.cuh>
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>
#include <ninferc/codec/units.cuh>
#include <ninferc/gemm/unpack.cuh>

namespace ninferc::gemm {

enum class Store { bf16, f32, swiglu, residual };

// Everything known at compile time.  `n` weight rows (SwiGLU: gate rows, then up rows), `k` columns, `math_threads` threads
// that hold accumulators; stages lie at multiples of `alignment` bytes; with `push` tiles go to the other rank too; weights
// lie in rows or `in_units` (codec/units.cuh).
template <Format format_, Store store_, u32 n_, u32 k_, u32 tile_rows_, u32 tile_tokens_, u32 stages_, u32 math_threads_, u32 alignment,
          bool push_, bool in_units_>
struct Shape {
  static constexpr Format format = format_;
  static constexpr Store store = store_;
  static constexpr u32 n = n_, k = k_, tile_rows = tile_rows_, tile_tokens = tile_tokens_;
  static constexpr u32 stages = stages_, math_threads = math_threads_;
  static constexpr bool push = push_, in_units = in_units_;
  using T = Traits<format>;
  static constexpr bool swiglu = store == Store::swiglu;
  static constexpr u32 steps = ceil_div(k, 64u);
  static constexpr u32 outputs = swiglu ? n / 2 : n;  // columns of y
  static constexpr u32 tile_outputs = swiglu ? tile_rows / 2 : tile_rows;
  static constexpr bool whole = outputs % tile_outputs == 0;
  // Stage: x, codes, high bits, scale words.
  static constexpr u32 codes_at = tile_tokens * 128;
  static constexpr u32 high_at = codes_at + tile_rows * T::code_bytes;
  static constexpr u32 scales_at = high_at + tile_rows * T::high_bytes;
  static constexpr u32 stage_bytes = round_up(scales_at + tile_rows * T::scale_bytes, alignment);
  // Output tile in bf16, token by token; the pitch puts eight tokens' 16-byte pieces in different banks.
  static constexpr u32 pitch = tile_outputs * 2 + 16;
  static constexpr u32 staging_bytes = store == Store::f32 ? 0 : tile_tokens * pitch;
  static constexpr u32 shared_bytes = stages * stage_bytes > staging_bytes ? stages * stage_bytes : staging_bytes;
  static_assert(!push || store == Store::bf16 || store == Store::f32, "what is sent are partial sums");
  static_assert(n % 8 == 0 && outputs % 8 == 0 && k % 8 == 0, "rows and columns come in eights");
  static_assert(format != Format::fp8_row || k % 16 == 0, "FP8 rows are read in 16-byte pieces");
  static_assert(!in_units || (k % 128 == 0 && outputs % 16 == 0), "units are whole, of gate and of up");
  static_assert(format != Format::nvfp4 || (n % 128 == 0 && k % 64 == 0), "NVFP4 has 128-row, 64-column scale tiles");

  // Weight row of row r of the tile that begins at output `first`.  SwiGLU interleaves eight gate rows and their eight up
  // rows, so that both meet in one thread's accumulators.  Rows past the end repeat the last.
  NINFERC_DEVICE static u32 weight_row(u32 first, u32 r) {
    const u32 output = swiglu ? first + (r >> 4) * 8 + (r & 7) : first + r;
    const u32 inside = whole || output < outputs ? output : outputs - 1;
    return swiglu ? (r & 8) * (outputs / 8) + inside : inside;
  }
  // Position of 16-byte code chunk c of row r.
  NINFERC_DEVICE static u32 code_chunk(u32 r, u32 c) {
    constexpr u32 per_row = T::code_bytes / 16, rows_per_line = 8 / per_row;
    return c ^ (r / rows_per_line & (per_row - 1));
  }
};

// Where the operands lie; rows of x are `x_stride` elements apart.
struct Operands {
  const bf16* x;
  u32 x_stride;
  const u8 *codes, *high, *scales;
  const f32* divisor;
};

// One thread's share of the weight planes of a stage, `threads` loading together.
template <class S, u32 threads>
class WeightLoader {
  using T = typename S::T;
  static constexpr u32 per_row = T::code_bytes / 16;
  static constexpr u32 pieces = S::tile_rows * per_row / threads, row_step = threads / per_row;
  static constexpr u32 row_bytes = u32(FormatTraits<S::format>::row_bytes(S::k));
  static constexpr u32 words = S::tile_rows < threads ? 1 : S::tile_rows / threads;
  static constexpr bool small_rows = T::scale_bytes != 0 || T::high_bytes != 0;
  static_assert(S::tile_rows * per_row % threads == 0 && threads % per_row == 0 && row_step % 4 == 0, "an even share each");
  static_assert(threads % 32 == 0 && (S::tile_rows < threads || S::tile_rows % threads == 0), "an even share each");
  // Tile rows 16 apart are a fixed number of weight rows apart, unless rows past the end are clamped.  In units all tile rows
  // of a thread lie a fixed way apart: places of rows whose numbers have no bit in common add up, and none of a thread's rows
  // differ in the bit that swaps halves.
  static constexpr bool linear = S::whole && (S::in_units || row_step % 16 == 0);
  static constexpr u32 rows_apart = S::swiglu ? row_step / 2 : row_step;
  using U = Units<S::format>;
  static constexpr u32 chunks = S::k / 128;
  static NINFERC_DEVICE u64 apart(u32 row) { return row_at(row) + U::code_piece(U::in_band(row), 0); }

  const Operands* o_;
  const u8* codes_;
  u32 first_, thread_, chunk_, row_;

  NINFERC_DEVICE u32 weight_row(u32 i) const { return S::weight_row(first_, i); }
  // Where a weight row's codes begin (its first unit), and from there the thread's piece of step `s`.
  static NINFERC_DEVICE u64 row_at(u32 row) {
    if constexpr (S::in_units) return U::first(row, chunks) * U::code_bytes;
    else return u64(row) * row_bytes;
  }
  NINFERC_DEVICE u32 step_at(u32 row, u32 s) const {
    if constexpr (S::in_units) return s / 2 * U::code_bytes + U::code_piece(U::in_band(row), s % 2 * per_row + chunk_);
    else return s * T::code_bytes + chunk_ * 16;
  }

 public:
  NINFERC_DEVICE WeightLoader(const Operands& o, u32 first, u32 thread)
      : o_(&o), first_(first), thread_(thread), chunk_(thread % per_row), row_(thread / per_row) {
    codes_ = o.codes + row_at(weight_row(row_));
  }
  // Issues the copies of step `s` into the stage at shared address `stage`.
  NINFERC_DEVICE void load(u32 s, u32 stage) const {
    const u8* from = codes_ + step_at(weight_row(row_), s);
    const bool inside = T::padded(S::k) % 64 == 0 || s * T::code_bytes + chunk_ * 16 < row_bytes;
    if (T::padded(S::k) % 64 != 0 && !inside) from = codes_;
#pragma unroll
    for (u32 i = 0; i < pieces; ++i) {
      const u32 row = row_ + i * row_step;
      const u32 to = stage + S::codes_at + row * T::code_bytes + S::code_chunk(row, chunk_) * 16;
      const u8* piece;
      if constexpr (!linear) piece = inside ? o_->codes + row_at(weight_row(row)) + step_at(weight_row(row), s) : codes_;
      else if constexpr (!S::in_units) piece = from + u64(i * rows_apart) * row_bytes;
      else piece = from + apart(S::weight_row(0, i * row_step));
      if constexpr (T::padded(S::k) % 64 == 0) cp_async_16(to, piece);
      else cp_async_16_zfill(to, piece, inside);
    }
    if constexpr (small_rows) {
#pragma unroll
      for (u32 i = 0; i < words; ++i) {
        const u32 row = thread_ + i * threads;
        if (threads > S::tile_rows && row >= S::tile_rows) break;
        const u32 r = weight_row(row);
        if constexpr (T::scale_bytes != 0) {
          const u8* scale = o_->scales;
          if constexpr (S::in_units)
            scale += (U::first(r, chunks) + s / 2) * U::scale_bytes + U::scale_word(U::in_band(r), U::scale_row == 8 ? s % 2 : 0);
          else if constexpr (S::format == Format::nvfp4)
            scale += nvfp4_scale_offset(r, s * 4, S::k);
          else if constexpr (S::format == Format::w8g32)
            scale += u64(r) * (T::padded(S::k) / 16) + s * 4;
          else
            scale += u64(r) * (T::padded(S::k) / 32) + s / 2 * 4;
          cp_async_small<4>(stage + S::scales_at + row * 4, scale);
        }
        if constexpr (T::high_bytes != 0) {
          const u8* high = o_->high;
          if constexpr (S::in_units)
            high += (U::first(r, chunks) + s / 2) * U::high_bytes +
                    (T::high_bytes == 16 ? U::high_piece(U::in_band(r), s % 2) : U::high_piece(U::in_band(r), 0) + s % 2 * 8);
          else
            high += u64(r) * (T::padded(S::k) / 64 * T::high_bytes) + s * T::high_bytes;
          if constexpr (T::high_bytes == 16) cp_async_16(stage + S::high_at + row * 16, high);
          else cp_async_small<8>(stage + S::high_at + row * 8, high);
        }
      }
    }
  }
};

// One thread's share of the x tile.  Tokens past `active` are not loaded: their columns of the product are never stored.
template <class S, u32 threads>
class TokenLoader {
  static constexpr u32 row_step = threads / 8, pieces = S::tile_tokens / row_step;
  static_assert(row_step % 4 == 0 && S::tile_tokens % row_step == 0, "an even share each");
  const u8* x_;
  u32 step_bytes_, active_, chunk_, row_;

 public:
  NINFERC_DEVICE TokenLoader(const Operands& o, u32 first, u32 active, u32 thread)
      : step_bytes_(o.x_stride * 2 * row_step), active_(active), chunk_(thread % 8), row_(thread / 8) {
    x_ = reinterpret_cast<const u8*>(o.x) + (u64(first + row_) * o.x_stride + chunk_ * 8) * 2;
  }
  NINFERC_DEVICE void load(u32 s, u32 stage) const {
    const bool inside = S::k % 64 == 0 || s * 64 + chunk_ * 8 < S::k;
    const u8* from = x_ + (inside ? s * 128 : 0);
    if (active_ == S::tile_tokens) {
#pragma unroll
      for (u32 i = 0; i < pieces; ++i, from += step_bytes_) copy(stage, i, from, inside);
    } else {
#pragma unroll 1
      for (u32 i = 0; i < pieces && row_ + i * row_step < active_; ++i, from += step_bytes_) copy(stage, i, from, inside);
    }
  }

 private:
  NINFERC_DEVICE void copy(u32 stage, u32 i, const u8* from, bool inside) const {
    const u32 row = row_ + i * row_step, to = stage + row * 128 + (chunk_ ^ (row % 8)) * 16;
    if constexpr (S::k % 64 == 0) cp_async_16(to, from);
    else cp_async_16_zfill(to, from, inside);
  }
};

}  // namespace ninferc::gemm
