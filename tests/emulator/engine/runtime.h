// State shared by the parts of the engine, which are compiled as one translation unit (toolchain.py).
#pragma once
#include "ninferc_emulator_interface.h"

namespace ninferc_emulator {

using u8 = unsigned char;
using u32 = unsigned;
using u64 = unsigned long long;

constexpr u32 stack_bytes = 128 * 1024;
constexpr u8 poison_byte = 0xff;  // a NaN in every floating format, -1 as an integer
constexpr u8 guard_byte = 0xfb;
constexpr u64 guard_bytes = 16ull << 20;  // unmapped, so it costs address space only

struct Block;
struct Warp;

struct Copy { u32 destination, bytes, valid, group; const void* source; bool landed; };
struct BulkCopy { u32 destination, bytes, barrier; const void* source; u32 word; };  // without a source: of the word
struct Clock;  // order.cpp
struct Gathering { Clock *clock, *last; };
struct MBarrier {
  u32 address, expected, pending, phase;
  long long bytes;
  // Checked kernels: what has arrived in this phase and in all before, a waiter's clock before and after, the agent.
  Gathering gathered;
  Clock *complete, *waiter, *informed;
  u32 agent, tick;
};

enum Operation { op_sync, op_shuffle, op_vote, op_match, op_mma, op_ldmatrix, op_stmatrix };

// What a lane brings to a warp collective; lives on the lane's stack until the collective has run.
struct Request {
  Operation operation;
  u32 kind, mask;
  u32 value, argument, width, result;
  const u32 *a, *b;
  float* d;
  u32* registers;
  u32 place;
};

struct Fiber {
  ninferc_emulator_thread_info info;  // first: the public pointer is also the fiber
  void* context;
  u8* stack;
  Block* block;
  Warp* warp;
  Request* request;
  const char* waits_for;
  Copy* copies;
  u32 copy_count, copy_room, group;
  u32 barrier_result;
  const char* wait_file;
  int wait_line;
  const void* atomic;  // the last atomic or scoped access: not checked for races
  u32 cluster_arrivals, cluster_waits;  // of this thread
  Clock* known;  // checked kernels, order.cpp
  u32 tick;
  bool exited, waited;
};

struct Warp {
  Fiber* fibers[32];
  Block* block;
  u32 index;
  u32 present, ready, polling, waiting, exited;
};

// Blocks that run together: `phase` barriers are complete.
struct Cluster { Block* blocks[16]; u32 arrived, phase; };

struct NamedBarrier { u32 expected, arrived, predicates; u32 waiting[32]; Gathering gathered; };

struct Block {
  ninferc_emulator_dim3 index;
  Cluster* cluster;
  u32 cluster_rank;
  u32 slot, serial, warp_count, running, ready_warps, grid_waits;
  bool live, acquired;
  Warp* warps;
  Fiber* fibers;
  u8 *stacks, *dynamic_pages, *dynamic_shared, *static_shared;
  u32 dynamic_room;
  NamedBarrier named[16];
  BulkCopy* bulk;
  u32 bulk_count, bulk_room;
  MBarrier* mbarriers;
  u32 mbarrier_count, mbarrier_room, agents;
};

constexpr int region_writable = 1, region_constant = 2;
struct Region { u64 begin, end; int argument, flags; };

struct Engine {
  void (*entry)(void**);
  void** arguments;
  Block** blocks;
  Block* spare;
  Block* current_block;
  Warp* current_warp;
  u32* order;
  Cluster* clusters;
  u32 cluster_size;
  u32 resident, unfinished, next_block, block_total, block_threads, dynamic_bytes, static_bytes;
  u8* static_shared;
  u64 seed, random, clock;
  int quantum;
  u32 polling, idle_sweeps;
  const Region* regions;
  int region_count;
  bool running, failed, require_grid_wait, checked, collect;
  double limit_seconds;
  char message[1200];
};
extern Engine engine;

[[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 1, 2)));
[[noreturn]] void report_deadlock();
void hand_over();
void make_ready(Warp* warp, u32 lanes);
void maybe_preempt(Fiber* self);
void poll(Fiber* self);
bool flush_bulk_copies();
u32 draw(u32 bound);
void describe_address(u64 address, char* text, unsigned long room);

// The shared window as 32-bit addresses: static memory first, dynamic memory from the next multiple of 1024.
constexpr u32 shared_window = 1024;
inline u32 shared_dynamic_base() { return shared_window + (engine.static_bytes + 1023) / 1024 * 1024; }
// Two accesses of shared memory that nothing orders.  Kind: 0 a load after a store, 1 a store after a load, 2 a store after a
// store (`equal`: of the same values).  Threads are numbered in the block; from its end on they are agents of mbarriers.  Places
// are offsets in the kernel's object.  Mirrored in hazards.py.
struct Hazard { u32 kind, byte, thread, other, place, other_place, count; bool dynamic, same_warp, equal; };

void start_checks();
void end_checks();
void settle_overwrite();
void start_block_checks(Block* block);
void end_block_checks(Block* block);
u32 place_of(const void* return_address);
void check_shared(const void* pointer, u64 bytes, bool store, u32 place);
void check_shared_lanes(Warp* warp, u32 lanes, const void* pointer, u64 bytes, bool store, u32 place);
void check_copy(const void* pointer, u64 bytes, u32 place);
void settle_copy(const void* pointer, u64 bytes);
void check_bulk_copy(Block* to, const MBarrier& barrier, u32 address, u64 bytes, u32 place);
void check_barrier_use(u32 address, u32 place);
void order_lanes(Warp* warp, u32 lanes);
void arrive_at(NamedBarrier& barrier, Fiber* fiber);
void leave(NamedBarrier& barrier, Fiber* fiber);
void release_to(MBarrier& barrier, Fiber* fiber);
void complete_phase(const Block* block, MBarrier& barrier);
void acquire_from(MBarrier& barrier, Fiber* fiber);
u32 new_agent(Block* block);
void forget(Gathering& gathering);
void forget(MBarrier& barrier);
inline Fiber* current() { return reinterpret_cast<Fiber*>(ninferc_emulator_thread); }

}  // namespace ninferc_emulator
