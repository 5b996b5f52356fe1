// Warp collectives and block barriers.
#include "runtime.h"

#include <string.h>

namespace ninferc_emulator {

// ---- warp collectives ------------------------------------------------------------------------------------------
typedef float Row __attribute__((vector_size(32)));

// One 16 x 8 x 32 product of signed bytes.
static void run_integer_mma(Warp* w) {
  int a[16][32], b[8][32];
  for (u32 lane = 0; lane < 32; ++lane) {
    const Request& q = *w->fibers[lane]->request;
    const u32 g = lane / 4, p = lane % 4;
    for (u32 byte = 0; byte < 4; ++byte) {
      const auto digit = [byte](u32 word) { return int(static_cast<signed char>(word >> (8 * byte))); };
      for (u32 i = 0; i < 4; ++i) a[g + 8 * (i & 1)][4 * p + byte + 16 * (i >> 1)] = digit(q.a[i]);
      for (u32 i = 0; i < 2; ++i) b[g][4 * p + byte + 16 * i] = digit(q.b[i]);
    }
  }
  for (u32 lane = 0; lane < 32; ++lane) {
    const u32 g = lane / 4, p = lane % 4;
    for (u32 i = 0; i < 4; ++i) {
      int d;
      memcpy(&d, w->fibers[lane]->request->d + i, 4);
      for (u32 k = 0; k < 32; ++k) d += a[g + 8 * (i >> 1)][k] * b[2 * p + (i & 1)][k];
      memcpy(w->fibers[lane]->request->d + i, &d, 4);
    }
  }
}

// One 16 x 8 x depth product.  Products are exact in f32 for 16-bit operands; they are summed in ascending K, then added to
// the accumulator.  Hardware sums a step at once with truncation, so results agree to a few units of f32.
static void run_mma(Warp* w, u32 kind) {
  if (kind == mma_s8_k32) return run_integer_mma(w);
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

static void run_matrix_move(Warp* w, const Request& r, bool store) {
  u8* rows[32];
  for (u32 i = 0; i < 8 * r.argument; ++i) {
    const u32 address = w->fibers[i]->request->value;
    if (address % 16) fail("%s: lane %u passes address 0x%x, which is not a multiple of 16", store ? "stmatrix" : "ldmatrix", i, address);
    rows[i] = static_cast<u8*>(ninferc_emulator_shared_pointer(address, 16, store ? "stmatrix" : "ldmatrix"));
    // The lanes whose registers row i % 8 of the matrix is in, and the one that gives its address.
    const u32 owners = r.width ? 0x11111111u << (i % 8 / 2) : 15u << (4 * (i % 8));
    check_shared_lanes(w, owners | 1u << i, rows[i], 16, store, r.place);
  }
  for (u32 lane = 0; lane < 32; ++lane) {
    u32* registers = w->fibers[lane]->request->registers;
    const u32 g = lane / 4, p = lane % 4;
    for (u32 m = 0; m < r.argument; ++m) {
      u8* low = r.width ? rows[8 * m + 2 * p] + 2 * g : rows[8 * m + g] + 4 * p;
      u8* high = r.width ? rows[8 * m + 2 * p + 1] + 2 * g : low + 2;
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
    case op_sync: order_lanes(w, mask); break;
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

static void matrix_move(Operation operation, unsigned* registers, unsigned row, int count, int transposed, const void* from) {
  Request r{};
  r.operation = operation;
  r.kind = u32(count * 2 + transposed);
  r.mask = 0xffffffffu;
  r.value = row;
  r.argument = u32(count);
  r.width = u32(transposed);
  r.registers = registers;
  r.place = place_of(from);
  collective(r);
}
void ninferc_emulator_ldmatrix(unsigned* registers, unsigned row, int count, int transposed) {
  matrix_move(op_ldmatrix, registers, row, count, transposed, __builtin_return_address(0));
}
void ninferc_emulator_stmatrix(const unsigned* registers, unsigned row, int count, int transposed) {
  matrix_move(op_stmatrix, const_cast<unsigned*>(registers), row, count, transposed, __builtin_return_address(0));
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
  arrive_at(b, self);
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
  b.arrived = b.predicates = 0;
  for (u32 i = 0; i < block->warp_count; ++i) {
    const u32 lanes = b.waiting[i];
    b.waiting[i] = 0;
    for (u32 rest = lanes; rest; rest &= rest - 1) {
      Fiber* f = block->warps[i].fibers[__builtin_ctz(rest)];
      f->barrier_result = result;
      leave(b, f);
      if (block->grid_waits) f->waited = true;
    }
    make_ready(&block->warps[i], lanes);
  }
  forget(b.gathered);
  if (!sync) return 0;
  hand_over();  // this thread is ready too and is drawn like the others
  return self->barrier_result;
}

}  // extern "C"
