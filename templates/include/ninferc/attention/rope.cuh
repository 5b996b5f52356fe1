// Rotary angles with positions up to 2^24: the phase is formed in turns, exact to about 2^-25 of a turn.
#pragma once
#include <ninferc/base/types.cuh>

namespace ninferc::attention {

// Cosine and sine of `turns` whole turns, |turns| below 2^22; absolute error under 2^-22.  A polynomial of its own, because
// the library's full-range sine keeps a reduction table in local memory.
NINFERC_DEVICE void cos_sin_turns(f32 turns, f32& cosine, f32& sine) {
  const f32 quarters = rintf(4.0f * turns);
  const f32 x = (turns - 0.25f * quarters) * 6.283185307179586f;  // within ±pi/4; the difference is exact
  const f32 x2 = x * x;
  const f32 s = fmaf(x * x2, fmaf(x2, fmaf(x2, fmaf(x2, 2.7557319e-6f, -1.9841270e-4f), 8.3333333e-3f), -0.16666667f), x);
  const f32 c =
      fmaf(x2, fmaf(x2, fmaf(x2, fmaf(x2, fmaf(x2, -2.7557319e-7f, 2.4801587e-5f), -1.3888889e-3f), 4.1666667e-2f), -0.5f), 1.0f);
  const i32 quadrant = i32(quarters) & 3;
  const bool swapped = (quadrant & 1) != 0;
  cosine = swapped ? s : c;
  sine = swapped ? c : s;
  if (quadrant == 1 || quadrant == 2) cosine = -cosine;
  if (quadrant >= 2) sine = -sine;
}

// Angle of `position` (an integer below 2^24 in magnitude) at frequency high + low turns per position, reduced to about one
// turn.  The product position * high splits exactly into a float and its error.
NINFERC_DEVICE f32 turns_at(i32 position, f32 high, f32 low) {
  const f32 p = f32(position);
  const f32 product = p * high;
  const f32 error = fmaf(p, high, -product);
  return (product - rintf(product)) + fmaf(p, low, error);
}

}  // namespace ninferc::attention
