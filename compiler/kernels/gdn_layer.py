"""Kernel of a GDN layer's decode step between its projections: gates, convolution, recurrence and gated norm in one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from compiler.ir.op import Op, require
from compiler.ir.types import Ref, TensorType
from compiler.kernels.attention_decode import MAX_COLUMNS
from compiler.kernels.gdn_decode import head_shape
from compiler.kernels.spec import DeviceCaps, KernelSpec
from compiler.ops.conv import TABLES
from compiler.ops.gdn_gates import is_fused

STATES = ("window", "record", "recurrent", "rec_k", "rec_u", "rec_alpha")

Types = Mapping[str, TensorType]


@dataclass(frozen=True)
class LayerOps:
    """The four ops of one layer and rank that the kernel replaces."""

    gates: Op
    conv: Op
    gdn: Op
    norm: Op

    def all(self) -> tuple[Op, Op, Op, Op]:
        return self.gates, self.conv, self.gdn, self.norm

    def operands(self) -> dict[str, Ref]:
        """Uses of values by the kernel's argument names."""
        conv, gdn = self.conv, self.gdn
        named = {"h": self.gates.inputs["x"], "conv_w": conv.inputs["w"], "norm_w": self.norm.inputs["w"],
                 "z": self.norm.inputs["z"], "y": self.norm.outputs["y"]}  # fmt: skip
        named |= {name: conv.inputs[name] for name in ("x", "x2", *TABLES) if name in conv.inputs}
        named |= {name: self.gates.inputs[name] for name in ("wa", "wb", "a_log", "dt_bias")}
        return named | dict(conv.state) | dict(gdn.state)

    def internal(self) -> frozenset[str]:
        """Values that live inside the kernel only."""
        return frozenset({self.gates.outputs["gates"].value, self.conv.outputs["y"].value, self.gdn.outputs["o"].value})


def obstacle(ops: LayerOps, types: Mapping[str, Types], width: int) -> str:
    """Why the single kernels have to serve these ops; empty when the one kernel can. ``types`` by op kind."""
    hidden = types["gdn_gates"]["x"].shape[1]
    if width > MAX_COLUMNS:
        return f"{width} columns per lane"
    if hidden % 8:
        return f"hidden width {hidden}"
    if any(ops.conv.inputs[name] != ops.gdn.inputs[name] for name in TABLES):
        return "convolution and recurrence go by different tables"
    if types["conv"]["x"].shape[1] % 4:
        return "the convolution's inputs are cut inside a group of four channels"
    return ""


def layer_spec(ops: LayerOps, types: Mapping[str, Types], lanes: int, width: int, settled: str, caps: DeviceCaps) -> KernelSpec:
    """The kernel for ``lanes`` × ``width`` decode columns; ``types`` holds the operand types by op kind.

    ``settled`` says what is complete before a block can start (compiler/passes/early.py) and may be taken before the
    dependency wait: ``nothing``, ``state`` (tables and this layer's state), ``hidden`` (these and the hidden rows).

    A value head is shared by two blocks of a cluster where there are clusters, else it is one block's. With one column and
    everything settled a block is small (16,384 registers, 9 KiB of shared memory), so that it finds room beside a block of the
    projection in front and has folded the state by the time that ends. Raises IRError naming what is wrong with an operand."""
    hk, hv, dk, dv = head_shape(ops.gdn)
    for op in (ops.gates, ops.conv, ops.norm):
        for name, ref in (*op.inputs.items(), *op.outputs.items()):
            require(ref.offset % 8 == 0, op, f"{name} begins at column {ref.offset}; 16-byte loads need a multiple of 8")
    hidden, channels = types["gdn_gates"]["x"].shape[1], types["conv"]["y"].shape[1]
    slots, records = types["gdn"]["rec_k"].shape[1:3]
    require(width <= records, ops.gdn, f"{width} columns per lane, but records hold {records}")
    require(settled in ("nothing", "state", "hidden"), ops.gdn, f"settled is {settled!r}")
    bucket = next(b for b in (1, 8, MAX_COLUMNS) if width <= b)
    parts = 2 if caps.clusters else 1
    warps = 4 if parts == 2 and bucket == 1 and settled == "hidden" else 8
    # of the launch bounds: half a multiprocessor's threads, so 128 registers, where these suffice
    bound = 512 if parts == 2 and bucket < MAX_COLUMNS else 32 * warps
    fused = is_fused(ops.gates)
    early = {"nothing": (), "state": (*TABLES, *STATES), "hidden": (*TABLES, *STATES, "h")}[settled]
    return KernelSpec(
        entry=f"gdn_layer_h{hk}x{hv}_d{dk}x{dv}_k{hidden}_c{bucket}{'_ab' if fused else ''}_{settled}"
        f"_{caps.arch.replace('_', '')}",
        template="gdn_layer.cu.j2",
        params={"hidden": hidden, "dk": dk, "dv": dv, "key_heads": hk, "value_heads": hv, "bucket": bucket, "parts": parts,
                "warps": warps, "settled": settled, "block": 32 * warps, "bound": bound, "fused": fused,
                "channels": channels},  # fmt: skip
        grid=(parts * hv, lanes, 1),
        block=32 * warps,
        smem=0,
        args=("x", "x_stride", "x2", "x2_stride", "z", "z_stride", "h", "h_stride", "conv_w", "wa", "wb", "a_log", "dt_bias",
              "norm_w", *TABLES, *STATES, "y", "y_stride", "split", "width", "slots", "records", "eps"),
        scalars={"split": types["conv"]["x"].shape[1], "width": width, "slots": slots, "records": records,
                 "eps": ops.norm.float_attr("eps")},
        early=early,
        cluster=(parts, 1, 1),
        reason=f"one node per layer, {parts} block{'s' if parts > 1 else ''} per value head; before the wait: {settled}",
    )  # fmt: skip
