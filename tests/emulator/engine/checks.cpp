// Checked kernels: every load and store of the kernel is reported here (the compiler's thread-sanitizer instrumentation,
// without its runtime), so bounds are exact and unsynchronised accesses are found whatever the schedule.
//
// Order between accesses is tracked per warp: __syncwarp orders the lanes of a warp, block barriers and mbarriers order warps.
// Shuffles, votes and matrix products do not order memory.  Between blocks nothing is ordered until a block has executed an
// atomic or scoped access.  Unordered stores of equal values are no race.  Approximations only ever hide races (a lane's barrier counts for its whole warp).
#include "runtime.h"

#include <link.h>
#include <stdlib.h>
#include <string.h>

namespace ninferc_emulator {

// Who made an access: block serial (24 bits, from 1), warp (5), lane (5), warp epoch (30).  Zero: nobody.
typedef u64 Record;
static Record record_of(const Fiber* f) {
  return (u64(f->block->serial) << 40) | (u64(f->warp->index) << 35) | (u64(f->info.lane) << 30) |
         (f->warp->epoch & 0x3fffffffu);
}
static u32 serial_of(Record r) { return u32(r >> 40); }
static u32 warp_of(Record r) { return u32(r >> 35) & 31; }
static u32 lane_of(Record r) { return u32(r >> 30) & 31; }
static u32 epoch_of(Record r) { return u32(r) & 0x3fffffffu; }

// One per byte: the last store and the last loads of up to two warps.
struct Cell { Record store, load[2]; };

static Cell* shared_cells;
static u32 shared_cell_count;
// Per four bytes of shared memory: the last cp.async into it.  Two lanes may copy the same source to the same place.
struct CopyNote { const void* source; u32 bytes, valid; Record by; };
static CopyNote* copy_notes;
static Cell* global_cells[256];
static u64 image_begin[2], image_end[2];

// An unordered store over another one, until it is known whether it changed the value.
struct Overwrite { Fiber* fiber; const u8* pointer; u32 bytes; u8 before[16]; Record other; bool shared; int argument; u64 first; };
static Overwrite overwrite;

// Cells of a block: static memory, then dynamic memory from a multiple of 16.
static u32 dynamic_cell() { return (engine.static_bytes + 15) / 16 * 16; }
static u64 cell_of(const void* pointer) {
  const u8* p = static_cast<const u8*>(pointer);
  if (p >= engine.static_shared && p < engine.static_shared + engine.static_bytes) return u64(p - engine.static_shared);
  return u64(p - current()->block->dynamic_shared) + dynamic_cell();
}

static bool ordered(Record r, const Fiber* f, bool shared) {
  if (r == 0) return true;
  if (serial_of(r) != f->block->serial) return shared || f->block->acquired;
  if (warp_of(r) != f->warp->index) return epoch_of(r) <= f->warp->known[warp_of(r)];
  return lane_of(r) == f->info.lane || epoch_of(r) < f->warp->epoch;
}

[[noreturn]] static void report(Record other, const char* mine, const char* theirs, const char* where, u64 byte) {
  const Fiber* f = current();
  char who[96];
  if (serial_of(other) != f->block->serial) {
    __builtin_snprintf(who, sizeof(who), "thread %u of an earlier block", warp_of(other) * 32 + lane_of(other));
  } else {
    __builtin_snprintf(who, sizeof(who), "thread %u", warp_of(other) * 32 + lane_of(other));
  }
  fail("race: %s of byte %llu of %s and %s by %s are not ordered by a barrier", mine, byte, where, theirs, who);
}

static u64 name_place(u64 i, bool shared, int argument, char* where, u64 room) {
  if (!shared) __builtin_snprintf(where, room, "argument %d", argument);
  else if (i < engine.static_bytes) __builtin_snprintf(where, room, "static shared memory");
  else __builtin_snprintf(where, room, "dynamic shared memory");
  return shared && i >= engine.static_bytes ? i - dynamic_cell() : i;
}

// Called before anything else runs after an instrumented store.
void settle_overwrite() {
  Fiber* f = overwrite.fiber;
  if (!f) return;
  overwrite.fiber = nullptr;
  for (u32 i = 0; i < overwrite.bytes; ++i) {
    if (overwrite.pointer[i] == overwrite.before[i]) continue;
    char where[64];
    const u64 byte = name_place(overwrite.first + i, overwrite.shared, overwrite.argument, where, sizeof(where));
    ninferc_emulator_thread = &f->info;
    report(overwrite.other, "store", "store", where, byte);
  }
}

static void touch(Cell* cells, u64 first, u64 bytes, bool store, bool shared, int argument, const void* pointer,
                  const Copy* copy = nullptr) {
  Fiber* f = current();
  const Record me = record_of(f);
  char where[64];
  for (u64 i = first; i < first + bytes; ++i) {
    Cell& c = cells[i];
    if (shared && serial_of(c.store) != f->block->serial) c.store = 0;
    bool store_ordered = ordered(c.store, f, shared);
    if (copy && !store_ordered) {
      const CopyNote& note = copy_notes[(&c - shared_cells) / 4];
      store_ordered = c.store == note.by && note.bytes == copy->bytes && note.valid == copy->valid &&
                      (note.source == copy->source || copy->valid == 0);
    }
    const bool loads_ordered = !store || (ordered(c.load[0], f, shared) && ordered(c.load[1], f, shared));
    if (!store_ordered && store && pointer && bytes <= 16) {
      if (!overwrite.fiber) {
        overwrite = {f, static_cast<const u8*>(pointer), u32(bytes), {}, c.store, shared, argument, first};
        memcpy(overwrite.before, pointer, bytes);
      }
    } else if (!store_ordered) {
      const u64 byte = name_place(i, shared, argument, where, sizeof(where));
      report(c.store, store ? "store" : "load", "store", where, byte);
    }
    if (!loads_ordered) {
      const u64 byte = name_place(i, shared, argument, where, sizeof(where));
      report(ordered(c.load[0], f, shared) ? c.load[1] : c.load[0], "store", "load", where, byte);
    }
    if (store) {
      c.store = me;
      c.load[0] = c.load[1] = 0;
    } else {
      if (warp_of(c.load[0]) != warp_of(me) || serial_of(c.load[0]) != serial_of(me)) c.load[1] = c.load[0];
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
  overwrite.fiber = nullptr;
  if (!engine.checked) return;
  dl_iterate_phdr(find_image, &engine);
  dl_iterate_phdr(find_image, reinterpret_cast<void*>(engine.entry));
  shared_cell_count = (dynamic_cell() + engine.dynamic_bytes + 15) / 16 * 16;
  shared_cells = static_cast<Cell*>(calloc(u64(shared_cell_count) * engine.resident + 1, sizeof(Cell)));
  copy_notes = static_cast<CopyNote*>(calloc(u64(shared_cell_count) * engine.resident / 4 + 1, sizeof(CopyNote)));
  if (engine.region_count > 256) fail("a checked kernel takes at most 256 arrays");
  for (int i = 0; i < engine.region_count; ++i) {
    const Region& r = engine.regions[i];
    global_cells[i] = nullptr;
    // What nobody may write cannot race.
    if (r.flags & region_writable) global_cells[i] = static_cast<Cell*>(calloc(r.end - r.begin + 1, sizeof(Cell)));
    if ((r.flags & region_writable) && !global_cells[i]) fail("out of memory");
  }
  if (!shared_cells || !copy_notes) fail("out of memory");
}
void end_checks() {
  if (!engine.checked) return;
  free(shared_cells);
  free(copy_notes);
  shared_cells = nullptr;
  copy_notes = nullptr;
  for (int i = 0; i < engine.region_count && i < 256; ++i) {
    free(global_cells[i]);
    global_cells[i] = nullptr;
  }
}

// `instrumented`: the store follows in the kernel's own code.
static void check_shared_access(const void* pointer, u64 bytes, bool store, bool instrumented) {
  Cell* cells = shared_cells + u64(shared_cell_count) * current()->block->slot;
  touch(cells, cell_of(pointer), bytes, store, true, 0, instrumented ? pointer : nullptr);
}
void check_shared(const void* pointer, u64 bytes, bool store) {
  if (!engine.checked) return;
  settle_overwrite();
  check_shared_access(pointer, bytes, store, false);
}

// Called at the issue and at the landing of a cp.async: in between its destination belongs to nobody else.
void check_copy(const void* pointer, const Copy& copy) {
  if (!engine.checked) return;
  settle_overwrite();
  const Block* b = current()->block;
  const u64 first = cell_of(pointer);
  Cell* cells = shared_cells + u64(shared_cell_count) * b->slot;
  touch(cells, first, copy.bytes, true, true, 0, nullptr, &copy);
  const u64 base = u64(&cells[first] - shared_cells);
  for (u64 i = base / 4; i < (base + copy.bytes + 3) / 4; ++i)
    copy_notes[i] = {copy.source, copy.bytes, copy.valid, record_of(current())};
}

// A bulk copy is ordered by its mbarrier, whose wait the readers have to make: it must not hit what others still use, and
// leaves no record of its own.
void check_bulk_copy(const void* pointer, u64 bytes) {
  if (!engine.checked) return;
  check_shared(pointer, bytes, true);
  const Block* b = current()->block;
  const u64 first = cell_of(pointer);
  memset(static_cast<void*>(shared_cells + u64(shared_cell_count) * b->slot + first), 0, bytes * sizeof(Cell));
}

// ---- order -----------------------------------------------------------------------------------------------------
void order_lanes(Warp* w) { ++w->epoch; }

void order_warps(Block* b, u32 warps) {
  if (!engine.checked) return;
  u32 known[32] = {};
  for (u32 rest = warps; rest; rest &= rest - 1) {
    const Warp& w = b->warps[__builtin_ctz(rest)];
    for (u32 i = 0; i < b->warp_count; ++i) known[i] = w.known[i] > known[i] ? w.known[i] : known[i];
    known[w.index] = w.epoch > known[w.index] ? w.epoch : known[w.index];
  }
  for (u32 rest = warps; rest; rest &= rest - 1) {
    Warp& w = b->warps[__builtin_ctz(rest)];
    for (u32 i = 0; i < b->warp_count; ++i) w.known[i] = known[i];
    ++w.epoch;
  }
}

void release_to(MBarrier& m, Warp* w) {
  if (!engine.checked) return;
  for (u32 i = 0; i < w->block->warp_count; ++i) m.known[i] = w->known[i] > m.known[i] ? w->known[i] : m.known[i];
  m.known[w->index] = w->epoch;
  ++w->epoch;
}

void acquire_from(const MBarrier& m, Warp* w) {
  if (!engine.checked) return;
  for (u32 i = 0; i < w->block->warp_count; ++i) w->known[i] = m.known[i] > w->known[i] ? m.known[i] : w->known[i];
}

// ---- instrumented accesses -------------------------------------------------------------------------------------
static void access(const void* pointer, u64 bytes, bool store) {
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
  if (p >= shared && p < shared + engine.static_bytes) {
    if (!atomic) check_shared_access(pointer, bytes, store, true);
    return;
  }
  if (p >= dynamic && p + bytes <= dynamic + engine.dynamic_bytes) {
    if (!atomic) check_shared_access(pointer, bytes, store, true);
    return;
  }
  for (int i = 0; i < engine.region_count; ++i) {
    const Region& r = engine.regions[i];
    if (p < r.begin || p + bytes > r.end) continue;
    if (store && !(r.flags & region_writable)) fail("store: argument %d is read-only", r.argument);
    if (engine.require_grid_wait && !(r.flags & region_constant) && !f->waited)
      fail("%s: argument %d is touched before grid_dependency_wait", store ? "store" : "load", r.argument);
    if (global_cells[i] && !atomic) touch(global_cells[i], p - r.begin, bytes, store, false, r.argument, pointer);
    return;
  }
  for (int i = 0; i < 2; ++i)
    if (p >= image_begin[i] && p < image_end[i]) return;  // constant tables, the engine's public variables
  char where[160];
  describe_address(p, where, sizeof(where));
  fail("%s of %llu bytes out of bounds: %s", store ? "store" : "load", bytes, where);
}

}  // namespace ninferc_emulator

#define NINFERC_EMULATOR_ACCESS_(size)                                                                             \
  extern "C" void __tsan_read##size(void* p) { ninferc_emulator::access(p, size, false); }                         \
  extern "C" void __tsan_write##size(void* p) { ninferc_emulator::access(p, size, true); }                         \
  extern "C" void __tsan_unaligned_read##size(void* p) { ninferc_emulator::access(p, size, false); }               \
  extern "C" void __tsan_unaligned_write##size(void* p) { ninferc_emulator::access(p, size, true); }
NINFERC_EMULATOR_ACCESS_(1)
NINFERC_EMULATOR_ACCESS_(2)
NINFERC_EMULATOR_ACCESS_(4)
NINFERC_EMULATOR_ACCESS_(8)
NINFERC_EMULATOR_ACCESS_(16)
extern "C" {
void __tsan_read_range(void* p, unsigned long n) { ninferc_emulator::access(p, n, false); }
void __tsan_write_range(void* p, unsigned long n) { ninferc_emulator::access(p, n, true); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}
void* __tsan_memcpy(void* to, const void* from, unsigned long n) {
  ninferc_emulator::access(from, n, false);
  ninferc_emulator::access(to, n, true);
  return memcpy(to, from, n);
}
void* __tsan_memset(void* to, int value, unsigned long n) {
  ninferc_emulator::access(to, n, true);
  return memset(to, value, n);
}
}
