// Partial sums sent by the product that computes them: word by word, as each value is finished (fused exchange).
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

}  // namespace ninferc::exchange
