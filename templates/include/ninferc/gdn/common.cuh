// What the Gated DeltaNet kernels share: layout constants, normalisation, splitting a float into two halves.
#pragma once
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>

namespace ninferc::gdn {

constexpr f32 l2_eps = 1e-6f;  // added to the sum of squares

// e^x for x <= 0, within 0.6 units in the last place (the library's expf allows 2): a decay multiplies the whole state.
// Cody-Waite reduction by ln 2 in two parts, then the Taylor polynomial on |r| <= ln 2 / 2.
NINFERC_DEVICE f32 decay_exp(f32 x) {
  const f32 n = rintf(fmaxf(x, -104.0f) * 1.44269504f);
  const f32 r = fmaf(-n, 1.42860677e-6f, fmaf(-n, 0.693145752f, fmaxf(x, -104.0f)));
  f32 p = 1.98412698e-4f;
  p = fmaf(p, r, 1.38888889e-3f);
  p = fmaf(p, r, 8.33333333e-3f);
  p = fmaf(p, r, 4.16666667e-2f);
  p = fmaf(p, r, 1.66666667e-1f);
  p = fmaf(p, r, 0.5f);
  const f32 e = 1.0f + fmaf(r * r, p, r);
  const i32 half = i32(n) / 2, rest = i32(n) - half;  // in two steps: 2^n alone may lie below the smallest normal number
  return e * bits_float(u32(half + 127) << 23) * bits_float(u32(rest + 127) << 23);
}

// (Σx² + ε)^(-1/2), correctly rounded: a state accumulates thousands of products with normalised keys.
NINFERC_DEVICE f32 l2_scale(f32 sum_of_squares) { return __frsqrt_rn(sum_of_squares + l2_eps); }
// A lane's part of the sum of squares of a head: four neighbouring values, added over the warp by warp_sum.
NINFERC_DEVICE f32 head_squares(const f32 (&x)[4]) {
  return __fmaf_rn(x[0], x[0], x[1] * x[1]) + __fmaf_rn(x[2], x[2], x[3] * x[3]);
}
// The factor of q: `scale` normalises it, and the output is divided by √dk.
template <u32 dk>
NINFERC_DEVICE f32 query_scale(f32 scale) {
  return scale * __frsqrt_rn(f32(dk));
}

// The lazily committed slot of one lane.
struct Slot {
  i32 slot, columns, length, pending, parity;
};
// Reads a lane's tables; `pending` is 0 at the start of a sequence, whose stored state and window count as zero. Past L1:
// a kernel may do so before its dependency wait, where an old line of an earlier kernel may still lie there.
NINFERC_DEVICE Slot read_slot(const i32* lane_slot, const i32* lane_ncols, const i32* lane_len, const i32* slot_pending,
                              const i32* slot_parity, u32 lane) {
  Slot s;
  s.slot = ld_cg<i32>(lane_slot + lane);
  s.columns = ld_cg<i32>(lane_ncols + lane);
  s.length = ld_cg<i32>(lane_len + lane);
  s.pending = s.parity = 0;
  if (s.columns == 0) return s;
  s.parity = ld_cg<i32>(slot_parity + s.slot);
  if (s.length > 0) s.pending = ld_cg<i32>(slot_pending + s.slot);
  return s;
}

// One element of the state, decayed and updated.  Every fold, step and commit uses exactly these two roundings, so that
// the bits of a state depend on its tokens only.
NINFERC_DEVICE f32 update_element(f32 state, f32 alpha, f32 u, f32 k) {
  return __fmaf_rn(u, k, __fmul_rn(alpha, state));
}

// A pair of floats as halves: x = high + (low + rest) / lift.  high and low hold 22 bits and a sign, rest the others.
// A lift of 2^11 keeps low out of the subnormal halves for as long as high is, but then needs a sum of its own.
constexpr f32 split_lift = 2048.0f;
struct SplitPair {
  u32 high, low, rest;
};
NINFERC_DEVICE SplitPair split_f16x2(f32 x, f32 y, f32 lift) {
  SplitPair s;
  s.high = pack_f16x2(x, y);
  const f32 dx = (x - f16x2_lo(s.high)) * lift, dy = (y - f16x2_hi(s.high)) * lift;
  s.low = pack_f16x2(dx, dy);
  s.rest = pack_f16x2(dx - f16x2_lo(s.low), dy - f16x2_hi(s.low));
  return s;
}

// The power of two 2^(target - e) for 2^(e-1) <= value < 2^e, so that value * scale lies in [2^(target-1), 2^target).
// Bounded above for tiny values, whose products do not matter.
template <i32 target>
NINFERC_DEVICE f32 power_scale(f32 value) {
  const i32 exponent = i32((float_bits(value) >> 23) & 255u) - 126;
  i32 biased = 127 + target - exponent;
  biased = biased < 1 ? 1 : (biased > 187 ? 187 : biased);
  return bits_float(u32(biased) << 23);
}
// 1 / s of a power of two, exact.
NINFERC_DEVICE f32 power_inverse(f32 s) { return bits_float((254u << 23) - float_bits(s)); }

}  // namespace ninferc::gdn
