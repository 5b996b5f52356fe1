"""The emulator itself: it must run correct kernels right and see planted faults."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator import emulator
from tests.emulator.emulator import compile_kernel, launch

pytestmark = pytest.mark.skipif(emulator.missing_reason() is not None, reason=str(emulator.missing_reason()))
SEEDS = range(8)


def bf16_bits(values: np.ndarray) -> np.ndarray:
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


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
@pytest.mark.parametrize("kind", ["bf16", "f16"])
def test_mma_and_ldmatrix_match_numpy(kind: str, seed: int) -> None:
    kernel = compile_kernel(MMA.replace("KIND", kind))
    rng = np.random.default_rng(seed)
    k = 64
    a, b = rng.standard_normal((16, k)).astype(np.float32), rng.standard_normal((8, k)).astype(np.float32)
    if kind == "bf16":
        a_bits, b_bits = bf16_bits(a), bf16_bits(b)
        a, b = bf16_values(a_bits), bf16_values(b_bits)
    else:
        a_bits, b_bits = a.astype(np.float16).view(np.uint16), b.astype(np.float16).view(np.uint16)
        a, b = a_bits.view(np.float16), b_bits.view(np.float16)
    out = np.full((16, 8), np.nan, np.float32)
    launch(kernel, 1, 32, [a_bits, b_bits, out, k], schedule_seed=seed)
    np.testing.assert_allclose(out, a.astype(np.float64) @ b.astype(np.float64).T, rtol=0, atol=2e-5)
