// Launching a kernel, and global memory with guard zones: the functions that emulator.py calls.
#include "runtime.h"

#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>

namespace ninferc_emulator {

static const int caught[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGVTALRM};

static void run_all() {
  for (u32 i = 0; i < engine.resident; ++i) engine.blocks[i] = make_block(i);
  engine.spare = make_block(0);
  engine.unfinished = engine.resident;
  for (u32 i = 0; i < engine.resident; ++i) start_block(engine.blocks[i]);
  engine.current_block = engine.blocks[0];
  Warp* warp = pick_warp(engine.current_block);
  engine.current_warp = warp;
  const u32 lane = pick_bit(warp->ready);
  warp->ready &= ~(1u << lane);
  if (!warp->ready) engine.current_block->ready_warps &= ~(1u << warp->index);
  Fiber* first = warp->fibers[lane];
  ninferc_emulator_thread = &first->info;
  jump(&host_context, first->context);
}

}  // namespace ninferc_emulator

using namespace ninferc_emulator;

extern "C" {

struct ninferc_emulator_launch {
  void (*entry)(void**);
  void* (*touch_shared)();
  void** arguments;
  unsigned grid[3], block[3];
  unsigned dynamic_bytes, shared_limit, static_limit, resident, require_grid_wait, checked, region_count, cluster;
  unsigned long long seed;
  const Region* regions;
  double limit_seconds;
};

const char* ninferc_emulator_message() { return engine.message; }
unsigned ninferc_emulator_static_bytes() { return engine.static_bytes; }

// Returns 0, or 1 with a message.
int ninferc_emulator_run(const ninferc_emulator_launch* launch) {
  memset(static_cast<void*>(&engine), 0, sizeof(engine));
  engine.entry = launch->entry;
  engine.arguments = launch->arguments;
  engine.dynamic_bytes = launch->dynamic_bytes;
  engine.seed = launch->seed;
  engine.random = launch->seed * 0x9e3779b97f4a7c15ull + 0x243f6a8885a308d3ull;
  engine.quantum = 8;
  engine.regions = launch->regions;
  engine.region_count = int(launch->region_count);
  engine.require_grid_wait = launch->require_grid_wait != 0;
  engine.checked = launch->checked != 0;
  engine.collect = launch->checked == 2;
  engine.limit_seconds = launch->limit_seconds;
  engine.block_threads = launch->block[0] * launch->block[1] * launch->block[2];
  engine.block_total = launch->grid[0] * launch->grid[1] * launch->grid[2];
  ninferc_emulator_block_dim = {launch->block[0], launch->block[1], launch->block[2]};
  ninferc_emulator_grid_dim = {launch->grid[0], launch->grid[1], launch->grid[2]};
  ninferc_emulator_thread = nullptr;
  engine.cluster_size = launch->cluster;
  engine.resident = launch->resident < engine.cluster_size ? engine.cluster_size : launch->resident;
  if (engine.resident > engine.block_total) engine.resident = engine.block_total;

  launch->touch_shared();  // makes the loader allocate this thread's copy
  dl_iterate_phdr(find_tls, reinterpret_cast<void*>(launch->entry));

  struct sigaction old[5], action;
  memset(&action, 0, sizeof(action));
  action.sa_sigaction = on_fault;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK;
  stack_t alternate{}, old_stack{};
  static u8* signal_stack = map_pages(65536);
  alternate.ss_sp = signal_stack;
  alternate.ss_size = 65536;
  sigaltstack(&alternate, &old_stack);
  for (int i = 0; i < 5; ++i) sigaction(caught[i], &action, &old[i]);
  itimerval timer{}, old_timer{};
  timer.it_value.tv_sec = long(launch->limit_seconds);
  timer.it_value.tv_usec = long((launch->limit_seconds - double(timer.it_value.tv_sec)) * 1e6);
  setitimer(ITIMER_VIRTUAL, &timer, &old_timer);

  if (sigsetjmp(escape, 1) == 0) {
    engine.running = true;
    const u32 statics = engine.static_bytes > 1 ? engine.static_bytes : 0;  // one: the anchor of ninferc_emulator_touch only
    if (statics > launch->static_limit)
      fail("%u bytes of static shared memory, %u are allowed", statics, launch->static_limit);
    if (statics + engine.dynamic_bytes > launch->shared_limit)
      fail("%u bytes of static and %u of dynamic shared memory, %u are allowed", statics, engine.dynamic_bytes,
           launch->shared_limit);
    engine.blocks = static_cast<Block**>(calloc(engine.resident, sizeof(Block*)));
    if (!engine.blocks) fail("out of memory");
    const u32 size = engine.cluster_size, clusters = engine.block_total / size;
    engine.clusters = static_cast<Cluster*>(calloc(clusters, sizeof(Cluster)));
    if (!engine.clusters) fail("out of memory");
    if (engine.seed != 0 && engine.block_total > 1) {  // clusters in a drawn order, the blocks of each one after the other
      engine.order = static_cast<u32*>(malloc(engine.block_total * sizeof(u32)));
      if (!engine.order) fail("out of memory");
      for (u32 i = 0; i < clusters; ++i) {
        const u32 j = draw(i + 1);
        for (u32 k = 0; k < size; ++k) {
          engine.order[i * size + k] = engine.order[j * size + k];
          engine.order[j * size + k] = i * size + k;
        }
      }
    }
    start_checks();
    run_all();
  }
  engine.running = false;
  ninferc_emulator_thread = nullptr;
  timer.it_value.tv_sec = timer.it_value.tv_usec = 0;
  setitimer(ITIMER_VIRTUAL, &old_timer, nullptr);
  for (int i = 0; i < 5; ++i) sigaction(caught[i], &old[i], nullptr);
  sigaltstack(&old_stack, nullptr);
  end_checks();
  for (u32 i = 0; engine.blocks && i < engine.resident; ++i) free_block(engine.blocks[i]);
  free_block(engine.spare);
  free(engine.blocks);
  free(engine.order);
  free(engine.clusters);
  return engine.failed ? 1 : 0;
}

// Global memory with unmapped zones on both sides; `begin` is a multiple of 256 and as close to the end of the mapped
// pages as that allows.  Mapped bytes around the data hold the guard pattern.
struct ninferc_emulator_allocation { unsigned char *pages, *begin; unsigned long long page_bytes; };
int ninferc_emulator_allocate(unsigned long long bytes, ninferc_emulator_allocation* result) {
  const u64 page = 4096;
  const u64 body = (bytes + 512 + page - 1) / page * page;
  u8* pages = map_guarded(body);
  if (!pages) return 1;
  result->pages = pages;
  result->page_bytes = body;
  result->begin = pages + guard_bytes + body - (bytes + 255) / 256 * 256;
  memset(pages + guard_bytes, guard_byte, size_t(result->begin - pages - guard_bytes));
  memset(result->begin + bytes, guard_byte, size_t(pages + guard_bytes + body - result->begin) - bytes);
  return 0;
}
void ninferc_emulator_protect(ninferc_emulator_allocation* a) { mprotect(a->pages + guard_bytes, a->page_bytes, PROT_READ); }
void ninferc_emulator_release(ninferc_emulator_allocation* a) { munmap(a->pages, a->page_bytes + 2 * guard_bytes); }
// Offset of a changed guard byte from the start of the data (negative: before it), or LLONG_MIN when all are intact.
long long ninferc_emulator_check_guards(const ninferc_emulator_allocation* a, unsigned long long bytes) {
  const u8* p = a->pages + guard_bytes;
  const u8* end = p + a->page_bytes;
  for (const u8* q = a->begin + bytes; q < end; ++q)
    if (*q != guard_byte) return q - a->begin;
  for (; p < a->begin; ++p)
    if (*p != guard_byte) return p - a->begin;
  return -0x7fffffffffffffffll - 1;
}

}  // extern "C"
