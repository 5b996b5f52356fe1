// Errors: what ends a launch, and the signals that wild accesses raise.
#include "runtime.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <ucontext.h>

namespace ninferc_emulator {

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

}  // namespace ninferc_emulator
