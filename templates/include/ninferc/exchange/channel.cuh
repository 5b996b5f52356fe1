// What two ranks send each other (docs/tensor-parallel.md). Small payloads are words of 8 bytes, 4 of value and 4 of sequence
// number, written and read by one access: a word that carries the expected number carries its value too, without fences or
// flags. Large ones are slices: plain bytes, and behind them a line with the number, stored with release and polled with acquire.
// A slice is a block's part of a column, or a tile that the product which computes it sends itself (push.cuh).
//
// Two slots alternate by the parity of the number. A rank writes number n into a slot only after it has received all of n - 1,
// which the peer sent after it had read all of n - 2, the last tenant of that slot. Words, lines and bytes never share memory: a
// byte of a payload cannot pass for a number.
#pragma once
#include <ninferc/base/grid.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/control/words.cuh>

namespace ninferc::exchange {

// peer: stores go into the other device's memory. host: into page-locked host memory, which the reader polls. staged: plain
// values were copied to the reader's bytes.
enum Transport : u32 { transport_peer = 0, transport_host = 1, transport_staged = 2 };

constexpr u64 give_up_ns = 800000000ull;  // a peer that is this late is lost: the whole replay ends within a second
constexpr u32 probes_per_look = 256;      // probes between two looks at the clock and the hang word
constexpr u32 line_words = 8;             // a slice's number has 64 bytes to itself

// Number of the exchange `ordinal` places after `base`; 0 stands in cleared memory, 1 goes with it to keep parities alternating.
NINFERC_DEVICE u32 number(u32 base, u32 ordinal) {
  const u32 total = base + ordinal;
  return total < base ? total + 2 : total;
}

struct Channel {
  u64* outbox;  // both: two slots of words, two of lines, two of bytes
  u64* inbox;
  u32* hang;  // page-locked, shared by the ranks: nonzero ends every wait
  i32* step;  // own rank's table: its fault word is set when the peer is lost
  u32 transport, slot_words, slot_slices, slot_bytes, sequence;
  mutable bool dead;  // the peer is lost: send nothing, wait for nothing

  NINFERC_DEVICE Channel(u64* outbox_, u64* inbox_, u32* hang_, i32* step_, const u32* sequence_, u32 ordinal, u32 transport_,
                         u32 slot_words_, u32 slot_slices_, u32 slot_bytes_)
      : outbox(outbox_), inbox(inbox_), hang(hang_), step(step_), transport(transport_), slot_words(slot_words_),
        slot_slices(slot_slices_), slot_bytes(slot_bytes_), sequence(number(ld_cg<u32>(sequence_), ordinal)), dead(lost()) {}

  NINFERC_DEVICE u64 word(u32 value) const { return (u64(sequence) << 32) | value; }
  NINFERC_DEVICE bool ready(u64 word) const { return u32(word >> 32) == sequence; }
  NINFERC_DEVICE bool ready(const u64x2& pair) const { return ready(pair.x) && ready(pair.y); }

  NINFERC_DEVICE u64* words(u64* mail) const { return mail + u64(sequence & 1u) * slot_words; }
  NINFERC_DEVICE u64* line(u64* mail, u32 slice) const {
    return mail + 2 * u64(slot_words) + (u64(sequence & 1u) * slot_slices + slice) * line_words;
  }
  NINFERC_DEVICE u8* bytes(u64* mail, u32 slot) const {
    return reinterpret_cast<u8*>(mail + 2 * (u64(slot_words) + u64(slot_slices) * line_words)) + u64(slot) * slot_bytes;
  }
  NINFERC_DEVICE u8* sent_bytes() const { return bytes(outbox, sequence & 1u); }
  // Edges of the graph order copies: one slot is enough.
  NINFERC_DEVICE const u8* received_bytes() const { return bytes(inbox, transport == transport_staged ? 0 : sequence & 1u); }

  // Stores pass every cache of this rank that the reader does not see.
  template <class T>
  NINFERC_DEVICE void send(u64 at, const T& stamped) const {
    if (!dead) st_relaxed_sys(words(outbox) + at, stamped);
  }

  NINFERC_DEVICE bool lost() const { return ld_relaxed_gpu<i32>(step + control::fault) == i32(control::fault_exchange); }
  NINFERC_DEVICE void give_up() const {
    st_relaxed_gpu(step + control::fault, i32(control::fault_exchange));
    st_relaxed_sys(hang, u32(1));
    dead = true;
  }
};

// How long one thread goes on probing.
struct Patience {
  const Channel& channel;
  u64 start = 0;
  u32 probes = 0;

  // False when the peer is lost.
  NINFERC_DEVICE bool more() {
    if (channel.dead) return false;
    if (probes == 0) start = global_timer();
    if (++probes % probes_per_look != 0) return true;
    channel.dead = channel.lost();
    if (channel.dead) return false;
    if (global_timer() - start <= give_up_ns && ld_relaxed_sys<u32>(channel.hang) == 0) return true;
    channel.give_up();
    return false;
  }
};

// Words from + j * step for j below `count`, as T (a word or two neighbours): all are asked for at once, and those that are not
// there again, all at once: one after the other would take a way to the host and back each. With `sparing` nothing but the
// last one is asked for until it is there, so that failed probes do not fill the link that the data comes through. Zeros when
// the peer is lost.
template <class T, u32 most>
NINFERC_DEVICE void receive(const Channel& channel, const u64* from, u32 step, u32 count, bool sparing, T (&words)[most]) {
#pragma unroll
  for (u32 j = 0; j < most; ++j) words[j] = T{};  // number 0 is never awaited
  Patience patience{channel};
  do {
    if (sparing && !channel.ready(ld_relaxed_sys<T>(from + u64(count - 1) * step))) continue;
    bool all = true;
#pragma unroll
    for (u32 j = 0; j < most; ++j) {
      if (j < count && !channel.ready(words[j])) words[j] = ld_relaxed_sys<T>(from + u64(j) * step);
    }
#pragma unroll
    for (u32 j = 0; j < most; ++j) all = all && (j >= count || channel.ready(words[j]));
    if (all) return;
  } while (patience.more());
#pragma unroll
  for (u32 j = 0; j < most; ++j) words[j] = T{};
}

// One thread, behind a barrier after which all stores of the slice's bytes are made.
NINFERC_DEVICE void publish_slice(const Channel& channel, u32 slice) {
  st_release_sys(channel.line(channel.outbox, slice), channel.word(0));
}
// One thread, before a barrier behind which others may read the bytes. False when the peer is lost.
NINFERC_DEVICE bool await_slice(const Channel& channel, u32 slice) {
  const u64* line = channel.line(channel.inbox, slice);
  Patience patience{channel};
  while (!channel.ready(ld_acquire_sys<u64>(line))) {
    if (!patience.more()) return false;
  }
  return true;
}

// One thread: the numbers of this replay's exchanges.
NINFERC_DEVICE void begin(u32* sequence, u32 count) {
  u32 base = ld_global<u32>(sequence + 1);
  if (base < 2) base = 2;  // fresh memory
  st_global(sequence, base);
  st_global(sequence + 1, number(base, count));
}

// One thread: how many of a chunk's active rows lie in each of its halves of `columns`.
NINFERC_DEVICE void share_rows(u32* sequence, u32 rows, u32 columns) {
  st_global(sequence + 2, rows < columns ? rows : columns);
  st_global(sequence + 3, rows < columns ? 0u : rows - columns);
}

}  // namespace ninferc::exchange
