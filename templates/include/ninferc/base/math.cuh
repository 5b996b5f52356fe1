// Fast elementary functions (approximate instructions, a few ulp) with defined limits at large arguments.
#pragma once
#include <ninferc/base/types.cuh>

namespace ninferc {

constexpr f32 log2_e = 1.4426950408889634f;
constexpr f32 ln_2 = 0.6931471805599453f;

#if defined(NINFERC_EMULATOR)
NINFERC_DEVICE f32 exp2_fast(f32 x) { return exp2f(x); }
NINFERC_DEVICE f32 log2_fast(f32 x) { return log2f(x); }
NINFERC_DEVICE f32 rcp_fast(f32 x) { return 1.0f / x; }
NINFERC_DEVICE f32 rsqrt_fast(f32 x) { return 1.0f / sqrtf(x); }
#else
NINFERC_DEVICE f32 exp2_fast(f32 x) { f32 y; asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
NINFERC_DEVICE f32 log2_fast(f32 x) { f32 y; asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
NINFERC_DEVICE f32 rcp_fast(f32 x) { f32 y; asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
NINFERC_DEVICE f32 rsqrt_fast(f32 x) { f32 y; asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x)); return y; }
#endif
NINFERC_DEVICE f32 exp_fast(f32 x) { return exp2_fast(x * log2_e); }
// 1 / (1 + exp(-x)): 0 and 1 at the ends, since exp2 saturates to infinity and to zero.
NINFERC_DEVICE f32 sigmoid_fast(f32 x) { return rcp_fast(1.0f + exp2_fast(-x * log2_e)); }
NINFERC_DEVICE f32 silu_fast(f32 x) { return x * sigmoid_fast(x); }

}  // namespace ninferc
