// Checked kernels: every load and store of the kernel is reported here (the compiler's thread-sanitizer instrumentation,
// without its runtime), so bounds are exact and unsynchronised accesses are found whatever the schedule.
//
// Shared memory: hazards.cpp. In global memory nothing is ordered between blocks until a block has executed an atomic or scoped
// access, unordered stores of equal values are no race, and of the loads of a byte only the last two warps' are kept.
#include "runtime.h"

#include <link.h>
#include <stdlib.h>
#include <string.h>

namespace ninferc_emulator {

// Who made an access: block serial (24 bits, from 1), thread (10), tick (30).  Zero: nobody.
typedef u64 Record;
static Record record_of(const Fiber* f) {
  return (u64(f->block->serial) << 40) | (u64(f->info.linear) << 30) | (f->tick & 0x3fffffffu);
}
static u32 serial_of(Record r) { return u32(r >> 40); }
static u32 thread_of(Record r) { return u32(r >> 30) & 1023; }
static u32 tick_of(Record r) { return u32(r) & 0x3fffffffu; }

// One per byte: the last store and the last loads of up to two warps.
struct Cell { Record store, load[2]; };
static Cell* global_cells[256];

// An unordered store over another one, until it is known whether it changed the value.
struct Overwrite { Fiber* fiber; const u8* pointer; u32 bytes; u8 before[16]; Record other; int argument; u64 first; };
static Overwrite overwrite_global;

static bool ordered(Record r, const Fiber* f) {
  if (r == 0) return true;
  if (serial_of(r) != f->block->serial) return f->block->acquired;
  return thread_of(r) == f->info.linear || tick_of(r) <= f->known->ticks[of_block(f->block) + thread_of(r)];
}

[[noreturn]] static void report(Record other, const char* mine, const char* theirs, int argument, u64 byte) {
  fail("race: %s of byte %llu of argument %d and %s by thread %u%s are not ordered by a barrier", mine, byte, argument, theirs,
       thread_of(other), serial_of(other) != current()->block->serial ? " of an earlier block" : "");
}

// Called before anything else runs after an instrumented store.
void settle_overwrite() {
  settle_shared();
  Overwrite& o = overwrite_global;
  Fiber* f = o.fiber;
  if (!f) return;
  o.fiber = nullptr;
  for (u32 i = 0; i < o.bytes; ++i) {
    if (o.pointer[i] == o.before[i]) continue;
    ninferc_emulator_thread = &f->info;
    report(o.other, "store", "store", o.argument, o.first + i);
  }
}

static void touch_global(Cell* cells, u64 first, u64 bytes, bool store, int argument, const void* pointer) {
  Fiber* f = current();
  const Record me = record_of(f);
  for (u64 i = first; i < first + bytes; ++i) {
    Cell& c = cells[i];
    if (!ordered(c.store, f)) {
      if (!store || bytes > 16) report(c.store, store ? "store" : "load", "store", argument, i);
      if (!overwrite_global.fiber) {
        overwrite_global = {f, static_cast<const u8*>(pointer), u32(bytes), {}, c.store, argument, first};
        memcpy(overwrite_global.before, pointer, bytes);
      }
    }
    if (store) {
      for (const Record load : c.load)
        if (!ordered(load, f)) report(load, "store", "load", argument, i);
      c = {me, {0, 0}};
    } else {
      if (thread_of(c.load[0]) / 32 != thread_of(me) / 32 || serial_of(c.load[0]) != serial_of(me)) c.load[1] = c.load[0];
      c.load[0] = me;
    }
  }
}

static int find_image(struct dl_phdr_info* info, size_t, void* probe) {
  const u64 address = reinterpret_cast<u64>(probe);
  u64 begin = ~0ull, end = 0;
  bool mine = false;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& p = info->dlpi_phdr[i];
    if (p.p_type != PT_LOAD) continue;
    const u64 b = info->dlpi_addr + p.p_vaddr, e = b + p.p_memsz;
    if (address >= b && address < e) mine = true;
    begin = b < begin ? b : begin;
    end = e > end ? e : end;
  }
  if (!mine) return 0;
  const int slot = address == reinterpret_cast<u64>(&engine) ? 0 : 1;
  image_begin[slot] = begin;
  image_end[slot] = end;
  return 1;
}

void start_checks() {
  overwrite_global.fiber = nullptr;
  if (!engine.checked) return;
  dl_iterate_phdr(find_image, &engine);
  dl_iterate_phdr(find_image, reinterpret_cast<void*>(engine.entry));
  start_clocks();
  start_hazards();
  if (engine.region_count > 256) fail("a checked kernel takes at most 256 arrays");
  for (int i = 0; i < engine.region_count; ++i) {
    const Region& r = engine.regions[i];
    global_cells[i] = nullptr;
    // What nobody may write cannot race.
    if (r.flags & region_writable) global_cells[i] = static_cast<Cell*>(calloc(r.end - r.begin + 1, sizeof(Cell)));
    if ((r.flags & region_writable) && !global_cells[i]) fail("out of memory");
  }
}
void end_checks() {
  if (!engine.checked) return;
  end_hazards();
  end_clocks();
  for (int i = 0; i < engine.region_count && i < 256; ++i) {
    free(global_cells[i]);
    global_cells[i] = nullptr;
  }
}
void start_block_checks(Block* block) {
  if (!engine.checked) return;
  forget_words(block);
  start_order(block);
}
void end_block_checks(Block* block) {
  if (engine.checked) forget_order(block);
}

// ---- instrumented accesses -------------------------------------------------------------------------------------
static void access(const void* pointer, u64 bytes, bool store, const void* from) {
  const u64 p = reinterpret_cast<u64>(pointer);
  Fiber* f = current();
  if (!f || !engine.checked) return;
  settle_overwrite();
  const u64 stack = reinterpret_cast<u64>(f->stack);
  if (p >= stack && p < stack + stack_bytes) return;
  const u64 fiber = reinterpret_cast<u64>(f);
  if (p >= fiber && p < fiber + sizeof(Fiber) && !store) return;
  const u64 shared = reinterpret_cast<u64>(engine.static_shared), dynamic = reinterpret_cast<u64>(f->block->dynamic_shared);
  const bool atomic = pointer == f->atomic;
  const Kind kind = atomic ? an_atomic : store ? a_store : a_load;
  if (p >= shared && p < shared + engine.static_bytes) {
    check_thread(f, byte_of(pointer), bytes, kind, place_of(from), store ? pointer : nullptr);
    return;
  }
  if (p >= dynamic && p + bytes <= dynamic + engine.dynamic_bytes) {
    check_thread(f, byte_of(pointer), bytes, kind, place_of(from), store ? pointer : nullptr);
    return;
  }
  for (int i = 0; i < engine.region_count; ++i) {
    const Region& r = engine.regions[i];
    if (p < r.begin || p + bytes > r.end) continue;
    if (store && !(r.flags & region_writable)) fail("store: argument %d is read-only", r.argument);
    if (engine.require_grid_wait && !(r.flags & region_constant) && !f->waited)
      fail("%s: argument %d is touched before grid_dependency_wait", store ? "store" : "load", r.argument);
    if (global_cells[i] && !atomic) touch_global(global_cells[i], p - r.begin, bytes, store, r.argument, pointer);
    return;
  }
  for (int i = 0; i < 2; ++i)
    if (p >= image_begin[i] && p < image_end[i]) return;  // constant tables, the engine's public variables
  char where[160];
  describe_address(p, where, sizeof(where));
  fail("%s of %llu bytes out of bounds: %s", store ? "store" : "load", bytes, where);
}

}  // namespace ninferc_emulator

#define NINFERC_EMULATOR_TOUCH_(p, bytes, store) ninferc_emulator::access(p, bytes, store, __builtin_return_address(0))
#define NINFERC_EMULATOR_ACCESS_(size)                                                                                \
  extern "C" void __tsan_read##size(void* p) { NINFERC_EMULATOR_TOUCH_(p, size, false); }                             \
  extern "C" void __tsan_write##size(void* p) { NINFERC_EMULATOR_TOUCH_(p, size, true); }                             \
  extern "C" void __tsan_unaligned_read##size(void* p) { NINFERC_EMULATOR_TOUCH_(p, size, false); }                   \
  extern "C" void __tsan_unaligned_write##size(void* p) { NINFERC_EMULATOR_TOUCH_(p, size, true); }
NINFERC_EMULATOR_ACCESS_(1)
NINFERC_EMULATOR_ACCESS_(2)
NINFERC_EMULATOR_ACCESS_(4)
NINFERC_EMULATOR_ACCESS_(8)
NINFERC_EMULATOR_ACCESS_(16)
extern "C" {
void __tsan_read_range(void* p, unsigned long n) { NINFERC_EMULATOR_TOUCH_(p, n, false); }
void __tsan_write_range(void* p, unsigned long n) { NINFERC_EMULATOR_TOUCH_(p, n, true); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
void* __tsan_memcpy(void* to, const void* from, unsigned long n) {
  NINFERC_EMULATOR_TOUCH_(from, n, false);
  NINFERC_EMULATOR_TOUCH_(to, n, true);
  return memcpy(to, from, n);
}
void* __tsan_memset(void* to, int value, unsigned long n) {
  NINFERC_EMULATOR_TOUCH_(to, n, true);
  return memset(to, value, n);
}
}
