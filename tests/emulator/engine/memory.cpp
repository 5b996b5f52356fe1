// Checked shared and global memory, polling, clocks.
#include "runtime.h"

#include <string.h>

using namespace ninferc_emulator;

extern "C" {

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

}  // extern "C"
