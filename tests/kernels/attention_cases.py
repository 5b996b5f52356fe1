"""Random attention problems over a paged cache, shared by the attention tests and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from compiler.emit.render import render
from compiler.ir.op import Attr, Op
from compiler.ir.types import Ref, TensorType
from compiler.kernels.attention_decode import group_columns, merge_spec, partial_spec, row_limit, work_items
from compiler.kernels.attention_prefill import prefill_spec
from compiler.kernels.spec import DeviceCaps, KernelSpec
from compiler.ops.attention import attend, chunk_count, lower_decode, sigmoid
from compiler.ops.attn_prepare import LANE_TABLES
from tests.emulator.harness import from_bf16, poisoned, to_bf16

Array = np.ndarray[Any, Any]
PAGE = 64


@dataclass
class Case:
    """Lanes with ``before`` cached tokens and ``active`` columns of ``width``. bf16 arrays are uint16 bits; whatever a
    kernel may not read is NaN."""

    heads: int
    kv_heads: int
    dim: int
    width: int
    before: Array
    active: Array
    page_row: Array
    page_table: Array
    cache: Array
    qr: Array
    gate: Array

    def column(self, lane: int, t: int) -> Case:
        """Column t of a lane as a problem of its own (width 1); later tokens become NaN."""
        length = int(self.before[lane]) + t + 1
        cache, pages = self.cache.copy(), -(-int(self.before[lane] + self.active[lane]) // PAGE)
        for index, page in enumerate(self.page_table[self.page_row[lane], :pages]):
            cache[page, :, :, max(0, length - index * PAGE) :] = 0xFFFF
        row = slice(lane * self.width + t, lane * self.width + t + 1)
        return replace(self, width=1, before=np.array([length - 1], np.int32), active=np.ones(1, np.int32),
                       page_row=self.page_row[lane : lane + 1], cache=cache, qr=self.qr[row], gate=self.gate[row])

    @property
    def lanes(self) -> int:
        return len(self.before)

    def types(self, work: int = 1) -> dict[str, TensorType]:
        columns, width = self.lanes * self.width, self.heads * self.dim
        rows = {name: TensorType((columns, width), "bf16") for name in ("qr", "gate", "o")}
        lane = {name: TensorType((self.lanes,), "i32") for name in LANE_TABLES[:3]}
        return {**rows, **lane, "page_table": TensorType(self.page_table.shape, "i32"),
                "kv": TensorType(self.cache.shape, "bf16"), "work": TensorType((work, 4), "i32"),
                "work_count": TensorType((1,), "i32")}  # fmt: skip

    def op(self, phase: str) -> Op:
        inputs = {name: Ref(name) for name in ("qr", "gate", "kv", *LANE_TABLES, "work", "work_count")}
        attrs: dict[str, Attr] = {"phase": phase, "heads": self.heads, "kv_heads": self.kv_heads, "dim": self.dim}
        return Op("attention", inputs, {"o": Ref("o")}, {}, attrs)

    def rows(self) -> list[int]:
        """Rows of the active columns."""
        return [lane * self.width + t for lane in range(self.lanes) for t in range(int(self.active[lane]))]

    def keys_values(self, lane: int, short: int = 0) -> tuple[Array, Array]:
        """float64 [kv heads, tokens, D] of a lane; ``short`` pages are forgotten at the start."""
        length = int(self.before[lane] + self.active[lane])
        pages = self.page_table[self.page_row[lane], : -(-length // PAGE)][short:]
        picked = from_bf16(self.cache[pages]).astype(np.float64)
        flat = picked.transpose(1, 2, 0, 3, 4).reshape(2, self.kv_heads, -1, self.dim)[:, :, : length - short * PAGE]
        return flat[0], flat[1]

    def reference(self, short: int = 0) -> Array:
        """float64 [active columns, heads·D]: attention ⊙ σ(gate), nothing rounded."""
        out = []
        for lane in range(self.lanes):
            n = int(self.active[lane])
            if n == 0:
                continue
            rows = slice(lane * self.width, lane * self.width + n)
            q = from_bf16(self.qr[rows]).astype(np.float64).reshape(n, self.heads, self.dim)
            keys, values = self.keys_values(lane, short)
            attention = attend(q, keys, values, int(self.before[lane]) - short * PAGE).reshape(n, -1)
            out.append(attention * sigmoid(from_bf16(self.gate[rows])))
        return np.concatenate(out)


def make_case(before: Sequence[int], active: Sequence[int], width: int, *, heads: int = 6, kv_heads: int = 2,
              dim: int = 32, row_pages: int = 8, seed: int = 0, sharpness: float = 1.0) -> Case:  # fmt: skip
    """A problem with permuted lanes, pages and page rows. ``sharpness`` scales the scores."""
    random = np.random.default_rng(seed)
    lanes = len(before)
    tokens = np.array(before) + np.array(active)
    assert max(-(-tokens // PAGE)) <= row_pages
    pages = int(sum(-(-tokens // PAGE))) + 3
    ids = random.permutation(pages)
    cache = poisoned((pages, 2, kv_heads, PAGE, dim))
    page_table = np.full((lanes + 2, row_pages), 1 << 20, np.int32)  # an unused entry leads far outside
    page_row = random.permutation(lanes + 2)[:lanes].astype(np.int32)
    used = 0
    for lane in range(lanes):
        count = -(-int(tokens[lane]) // PAGE)
        page_table[page_row[lane], :count] = ids[used : used + count]
        for index, page in enumerate(ids[used : used + count]):
            n = min(PAGE, int(tokens[lane]) - index * PAGE)
            cache[page, :, :, :n] = to_bf16(random.standard_normal((2, kv_heads, n, dim)))
        used += count
    qr, gate = (poisoned((lanes * width, heads * dim)) for _ in range(2))
    for lane in range(lanes):
        rows = slice(lane * width, lane * width + active[lane])
        qr[rows] = to_bf16(random.standard_normal(qr[rows].shape) * sharpness)
        gate[rows] = to_bf16(random.standard_normal(gate[rows].shape))
    return Case(heads, kv_heads, dim, width, np.array(before, np.int32), np.array(active, np.int32), page_row,
                page_table, cache, qr, gate)  # fmt: skip


def consumer_card(backend: Any, sms: int = 5) -> DeviceCaps:
    """The backend's device restricted to what a consumer card has: 99 KiB of shared memory per block, mma.sync only."""
    own = backend.caps(sms=sms)
    return replace(own, smem_block=min(own.smem_block, 99 * 1024), smem_sm=min(own.smem_sm, 100 * 1024), wgmma=False,
                   clusters=False)  # fmt: skip


WORK_LIST = """
#include <ninferc/attention/worklist.cuh>
using namespace ninferc;
NINFERC_KERNEL(work_list, 64, 1)(const i32* lane_ncols, const i32* lane_len, const i32* lane_page_row, i32* work,
                                 i32* work_count) {{
  attention::build_work_list<{lanes}, {width}, {kv_heads}, {group}>(lane_ncols, lane_len, lane_page_row, work, work_count);
}}
"""


def run(backend: Any, spec: KernelSpec, values: dict[str, Any], repeats: int = 1) -> None:
    """Render and launch ``spec`` with its arguments taken from ``values`` by name; ``x_stride`` is the width of ``x``."""
    args = []
    for name in spec.args:
        if name in spec.scalars:
            args.append(spec.scalars[name])
        elif name in values:
            args.append(values[name])
        else:
            args.append(int(values[name.removesuffix("_stride")].shape[-1]))
    backend.launch(spec, render(spec.template, spec.entry, spec.params), args, repeats)


def build_work(backend: Any, case: Case, extra: int = 0) -> tuple[Array, Array]:
    """The device-built work list: i32[items, 4] and i32[1]."""
    rows = row_limit(case.dim, backend.caps())
    group = group_columns(case.width, case.heads, case.kv_heads, rows)
    chunks = chunk_count(case.page_table.shape[1] * PAGE)
    items = work_items(case.lanes, case.width, case.heads, case.kv_heads, rows, chunks) + extra
    work, count = np.full((items, 4), -1, np.int32), np.full(1, -1, np.int32)
    source = WORK_LIST.format(lanes=case.lanes, width=case.width, kv_heads=case.kv_heads, group=group)
    spec = KernelSpec("work_list", "", {}, (1, 1, 1), 64, 0, ("lane_ncols", "lane_len", "lane_page_row", "work", "work_count"))
    backend.launch(spec, source, [case.active, case.before, case.page_row, work, count])
    return work, count


def run_decode(backend: Any, case: Case, target: DeviceCaps, grid: int = 0, early: bool = False,
               planner: Any = None) -> Array:  # fmt: skip
    """Work list (by ``planner`` or the same backend), partial kernel and merge of ``case``; o bits [columns, heads·D], NaN
    where nothing was written."""
    work, count = build_work(planner or backend, case)
    types = case.types(len(work))
    (partial_o, partial_ml), (partial, merge) = lower_decode(case.op("decode"), types, "a")
    types |= {"partial_o": partial_o.type, "partial_ml": partial_ml.type}
    values: dict[str, Any] = {
        "qr": case.qr, "gate": case.gate, "kv": case.cache, "lane_len": case.before, "lane_ncols": case.active,
        "page_table": case.page_table, "work": work, "work_count": count, "o": poisoned(case.qr.shape),
        "partial_o": poisoned(partial_o.type.shape, "f32"), "partial_ml": poisoned(partial_ml.type.shape, "f32"),
    }  # fmt: skip
    spec = partial_spec(partial, types, case.width, target, early)
    spec = replace(spec, grid=(grid, 1, 1)) if grid else spec
    run(backend, spec, values)
    run(backend, merge_spec(merge, types, case.width, target, early), values)
    out: Array = values["o"]
    return out


Choice = Callable[[Op, Mapping[str, TensorType], DeviceCaps], KernelSpec]


def run_prefill(backend: Any, case: Case, target: DeviceCaps, choose: Choice = prefill_spec) -> Array:
    """Prefill kernel on a case of one lane, launched twice over the same scratch; o bits [columns, heads·D], NaN where
    nothing was written."""
    spec = choose(case.op("prefill"), case.types(), target)
    values: dict[str, Any] = {
        "qr": case.qr, "gate": case.gate, "kv": case.cache, "lane_len": case.before, "lane_ncols": case.active,
        "lane_page_row": case.page_row, "page_table": case.page_table, "o": poisoned(case.qr.shape),
    }  # fmt: skip
    for name, nbytes in spec.scratch.items():
        values[name] = np.zeros(nbytes, np.uint8) if name in spec.zeroed else poisoned(nbytes, np.uint8)
    run(backend, spec, values, repeats=2)
    for name in spec.zeroed:
        assert not values[name].any(), f"{name} was not left zero"
    out: Array = values["o"]
    return out
