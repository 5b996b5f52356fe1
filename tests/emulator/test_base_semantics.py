"""The base headers' emulated bodies against independent definitions."""

from __future__ import annotations

import numpy as np
import pytest

from tests.emulator import emulator
from tests.emulator.emulator import compile_kernel, launch
from tests.emulator.harness import from_bf16, poisoned, to_bf16, under_schedules

pytestmark = pytest.mark.skipif(emulator.missing_reason() is not None, reason=str(emulator.missing_reason()))

INCLUDES = "".join(f"#include <ninferc/base/{name}.cuh>\n" for name in ("types", "vec", "warp", "math", "grid"))
EACH = INCLUDES + """
using namespace ninferc;
NINFERC_KERNEL(each, 256, 1)(const IN* in, OUT* out, u32 n) {
  for (u32 i = blockIdx.x * 256 + threadIdx.x; i < n; i += gridDim.x * 256) out[i] = EXPRESSION(in[i]);
}
"""


def each(expression: str, values: np.ndarray, into: str, out: np.ndarray, arch: int = 900) -> np.ndarray:
    names = {"float32": "f32", "uint32": "u32", "uint16": "u16", "uint8": "u8", "uint64": "u64"}
    source = EACH.replace("IN*", names[str(values.dtype)] + "*").replace("OUT*", into + "*")
    kernel = compile_kernel(source.replace("EXPRESSION(in[i])", expression.replace("$", "in[i]")), arch=arch)
    launch(kernel, 4, 256, [values, out, values.size])
    return out


def interesting_floats() -> np.ndarray:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, 60000, dtype=np.uint64).astype(np.uint32)
    halves = np.arange(65536, dtype=np.uint32) << 16  # every bf16, and the ties between them
    near = [halves, halves | 0x8000, halves | 0x7FFF, halves | 0x8001]
    small = (rng.standard_normal(20000) * 10.0 ** rng.uniform(-8, 5, 20000)).astype(np.float32).view(np.uint32)
    f16 = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    return np.concatenate([bits, *near, small, f16, f16 + np.uint32(0x1000), f16 + np.uint32(0xFFF)]).view(np.float32)


def test_f32_to_bf16() -> None:
    values = interesting_floats()
    expected = to_bf16(values)
    np.testing.assert_array_equal(each("f32_to_bf16($).bits", values, "u16", poisoned(values.size, np.uint16)), expected)
    packed = each("pack_bf16x2($, -$)", values, "u32", poisoned(values.size, np.uint32))
    np.testing.assert_array_equal(packed & 0xFFFF, expected)
    nan = np.isnan(values)
    np.testing.assert_array_equal((packed >> 16)[~nan], expected[~nan] ^ 0x8000)


def test_f32_to_f16() -> None:
    values = interesting_floats()
    with np.errstate(over="ignore"):
        expected = np.where(np.isnan(values), 0x7FFF, values.astype(np.float16).view(np.uint16))
    np.testing.assert_array_equal(each("f32_to_f16($).bits", values, "u16", poisoned(values.size, np.uint16)), expected)


def test_widening_is_exact() -> None:
    codes = np.arange(65536, dtype=np.uint16)
    wide = each("bf16_to_f32(bf16{$})", codes, "f32", poisoned(65536, "f32"))
    np.testing.assert_array_equal(wide.view(np.uint32), from_bf16(codes).view(np.uint32))
    wide = each("f16_to_f32(f16{$})", codes, "f32", poisoned(65536, "f32"))
    np.testing.assert_array_equal(wide, codes.view(np.float16).astype(np.float32))


def e4m3_table() -> np.ndarray:
    """FP8 E4M3 by its definition (OCP 8-bit floating point, revision 1.0): bias 7, no infinity, S.1111.111 is NaN."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    value = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * 2.0 ** (exponent - 7.0))
    value = np.where(code & 127 == 127, np.nan, value)
    return np.where(code & 128, -value, value).astype(np.float32)


def test_e4m3() -> None:
    codes, table = np.arange(256, dtype=np.uint8), e4m3_table()
    np.testing.assert_array_equal(each("e4m3_to_f32($)", codes, "f32", poisoned(256, "f32")), table)
    np.testing.assert_array_equal(each("e4m3_scale_to_f32($)", codes[:127], "f32", poisoned(127, "f32")), table[:127])
    pairs = np.random.default_rng(0).integers(0, 65536, 4000).astype(np.uint16)
    halves = each("e4m3x2_to_f16x2($)", pairs, "u32", poisoned(4000, np.uint32)).view(np.float16).reshape(-1, 2)
    np.testing.assert_array_equal(halves, np.stack([table[pairs & 255], table[pairs >> 8]], 1))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("operation", ["hfma2", "hadd2", "hmul2", "hsub2"])
def test_packed_arithmetic_rounds_once(kind: str, operation: str) -> None:
    rng = np.random.default_rng(1)
    n = 20000
    # Operands whose exponents lie close enough for the long double reference to be exact.
    parts = [(rng.standard_normal(2 * n) * 2.0 ** rng.integers(-6, 7, 2 * n)) for _ in range(3)]
    if kind == "f16":
        bits = [p.astype(np.float16).view(np.uint16) for p in parts]
        a, b, c = (v.view(np.float16).astype(np.longdouble) for v in bits)
    else:
        bits = [to_bf16(p) for p in parts]
        a, b, c = (from_bf16(v).astype(np.longdouble) for v in bits)
    exact = {"hfma2": a * b + c, "hadd2": a + b, "hmul2": a * b, "hsub2": a - b}[operation]
    assert (exact.astype(np.float64) == exact).all()
    expected = exact.astype(np.float64).astype(np.float16).view(np.uint16) if kind == "f16" else \
        to_bf16(exact.astype(np.float64))
    third = ", c[i]" if operation == "hfma2" else ""
    kernel = compile_kernel(INCLUDES + f"""
using namespace ninferc;
NINFERC_KERNEL(packed, 256, 1)(const u32* a, const u32* b, const u32* c, u32* out, u32 n) {{
  for (u32 i = threadIdx.x; i < n; i += 256) out[i] = {operation}_{kind}(a[i], b[i]{third});
}}""")
    out = poisoned(n, np.uint32)
    launch(kernel, 1, 256, [*(v.view(np.uint32) for v in bits), out, n])
    zero = expected & 0x7FFF == 0
    np.testing.assert_array_equal(np.where(zero, 0, out.view(np.uint16)), np.where(zero, 0, expected))


def test_bit_functions() -> None:
    rng = np.random.default_rng(2)
    words = rng.integers(0, 2**32, (3, 500), dtype=np.uint64).astype(np.uint32)
    kernel = compile_kernel(INCLUDES + """
using namespace ninferc;
NINFERC_KERNEL(bits, 64, 1)(const u32* a, const u32* b, const u32* c, u32* out, u32 n) {
  for (u32 i = threadIdx.x; i < n; i += 64) {
    out[i] = prmt(a[i], b[i], c[i]);
    out[n + i] = lop3<0xca>(a[i], b[i], c[i]);
    out[2 * n + i] = funnel_right(a[i], b[i], c[i]);
    out[3 * n + i] = funnel_left(a[i], b[i], c[i]);
  }
}""")
    out = poisoned((4, 500), np.uint32)
    launch(kernel, 1, 64, [*words, out, 500])
    a, b, c = words
    stream = np.stack([a, b], 1).view(np.uint8)
    for i in range(500):
        expected = 0
        for byte in range(4):
            nibble = int(c[i]) >> 4 * byte & 15
            value = int(stream[i, nibble & 7])
            value = (0xFF if value & 0x80 else 0) if nibble & 8 else value
            expected |= value << 8 * byte
        assert out[0, i] == expected
    np.testing.assert_array_equal(out[1], (a & b) | (~a & c))  # 0xca selects b where a is set, else c
    wide = (b.astype(object) << 32) | a.astype(object)
    shift = c & 31
    np.testing.assert_array_equal(out[2], [(w >> int(s)) & 0xFFFFFFFF for w, s in zip(wide, shift, strict=True)])
    np.testing.assert_array_equal(out[3], [((w << int(s)) >> 32) & 0xFFFFFFFF for w, s in zip(wide, shift, strict=True)])


def test_warp_functions() -> None:
    kernel = compile_kernel(INCLUDES + """
using namespace ninferc;
NINFERC_KERNEL(warp, 128, 1)(const f32* in, f32* sums, u32* words, u64* wide) {
  __shared__ f32 scratch[4];
  const u32 t = threadIdx.x;
  const f32 v = in[t];
  sums[t] = warp_sum(v);
  sums[128 + t] = warp_max<8>(v);
  sums[256 + t] = block_sum<128>(v, scratch);
  sums[384 + t] = block_max<128>(v, scratch);
  words[t] = shfl(t, 5);
  words[128 + t] = shfl(t, 5, 8);
  words[256 + t] = shfl_up(t, 3, 16);
  words[384 + t] = shfl_down(t, 3, 16);
  words[512 + t] = shfl_xor(t, 9);
  words[640 + t] = warp_ballot(t % 3 == 0);
  words[768 + t] = elect_one();
  words[896 + t] = __match_any_sync(full_mask, t % 5);
  words[1024 + t] = __syncthreads_count(t % 3 == 0);
  words[1152 + t] = t % 32 < 16 ? warp_ballot(t % 2, 0xffff) : warp_ballot(t % 4 == 0, 0xffff0000);
  wide[t] = shfl((u64(t) << 40) | t, 31);
}""")
    values = np.random.default_rng(3).standard_normal(128).astype(np.float32)

    def run(seed: int) -> list[np.ndarray]:
        outs = [poisoned((4, 128), "f32"), poisoned((10, 128), np.uint32), poisoned(128, np.uint64)]
        launch(kernel, 1, 128, [values, *outs], schedule_seed=seed)
        return outs

    sums, words, wide = under_schedules(run, range(6))
    t = np.arange(128)
    warps = values.reshape(4, 32).astype(np.float64)
    np.testing.assert_allclose(sums[0], np.repeat(warps.sum(1), 32), atol=1e-5)
    np.testing.assert_array_equal(sums[1], np.repeat(values.reshape(16, 8).max(1), 8))
    np.testing.assert_allclose(sums[2], np.full(128, warps.sum()), atol=1e-5)
    np.testing.assert_array_equal(sums[3], np.full(128, values.max()))
    np.testing.assert_array_equal(words[0], t // 32 * 32 + 5)
    np.testing.assert_array_equal(words[1], t // 8 * 8 + 5)
    np.testing.assert_array_equal(words[2], np.where(t % 16 >= 3, t - 3, t))
    np.testing.assert_array_equal(words[3], np.where(t % 16 < 13, t + 3, t))
    np.testing.assert_array_equal(words[4], t ^ 9)
    for warp in range(4):
        lanes = np.arange(32) + 32 * warp
        ballot = sum(1 << i for i in range(32) if lanes[i] % 3 == 0)
        assert (words[5, lanes] == ballot).all()
        assert words[6, lanes].sum() == 1
        for i in range(32):
            assert words[7, lanes[i]] == sum(1 << j for j in range(32) if lanes[j] % 5 == lanes[i] % 5)
            part = range(16) if i < 16 else range(16, 32)
            wanted = [j for j in part if (lanes[j] % 2 if i < 16 else lanes[j] % 4 == 0)]
            assert words[9, lanes[i]] == sum(1 << j for j in wanted)
    assert (words[8] == 43).all()
    last = (t // 32 * 32 + 31).astype(np.uint64)
    np.testing.assert_array_equal(wide, (last << np.uint64(40)) | last)


def test_fast_functions() -> None:
    values = np.concatenate([np.linspace(-100, 100, 4001), [np.inf, -np.inf]]).astype(np.float32)
    wide = values.astype(np.float64)
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        sigmoid = 1 / (1 + np.exp(-wide))
        np.testing.assert_allclose(each("sigmoid_fast($)", values, "f32", poisoned(values.size, "f32")), sigmoid,
                                   rtol=1e-5, atol=1e-37)  # subnormal results become zero
        finite = values[:-2]
        np.testing.assert_allclose(each("silu_fast($)", finite, "f32", poisoned(finite.size, "f32")),
                                   (wide * sigmoid)[:-2], rtol=1e-5, atol=1e-35)
        np.testing.assert_allclose(each("exp_fast($)", finite, "f32", poisoned(finite.size, "f32")),
                                   np.exp(wide[:-2]).astype(np.float32), rtol=2e-5)


def test_loads_and_stores() -> None:
    kernel = compile_kernel(INCLUDES + """
using namespace ninferc;
template <class T> NINFERC_DEVICE void move(u8* out, const u8* in, u32 kind) {
  NINFERC_DYNAMIC_SMEM(smem);
  T v = kind == 0 ? ld_global<T>(in) : kind == 1 ? ld_nc<T>(in) : kind == 2 ? ld_stream<T>(in)
      : kind == 3 ? ld_cg<T>(in) : ld_volatile<T>(in);
  const u32 slot = shared_address(smem) + 16 * threadIdx.x;
  st_shared(slot, v);
  v = ld_shared<T>(slot);
  if (kind % 3 == 0) st_global(out, v); else if (kind % 3 == 1) st_stream(out, v); else st_volatile(out, v);
}
NINFERC_KERNEL(moves, 32, 1)(u8* out, const u8* in) {
  const u32 t = threadIdx.x, offset = 32 * t;
  if (t >= 25) return;
  const u32 size = t / 5, kind = t % 5;
  if (size == 0) move<u8>(out + offset + 3, in + offset + 3, kind);
  else if (size == 1) move<u16>(out + offset + 6, in + offset + 6, kind);
  else if (size == 2) move<f32>(out + offset + 4, in + offset + 4, kind);
  else if (size == 3) move<u32x2>(out + offset + 8, in + offset + 8, kind);
  else move<u32x4>(out + offset + 16, in + offset + 16, kind);
}""")
    data = np.random.default_rng(4).integers(0, 256, 800).astype(np.uint8)
    out = np.zeros(800, np.uint8)
    launch(kernel, 1, 32, [out, data], smem_bytes=512)
    expected = np.zeros((25, 32), np.uint8)
    for t in range(25):
        at, size = [(3, 1), (6, 2), (4, 4), (8, 8), (16, 16)][t // 5]
        expected[t, at:at + size] = data.reshape(25, 32)[t, at:at + size]
    np.testing.assert_array_equal(out.reshape(25, 32), expected)


def test_atomics_across_blocks() -> None:
    kernel = compile_kernel(INCLUDES + """
using namespace ninferc;
NINFERC_KERNEL(atomics, 64, 1)(u32* words, u64* longs) {
  const u32 i = blockIdx.x * 64 + threadIdx.x;
  atomic_add(words, i);
  atomic_max(words + 1, i);
  atomic_min(words + 2, i);
  atomic_or(words + 3, 1u << i % 20);
  atomic_add(longs, u64(i) << 20);
  u32 old = words[4];
  for (u32 seen = ~old; seen != old;) { seen = old; old = atomic_cas(words + 4, seen, seen + 2); }
}""")
    words, longs = np.array([0, 0, 2**32 - 1, 0, 0], np.uint32), np.zeros(1, np.uint64)
    launch(kernel, 4, 64, [words, longs], schedule_seed=1, concurrency="grid")
    total = 255 * 256 // 2
    np.testing.assert_array_equal(words, [total, 255, 0, 2**20 - 1, 512])
    assert longs[0] == total << 20
