// Blocks: their memory, their start and end, static shared memory.
#include "runtime.h"

#include <link.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

namespace ninferc_emulator {

static void check_block_end(Block* block) {
  for (u32 i = engine.dynamic_bytes; i < block->dynamic_room; ++i)
    if (block->dynamic_shared[i] != poison_byte)
      fail("store out of bounds: byte %u of %u bytes of dynamic shared memory", i, engine.dynamic_bytes);
  if (block->bulk_count) fail("the block ended with a bulk copy or a store of its cluster still in flight");
  if (engine.require_grid_wait && block->grid_waits == 0)
    fail("the block ended without grid_dependency_wait, which every block of a kernel with programmatic edges must execute");
}

static void fiber_main();

static void start_block(Block* block) {
  const u32 number = engine.order ? engine.order[engine.next_block] : engine.next_block;
  ++engine.next_block;
  const auto grid = ninferc_emulator_grid_dim;
  block->index = {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
  block->cluster = &engine.clusters[number / engine.cluster_size];
  block->cluster_rank = number % engine.cluster_size;
  block->cluster->blocks[block->cluster_rank] = block;
  block->live = true;
  block->acquired = false;
  block->serial = engine.next_block;
  block->bulk_count = 0;
  block->mbarrier_count = 0;
  block->grid_waits = 0;
  block->agents = 0;
  memset(block->named, 0, sizeof(block->named));
  memset(block->dynamic_shared, poison_byte, block->dynamic_room);
  // Static shared memory of the running block lives in place; others keep a copy.
  if (engine.static_bytes) {
    if (engine.current_block == block || engine.current_block == nullptr || !engine.current_block->live) {
      memset(engine.static_shared, poison_byte, engine.static_bytes);
      engine.current_block = block;
    }
    memset(block->static_shared, poison_byte, engine.static_bytes);
  }
  if (engine.current_block == nullptr) engine.current_block = block;
  block->ready_warps = 0;
  block->running = engine.block_threads;
  const auto dims = ninferc_emulator_block_dim;
  for (u32 i = 0; i < engine.block_threads; ++i) {
    Fiber* f = &block->fibers[i];
    Warp* w = &block->warps[i / 32];
    f->info.thread_index = {i % dims.x, i / dims.x % dims.y, i / dims.x / dims.y};
    f->info.block_index = block->index;
    f->info.lane = i % 32;
    f->info.linear = i;
    f->info.dynamic_shared = block->dynamic_shared;
    f->block = block;
    f->warp = w;
    f->exited = false;
    f->waits_for = nullptr;
    f->waited = false;
    f->cluster_arrivals = f->cluster_waits = 0;
    f->atomic = nullptr;
    f->copy_count = 0;
    f->group = 0;
    f->request = nullptr;
    if (i % 32 == 0) {
      for (auto& x : w->fibers) x = nullptr;
      w->block = block;
      w->index = i / 32;
      w->present = w->ready = w->polling = w->waiting = w->exited = 0;
    }
    w->fibers[i % 32] = f;
    w->present |= 1u << (i % 32);
    make_context(f, fiber_main);
    make_ready(w, 1u << (i % 32));
  }
  start_block_checks(block);
}

static void fiber_main() {
  Fiber* self = reinterpret_cast<Fiber*>(ninferc_emulator_thread);
  engine.entry(engine.arguments);
  self = reinterpret_cast<Fiber*>(ninferc_emulator_thread);
  settle_overwrite();
  if (self->copy_count) fail("the thread ended with %u asynchronous copies not waited for", self->copy_count);
  self->exited = true;
  self->warp->exited |= 1u << self->info.lane;
  engine.idle_sweeps = 0;
  Block* block = self->block;
  if (--block->running == 0) {
    check_block_end(block);
    end_block_checks(block);
    block->live = false;
    block->cluster->blocks[block->cluster_rank] = nullptr;
    if (engine.next_block < engine.block_total) {
      // This fiber's stack is in use until the switch below, so a new block takes the spare set of fibers.
      Block* spare = engine.spare;
      engine.spare = block;
      engine.blocks[block->slot] = spare;
      spare->slot = block->slot;
      start_block(spare);
      enter_block(spare);
      engine.current_warp = &spare->warps[0];
    } else {
      --engine.unfinished;
    }
  }
  hand_over();
  fail("internal: an exited thread was resumed");
}

static int find_tls(struct dl_phdr_info* info, size_t, void* probe) {
  const u64 address = reinterpret_cast<u64>(probe);
  bool mine = false;
  u64 size = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& p = info->dlpi_phdr[i];
    const u64 begin = info->dlpi_addr + p.p_vaddr;
    if (p.p_type == PT_LOAD && address >= begin && address < begin + p.p_memsz) mine = true;
    if (p.p_type == PT_TLS) size = p.p_memsz;
  }
  if (!mine) return 0;
  engine.static_shared = static_cast<u8*>(info->dlpi_tls_data);
  engine.static_bytes = info->dlpi_tls_data ? u32(size) : 0;
  return 1;
}

static u8* map_pages(u64 bytes) {
  void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return p == MAP_FAILED ? nullptr : static_cast<u8*>(p);
}

// `bytes` (a multiple of the page) with unmapped guard zones before and after.
static u8* map_guarded(u64 bytes) {
  u8* pages = map_pages(bytes + 2 * guard_bytes);
  if (!pages) return nullptr;
  mprotect(pages, guard_bytes, PROT_NONE);
  mprotect(pages + guard_bytes + bytes, guard_bytes, PROT_NONE);
  return pages;
}

static Block* make_block(u32 slot) {
  Block* b = static_cast<Block*>(calloc(1, sizeof(Block)));
  if (!b) fail("out of memory");
  b->slot = slot;
  b->warp_count = (engine.block_threads + 31) / 32;
  b->warps = static_cast<Warp*>(calloc(b->warp_count, sizeof(Warp)));
  b->fibers = static_cast<Fiber*>(calloc(engine.block_threads, sizeof(Fiber)));
  b->stacks = map_pages(u64(engine.block_threads) * stack_bytes);
  const u64 page = 4096;
  b->dynamic_room = u32((engine.dynamic_bytes + 1024 + page - 1) / page * page);
  b->dynamic_pages = map_guarded(b->dynamic_room);
  if (!b->warps || !b->fibers || !b->stacks || !b->dynamic_pages) fail("out of memory");
  b->dynamic_shared = b->dynamic_pages + guard_bytes;
  if (engine.static_bytes) {
    b->static_shared = static_cast<u8*>(malloc(engine.static_bytes));
    if (!b->static_shared) fail("out of memory");
  }
  for (u32 i = 0; i < engine.block_threads; ++i) b->fibers[i].stack = b->stacks + u64(i) * stack_bytes;
  return b;
}

static void free_block(Block* b) {
  if (!b) return;
  for (u32 i = 0; b->fibers && i < engine.block_threads; ++i) {
    free(b->fibers[i].copies);
#if !NINFERC_EMULATOR_ASSEMBLY
    free(b->fibers[i].context);
#endif
  }
  if (b->stacks) munmap(b->stacks, u64(engine.block_threads) * stack_bytes);
  if (b->dynamic_pages) munmap(b->dynamic_pages, u64(b->dynamic_room) + 2 * guard_bytes);
  free(b->static_shared);
  free(b->bulk);
  free(b->mbarriers);
  free(b->warps);
  free(b->fibers);
  free(b);
}

}  // namespace ninferc_emulator
