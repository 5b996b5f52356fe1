"""Time decode products on the GPU at hand: every production shape at 1 … 64 columns, for several tiles.

    python -m benchmarks.kernels.linear_columns [--variants 6] [--columns 1,2,4,8] [--only REGEX] [--plain] [-o FILE.json]

Each measurement is a graph of launches of one kernel over different copies of its weights, together larger than three
times the L2 cache, joined by programmatic edges where the device has them (``--plain``: ordinary edges). GB/s counts the
bytes of weights, activations and outputs; the roofline is a read kernel over 4 GiB, measured in the same run. All tiles of
a product must give the same bits; a difference is reported and fails the run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from compiler.emit.cache import Job, compile_all
from compiler.emit.nvrtc import Cubin
from compiler.emit.render import render
from compiler.kernels.linear_columns import Product, Tile, candidates, fits, spec_of, weight_bytes
from compiler.kernels.spec import DeviceCaps, KernelSpec
from compiler.program.model import Arg, KernelImage
from runtime.cuda.device import Device
from runtime.cuda.driver import api, call
from runtime.cuda.modules import Modules, PackedArgs

FP8 = "FP8_E4M3FN_ROW_BF16S"
# model, product, format, rows, K, segments, epilogue; a product called "norm …" has the norm in its prologue
SHAPES = [
    ("qwen3.8-27b/nvfp4", "gate_up", "NVFP4", 34816, 5120, 1, "swiglu"),
    ("qwen3.8-27b/nvfp4", "norm gate_up", "NVFP4", 34816, 5120, 1, "swiglu"),
    ("qwen3.8-27b/nvfp4", "norm gdn_in", FP8, 16384, 5120, 1, "store"),
    ("qwen3.8-27b/nvfp4", "down", "NVFP4", 5120, 17408, 2, "residual"),
    ("qwen3.8-27b/nvfp4", "gdn_in", FP8, 16384, 5120, 1, "store"),
    ("qwen3.8-27b/nvfp4", "attention_in", FP8, 14336, 5120, 1, "store"),
    ("qwen3.8-27b/nvfp4", "out", FP8, 5120, 6144, 2, "residual"),
    ("qwen3.8-27b/nvfp4", "head", FP8, 248320, 5120, 1, "store"),
    ("qwen3.6-27b/groupwise-int", "gate_up", "Q4G64_F16S", 34816, 5120, 1, "swiglu"),
    ("qwen3.6-27b/groupwise-int", "down", "Q5G64_F16S", 5120, 17408, 2, "residual"),
    ("qwen3.6-27b/groupwise-int", "value_z", "Q5G64_F16S", 12288, 5120, 1, "store"),
    ("qwen3.6-27b/groupwise-int", "query_key", "Q4G64_F16S", 7168, 5120, 1, "store"),
    ("qwen3.6-27b/groupwise-int", "out", "Q5G64_F16S", 5120, 6144, 2, "residual"),
    ("qwen3.6-27b/groupwise-int", "head", "Q6G64_F16S", 248320, 5120, 1, "store"),
    ("qwen3.8-27b/groupwise-int", "head", "W8G32_F16S", 248320, 5120, 1, "store"),
    ("qwen3.8-27b/nvfp4-split", "attention_in", "BF16", 14336, 5120, 1, "store"),
]
POOL = 4 << 30  # bytes of codes; the head of 1.3 GB has three copies in it
SCALES = 1 << 30
READ_KERNEL = """
#include <ninferc/base/vec.cuh>
using namespace ninferc;
NINFERC_KERNEL(read_roofline, 512, 2)(const u32x4* data, u32 pieces, u32* sink) {
  u32 sum = 0;
  const u32 step = gridDim.x * 512;
  for (u32 i = blockIdx.x * 512 + threadIdx.x; i < pieces; i += 8 * step) {
    u32x4 v[8];
#pragma unroll
    for (u32 j = 0; j < 8; ++j) v[j] = i + j * step < pieces ? ld_stream<u32x4>(data + i + j * step) : u32x4{0, 0, 0, 0};
#pragma unroll
    for (u32 j = 0; j < 8; ++j) sum ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (sum == 0x12345678u) st_global(sink, sum);
}
"""


@dataclass(frozen=True)
class Case:
    model: str
    name: str
    product: Product
    tile: Tile
    spec: KernelSpec
    built_in: bool


def variants(product: Product, caps: DeviceCaps, count: int, around: bool) -> Iterator[Tile]:
    """The built-in choice, then unlike tiles in order of rank, ``count`` in all; ``around``: also the choice's two other
    release points and other numbers of stages."""
    tiles = candidates(product, caps)
    first = next(tiles)
    yield first
    if around:
        for other in ("early", "late", "end"):
            if other != first.release:
                yield replace(first, release=other)
        for stages in (first.stages - 1, first.stages + 2):
            if fits(product, tile := replace(first, stages=stages), caps):
                yield tile
    seen = {_kind(first)}
    for tile in tiles:
        if len(seen) >= count:
            return
        if _kind(tile) not in seen:
            seen.add(_kind(tile))
            yield tile


def _kind(tile: Tile) -> tuple[Any, ...]:
    return tile.mtiles, tile.warps_r * tile.warps_k, tile.resident, tile.blocks_per_sm, tile.split, tile.clustered, tile.mixed


class Bench:
    """Device memory shared by all cases: codes, scales, activations, outputs."""

    def __init__(self, device: Device, programmatic: bool) -> None:
        self.device, self.programmatic = device, programmatic
        rng = np.random.default_rng(1)
        self.pools = {"bf16": device.allocate(POOL, "codes"), "codes": device.allocate(POOL, "codes")}
        self.scales = device.allocate(SCALES, "scales")
        self.small = device.allocate(1 << 26, "activations")
        codes = rng.integers(0, 256, 1 << 24, dtype=np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0x3F  # no e4m3 NaN
        codes[codes == 0x80] = 0x81  # no illegal W8 code
        words = (rng.standard_normal(1 << 23) / 16).astype(np.float32).view(np.uint32) >> 16
        self._fill(self.pools["codes"], POOL, codes)
        self._fill(self.pools["bf16"], POOL, words.astype(np.uint16))
        # words that are ordinary scales as binary16, as bf16 and as pairs of e4m3
        self._fill(self.scales, SCALES, (0x2C00 | rng.integers(0, 0x400, 1 << 20) & 0x33F).astype(np.uint16))
        x = (rng.standard_normal(64 * 17408)).astype(np.float32).view(np.uint32) >> 16
        self.x = self.small
        device.upload(self.x, x.astype(np.uint16))
        self.residual = self.small + (4 << 20)
        device.upload(self.residual, x.astype(np.uint16)[: 64 * 5120])
        self.divisor = self.small + (6 << 20)
        device.upload(self.divisor, np.array([1000.0], np.float32))
        self.y = self.small + (8 << 20)
        self.partials, self.arrivals = device.allocate(1 << 26, "partial sums"), device.allocate(1 << 20, "counters")
        self.roofline = 0.0

    def _fill(self, address: int, nbytes: int, block: Any) -> None:
        self.device.upload(address, block)
        done = block.nbytes
        while done < nbytes:
            size = min(done, nbytes - done)
            call(api().cuMemcpyDtoDAsync(address + done, address, size, self.device.stream), "fill")
            done += size
        self.device.synchronize()

    def measure_roofline(self) -> None:
        cubin = compile_all([Job("read_roofline", READ_KERNEL, self.device.caps().arch)])["read_roofline"]
        spec = KernelSpec("read_roofline", "", {}, (2 * self.device.caps().sms, 1, 1), 512, 0, ())
        args = (Arg("data", "pointer", "absolute", self.pools["codes"]), Arg("pieces", "int", number=POOL // 16),
                Arg("sink", "pointer", "absolute", self.y))  # fmt: skip
        seconds = self.time(spec, cubin, [PackedArgs(args, lambda arg: arg.offset)], 3)[0]
        self.roofline = POOL / seconds

    def arguments(self, case: Case, copies: int) -> list[PackedArgs]:
        product = case.product
        codes = weight_bytes(product)
        # one copy is at most the code plane; planes are cut from the pools at unlike places
        pool = self.pools["bf16" if product.format == "BF16" else "codes"]
        stride = min((codes + 0xFFFFF) & ~0xFFFFF, (POOL - codes) // max(1, copies - 1) & ~0xFFFFF) if copies > 1 else 0
        out = []
        for copy in range(copies):
            base = pool + copy * stride
            high = self.pools["codes"] + (POOL // 2 + copy * (stride // 4) & ~0xFF)
            scale = self.scales + (copy * (SCALES - (1 << 27)) // copies & ~0xFF)
            pointers = {"x": self.x, "w_codes": base, "w_high": high, "w_scales": scale, "w_divisor": self.divisor,
                        "residual": self.residual, "y": self.y, "norm_w": self.x, "partials": self.partials,
                        "arrivals": self.arrivals}  # fmt: skip
            numbers: dict[str, float] = {"x_stride": product.k, "residual_stride": product.outputs,
                                         "y_stride": product.outputs, **case.spec.scalars}  # fmt: skip
            args = tuple(
                Arg(name, "pointer", "absolute", pointers[name]) if name in pointers
                else Arg(name, "float" if name == "eps" else "int", number=numbers[name])
                for name in case.spec.args
            )  # fmt: skip
            out.append(PackedArgs(args, lambda arg: arg.offset))
        return out

    def time(self, spec: KernelSpec, cubin: Cubin, args: list[PackedArgs], repeats: int) -> list[float]:
        """Seconds per launch, sorted: a graph of one node per element of ``args``."""
        driver, device = api(), self.device
        modules = Modules({spec.entry: KernelImage(spec, "", cubin.image, cubin.resources)}, [device])
        graph = call(driver.cuGraphCreate(0), "graph")
        previous = None
        for packed in args:
            params = driver.CUDA_KERNEL_NODE_PARAMS()
            params.kern, params.ctx = modules.kernels[spec.entry], device.context
            params.gridDimX, params.gridDimY, params.gridDimZ = spec.grid
            params.blockDimX, params.blockDimY, params.blockDimZ = spec.block, 1, 1
            params.sharedMemBytes, params.kernelParams = spec.smem, packed.address
            node = call(driver.cuGraphAddKernelNode(graph, [], 0, params), spec.entry)
            if spec.cluster != (1, 1, 1):
                value = driver.CUkernelNodeAttrValue()
                value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = spec.cluster
                attribute = driver.CUkernelNodeAttrID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
                call(driver.cuGraphKernelNodeSetAttribute(node, attribute, value), spec.entry)
            if previous is not None:
                edge = driver.CUgraphEdgeData()
                if self.programmatic:
                    edge.from_port = driver.CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
                    edge.type = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC.value
                call(driver.cuGraphAddDependencies(graph, [previous], [node], [edge], 1), spec.entry)
            previous = node
        executable = call(driver.cuGraphInstantiate(graph, 0), spec.entry)
        begin, end = (call(driver.cuEventCreate(0), "event") for _ in range(2))
        call(driver.cuGraphLaunch(executable, device.stream), spec.entry)
        seconds = []
        for _ in range(repeats):
            call(driver.cuEventRecord(begin, device.stream), "event")
            call(driver.cuGraphLaunch(executable, device.stream), spec.entry)
            call(driver.cuEventRecord(end, device.stream), "event")
            device.synchronize()
            seconds.append(float(call(driver.cuEventElapsedTime(begin, end), "event")) / 1000 / len(args))
        driver.cuGraphExecDestroy(executable)
        driver.cuGraphDestroy(graph)
        modules.close()
        return sorted(seconds)

    def run(self, case: Case, cubin: Cubin) -> dict[str, Any]:
        product = case.product
        x_bytes, y_bytes = 2 * product.columns * product.k, 2 * product.columns * product.outputs
        total = weight_bytes(product) + x_bytes + y_bytes * (2 if product.epilogue == "residual" else 1)
        # enough launches for the ends of the graph not to matter, and for the copies to exceed the L2 cache
        most = POOL // weight_bytes(product)
        copies = max(3, min(most, 24, max(-(-(3 << 26) // weight_bytes(product)), (1500 << 20) // weight_bytes(product))))
        args = self.arguments(case, copies)
        seconds = self.time(case.spec, cubin, args, 5)
        digest = hashlib.sha256(self.device.download(self.y, y_bytes).tobytes()).hexdigest()[:16]
        median = statistics.median(seconds)
        return {"model": case.model, "product": case.name, "format": product.format, "n": product.n, "k": product.k,
                "columns": product.columns, "tile": asdict(case.tile), "built_in": case.built_in, "us": median * 1e6,
                "us_min": seconds[0] * 1e6, "us_max": seconds[-1] * 1e6, "gbytes_per_s": total / median / 1e9,
                "roofline": total / median / self.roofline, "registers": cubin.resources.registers, "digest": digest,
                "copies": copies}  # fmt: skip


def spell(tile: dict[str, Any]) -> str:
    return (f"m{tile['mtiles']} {tile['warps_r']}x{tile['warps_k']} s{tile['stages']} {'res' if tile['resident'] else 'ring'} "
            f"b{tile['blocks_per_sm']}{' split' if tile['split'] else ''}{' clustered' if tile['clustered'] else ''}"
            f"{' mixed' if tile['mixed'] else ''} "
            f"{tile['release']}")  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--variants", type=int, default=6, help="unlike tiles at 1 and 8 columns, a third at others")
    parser.add_argument("--columns", default="1,2,4,8,16,32,64")
    parser.add_argument("--only", default="", help="regular expression on 'model product format'")
    parser.add_argument("--plain", action="store_true", help="ordinary instead of programmatic edges")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    device = Device(0)
    caps = device.caps()
    cases: list[Case] = []
    for model, name, format, n, k, segments, epilogue in SHAPES:
        if not re.search(options.only, f"{model} {name} {format}"):
            continue
        for columns in map(int, options.columns.split(",")):
            product = Product(format, n, k, columns, segments, epilogue, name.startswith("norm"))
            if product.norm and columns > 8:
                continue  # the activations of so many columns are not resident
            count = options.variants if columns in (1, 8) else max(1, options.variants // 3)
            for i, tile in enumerate(variants(product, caps, count, columns == 1 and options.variants > 1)):
                spec = spec_of(product, tile, caps, 1e-6)
                spec = replace(spec, entry=f"{spec.entry}_v{i}")
                cases.append(Case(model, name, product, tile, spec, i == 0))
    sources = {case.spec.entry: render(case.spec.template, case.spec.entry, case.spec.params) for case in cases}
    cubins = compile_all(Job(entry, source, caps.arch) for entry, source in sources.items())
    print(f"# {len(cubins)} kernels compiled in {time.monotonic() - started:.1f} s", file=sys.stderr)
    bench = Bench(device, caps.programmatic_edges and not options.plain)
    bench.measure_roofline()
    print(f"# {device.info().name}: read kernel {bench.roofline / 1e12:.3f} TB/s, "
          f"{'programmatic' if bench.programmatic else 'ordinary'} edges")  # fmt: skip
    rows: list[dict[str, Any]] = []
    digests: dict[tuple[Any, ...], str] = {}
    different = 0
    for case in cases:
        row = bench.run(case, cubins[case.spec.entry])
        rows.append(row)
        key = (case.model, case.name, case.product)
        if digests.setdefault(key, row["digest"]) != row["digest"]:
            different += 1
            print(f"DIFFERENT BITS: {case.spec.entry} {spell(row['tile'])}")
    for key in digests:
        mine = [r for r, c in zip(rows, cases, strict=True) if (c.model, c.name, c.product) == key]
        best = min(mine, key=lambda r: r["us"])
        print(f"{mine[0]['model']} {mine[0]['product']} {mine[0]['format'].split('_')[0]} c{mine[0]['columns']}")
        for row in sorted(mine, key=lambda r: r["us"])[: options.variants + 4]:
            mark = "*" if row["built_in"] else ("<" if row is best else " ")
            print(f"  {mark} {row['us']:8.2f} us {row['gbytes_per_s']:7.0f} GB/s {100 * row['roofline']:5.1f}%  "
                  f"{spell(row['tile'])}  {row['registers']} registers")  # fmt: skip
    print(f"# {time.monotonic() - started:.1f} s", file=sys.stderr)
    if options.output:
        info = device.info()
        options.output.write_text(json.dumps({
            "gpu": info.name, "sms": info.sms, "l2_bytes": info.l2_bytes, "read_bytes_per_s": bench.roofline,
            "edges": "programmatic" if bench.programmatic else "ordinary", "rows": rows}, indent=1))  # fmt: skip
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
