"""Matrix products and matrix loads against numpy."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator import emulator
from tests.emulator.emulator import compile_kernel, launch
from tests.emulator.harness import from_bf16, to_bf16

pytestmark = pytest.mark.skipif(emulator.missing_reason() is not None, reason=str(emulator.missing_reason()))
SEEDS = range(8)


MMA = """
#include <ninferc/base/mma.cuh>
#include <ninferc/base/warp.cuh>
using namespace ninferc;
// out[16][8] = a[16][k] b[8][k]^T
NINFERC_KERNEL(gemm, 32, 1)(const u16* a, const u16* b, f32* out, u32 k) {
  __shared__ __align__(16) u16 tile_a[16][24];
  __shared__ __align__(16) u16 tile_b[8][24];
  f32 d[4] = {0, 0, 0, 0};
  const u32 lane = lane_id();
  for (u32 start = 0; start < k; start += 16) {
    for (u32 i = lane; i < 16 * 16; i += 32) tile_a[i / 16][i % 16] = a[(i / 16) * k + start + i % 16];
    for (u32 i = lane; i < 8 * 16; i += 32) tile_b[i / 16][i % 16] = b[(i / 16) * k + start + i % 16];
    sync_warp();
    u32 fa[4], fb[2];
    ldmatrix_x4(fa, &tile_a[lane % 16][lane / 16 * 8]);
    ldmatrix_x2(fb, &tile_b[lane % 8][lane / 8 % 2 * 8]);
    mma_m16n8k16_KIND(d, fa, fb);
    sync_warp();
  }
  const u32 g = lane / 4, p = lane % 4;
  out[g * 8 + 2 * p] = d[0];
  out[g * 8 + 2 * p + 1] = d[1];
  out[(g + 8) * 8 + 2 * p] = d[2];
  out[(g + 8) * 8 + 2 * p + 1] = d[3];
}
"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("kind", "arch"), [("bf16", 900), ("f16", 900), ("bf16", 750), ("f16", 750)])
def test_mma_and_ldmatrix_match_numpy(kind: str, arch: int, seed: int) -> None:
    kernel = compile_kernel(MMA.replace("KIND", kind), arch=arch)
    rng = np.random.default_rng(seed)
    k = 64
    a, b = rng.standard_normal((16, k)).astype(np.float32), rng.standard_normal((8, k)).astype(np.float32)
    if kind == "bf16":
        a_bits, b_bits = to_bf16(a), to_bf16(b)
        a, b = from_bf16(a_bits), from_bf16(b_bits)
    else:
        a_bits, b_bits = a.astype(np.float16).view(np.uint16), b.astype(np.float16).view(np.uint16)
        a, b = a_bits.view(np.float16), b_bits.view(np.float16)
    out = np.full((16, 8), np.nan, np.float32)
    launch(kernel, 1, 32, [a_bits, b_bits, out, k], schedule_seed=seed)
    np.testing.assert_allclose(out, a.astype(np.float64) @ b.astype(np.float64).T, rtol=0, atol=2e-5)


INTEGER_MMA = """
#include <ninferc/base/mma.cuh>
#include <ninferc/base/warp.cuh>
using namespace ninferc;
// out[16][8] += a[16][32] b[8][32]^T
NINFERC_KERNEL(product, 32, 1)(const u32* a, const u32* b, i32* out) {
  const u32 g = lane_id() / 4, p = lane_id() % 4;
  const u32 fa[4] = {a[g * 8 + p], a[(g + 8) * 8 + p], a[g * 8 + 4 + p], a[(g + 8) * 8 + 4 + p]};
  const u32 fb[2] = {b[g * 8 + p], b[g * 8 + 4 + p]};
  i32 d[4];
  for (u32 e = 0; e < 4; ++e) d[e] = out[(g + e / 2 * 8) * 8 + 2 * p + e % 2];
  mma_m16n8k32_s8(d, fa, fb);
  for (u32 e = 0; e < 4; ++e) out[(g + e / 2 * 8) * 8 + 2 * p + e % 2] = d[e];
}
"""


def test_integer_products_match_numpy() -> None:
    rng = np.random.default_rng(11)
    a, b = rng.integers(-128, 128, (16, 32)).astype(np.int8), rng.integers(-128, 128, (8, 32)).astype(np.int8)
    before = rng.integers(-(1 << 30), 1 << 30, (16, 8)).astype(np.int32)
    out = before.copy()
    launch(compile_kernel(INTEGER_MMA), 1, 32, [a, b, out])
    assert np.array_equal(out, before + a.astype(np.int32) @ b.astype(np.int32).T)


@pytest.mark.parametrize("arch", [900, 750])
def test_bf16_products_of_subnormal_numbers(arch: int) -> None:
    """Weights of 2^-126 and less with activations that make up for it, as e4m3 codes are multiplied."""
    rng, k = np.random.default_rng(3), 64
    a_bits = rng.integers(0, 128, (16, k)).astype(np.uint16) | rng.integers(0, 2, (16, k)).astype(np.uint16) << 15
    b_bits = to_bf16(rng.standard_normal((8, k)).astype(np.float32) * np.float32(2.0**100))
    a, b = from_bf16(a_bits).astype(np.float64), from_bf16(b_bits).astype(np.float64)
    out = np.full((16, 8), np.nan, np.float32)
    launch(compile_kernel(MMA.replace("KIND", "bf16"), arch=arch), 1, 32, [a_bits, b_bits, out, k])
    assert np.abs(out - a @ b.T).max() < 2.0**-20 * np.abs(a @ b.T).max()


FRAGMENTS = """
#include <ninferc/base/mma.cuh>
#include <ninferc/base/warp.cuh>
using namespace ninferc;
// One product with fragments gathered element by element from the layouts that mma.cuh documents.
NINFERC_KERNEL(tf32, 32, 1)(const u32* a, const u32* b, f32* d) {
  const u32 g = lane_id() / 4, p = lane_id() % 4;
  const u32 fa[4] = {a[g * 8 + p], a[(g + 8) * 8 + p], a[g * 8 + p + 4], a[(g + 8) * 8 + p + 4]};
  const u32 fb[2] = {b[p * 8 + g], b[(p + 4) * 8 + g]};
  f32 c[4];
  for (u32 i = 0; i < 4; ++i) c[i] = d[(g + i / 2 * 8) * 8 + 2 * p + i % 2];
  mma_m16n8k8_tf32(c, fa, fb);
  for (u32 i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * p + i % 2] = c[i];
}
NINFERC_KERNEL(f16k8, 32, 1)(const u16* a, const u16* b, f32* d) {
  const u32 g = lane_id() / 4, p = lane_id() % 4;
  f32 c[4];
  for (u32 i = 0; i < 4; ++i) c[i] = d[(g + i / 2 * 8) * 8 + 2 * p + i % 2];
  const auto pair = [](u16 low, u16 high) { return u32(low) | (u32(high) << 16); };
  mma_m16n8k8_f16(c, pair(a[g * 8 + 2 * p], a[g * 8 + 2 * p + 1]), pair(a[(g + 8) * 8 + 2 * p], a[(g + 8) * 8 + 2 * p + 1]),
                  pair(b[2 * p * 8 + g], b[(2 * p + 1) * 8 + g]));
  for (u32 i = 0; i < 4; ++i) d[(g + i / 2 * 8) * 8 + 2 * p + i % 2] = c[i];
}
NINFERC_KERNEL(transpose, 32, 1)(const u32x4* in, u32x4* plain, u32x4* transposed, u32x4* stored) {
  __shared__ __align__(16) u32x4 rows[32];
  __shared__ __align__(16) u32x4 back[32];
  rows[lane_id()] = in[lane_id()];
  sync_warp();
  u32 r[4];
  ldmatrix_x4(r, &rows[lane_id()]);
  plain[lane_id()] = u32x4{r[0], r[1], r[2], r[3]};
  stmatrix_x4(&back[lane_id()], r);
  ldmatrix_x4_trans(r, &rows[lane_id()]);
  transposed[lane_id()] = u32x4{r[0], r[1], r[2], r[3]};
  sync_warp();
  stored[lane_id()] = back[lane_id()];
}
"""


def test_tf32_ignores_low_mantissa_bits() -> None:
    kernel = compile_kernel(FRAGMENTS, name="tf32")
    rng = np.random.default_rng(1)
    a, b, d = (rng.standard_normal(s).astype(np.float32) for s in ((16, 8), (8, 8), (16, 8)))
    chop = np.uint32(0xFFFFE000)
    a_chopped, b_chopped = (v.view(np.uint32) & chop for v in (a, b))
    expected = d.astype(np.float64) + a_chopped.view(np.float32).astype(np.float64) @ b_chopped.view(np.float32)
    launch(kernel, 1, 32, [a.view(np.uint32), b.view(np.uint32), d])
    np.testing.assert_allclose(d, expected, rtol=0, atol=2e-6)


def test_f16_k8() -> None:
    kernel = compile_kernel(FRAGMENTS, name="f16k8")
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal(s).astype(np.float16) for s in ((16, 8), (8, 8)))
    d = rng.standard_normal((16, 8)).astype(np.float32)
    expected = d.astype(np.float64) + a.astype(np.float64) @ b.astype(np.float64)
    launch(kernel, 1, 32, [a.view(np.uint16), b.view(np.uint16), d])
    np.testing.assert_allclose(d, expected, rtol=0, atol=2e-6)


def test_matrix_moves() -> None:
    kernel = compile_kernel(FRAGMENTS, name="transpose")
    matrices = np.random.default_rng(3).integers(0, 65536, (4, 8, 8)).astype(np.uint32)
    plain, transposed, stored = (np.zeros((32, 4), np.uint32) for _ in range(3))
    launch(kernel, 1, 32, [matrices.astype(np.uint16), plain, transposed, stored], schedule_seed=5)
    for lane in range(32):
        g, p = divmod(lane, 4)
        for m in range(4):
            assert plain[lane, m] == matrices[m, g, 2 * p] | matrices[m, g, 2 * p + 1] << 16
            assert transposed[lane, m] == matrices[m, 2 * p, g] | matrices[m, 2 * p + 1, g] << 16
    np.testing.assert_array_equal(stored.view(np.uint16).reshape(4, 8, 8), matrices)


WGMMA = """
#include <ninferc/base/wgmma.cuh>
using namespace ninferc;
// out[64][n] = a[64][64] b: the tiles arrive swizzled.
// form 0: A from registers, 1: A from shared memory, 2: B with N contiguous.
template <u32 n> NINFERC_DEVICE void product(const u16* a, const u32x4* a_tile, const u32x4* b_tile, f32* out, u32 form) {
  NINFERC_DYNAMIC_SMEM(smem);
  const u32 t = threadIdx.x, lane = lane_id(), g = lane / 4, p = lane % 4, row = warp_id() * 16 + g;
  for (u32 i = t; i < 512; i += 128) st_shared(smem + i * 16, a_tile[i]);
  for (u32 i = t; i < 8 * n; i += 128) st_shared(smem + 8192 + i * 16, b_tile[i]);
  fence_proxy_async_shared();
  sync_block();
  f32 d[n / 2] = {};
  WgmmaPipe pipe;
  pipe.fence();
  u32 fragments[4][4];
  for (u32 k = 0; k < 4; ++k)
    for (u32 i = 0; i < 4; ++i)
      fragments[k][i] = *reinterpret_cast<const u32*>(a + (row + 8 * (i & 1)) * 64 + 16 * k + 2 * p + 8 * (i >> 1));
  const u64 a_at = wgmma_descriptor(shared_address(smem)), b_at = wgmma_descriptor(shared_address(smem) + 8192);
  const u64 b_transposed = wgmma_descriptor_transposed(shared_address(smem) + 8192, 8192);
  for (u32 k = 0; k < 4; ++k) {
    if (form == 0) pipe.multiply<n>(d, fragments[k], b_at + 2 * k);
    else if (form == 1) pipe.multiply<n>(d, a_at + 2 * k, b_at + 2 * k);
    else pipe.multiply_transposed<n>(d, fragments[k], b_transposed + 128 * k);
  }
  pipe.commit();
  WAIT;
  for (u32 j = 0; j < n / 8; ++j)
    for (u32 i = 0; i < 4; ++i) out[(row + 8 * (i >> 1)) * n + 8 * j + 2 * p + (i & 1)] = d[4 * j + i];
  pipe.wait<0>();
}
NINFERC_KERNEL(wgmma64, 128, 1)(const u16* a, const u32x4* a_tile, const u32x4* b_tile, f32* out, u32 form) {
  product<64>(a, a_tile, b_tile, out, form);
}
NINFERC_KERNEL(wgmma128, 128, 1)(const u16* a, const u32x4* a_tile, const u32x4* b_tile, f32* out, u32 form) {
  product<128>(a, a_tile, b_tile, out, form);
}
"""


def swizzled(tile: np.ndarray) -> np.ndarray:
    """[rows, 64] uint16, 128 bytes a row: 16-byte chunk c of row r moves to chunk c ^ (r % 8)."""
    rows = np.arange(tile.shape[0])[:, None]
    result = np.empty((tile.shape[0], 8, 8), np.uint16)
    result[rows, np.arange(8)[None] ^ rows % 8] = tile.reshape(-1, 8, 8)
    return result


@pytest.mark.parametrize("form", [0, 1, 2])
@pytest.mark.parametrize("n", [64, 128])
def test_warpgroup_products(n: int, form: int) -> None:
    rng = np.random.default_rng(form)
    a, b = to_bf16(rng.standard_normal((64, 64))), to_bf16(rng.standard_normal((n, 64)))
    expected = from_bf16(a).astype(np.float64) @ from_bf16(b).astype(np.float64).T
    panels = np.concatenate([swizzled(b[i : i + 64].T) for i in range(0, n, 64)])
    args = [a, swizzled(a), panels if form == 2 else swizzled(b)]

    def run(wait: str, seed: int) -> np.ndarray:
        kernel = compile_kernel(WGMMA.replace("WAIT", wait), name=f"wgmma{n}")
        out = np.full((64, n), np.nan, np.float32)
        launch(kernel, 1, 128, [*args, out, form], smem_bytes=8192 + 128 * n, schedule_seed=seed)
        return out

    for seed in (0, 1, 2):
        np.testing.assert_allclose(run("pipe.wait<0>()", seed), expected, rtol=0, atol=3e-5)
    assert any(not np.allclose(run("", seed), expected, rtol=0, atol=3e-5) for seed in (0, 1, 2))
