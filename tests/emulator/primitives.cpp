// Device primitives of the emulator: warp collectives, barriers, checked memory, asynchronous copies.
#include "runtime.h"

#include <stdlib.h>
#include <string.h>

namespace ninferc_emulator {

// ---- warp collectives ------------------------------------------------------------------------------------------
typedef float Row __attribute__((vector_size(32)));

// One 16 x 8 x depth product.  Products are exact in f32 for 16-bit operands; they are summed in ascending K, then added to
// the accumulator.  Hardware sums a step at once with truncation, so results agree to a few units of f32.
static void run_mma(Warp* w, u32 kind) {
  float a[16][16];
  Row b[16], c[16];
  const u32 depth = kind == mma_bf16_k16 || kind == mma_f16_k16 ? 16 : 8;
  for (u32 lane = 0; lane < 32; ++lane) {
    const Request& q = *w->fibers[lane]->request;
    const u32 g = lane / 4, p = lane % 4;
    if (kind == mma_tf32_k8) {
      for (u32 i = 0; i < 4; ++i)
        a[g + 8 * (i & 1)][p + 4 * (i >> 1)] = __builtin_bit_cast(float, q.a[i] & 0xffffe000u);
      for (u32 i = 0; i < 2; ++i) b[p + 4 * i][g] = __builtin_bit_cast(float, q.b[i] & 0xffffe000u);
    } else if (kind == mma_bf16_k16) {
      for (u32 i = 0; i < 4; ++i) {
        a[g + 8 * (i & 1)][2 * p + 8 * (i >> 1)] = __builtin_bit_cast(float, q.a[i] << 16);
        a[g + 8 * (i & 1)][2 * p + 8 * (i >> 1) + 1] = __builtin_bit_cast(float, q.a[i] & 0xffff0000u);
      }
      for (u32 i = 0; i < 2; ++i) {
        b[2 * p + 8 * i][g] = __builtin_bit_cast(float, q.b[i] << 16);
        b[2 * p + 8 * i + 1][g] = __builtin_bit_cast(float, q.b[i] & 0xffff0000u);
      }
    } else {
      const u32 parts = depth / 8;
      for (u32 i = 0; i < 2 * parts; ++i) {
        a[g + 8 * (i & 1)][2 * p + 8 * (i >> 1)] = half_to_float(static_cast<unsigned short>(q.a[i]));
        a[g + 8 * (i & 1)][2 * p + 8 * (i >> 1) + 1] = half_to_float(static_cast<unsigned short>(q.a[i] >> 16));
      }
      for (u32 i = 0; i < parts; ++i) {
        b[2 * p + 8 * i][g] = half_to_float(static_cast<unsigned short>(q.b[i]));
        b[2 * p + 8 * i + 1][g] = half_to_float(static_cast<unsigned short>(q.b[i] >> 16));
      }
    }
    c[g][2 * p] = q.d[0];
    c[g][2 * p + 1] = q.d[1];
    c[g + 8][2 * p] = q.d[2];
    c[g + 8][2 * p + 1] = q.d[3];
  }
  for (u32 row = 0; row < 16; ++row) {
    Row sum = a[row][0] * b[0];
    for (u32 k = 1; k < depth; ++k) sum += a[row][k] * b[k];
    c[row] += sum;
  }
  for (u32 lane = 0; lane < 32; ++lane) {
    float* d = w->fibers[lane]->request->d;
    const u32 g = lane / 4, p = lane % 4;
    d[0] = c[g][2 * p];
    d[1] = c[g][2 * p + 1];
    d[2] = c[g + 8][2 * p];
    d[3] = c[g + 8][2 * p + 1];
  }
}

// The last lane to arrive acts for the others: checks are made in each lane's name.
static void check_shared_as(Fiber* fiber, const void* pointer, u64 bytes, bool store) {
  if (!engine.checked) return;
  ninferc_emulator_thread_info* self = ninferc_emulator_thread;
  ninferc_emulator_thread = &fiber->info;
  check_shared(pointer, bytes, store);
  ninferc_emulator_thread = self;
}

static void run_matrix_move(Warp* w, const Request& r, bool store) {
  u8* rows[32];
  for (u32 i = 0; i < 8 * r.argument; ++i) {
    const u32 address = w->fibers[i]->request->value;
    if (address % 16) fail("%s: lane %u passes address 0x%x, which is not a multiple of 16", store ? "stmatrix" : "ldmatrix", i, address);
    rows[i] = static_cast<u8*>(ninferc_emulator_shared_pointer(address, 16, store ? "stmatrix" : "ldmatrix"));
  }
  for (u32 lane = 0; lane < 32; ++lane) {
    u32* registers = w->fibers[lane]->request->registers;
    const u32 g = lane / 4, p = lane % 4;
    for (u32 m = 0; m < r.argument; ++m) {
      u8* low = r.width ? rows[8 * m + 2 * p] + 2 * g : rows[8 * m + g] + 4 * p;
      u8* high = r.width ? rows[8 * m + 2 * p + 1] + 2 * g : low + 2;
      check_shared_as(w->fibers[lane], low, 2, store);
      check_shared_as(w->fibers[lane], high, 2, store);
      if (store) {
        memcpy(low, &registers[m], 2);
        memcpy(high, reinterpret_cast<u8*>(&registers[m]) + 2, 2);
      } else {
        memcpy(&registers[m], low, 2);
        memcpy(reinterpret_cast<u8*>(&registers[m]) + 2, high, 2);
      }
    }
  }
}

static void run_shuffle(Warp* w, u32 mask) {
  for (u32 lane = 0; lane < 32; ++lane) {
    if (!(mask >> lane & 1)) continue;
    Request& q = *w->fibers[lane]->request;
    if (q.width == 0 || q.width > 32 || (q.width & (q.width - 1))) fail("shuffle: width %u is not a power of two up to 32", q.width);
    const u32 first = lane & ~(q.width - 1), last = lane | (q.width - 1);
    u32 source = lane;
    if (q.kind == shuffle_index) source = first | (q.argument & (q.width - 1));
    else if (q.kind == shuffle_up) source = q.argument <= lane - first ? lane - q.argument : lane;
    else if (q.kind == shuffle_down) source = q.argument <= last - lane ? lane + q.argument : lane;
    else source = (lane ^ q.argument) <= last ? lane ^ q.argument : lane;
    if (!(mask >> source & 1)) fail("shuffle: lane %u reads lane %u, which does not take part (mask %08x)", lane, source, mask);
    q.result = w->fibers[source]->request->value;
  }
}

static void run(Warp* w, Request& r, u32 mask) {
  switch (r.operation) {
    case op_sync: order_lanes(w); break;
    case op_shuffle: run_shuffle(w, mask); break;
    case op_vote: {
      u32 votes = 0;
      for (u32 lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) votes |= w->fibers[lane]->request->value << lane;
      for (u32 lane = 0; lane < 32; ++lane)
        if (mask >> lane & 1) w->fibers[lane]->request->result = votes;
      break;
    }
    case op_match:
      for (u32 lane = 0; lane < 32; ++lane) {
        if (!(mask >> lane & 1)) continue;
        u32 equal = 0;
        for (u32 other = 0; other < 32; ++other)
          if (mask >> other & 1 && w->fibers[other]->request->value == w->fibers[lane]->request->value) equal |= 1u << other;
        w->fibers[lane]->request->result = equal;
      }
      break;
    case op_mma: run_mma(w, r.kind); break;
    case op_ldmatrix: run_matrix_move(w, r, false); break;
    case op_stmatrix: run_matrix_move(w, r, true); break;
  }
}

static const char* const operation_names[] = {"__syncwarp", "a shuffle", "a vote", "__match_any_sync",
                                              "mma", "ldmatrix", "stmatrix"};

// The lanes of the mask meet here; the last to arrive does the work for all.
static void collective(Request& r) {
  Fiber* self = current();
  Warp* w = self->warp;
  const u32 bit = 1u << self->info.lane;
  const char* name = operation_names[r.operation];
  if (!(r.mask & bit)) fail("%s: the calling lane %u is not in mask %08x", name, self->info.lane, r.mask);
  if (r.operation >= op_mma && w->present != 0xffffffffu) fail("%s needs a full warp of 32 threads", name);
  const u32 mask = r.mask & w->present;
  self->request = &r;
  self->waits_for = name;
  self->wait_file = nullptr;
  w->waiting |= bit;
  bool complete = (w->waiting & mask) == mask;
  if (complete) {
    for (u32 rest = mask; rest; rest &= rest - 1) {
      const u32 lane = u32(__builtin_ctz(rest));
      const Request& q = *w->fibers[lane]->request;
      // A lane waiting with another mask may still come here later; the same mask with another operation never can.
      if (q.mask != r.mask) complete = false;
      else if (q.operation != r.operation || q.kind != r.kind)
        fail("divergent warp: lane %u is at %s while lane %u is at %s (mask %08x)", self->info.lane, name, lane,
             operation_names[q.operation], r.mask);
    }
  }
  if (!complete) {
    hand_over();
    return;
  }
  run(w, r, mask);
  w->waiting &= ~mask;
  make_ready(w, mask & ~bit);
  maybe_preempt(self);
}

// ---- asynchronous copies ---------------------------------------------------------------------------------------
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
  check_copy(to, copy);
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

static void try_complete(MBarrier& m) {
  if (m.pending == 0 && m.bytes == 0) {
    ++m.phase;
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
  memcpy(to, copy.source, copy.bytes);
  for (u32 k = 0; k < b->mbarrier_count; ++k)
    if (b->mbarriers[k].address == copy.barrier) {
      b->mbarriers[k].bytes -= copy.bytes;
      try_complete(b->mbarriers[k]);
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

unsigned ninferc_emulator_shuffle(int kind, unsigned mask, unsigned value, unsigned argument, unsigned width) {
  Request r{};
  r.operation = op_shuffle;
  r.kind = u32(kind);
  r.mask = mask;
  r.value = value;
  r.argument = argument;
  r.width = width;
  collective(r);
  return r.result;
}

unsigned ninferc_emulator_vote(unsigned mask, int predicate) {
  Request r{};
  r.operation = op_vote;
  r.mask = mask;
  r.value = predicate != 0;
  collective(r);
  return r.result;
}

unsigned ninferc_emulator_match(unsigned mask, unsigned value) {
  Request r{};
  r.operation = op_match;
  r.mask = mask;
  r.value = value;
  collective(r);
  return r.result;
}

void ninferc_emulator_sync_warp(unsigned mask) {
  Request r{};
  r.operation = op_sync;
  r.mask = mask;
  collective(r);
}

void ninferc_emulator_mma(int kind, float* d, const unsigned* a, const unsigned* b) {
  Request r{};
  r.operation = op_mma;
  r.kind = u32(kind);
  r.mask = 0xffffffffu;
  r.a = a;
  r.b = b;
  r.d = d;
  collective(r);
}

static void matrix_move(Operation operation, unsigned* registers, unsigned row, int count, int transposed) {
  Request r{};
  r.operation = operation;
  r.kind = u32(count * 2 + transposed);
  r.mask = 0xffffffffu;
  r.value = row;
  r.argument = u32(count);
  r.width = u32(transposed);
  r.registers = registers;
  collective(r);
}
void ninferc_emulator_ldmatrix(unsigned* registers, unsigned row, int count, int transposed) {
  matrix_move(op_ldmatrix, registers, row, count, transposed);
}
void ninferc_emulator_stmatrix(const unsigned* registers, unsigned row, int count, int transposed) {
  matrix_move(op_stmatrix, const_cast<unsigned*>(registers), row, count, transposed);
}

unsigned ninferc_emulator_barrier(unsigned id, unsigned threads, int sync, int predicate, const char* file,
                                  const char* name, int line) {
  Fiber* self = current();
  Block* block = self->block;
  if (id >= 16) fail("%s: barrier %u does not exist (0 to 15)", name, id);
  if (threads == 0) threads = engine.block_threads;
  else if (threads % 32) fail("%s: %u threads is not a multiple of 32", name, threads);
  NamedBarrier& b = block->named[id];
  if (b.arrived == 0) b.expected = threads;
  else if (b.expected != threads) fail("%s: barrier %u is used with %u and with %u threads", name, id, b.expected, threads);
  ++b.arrived;
  b.warps |= 1u << self->warp->index;
  b.predicates += predicate != 0;
  self->waits_for = name;
  self->wait_file = file;
  self->wait_line = line;
  if (sync) b.waiting[self->warp->index] |= 1u << self->info.lane;
  if (b.arrived < b.expected) {
    if (!sync) return 0;
    hand_over();
    return self->barrier_result;
  }
  engine.idle_sweeps = 0;
  const u32 result = b.predicates;
  order_warps(block, b.warps);
  b.arrived = b.predicates = b.warps = 0;
  for (u32 i = 0; i < block->warp_count; ++i) {
    const u32 lanes = b.waiting[i];
    b.waiting[i] = 0;
    for (u32 rest = lanes; rest; rest &= rest - 1) {
      Fiber* f = block->warps[i].fibers[__builtin_ctz(rest)];
      f->barrier_result = result;
      if (block->grid_waits) f->waited = true;
    }
    make_ready(&block->warps[i], lanes);
  }
  if (!sync) return 0;
  hand_over();  // this thread is ready too and is drawn like the others
  return self->barrier_result;
}

// ---- shared memory ---------------------------------------------------------------------------------------------
unsigned ninferc_emulator_shared_address(const void* pointer) {
  const u8* p = static_cast<const u8*>(pointer);
  const Block* b = current()->block;
  if (p >= b->dynamic_shared && p <= b->dynamic_shared + engine.dynamic_bytes)
    return shared_dynamic_base() + u32(p - b->dynamic_shared);
  if (p >= engine.static_shared && p <= engine.static_shared + engine.static_bytes)
    return shared_window + u32(p - engine.static_shared);
  fail("a pointer outside this block's shared memory is used as a shared address");
}

void* ninferc_emulator_shared_pointer(unsigned address, unsigned long bytes, const char* name) {
  const u32 dynamic = shared_dynamic_base();
  if (bytes && bytes <= 16 && address % bytes)
    fail("%s: shared address 0x%x is not a multiple of %lu", name, address, bytes);
  if (address >= dynamic && u64(address) + bytes <= u64(dynamic) + engine.dynamic_bytes)
    return current()->block->dynamic_shared + (address - dynamic);
  if (address >= shared_window && u64(address) + bytes <= u64(shared_window) + engine.static_bytes)
    return engine.static_shared + (address - shared_window);
  if (address >= dynamic)
    fail("%s out of bounds: bytes %u to %llu of %u bytes of dynamic shared memory", name, address - dynamic,
         u64(address) - dynamic + bytes, engine.dynamic_bytes);
  fail("%s out of bounds: shared address 0x%x", name, address);
}

// Atomic and scoped accesses do not race, and let a block see what others have written.
static void scoped(const void* pointer) {
  current()->atomic = pointer;
  current()->block->acquired = true;
}

// ---- global memory ---------------------------------------------------------------------------------------------
void ninferc_emulator_check_global(const void* pointer, unsigned long bytes, int mode, const char* name) {
  const bool write = mode & 1;
  if (mode & 2) scoped(pointer);
  const u64 p = reinterpret_cast<u64>(pointer);
  if (bytes <= 16 && (bytes & (bytes - 1)) == 0 && p % bytes)
    fail("%s: address is not a multiple of %lu bytes", name, bytes);
  for (int i = 0; i < engine.region_count; ++i) {
    const Region& r = engine.regions[i];
    if (p < r.begin || p + bytes > r.end) continue;
    if (write && !(r.flags & region_writable)) fail("%s: argument %d is read-only", name, r.argument);
    if (engine.require_grid_wait && !(r.flags & region_constant) && !current()->waited)
      fail("%s: argument %d is touched before grid_dependency_wait", name, r.argument);
    return;
  }
  char where[160];
  describe_address(p, where, sizeof(where));
  fail("%s of %lu bytes out of bounds: %s", name, bytes, where);
}

void ninferc_emulator_poll(const char* name) {
  Fiber* self = current();
  self->waits_for = name;
  self->wait_file = nullptr;
  poll(self);
}
void ninferc_emulator_progress() {
  engine.idle_sweeps = 0;
  maybe_preempt(current());
}
void ninferc_emulator_atomic(const void* pointer, unsigned long bytes, const char* name) {
  const u8* p = static_cast<const u8*>(pointer);
  const Block* b = current()->block;
  const bool shared = (p >= b->dynamic_shared && p < b->dynamic_shared + engine.dynamic_bytes) ||
                      (p >= engine.static_shared && p < engine.static_shared + engine.static_bytes);
  scoped(pointer);
  if (!shared) ninferc_emulator_check_global(pointer, bytes, 1, name);
  // A lock is taken by compare-and-swap or exchange: those count as polling.
  const bool may_spin = strstr(name, "xch") || strstr(name, "CAS") || strstr(name, "cas");
  if (may_spin) ninferc_emulator_poll(name);
  else ninferc_emulator_progress();
}

void ninferc_emulator_grid_wait() {
  current()->waited = true;
  ++current()->block->grid_waits;
}
unsigned long long ninferc_emulator_timer() { return engine.clock += 100; }
void ninferc_emulator_sleep(unsigned nanoseconds) {
  engine.clock += nanoseconds;
  ninferc_emulator_poll("nano_sleep");
}
void ninferc_emulator_trap(const char* message) { fail("%s", message); }

// ---- copies ----------------------------------------------------------------------------------------------------
void ninferc_emulator_cp_async(unsigned destination, const void* source, unsigned bytes, unsigned valid) {
  Fiber* self = current();
  const Copy copy{destination, bytes, valid, self->group, source};
  check_copy(ninferc_emulator_shared_pointer(destination, bytes, "cp.async"), copy);
  if (valid) ninferc_emulator_check_global(source, bytes, 0, "cp.async");
  if (lands_early()) land(copy);
  else append(self->copies, self->copy_count, self->copy_room, copy);
}
void ninferc_emulator_cp_async_commit() { ++current()->group; }
void ninferc_emulator_cp_async_wait(unsigned pending) {
  Fiber* self = current();
  u32 kept = 0;
  for (u32 i = 0; i < self->copy_count; ++i) {
    const Copy& c = self->copies[i];
    if (u64(c.group) + pending < self->group) land(c);
    else self->copies[kept++] = c;
  }
  self->copy_count = kept;
}

void ninferc_emulator_mbarrier_init(unsigned barrier, unsigned count) {
  ninferc_emulator_shared_pointer(barrier, 8, "mbarrier_init");
  if (count == 0) fail("mbarrier_init: the count must be at least 1");
  Block* b = current()->block;
  for (u32 i = 0; i < b->mbarrier_count; ++i)
    if (b->mbarriers[i].address == barrier) fail("mbarrier_init: shared address 0x%x holds an mbarrier already", barrier);
  append(b->mbarriers, b->mbarrier_count, b->mbarrier_room, MBarrier{barrier, count, count, 0, 0, {}});
}
void ninferc_emulator_mbarrier_invalidate(unsigned barrier) {
  MBarrier& m = find_mbarrier(barrier, "mbarrier_invalidate");
  Block* b = current()->block;
  m = b->mbarriers[--b->mbarrier_count];
}
void ninferc_emulator_mbarrier_arrive(unsigned barrier, unsigned bytes) {
  MBarrier& m = find_mbarrier(barrier, "mbarrier_arrive");
  if (m.pending == 0) fail("mbarrier_arrive: more than the %u arrivals of the phase", m.expected);
  release_to(m, current()->warp);
  m.bytes += bytes;
  --m.pending;
  try_complete(m);
  maybe_preempt(current());
}
bool ninferc_emulator_mbarrier_try_wait(unsigned barrier, unsigned parity) {
  Fiber* self = current();
  const auto done = [&] {
    const MBarrier& m = find_mbarrier(barrier, "mbarrier_try_wait");
    if ((m.phase & 1) == (parity & 1)) return false;
    acquire_from(m, self->warp);
    return true;
  };
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
  check_bulk_copy(ninferc_emulator_shared_pointer(destination, bytes, "bulk_copy"), bytes);
  ninferc_emulator_check_global(source, bytes, 0, "bulk_copy");
  find_mbarrier(barrier, "bulk_copy");
  append(b->bulk, b->bulk_count, b->bulk_room, BulkCopy{destination, bytes, barrier, source});
  if (lands_early()) deliver(b, b->bulk_count - 1);
}

}  // extern "C"
