// The interface between emulated kernels and the engine: used by both sides.
#pragma once

struct ninferc_emulator_dim3 { unsigned x, y, z; };
struct ninferc_emulator_thread_info {
  ninferc_emulator_dim3 thread_index, block_index;
  unsigned lane, linear;
  void* dynamic_shared;
};

extern "C" {
extern ninferc_emulator_thread_info* ninferc_emulator_thread;
extern ninferc_emulator_dim3 ninferc_emulator_block_dim, ninferc_emulator_grid_dim;

unsigned ninferc_emulator_shuffle(int kind, unsigned mask, unsigned value, unsigned argument, unsigned width);
unsigned ninferc_emulator_vote(unsigned mask, int predicate);
unsigned ninferc_emulator_match(unsigned mask, unsigned value);
void ninferc_emulator_sync_warp(unsigned mask);
// Returns the count of true predicates among the arrivals (only when sync).
unsigned ninferc_emulator_barrier(unsigned id, unsigned threads, int sync, int predicate, const char* file,
                                  const char* name, int line);
void ninferc_emulator_mma(int kind, float* d, const unsigned* a, const unsigned* b);
void ninferc_emulator_ldmatrix(unsigned* registers, unsigned row, int count, int transposed);
void ninferc_emulator_stmatrix(const unsigned* registers, unsigned row, int count, int transposed);

unsigned ninferc_emulator_shared_address(const void* pointer);
void* ninferc_emulator_shared_pointer(unsigned address, unsigned long bytes, const char* name);
// mode: 1 for a store, plus 2 for a scoped access (atomic, acquire, release, relaxed, volatile)
void ninferc_emulator_check_global(const void* pointer, unsigned long bytes, int mode, const char* name);
void ninferc_emulator_poll(const char* name);
void ninferc_emulator_progress();
void ninferc_emulator_atomic(const void* pointer, unsigned long bytes, const char* name);

void ninferc_emulator_cp_async(unsigned destination, const void* source, unsigned bytes, unsigned valid);
void ninferc_emulator_cp_async_commit();
void ninferc_emulator_cp_async_wait(unsigned pending);
void ninferc_emulator_mbarrier_init(unsigned barrier, unsigned count);
void ninferc_emulator_mbarrier_invalidate(unsigned barrier);
void ninferc_emulator_mbarrier_arrive(unsigned barrier, unsigned bytes);
bool ninferc_emulator_mbarrier_try_wait(unsigned barrier, unsigned parity);
void ninferc_emulator_bulk_copy(unsigned destination, const void* source, unsigned bytes, unsigned barrier);
void ninferc_emulator_cluster_arrive();
void ninferc_emulator_cluster_wait();
void ninferc_emulator_st_async(unsigned destination, unsigned value, unsigned barrier, unsigned rank);
void ninferc_emulator_grid_wait();
unsigned long long ninferc_emulator_timer();
void ninferc_emulator_sleep(unsigned nanoseconds);
[[noreturn]] void ninferc_emulator_trap(const char* message);
}  // extern "C"

namespace ninferc_emulator {
enum MmaKind { mma_bf16_k16, mma_f16_k16, mma_f16_k8, mma_tf32_k8, mma_s8_k32 };  // s8: d holds ints
enum ShuffleKind { shuffle_index, shuffle_up, shuffle_down, shuffle_xor };

inline float half_to_float(unsigned short bits) { return static_cast<float>(__builtin_bit_cast(_Float16, bits)); }
inline unsigned short float_to_half(float value) {
  if (value != value) return 0x7fff;
  return __builtin_bit_cast(unsigned short, static_cast<_Float16>(value));
}
inline float bf16_to_float(unsigned short bits) { return __builtin_bit_cast(float, unsigned(bits) << 16); }
inline unsigned short float_to_bf16(float value) {
  const unsigned bits = __builtin_bit_cast(unsigned, value);
  if (value != value) return 0x7fff;
  return static_cast<unsigned short>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}
}  // namespace ninferc_emulator
