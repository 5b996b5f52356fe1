"""Time attention on the GPU at hand at the shapes of a 27B model: 24 query heads, 4 KV heads, dimension 256.

    python -m benchmarks.kernels.attention [--contexts 1024,8192] [--only decode|prefill|prepare] [--plain] [-o FILE.json]

Decode: partial kernel and merge as neighbours in a graph, over different copies of the cache, together larger than the L2
cache; GB/s counts the bytes of keys and values, once per lane. Prefill: a chunk of 1,024 rows at the end of each context
and a whole prompt of 16,384, in every variant the device has; TFLOP/s counts 4·heads·dim per visible key. Nodes are joined
by programmatic edges where the device has them (``--plain``: ordinary edges). The roofline is a read kernel over the cache,
measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernels.linear_columns import READ_KERNEL
from benchmarks.kernels.linear_rows import clocks
from compiler.control import PAGE, chunk_keys
from compiler.emit.cache import Job, compile_all
from compiler.emit.nvrtc import Cubin
from compiler.emit.render import render
from compiler.ir.op import Op
from compiler.ir.types import Ref, TensorType
from compiler.kernels import attention_prefill
from compiler.kernels.attention_decode import group_columns, merge_spec, partial_spec, work_items
from compiler.kernels.attn_prepare import prepare_spec
from compiler.kernels.spec import DeviceCaps, KernelSpec
from compiler.ops.attention import Attention, lower_decode
from compiler.ops.attn_prepare import AttnPrepare, frequency_table, native_frequencies
from compiler.program.model import Arg, KernelImage
from runtime.cuda.device import Device
from runtime.cuda.driver import api, call
from runtime.cuda.modules import Modules, PackedArgs

HEADS, KV_HEADS, DIM, CHUNK = 24, 4, 256, 1024
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2
ROW_PAGES = 4096
Sequence = list[tuple[KernelSpec, PackedArgs]]


class Bench:
    """Device memory by argument name, shared by all cases; kernels by entry."""

    def __init__(self, device: Device, programmatic: bool, cache_bytes: int) -> None:
        self.device, self.programmatic, self.cache_bytes = device, programmatic, cache_bytes
        self.cubins: dict[str, Cubin] = {}
        self.memory: dict[str, tuple[int, int]] = {}
        self.random = np.random.default_rng(1)
        values = self.random.standard_normal(1 << 24).astype(np.float32).view(np.uint32) >> 16
        self.noise = values.astype(np.uint16)
        self.put("kv", cache_bytes, self.noise)
        self.put("page_table", np.zeros((8, ROW_PAGES), np.int32).nbytes)
        for name in ("lane_len", "lane_ncols", "lane_page_row", "work_count"):
            self.put(name, 256)

    def put(self, name: str, nbytes: int, data: Any = None) -> int:
        """Memory of at least ``nbytes`` for an argument, filled with repetitions of ``data``."""
        if self.memory.get(name, (0, 0))[1] < nbytes:
            self.memory[name] = (self.device.allocate(nbytes, name), nbytes)
        address = self.memory[name][0]
        if data is not None:
            block = np.ascontiguousarray(data).view(np.uint8).reshape(-1)[:nbytes]
            self.device.upload(address, block)
            done = block.nbytes
            while done < nbytes:
                size = min(done, nbytes - done)
                call(api().cuMemcpyDtoDAsync(address + done, address, size, self.device.stream), "fill")
                done += size
            self.device.synchronize()
        return address

    def lanes(self, before: list[int], active: int) -> None:
        """Tables of lanes of one length each; their pages are permuted over the cache."""
        pages = [-(-(length + active) // PAGE) for length in before]
        ids = self.random.permutation(sum(pages))
        table = np.zeros((len(before), ROW_PAGES), np.int32)
        for lane, count in enumerate(pages):
            table[lane, :count] = ids[sum(pages[:lane]) :][:count]
        for name, value in (("lane_len", before), ("lane_ncols", [active] * len(before)),
                            ("lane_page_row", range(len(before)))):  # fmt: skip
            self.put(name, 4 * len(before), np.array(value, np.int32))
        self.put("page_table", table.nbytes, table)

    def args(self, spec: KernelSpec, widths: Mapping[str, int], offset: int = 0) -> PackedArgs:
        """Arguments of ``spec``; ``widths`` are row strides by operand, ``offset`` moves the cache."""
        out = []
        for name in spec.args:
            if name in spec.scalars:
                out.append(Arg(name, "float", number=spec.scalars[name]))
            elif name in self.memory:
                out.append(Arg(name, "pointer", "absolute", self.memory[name][0] + (offset if name == "kv" else 0)))
            else:
                out.append(Arg(name, "int", number=widths[name.removesuffix("_stride")]))
        return PackedArgs(tuple(out), lambda arg: arg.offset)

    def compile(self, specs: list[KernelSpec]) -> None:
        arch = self.device.caps().arch
        sources = {s.entry: render(s.template, s.entry, s.params) for s in specs if s.entry not in self.cubins}
        self.cubins |= compile_all(Job(entry, source, arch) for entry, source in sources.items())

    def seconds(self, sequence: Sequence, repeats: int = 5) -> float:
        """Median seconds of one replay of the sequence as a graph."""
        driver, device = api(), self.device
        images = {s.entry: KernelImage(s, "", self.cubins[s.entry].image, self.cubins[s.entry].resources) for s, _ in sequence}
        modules = Modules(images, [device])
        graph = call(driver.cuGraphCreate(0), "graph")
        previous = None
        for spec, packed in sequence:
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
        executable = call(driver.cuGraphInstantiate(graph, 0), "graph")
        begin, end = (call(driver.cuEventCreate(0), "event") for _ in range(2))
        times = []
        for repeat in range(repeats + 1):
            call(driver.cuEventRecord(begin, device.stream), "event")
            call(driver.cuGraphLaunch(executable, device.stream), "graph")
            call(driver.cuEventRecord(end, device.stream), "event")
            device.synchronize()
            if repeat:
                times.append(float(call(driver.cuEventElapsedTime(begin, end), "event")) / 1000)
        driver.cuGraphExecDestroy(executable)
        driver.cuGraphDestroy(graph)
        modules.close()
        return statistics.median(times)

    def roofline(self) -> float:
        """Bytes per second of a plain read kernel over up to 4 GiB of the cache."""
        nbytes = min(self.cache_bytes, 4 << 30)
        self.put("sink", 4096)
        spec = KernelSpec("read_roofline", "", {}, (2 * self.device.caps().sms, 1, 1), 512, 0, ())
        self.cubins |= compile_all([Job(spec.entry, READ_KERNEL, self.device.caps().arch)])
        args = (Arg("data", "pointer", "absolute", self.memory["kv"][0]), Arg("pieces", "int", number=nbytes // 16),
                Arg("sink", "pointer", "absolute", self.memory["sink"][0]))  # fmt: skip
        return nbytes / self.seconds([(spec, PackedArgs(args, lambda arg: arg.offset))])


def operand_types(lanes: int, columns: int, work: int) -> dict[str, TensorType]:
    rows = {name: TensorType((columns, HEADS * DIM), "bf16") for name in ("qr", "gate", "o", "q")}
    lane = {name: TensorType((lanes,), "i32") for name in ("lane_ncols", "lane_len", "lane_page_row")}
    return {**rows, **lane, "page_table": TensorType((lanes, ROW_PAGES), "i32"), "work": TensorType((work, 4), "i32"),
            "kv": TensorType((1, 2, KV_HEADS, PAGE, DIM), "bf16"), "work_count": TensorType((1,), "i32")}  # fmt: skip


def attention_op(phase: str) -> Op:
    inputs = {name: Ref(name) for name in Attention.inputs}
    return Op("attention", inputs, {"o": Ref("o")}, {}, {"phase": phase, "heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM})


def work_list(before: list[int], width: int) -> Any:
    """The list `begin` builds for lanes whose ``width`` columns are all active."""
    group, items = group_columns(width, HEADS, KV_HEADS), []
    for lane, length in enumerate(before):
        for begin in range(0, width, group):
            columns = range(begin, min(begin + group, width))
            for size in sorted({chunk_keys(length + t + 1) for t in columns}):
                mine = [t for t in columns if chunk_keys(length + t + 1) == size]
                for first in range(0, length + mine[-1] + 1, size):
                    mask = sum(1 << t for t in mine if length + t >= first)
                    items += [(lane | lane << 16, head | size, first, mask) for head in range(KV_HEADS)]
    return np.array(items, np.int64).astype(np.uint32).view(np.int32)


def decode(bench: Bench, caps: DeviceCaps, context: int, lanes: int, width: int) -> dict[str, Any]:
    before, columns = [context - width] * lanes, lanes * width
    types = operand_types(lanes, columns, work_items(lanes, width, HEADS, KV_HEADS) + 1)
    values, (partial, merge) = lower_decode(attention_op("decode"), types, "a")
    types |= {"partial_o": values[0].type, "partial_ml": values[1].type}
    specs = [partial_spec(partial, types, width, caps), merge_spec(merge, types, width, caps)]
    bench.compile(specs)
    bench.lanes(before, width)
    work = work_list(before, width)
    bench.put("work", work.nbytes, work)
    bench.put("work_count", 4, np.array([len(work)], np.int32))
    for name, value in zip(("partial_o", "partial_ml"), values, strict=True):
        bench.put(name, value.nbytes)
    for name in ("qr", "gate", "o"):
        bench.put(name, columns * HEADS * DIM * 2, bench.noise)
    layer = lanes * -(-context // PAGE) * PAGE * TOKEN_BYTES
    copies = max(1, min(48, 1 + (256 << 20) // layer, bench.cache_bytes // layer))
    widths = dict.fromkeys(("qr", "gate", "o"), HEADS * DIM)
    sequence = [(spec, bench.args(spec, widths, copy * layer)) for copy in range(copies) for spec in specs]
    seconds = bench.seconds(sequence) / copies
    alone = bench.seconds([pair for pair in sequence if pair[0] is specs[0]]) / copies
    nbytes = lanes * context * TOKEN_BYTES
    return {"case": f"decode attention ctx{context} bf16kv T{width} B{lanes}", "metric": "cache rate",
            "value": nbytes / seconds / 1e9, "unit": "GB/s", "us": seconds * 1e6, "partial_us": alone * 1e6,
            "copies": copies, "kernel": specs[0].entry}  # fmt: skip


Choose = Callable[[Op, Mapping[str, TensorType], DeviceCaps], KernelSpec]


def prefill(bench: Bench, caps: DeviceCaps, name: str, choose: Choose, before: int, rows: int, chunk: int) -> dict[str, Any]:
    spec = choose(attention_op("prefill"), operand_types(1, chunk, 1), caps)
    bench.compile([spec])
    bench.lanes([before], rows)
    for operand in ("qr", "gate", "o"):
        bench.put(operand, chunk * HEADS * DIM * 2, bench.noise)
    for scratch, nbytes in spec.scratch.items():
        bench.put(scratch, nbytes)  # allocated zeroed; the kernel leaves its counters zero
    packed = bench.args(spec, dict.fromkeys(("qr", "gate", "o"), HEADS * DIM))
    seconds = bench.seconds([(spec, packed)] * 2, repeats=3) / 2
    visible = rows * before + rows * (rows + 1) // 2
    return {"case": f"prefill attention {name} rows{rows} ctx{before + rows}", "metric": "product rate",
            "value": 4 * HEADS * DIM * visible / seconds / 1e12, "unit": "TFLOP/s", "us": seconds * 1e6,
            "kernel": spec.entry}  # fmt: skip


def prepare(bench: Bench, caps: DeviceCaps, columns: int) -> dict[str, Any]:
    inputs = {name: Ref(name) for name in AttnPrepare.inputs}
    op = Op("attn_prepare", inputs, {"qr": Ref("qr")}, {"kv": Ref("kv")},
            {"eps": 1e-6, "heads": HEADS, "kv_heads": KV_HEADS, "dim": DIM, "rotary": 64, "section_h": 11, "section_w": 10,
             "mscale": 1.0})  # fmt: skip
    spec = prepare_spec(op, operand_types(1, columns, 1), columns, caps)
    bench.compile([spec])
    bench.lanes([1000], columns)
    widths = {"q": HEADS * DIM, "qr": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM}
    for name, width in widths.items():
        bench.put(name, columns * width * 2, bench.noise)
    for name in ("wq", "wk"):
        bench.put(name, DIM * 2, bench.noise)
    bench.put("inv_freq", 256, frequency_table(native_frequencies(1e7, 64)))
    bench.put("positions", 12 * columns, np.arange(3 * columns, dtype=np.int32))
    seconds = bench.seconds([(spec, bench.args(spec, widths))] * 16) / 16
    return {"case": f"attention prepare T{columns}", "metric": "time", "value": seconds * 1e6, "unit": "us",
            "us": seconds * 1e6, "kernel": spec.entry}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--contexts", default="1024,8192,65536,250000")
    parser.add_argument("--only", choices=("decode", "prefill", "prepare"))
    parser.add_argument("--plain", action="store_true", help="ordinary instead of programmatic edges")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    contexts = [int(context) for context in options.contexts.split(",")]
    if not all(1025 <= context + 1 <= ROW_PAGES * PAGE for context in contexts):
        parser.error(f"--contexts: allowed are 1024 … {ROW_PAGES * PAGE - 1}")
    device = Device(0)
    caps = device.caps()
    programmatic = caps.programmatic_edges and not options.plain
    bench = Bench(device, programmatic, (8 * (max(contexts) + PAGE) + CHUNK) * TOKEN_BYTES)
    roofline = bench.roofline()
    print(f"# {device.info().name}; read kernel {roofline / 1e9:.0f} GB/s; {clocks()}")
    rows: list[dict[str, Any]] = []

    def report(row: dict[str, Any]) -> None:
        if row["unit"] == "GB/s":
            row["roofline"] = row["value"] * 1e9 / roofline
        rows.append(row)
        share = ""
        if "roofline" in row:
            share = f" {100 * row['roofline']:5.1f}% of the read kernel, partial {row['partial_us']:.1f} us"
        print(f"{row['case']:55} {row['us']:9.1f} us {row['value']:8.1f} {row['unit']}{share}", flush=True)

    if options.only in (None, "prepare"):
        for columns in (1, 8, CHUNK):
            report(prepare(bench, caps, columns))
    if options.only in (None, "decode"):
        for context in contexts:
            for lanes in (1, 8):
                for width in (1, 4, 8):
                    report(decode(bench, caps, context, lanes, width))
    if options.only in (None, "prefill"):
        variants: list[tuple[str, Choose]] = [("mma", attention_prefill.mma_spec)]
        if caps.wgmma:
            variants.insert(0, ("wgmma", attention_prefill.wgmma_spec))
        for name, choose in variants:
            for context in sorted({1024, 8192, 16384, 65536} & {*contexts, 16384}):
                report(prefill(bench, caps, name, choose, context - CHUNK, CHUNK, CHUNK))
            report(prefill(bench, caps, name, choose, 0, 16384, 16384))
            report(prefill(bench, caps, name, choose, max(contexts) - 20, 20, CHUNK))
    print(f"# {clocks()}; {time.monotonic() - started:.1f} s")
    if options.output:
        options.output.write_text(json.dumps({
            "gpu": device.info().name, "clocks": clocks(), "roofline_gb_s": roofline / 1e9,
            "edges": "programmatic" if programmatic else "ordinary", "rows": rows}, indent=1))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
