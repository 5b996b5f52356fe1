// Codes to bf16 pairs of neighbouring columns in registers, for matrix fragments whose other operand is x in natural order.
//
// What reaches the matrix cores.  NVFP4 scale * code and FP8 codes are exact in bf16, so their products are exact; the
// divisor and the row scales multiply the f32 sums.  For the integer formats w = code * scale has up to 17 significant bits
// and is rounded once to bf16: the scale is held as the sum of two bf16 numbers (an f16 has 11 bits), code * low is exact
// or nearly so, and one fused multiply-add rounds.  That error is as large per weight as the rounding of the output, so a
// bf16 output errs by about sqrt(2) times its own rounding.
#pragma once
#include <ninferc/base/types.cuh>
#include <ninferc/codec/format.cuh>
#include <ninferc/codec/unpack.cuh>

namespace ninferc::gemm {

// Bytes of one row's 64 columns in the planes.  The scale word is 4 bytes wherever there are group scales: for 64-wide groups
// it holds the scales of these and of the neighbouring 64 columns, as copies have at least 4 bytes.
template <Format f>
struct Traits {
  static constexpr bool grouped = FormatTraits<f>::grouped_int, nibbles = FormatTraits<f>::nibbles;
  static constexpr u32 code_bytes = FormatTraits<f>::code_bytes_128 / 2, high_bytes = FormatTraits<f>::high_bytes_128 / 2;
  static constexpr u32 scale_bytes = FormatTraits<f>::group != 0 ? 4 : 0;
  // Columns of K per row that exist in memory (row-split layouts pad with zero codes).
  static constexpr u32 padded(u32 k) { return grouped ? round_up(k, 128u) : k; }
};

// ---- byte selection --------------------------------------------------------------------------------------------
// Two neighbouring codes of one row sit in one byte (nibble formats) or in two bytes.  `gather` brings them to the low and the
// high half of a register: nibble formats from bits 0-3 of each half, W8 from bits 0-7, FP8 from bits 8-15.  The bits around
// them are other codes and are masked later.  `selector` names the pair: pair 0..3 of the eight codes of one word (nibbles)
// or of two words (bytes).  NVFP4 words are in device order and give values at once.
template <Format f>
NINFERC_DEVICE u32 selector(u32 pair) {
  if constexpr (f == Format::nvfp4) return nvfp4_factor(pair);
  return Traits<f>::nibbles ? pair * 0x1111 + 0x4400 : pair * 0x2222 + 0x1100;
}
template <Format f>
NINFERC_DEVICE u32 gather(u32 word, u32 next, u32 selector) {
  if constexpr (f == Format::nvfp4) return nvfp4_pair(word, selector);
  return Traits<f>::nibbles ? prmt(word, word >> 4, selector) : prmt(word, next, selector);
}

// Bits above the nibble, brought to bit 4 (Q5) or bits 4, 5 (Q6) of both halves of the result; other bits are garbage.
// For the k8 group (eight columns) `group` 0..3 of the 32 columns that `word` covers (Q5), 0..1 of 16 columns (Q6), for a
// pair known at run time: rotate once per word, then pick per group.
template <Format f>
struct HighPairs {
  u32 even, odd;
  NINFERC_DEVICE HighPairs(u32 word, u32 pair) {
    if constexpr (f == Format::q5g64) {
      even = funnel_left(word, word, 4 - 2 * pair);
      odd = funnel_left(word, word, 3 - 2 * pair);
    } else {
      even = funnel_left(word, word, 4 - 4 * pair);
      odd = funnel_left(word, word, 2 - 4 * pair);
    }
  }
  NINFERC_DEVICE u32 group(u32 i) const {
    const u32 byte = f == Format::q5g64 ? i : 2 * i;
    return prmt(even, odd, byte * 0x1111 + 0x4400);
  }
};
// The same for pair 0..7 (a constant) of 16 consecutive columns in the low half (Q5) or the whole (Q6) of `bits`.
template <Format f>
NINFERC_DEVICE u32 high_of_pair(u32 bits, u32 pair) {
  if constexpr (f == Format::q5g64) {
    const u32 spread = bits | (bits << 15);  // even lanes in the low half, odd lanes 16 higher than their even neighbour
    return funnel_left(spread, spread, 4 - 2 * pair);
  } else {
    const u32 even = funnel_left(bits, bits, 4 - 4 * pair), odd = funnel_left(bits, bits, 18 - 4 * pair);
    return lop3<0xca>(0x0000ffffu, even, odd);
  }
}

// ---- codes to values -------------------------------------------------------------------------------------------
// `codes` from gather, `high` from above (ignored where the format has none): the codes as bf16, exact.  NVFP4 values come
// out times 2^-126 (their bits are those of small bf16 numbers); the scale makes up for it.
template <Format f>
NINFERC_DEVICE u32 code_values(u32 codes, u32 high) {
  if constexpr (f == Format::q4g64) {
    // Nibble xor 8 is code + 8; as mantissa bits of 128 it is 136 + code.
    return hadd2_bf16_exact(codec::and_xor(codes, 0x000f000fu, 0x43084308u), 0xc308c308u);
  } else if constexpr (f == Format::q5g64) {
    const u32 low = codec::and_xor(codes, 0x000f000fu, 0x43104310u);
    return hadd2_bf16_exact(codec::and_xor(high, 0x00100010u, low), 0xc310c310u);
  } else if constexpr (f == Format::q6g64) {
    const u32 low = codec::and_xor(codes, 0x000f000fu, 0x43204320u);
    return hadd2_bf16_exact(codec::and_xor(high, 0x00300030u, low), 0xc320c320u);
  } else if constexpr (f == Format::w8g32) {
    // Seven low bits as mantissa of 128; the sign bit stands for -128 and is, set into 128, the exponent bit of 256.
    return hadd2_bf16_exact(codec::and_or(codes, 0x007f007fu, 0x43004300u), codec::and_or(codes, 0x00800080u, 0xc300c300u));
  } else if constexpr (f == Format::fp8_row) {
    // Sign, four exponent bits and three mantissa bits put where bf16 has them: value * 2^-120, subnormals included.
    const u32 sign = codes & 0x80008000u;
    return hmul2_bf16_exact(codec::and_or(codes >> 4, 0x07f007f0u, sign), 0x7b807b80u);
  } else {
    static_assert(f == Format::nvfp4, "BF16 weights need no conversion");
    return codes;
  }
}

// A group scale for both halves of a pair, as the sum of two bf16 numbers (`low` unused by NVFP4).
struct Scale { u32 high, low; };

NINFERC_DEVICE Scale scale_from_f16(f16 bits) {
  const f32 s = f16_to_f32(bits);
  const u32 high = pack_bf16x2(s, s);
  const f32 rest = s - bf16x2_lo(high);
  return {high, pack_bf16x2(rest, rest)};
}
// The four e4m3 scales of 64 columns; `get(i)` is scale i times 2^118, so that scale * code_values is w * d * 2^-8.
struct ScaleQuad {
  u32 low, high;
  NINFERC_DEVICE ScaleQuad(u32 word) : low((word << 4) & 0xf0f0f0f0u), high((word >> 4) & 0x0f0f0f0fu) {}
  NINFERC_DEVICE Scale get(u32 selector) const {  // selector: scale_selector(i)
    return {hmul2_bf16_exact(hmul2_bf16_exact(prmt(low, high, selector), 0x7b807b80u), 0x7a807a80u), 0};
  }
};
NINFERC_DEVICE u32 scale_selector(u32 i) { return i * 0x1111 + 0x4040; }

// The weights of a pair in bf16: exact for NVFP4 and FP8, rounded once for the integer formats.
template <Format f>
NINFERC_DEVICE u32 weight_pair(u32 codes, u32 high, Scale scale) {
  const u32 values = code_values<f>(codes, high);
  if constexpr (f == Format::fp8_row) return values;
  else if constexpr (f == Format::nvfp4) return hmul2_bf16_exact(values, scale.high);
  else return hfma2_bf16(values, scale.high, hmul2_bf16(values, scale.low));
}

}  // namespace ninferc::gemm
