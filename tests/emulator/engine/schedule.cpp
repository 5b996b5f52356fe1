// The emulator's engine: one fiber per CUDA thread, one operating-system thread in all.
//
// A fiber runs until it needs others (a warp collective, a barrier, a poll) and then hands over to another one; which one
// is drawn from the schedule seed, so that code relying on an order without synchronising gives different results or
// reads poisoned memory.  Seed 0 runs lanes and warps in ascending order.
#include "runtime.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>

// The hand-written switch is several times faster than swapcontext.
#if defined(__x86_64__) && !defined(NINFERC_EMULATOR_UCONTEXT)
#define NINFERC_EMULATOR_ASSEMBLY 1
#else
#define NINFERC_EMULATOR_ASSEMBLY 0
#endif

extern "C" {
ninferc_emulator_thread_info* ninferc_emulator_thread;
ninferc_emulator_dim3 ninferc_emulator_block_dim, ninferc_emulator_grid_dim;
}

namespace ninferc_emulator {

Engine engine;

// ---- context switch --------------------------------------------------------------------------------------------
#if NINFERC_EMULATOR_ASSEMBLY
extern "C" void ninferc_emulator_switch(void** save, void* resume);
asm(R"(
.text
.globl ninferc_emulator_switch
.type ninferc_emulator_switch, @function
ninferc_emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size ninferc_emulator_switch, .-ninferc_emulator_switch
)");
static void* host_context;
static void make_context(Fiber* fiber, void (*entry)()) {
  // Six callee-saved registers, the entry as return address, and one slot so that the entry sees an aligned call frame.
  void** top = reinterpret_cast<void**>(fiber->stack + stack_bytes) - 8;
  for (int i = 0; i < 6; ++i) top[i] = nullptr;
  top[6] = reinterpret_cast<void*>(entry);
  top[7] = nullptr;
  fiber->context = top;
}
static inline void jump(void** save, void* resume) { ninferc_emulator_switch(save, resume); }
#else
static ucontext_t host_store;
static void* host_context = &host_store;
static void make_context(Fiber* fiber, void (*entry)()) {
  if (!fiber->context) fiber->context = calloc(1, sizeof(ucontext_t));
  ucontext_t* c = static_cast<ucontext_t*>(fiber->context);
  getcontext(c);
  c->uc_stack.ss_sp = fiber->stack;
  c->uc_stack.ss_size = stack_bytes;
  c->uc_link = nullptr;
  makecontext(c, entry, 0);
}
static inline void jump(void** save, void* resume) {
  swapcontext(static_cast<ucontext_t*>(*save), static_cast<ucontext_t*>(resume));
}
#endif

// ---- scheduling ------------------------------------------------------------------------------------------------
static u32 random_bits() {
  u64 x = engine.random;
  x ^= x << 13;
  x ^= x >> 7;
  x ^= x << 17;
  engine.random = x;
  return u32(x >> 24);
}
u32 draw(u32 bound) { return bound <= 1 || engine.seed == 0 ? 0 : random_bits() % bound; }

static u32 pick_bit(u32 set) {
  if (engine.seed == 0) return u32(__builtin_ctz(set));
  const u32 r = random_bits();
  if (r & 64) {
    // Descending order for a while exposes what ascending order hides.
    const u32 below = set & ((2u << (r & 31)) - 1);
    return 31 - u32(__builtin_clz(below ? below : set));
  }
  const u32 above = set & (~0u << (r & 31));
  return u32(__builtin_ctz(above ? above : set));
}

static void enter_block(Block* block) {
  if (engine.current_block == block) return;
  if (engine.static_bytes) {
    if (engine.current_block && engine.current_block->live)
      memcpy(engine.current_block->static_shared, engine.static_shared, engine.static_bytes);
    memcpy(engine.static_shared, block->static_shared, engine.static_bytes);
  }
  engine.current_block = block;
}

static Warp* pick_warp(Block* block) {
  return block->ready_warps ? &block->warps[pick_bit(block->ready_warps)] : nullptr;
}

static void resume_pollers() {
  if (++engine.idle_sweeps > 20000) report_deadlock();
  engine.clock += 1000000;
  for (u32 i = 0; i < engine.resident; ++i) {
    Block* b = engine.blocks[i];
    if (!b->live) continue;
    for (u32 w = 0; w < b->warp_count; ++w) {
      Warp& warp = b->warps[w];
      if (!warp.polling) continue;
      warp.ready |= warp.polling;
      warp.polling = 0;
      b->ready_warps |= 1u << w;
    }
  }
  engine.polling = 0;
}

// Hands over to another fiber (or to the host when none is left).  The caller has recorded why it waits.
void hand_over() {
  Fiber* self = reinterpret_cast<Fiber*>(ninferc_emulator_thread);
  settle_overwrite();
  Warp* warp = engine.current_warp;
  if (!warp->ready) {
    warp = pick_warp(engine.current_block);
    while (!warp) {
      const u32 first = draw(engine.resident);
      for (u32 i = 0; i < engine.resident && !warp; ++i) {
        Block* b = engine.blocks[(first + i) % engine.resident];
        if (b->live && b->ready_warps) { enter_block(b); warp = pick_warp(b); }
      }
      if (warp) break;
      if (engine.unfinished == 0) {
        ninferc_emulator_thread = nullptr;
        jump(&self->context, host_context);
        return;
      }
      if (flush_bulk_copies()) continue;
      if (engine.polling == 0) report_deadlock();
      resume_pollers();
    }
    engine.current_warp = warp;
  }
  const u32 lane = pick_bit(warp->ready);
  warp->ready &= ~(1u << lane);
  if (!warp->ready) warp->block->ready_warps &= ~(1u << warp->index);
  Fiber* next = warp->fibers[lane];
  if (next == self) return;
  ninferc_emulator_thread = &next->info;
  jump(&self->context, next->context);
}

void make_ready(Warp* warp, u32 lanes) {
  warp->ready |= lanes;
  if (lanes) warp->block->ready_warps |= 1u << warp->index;
}

// Lets another warp run first, now and then; the calling lane stays ready.
void maybe_preempt(Fiber* self) {
  if (engine.seed == 0 || --engine.quantum > 0) return;
  engine.quantum = 1 + int(random_bits() % (4u << (random_bits() % 8)));
  make_ready(self->warp, 1u << self->info.lane);
  Warp* other = pick_warp(self->block);
  if (engine.resident > 1 && draw(4) == 0) {
    Block* b = engine.blocks[draw(engine.resident)];
    if (b->live && b->ready_warps) { enter_block(b); other = pick_warp(b); }
  }
  engine.current_warp = other;
  hand_over();
}

void poll(Fiber* self) {
  self->warp->polling |= 1u << self->info.lane;
  ++engine.polling;
  hand_over();
}

static void describe_waits(Block* b, char* text, size_t room) {
  // Groups the block's threads by what they wait for, and where.
  struct Group { const char *name, *file; int line; u32 count, first; } groups[32];
  u32 count = 0, exited = 0;
  for (u32 i = 0; i < engine.block_threads; ++i) {
    const Fiber& f = b->fibers[i];
    if (f.exited) { ++exited; continue; }
    const char* name = f.waits_for ? f.waits_for : "nothing";
    u32 g = 0;
    while (g < count && !(strcmp(groups[g].name, name) == 0 && groups[g].line == (f.wait_file ? f.wait_line : 0))) ++g;
    if (g == 32) continue;
    if (g == count) groups[count++] = {name, f.wait_file, f.wait_file ? f.wait_line : 0, 0, i};
    ++groups[g].count;
  }
  size_t used = 0;
  for (u32 g = 0; g < count && used < room; ++g) {
    int n = snprintf(text + used, room - used, "%s%u threads (first: %u) wait at %s", g ? ", " : "", groups[g].count,
                     groups[g].first, groups[g].name);
    used += size_t(n);
    if (groups[g].file && used < room) {
      const char* slash = strrchr(groups[g].file, '/');
      n = snprintf(text + used, room - used, " (%s:%d)", slash ? slash + 1 : groups[g].file, groups[g].line);
      used += size_t(n);
    }
  }
  if (used < room) snprintf(text + used, room - used, "%s%u threads have exited", count ? ", " : "", exited);
}

void report_deadlock() {
  ninferc_emulator_thread = nullptr;
  u32 not_started = engine.block_total - engine.next_block;
  for (u32 i = 0; i < engine.resident; ++i) {
    Block* b = engine.blocks[i];
    if (!b->live) continue;
    char text[700];
    describe_waits(b, text, sizeof(text));
    const auto index = b->index;
    if (not_started && engine.polling)
      fail("deadlock in block (%u,%u,%u): %s; %u blocks have not started (only %u run at a time)", index.x, index.y,
           index.z, text, not_started, engine.resident);
    fail("deadlock in block (%u,%u,%u): %s", index.x, index.y, index.z, text);
  }
  fail("deadlock");
}

}  // namespace ninferc_emulator
