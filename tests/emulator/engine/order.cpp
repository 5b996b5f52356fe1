// Checked kernels: what is ordered before what, by vector clocks.
//
// Every thread counts its releases (`tick`) and knows up to which tick of every other thread it is ordered (`known`).
// __syncwarp, block barriers, named barriers and mbarriers pass that on; shuffles, votes and matrix products do not.  Threads
// that have met share one clock.  What an mbarrier waits for besides threads (bulk copies, stores of the cluster) counts as one
// agent of that mbarrier, which ticks when a phase is complete.  Clocks are of all blocks of a cluster: who waits for another
// block's stores is ordered after what that block did before them.  Meeting the cluster orders nothing: its arrival is relaxed.
#include "runtime.h"

#include <stdlib.h>
#include <string.h>

namespace ninferc_emulator {

constexpr u32 agent_warps = 8;  // 32 mbarriers of a block each
struct Clock { u32 references; Clock *next, *before; u32 ticks[]; };  // free, of all
static Clock *free_clocks, *all_clocks;
static u32 block_size, clock_size;  // threads and agents of a block, of a cluster

static u32 agents_from() { return (engine.block_threads + 31) / 32 * 32; }
static u32 agent_warp(u32 agent) { return agents_from() / 32 + agent / 32; }

u32 new_agent(Block* b) {
  if (engine.checked && b->agents == 32 * agent_warps) fail("a block initialises at most %u mbarriers here", 32 * agent_warps);
  return b->agents++;
}

static Clock* new_clock(const Clock* from) {
  Clock* c = free_clocks;
  if (c) {
    free_clocks = c->next;
  } else {
    c = static_cast<Clock*>(malloc(sizeof(Clock) + 4 * clock_size));
    if (!c) fail("out of memory");
    c->before = all_clocks;
    all_clocks = c;
  }
  c->references = 1;
  if (from) memcpy(c->ticks, from->ticks, 4 * clock_size);
  else memset(c->ticks, 0, 4 * clock_size);
  return c;
}
static Clock* share(Clock* c) { return ++c->references, c; }
static void drop(Clock*& c) {
  if (c && --c->references == 0) { c->next = free_clocks; free_clocks = c; }
  c = nullptr;
}
static void merge(Clock* into, const Clock* from) {
  for (u32 i = 0; i < clock_size; ++i) into->ticks[i] = from->ticks[i] > into->ticks[i] ? from->ticks[i] : into->ticks[i];
}

static void start_clocks() {
  block_size = ((engine.block_threads + 31) / 32 + agent_warps) * 32;
  clock_size = block_size * engine.cluster_size;
}
static u32 of_block(const Block* b) { return b->cluster_rank * block_size; }  // where its ticks begin
static void end_clocks() {
  while (all_clocks) { Clock* before = all_clocks->before; free(all_clocks); all_clocks = before; }
  free_clocks = nullptr;
}

// A thread arrives: what it knows and has done is gathered, what it does from now on is not.
static void gather(Gathering& g, Fiber* f) {
  if (!g.clock) g.clock = new_clock(f->known);
  else if (g.last != f->known) merge(g.clock, f->known);
  if (g.last != f->known) { drop(g.last); g.last = share(f->known); }
  u32& mine = g.clock->ticks[of_block(f->block) + f->info.linear];
  mine = f->tick > mine ? f->tick : mine;
  ++f->tick;
}
static void learn(Fiber* f, Clock* clock) {
  if (f->known == clock) return;
  drop(f->known);
  f->known = share(clock);
}

void order_lanes(Warp* w, u32 lanes) {
  if (!engine.checked) return;
  Gathering g{};
  u32 tick = 0;
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    Fiber* f = w->fibers[__builtin_ctz(rest)];
    gather(g, f);
    tick = f->tick > tick ? f->tick : tick;
  }
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    Fiber* f = w->fibers[__builtin_ctz(rest)];
    f->tick = tick;  // equal, so that records of one instruction are one
    learn(f, g.clock);
  }
  drop(g.clock);
  drop(g.last);
}

void arrive_at(NamedBarrier& b, Fiber* f) { if (engine.checked) gather(b.gathered, f); }
void leave(NamedBarrier& b, Fiber* f) { if (engine.checked) learn(f, b.gathered.clock); }
void forget(Gathering& g) { drop(g.clock); drop(g.last); }

void release_to(MBarrier& m, Fiber* f) { if (engine.checked) gather(m.gathered, f); }
void complete_phase(const Block* b, MBarrier& m) {
  if (!engine.checked) return;
  // Later phases are ordered after earlier ones: threads that waited for those may hold the old clock.
  Clock* complete = new_clock(m.complete);
  if (m.gathered.clock) merge(complete, m.gathered.clock);
  complete->ticks[of_block(b) + agent_warp(m.agent) * 32 + m.agent % 32] = ++m.tick;
  drop(m.complete);
  m.complete = complete;
  forget(m.gathered);
  drop(m.waiter);
  drop(m.informed);
}
void acquire_from(MBarrier& m, Fiber* f) {
  if (!engine.checked || !m.complete || f->known == m.informed) return;
  if (!m.informed || m.waiter != f->known) {
    drop(m.waiter);
    drop(m.informed);
    m.waiter = share(f->known);
    m.informed = new_clock(f->known);
    merge(m.informed, m.complete);
  }
  learn(f, m.informed);
}
void forget(MBarrier& m) {
  forget(m.gathered);
  drop(m.complete);
  drop(m.waiter);
  drop(m.informed);
}

static void forget_order(Block* b) {
  for (auto& named : b->named) forget(named.gathered);
  for (u32 i = 0; i < b->mbarrier_count; ++i) forget(b->mbarriers[i]);
  b->mbarrier_count = 0;
  for (u32 i = 0; i < engine.block_threads; ++i) drop(b->fibers[i].known);
}
static void start_order(Block* b) {
  Clock* nothing = new_clock(nullptr);
  for (u32 i = 0; i < engine.block_threads; ++i) {
    b->fibers[i].tick = 1;
    b->fibers[i].known = share(nothing);
  }
  drop(nothing);
}

}  // namespace ninferc_emulator
