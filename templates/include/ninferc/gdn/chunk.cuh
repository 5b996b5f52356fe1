// Chunked (WY) delta rule: what passes from the kernel within chunks to the kernel across chunks.
//
// Formulas: spec/model-dense.md §6.2.  Per chunk of 64 tokens and value head, with normalised q and k,
//   A_ij = β_i (k_i·k_j) e^{γ_i−γ_j} for i > j,  T = (I + A)^(-1),  P_ij = (q_i·k_j) e^{γ_i−γ_j} / √Dk for i >= j,
//   X = β (V − e^γ K H₀ᵀ),  Ṽ = T X,  O = e^γ Q H₀ᵀ / √Dk + P Ṽ,  H₁ = e^{γ_C} H₀ + Σ_j e^{γ_C−γ_j} ṽ_j k_jᵀ.
//
// Precision.  q and k are never rounded: a row enters products as a half times a power of two that brings its norm near
// 2^8 (a bf16 value fits a half there), and the exact rest of its normalisation is a factor in FP32.  The other operand of
// every product that reaches the state is a sum of halves, after a scaling by a power of two that keeps it inside their
// range: two of them (23 bits) for H and T, three (all 24 bits) for X and Ṽ, which the state sees undamped.  Products that
// reach only the bf16 output (H and Ṽ there, P) take the high half.  |T_ij| <= 1 and |P_ij| <= 1/√Dk (the updates I − βkkᵀ
// are contractions), so those have a constant scale.
#pragma once
#include <ninferc/gdn/common.cuh>

namespace ninferc::gdn {

constexpr u32 chunk = 64;
constexpr u32 chunk_blocks = 10;  // 16x16 blocks on and below the diagonal of a 64x64 matrix
constexpr f32 matrix_scale = 1024.0f;
constexpr i32 key_exponent = 8;

// One record per chunk and value head, in bytes.  Blocks lie in row order, block (bi, bj) at bi(bi+1)/2 + bj, as the
// B operand of a product over j: 16 bytes per lane {rows 0-7: j low, j high; rows 8-15: j low, j high}.
constexpr u32 block_bytes = 512;
constexpr u32 t_bytes = chunk_blocks * 2 * block_bytes;  // high halves, low halves alternate per block
struct Coefficients {
  f32 value[chunk];   // β_i
  f32 carry[chunk];   // β_i e^{γ_i} · key factor: of K H₀ᵀ in X
  f32 query[chunk];   // e^{γ_i} · query factor / √Dk: of Q H₀ᵀ in O
  f32 write[chunk];   // e^{γ_C−γ_i} · key factor · 2^key_exponent: of ṽ in H₁
  f32 decay, unused[63];  // e^{γ_C}
};
constexpr u32 x_coefficients = 2 * chunk * sizeof(f32);  // bytes of those that X needs
constexpr u32 p_bytes = chunk_blocks * block_bytes;
constexpr u32 record_bytes = t_bytes + u32(sizeof(Coefficients)) + p_bytes;

// Scaled keys and queries of one chunk and key head: K [64, dk], then Q [64, dk], halves.
constexpr u32 rows_bytes(u32 dk) { return 2 * chunk * dk * 2; }

NINFERC_DEVICE u32 block_row(u32 block) { return (block >= 1) + (block >= 3) + (block >= 6); }
NINFERC_DEVICE constexpr u32 block_index(u32 bi, u32 bj) { return bi * (bi + 1) / 2 + bj; }

// Bytes of a record are 64 · 65 floats and those of scaled rows 64 · dk: the compiler sees both as columns of a chunk.
static_assert(record_bytes == chunk * 65 * sizeof(f32), "a record is 65 floats per column");

}  // namespace ninferc::gdn
