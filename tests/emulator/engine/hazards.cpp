// Checked kernels: accesses to shared memory that nothing orders, as NVIDIA's race checker defines them, whatever the schedule.
//
// Of each word the last store and the loads since then are kept, by thread, as long as they may still be part of a hazard.
// ldmatrix reads a row for the lane that gives its address and for those that get it; stmatrix likewise. A cp.async is its
// thread's store, from the issue until the wait nobody's to touch; a bulk copy or a store of the cluster is its mbarrier's.
#include "runtime.h"

#include <stdlib.h>
#include <string.h>

namespace ninferc_emulator {

enum Kind : u8 { a_load, a_store, an_atomic };
struct Entry { u32 clock, lanes, place; u8 warp, bytes; Kind kind; bool pending; };
// An access by lanes of a warp with one tick. `pointer`: the store follows in the kernel's own code. `pending`: a cp.async.
struct Access { Fiber* fiber; u32 lanes; Kind kind; u32 place; const void* pointer; bool pending; };
struct Word { Entry* entries; u32 count, room; };
static Word* words;
static u64 image_begin[2], image_end[2];  // of the engine and of the kernel
static u32 block_words;
static Hazard hazards[1024];
static u32 hazard_count;

// A store over an unordered one, until it is known whether it changed the value.
static struct { bool held; const u8* pointer; u32 bytes; u8 before[16]; Hazard hazard; Fiber* fiber; } overwrite;

// Words of a block: static memory, then dynamic memory from a multiple of 16.
static u32 dynamic_word() { return (engine.static_bytes + 15) / 16 * 4; }
static u64 byte_of(const void* pointer) {
  const u8* p = static_cast<const u8*>(pointer);
  if (p >= engine.static_shared && p < engine.static_shared + engine.static_bytes) return u64(p - engine.static_shared);
  return u64(p - current()->block->dynamic_shared) + 4 * dynamic_word();
}

static u64 byte_at(u32 address) {
  const u32 dynamic = shared_dynamic_base();
  return address >= dynamic ? address - dynamic + 4 * dynamic_word() : address - shared_window;
}

static void note(const Hazard& h, Fiber* fiber) {
  if (!engine.collect) {
    char who[64];
    static const char* const mine[] = {"load", "store", "store"};
    static const char* const theirs[] = {"store", "load", "store"};
    if (h.other < agents_from()) __builtin_snprintf(who, sizeof(who), "thread %u", h.other);
    else __builtin_snprintf(who, sizeof(who), "a copy on an mbarrier");
    ninferc_emulator_thread = &fiber->info;
    fail("race: %s of byte %u of %s shared memory and %s by %s are not ordered by a barrier%s", mine[h.kind], h.byte,
         h.dynamic ? "dynamic" : "static", theirs[h.kind], who, h.equal ? " (equal values)" : "");
  }
  for (u32 i = 0; i < hazard_count; ++i) {
    Hazard& known = hazards[i];
    if (known.kind == h.kind && known.place == h.place && known.other_place == h.other_place &&
        known.equal == h.equal && known.same_warp == h.same_warp) {
      ++known.count;
      return;
    }
  }
  if (hazard_count == sizeof(hazards) / sizeof(hazards[0])) fail("hazards at more than %u pairs of places", hazard_count);
  hazards[hazard_count++] = h;
}

// Called before anything else runs after an instrumented store.
static void settle_shared() {
  if (!overwrite.held) return;
  overwrite.held = false;
  overwrite.hazard.equal = memcmp(overwrite.pointer, overwrite.before, overwrite.bytes) == 0;
  note(overwrite.hazard, overwrite.fiber);
}

// The lanes of an entry of a block's memory that are not ordered before an access by `lanes` of a warp.
static u32 unordered(const Block* block, const Entry& e, const Warp* warp, u32 lanes) {
  if (e.pending) return e.lanes;
  u32 bad = 0;
  const Clock* known = nullptr;
  for (u32 mine = lanes; mine; mine &= mine - 1) {
    const Fiber* f = warp->fibers[__builtin_ctz(mine)];
    if (f->known == known) continue;
    known = f->known;
    for (u32 rest = e.lanes; rest; rest &= rest - 1) {
      const u32 lane = u32(__builtin_ctz(rest));
      if (e.clock > known->ticks[of_block(block) + e.warp * 32 + lane]) bad |= 1u << lane;
    }
  }
  if (block == warp->block && e.warp == warp->index && (lanes & (lanes - 1)) == 0) bad &= ~lanes;
  return bad;
}

// An access, and the lanes of an earlier one that are not ordered before it.
static Hazard between(const Block* block, const Access& a, const Entry& e, u32 bad, u32 byte) {
  const u32 base = 4 * dynamic_word(), warp = a.fiber->warp->index * 32, others = a.lanes & (a.lanes - 1);
  Hazard h{};
  h.kind = a.kind == a_load ? 0 : e.kind == a_load ? 1 : 2;
  h.dynamic = byte >= base;
  h.byte = h.dynamic ? byte - base : byte;
  h.same_warp = e.warp * 32u == warp && block == a.fiber->block;
  h.other = e.warp * 32u + u32(__builtin_ctz(bad));
  h.thread = warp + u32(__builtin_ctz(a.lanes));
  if (h.thread == h.other && others) h.thread = warp + u32(__builtin_ctz(others));
  h.place = a.place;
  h.other_place = e.place;
  h.count = 1;
  return h;
}

// Whether the order of two accesses matters.
static bool conflict(Kind a, Kind b) { return a == a_store || b == a_store ? true : a != b; }

static void touch(const Block* block, const Access& a, u64 first, u64 bytes) {
  const u32 warp = a.fiber->warp->index, tick = a.fiber->tick;
  const bool late = a.kind == a_store && a.pointer && bytes <= 16;  // what it writes is known later
  const u64 end = first + bytes;
  for (u64 at = first / 4; at < (end + 3) / 4; ++at) {
    const u64 low = first > 4 * at ? first - 4 * at : 0, high = end < 4 * at + 4 ? end - 4 * at : 4;
    const u8 mask = u8((1u << high) - (1u << low));
    Word& word = words[u64(block_words) * block->slot + at];
    bool merged = false;
    for (u32 i = 0; i < word.count;) {
      Entry& e = word.entries[i];
      if (!(e.bytes & mask)) { ++i; continue; }
      const bool conflicts = conflict(a.kind, e.kind);
      const u32 bad = unordered(block, e, a.fiber->warp, a.lanes);
      if (conflicts && bad) {
        const Hazard h = between(block, a, e, bad, u32(4 * at) + u32(__builtin_ctz(e.bytes & mask)));
        if (h.kind != 2 || !late) {
          note(h, a.fiber);
        } else if (!overwrite.held) {
          overwrite = {true, static_cast<const u8*>(a.pointer), u32(bytes), {}, h, a.fiber};
          memcpy(overwrite.before, a.pointer, bytes);
        }
      }
      if (a.kind == a_store || (!conflicts && bad == 0)) {
        e.bytes &= u8(~mask);  // who comes after this access comes after that one
      } else if (!conflicts && e.warp == warp && e.clock == tick && e.place == a.place && e.bytes == mask) {
        e.lanes |= a.lanes;
        merged = true;
      }
      if (e.bytes == 0) e = word.entries[--word.count];
      else ++i;
    }
    if (merged) continue;
    if (word.count == word.room) {
      word.room = word.room ? 2 * word.room : 4;
      word.entries = static_cast<Entry*>(realloc(word.entries, word.room * sizeof(Entry)));
      if (!word.entries) fail("out of memory");
    }
    word.entries[word.count++] = {tick, a.lanes, a.place, u8(warp), mask, a.kind, a.pending};
  }
}

u32 place_of(const void* address) {
  const u64 a = reinterpret_cast<u64>(address);
  return a >= image_begin[1] && a < image_end[1] ? u32(a - image_begin[1]) - 1 : 0;
}

static void check_thread(Fiber* f, u64 first, u64 bytes, Kind kind, u32 place, const void* pointer = nullptr,
                         bool pending = false) {
  touch(f->block, {f, 1u << f->info.lane, kind, place, pointer, pending}, first, bytes);
}

void check_shared(const void* pointer, u64 bytes, bool store, u32 place) {
  if (!engine.checked) return;
  settle_overwrite();
  check_thread(current(), byte_of(pointer), bytes, store ? a_store : a_load, place);
}

// By several lanes at once, each on behalf of the others too.
void check_shared_lanes(Warp* w, u32 lanes, const void* pointer, u64 bytes, bool store, u32 place) {
  if (!engine.checked) return;
  settle_overwrite();
  u32 tick = 0;  // a thread may tick ahead, but not back
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    const Fiber* f = w->fibers[__builtin_ctz(rest)];
    tick = f->tick > tick ? f->tick : tick;
  }
  for (u32 rest = lanes; rest; rest &= rest - 1) w->fibers[__builtin_ctz(rest)]->tick = tick;
  const Access access{w->fibers[__builtin_ctz(lanes)], lanes, store ? a_store : a_load, place, nullptr, false};
  touch(w->block, access, byte_of(pointer), bytes);
}

void check_copy(const void* pointer, u64 bytes, u32 place) {
  if (!engine.checked) return;
  settle_overwrite();
  check_thread(current(), byte_of(pointer), bytes, a_store, place, nullptr, true);
}
// Its thread has waited for the copy: from now on it is an ordinary store.
void settle_copy(const void* pointer, u64 bytes) {
  if (!engine.checked) return;
  const Fiber* f = current();
  const u64 first = byte_of(pointer);
  for (u64 at = first / 4; at < (first + bytes + 3) / 4; ++at) {
    Word& word = words[u64(block_words) * f->block->slot + at];
    for (u32 i = 0; i < word.count; ++i) {
      Entry& e = word.entries[i];
      if (!e.pending || e.warp != f->warp->index || e.lanes != 1u << f->info.lane) continue;
      e.pending = false;
      e.clock = f->tick;
    }
  }
}

// The issuing thread must have the place to itself; then it is the mbarrier's until the phase is complete.
void check_bulk_copy(Block* to, const MBarrier& m, u32 address, u64 bytes, u32 place) {
  if (!engine.checked) return;
  settle_overwrite();
  Fiber* f = current();
  const u64 first = byte_at(address);
  touch(to, {f, 1u << f->info.lane, a_store, place, nullptr, false}, first, bytes);
  const Entry entry{m.tick + 1, 1u << (m.agent % 32), place, u8(agent_warp(m.agent)), 15, a_store, false};
  for (u64 at = first / 4; at < (first + bytes) / 4; ++at)  // a store is the only entry it leaves
    words[u64(block_words) * to->slot + at].entries[0] = entry;
}

// An mbarrier is used: its initialisation must come before.
void check_barrier_use(u32 address, u32 place) {
  if (!engine.checked) return;
  settle_overwrite();
  Fiber* f = current();
  const Access access{f, 1u << f->info.lane, a_load, place, nullptr, false};
  const u64 first = byte_at(address);
  const Word& word = words[u64(block_words) * f->block->slot + first / 4];
  for (u32 i = 0; i < word.count; ++i) {
    const Entry& e = word.entries[i];
    const u32 bad = unordered(f->block, e, f->warp, access.lanes);
    if (e.kind == a_store && bad) note(between(f->block, access, e, bad, u32(first)), f);
  }
}

static void start_hazards() {
  hazard_count = 0;
  overwrite.held = false;
  block_words = dynamic_word() + (engine.dynamic_bytes + 3) / 4;
  words = static_cast<Word*>(calloc(u64(block_words) * (engine.resident + 1) + 1, sizeof(Word)));
  if (!words) fail("out of memory");
}
static void end_hazards() {
  for (u64 i = 0; words && i < u64(block_words) * (engine.resident + 1); ++i) free(words[i].entries);
  free(words);
  words = nullptr;
}
static void forget_words(const Block* b) {
  for (u32 i = 0; i < block_words; ++i) words[u64(block_words) * b->slot + i].count = 0;
}

}  // namespace ninferc_emulator

extern "C" unsigned ninferc_emulator_hazards(ninferc_emulator::Hazard* out, unsigned room) {
  using namespace ninferc_emulator;
  for (u32 i = 0; i < hazard_count && i < room; ++i) {
    out[i] = hazards[i];
    if (out[i].other >= agents_from()) out[i].other = ~0u;
  }
  return hazard_count;
}
