// Paged KV cache: where a token's key and value row lies, shared by the writer (append) and the readers (attention).
//
// A page holds page_tokens tokens of one layer: [keys, values][kv head][block], a block being one head's rows of one kind
// in the codec's own form.  Key codec and value codec are independent parameters.
#pragma once
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>

namespace ninferc::kv {

constexpr u32 page_tokens = 64;
// The one ceiling on the keys of a sequence; everything sized by context is checked against it.
constexpr u32 max_context = 1u << 20;

// bf16 rows, dimensions contiguous.
struct Bf16 {
  static constexpr u32 row_bytes(u32 dim) { return dim * 2; }
  static constexpr u32 block_bytes(u32 dim) { return page_tokens * row_bytes(dim); }

  // Stores dimensions first … first + n - 1 of a token's row, n one of 1, 2, 4, 8.  Called by all lanes of the warp that
  // holds the row (codecs with group scales exchange maxima between lanes).
  template <u32 dim, u32 n>
  NINFERC_DEVICE static void store(u8* block, u32 token, u32 first, const f32 (&values)[n]) {
    u8* const row = block + token * row_bytes(dim) + first * 2;
    if constexpr (n == 1) {
      st_global(row, f32_to_bf16(values[0]));
    } else {
      struct alignas(n * 2) Pack { u32 words[n / 2]; } pack;
#pragma unroll
      for (u32 i = 0; i < n / 2; ++i) pack.words[i] = pack_bf16x2(values[2 * i], values[2 * i + 1]);
      st_global(row, pack);
    }
  }
};

template <class KeyCodec_, class ValueCodec_, u32 kv_heads_, u32 dim_>
struct Layout {
  using KeyCodec = KeyCodec_;
  using ValueCodec = ValueCodec_;
  static constexpr u32 kv_heads = kv_heads_, dim = dim_;
  static constexpr u32 key_block_bytes = KeyCodec::block_bytes(dim);
  static constexpr u32 value_block_bytes = ValueCodec::block_bytes(dim);
  static constexpr u64 page_bytes = u64(kv_heads) * (key_block_bytes + value_block_bytes);
  static_assert(page_bytes % 16 == 0 && key_block_bytes % 16 == 0, "blocks are read in 16-byte pieces");

  NINFERC_DEVICE static u64 key_offset(u32 page, u32 head) { return page * page_bytes + head * key_block_bytes; }
  NINFERC_DEVICE static u64 value_offset(u32 page, u32 head) {
    return page * page_bytes + u64(kv_heads) * key_block_bytes + head * value_block_bytes;
  }
};

}  // namespace ninferc::kv
