// The emulator's engine: one fiber per CUDA thread, one operating-system thread in all.
//
// A fiber runs until it needs others (a warp collective, a barrier, a poll) and then hands over to another one; which one
// is drawn from the schedule seed, so that code relying on an order without synchronising gives different results or
// reads poisoned memory.  Seed 0 runs lanes and warps in ascending order.
#include "runtime.h"

#include <link.h>
#include <signal.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <unistd.h>
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

// ---- errors ----------------------------------------------------------------------------------------------------
static sigjmp_buf escape;

void fail(const char* format, ...) {
  char* out = engine.message;
  size_t room = sizeof(engine.message);
  if (ninferc_emulator_thread) {
    const auto& t = *ninferc_emulator_thread;
    const int n = snprintf(out, room, "block (%u,%u,%u) thread (%u,%u,%u): ", t.block_index.x, t.block_index.y,
                           t.block_index.z, t.thread_index.x, t.thread_index.y, t.thread_index.z);
    out += n;
    room -= size_t(n);
  }
  va_list list;
  va_start(list, format);
  vsnprintf(out, room, format, list);
  va_end(list);
  engine.failed = true;
  siglongjmp(escape, 1);
}

// Names the memory an address belongs to or is nearest to.
void describe_address(u64 address, char* text, unsigned long room) {
  if (const Fiber* f = current()) {
    const u64 shared = reinterpret_cast<u64>(f->block->dynamic_shared);
    if (address >= shared - guard_bytes && address < shared + f->block->dynamic_room + guard_bytes) {
      snprintf(text, room, "byte %lld of %u bytes of dynamic shared memory", (long long)(address - shared),
               engine.dynamic_bytes);
      return;
    }
  }
  const Region* nearest = nullptr;
  u64 distance = ~0ull;
  for (int i = 0; i < engine.region_count; ++i) {
    const Region& r = engine.regions[i];
    const u64 d = address < r.begin ? r.begin - address : (address < r.end ? 0 : address - r.end + 1);
    if (d < distance) { distance = d; nearest = &r; }
  }
  if (address < 65536) snprintf(text, room, "address 0x%llx (a null pointer plus an offset)", address);
  else if (!nearest || distance > (1ull << 32)) snprintf(text, room, "address 0x%llx, which belongs to no argument", address);
  else if (address < nearest->begin)
    snprintf(text, room, "%llu bytes before the start of argument %d (%llu bytes)", nearest->begin - address,
             nearest->argument, nearest->end - nearest->begin);
  else if (distance == 0)
    snprintf(text, room, "byte %llu of argument %d (%llu bytes)", address - nearest->begin, nearest->argument,
             nearest->end - nearest->begin);
  else
    snprintf(text, room, "byte %llu of argument %d, which has %llu bytes", address - nearest->begin, nearest->argument,
             nearest->end - nearest->begin);
}

static void on_fault(int signal_number, siginfo_t* info, void* raw) {
  (void)raw;
  if (!engine.running) {
    // Not ours: let the default action happen when the instruction runs again.
    signal(signal_number, SIG_DFL);
    return;
  }
  if (signal_number == SIGVTALRM) fail("the kernel ran for %.0f s of processor time without ending (a loop that never ends?)", engine.limit_seconds);
  if (signal_number == SIGFPE) fail("integer division by zero");
  if (signal_number == SIGILL) fail("the kernel reached unreachable code");
  const char* access = "access";
#if defined(__x86_64__)
  access = (static_cast<ucontext_t*>(raw)->uc_mcontext.gregs[REG_ERR] & 2) ? "store" : "load";
#endif
  const u64 address = reinterpret_cast<u64>(info->si_addr);
  Fiber* f = reinterpret_cast<Fiber*>(ninferc_emulator_thread);
  if (f && address >= reinterpret_cast<u64>(f->stack) - 65536 && address < reinterpret_cast<u64>(f->stack) + 64)
    fail("the thread's stack of %u bytes overflowed", stack_bytes);
  char where[160];
  describe_address(address, where, sizeof(where));
  fail("%s out of bounds: %s", access, where);
}

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

// ---- blocks ----------------------------------------------------------------------------------------------------
static void check_block_end(Block* block) {
  for (u32 i = engine.dynamic_bytes; i < block->dynamic_room; ++i)
    if (block->dynamic_shared[i] != poison_byte)
      fail("store out of bounds: byte %u of %u bytes of dynamic shared memory", i, engine.dynamic_bytes);
  if (block->bulk_count) fail("the block ended with a bulk copy still in flight");
  if (engine.require_grid_wait && block->grid_waits == 0)
    fail("the block ended without grid_dependency_wait, which every block of a kernel with programmatic edges must execute");
}

static void fiber_main();

static void start_block(Block* block) {
  const u32 number = engine.order ? engine.order[engine.next_block] : engine.next_block;
  ++engine.next_block;
  const auto grid = ninferc_emulator_grid_dim;
  block->index = {number % grid.x, number / grid.x % grid.y, number / grid.x / grid.y};
  block->live = true;
  block->acquired = false;
  block->serial = engine.next_block;
  block->bulk_count = 0;
  block->mbarrier_count = 0;
  block->grid_waits = 0;
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
    f->atomic = nullptr;
    f->copy_count = 0;
    f->group = 0;
    f->request = nullptr;
    if (i % 32 == 0) {
      for (auto& x : w->fibers) x = nullptr;
      w->block = block;
      w->index = i / 32;
      w->epoch = 1;
      memset(w->known, 0, sizeof(w->known));
      w->present = w->ready = w->polling = w->waiting = w->exited = 0;
    }
    w->fibers[i % 32] = f;
    w->present |= 1u << (i % 32);
    make_context(f, fiber_main);
    make_ready(w, 1u << (i % 32));
  }
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
    block->live = false;
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

// ---- launch ----------------------------------------------------------------------------------------------------
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
  unsigned dynamic_bytes, shared_limit, static_limit, resident, require_grid_wait, checked, region_count;
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
  engine.limit_seconds = launch->limit_seconds;
  engine.block_threads = launch->block[0] * launch->block[1] * launch->block[2];
  engine.block_total = launch->grid[0] * launch->grid[1] * launch->grid[2];
  ninferc_emulator_block_dim = {launch->block[0], launch->block[1], launch->block[2]};
  ninferc_emulator_grid_dim = {launch->grid[0], launch->grid[1], launch->grid[2]};
  ninferc_emulator_thread = nullptr;
  engine.resident = launch->resident < engine.block_total ? launch->resident : engine.block_total;

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
    if (engine.static_bytes > launch->static_limit)
      fail("%u bytes of static shared memory, %u are allowed", engine.static_bytes, launch->static_limit);
    if (engine.static_bytes + engine.dynamic_bytes > launch->shared_limit)
      fail("%u bytes of static and %u of dynamic shared memory, %u are allowed", engine.static_bytes,
           engine.dynamic_bytes, launch->shared_limit);
    engine.blocks = static_cast<Block**>(calloc(engine.resident, sizeof(Block*)));
    if (!engine.blocks) fail("out of memory");
    if (engine.seed != 0 && engine.block_total > 1) {
      engine.order = static_cast<u32*>(malloc(engine.block_total * sizeof(u32)));
      if (!engine.order) fail("out of memory");
      for (u32 i = 0; i < engine.block_total; ++i) {
        const u32 j = draw(i + 1);
        engine.order[i] = engine.order[j];
        engine.order[j] = i;
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
