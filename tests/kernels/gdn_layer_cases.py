"""One GDN layer between its projections in NumPy arrays: run by the four single kernels or by the one that fuses them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from compiler.emit.render import render
from compiler.ir.op import Op
from compiler.kernels import conv, gated_norm, gdn_decode, gdn_gates
from compiler.kernels.gdn_layer import LayerOps, layer_spec
from compiler.kernels.spec import DeviceCaps, KernelSpec
from compiler.ops.conv import Conv
from compiler.ops.gated_norm import GatedNorm
from compiler.ops.gdn import Gdn
from compiler.ops.gdn_gates import GdnGates
from tests.emulator.harness import poisoned, to_bf16
from tests.kernels.gdn_cases import Array, Shape, View, launch, op_of, types_of, vars_of

WEIGHTS = ("wa", "wb", "a_log", "dt_bias", "conv_w", "norm_w")
STATE = ("window", "record", "recurrent", "rec_k", "rec_u", "rec_alpha", "pending", "parity", "length")
NAMES = {"gates": {"x": "h"}, "conv": {"w": "conv_w", "y": "convolved"}, "gdn": {"y": "convolved"}, "norm": {"w": "norm_w"}}


@dataclass
class Columns:
    """Inputs of a token sequence as bf16 bits: projected q | k | v, z and hidden rows."""

    x: Array
    z: Array
    h: Array

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: slice) -> Columns:
        return Columns(self.x[rows], self.z[rows], self.h[rows])


@dataclass
class WholeLayer:
    """State of ``slots`` sequences of one layer; ``split``: the convolution's inputs come from two buffers, cut there;
    ``fused``: rows of a and b in one matrix. Whatever a kernel may not read is NaN."""

    shape: Shape
    hidden: int
    slots: int
    records: int
    backend: Any
    split: int = 0
    fused: bool = False
    seed: int = 0
    target: DeviceCaps | None = None
    specs: list[KernelSpec] = field(default_factory=list)  # of the last step

    def __post_init__(self) -> None:
        rng, s = np.random.default_rng(self.seed), self.shape
        hk, hv, dk, dv = s.attrs.values()
        wa, wb = (to_bf16(2 * self.hidden**-0.5 * rng.normal(size=(hv, self.hidden))) for _ in range(2))
        self.weights: dict[str, Array] = {
            "wa": wa, "wb": wb, "a_log": rng.uniform(-3, 1, hv).astype(np.float32),
            "dt_bias": rng.normal(size=hv).astype(np.float32), "conv_w": to_bf16(rng.normal(size=(4, s.channels))),
            "norm_w": to_bf16(rng.normal(size=dv))}  # fmt: skip
        if self.fused:
            self.weights["wa"] = self.weights["wb"] = np.concatenate([wa, wb])
        self.state: dict[str, Array] = {
            "window": poisoned((2, self.slots, 3, s.channels)), "record": poisoned((2, self.slots, self.records, s.channels)),
            "recurrent": poisoned((self.slots, hv, dv, dk), "f32"),
            "rec_k": poisoned((2, self.slots, self.records, hk, dk), "f32"),
            "rec_u": poisoned((2, self.slots, self.records, hv, dv), "f32"),
            "rec_alpha": poisoned((2, self.slots, self.records, hv), "f32"),
            **{name: np.zeros(self.slots, np.int32) for name in ("pending", "parity", "length")}}  # fmt: skip
        self.rng = rng

    def columns(self, count: int) -> Columns:
        """Random inputs."""
        values = self.shape.value_heads * self.shape.dv
        return Columns(*(to_bf16(self.rng.normal(size=(count, n))) for n in (self.shape.channels, values, self.hidden)))

    def copy(self, backend: Any = None) -> WholeLayer:
        """The same weights and a copy of the state, on another backend."""
        other = replace(self, backend=backend or self.backend, specs=[])
        other.weights, other.state = self.weights, {name: value.copy() for name, value in self.state.items()}
        return other

    def _operands(self, slots: Sequence[int], lanes: Sequence[Columns], width: int) -> dict[str, Array | View]:
        columns = len(lanes) * width

        def buffer(name: str, extent: int, lead: int) -> View:
            root = poisoned((columns, extent + lead + 8))
            for lane, given in enumerate(lanes):
                if name:
                    root[lane * width : lane * width + len(given), lead : lead + extent] = getattr(given, name)
            return View(root, lead, extent)

        s = self.shape
        values = s.value_heads * s.dv
        x = buffer("x", s.channels, 16)
        out: dict[str, Array | View] = {"x": x, "z": buffer("z", values, 8), "h": buffer("h", self.hidden, 0),
                                        "y": buffer("", values, 24), "o": poisoned((columns, values)),
                                        "convolved": poisoned((columns, s.channels)),
                                        "gates": poisoned((columns, 2 * s.value_heads), "f32")}  # fmt: skip
        if self.split:
            rest = poisoned((columns, s.channels - self.split + 8))
            rest[:, 8:] = x.root[:, 16 + self.split : 16 + s.channels]
            out |= {"x": View(x.root, 16, self.split), "x2": View(rest, 8, s.channels - self.split)}
        state = self.state
        return out | self.weights | {
            "lane_slot": np.array(slots, np.int32), "lane_ncols": np.array([len(c) for c in lanes], np.int32),
            "lane_len": state["length"][list(slots)].copy(), "slot_pending": state["pending"], "slot_parity": state["parity"],
            **{name: state[name] for name in ("window", "record", "recurrent", "rec_k", "rec_u", "rec_alpha")}}  # fmt: skip

    def _ops(self, operands: Mapping[str, Array | View]) -> tuple[dict[str, Op], dict[str, dict[str, Array | View]]]:
        """The four ops, and their operands by their own names."""
        s = self.shape
        kinds: dict[str, tuple[str, type, dict[str, Any]]] = {
            "gates": ("gdn_gates", GdnGates, {}), "conv": ("conv", Conv, {"phase": "decode"}),
            "gdn": ("gdn", Gdn, {"phase": "decode", **s.attrs}),
            "norm": ("gated_norm", GatedNorm, {"eps": 1e-6, "heads": s.value_heads, "dim": s.dv})}  # fmt: skip
        ops, given = {}, {}
        for key, (kind, definition, attrs) in kinds.items():
            names = vars_of(definition)
            wanted = [name for role in names.values() for name in role]
            mine = {name: operands[NAMES[key].get(name, name)] for name in wanted if NAMES[key].get(name, name) in operands}
            ops[key], given[key] = op_of(kind, mine, names, **attrs), mine
        if self.fused:
            ops["gates"].inputs["wb"] = ops["gates"].inputs["wa"]  # type: ignore[index]
        return ops, given

    def step(self, slots: Sequence[int], lanes: Sequence[Columns], width: int, accepted: Sequence[int],
             settled: str | None = None) -> list[Array]:  # fmt: skip
        """One decode step; y per lane as bf16 bits. ``settled``: by the fused kernel of that kind, None: by the four."""
        operands = self._operands(slots, lanes, width)
        ops, given = self._ops(operands)
        target = self.target or self.backend.caps()
        types = {key: types_of(value) for key, value in given.items()}
        if settled is None:
            self.specs = [gdn_gates.gates_spec(ops["gates"], types["gates"], target),
                          conv.conv_spec(ops["conv"], types["conv"], len(lanes), width, target),
                          gdn_decode.recurrent_spec(ops["gdn"], types["gdn"], len(lanes), width, target),
                          gated_norm.gated_norm_spec(ops["norm"], types["norm"], target)]  # fmt: skip
            for spec, key in zip(self.specs, given, strict=True):
                launch(self.backend, spec, given[key])
        else:
            by_kind = {op.kind: types[key] for key, op in ops.items()}
            self.specs = [layer_spec(LayerOps(*ops.values()), by_kind, len(lanes), width, settled, target)]
            self._launch(self.specs[0], operands)
        for slot, columns, count in zip(slots, lanes, accepted, strict=True):
            if len(columns):
                self.state["pending"][slot], self.state["length"][slot] = count, self.state["length"][slot] + count
                self.state["parity"][slot] ^= 1
        return self._outputs(operands["y"], lanes, width, settled is not None)

    def _launch(self, spec: KernelSpec, operands: Mapping[str, Array | View]) -> None:
        args: list[Any] = []
        for name in spec.args:
            value = operands.get(name.removesuffix("_stride"))
            if name in spec.scalars:
                args.append(spec.scalars[name])
            elif name.endswith("_stride"):
                args.append(0 if value is None else value.root.shape[1] if isinstance(value, View) else value.shape[1])
            else:
                args.append(value.root.reshape(-1)[value.offset :] if isinstance(value, View) else value)
        self.backend.launch(spec, render(spec.template, spec.entry, spec.params), args)

    @staticmethod
    def _outputs(view: Any, lanes: Sequence[Columns], width: int, active_only: bool) -> list[Array]:
        """y per lane. Nothing outside the view may have been written, with ``active_only`` no column of no lane either."""
        out, untouched = [], np.ones(view.root.shape, bool)
        if not active_only:
            untouched[:, view.offset : view.offset + view.width] = False
        for lane, columns in enumerate(lanes):
            rows = slice(lane * width, lane * width + len(columns))
            untouched[rows, view.offset : view.offset + view.width] = False
            out.append(view.array()[rows].copy())
        assert np.all(view.root[untouched] == 0xFFFF), "a column of no lane was written"
        return out
