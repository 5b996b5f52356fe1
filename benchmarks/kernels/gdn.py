"""Time the Gated DeltaNet kernels on the GPU at hand at the shapes of a 27B model: 48 value heads, 16 key heads, 128.

    python -m benchmarks.kernels.gdn [--only layer|decode|prefill|rest] [--rows 1|2] [--warps 1|2|4] [--plain] [-o FILE.json]

Layer: the fused kernel of a decode step, as programs launch it (``hidden``: what is settled is taken before the wait) and
waiting first. Decode: the recurrence of many layers as neighbours in a graph, each with its own states, together larger than
the L2 cache; GB/s counts the states once read and once written. Prefill: prompts of 1,024 and 8,192 rows in calls of 1,024,
chunked (and its two kernels alone) and as a recurrence. Nodes are joined by programmatic edges where the device has them
(``--plain``: ordinary edges). The roofline is a read kernel, measured in the same run.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kernels.attention import Bench, Sequence
from benchmarks.kernels.linear_rows import clocks
from compiler.ir.op import Op, definition
from compiler.ir.types import Ref, TensorType
from compiler.kernels.conv import conv_spec
from compiler.kernels.gated_norm import gated_norm_spec
from compiler.kernels.gdn_decode import recurrent_spec
from compiler.kernels.gdn_gates import gates_spec
from compiler.kernels.gdn_layer import LayerOps, layer_spec
from compiler.kernels.gdn_prefill import carry_shared, carry_spec, intra_spec
from compiler.kernels.spec import DeviceCaps, KernelSpec
from compiler.ops.gdn import lower_prefill
from compiler.program.model import Arg
from runtime.cuda.device import Device
from runtime.cuda.modules import PackedArgs

HIDDEN, KEY_HEADS, VALUE_HEADS, DIM = 5120, 16, 48, 128
CHANNELS, VALUES = (2 * KEY_HEADS + VALUE_HEADS) * DIM, VALUE_HEADS * DIM
HEADS = {"key_heads": KEY_HEADS, "value_heads": VALUE_HEADS, "dk": DIM, "dv": DIM}
RECORDS, CHUNK, LANES, WIDEST = 8, 1024, 8, 1024
STATE_BYTES = VALUE_HEADS * DIM * DIM * 4
PER_LAYER = {"recurrent", "rec_k", "rec_u", "rec_alpha", "window", "record", "wa", "wb"}
ROWS = {"x": HIDDEN, "y": CHANNELS, "o": VALUES, "z": VALUES, "gates": 2 * VALUE_HEADS}


class GdnBench(Bench):
    """Device memory of ``layers`` layers with ``slots`` states each, by argument name."""

    def __init__(self, device: Device, programmatic: bool, layers: int) -> None:
        super().__init__(device, programmatic, layers * LANES * STATE_BYTES)
        self.layers = layers
        self.types = types(1, WIDEST)
        for name, kind in self.types.items():
            copies = layers if name in PER_LAYER else 1
            if kind.dtype == "i32":
                self.put(name, max(256, kind.nbytes), np.zeros(64, np.int32))
            elif name == "gates":
                gate = np.concatenate([np.full(VALUE_HEADS, -0.1), np.full(VALUE_HEADS, 0.5)]).astype(np.float32)
                self.put(name, kind.nbytes, gate)
            else:
                self.put(name, copies * kind.nbytes, np.full(1 << 12, 0.9, np.float32) if name == "rec_alpha" else self.noise)
        self.put("x", WIDEST * CHANNELS * 2, self.noise)  # the convolution reads wider rows
        self.put("matrices", CHUNK * VALUE_HEADS * 65 * 4)
        self.put("rows", CHUNK * KEY_HEADS * DIM * 4)

    def tables(self, lanes: int, columns: int, pending: int) -> None:
        for name, value in (("lane_slot", range(lanes)), ("lane_ncols", [columns] * lanes), ("lane_len", [1000] * lanes),
                            ("slot_pending", [pending] * LANES), ("slot_parity", [0] * LANES)):  # fmt: skip
            self.put(name, 256, np.array(value, np.int32))

    def bound(self, spec: KernelSpec, layer: int = 0, names: Mapping[str, str] | None = None,
              **widths: int) -> tuple[KernelSpec, PackedArgs]:  # fmt: skip
        """The kernel with its arguments for one of the layers; ``names`` maps arguments to memory of another name ("": none),
        ``widths`` replace row strides."""
        strides = {**ROWS, **widths}
        out = []
        for argument in spec.args:
            name = (names or {}).get(argument, argument)
            if name == "":
                out.append(Arg(argument, "null"))
            elif name in spec.scalars:
                number = spec.scalars[name]
                out.append(Arg(name, "float" if isinstance(number, float) else "int", number=number))
            elif name in self.memory:
                offset = layer * self.types[name].nbytes if name in PER_LAYER else 0
                out.append(Arg(name, "pointer", "absolute", self.memory[name][0] + offset))
            else:
                out.append(Arg(name, "int", number=strides[name.removesuffix("_stride")]))
        return spec, PackedArgs(tuple(out), lambda arg: arg.offset)


def types(lanes: int, columns: int) -> dict[str, TensorType]:
    """Operand types of every op of a GDN layer."""
    f32 = {"a_log": (VALUE_HEADS,), "dt_bias": (VALUE_HEADS,), "recurrent": (LANES, VALUE_HEADS, DIM, DIM),
           "rec_k": (2, LANES, RECORDS, KEY_HEADS, DIM), "rec_u": (2, LANES, RECORDS, VALUE_HEADS, DIM),
           "rec_alpha": (2, LANES, RECORDS, VALUE_HEADS), "gates": (columns, 2 * VALUE_HEADS)}  # fmt: skip
    bf16 = {"wa": (VALUE_HEADS, HIDDEN), "wb": (VALUE_HEADS, HIDDEN), "w": (4, CHANNELS),
            "window": (2, LANES, 3, CHANNELS), "record": (2, LANES, RECORDS, CHANNELS),
            **{name: (columns, ROWS[name]) for name in ("x", "y", "o", "z")}}  # fmt: skip
    i32 = {"lane_slot": lanes, "lane_ncols": lanes, "lane_len": lanes, "slot_pending": LANES, "slot_parity": LANES}
    return ({name: TensorType(shape, "f32") for name, shape in f32.items()}
            | {name: TensorType(shape, "bf16") for name, shape in bf16.items()}
            | {name: TensorType((extent,), "i32") for name, extent in i32.items()})  # fmt: skip


def op(kind: str, **attrs: int | float | str) -> Op:
    known = definition(kind)
    return Op(kind, {name: Ref(name) for name in known.inputs if name != "x2"}, {name: Ref(name) for name in known.outputs},
              {name: Ref(name) for name in known.state}, attrs)  # fmt: skip


def retiled(spec: KernelSpec, wanted: Mapping[str, int]) -> KernelSpec:
    """The kernel with other tile parameters."""
    known = {name: value for name, value in wanted.items() if name in spec.params}
    if not known:
        return spec
    params: dict[str, Any] = {**spec.params, **known}
    warps, smem = int(params["warps"]), spec.smem
    per_block = 4 * warps * params["rows"] if "rows" in params else 16 * warps
    if "rows" not in params:
        params["smem"] = smem = carry_shared(DIM, warps)
    params["block"] = 32 * warps
    entry = f"{spec.entry}_{'_'.join(f'{name}{value}' for name, value in known.items())}"
    return replace(spec, params=params, entry=entry, block=32 * warps, smem=smem, grid=(VALUES // per_block, *spec.grid[1:]))


def measure(bench: GdnBench, sequence: Sequence, repeats: int = 5) -> float:
    bench.compile([spec for spec, _ in sequence])
    return bench.seconds(sequence, repeats)


def decode(bench: GdnBench, caps: DeviceCaps, lanes: int, width: int, tile: Mapping[str, int]) -> dict[str, Any]:
    spec = retiled(recurrent_spec(op("gdn", phase="decode", **HEADS), types(lanes, lanes * width), lanes, width, caps), tile)
    bench.tables(lanes, width, max(1, width // 2))
    seconds = measure(bench, [bench.bound(spec, layer) for layer in range(bench.layers)]) / bench.layers
    rate = 2 * lanes * STATE_BYTES / seconds / 1e9
    return {"case": f"gdn decode T{width} B{lanes}", "metric": "state rate", "value": rate, "unit": "GB/s",
            "us": seconds * 1e6, "kernel": spec.entry}  # fmt: skip


def layer(bench: GdnBench, caps: DeviceCaps, lanes: int, width: int, settled: str) -> dict[str, Any]:
    """The fused kernel; the average over the layers of a graph."""
    known = types(lanes, lanes * width)
    by_kind = {"gdn_gates": known, "conv": {**known, "x": known["y"]}, "gdn": known,
               "gated_norm": {**known, "w": TensorType((DIM,), "bf16"), "y": known["o"]}}  # fmt: skip
    ops = LayerOps(op("gdn_gates"), op("conv", phase="decode"), op("gdn", phase="decode", **HEADS),
                   op("gated_norm", eps=1e-6, heads=VALUE_HEADS, dim=DIM))  # fmt: skip
    spec = layer_spec(ops, by_kind, lanes, width, settled, caps)
    bench.tables(lanes, width, max(1, width // 2))
    names = {"h": "x", "x": "y", "x2": "", "y": "o", "conv_w": "w", "norm_w": "w"}
    strides = {"h": HIDDEN, "x": CHANNELS, "x2": 0, "y": VALUES}
    sequence = [bench.bound(spec, number, names, **strides) for number in range(bench.layers)]
    seconds = measure(bench, sequence) / bench.layers
    rate = 2 * lanes * STATE_BYTES / seconds / 1e9
    return {"case": f"gdn layer {settled} T{width} B{lanes}", "metric": "state rate", "value": rate, "unit": "GB/s",
            "us": seconds * 1e6, "kernel": spec.entry}  # fmt: skip


def prefill(bench: GdnBench, caps: DeviceCaps, rows: int, tile: Mapping[str, int]) -> Iterable[dict[str, Any]]:
    """A prompt of ``rows`` in calls of 1,024: chunked, its kernels alone, and the recurrence."""
    whole, known = op("gdn", phase="prefill", **HEADS), types(1, CHUNK)
    values, (intra, carry) = lower_prefill(whole, known, "t")
    known |= {name: value.type for name, value in zip(("matrices", "rows"), values, strict=True)}
    specs = [intra_spec(intra, known, caps), retiled(carry_spec(carry, known, caps), tile)]
    bench.tables(1, CHUNK, 0)
    calls = rows // CHUNK
    recurrence = recurrent_spec(whole, known, 1, CHUNK, caps)
    variants = {"chunked": specs, "intra": specs[:1], "carry": specs[1:], "recurrence": [recurrence]}
    taken = {}
    for name, kernels in variants.items():
        sequence = [bench.bound(spec) for _ in range(calls) for spec in kernels]
        taken[name] = measure(bench, sequence, 3)
        yield {"case": f"gdn prefill {name} rows{rows}", "metric": "rate", "value": rows / taken[name] / 1e6,
               "unit": "Mrow/s", "us": taken[name] * 1e6, "kernel": " ".join(spec.entry for spec in kernels)}  # fmt: skip
    yield {"case": f"gdn prefill rows{rows}", "metric": "recurrence / chunked", "value": taken["recurrence"] / taken["chunked"],
           "unit": "x", "us": taken["chunked"] * 1e6, "kernel": specs[1].entry}  # fmt: skip


def rest(bench: GdnBench, caps: DeviceCaps) -> Iterable[dict[str, Any]]:
    """Convolution, gates and gated norm of one layer; the average over the layers of a graph."""
    for phase, lanes, width in (("decode", 1, 1), ("decode", 1, 8), ("decode", 8, 1), ("prefill", 1, CHUNK)):
        known = types(lanes, lanes * width)
        norm_types = {**known, "w": TensorType((DIM,), "bf16"), "y": known["o"]}
        conv_types = {**known, "x": known["y"]}
        specs: list[tuple[str, KernelSpec, dict[str, int]]] = [
            ("conv", conv_spec(op("conv", phase=phase), conv_types, lanes, width, caps), {"x": CHANNELS}),
            ("gates", gates_spec(op("gdn_gates"), known, caps), {}),
            ("gated norm", gated_norm_spec(op("gated_norm", eps=1e-6, heads=VALUE_HEADS, dim=DIM), norm_types, caps),
             {"y": VALUES}),
        ]  # fmt: skip
        bench.tables(lanes, width, 1 if phase == "decode" else 0)
        for name, spec, widths in specs:
            seconds = measure(bench, [bench.bound(spec, layer, **widths) for layer in range(bench.layers)]) / bench.layers
            yield {"case": f"gdn {name} {phase} T{width} B{lanes}", "metric": "time", "value": seconds * 1e6, "unit": "us",
                   "us": seconds * 1e6, "kernel": spec.entry}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=("layer", "decode", "prefill", "rest"))
    parser.add_argument("--rows", type=int, choices=(1, 2), help="state rows per group of lanes in decode")
    parser.add_argument("--warps", type=int, choices=(1, 2, 4), help="warps per block in decode and across chunks")
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--plain", action="store_true", help="ordinary instead of programmatic edges")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    started = time.monotonic()
    tile = {name: value for name, value in (("rows", options.rows), ("warps", options.warps)) if value}
    device = Device(0)
    caps = device.caps()
    programmatic = caps.programmatic_edges and not options.plain
    bench = GdnBench(device, programmatic, options.layers)
    roofline = bench.roofline()
    print(f"# {device.info().name}; read kernel {roofline / 1e9:.0f} GB/s; {clocks()}")
    rows: list[dict[str, Any]] = []

    def report(row: dict[str, Any]) -> None:
        if row["unit"] == "GB/s":
            row["roofline"] = row["value"] * 1e9 / roofline
        rows.append(row)
        share = f" {100 * row['roofline']:5.1f}% of the read kernel" if "roofline" in row else ""
        print(f"{row['case']:40} {row['us']:9.2f} us {row['value']:8.2f} {row['unit']} {row['metric']}{share}", flush=True)

    if options.only in (None, "layer"):
        for lanes in (1, 8):
            for width in (1, 4, 8):
                for settled in ("hidden", "nothing"):
                    report(layer(bench, caps, lanes, width, settled))
    if options.only in (None, "decode"):
        for lanes in (1, 8):
            for width in (1, 4, 8):
                report(decode(bench, caps, lanes, width, tile))
    if options.only in (None, "prefill"):
        for length in (1024, 8192):
            for row in prefill(bench, caps, length, tile):
                report(row)
    if options.only in (None, "rest"):
        for row in rest(bench, caps):
            report(row)
    print(f"# {clocks()}; {time.monotonic() - started:.1f} s")
    if options.output:
        options.output.write_text(json.dumps({
            "gpu": device.info().name, "clocks": clocks(), "roofline_gb_s": roofline / 1e9,
            "edges": "programmatic" if programmatic else "ordinary", "rows": rows}, indent=1))  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
