"""Exchange kernels, one rank at a time: sums, words on the wire, slots, a lost peer (emulator and GPU)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compiler.control import DeviceFault
from compiler.emit.arch import caps
from compiler.emit.render import render
from compiler.ir.op import Op, bf16_round
from compiler.ir.types import Ref, TensorType
from compiler.kernels.exchange import begin_spec, candidates_spec, merge_spec, residual_spec
from compiler.kernels.linear_columns import Product, Tile, choose, problem, spec_of
from compiler.kernels.spec import KernelSpec
from compiler.ops.exchange_begin import number
from compiler.ops.sample import MAX_CANDIDATES
from tests.emulator.harness import from_bf16, to_bf16
from tests.gpu_launch import EmulatorLauncher
from tests.kernels.encoded_weights import random_weights

Array = np.ndarray[Any, Any]
PEER, HOST, STAGED = range(3)
EPS = 1e-6


def launch(backend: Any, spec: KernelSpec, args: dict[str, Any]) -> None:
    source = render(spec.template, spec.entry, spec.params)
    values = [args[name] if name in args else spec.scalars[name] for name in spec.args]
    if isinstance(backend, EmulatorLauncher):
        from tests.emulator.emulator import compile_kernel
        from tests.emulator.emulator import launch as emulate

        emulate(compile_kernel(source, name=spec.entry), spec.grid, spec.block, values, spec.smem, backend.seed,
                concurrency="grid")  # fmt: skip
    else:
        backend.launch(spec, source, values)


def residual_op(rank: int, wire: str, ordinal: int = 0) -> Op:
    refs = {name: Ref(name) for name in ("partial", "peer_1", "residual", "sequence", "step")}
    return Op("exchange_residual", refs, {"y": Ref("y")}, attrs={"ordinal": ordinal, "wire": wire}, rank=rank)


def types_of(columns: int, width: int) -> dict[str, TensorType]:
    wide, narrow = TensorType((columns, width), "f32"), TensorType((columns, width), "bf16")
    return {"partial": wide, "peer_1": wide, "residual": narrow, "y": narrow}


def as_words(values: Array, sequence: int, wire: str) -> Array:
    """The 8-byte words that carry ``values`` (FP32, flat)."""
    low = values.astype(np.float32).view(np.uint32)
    if wire == "bf16":
        bits = to_bf16(values).astype(np.uint32)
        low = bits[0::2] | bits[1::2] << 16
    return low.astype(np.uint64) | np.uint64(sequence) << np.uint64(32)


class Site:
    """Buffers of one rank for one exchange of ``columns`` × ``width``."""

    def __init__(self, columns: int, width: int, wire: str, base: int, transport: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.parts = [(rng.standard_normal((columns, width)) * 10.0 ** rng.integers(-3, 3, (columns, width))).astype(np.float32)
                      for _ in range(2)]  # fmt: skip
        # where the partial sums cancel, the order of the three terms decides every bit
        self.parts[1][:, ::3], self.parts[0][:, ::3] = -1e7 - self.parts[1][:, ::3], 1e7 + self.parts[1][:, ::3]
        self.residual = to_bf16(rng.standard_normal((columns, width)))
        self.words = columns * width // (2 if wire == "bf16" else 1)
        self.args: dict[str, Any] = {
            "residual": self.residual, "residual_stride": width, "partial_stride": width, "y_stride": width,
            "y": np.full((columns, width), 0xFFFF, np.uint16), "norm_w": to_bf16(rng.standard_normal(width)),
            "normed": np.full((columns, width), 0xFFFF, np.uint16), "normed_stride": width, "rows": None,
            "sequence": np.array([base, 0, 0, 0], np.uint32), "step": np.zeros(4, np.int32),
            "outbox": np.zeros(2 * self.words, np.uint64), "inbox": np.zeros(2 * self.words, np.uint64),
            "relay": np.zeros(2 * self.words, np.uint64), "hang": np.zeros(1, np.uint32), "transport": transport,
            "slot_words": self.words}  # fmt: skip

    def expected(self, wire: str) -> Array:
        shown = [bf16_round(p) if wire == "bf16" else p for p in self.parts]
        return to_bf16((shown[0] + shown[1]) + from_bf16(self.residual))


@pytest.mark.parametrize("transport", [PEER, HOST, STAGED], ids=["peer", "host", "staged"])
@pytest.mark.parametrize("wire", ["f32", "bf16"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("columns", "width", "norm"), [(1, 128, False), (4, 256, True), (2, 2048, False)])
def test_sum(kernel_backend: Any, transport: int, wire: str, rank: int, columns: int, width: int, norm: bool) -> None:
    base, ordinal = (1 << 32) - 3, 4  # the number wraps
    sequence = number(base, ordinal)
    site = Site(columns, width, wire, base, transport)
    site.args["partial"] = site.parts[rank]
    theirs = site.parts[1 - rank].reshape(-1)
    slot = sequence % 2 * site.words
    if transport == STAGED:
        site.args["inbox"] = np.zeros(columns * width + 4, np.float32)
        site.args["inbox"][: theirs.size] = theirs
    else:
        site.args["inbox"][:] = as_words(theirs + 1, sequence - 1, wire).repeat(2)[: 2 * site.words]  # old words, other slot
        site.args["inbox"][slot : slot + site.words] = as_words(theirs, sequence, wire)
    norm_op = Op("rmsnorm", {"x": Ref("y"), "w": Ref("w")}, {"y": Ref("n")}, attrs={"eps": EPS}) if norm else None
    spec = residual_spec(residual_op(rank, wire, ordinal), types_of(columns, width), caps(kernel_backend.arch), norm_op)
    launch(kernel_backend, spec, site.args)
    want = site.expected(wire)
    assert np.array_equal(site.args["y"], want)
    assert site.args["step"][3] == 0 and site.args["hang"][0] == 0
    if transport != STAGED:
        sent = site.args["outbox"][slot : slot + site.words]
        assert np.array_equal(sent, as_words(site.parts[rank].reshape(-1), sequence, wire))
        assert not site.args["outbox"][(1 - sequence % 2) * site.words :][: site.words].any()
    if norm:
        x = from_bf16(want).astype(np.float64)
        normed = x / np.sqrt((x * x).mean(1, keepdims=True) + EPS) * (1 + from_bf16(site.args["norm_w"]))
        assert np.abs(from_bf16(site.args["normed"]) - normed).max() <= 2**-7 * np.abs(normed).max()


def test_device_side_row_count(kernel_backend: Any) -> None:
    """Prefill: columns past the count are neither sent nor awaited nor written."""
    site = Site(4, 128, "f32", 2, PEER)
    site.args |= {"partial": site.parts[0], "rows": np.array([2], np.int32)}
    half = as_words(site.parts[1][:2].reshape(-1), 2, "f32")
    site.args["inbox"][: half.size] = half
    launch(kernel_backend, residual_spec(residual_op(0, "f32"), types_of(4, 128), caps(kernel_backend.arch)), site.args)
    assert np.array_equal(site.args["y"][:2], site.expected("f32")[:2]) and np.all(site.args["y"][2:] == 0xFFFF)
    assert not site.args["outbox"][half.size : site.words].any()


@pytest.mark.parametrize("case", ["a word with an old number", "another rank gave up"])
def test_lost_peer(kernel_backend: Any, case: str) -> None:
    """A word that keeps an old number is never taken for data: the fault word and the hang word are set."""
    site = Site(1, 128, "f32", 6, PEER)
    words = as_words(site.parts[1].reshape(-1), 6, "f32")
    words[77] = as_words(site.parts[1].reshape(-1), 4, "f32")[77]
    site.args["inbox"][: site.words] = words
    site.args["partial"] = site.parts[0]
    if case != "a word with an old number":
        site.args["hang"][0] = 1
    launch(kernel_backend, residual_spec(residual_op(0, "f32"), types_of(1, 128), caps(kernel_backend.arch)), site.args)
    assert site.args["step"][3] == DeviceFault.EXCHANGE and site.args["hang"][0] == 1


def test_a_fault_ends_every_later_wait(kernel_backend: Any) -> None:
    """After a fault nothing is sent, so the peer cannot go on with half a replay either."""
    site = Site(2, 128, "f32", 6, PEER)
    site.args["partial"] = site.parts[0]
    site.args["step"][3] = DeviceFault.EXCHANGE
    launch(kernel_backend, residual_spec(residual_op(0, "f32"), types_of(2, 128), caps(kernel_backend.arch)), site.args)
    assert not site.args["outbox"].any() and site.args["hang"][0] == 0


@pytest.mark.parametrize("start", [0, 5, (1 << 32) - 2])
def test_begin(kernel_backend: Any, start: int) -> None:
    sequence = np.array([0, start, 0, 0], np.uint32)
    op = Op("exchange_begin", {}, {}, {"sequence": Ref("sequence")}, {"count": 9})
    launch(kernel_backend, begin_spec(op, caps(kernel_backend.arch)), {"sequence": sequence})
    assert list(sequence[:2]) == [max(start, 2), number(max(start, 2), 9)]


@pytest.mark.parametrize("transport", [PEER, HOST, STAGED], ids=["peer", "host", "staged"])
@pytest.mark.parametrize("rank", [0, 1])
def test_greedy_ties_take_the_lowest_row(kernel_backend: Any, transport: int, rank: int) -> None:
    """Candidates of a rank's half, then the merge: equal maxima on both halves, a half without any id, NaN logits."""
    rows, share, ids = 3, 96, 180
    logits = np.full((rows, 2 * share), 1.0, np.float32)
    logits[0, [50, 95, 96, 170]] = 7.0
    logits[1, [96, 120]] = 7.0
    logits[1, 191] = 99.0  # a padded row
    logits[2, [3, 100]] = np.nan, 4.0
    arch = caps(kernel_backend.arch)
    tables: dict[str, Any] = {"lane_sampling": np.zeros((rows, 8), np.int32), "run_slot": np.zeros(rows, np.int32),
                              "run_ncols": np.ones(rows, np.int32), "token_counts": np.zeros((1, 2 * share), np.int32),
                              "pf_control": None, "run_len": np.ones(rows, np.int32),
                              "lane_prompt_len": np.ones(rows, np.int32)}  # fmt: skip
    lists = []
    for half in range(2):
        op = Op("sample_candidates", {n: Ref(n) for n in ("logits", "token_counts")}, {"candidates": Ref("c")},
                attrs={"first": half * share, "vocab": ids}, rank=half)  # fmt: skip
        types = {"logits": TensorType((rows, share), "bf16"), "token_counts": TensorType((1, 2 * share), "i32")}
        spec = candidates_spec(op, types, rows, 1, arch)
        out = np.full((rows, 2 * MAX_CANDIDATES), np.nan, np.float32)
        scratch = {name: np.zeros(size, np.uint8) for name, size in spec.scratch.items()}
        launch(kernel_backend, spec, tables | scratch | {"logits": to_bf16(logits[:, half * share : half * share + share]),
                                                         "logits_stride": share, "candidates": out})  # fmt: skip
        lists.append(out)
    words = lists[0].size
    inbox = np.zeros(2 * words, np.uint64)
    if transport == STAGED:
        inbox = lists[1 - rank].reshape(-1).copy()
    else:
        inbox[words:] = as_words(lists[1 - rank].reshape(-1), 3, "f32")
    op = Op("sample_merge", {n: Ref(n) for n in ("candidates", "peer_1")}, {"token": Ref("t")}, attrs={"ordinal": 1}, rank=rank)
    spec = merge_spec(op, {"candidates": TensorType(lists[0].shape, "f32")}, rows, 1, arch)
    token = np.full(rows, -1, np.int32)
    launch(kernel_backend, spec, tables | {
        "candidates": lists[rank], "token": token, "sequence": np.array([2, 0, 0, 0], np.uint32), "step": np.zeros(4, np.int32),
        "outbox": np.zeros(2 * words, np.uint64), "inbox": inbox, "relay": np.zeros(2 * words, np.uint64),
        "hang": np.zeros(1, np.uint32), "transport": transport, "slot_words": words})  # fmt: skip
    assert token.tolist() == [50, 96, 100]


PUSHED = [("NVFP4", 128, 640, 1, None), ("BF16", 40, 200, 8, None), ("Q5G64_F16S", 50, 1280, 3, None),
          ("W8G32_F16S", 80, 2560, 5, Tile(1, 2, 1, 3, True, 1, split=True)),
          ("FP8_E4M3FN_ROW_BF16S", 33, 336, 2, None)]  # fmt: skip


@pytest.mark.parametrize("case", ["peer", "host", "staged", "lost"])
@pytest.mark.parametrize(("format", "n", "k", "columns", "tile"), PUSHED, ids=lambda value: str(value).replace(" ", ""))
def test_a_product_sends_what_it_stores(kernel_backend: Any, format: str, n: int, k: int, columns: int, tile: Tile | None,
                                        case: str) -> None:  # fmt: skip
    """Every partial sum leaves as one word as well, of the exchange's number, none twice and none for rows that do not exist;
    nothing leaves where copies carry the sums or after the peer was lost."""
    rng, target, base, ordinal = np.random.default_rng(5), caps(kernel_backend.arch, sms=3), (1 << 32) - 3, 4
    weights, x = random_weights(rng, format, n, k), to_bf16(rng.standard_normal((columns, k)))
    stored = Product(format, n, k, columns, 2 if tile else 1, "store_f32")
    outputs = []
    slot_words = columns * n + 6
    outbox = np.zeros(2 * slot_words, np.uint64)
    for product in (stored, replace(stored, epilogue="push_f32")):
        spec = spec_of(product, tile or choose(product, target), target)
        y = np.full((columns, n + 8), np.nan, np.float32)
        args: dict[str, Any] = {"x": x, "x_stride": k, "y": y, "y_stride": n + 8, "ordinal": ordinal, "slot_words": slot_words,
                                "transport": {"peer": PEER, "host": HOST, "staged": STAGED}.get(case, PEER), "outbox": outbox,
                                "sequence": np.array([base, 0, 0, 0], np.uint32), "step": np.zeros(4, np.int32)}  # fmt: skip
        args["step"][3] = DeviceFault.EXCHANGE if case == "lost" else 0
        args |= zip(("w_codes", "w_high", "w_scales", "w_divisor"), weights.pointers(), strict=True)
        args |= {name: np.zeros(nbytes, np.uint8) for name, nbytes in spec.scratch.items()}
        launch(kernel_backend, spec, args)
        outputs.append(y[:, :n].copy())
    assert np.array_equal(outputs[0], outputs[1]) and not np.isnan(outputs[0]).any()
    want = np.zeros_like(outbox)
    if case in ("peer", "host"):
        sequence = number(base, ordinal)
        start = sequence % 2 * slot_words
        want[start : start + columns * n] = as_words(outputs[1].reshape(-1), sequence, "f32")
    assert np.array_equal(outbox, want)


def test_wide_products_do_not_push() -> None:
    assert "at most 8" in str(problem(Product("BF16", 128, 256, 9, 1, "push_f32"), caps("sm_90a")))
