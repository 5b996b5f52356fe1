"""One Gated DeltaNet layer in NumPy arrays: its slots, tables and kernel launches, shared by tests and benchmarks.

Everything a kernel may not read is NaN (bytes 0xff): outputs, records, states of other slots, inactive columns.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from compiler.emit.render import render
from compiler.ir.op import Op
from compiler.ir.types import Ref, TensorType
from compiler.kernels.gdn_decode import recurrent_spec
from compiler.kernels.gdn_prefill import carry_shared, carry_spec, chunked_fits, intra_spec
from compiler.kernels.spec import KernelSpec
from compiler.ops import gdn
from tests.emulator.harness import decode, from_bf16, poisoned, to_bf16

Array = np.ndarray[Any, Any]
VECTORS = Path(__file__).parents[1] / "data" / "ops-prod-heads" / "goldens.safetensors"
DTYPES = {"bf16": np.uint16, "f32": np.float32, "i32": np.int32, "u8": np.uint8}


def load_vectors(path: Path = VECTORS) -> dict[str, Array]:
    """The F32 and BF16 tensors of a safetensors file as float32."""
    raw = path.read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    header.pop("__metadata__", None)
    out = {}
    for name, entry in header.items():
        begin, end = (8 + size + offset for offset in entry["data_offsets"])
        if entry["dtype"] == "F32":
            out[name] = np.frombuffer(raw[begin:end], np.float32).reshape(entry["shape"])
        elif entry["dtype"] == "BF16":
            out[name] = from_bf16(np.frombuffer(raw[begin:end], np.uint16)).reshape(entry["shape"])
    return out


@dataclass(frozen=True)
class View:
    """Columns [offset, offset + width) of a matrix, as a kernel sees them: a pointer and a row stride."""

    root: Array
    offset: int
    width: int

    def array(self) -> Array:
        return self.root[:, self.offset : self.offset + self.width]


def launch(backend: Any, spec: KernelSpec, operands: Mapping[str, Array | View]) -> None:
    """Run ``spec`` with named operands, as the schedule binds them."""
    args: list[Any] = []
    for name in spec.args:
        base = name.removesuffix("_stride")
        if name in spec.scalars:
            args.append(spec.scalars[name])
        elif name in operands:
            value = operands[name]
            args.append(value.root.reshape(-1)[value.offset :] if isinstance(value, View) else value)
        else:
            value = operands[base]
            args.append(value.root.shape[1] if isinstance(value, View) else value.shape[1])
    backend.launch(spec, render(spec.template, spec.entry, spec.params), args)


def op_of(kind: str, operands: Mapping[str, Array | View], names: Mapping[str, Sequence[str]], **attrs: Any) -> Op:
    """An op whose refs carry the operands' offsets."""
    refs = {name: Ref(name, value.offset, value.width) if isinstance(value, View) else Ref(name)
            for name, value in operands.items()}  # fmt: skip
    roles = {role: {name: refs[name] for name in given if name in refs} for role, given in names.items()}
    return Op(kind, roles["inputs"], roles["outputs"], roles.get("state", {}), attrs)


def types_of(operands: Mapping[str, Array | View]) -> dict[str, TensorType]:
    """Operand types; uint16 arrays are bf16."""
    names = {np.dtype(t): name for name, t in DTYPES.items()}
    plain = {name: value.array() if isinstance(value, View) else value for name, value in operands.items()}
    return {name: TensorType(value.shape, names[value.dtype]) for name, value in plain.items()}


@dataclass(frozen=True)
class Shape:
    key_heads: int = 1
    value_heads: int = 3
    dk: int = 128
    dv: int = 128

    @property
    def channels(self) -> int:
        return 2 * self.key_heads * self.dk + self.value_heads * self.dv

    @property
    def attrs(self) -> dict[str, int]:
        return {"key_heads": self.key_heads, "value_heads": self.value_heads, "dk": self.dk, "dv": self.dv}


@dataclass
class Tokens:
    """Inputs of a token sequence: convolved rows [n, channels] as bf16 bits, g and β [n, 2·Hv] float32."""

    y: Array
    gates: Array

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, rows: slice) -> Tokens:
        return Tokens(self.y[rows], self.gates[rows])


def random_tokens(shape: Shape, count: int, rng: np.random.Generator, decay: float = 0.1) -> Tokens:
    """Correlated rows (a common part in all tokens); ``decay`` is the mean of −g, 0.1 being that of the golden vectors."""
    rows = rng.normal(size=(count, shape.channels)) + 0.5 * rng.normal(size=shape.channels)
    g = -decay * rng.gamma(1.0, 1.0, size=(count, shape.value_heads))
    beta = 1 / (1 + np.exp(-rng.normal(size=g.shape)))
    return Tokens(to_bf16(rows), np.concatenate([g, beta], axis=1).astype(np.float32))


def reference(shape: Shape, tokens: Tokens, state: Array, rounded: bool = False) -> tuple[Array, Array]:
    """(o [n, Hv·Dv], state) of the float64 recurrence from ``state`` [Hv, Dv, Dk]. ``rounded``: the same formula with its
    outputs rounded, that is the state to float32 after every token: the error that this costs is what the bound counts."""
    op = Op("gdn", {}, {}, {}, shape.attrs)
    q, k, v = gdn.split_columns(op, from_bf16(tokens.y).astype(np.float64))
    g, beta = np.split(tokens.gates.astype(np.float64), 2, axis=1)
    if not rounded:
        o, state = gdn.recurrent(q, k, v, g, beta, state.astype(np.float64))
        return o.reshape(len(tokens), -1), state
    out = []
    for t in range(len(tokens)):
        row = slice(t, t + 1)
        o, state = gdn.recurrent(q[row], k[row], v[row], g[row], beta[row], state.astype(np.float64))
        state = state.astype(np.float32)
        out.append(o.reshape(1, -1))
    return np.concatenate(out), state


def assert_state(got: Array, shape: Shape, tokens: Tokens, start: Array, factor: float = 2.5) -> float:
    """The bound on a state: L2 error at most ``factor`` times that of the recurrence with only its outputs rounded; no
    element off by more than 20 units of the rms. Returns the ratio."""
    exact = reference(shape, tokens, start)[1]
    assert np.isfinite(got).all(), f"{np.sum(~np.isfinite(got))} state elements are not finite"
    floor = np.linalg.norm(reference(shape, tokens, start, rounded=True)[1] - exact)
    floor = max(floor, 0.25 * 2.0**-24 * np.linalg.norm(exact))
    error = got.astype(np.float64) - exact
    ratio = float(np.linalg.norm(error) / floor)
    assert ratio <= factor, f"state error is {ratio:.2f} x that of rounding the state (bound {factor})"
    unit = floor / np.sqrt(exact.size)
    assert np.abs(error).max() <= 20 * unit * factor, f"one state element is off by {np.abs(error).max() / unit:.1f} rms"
    return ratio


def golden_tokens() -> tuple[Shape, Tokens, dict[str, Array]]:
    """The gdn_* vectors as a token sequence, and all vectors."""
    gold = load_vectors()
    rows = np.concatenate([gold[f"gdn_{name}"].reshape(130, -1) for name in "qkv"], axis=1)
    return Shape(), Tokens(to_bf16(rows), np.concatenate([gold["gdn_g"], gold["gdn_beta"]], axis=1)), gold


@dataclass
class Layer:
    """State of one layer for ``slots`` sequences, and its launches. ``wide``: y and o lie inside wider buffers."""

    shape: Shape
    slots: int
    records: int
    backend: Any
    wide: bool = False
    overrides: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        s, (hk, hv, dk, dv) = self.slots, self.shape.attrs.values()
        self.recurrent = poisoned((s, hv, dv, dk), "f32")
        self.rec_k = poisoned((2, s, self.records, hk, dk), "f32")
        self.rec_u = poisoned((2, s, self.records, hv, dv), "f32")
        self.rec_alpha = poisoned((2, s, self.records, hv), "f32")
        self.pending = np.zeros(s, np.int32)
        self.parity = np.zeros(s, np.int32)
        self.length = np.zeros(s, np.int32)  # tokens behind each slot's state and records

    def state(self) -> dict[str, Array]:
        return {"recurrent": self.recurrent, "rec_k": self.rec_k, "rec_u": self.rec_u, "rec_alpha": self.rec_alpha}

    def begin(self, slot: int, state: Array, length: int = 5) -> None:
        """Put a committed state behind ``length`` tokens into a slot."""
        self.recurrent[slot], self.length[slot], self.pending[slot] = state, length, 0

    def _columns(self, lanes: Sequence[Tokens], width: int) -> dict[str, Array | View]:
        """y, gates and o of lanes × width columns; columns that no lane uses are NaN."""
        columns, extra = len(lanes) * width, 32 if self.wide else 0
        y = poisoned((columns, self.shape.channels + 2 * extra))
        gates = poisoned((columns, 2 * self.shape.value_heads), "f32")
        o = poisoned((columns, self.shape.value_heads * self.shape.dv + 2 * extra))
        for lane, tokens in enumerate(lanes):
            at = slice(lane * width, lane * width + len(tokens))
            y[at, extra : extra + self.shape.channels], gates[at] = tokens.y, tokens.gates
        return {"y": View(y, extra, self.shape.channels), "gates": gates,
                "o": View(o, extra, o.shape[1] - 2 * extra)}  # fmt: skip

    def _tables(self, slots: Sequence[int], lanes: Sequence[Tokens]) -> dict[str, Array]:
        return {"lane_slot": np.array(slots, np.int32), "lane_ncols": np.array([len(t) for t in lanes], np.int32),
                "lane_len": self.length[list(slots)].copy(), "slot_pending": self.pending,
                "slot_parity": self.parity}  # fmt: skip

    def _finish(self, operands: Mapping[str, Array | View], lanes: Sequence[Tokens], width: int) -> list[Array]:
        """Outputs per lane as float64; nothing else in the output buffer may have been written."""
        view = operands["o"]
        assert isinstance(view, View)
        untouched = np.ones(view.root.shape, bool)
        out = []
        for lane, tokens in enumerate(lanes):
            rows = slice(lane * width, lane * width + len(tokens))
            untouched[rows, view.offset : view.offset + view.width] = False
            out.append(decode(np.ascontiguousarray(view.array()[rows]), "bf16"))
        assert np.all(view.root[untouched] == 0xFFFF), "a column of no lane was written"
        return out

    def step(self, slots: Sequence[int], lanes: Sequence[Tokens], width: int, accepted: Sequence[int]) -> list[Array]:
        """One decode step; ``accepted`` columns per lane count as committed afterwards. Returns o per lane."""
        operands = {**self._columns(lanes, width), **self._tables(slots, lanes), **self.state()}
        op = op_of("gdn", operands, vars_of(gdn.Gdn), phase="decode", **self.shape.attrs)
        spec = recurrent_spec(op, types_of(operands), len(lanes), width, self.backend.caps())
        launch(self.backend, with_params(spec, self.overrides, self.shape), operands)
        for slot, tokens, count in zip(slots, lanes, accepted, strict=True):
            if len(tokens):
                self.pending[slot], self.length[slot] = count, self.length[slot] + count
                self.parity[slot] ^= 1
        return self._finish(operands, lanes, width)

    def prefill(self, slot: int, tokens: Tokens, width: int, chunked: bool = True) -> Array:
        """One prefill call of ``width`` columns of which len(tokens) are active. Returns o. ``chunked``: where the backend's
        device has room for it."""
        operands: dict[str, Array | View] = {**self._columns([tokens], width), **self._tables([slot], [tokens]), **self.state()}
        op = op_of("gdn", operands, vars_of(gdn.Gdn), phase="prefill", **self.shape.attrs)
        target = self.backend.caps()
        if chunked and chunked_fits(op, types_of(operands), target):
            values, ops = gdn.lower_prefill(op, types_of(operands), "t")
            for name, value in zip(("matrices", "rows"), values, strict=True):
                operands[name] = poisoned(value.type.shape, "f32")
            types = types_of(operands)
            gdn_intra_spec = intra_spec(ops[0], types, target)
            launch(self.backend, gdn_intra_spec, operands)
            launch(self.backend, with_params(carry_spec(ops[1], types, target), self.overrides, self.shape), operands)
        else:
            launch(self.backend, recurrent_spec(op, types_of(operands), 1, width, target), operands)
        if len(tokens):
            self.pending[slot], self.length[slot] = 0, self.length[slot] + len(tokens)
        return self._finish(operands, [tokens], width)[0]

    def commit(self, slot: int) -> Array:
        """The slot's state with its pending records folded in, by a step whose own column is not accepted."""
        rng = np.random.default_rng(0)
        self.step([slot], [random_tokens(self.shape, 1, rng)], 1, [0])
        return self.recurrent[slot].copy()


def vars_of(definition: type) -> dict[str, Sequence[str]]:
    """Operand names of an op definition by role."""
    return {role: getattr(definition, role) for role in ("inputs", "outputs", "state")}


def with_params(spec: KernelSpec, overrides: Mapping[str, int], shape: Shape) -> KernelSpec:
    """The same kernel with other tile parameters (``warps``, ``rows``), to test that bits do not depend on them."""
    known = {name: value for name, value in overrides.items() if name in spec.params}
    if not known:
        return spec
    params = {**spec.params, **known}
    warps = int(params["warps"])
    params["block"] = 32 * warps
    if "rows" in params:
        per_block = warps * (4 if shape.dk % 32 == 0 else 8) * int(params["rows"])
        smem = spec.smem
    else:
        per_block = 16 * warps
        params["smem"] = smem = carry_shared(shape.dk, warps)
    grid = (shape.value_heads * shape.dv // per_block, *spec.grid[1:])
    entry = spec.entry + "_" + "_".join(f"{name}{value}" for name, value in known.items())
    return replace(spec, params=params, grid=grid, block=32 * warps, smem=smem, entry=entry)

