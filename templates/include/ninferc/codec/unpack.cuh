// Packed codes to bf16 pairs for matrix instructions, with few instructions per weight and no rounding at all.
//
// Each function turns the codes of eight consecutive columns of one row into four packed pairs.  Which two columns share
// register r is the format's column order, chosen so that unpacking costs least:
//
//   q4, q5, q6       (0,4) (1,5) (2,6) (3,7)
//   byte formats     (0,2) (1,3) (4,6) (5,7)
//   bf16, nvfp4      (0,1) (2,3) (4,5) (6,7)   nvfp4 words in device order, see arrange.cuh
//
// A product does not care about the order as long as both operands have the same: order_columns<format> brings eight
// activations into it.  Integer codes come out as exact small integers (scales belong on sums), e4m3 codes as their exact
// value times 2^-120, nvfp4 codes times their group scale as an exact bf16 (E2M1 x E4M3 has at most 6 significant bits),
// times 2^-7.  So that products of e4m3 codes stay far from the ends of f32, order_columns makes their activations larger by
// 2^60 (those of 2^68 and more become infinite), and 2^60 are left for the sum.
#pragma once
#include <ninferc/base/types.cuh>
#include <ninferc/base/vec.cuh>
#include <ninferc/codec/format.cuh>

namespace ninferc {

namespace codec {
NINFERC_DEVICE u32 and_xor(u32 a, u32 b, u32 c) { return lop3<0x6a>(a, b, c); }  // (a & b) ^ c
NINFERC_DEVICE u32 and_or(u32 a, u32 b, u32 c) { return lop3<0xea>(a, b, c); }   // (a & b) | c
}  // namespace codec

// Integers ride in the mantissa of 128 = 0x4300: 128 + u.  Flipping the sign bit of a two's complement code adds half its
// range, so the constant to take off is 128 + half, which is also a bf16 (0x4308, 0x4310, 0x4320).

// codes: 8 nibbles.
NINFERC_DEVICE void unpack_q4(u32 codes, u32 (&out)[4]) {
#pragma unroll
  for (u32 i = 0; i < 4; ++i) out[i] = hadd2_bf16_exact(codec::and_xor(codes >> (4 * i), 0x000f000fu, 0x43084308u), 0xc308c308u);
}

// high: the 8 bits of the high plane, column j in bit j; bits above are ignored.
NINFERC_DEVICE void unpack_q5(u32 codes, u32 high, u32 (&out)[4]) {
  const u32 spread = (high & 0xffu) * 0x1001u;  // column i in bit i, column i + 4 in bit 16 + i
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    const u32 low = codec::and_xor(codes >> (4 * i), 0x000f000fu, 0x43104310u);
    out[i] = hadd2_bf16_exact(codec::and_xor(spread << (4 - i), 0x00100010u, low), 0xc310c310u);
  }
}

// high: the 16 bits of the high plane, column j in bits 2j and 2j + 1, in bytes `byte` and `byte + 1` of the word.
template <u32 byte = 0>
NINFERC_DEVICE void unpack_q6(u32 codes, u32 high, u32 (&out)[4]) {
  const u32 spread = prmt(high, 0, 0x4040u | byte | (byte + 1) << 8);  // columns 0..3 in byte 0, 4..7 in byte 2
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    const u32 low = codec::and_xor(codes >> (4 * i), 0x000f000fu, 0x43204320u);
    const u32 top = i < 2 ? spread << (4 - 2 * i) : spread >> (2 * i - 4);
    out[i] = hadd2_bf16_exact(codec::and_xor(top, 0x00300030u, low), 0xc320c320u);
  }
}

// Two words of four bytes.  Seven bits ride in the mantissa of 128; the sign bit turns the 128 to take off into 256.
NINFERC_DEVICE void unpack_w8(u32 first, u32 second, u32 (&out)[4]) {
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    const u32 bytes = (i < 2 ? first : second) >> (8 * (i % 2));
    out[i] = hadd2_bf16_exact(codec::and_xor(bytes, 0x007f007fu, 0x43004300u), codec::and_xor(bytes, 0x00800080u, 0xc300c300u));
  }
}

// Two words of four e4m3 codes.  Their exponent and mantissa fields, moved to those of bf16, read as value * 2^-120 (below
// 2^-6 times that: subnormal, which matrix instructions take as they are); a multiplication that makes up for it would cost
// a fifth of the instructions of a product.
NINFERC_DEVICE void unpack_fp8(u32 first, u32 second, u32 (&out)[4]) {
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    const u32 word = i < 2 ? first : second;
    const u32 sign = i % 2 ? word : word << 8;
    const u32 magnitude = (i % 2 ? word >> 4 : word << 4) & 0x07f007f0u;
    out[i] = codec::and_or(sign, 0x80008000u, magnitude);
  }
}
constexpr u32 fp8_activation = 0x5d805d80u;  // 2^60, twice
constexpr f32 fp8_value = 0x1p120f;

// Two e4m3 group scales (low byte first, no sign) as two packed pairs scale * 2^119, each in both halves.
NINFERC_DEVICE void unpack_nvfp4_scales(u32 scales, u32& first, u32& second) {
  const u32 moved = prmt(scales, 0, 0x4140) << 4;                            // scale * 2^-120, one in each half
  const u32 both = hmul2_bf16_exact(hmul2_bf16_exact(moved, 0x7b807b80u), 0x7b007b00u);  // no single bf16 factor is 2^239
  first = twice<0>(both);
  second = twice<1>(both);
}

// Pair `pair` of a word in device order (arrange.cuh), times 2^-126 in each half (subnormal included).  `factor` is
// nvfp4_factor(pair): the last pair's bits have no two places that one shift could bring to both of theirs.
NINFERC_DEVICE constexpr u32 nvfp4_factor(u32 pair) { return pair == 3 ? 0x1084u : 1u << (3 * pair); }
NINFERC_DEVICE u32 nvfp4_pair(u32 word, u32 factor) {
  const bool last = factor == nvfp4_factor(3);
  return (word >> (last ? 10 : 0) & (last ? 0x001b001bu : ~0u)) * factor & 0x81c081c0u;
}

// 8 E2M1 codes in device order; `scale` as unpack_nvfp4_scales gives it.
NINFERC_DEVICE void unpack_nvfp4(u32 word, u32 scale, u32 (&out)[4]) {
#pragma unroll
  for (u32 i = 0; i < 4; ++i) out[i] = hmul2_bf16_exact(nvfp4_pair(word, nvfp4_factor(i)), scale);
}

// ---- signed bytes for integer matrix units: eight codes as two words of four, value * 2^integer_shift in each byte ---------

template <Format format>
constexpr u32 integer_shift = format == Format::q4g64 ? 4 : format == Format::q5g64 ? 3 : format == Format::q6g64 ? 2 : 0;

// Columns 0, 2, 4, 6 and 1, 3, 5, 7: a code in the upper bits of its byte is a signed number as it stands.
NINFERC_DEVICE void bytes_q4(u32 codes, u32& even, u32& odd) {
  even = codes << 4 & 0xf0f0f0f0u;
  odd = codes & 0xf0f0f0f0u;
}
// high: as unpack_q5 takes it.
NINFERC_DEVICE void bytes_q5(u32 codes, u32 high, u32& even, u32& odd) {
  constexpr u32 spread = 1u << 7 | 1u << 13 | 1u << 19 | 1u << 25;  // bits 0, 2, 4, 6 to bits 7, 15, 23, 31 (and others)
  even = codec::and_or((high & 0x55u) * spread, 0x80808080u, codes << 3 & 0x78787878u);
  odd = codec::and_or((high & 0xaau) * (spread >> 1), 0x80808080u, codes >> 1 & 0x78787878u);
}
// high: as unpack_q6 takes it.
template <u32 byte = 0>
NINFERC_DEVICE void bytes_q6(u32 codes, u32 high, u32& even, u32& odd) {
  const u32 apart = prmt(high, 0, 0x4040u | byte | (byte + 1) << 8);  // columns 0..3 in byte 0, 4..7 in byte 2
  even = codec::and_or(apart << 10, 0xc000c000u, codec::and_or(apart << 6, 0x00c000c0u, codes << 2 & 0x3c3c3c3cu));
  odd = codec::and_or(apart << 8, 0xc000c000u, codec::and_or(apart << 4, 0x00c000c0u, codes >> 2 & 0x3c3c3c3cu));
}

// Eight activations in natural order, brought into the column order of the format.
template <Format format>
NINFERC_DEVICE u32x4 order_columns(u32x4 x) {
  static_assert(!FormatTraits<format>::grouped_int, "activations of integer products are digits (linear/integers.cuh)");
  if constexpr (format == Format::bf16 || format == Format::nvfp4) {
    return x;
  } else {
    const u32x4 w{prmt(x.x, x.y, 0x5410), prmt(x.x, x.y, 0x7632), prmt(x.z, x.w, 0x5410), prmt(x.z, x.w, 0x7632)};
    return u32x4{hmul2_bf16_exact(w.x, fp8_activation), hmul2_bf16_exact(w.y, fp8_activation), hmul2_bf16_exact(w.z, fp8_activation),
                 hmul2_bf16_exact(w.w, fp8_activation)};
  }
}

}  // namespace ninferc
