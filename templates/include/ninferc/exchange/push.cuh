// Partial sums sent by the product that computes them (fused exchange): word by word, as each value is finished, or tile by tile.
#pragma once
#include <ninferc/exchange/channel.cuh>

namespace ninferc::exchange {

// The sending side of a channel of FP32 words. Value i of column c is word c * width + i of the slot, whoever computes it, so
// the layout of a product's tiles does not matter to the reader.
struct Push {
  u64* outbox;
  const u32* sequence;
  const i32* step;
  u32 ordinal, transport, slot_words;
  u64* slot;  // null: nothing is sent (staged copies; the peer is lost)
  u32 stamp;

  // Once per thread, behind grid_dependency_wait(): an earlier node of the replay advanced the sequence.
  NINFERC_DEVICE void open() {
    stamp = number(ld_global<u32>(sequence), ordinal);
    const bool lost = ld_relaxed_gpu<i32>(step + control::fault) == i32(control::fault_exchange);
    slot = transport == transport_staged || lost ? nullptr : outbox + u64(stamp & 1u) * slot_words;
  }
  NINFERC_DEVICE void send(u64 word, f32 value) const {
    if (slot) st_relaxed_sys(slot + word, (u64(stamp) << 32) | float_bits(value));
  }
};

// The sending side for the tiles of a product of many rows: a tile's values go to their places among the bytes of the payload,
// then the tile's line gets the number. `tiles` is 0 where something else carries them (runtime/cuda/transport.py, Exchange.tiles).
struct TilePush {
  u64* outbox;
  const u32* sequence;
  i32* step;
  u32 ordinal, transport, slot_words, slot_slices, slot_bytes, tiles;

  // Behind grid_dependency_wait(), as Push::open.
  NINFERC_DEVICE Channel open() const {
    return Channel(outbox, nullptr, nullptr, step, sequence, ordinal, transport, slot_words, slot_slices, slot_bytes);
  }
};

}  // namespace ninferc::exchange
