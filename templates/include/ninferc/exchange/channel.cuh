// Words between two ranks (docs/tensor-parallel.md). A word is 8 bytes: 4 of value, 4 of sequence number, written and read by
// one access, so a word that carries the expected number carries its value too: no fences, no flags, no resets.
//
// Two slots alternate by the parity of the number. A rank writes number n into a slot only after it has received all of n - 1,
// which the peer sent after it had read all of n - 2, the last tenant of that slot.
#pragma once
#include <ninferc/base/grid.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/control/words.cuh>

namespace ninferc::exchange {

// peer: words are stored into the other device's memory. host: into page-locked host memory, whence one block of the reader
// copies them to `relay` in its own device memory, where all its blocks poll. staged: plain values were copied to `inbox`.
enum Transport : u32 { transport_peer = 0, transport_host = 1, transport_staged = 2 };

constexpr u64 give_up_ns = 800000000ull;  // a peer that is this late is lost: the whole replay ends within a second
constexpr u32 probes_per_look = 256;      // probes between two looks at the clock and the hang word

// Number of the exchange `ordinal` places after `base`; 0 stands in cleared memory, 1 goes with it to keep parities alternating.
NINFERC_DEVICE u32 number(u32 base, u32 ordinal) {
  const u32 total = base + ordinal;
  return total < base ? total + 2 : total;
}

struct Channel {
  u64* outbox;  // both: two slots of `slot_words` words
  u64* inbox;
  u64* relay;
  u32* hang;  // page-locked, shared by the ranks: nonzero ends every wait
  i32* step;  // own rank's table: its fault word is set when the peer is lost
  u32 transport, slot_words, sequence;
  mutable bool dead;  // the peer is lost: send nothing, wait for nothing

  NINFERC_DEVICE Channel(u64* outbox_, u64* inbox_, u64* relay_, u32* hang_, i32* step_, const u32* sequence_, u32 ordinal,
                         u32 transport_, u32 slot_words_)
      : outbox(outbox_), inbox(inbox_), relay(relay_), hang(hang_), step(step_), transport(transport_), slot_words(slot_words_),
        sequence(number(ld_global<u32>(sequence_), ordinal)), dead(lost()) {}

  NINFERC_DEVICE u64 slot() const { return u64(sequence & 1u) * slot_words; }
  NINFERC_DEVICE u64 word(u32 value) const { return (u64(sequence) << 32) | value; }
  NINFERC_DEVICE bool ready(const u64x2& pair) const { return u32(pair.x >> 32) == sequence && u32(pair.y >> 32) == sequence; }

  // Words 2 * pair and the next. Stores pass every cache of this rank that the reader does not see.
  NINFERC_DEVICE void send(u32 pair, u32 first, u32 second) const {
    if (!dead) st_relaxed_sys(outbox + slot() + 2 * u64(pair), u64x2{word(first), word(second)});
  }
  NINFERC_DEVICE const u64* source() const { return (transport == transport_host ? relay : inbox) + slot(); }
  NINFERC_DEVICE u64x2 probe(const u64* at) const { return ld_relaxed_sys<u64x2>(at); }

  NINFERC_DEVICE bool lost() const { return ld_relaxed_gpu<i32>(step + control::fault) == i32(control::fault_exchange); }
  NINFERC_DEVICE void give_up() const {
    st_relaxed_gpu(step + control::fault, i32(control::fault_exchange));
    st_relaxed_sys(hang, u32(1));
    dead = true;
  }

  // Waits until the pair at `at` carries this exchange's number; `pair` is the first probe. False when the peer is lost.
  NINFERC_DEVICE bool wait(const u64* at, u64x2& pair) const {
    if (ready(pair)) return true;
    if (dead) return false;
    const u64 start = global_timer();
    u32 probes = 0;
    while (true) {
      pair = probe(at);
      if (ready(pair)) return true;
      if (++probes % probes_per_look != 0) continue;
      dead = lost();
      if (dead) return false;
      if (global_timer() - start > give_up_ns || ld_relaxed_sys<u32>(hang) != 0) {
        give_up();
        return false;
      }
    }
  }

  // Whole blocks of the reader, host transport only: words [0, 2 * pairs) from host memory to `relay`.
  NINFERC_DEVICE void republish(u32 pairs) const {
    constexpr u32 batch = 4;
    for (u32 first = threadIdx.x; first < pairs; first += batch * blockDim.x) {
      u64x2 words[batch];
#pragma unroll
      for (u32 j = 0; j < batch; ++j) {
        if (first + j * blockDim.x < pairs) words[j] = probe(inbox + slot() + 2 * u64(first + j * blockDim.x));
      }
#pragma unroll
      for (u32 j = 0; j < batch; ++j) {
        const u64 at = slot() + 2 * u64(first + j * blockDim.x);
        if (first + j * blockDim.x < pairs && wait(inbox + at, words[j])) st_relaxed_gpu(relay + at, words[j]);
      }
    }
  }
};

// One thread: the numbers of this replay's exchanges.
NINFERC_DEVICE void begin(u32* sequence, u32 count) {
  u32 base = ld_global<u32>(sequence + 1);
  if (base < 2) base = 2;  // fresh memory
  st_global(sequence, base);
  st_global(sequence + 1, number(base, count));
}

}  // namespace ninferc::exchange
