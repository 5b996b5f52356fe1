"""Control, norm and sampling kernels against their NumPy references."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import compiler.ops  # noqa: F401
from compiler.control import (
    EGRESS_ENTRIES,
    RING_WORDS,
    ControlLimits,
    DeviceFault,
    Opcode,
    control_tables,
    egress_words,
    table_offsets,
)
from compiler.emit.render import render
from compiler.ir.op import Op, definition
from compiler.ir.types import Ref, TensorType
from compiler.kernels import control
from runtime.control import Ingress, sampling_words
from runtime.vm.context import VMContext
from tests.emulator.harness import assert_close_to_fp64, from_bf16, poisoned, to_bf16

LIMITS = ControlLimits(lanes=3, slots=4, max_context=300, pages=15, chunk=128, score_chunk=128, records=4,
                       vocab_rows=520, vocab_ids=500,
                       kv_heads=2, rotary_pairs=4, queue=64)  # fmt: skip
TABLES = control_tables(LIMITS)
OFFSETS, WORDS = table_offsets(TABLES)


class Tables:
    """A control block with named views, plus what lies outside it."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.arrays: dict[str, np.ndarray[Any, Any]] = {"block": np.zeros(WORDS, np.int32)}
        for name, value in TABLES.items():
            start = OFFSETS[name]
            self.arrays[name] = self.arrays["block"][start : start + value.type.elements].reshape(value.type.shape)
        self.arrays["ring"] = np.zeros(RING_WORDS, np.uint32)
        self.arrays["token_counts"] = rng.integers(0, 3, (LIMITS.slots, LIMITS.vocab_rows)).astype(np.int32)
        self.arrays["egress"] = np.full((EGRESS_ENTRIES, egress_words(LIMITS.lanes)), 77, np.int32)

    def copy(self) -> Tables:
        twin = Tables(np.random.default_rng(0))
        for name in ("block", "ring", "token_counts", "egress"):
            twin.arrays[name][...] = self.arrays[name]
        return twin


def context(op: Op, arrays: dict[str, np.ndarray[Any, Any]], lanes: int, width: int, ncols: Any) -> VMContext:
    return VMContext(op, False, lanes, width, np.asarray(ncols), lambda name: arrays[name],
                     lambda name: TensorType(arrays[name].shape, "i32" if arrays[name].dtype == np.int32 else "bf16"),
                     lambda name, rows: arrays[name])  # fmt: skip


def refs(names: tuple[str, ...], rename: dict[str, str] | None = None) -> dict[str, Ref]:
    return {name: Ref((rename or {}).get(name, name)) for name in names}


def types_of(op: Op, arrays: dict[str, np.ndarray[Any, Any]]) -> dict[str, TensorType]:
    return {name: TensorType(arrays[ref.value].shape, "i32") for name, ref in op.refs()}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("lanes", "width"), [(1, 1), (3, 1), (2, 4)])
def test_begin_and_advance(kernel_backend: Any, lanes: int, width: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    mine = Tables(rng)
    extra = {"tokens": np.full(lanes * width, -9, np.int32), "positions": np.full((3, lanes * width), -9, np.int32),
             "work": np.full((2000, 4), -9, np.int32), "work_count": np.full(1, -9, np.int32)}  # fmt: skip
    ingress = Ingress(mine.arrays["ring"], LIMITS)
    for lane in range(LIMITS.lanes):
        length = int(rng.integers(0, 290))
        tail = int(rng.integers(0, 9))
        for table, value in {"lane_slot": 3 - lane, "lane_page_row": lane, "lane_len": length,
                             "lane_prompt_len": length + int(rng.integers(0, 4)), "lane_limit": 2 + lane,
                             "queue_head": 60, "queue_tail": 60 + tail, "lane_rope_delta": lane,
                             "lane_frozen": int(rng.random() < 0.2)}.items():  # fmt: skip
            ingress.write(0, table, [value], (lane,))
        ingress.write(0, "queue", rng.integers(0, 500, 64), (lane, 0))
        ingress.write(0, "lane_stops", rng.integers(0, 500, 16), (lane, 0))
    ingress.clear_counts(0, 2)
    ingress.write(5, "lane_frozen", [1, 1, 1], (0,))  # due later: must not be applied now
    twin = mine.copy()
    twin_extra = {name: array.copy() for name, array in extra.items()}

    known = definition("begin")
    begin = Op("begin", refs(("ring", "lane_page_row")), {}, refs(known.state),
               {"phase": "decode", "kv_heads": 2, "max_context": 300, "vocab": 500})  # fmt: skip
    spec = control.begin_spec(begin, types_of(begin, mine.arrays | extra), lanes, width, 4, 64, kernel_backend.caps())
    source = render(spec.template, spec.entry, {**spec.params, "vocab": 520})
    kernel_backend.launch(spec, source, [(mine.arrays | extra)[name] for name in spec.args])
    known.reference(begin, context(begin, twin.arrays | twin_extra, lanes, width, np.zeros(LIMITS.lanes, int)))
    assert np.array_equal(mine.arrays["block"], twin.arrays["block"])
    assert np.array_equal(mine.arrays["token_counts"], twin.arrays["token_counts"])
    for name in ("tokens", "positions"):
        assert np.array_equal(extra[name], twin_extra[name]), name
    assert mine.arrays["lane_frozen"].sum() < 3

    sampled = rng.integers(0, 500, lanes * width).astype(np.int32)
    for tables in (mine, twin):
        tables.arrays["lane_stops"][0, 3] = sampled[int(mine.arrays["lane_ncols"][0]) - 1]
    advance = Op("advance", refs(("sampled", "run_ncols", "run_len", "run_slot"),
                                 {"run_ncols": "lane_ncols", "run_len": "lane_len", "run_slot": "lane_slot"}), {},
                 refs(definition("advance").state), {"phase": "decode", "max_context": 300})  # fmt: skip
    arrays = mine.arrays | {"sampled": sampled}
    spec = control.advance_spec(advance, types_of(advance, arrays), lanes, width, kernel_backend.caps())
    values = {name: arrays[ref.value] for name, ref in advance.refs()} | {"pf_control": None}
    kernel_backend.launch(spec, render(spec.template, spec.entry, spec.params), [values[name] for name in spec.args])
    definition("advance").reference(advance, context(advance, twin.arrays | {"sampled": sampled}, lanes, width,
                                                     twin.arrays["lane_ncols"]))  # fmt: skip
    for name in ("block", "token_counts", "egress"):
        np.testing.assert_array_equal(mine.arrays[name], twin.arrays[name], name)


@pytest.mark.parametrize("fault", [DeviceFault.NONE, DeviceFault.EXCHANGE])
def test_a_token_outside_of_the_vocabulary_goes_nowhere(kernel_backend: Any, fault: DeviceFault) -> None:
    """As a failed exchange leaves it: lanes 0 and 2 are reported without a token, lane 1 is served. An earlier fault stays."""
    mine = Tables(np.random.default_rng(2))
    for name, value in {"lane_slot": [0, 1, 3], "lane_ncols": 1, "lane_limit": 9, "step": [4, 0, 0, fault]}.items():
        mine.arrays[name][:] = value
    twin = mine.copy()
    advance = Op("advance", refs(("sampled", "run_ncols", "run_len", "run_slot"),
                                 {"run_ncols": "lane_ncols", "run_len": "lane_len", "run_slot": "lane_slot"}), {},
                 refs(definition("advance").state), {"phase": "decode", "max_context": 300})  # fmt: skip
    arrays = mine.arrays | {"sampled": np.array([-67, 519, 520], np.int32)}
    spec = control.advance_spec(advance, types_of(advance, arrays), 3, 1, kernel_backend.caps())
    values = {name: arrays[ref.value] for name, ref in advance.refs()} | {"pf_control": None}
    kernel_backend.launch(spec, render(spec.template, spec.entry, spec.params), [values[name] for name in spec.args])
    counts = twin.arrays["token_counts"].copy()
    definition("advance").reference(advance, context(advance, twin.arrays | {"sampled": arrays["sampled"]}, 3, 1,
                                                     twin.arrays["lane_ncols"]))  # fmt: skip
    for name in ("block", "token_counts", "egress"):
        np.testing.assert_array_equal(mine.arrays[name], twin.arrays[name], name)
    counts[1, 519] += 1
    assert np.array_equal(mine.arrays["token_counts"], counts)
    assert mine.arrays["step"][3] == mine.arrays["egress"][4, 1] == (fault or DeviceFault.TOKEN_RANGE)
    assert mine.arrays["egress"][4, 4::4].tolist() == [0, 1, 0] and mine.arrays["queue_tail"].tolist() == [0, 1, 0]


def test_records_outside_set_the_fault(kernel_backend: Any) -> None:
    rng = np.random.default_rng(5)
    bad = [(Opcode.WRITE, 4, WORDS - 3), (Opcode.WRITE, 5000, 0), (Opcode.CLEAR_COUNTS, 0, 4), (9, 0, 0)]
    for opcode, count, destination in bad:
        mine = Tables(rng)
        mine.arrays["ring"][:4] = (1, 0, int(opcode) | count << 8, destination)
        arrays = mine.arrays | {"pf_tokens": np.zeros(128, np.int32), "pf_positions": np.zeros((3, 128), np.int32)}
        begin = Op("begin", refs(("ring",)), {}, refs(("block", "token_counts", "step", "lane_ncols", "lane_len", "tokens",
                                                       "positions"),
                                                      {"lane_ncols": "pf_lane_ncols", "lane_len": "pf_lane_len",
                                                       "tokens": "pf_tokens", "positions": "pf_positions"}),
                   {"phase": "prefill", "kv_heads": 2, "max_context": 300, "vocab": 500})  # fmt: skip
        spec = control.begin_spec(begin, types_of(begin, arrays), 1, 128, 4, 64, kernel_backend.caps())
        before = mine.arrays["block"].copy()
        values = {name: arrays[ref.value] for name, ref in begin.refs()}
        kernel_backend.launch(spec, render(spec.template, spec.entry, spec.params), [values[name] for name in spec.args])
        assert mine.arrays["step"][3] == 1
        mine.arrays["step"][:] = before[:4]
        assert np.array_equal(mine.arrays["block"], before)


@pytest.mark.parametrize("width", [2, 256, 5120])
def test_rmsnorm(kernel_backend: Any, width: int) -> None:
    rng = np.random.default_rng(width)
    x, w = to_bf16(rng.normal(0, 3, (3, width))), to_bf16(rng.normal(0, 0.3, width))
    y = poisoned((3, width))
    op = Op("rmsnorm", refs(("x", "w")), refs(("y",)), {}, {"eps": 1e-6})
    spec = control.rmsnorm_spec(op, {"x": TensorType(x.shape, "bf16")}, kernel_backend.caps())
    kernel_backend.launch(spec, render(spec.template, spec.entry, spec.params), [x, width, w, y, width, 1e-6])
    wide = from_bf16(x).astype(np.float64)
    reference = wide / np.sqrt((wide * wide).mean(axis=1, keepdims=True) + 1e-6) * (1 + from_bf16(w).astype(np.float64))
    assert_close_to_fp64(y, reference, "bf16")


@pytest.mark.parametrize("case", ["greedy", "ties", "presets", "top_k", "min_p", "counts"])
@pytest.mark.parametrize(("rows", "width", "vocab"), [(2, 1, 500), (4, 2, 9000)])
def test_sample(kernel_backend: Any, case: str, rows: int, width: int, vocab: int) -> None:
    lanes = rows // width
    rng = np.random.default_rng(len(case) * 100 + rows)
    logits = to_bf16(rng.normal(0, 3, (rows, vocab + 20)))
    logits[:, vocab:] = to_bf16(np.array(50.0))  # padded ids must never win
    if case == "ties":
        logits[:, 7::501] = to_bf16(np.array(20.0))
    params = {"temperature": 0.0, "top_p": 0.9, "min_p": 0.0, "presence": 0.0, "frequency": 0.0, "top_k": 20}
    params["seed"] = 1 << 40 | 5
    if case not in ("greedy", "ties"):
        params |= {"temperature": 0.8}
    special = {"top_k": {"top_k": 3}, "min_p": {"min_p": 0.2, "top_p": 1.0}, "counts": {"presence": 1.5, "frequency": 0.5}}
    params |= special.get(case, {})
    counts = (rng.random((5, vocab + 20)) < 0.3).astype(np.int32) * rng.integers(1, 4, (5, vocab + 20)).astype(np.int32)
    arrays = {
        "logits": logits, "lane_sampling": np.array([sampling_words(params)] * lanes, dtype=np.int64).astype(np.int32),
        "run_slot": np.arange(4, 4 - lanes, -1, dtype=np.int32), "run_len": np.arange(10, 10 + lanes, dtype=np.int32),
        "run_ncols": np.full(lanes, width, np.int32), "lane_prompt_len": np.full(lanes, 11, np.int32), "token_counts": counts,
        "token": poisoned(rows, np.int32),
    }  # fmt: skip
    if lanes > 1:
        arrays["run_ncols"][1] = width - 1  # an inactive column writes nothing
    op = Op("sample", refs(tuple(n for n in arrays if n != "token")), refs(("token",)), {}, {"vocab": vocab})
    kinds = {name: TensorType(a.shape, "bf16" if name == "logits" else "i32") for name, a in arrays.items()}
    spec = control.sample_spec(op, kinds, lanes, width, kernel_backend.caps())
    scratch = {"candidates": np.full(spec.scratch["candidates"] // 8, 0xFFFFFFFFFFFFFFFF, np.uint64),
               "arrivals": np.zeros(rows, np.uint32)}  # fmt: skip
    values: dict[str, Any] = arrays | scratch | {"pf_control": None, "logits_stride": logits.shape[1]}
    source = render(spec.template, spec.entry, spec.params)
    kernel_backend.launch(spec, source, [values[name] for name in spec.args])
    wide = arrays | {"logits": from_bf16(logits), "token": np.full(rows, -1, np.int32)}
    known = definition("sample")
    ctx = VMContext(op, False, lanes, width, arrays["run_ncols"], lambda name: wide[name], lambda name: kinds[name],
                    lambda name, rows: wide[name])  # fmt: skip
    known.reference(op, ctx)
    assert np.array_equal(arrays["token"], wide["token"])
    assert not scratch["arrivals"].any()
    kernel_backend.launch(spec, source, [values[name] for name in spec.args])  # counters are reusable
    assert np.array_equal(arrays["token"], wide["token"])
