// Asynchronous copies: cp.async, mbarriers, bulk copies.
#include "runtime.h"

#include <stdlib.h>
#include <string.h>

namespace ninferc_emulator {

// When an asynchronous copy lands: at its wait (late), at once (early), or drawn per copy.
static bool lands_early() {
  if (engine.seed == 0) return false;
  switch (engine.seed % 3) {
    case 0: return false;
    case 1: return true;
    default: return draw(2) == 0;
  }
}

static void land(const Copy& copy) {
  u8* to = static_cast<u8*>(ninferc_emulator_shared_pointer(copy.destination, 0, "cp.async"));
  memcpy(to, copy.source, copy.valid);
  memset(to + copy.valid, 0, copy.bytes - copy.valid);
}

template <class T>
static void append(T*& list, u32& count, u32& room, const T& value) {
  if (count == room) {
    room = room ? 2 * room : 16;
    list = static_cast<T*>(realloc(list, room * sizeof(T)));
    if (!list) fail("out of memory");
  }
  list[count++] = value;
}

static MBarrier& find_mbarrier(u32 address, const char* name) {
  Block* b = current()->block;
  for (u32 i = 0; i < b->mbarrier_count; ++i)
    if (b->mbarriers[i].address == address) return b->mbarriers[i];
  fail("%s: no mbarrier was initialised at shared address 0x%x", name, address);
}

static void try_complete(const Block* b, MBarrier& m) {
  if (m.pending == 0 && m.bytes == 0) {
    ++m.phase;
    complete_phase(b, m);
    m.pending = m.expected;
    engine.idle_sweeps = 0;
  }
}

static void deliver(Block* b, u32 i) {
  const BulkCopy copy = b->bulk[i];
  b->bulk[i] = b->bulk[--b->bulk_count];
  u8* to = b->dynamic_shared;  // the block may not be the running one: translate by hand
  const u32 dynamic_base = shared_dynamic_base();
  if (copy.destination >= dynamic_base) to += copy.destination - dynamic_base;
  else to = (b == engine.current_block ? engine.static_shared : b->static_shared) + (copy.destination - shared_window);
  memcpy(to, copy.source ? copy.source : &copy.word, copy.bytes);
  for (u32 k = 0; k < b->mbarrier_count; ++k)
    if (b->mbarriers[k].address == copy.barrier) {
      b->mbarriers[k].bytes -= copy.bytes;
      try_complete(b, b->mbarriers[k]);
    }
}

bool flush_bulk_copies() {
  bool any = false;
  for (u32 i = 0; i < engine.resident; ++i) {
    Block* b = engine.blocks[i];
    while (b->live && b->bulk_count) { deliver(b, draw(b->bulk_count)); any = true; }
  }
  return any;
}

}  // namespace ninferc_emulator

using namespace ninferc_emulator;

extern "C" {

void ninferc_emulator_cp_async(unsigned destination, const void* source, unsigned bytes, unsigned valid) {
  Fiber* self = current();
  Copy copy{destination, bytes, valid, self->group, source, lands_early()};
  check_copy(ninferc_emulator_shared_pointer(destination, bytes, "cp.async"), bytes, place_of(__builtin_return_address(0)));
  if (valid) ninferc_emulator_check_global(source, bytes, 0, "cp.async");
  if (copy.landed) land(copy);
  append(self->copies, self->copy_count, self->copy_room, copy);
}
void ninferc_emulator_cp_async_commit() { ++current()->group; }
void ninferc_emulator_cp_async_wait(unsigned pending) {
  Fiber* self = current();
  u32 kept = 0;
  for (u32 i = 0; i < self->copy_count; ++i) {
    const Copy& c = self->copies[i];
    if (u64(c.group) + pending >= self->group) {
      self->copies[kept++] = c;
      continue;
    }
    if (!c.landed) land(c);
    settle_copy(ninferc_emulator_shared_pointer(c.destination, c.bytes, "cp.async"), c.bytes);
  }
  self->copy_count = kept;
}

void ninferc_emulator_mbarrier_init(unsigned barrier, unsigned count) {
  ninferc_emulator_shared_pointer(barrier, 8, "mbarrier_init");
  if (count == 0) fail("mbarrier_init: the count must be at least 1");
  Block* b = current()->block;
  for (u32 i = 0; i < b->mbarrier_count; ++i)
    if (b->mbarriers[i].address == barrier) fail("mbarrier_init: shared address 0x%x holds an mbarrier already", barrier);
  check_shared(ninferc_emulator_shared_pointer(barrier, 8, "mbarrier_init"), 8, true, place_of(__builtin_return_address(0)));
  append(b->mbarriers, b->mbarrier_count, b->mbarrier_room, MBarrier{barrier, count, count});
  b->mbarriers[b->mbarrier_count - 1].agent = new_agent(b);
}
void ninferc_emulator_mbarrier_invalidate(unsigned barrier) {
  MBarrier& m = find_mbarrier(barrier, "mbarrier_invalidate");
  Block* b = current()->block;
  forget(m);
  m = b->mbarriers[--b->mbarrier_count];
}
void ninferc_emulator_mbarrier_arrive(unsigned barrier, unsigned bytes) {
  MBarrier& m = find_mbarrier(barrier, "mbarrier_arrive");
  if (m.pending == 0) fail("mbarrier_arrive: more than the %u arrivals of the phase", m.expected);
  check_barrier_use(barrier, place_of(__builtin_return_address(0)));
  release_to(m, current());
  m.bytes += bytes;
  --m.pending;
  try_complete(current()->block, m);
  maybe_preempt(current());
}
bool ninferc_emulator_mbarrier_try_wait(unsigned barrier, unsigned parity) {
  Fiber* self = current();
  const auto done = [&] {
    MBarrier& m = find_mbarrier(barrier, "mbarrier_try_wait");
    if ((m.phase & 1) == (parity & 1)) return false;
    acquire_from(m, self);
    return true;
  };
  check_barrier_use(barrier, place_of(__builtin_return_address(0)));
  if (done()) return true;
  Block* b = self->block;
  for (u32 i = 0; i < b->bulk_count;) {
    if (b->bulk[i].barrier == barrier) deliver(b, i);
    else ++i;
  }
  if (done()) return true;
  ninferc_emulator_poll("mbarrier_try_wait");
  return done();
}
void ninferc_emulator_bulk_copy(unsigned destination, const void* source, unsigned bytes, unsigned barrier) {
  Block* b = current()->block;
  if (bytes == 0 || bytes % 16) fail("bulk_copy: %u bytes is not a positive multiple of 16", bytes);
  if (destination % 16 || reinterpret_cast<u64>(source) % 16) fail("bulk_copy: addresses must be multiples of 16");
  ninferc_emulator_shared_pointer(destination, bytes, "bulk_copy");
  ninferc_emulator_check_global(source, bytes, 0, "bulk_copy");
  check_bulk_copy(b, find_mbarrier(barrier, "bulk_copy"), destination, bytes, place_of(__builtin_return_address(0)));
  append(b->bulk, b->bulk_count, b->bulk_room, BulkCopy{destination, bytes, barrier, source, 0});
  if (lands_early()) deliver(b, b->bulk_count - 1);
}

// ---- clusters ----------------------------------------------------------------------------------------------------
void ninferc_emulator_cluster_arrive() {
  Fiber* self = current();
  Cluster* c = self->block->cluster;
  if (self->cluster_arrivals != self->cluster_waits) fail("cluster_arrive: the thread has not waited since it last arrived");
  ++self->cluster_arrivals;
  if (++c->arrived == engine.cluster_size * engine.block_threads) {
    c->arrived = 0;
    ++c->phase;
    engine.idle_sweeps = 0;
  }
  maybe_preempt(self);
}
void ninferc_emulator_cluster_wait() {
  Fiber* self = current();
  if (self->cluster_arrivals != self->cluster_waits + 1) fail("cluster_wait: the thread has not arrived");
  while (self->block->cluster->phase < self->cluster_arrivals) ninferc_emulator_poll("cluster_wait");
  ++self->cluster_waits;
}
void ninferc_emulator_st_async(unsigned destination, unsigned value, unsigned barrier, unsigned rank) {
  Fiber* self = current();
  ninferc_emulator_shared_pointer(destination, 4, "st_async");
  if (rank >= engine.cluster_size) fail("st_async: the cluster has %u blocks, none of rank %u", engine.cluster_size, rank);
  Block* b = self->block->cluster->blocks[rank];
  if (self->cluster_waits == 0) fail("st_async before the cluster has met: the other block may not have started");
  if (!b) fail("st_async: block %u of the cluster has ended", rank);
  MBarrier* found = nullptr;
  for (u32 i = 0; i < b->mbarrier_count; ++i)
    if (b->mbarriers[i].address == barrier) found = &b->mbarriers[i];
  if (!found) fail("st_async: block %u has no mbarrier at shared address 0x%x", rank, barrier);
  check_bulk_copy(b, *found, destination, 4, place_of(__builtin_return_address(0)));
  release_to(*found, self);
  append(b->bulk, b->bulk_count, b->bulk_room, BulkCopy{destination, 4, barrier, nullptr, value});
  if (lands_early()) deliver(b, b->bulk_count - 1);
  engine.idle_sweeps = 0;
}

}  // extern "C"
