"""Every base primitive compiles under NVRTC for every supported architecture (no GPU needed)."""

from __future__ import annotations

import re

import pytest
from cuda.bindings import nvrtc

from tests.emulator import toolchain

ARCHITECTURES = ["sm_75", "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"]

# One kernel per header, so that an error names its header.
PROBES = {
    "types": """
#include <ninferc/base/types.cuh>
using namespace ninferc;
NINFERC_KERNEL(probe, 128, 1)(u32* out, const f32* in, const u32* bits) {
  const u32 i = threadIdx.x;
  u32 s = 0;
  s += prmt(bits[i], bits[i + 1], 0x5140) + prmt(bits[i], bits[i + 1], bits[i + 2]);
  s ^= lop3<0xea>(bits[i], bits[i + 1], bits[i + 2]);
  s ^= funnel_left(bits[0], bits[1], 7) + funnel_right(bits[2], bits[3], bits[4]);
  s ^= f32_to_bf16(in[i]).bits ^ f32_to_f16(in[i]).bits ^ pack_bf16x2(in[i], in[i + 1]) ^ pack_f16x2(in[i], in[i + 1]);
  s ^= hfma2_f16(bits[i], bits[i + 1], bits[i + 2]) ^ hadd2_f16(s, bits[i]) ^ hmul2_f16(s, bits[i]) ^ hsub2_f16(s, bits[3]);
  s ^= hfma2_bf16(bits[i], bits[i + 1], s) ^ hadd2_bf16(s, bits[i]) ^ hmul2_bf16(s, bits[i]) ^ hsub2_bf16(s, bits[4]);
  s ^= e4m3x2_to_f16x2(bits[i]);
  const f32 f = bf16_to_f32(bf16{u16(bits[i])}) + f16_to_f32(f16{u16(bits[i])}) + e4m3_to_f32(u8(bits[i])) +
                e4m3_scale_to_f32(bits[i] & 127) + unpack_bf16x2(s).y + unpack_f16x2(s).x + round_bf16(in[i]);
  out[i] = s + float_bits(f) + ceil_div(s, 3u) + round_up(s, 8u);
}""",
    "vec": """
#include <ninferc/base/vec.cuh>
using namespace ninferc;
template <class T> NINFERC_DEVICE void copy(u8* out, const u8* in) {
  st_global(out, ld_global<T>(in));
  st_stream(out + 16, ld_nc<T>(in + 16));
  st_volatile(out + 32, ld_stream<T>(in + 32));
  st_global(out + 48, ld_cg<T>(in + 48));
  st_global(out + 64, ld_volatile<T>(in + 64));
}
NINFERC_KERNEL(probe, 128, 1)(u8* out, const u8* in) {
  NINFERC_DYNAMIC_SMEM(smem);
  __shared__ __align__(16) u32 words[128];
  const u32 base = shared_address(smem);
  st_shared(base, u32x4{1, 2, 3, 4});
  st_shared(words, ld_shared<u32x2>(base + 8));
  st_global(out, ld_shared<u8>(words));
  copy<u8>(out, in);
  copy<bf16>(out, in);
  copy<f32>(out, in);
  copy<u32x2>(out, in);
  copy<f32x4>(out, in);
}""",
    "warp": """
#include <ninferc/base/warp.cuh>
using namespace ninferc;
NINFERC_KERNEL(probe, 128, 1)(f32* out, const f32* in) {
  __shared__ f32 scratch[4];
  f32 v = in[threadIdx.x];
  v += shfl(v, 3) + shfl_xor(v, 1, 8) + shfl_down(v, 2) + shfl_up(v, 1);
  v += f32(shfl(u64(threadIdx.x), 0));
  v += warp_sum(v) + warp_max<8>(v) + f32(warp_sum(u32(v)));
  v += block_sum<128>(v, scratch) + block_max<128>(v, scratch);
  if (warp_ballot(v > 0) != 0 && warp_any(v > 1) && warp_all(v > -1)) v += 1;
  if (warp_id_uniform() == 0) {
    if (elect_one()) v += 2;
    named_barrier_sync(1, 64);
  } else if (warp_id() == 1) {
    named_barrier_arrive(1, 64);
  }
  sync_warp();
  sync_block();
  out[threadIdx.x] = v + f32(lane_id());
}""",
    "mma": """
#include <ninferc/base/mma.cuh>
using namespace ninferc;
NINFERC_KERNEL(probe, 32, 1)(f32* out) {
  NINFERC_DYNAMIC_SMEM(smem);
  f32 d[4] = {0, 0, 0, 0};
  u32 a[4], b[2], c;
  ldmatrix_x4(a, smem + threadIdx.x * 16);
  ldmatrix_x4_trans(a, smem + threadIdx.x * 16);
  ldmatrix_x2(b, smem + threadIdx.x * 16);
  ldmatrix_x2_trans(b, smem + threadIdx.x * 16);
  ldmatrix_x1(c, smem + threadIdx.x * 16);
  ldmatrix_x1_trans(c, smem + threadIdx.x * 16);
  mma_m16n8k8_f16(d, a[0], a[1], c);
  mma_m16n8k16_f16(d, a, b);
  mma_m16n8k16_bf16(d, a, b);
#if NINFERC_HAS_BF16_MMA
  a[0] = f32_to_tf32(d[0]);
  mma_m16n8k8_tf32(d, a, b);
#endif
#if NINFERC_ARCH >= 900
  stmatrix_x4(smem + threadIdx.x * 16, a);
  stmatrix_x4_trans(smem + threadIdx.x * 16, a);
#endif
  out[threadIdx.x] = d[0] + d[1] + d[2] + d[3];
}""",
    "async": """
#include <ninferc/base/async.cuh>
using namespace ninferc;
NINFERC_KERNEL(probe, 32, 1)(u32* out, const u8* in) {
  NINFERC_DYNAMIC_SMEM(smem);
  __shared__ u64 barrier;
  cp_async_16(smem, in);
  cp_async_16_zfill(smem + 16, in + 16, threadIdx.x > 3);
  cp_async_small<4>(smem + 32, in);
  cp_async_small<8>(smem + 40, in);
  cp_async_commit();
  cp_async_wait<1>();
  cp_async_wait<0>();
#if NINFERC_HAS_BULK_COPY
  if (threadIdx.x == 0) {
    mbarrier_init(&barrier, 1);
    fence_mbarrier_init();
    fence_proxy_async_shared();
    mbarrier_arrive_expect(&barrier, 128);
    bulk_copy(smem, in, 64, &barrier);
    bulk_copy_stream(smem + 64, in, 64, &barrier);
    mbarrier_wait(&barrier, 0);
    mbarrier_arrive(&barrier);
    if (mbarrier_try_wait(&barrier, 1)) out[1] = 1;
    mbarrier_invalidate(&barrier);
  }
#endif
  out[0] = smem[threadIdx.x];
}""",
    "grid": """
#include <ninferc/base/grid.cuh>
using namespace ninferc;
NINFERC_KERNEL(probe, 32, 1)(u32* words, u64* longs, f32* floats) {
  grid_launch_dependents();
  grid_dependency_wait();
  u32 s = atomic_add(words, 1u) + atomic_max(words, 2u) + atomic_min(words, 3u) + atomic_or(words, 4u) +
          atomic_exchange(words, 5u) + atomic_cas(words, 5u, 6u) + atomic_add_acq_rel_gpu(words, 1u) +
          atomic_add_acq_rel_sys(words, 1u);
  u64 l = atomic_add(longs, u64(1)) + atomic_exchange(longs, u64(2)) + atomic_max(longs, u64(3));
  atomic_add(floats, 1.0f);
  s += ld_acquire_gpu<u32>(words) + ld_acquire_sys<u32>(words) + ld_relaxed_gpu<u32>(words) + ld_relaxed_sys<u32>(words);
  l += ld_acquire_gpu<u64>(longs) + ld_acquire_sys<u64>(longs) + ld_relaxed_sys<u64x2>(longs).y + global_timer();
  st_release_gpu(words, s);
  st_release_sys(longs, l);
  st_relaxed_gpu(words, s);
  st_relaxed_sys(longs, u64x2{l, l});
  fence_gpu();
  fence_sys();
  nano_sleep(100);
  prefetch_l2(words);
  prefetch_l2_bulk(words, 1024);
}""",
    "wgmma": """
#include <ninferc/base/wgmma.cuh>
using namespace ninferc;
template <u32 n> NINFERC_DEVICE void products(f32* out, u32 base) {
#if NINFERC_HAS_WGMMA
  WgmmaPipe pipe;
  f32 d[n / 2] = {};
  const u32 a[4] = {1, 2, 3, 4};
  pipe.fence();
  pipe.multiply<n>(d, a, wgmma_descriptor(base));
  pipe.multiply<n>(d, wgmma_descriptor(base), wgmma_descriptor(base + 8192));
  if constexpr (n != 176) pipe.multiply_transposed<n>(d, a, wgmma_descriptor_transposed(base + 8192, 8192));
  pipe.commit();
  pipe.wait<0>();
  for (u32 i = 0; i < n / 2; ++i) out[i * 128 + threadIdx.x] = d[i];
#endif
}
#define PROBE(n) \
  NINFERC_KERNEL(probe##n, 128, 1)(f32* out) { \
    NINFERC_DYNAMIC_SMEM(smem); \
    products<n>(out, shared_address(smem)); \
  }
PROBE(64)
PROBE(128)
PROBE(176)
PROBE(256)
NINFERC_KERNEL(registers, 256, 1)(f32* out) {
#if NINFERC_HAS_WGMMA
  if (threadIdx.x < 128) lower_registers<40>(); else raise_registers<232>();
#endif
  out[threadIdx.x] = 1;
}""",
    "math": """
#include <ninferc/base/math.cuh>
using namespace ninferc;
NINFERC_KERNEL(probe, 32, 1)(f32* x) {
  const f32 v = x[threadIdx.x];
  x[threadIdx.x] = exp2_fast(v) + log2_fast(v) + rcp_fast(v) + rsqrt_fast(v) + exp_fast(v) + sigmoid_fast(v) + silu_fast(v);
}""",
}


def compile_for(source: str, architecture: str) -> str:
    """Compiles to a cubin with the project's options; returns the log."""
    error, program = nvrtc.nvrtcCreateProgram(source.encode(), b"probe.cu", 0, [], [])
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
    options = [f"--gpu-architecture={architecture}", "-default-device", "--std=c++20", "-I",
               str(toolchain.TEMPLATE_INCLUDE), "--ptxas-options=-v", "-w"]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = bytearray(size)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    text = log.decode(errors="replace").rstrip("\0\n ")
    assert result == nvrtc.nvrtcResult.NVRTC_SUCCESS, text
    return text


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("header", PROBES)
def test_header_compiles(header: str, architecture: str) -> None:
    log = compile_for(PROBES[header], architecture)
    assert not re.search(r"[1-9]\d* bytes (stack frame|spill)", log), log
