"""Time the prefill products on the GPU at hand: every production shape at several row counts, for every tile.

    python -m benchmarks.kernels.linear_rows [--rows 128,512,1024] [--only REGEX] [--portable] [-o FILE.json]

Each measurement is a graph of launches of one kernel over different copies of its weights, together larger than three
times the L2 cache, so weights come from device memory as they do in a model. TFLOP/s counts 2·rows·n·k. ``--portable``
takes the kernels of GPUs without warpgroup products. Tiles of one family must give the same bits: a difference fails the
run. The chosen tile is marked ``*``, the best ``<``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from compiler.emit.cache import Job, compile_all
from compiler.emit.nvrtc import Cubin
from compiler.emit.render import render
from compiler.kernels.linear_rows import Tile, choose, linear_rows, tiles
from compiler.kernels.spec import KernelSpec
from compiler.program.model import Arg, KernelImage
from runtime.cuda.device import Device
from runtime.cuda.driver import api, call
from runtime.cuda.modules import Modules, PackedArgs

FP8 = "FP8_E4M3FN_ROW_BF16S"
# model, product, format, store, weight rows, K
SHAPES = [
    ("qwen3.8-27b/nvfp4", "gate_up", "NVFP4", "swiglu", 34816, 5120),
    ("qwen3.8-27b/nvfp4", "down", "NVFP4", "residual", 5120, 17408),
    ("qwen3.8-27b/nvfp4", "gdn_in", FP8, "bf16", 16384, 5120),
    ("qwen3.8-27b/nvfp4", "attention_in", FP8, "bf16", 14336, 5120),
    ("qwen3.8-27b/nvfp4", "out", FP8, "residual", 5120, 6144),
    ("qwen3.6-27b/groupwise-int", "gate_up", "Q4G64_F16S", "swiglu", 34816, 5120),
    ("qwen3.6-27b/groupwise-int", "down", "Q5G64_F16S", "residual", 5120, 17408),
    ("qwen3.6-27b/groupwise-int", "value_z", "Q5G64_F16S", "bf16", 12288, 5120),
    ("qwen3.6-27b/groupwise-int", "query_key", "Q4G64_F16S", "bf16", 4096, 5120),
    ("qwen3.6-27b/groupwise-int", "head rows", "Q6G64_F16S", "bf16", 16384, 5120),
    ("qwen3.8-27b/mtp", "down", "W8G32_F16S", "residual", 5120, 17408),
    ("qwen3.8-27b/nvfp4-split", "attention_in", "BF16", "bf16", 14336, 5120),
]
POOL = 1 << 30  # bytes of codes: three copies of the largest product
BYTES = {"BF16": 2.0, FP8: 1.0, "NVFP4": 0.5, "Q4G64_F16S": 0.5, "Q5G64_F16S": 0.5, "Q6G64_F16S": 0.5, "W8G32_F16S": 1.0}


@dataclass(frozen=True)
class Case:
    model: str
    name: str
    format: str
    store: str
    n: int
    k: int
    rows: int
    tile: Tile
    spec: KernelSpec
    chosen: bool


class Bench:
    """Device memory shared by all cases."""

    def __init__(self, device: Device) -> None:
        self.device = device
        rng = np.random.default_rng(1)
        codes = rng.integers(0, 256, 1 << 24, dtype=np.uint8)
        codes[(codes & 0x7F) == 0x7F] = 0x3F  # no e4m3 NaN
        codes[codes == 0x80] = 0x81  # no illegal W8 code
        words = (rng.standard_normal(1 << 23) / 16).astype(np.float32).view(np.uint32) >> 16
        # words that are ordinary scales as binary16, as bf16 and as pairs of e4m3
        scales = (0x2C00 | rng.integers(0, 0x400, 1 << 20) & 0x33F).astype(np.uint16)
        self.pools = {"codes": self._filled(POOL, codes), "bf16": self._filled(POOL, words.astype(np.uint16)),
                      "scales": self._filled(1 << 28, scales)}  # fmt: skip
        self.values = (rng.standard_normal(1024 * 17408) * 0.1).astype(np.float32).view(np.uint32) >> 16
        x = self.values.astype(np.uint16)
        self.x, self.residual = device.allocate(x.nbytes, "x"), device.allocate(x.nbytes, "residual")
        device.upload(self.x, x)
        device.upload(self.residual, x)
        self.y = device.allocate(1024 * 17408 * 2, "y")
        self.small = device.allocate(4096, "scalars")
        device.upload(self.small, np.array([1000.0], np.float32))

    def _filled(self, nbytes: int, block: Any) -> int:
        address = self.device.allocate(nbytes, "pool")
        self.device.upload(address, block)
        done = block.nbytes
        while done < nbytes:
            size = min(done, nbytes - done)
            call(api().cuMemcpyDtoDAsync(address + done, address, size, self.device.stream), "fill")
            done += size
        self.device.synchronize()
        return address

    def arguments(self, case: Case, copies: int) -> list[PackedArgs]:
        size = int(case.n * case.k * BYTES[case.format]) + 0xFFFF & ~0xFFFF
        out = []
        for copy in range(copies):
            pointers = {"x": self.x, "w_codes": self.pools["bf16" if case.format == "BF16" else "codes"] + copy * size,
                        "w_high": self.pools["codes"] + POOL // 2 + copy * (size // 2 & ~0xFF),
                        "w_scales": self.pools["scales"] + copy * (1 << 24), "w_divisor": self.small,
                        "residual": self.residual, "y": self.y, "rows": self.small + 256}  # fmt: skip
            outputs = case.n // 2 if case.store == "swiglu" else case.n
            numbers = {"x_stride": case.k, "residual_stride": outputs, "y_stride": outputs}
            args = tuple(
                Arg(name, "pointer", "absolute", pointers[name]) if name in pointers
                else Arg(name, "int", number=numbers[name]) for name in case.spec.args
            )  # fmt: skip
            out.append(PackedArgs(args, lambda arg: arg.offset))
        return out

    def run(self, case: Case, cubin: Cubin) -> dict[str, Any]:
        driver, device, spec = api(), self.device, case.spec
        device.upload(self.small + 256, np.array([case.rows], np.int32))
        size = case.n * case.k * BYTES[case.format]
        copies = max(1, min(int(POOL // 2 // size), 8, int(160e6 / size) + 1))
        launches = self.arguments(case, copies)
        launches = (launches * 24)[: max(copies, 12)]
        modules = Modules({spec.entry: KernelImage(spec, "", cubin.image, cubin.resources)}, [device])
        graph = call(driver.cuGraphCreate(0), "graph")
        before: list[Any] = []
        for packed in launches:
            params = driver.CUDA_KERNEL_NODE_PARAMS()
            params.kern, params.ctx = modules.kernels[spec.entry], device.context
            params.gridDimX, params.gridDimY, params.gridDimZ = spec.grid
            params.blockDimX, params.blockDimY, params.blockDimZ = spec.block, 1, 1
            params.sharedMemBytes, params.kernelParams = spec.smem, packed.address
            before = [call(driver.cuGraphAddKernelNode(graph, before, len(before), params), spec.entry)]
        executable = call(driver.cuGraphInstantiate(graph, 0), spec.entry)
        begin, end = (call(driver.cuEventCreate(0), "event") for _ in range(2))
        seconds = []
        for repeat in range(6):
            call(driver.cuEventRecord(begin, device.stream), "event")
            call(driver.cuGraphLaunch(executable, device.stream), spec.entry)
            call(driver.cuEventRecord(end, device.stream), "event")
            device.synchronize()
            if repeat:
                seconds.append(float(call(driver.cuEventElapsedTime(begin, end), "event")) / 1000 / len(launches))
        driver.cuGraphExecDestroy(executable)
        driver.cuGraphDestroy(graph)
        modules.close()
        outputs = case.n // 2 if case.store == "swiglu" else case.n
        digest = hashlib.sha256(device.download(self.y, 2 * case.rows * outputs).tobytes()).hexdigest()[:16]
        median = statistics.median(seconds)
        return {"case": f"{case.model} {case.name} {case.format} {case.store} n{case.n} k{case.k} rows{case.rows}",
                "metric": "product rate", "value": 2 * case.rows * case.n * case.k / median / 1e12, "unit": "TFLOP/s",
                "us": median * 1e6, "us_min": min(seconds) * 1e6, "us_max": max(seconds) * 1e6, "tile": asdict(case.tile),
                "chosen": case.chosen, "registers": cubin.resources.registers, "digest": digest, "copies": copies}  # fmt: skip


def clocks() -> str:
    """Clocks, draw and limit from nvidia-smi, or why they are unknown."""
    if shutil.which("nvidia-smi") is None:
        return "nvidia-smi is not installed"
    query = "driver_version,clocks.sm,clocks.max.sm,power.draw,power.limit,temperature.gpu"
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader", "-i", "0"]
    done = subprocess.run(command, capture_output=True, text=True)
    return f"{query}: {done.stdout.strip() or done.stderr.strip()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rows", default="128,512,1024")
    parser.add_argument("--only", default="", help="regular expression on 'model product format'")
    parser.add_argument("--portable", action="store_true", help="kernels of GPUs without warpgroup products")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    device = Device(0)
    caps = device.caps()
    if options.portable:
        caps = replace(caps, wgmma=False)
    cases: list[Case] = []
    for model, name, fmt, store, n, k in SHAPES:
        if not re.search(options.only, f"{model} {name} {fmt}"):
            continue
        for rows in map(int, options.rows.split(",")):
            chosen = choose(fmt, store, n, k, rows, caps)
            for tile in tiles(fmt, store, caps):
                if tile == chosen or tile.tokens >= 128 and tile.tokens <= max(rows, 128):
                    spec = linear_rows(fmt, store, n, k, rows, caps, tile)
                    cases.append(Case(model, name, fmt, store, n, k, rows, tile, spec, tile == chosen))
    sources = {case.spec.entry: render(case.spec.template, case.spec.entry, case.spec.params) for case in cases}
    cubins = compile_all(Job(entry, source, caps.arch) for entry, source in sources.items())
    print(f"# {len(cubins)} kernels compiled in {time.monotonic() - started:.1f} s", file=sys.stderr)
    bench = Bench(device)
    print(f"# {device.info().name}; {clocks()}")
    rows_out: list[dict[str, Any]] = []
    digests: dict[str, str] = {}
    different = 0
    for case in cases:
        row = bench.run(case, cubins[case.spec.entry])
        rows_out.append(row)
        if digests.setdefault(row["case"], row["digest"]) != row["digest"]:
            different += 1
            print(f"DIFFERENT BITS: {case.spec.entry}")
    for name in digests:
        print(name)
        mine = sorted((row for row in rows_out if row["case"] == name), key=lambda row: float(row["us"]))
        for row in mine:
            tile = row["tile"]
            mark = "*" if row["chosen"] else "<" if row is mine[0] else " "
            print(f"  {mark} {row['value']:6.0f} TFLOP/s {row['us']:8.1f} us  "
                  f"{tile['family']} {tile['rows']}x{tile['tokens']} stages {tile['stages']} "
                  f"blocks {tile['blocks_per_sm']} registers {row['registers']}")  # fmt: skip
    print(f"# {clocks()}")
    print(f"# {time.monotonic() - started:.1f} s", file=sys.stderr)
    if options.output:
        options.output.write_text(json.dumps({"gpu": device.info().name, "clocks": clocks(), "rows": rows_out}, indent=1))
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
