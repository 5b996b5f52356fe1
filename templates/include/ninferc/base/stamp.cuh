// Start and end of a kernel, for profiles: see compiler/emit/stamp.py.
#pragma once
#include <ninferc/base/grid.cuh>

namespace ninferc {

// Lives as long as the kernel's body.  at[0] = ~(first block's start), at[1] = last warp's end, in nanoseconds of the device's
// timer; both must be zero before the launch.  The inverted start makes both of them maxima.
class Stamp {
 public:
  NINFERC_DEVICE explicit Stamp(u64* at) : at_(at) {
    if (threadIdx.x == 0) atomic_max(at_, ~global_timer());
  }
  NINFERC_DEVICE ~Stamp() {
    if (threadIdx.x % 32 == 0) atomic_max(at_ + 1, global_timer());
  }
  Stamp(const Stamp&) = delete;
  Stamp& operator=(const Stamp&) = delete;

 private:
  u64* at_;
};

}  // namespace ninferc
