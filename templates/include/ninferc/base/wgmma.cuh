// Warpgroup matrix products (wgmma, sm_90a): 64 rows by 16, 24, 32, 64, 128, 176 or 256 columns by 16 deep, bf16 in, f32 accumulate.
//
// A warpgroup is four consecutive warps of which the first has an index divisible by four; all 128 threads execute each
// call together.  A comes from registers (warp w of the group holds rows 16 w .. 16 w + 15, in the fragment layout of
// mma.cuh) or from shared memory, B from shared memory.  The accumulator of a warp has, for every 8 columns, the four values
// of mma.cuh's D: d[4 j .. 4 j + 3] are the 16x8 block of columns 8 j .. 8 j + 7.
//
// Operands in shared memory are K-major tiles with the 128-byte swizzle: row r has 64 values of K (128 bytes) at r * 128 from
// a base that is a multiple of 1024, and its 16-byte chunk c lies at chunk position c ^ (r % 8).
// multiply_transposed takes a B that is stored with N contiguous instead: panels of 64 values of N, in each panel row k of K
// at k * 128, swizzled the same way.
//
// The products run asynchronously.  From the issue until the wait that covers them, accumulators may be neither read nor
// written, and A registers and shared operands must stay as they are.  Order:
//   pipe.fence();  pipe.multiply<n>(d, a, descriptor) ...;  pipe.commit();  ...  pipe.wait<groups still allowed to run>();
// The fence is needed whenever registers used by the products were written since the last one.
#pragma once
#include <ninferc/base/async.cuh>
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/base/warp.cuh>

#if NINFERC_HAS_WGMMA
namespace ninferc {

// Matrix descriptor of a swizzled K-major operand: address / 16, 1024 bytes from one group of eight rows to the next,
// layout type 1 (128-byte swizzle).  A step of 16 in K adds 2, eight rows more add 64.  PTX ISA, "Matrix Descriptor".
NINFERC_DEVICE u64 wgmma_descriptor(u32 address) {
  return u64((address >> 4) & 0x3fff) | (u64(1) << 16) | (u64(64) << 32) | (u64(1) << 62);
}

// Descriptor of a B with N contiguous: `panel_bytes` from one panel of 64 columns to the next, 1024 bytes from one group of
// eight K rows to the next.  A step of 16 in K adds 128.
NINFERC_DEVICE u64 wgmma_descriptor_transposed(u32 address, u32 panel_bytes) {
  return u64((address >> 4) & 0x3fff) | (u64(panel_bytes >> 4) << 16) | (u64(64) << 32) | (u64(1) << 62);
}

// Moves registers between the warpgroups of a block whose roles differ: every warp of a group calls it once, in a kernel with
// launch bounds (threads, 1).  `registers` per thread, a multiple of 8 from 24 to 240.
template <u32 registers>
NINFERC_DEVICE void raise_registers() {
#if !defined(NINFERC_EMULATOR)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(registers));
#endif
}
template <u32 registers>
NINFERC_DEVICE void lower_registers() {
#if !defined(NINFERC_EMULATOR)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(registers));
#endif
}

#if defined(NINFERC_EMULATOR)

// Products run at a wait (late) or at their issue (early), drawn per product, in order.
class WgmmaPipe {
  struct Product { f32* d; const u32* a; u64 descriptor_a, descriptor_b; u32 columns, group; bool transposed; };
  Product queue_[64];
  u32 count_ = 0, group_ = 0;

  static const u16* row(u64 descriptor, u32 r, u32 chunk) {
    const u32 address = u32(descriptor & 0x3fff) * 16 + r / 8 * (u32(descriptor >> 32) & 0x3fff) * 16 + r % 8 * 128 + chunk * 16;
    const u32 swizzled = address ^ ((address >> 7 & 7) << 4);
    return static_cast<const u16*>(ninferc_emulator_shared_pointer(swizzled, 16, "wgmma"));
  }
  // Element (k, n) of a B with N contiguous.
  static u16 transposed(u64 descriptor, u32 k, u32 n) {
    const u32 panel = u32(descriptor >> 16 & 0x3fff) * 16, group = u32(descriptor >> 32 & 0x3fff) * 16;
    const u32 address = u32(descriptor & 0x3fff) * 16 + n / 64 * panel + k / 8 * group + k % 8 * 128 + n % 64 * 2;
    return *static_cast<const u16*>(ninferc_emulator_shared_pointer(address ^ ((address >> 7 & 7) << 4), 2, "wgmma"));
  }
  static void meet() { __ballot_sync(full_mask, 1); }  // orders no memory
  static f32 value(u32 bits) { return bits_float(bits << 16); }

  static void run(const Product& p) {
    const u32 lane = lane_id(), group = lane / 4, pair = lane % 4;
    f32 a[2][16];
    if (p.a) {
      for (u32 source = 0; source < 4; ++source)
        for (u32 i = 0; i < 4; ++i) {
          const u32 bits = shfl(p.a[i], (lane & ~3u) + source);
          a[i & 1][2 * source + 8 * (i >> 1)] = value(bits & 0xffff);
          a[i & 1][2 * source + 8 * (i >> 1) + 1] = value(bits >> 16);
        }
    } else {
      meet();
      for (u32 half = 0; half < 2; ++half)
        for (u32 k = 0; k < 16; ++k) a[half][k] = value(row(p.descriptor_a, warp_id() % 4 * 16 + group + 8 * half, k / 8)[k % 8]);
    }
    for (u32 j = 0; j < p.columns / 8; ++j)
      for (u32 e = 0; e < 2; ++e) {
        f32 b[16];
        const u32 column = 8 * j + 2 * pair + e;
        for (u32 k = 0; k < 16; ++k)
          b[k] = value(p.transposed ? transposed(p.descriptor_b, k, column) : row(p.descriptor_b, column, k / 8)[k % 8]);
        for (u32 half = 0; half < 2; ++half) {
          f32 sum = 0;
          for (u32 k = 0; k < 16; ++k) sum += a[half][k] * b[k];
          p.d[4 * j + 2 * half + e] += sum;
        }
      }
  }
  void run_through(u32 group) {
    u32 kept = 0;
    for (u32 i = 0; i < count_; ++i) {
      if (queue_[i].group < group) run(queue_[i]);
      else queue_[kept++] = queue_[i];
    }
    count_ = kept;
    meet();
  }
  void issue(const Product& p) {
    if (shfl(p.descriptor_b, 0) != p.descriptor_b || shfl(p.descriptor_a, 0) != p.descriptor_a)
      ninferc_emulator_trap("wgmma: the descriptor differs between lanes");
    if (p.descriptor_b >> 62 != 1 || count_ == 64) ninferc_emulator_trap("wgmma: bad descriptor, or too many products in flight");
    queue_[count_++] = p;
    if (shfl(u32(ninferc_emulator_timer() / 100), 0) % 3 == 0) run_through(group_ + 1);
  }

 public:
  void fence() { sync_warp(); }  // a product takes registers of all lanes: what they hold has been read
  void commit() { ++group_; }
  template <u32 pending>
  void wait() {
    run_through(group_ > pending ? group_ - pending : 0);
    sync_warp();  // what here each lane has read, the product of the whole warp reads
  }
  template <u32 columns>
  void multiply(f32 (&d)[columns / 2], const u32 (&a)[4], u64 b) { issue({d, a, 0, b, columns, group_, false}); }
  template <u32 columns>
  void multiply(f32 (&d)[columns / 2], u64 a, u64 b) { issue({d, nullptr, a, b, columns, group_, false}); }
  template <u32 columns>
  void multiply_transposed(f32 (&d)[columns / 2], const u32 (&a)[4], u64 b) { issue({d, a, 0, b, columns, group_, true}); }
  template <u32 count>
  void hold(f32 (&)[count]) {}
};

#else

// d[0..7] of a list, as text and as operands.
#define NINFERC_T8_(a, b, c, d, e, f, g, h) "%" #a ", %" #b ", %" #c ", %" #d ", %" #e ", %" #f ", %" #g ", %" #h
#define NINFERC_O8_(i) \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define NINFERC_T8A_ NINFERC_T8_(0, 1, 2, 3, 4, 5, 6, 7)
#define NINFERC_T12_ NINFERC_T8A_ ", %8, %9, %10, %11"
#define NINFERC_T16_ NINFERC_T8A_ ", " NINFERC_T8_(8, 9, 10, 11, 12, 13, 14, 15)
#define NINFERC_O8A_ NINFERC_O8_(0)
#define NINFERC_O12_ NINFERC_O8_(0), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11])
#define NINFERC_O16_ NINFERC_O8_(0), NINFERC_O8_(8)
#define NINFERC_T32_                                                                            \
  NINFERC_T8_(0, 1, 2, 3, 4, 5, 6, 7) ", " NINFERC_T8_(8, 9, 10, 11, 12, 13, 14, 15) ", "       \
  NINFERC_T8_(16, 17, 18, 19, 20, 21, 22, 23) ", " NINFERC_T8_(24, 25, 26, 27, 28, 29, 30, 31)
#define NINFERC_T64_                                                                            \
  NINFERC_T32_ ", " NINFERC_T8_(32, 33, 34, 35, 36, 37, 38, 39) ", "                            \
  NINFERC_T8_(40, 41, 42, 43, 44, 45, 46, 47) ", " NINFERC_T8_(48, 49, 50, 51, 52, 53, 54, 55) ", " \
  NINFERC_T8_(56, 57, 58, 59, 60, 61, 62, 63)
#define NINFERC_T88_                                                                            \
  NINFERC_T64_ ", " NINFERC_T8_(64, 65, 66, 67, 68, 69, 70, 71) ", "                            \
  NINFERC_T8_(72, 73, 74, 75, 76, 77, 78, 79) ", " NINFERC_T8_(80, 81, 82, 83, 84, 85, 86, 87)
#define NINFERC_T128_                                                                           \
  NINFERC_T88_ ", " NINFERC_T8_(88, 89, 90, 91, 92, 93, 94, 95) ", "                            \
  NINFERC_T8_(96, 97, 98, 99, 100, 101, 102, 103) ", " NINFERC_T8_(104, 105, 106, 107, 108, 109, 110, 111) ", " \
  NINFERC_T8_(112, 113, 114, 115, 116, 117, 118, 119) ", " NINFERC_T8_(120, 121, 122, 123, 124, 125, 126, 127)
#define NINFERC_O32_ NINFERC_O8_(0), NINFERC_O8_(8), NINFERC_O8_(16), NINFERC_O8_(24)
#define NINFERC_O64_ NINFERC_O32_, NINFERC_O8_(32), NINFERC_O8_(40), NINFERC_O8_(48), NINFERC_O8_(56)
#define NINFERC_O88_ NINFERC_O64_, NINFERC_O8_(64), NINFERC_O8_(72), NINFERC_O8_(80)
#define NINFERC_O128_ NINFERC_O88_, NINFERC_O8_(88), NINFERC_O8_(96), NINFERC_O8_(104), NINFERC_O8_(112), NINFERC_O8_(120)

// The last three numbers are the operand numbers after the accumulators: a0 (or descriptor a), ..., descriptor b.
#define NINFERC_WGMMA_REGISTERS_(columns, count, a0, a1, a2, a3, b, trans)                                                \
  if constexpr (n == columns)                                                                                              \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" NINFERC_T##count##_ "}, "                \
               "{%" #a0 ", %" #a1 ", %" #a2 ", %" #a3 "}, %" #b ", 1, 1, 1, " #trans ";"                                            \
               : NINFERC_O##count##_                                                                                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(descriptor_b))
#define NINFERC_WGMMA_SHARED_(columns, count, a0, b)                                                                       \
  if constexpr (n == columns)                                                                                              \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #columns "k16.f32.bf16.bf16 {" NINFERC_T##count##_ "}, "                \
               "%" #a0 ", %" #b ", 1, 1, 1, 0, 0;"                                                                         \
               : NINFERC_O##count##_                                                                                       \
               : "l"(descriptor_a), "l"(descriptor_b))

class WgmmaPipe {
 public:
  NINFERC_DEVICE void fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
  NINFERC_DEVICE void commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
  template <u32 pending>
  NINFERC_DEVICE void wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(pending) : "memory"); }
  // d += A * B with A from registers; `descriptor_b` (the same in all threads) is the first of n rows of B.
  template <u32 n>
  NINFERC_DEVICE void multiply(f32 (&d)[n / 2], const u32 (&a)[4], u64 descriptor_b) {
    static_assert(n == 16 || n == 24 || n == 32 || n == 64 || n == 128 || n == 176 || n == 256,
                  "products have 16, 24, 32, 64, 128, 176 or 256 columns");
    NINFERC_WGMMA_REGISTERS_(16, 8A, 8, 9, 10, 11, 12, 0);
    NINFERC_WGMMA_REGISTERS_(24, 12, 12, 13, 14, 15, 16, 0);
    NINFERC_WGMMA_REGISTERS_(32, 16, 16, 17, 18, 19, 20, 0);
    NINFERC_WGMMA_REGISTERS_(64, 32, 32, 33, 34, 35, 36, 0);
    NINFERC_WGMMA_REGISTERS_(128, 64, 64, 65, 66, 67, 68, 0);
    NINFERC_WGMMA_REGISTERS_(176, 88, 88, 89, 90, 91, 92, 0);
    NINFERC_WGMMA_REGISTERS_(256, 128, 128, 129, 130, 131, 132, 0);
  }
  // The same with A from shared memory: 64 rows at `descriptor_a`.
  template <u32 n>
  NINFERC_DEVICE void multiply(f32 (&d)[n / 2], u64 descriptor_a, u64 descriptor_b) {
    static_assert(n == 64 || n == 128 || n == 176 || n == 256, "products have 64, 128, 176 or 256 columns");
    NINFERC_WGMMA_SHARED_(64, 32, 32, 33);
    NINFERC_WGMMA_SHARED_(128, 64, 64, 65);
    NINFERC_WGMMA_SHARED_(176, 88, 88, 89);
    NINFERC_WGMMA_SHARED_(256, 128, 128, 129);
  }
  // d += A * B with B stored N contiguous, at a wgmma_descriptor_transposed.
  template <u32 n>
  NINFERC_DEVICE void multiply_transposed(f32 (&d)[n / 2], const u32 (&a)[4], u64 descriptor_b) {
    static_assert(n == 64 || n == 128 || n == 256, "products have 64, 128 or 256 columns");
    NINFERC_WGMMA_REGISTERS_(64, 32, 32, 33, 34, 35, 36, 1);
    NINFERC_WGMMA_REGISTERS_(128, 64, 64, 65, 66, 67, 68, 1);
    NINFERC_WGMMA_REGISTERS_(256, 128, 128, 129, 130, 131, 132, 1);
  }
  // Keeps the compiler from moving uses of accumulators before the wait that stands in front of this call.
  template <u32 count>
  NINFERC_DEVICE void hold(f32 (&d)[count]) {
#pragma unroll
    for (u32 i = 0; i < count; ++i) asm volatile("" : "+f"(d[i]) :: "memory");
  }
};
#undef NINFERC_T8_
#undef NINFERC_O8_
#undef NINFERC_T8A_
#undef NINFERC_T12_
#undef NINFERC_T16_
#undef NINFERC_O8A_
#undef NINFERC_O12_
#undef NINFERC_O16_
#undef NINFERC_T32_
#undef NINFERC_T64_
#undef NINFERC_T88_
#undef NINFERC_T128_
#undef NINFERC_O32_
#undef NINFERC_O64_
#undef NINFERC_O88_
#undef NINFERC_O128_
#undef NINFERC_WGMMA_REGISTERS_
#undef NINFERC_WGMMA_SHARED_

#endif
}  // namespace ninferc
#endif  // NINFERC_HAS_WGMMA
