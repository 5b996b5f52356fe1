"""Exchange kernels, one rank at a time: sums, words on the wire, slots, a lost peer (emulator and GPU)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from compiler.control import DeviceFault
from compiler.emit.arch import caps
from compiler.emit.render import render
from compiler.ir.op import Attr, Op, bf16_round
from compiler.ir.types import IRError, Ref, TensorType
from compiler.kernels import exchange
from compiler.kernels.control import rmsnorm_spec
from compiler.kernels.exchange import Mail, Tiles, begin_spec, candidates_spec, merge_spec, residual_spec
from compiler.kernels.linear_columns import Product, Tile, choose, problem, spec_of
from compiler.kernels.spec import KernelSpec
from compiler.ops.exchange_begin import number
from compiler.ops.sample import MAX_CANDIDATES
from runtime.control import sampling_words
from tests.emulator import toolchain
from tests.emulator.harness import from_bf16, to_bf16
from tests.gpu_launch import EmulatorLauncher
from tests.kernels.encoded_weights import random_weights
from tests.kernels.programmatic import ProgrammaticEmulator

Array = np.ndarray[Any, Any]
PEER, HOST, STAGED = range(3)
EPS = 1e-6
TILES = Tiles(2, 96)  # tokens and values, neither of which divides what is exchanged


def launch(backend: Any, spec: KernelSpec, args: dict[str, Any]) -> None:
    source = render(spec.template, spec.entry, spec.params)
    values = [args[name] if name in args else spec.scalars[name] for name in spec.args]
    if type(backend) is EmulatorLauncher:
        from tests.emulator.emulator import compile_kernel
        from tests.emulator.emulator import launch as emulate

        emulate(compile_kernel(source, name=spec.entry), spec.grid, spec.block, values, spec.smem, backend.seed,
                concurrency="grid")  # fmt: skip
    else:
        backend.launch(spec, source, values)


def residual_op(rank: int, wire: str, ordinal: int = 0, pushed: bool = False, tiles: bool = False) -> Op:
    refs = {name: Ref(name) for name in ("partial", "peer_1", "residual", "sequence", "step")}
    attrs: dict[str, Attr] = {"ordinal": ordinal, "wire": wire, "pushed": pushed, "tiles": tiles}
    return Op("exchange_residual", refs, {"y": Ref("y")}, attrs=attrs, rank=rank)


def types_of(columns: int, width: int, wire: str = "f32") -> dict[str, TensorType]:
    partial, row = TensorType((columns, width), wire), TensorType((columns, width), "bf16")
    return {"partial": partial, "peer_1": partial, "residual": row, "y": row}


def stored(values: Array, wire: str) -> Array:
    """``values`` (FP32) as a product stores them for the wire."""
    return to_bf16(values) if wire == "bf16" else values.astype(np.float32)


def as_words(values: Array, sequence: int, wire: str) -> Array:
    """The 8-byte words that carry ``values`` (FP32, flat)."""
    low = np.ascontiguousarray(stored(values, wire)).view(np.uint32)
    return low.astype(np.uint64) | np.uint64(sequence) << np.uint64(32)


class MailBox:
    """Memory of one reader, by slot: words, numbers of slices, bytes."""

    def __init__(self, mail: Mail) -> None:
        self.mail, self.array = mail, np.zeros(mail.size // 8, np.uint64)

    def words(self, sequence: int) -> Array:
        return self.array[sequence % 2 * self.mail.words :][: self.mail.words]

    def lines(self, sequence: int) -> Array:
        """One per slice, the word that counts."""
        lines = self.array[2 * self.mail.words :][: 16 * self.mail.slices].reshape(2, self.mail.slices, 8)
        return np.asarray(lines[sequence % 2, :, 0])

    def bytes(self, sequence: int) -> Array:
        return self.array.view(np.uint8)[self.mail.copied_to + sequence % 2 * self.mail.nbytes :][: self.mail.nbytes]


class Site:
    """Buffers of one rank for one exchange of ``columns`` × ``width``, over ``transport`` in ``form`` (words, slices)."""

    def __init__(self, columns: int, width: int, wire: str, base: int, transport: int, ordinal: int = 0, seed: int = 0,
                 parts: int = 1) -> None:  # fmt: skip
        rng = np.random.default_rng(seed)
        self.parts = [(rng.standard_normal((columns, width)) * 10.0 ** rng.integers(-3, 3, (columns, width))).astype(np.float32)
                      for _ in range(2)]  # fmt: skip
        # where the partial sums cancel, the order of the three terms decides every bit
        self.parts[1][:, ::3], self.parts[0][:, ::3] = -1e7 - self.parts[1][:, ::3], 1e7 + self.parts[1][:, ::3]
        self.residual = to_bf16(rng.standard_normal((columns, width)))
        self.sequence, self.wire, self.transport = number(base, ordinal), wire, transport
        nbytes = columns * width * (2 if wire == "bf16" else 4)
        mail = Mail(nbytes // 4 + 4, max(columns * parts, TILES.count(columns, width)) + 1, nbytes + 32)
        self.inbox, self.outbox = MailBox(mail), MailBox(mail)
        self.args: dict[str, Any] = {
            "residual": self.residual, "residual_stride": width, "partial_stride": width, "y_stride": width,
            "y": np.full((columns, width), 0xFFFF, np.uint16), "norm_w": to_bf16(rng.standard_normal(width)),
            "normed": np.full((columns, width), 0xFFFF, np.uint16), "normed_stride": width, "rows": None,
            "sequence": np.array([base, 0, 0, 0], np.uint32), "step": np.zeros(4, np.int32), "outbox": self.outbox.array,
            "inbox": self.inbox.array, "hang": np.zeros(1, np.uint32), "transport": transport, "slot_words": mail.words,
            "slot_slices": mail.slices, "slot_bytes": mail.nbytes, "apart": 1, "tiles": 0}  # fmt: skip
        self.slices = columns * parts

    def put(self, rank: int) -> None:
        """Own partial sums of ``rank``."""
        self.args["partial"] = stored(self.parts[rank], self.wire)

    def deliver(self, rank: int, form: str, columns: int | None = None) -> None:
        """What the other rank sends to ``rank``: its first ``columns`` columns."""
        theirs = self.parts[1 - rank][:columns]
        raw = stored(theirs, self.wire).view(np.uint8).reshape(-1)
        if self.transport == STAGED:
            self.inbox.bytes(0)[: raw.size] = raw
        elif form == "words":
            self.inbox.words(self.sequence)[: raw.size // 4] = as_words(theirs.reshape(-1), self.sequence, self.wire)
        else:
            self.inbox.bytes(self.sequence)[: raw.size] = raw
            lines = TILES.count(*theirs.shape) if form == "tiles" else self.slices * len(theirs) // len(self.residual)
            self.inbox.lines(self.sequence)[:lines] = np.uint64(self.sequence << 32)

    def expected(self) -> Array:
        shown = [bf16_round(p) if self.wire == "bf16" else p for p in self.parts]
        return to_bf16((shown[0] + shown[1]) + from_bf16(self.residual))

    def sent(self, rank: int, form: str) -> Array:
        """A mail box that holds what ``rank`` must send, and nothing else."""
        box, mine = MailBox(self.outbox.mail), self.parts[rank]
        if form == "words":
            words = as_words(mine.reshape(-1), self.sequence, self.wire)
            box.words(self.sequence)[: words.size] = words
        elif form == "slices":
            raw = stored(mine, self.wire).view(np.uint8).reshape(-1)
            box.bytes(self.sequence)[: raw.size] = raw
            box.lines(self.sequence)[: self.slices] = np.uint64(self.sequence << 32)
        return box.array


@pytest.fixture
def slices(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Chooses slices or words whatever the size."""
    def choose_form(form: str) -> None:
        monkeypatch.setattr(exchange, "WORDS_UP_TO", dict.fromkeys(("host", "peer"), 0 if form == "slices" else 1 << 30))
    return choose_form  # fmt: skip


NORM = Op("rmsnorm", {"x": Ref("x"), "w": Ref("w")}, {"y": Ref("n")}, attrs={"eps": EPS})
FORMS = [(PEER, "words"), (PEER, "slices"), (HOST, "words"), (HOST, "slices"), (HOST, "sparing"), (PEER, "pushed"),
         (STAGED, "words"), (STAGED, "slices"), (PEER, "tiles"), (HOST, "tiles"), (STAGED, "tiles")]  # fmt: skip


@pytest.mark.parametrize(("transport", "form"), FORMS, ids=lambda v: v if isinstance(v, str) else ("peer", "host", "staged")[v])
@pytest.mark.parametrize("wire", ["f32", "bf16"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("columns", "width", "norm"), [(1, 128, False), (3, 640, True), (2, 2048, False)])
def test_sum(kernel_backend: Any, slices: Any, monkeypatch: pytest.MonkeyPatch, transport: int, form: str, wire: str, rank: int,
             columns: int, width: int, norm: bool) -> None:  # fmt: skip
    if form == "pushed" and wire == "bf16":
        pytest.skip("products push FP32")
    base, ordinal = (1 << 32) - 3, 4  # the number wraps
    slices("slices" if form == "tiles" and rank else form)  # what the kernel would send over another transport does not matter
    monkeypatch.setattr(exchange, "SPARING_FROM", 0 if form == "sparing" else 1 << 30)
    target = kernel_backend.caps(sms=2 if norm else 132)  # few multiprocessors: a block walks over columns
    tiles = form == "tiles"
    spec = residual_spec(residual_op(rank, wire, ordinal, form == "pushed", tiles), types_of(columns, width, wire), target,
                         NORM if norm else None, TILES if tiles else None, settled=wire == "f32" and rank == 0)  # fmt: skip
    assert spec.grid[0] == (2 if width == 2048 else 1) and spec.grid[1] == (2 if norm else columns)
    site = Site(columns, width, wire, base, transport, ordinal, parts=spec.grid[0])
    site.inbox.words(site.sequence + 1)[:] = as_words(site.parts[0].reshape(-1)[:1], site.sequence - 1, "f32")[0]  # old words
    site.inbox.lines(site.sequence + 1)[:] = np.uint64((site.sequence - 1) << 32)
    site.put(rank)
    site.deliver(rank, form if form in ("slices", "tiles") else "words")
    site.args["tiles"] = {PEER: 1, HOST: 2, STAGED: 0}[transport] if tiles else 0
    site.args["apart"] = rank
    launch(kernel_backend, spec, site.args)
    want = site.expected()
    assert np.array_equal(site.args["y"], want)
    assert site.args["step"][3] == 0 and site.args["hang"][0] == 0
    leaves = "nothing" if transport == STAGED or form in ("pushed", "tiles") else "slices" if form == "slices" else "words"
    assert np.array_equal(site.outbox.array, site.sent(rank, leaves))
    if norm:
        x = from_bf16(want).astype(np.float64)
        normed = x / np.sqrt((x * x).mean(1, keepdims=True) + EPS) * (1 + from_bf16(site.args["norm_w"]))
        assert np.abs(from_bf16(site.args["normed"]) - normed).max() <= 2**-7 * np.abs(normed).max()


@pytest.mark.parametrize("columns", [1, 3])
def test_the_norm_behind_has_the_bits_of_the_norm_alone(kernel_backend: Any, columns: int) -> None:
    width = 1664  # an odd share of pairs for some threads
    site = Site(columns, width, "f32", 6, PEER)
    site.put(0)
    site.deliver(0, "words")
    target = kernel_backend.caps()
    launch(kernel_backend, residual_spec(residual_op(0, "f32"), types_of(columns, width), target, NORM), site.args)
    row = TensorType((columns, width), "bf16")
    alone = np.full((columns, width), 0xFFFF, np.uint16)
    launch(kernel_backend, rmsnorm_spec(NORM, {"x": row, "y": row}, target), {
        "x": site.args["y"], "x_stride": width, "w": site.args["norm_w"], "y": alone, "y_stride": width,
        "eps": EPS})  # fmt: skip
    assert np.array_equal(site.args["normed"], alone)


@pytest.mark.parametrize("form", ["words", "slices"])
def test_a_kernel_that_can_take_tiles_sends_where_products_do_not(kernel_backend: Any, slices: Any, form: str) -> None:
    """The same kernel without tiles: what it sends and takes are words or slices."""
    slices(form)
    site = Site(3, 640, "bf16", 6, HOST)
    site.put(1)
    site.deliver(1, form)
    spec = residual_spec(residual_op(1, "bf16", tiles=True), types_of(3, 640, "bf16"), kernel_backend.caps(), NORM, TILES)
    launch(kernel_backend, spec, site.args)
    assert np.array_equal(site.args["y"], site.expected()) and np.array_equal(site.outbox.array, site.sent(1, form))


@pytest.mark.parametrize("tiles", [1, 2])
@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("missing", range(4))
def test_every_tile_is_awaited(kernel_backend: Any, slices: Any, missing: int, blocks: int, tiles: int) -> None:
    """Of two by two tiles one keeps an old number: its columns, and no others, miss what it holds, also where one block walks
    over all columns, and where blocks wait that would have sent."""
    slices("slices")
    site = Site(3, 128, "bf16", 6, PEER)
    site.put(0)
    site.deliver(0, "tiles")
    site.inbox.lines(6)[missing] = np.uint64(4 << 32)
    site.args["tiles"] = tiles
    target = kernel_backend.caps(sms=blocks)
    spec = residual_spec(residual_op(0, "bf16", tiles=True), types_of(3, 128, "bf16"), target, None, TILES)
    assert spec.grid[1] == blocks
    launch(kernel_backend, spec, site.args)
    assert site.args["step"][3] == DeviceFault.EXCHANGE and site.args["hang"][0] == 1
    right = (site.args["y"] == site.expected()).all(1)
    assert right.tolist() == ([True, True, False] if missing >= 2 else [False, False, True])


@pytest.mark.parametrize("form", ["words", "slices", "tiles"])
def test_device_side_row_count(kernel_backend: Any, slices: Any, form: str) -> None:
    """Prefill: columns past the count are neither sent nor awaited nor written."""
    slices("words" if form == "words" else "slices")
    site = Site(4, 128, "bf16", 2, PEER)
    site.put(0)
    site.args["tiles"] = int(form == "tiles")
    site.args["rows"] = np.array([2], np.int32)
    site.deliver(0, form, 2)
    tiles = TILES if form == "tiles" else None
    op = residual_op(0, "bf16", tiles=tiles is not None)
    spec = residual_spec(op, types_of(4, 128, "bf16"), kernel_backend.caps(), None, tiles)
    launch(kernel_backend, spec, site.args)
    assert np.array_equal(site.args["y"][:2], site.expected()[:2]) and np.all(site.args["y"][2:] == 0xFFFF)
    assert not site.outbox.words(2)[128:].any() and not site.outbox.bytes(2)[512:].any() and not site.outbox.lines(2)[2:].any()


@pytest.mark.parametrize("case", ["a word with an old number", "a slice with an old number", "another rank gave up"])
def test_lost_peer(kernel_backend: Any, slices: Any, case: str) -> None:
    """A word or slice that keeps an old number is never taken for data: the fault word and the hang word are set."""
    form = "slices" if "slice" in case else "words"
    slices(form)
    site = Site(1, 128, "f32", 6, PEER)
    site.put(0)
    site.deliver(0, form)
    if form == "words":
        site.inbox.words(6)[77] = as_words(site.parts[1].reshape(-1), 4, "f32")[77]
    else:
        site.inbox.lines(6)[0] = np.uint64(4 << 32)
    if case == "another rank gave up":
        site.args["hang"][0] = 1
    launch(kernel_backend, residual_spec(residual_op(0, "f32"), types_of(1, 128), kernel_backend.caps()), site.args)
    assert site.args["step"][3] == DeviceFault.EXCHANGE and site.args["hang"][0] == 1
    assert not np.array_equal(site.args["y"], site.expected())


@pytest.mark.skipif(toolchain.missing_reason() is not None, reason=str(toolchain.missing_reason()))
@pytest.mark.parametrize("transport", [PEER, HOST, STAGED], ids=["PEER", "HOST", "STAGED"])
def test_what_an_exchange_touches_before_its_wait(transport: int) -> None:
    """Residual and numbers, but never the sums that the product stores."""
    site = Site(2, 128, "f32", 6, transport)
    site.put(0)
    site.deliver(0, "words")
    emulator = ProgrammaticEmulator(("norm_w",))
    spec = residual_spec(residual_op(0, "f32", pushed=True), types_of(2, 128), emulator.caps(), NORM, settled=True)
    launch(emulator, spec, site.args)
    assert np.array_equal(site.args["y"], site.expected())


@pytest.mark.parametrize("form", ["words", "slices"])
def test_a_fault_ends_every_later_wait(kernel_backend: Any, slices: Any, form: str) -> None:
    """After a fault nothing is sent, so the peer cannot go on with half a replay either."""
    slices(form)
    site = Site(2, 128, "f32", 6, PEER)
    site.put(0)
    site.args["step"][3] = DeviceFault.EXCHANGE
    launch(kernel_backend, residual_spec(residual_op(0, "f32"), types_of(2, 128), kernel_backend.caps()), site.args)
    assert not site.outbox.array.any() and site.args["hang"][0] == 0


def test_large_payloads_travel_as_slices() -> None:
    """By payload and transport; both ranks and every number of multiprocessors decide alike."""
    found = {}
    for columns, wire in ((1, "f32"), (2, "f32"), (3, "bf16"), (12, "f32"), (13, "f32"), (1024, "bf16")):
        forms = set()
        for rank, sms in ((0, 66), (1, 66), (0, 132), (1, 132)):
            spec = residual_spec(residual_op(rank, wire), types_of(columns, 5120, wire), caps("sm_90a", sms=sms))
            forms.add((spec.params["host_slices"], spec.params["peer_slices"]))
        assert len(forms) == 1
        found[columns] = forms.pop()
    assert found == {1: (False, False), 2: (True, False), 3: (False, False), 12: (True, False), 13: (True, True),
                     1024: (True, True)}  # fmt: skip
    pushed = residual_spec(residual_op(0, "f32", pushed=True), types_of(8, 5120), caps("sm_90a"))
    assert not pushed.params["host_slices"] and pushed.params["sparing"] and pushed.grid == (5, 8, 1)


def test_mail_holds_every_form() -> None:
    """Room for words, lines and bytes of the largest exchange, none shared."""
    wide: list[tuple[Op, dict[str, TensorType]]] = [
            (residual_op(0, "bf16"), types_of(1024, 5120, "bf16")), (residual_op(0, "f32", pushed=True), types_of(8, 5120)),
            (residual_op(0, "f32"), types_of(4, 5120))]  # fmt: skip
    mail = Mail.of((op, types, residual_spec(op, types, caps("sm_90a"), NORM)) for op, types in wide)
    assert mail == Mail(8 * 5120, 1024, 1024 * 5120 * 2)
    assert mail.size == 2 * (8 * 5120 * 8 + 1024 * 64 + 10 * 1024 * 1024) and mail.copied_to == mail.size - 2 * mail.nbytes
    op, types = residual_op(0, "bf16", tiles=True), types_of(1024, 5120, "bf16")
    small, big = (residual_spec(op, types, caps("sm_90a"), NORM, tiles) for tiles in (Tiles(352, 128), Tiles(16, 64)))
    assert [Mail.of([(op, types, spec)]).slices for spec in (small, big)] == [1024, 64 * 80]


def test_tiles_go_with_ops_that_take_them() -> None:
    for tiles, given in ((True, None), (False, TILES)):
        with pytest.raises(IRError, match="tiles are sent by products of many rows"):
            residual_spec(residual_op(0, "bf16", tiles=tiles), types_of(3, 128, "bf16"), caps("sm_90a"), None, given)
    with pytest.raises(IRError, match="words are pushed of FP32 sums"):
        residual_spec(residual_op(0, "bf16", pushed=True), types_of(3, 128, "bf16"), caps("sm_90a"))


@pytest.mark.parametrize("start", [0, 5, (1 << 32) - 2])
def test_begin(kernel_backend: Any, start: int) -> None:
    sequence = np.array([0, start, 0, 0], np.uint32)
    op = Op("exchange_begin", {}, {}, {"sequence": Ref("sequence")}, {"count": 9})
    launch(kernel_backend, begin_spec(op, kernel_backend.caps()), {"sequence": sequence})
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
    arch = kernel_backend.caps(sms=2)  # a block walks over rows
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
    mail = Mail(128, 1, 1024)
    inbox, outbox = MailBox(mail), MailBox(mail)
    theirs = lists[1 - rank].reshape(-1)
    if transport == STAGED:
        inbox.bytes(0)[: 4 * theirs.size] = theirs.view(np.uint8)
    else:
        inbox.words(3)[: theirs.size] = as_words(theirs, 3, "f32")
    op = Op("sample_merge", {n: Ref(n) for n in ("candidates", "peer_1")}, {"token": Ref("t")}, attrs={"ordinal": 1}, rank=rank)
    spec = merge_spec(op, {"candidates": TensorType(lists[0].shape, "f32")}, rows, 1, arch)
    token = np.full(rows, -1, np.int32)
    launch(kernel_backend, spec, tables | {
        "candidates": lists[rank], "token": token, "sequence": np.array([2, 0, 0, 0], np.uint32), "step": np.zeros(4, np.int32),
        "outbox": outbox.array, "inbox": inbox.array, "hang": np.zeros(1, np.uint32), "transport": transport,
        "slot_words": mail.words, "slot_slices": mail.slices, "slot_bytes": mail.nbytes})  # fmt: skip
    sent = MailBox(mail)
    if transport != STAGED:
        sent.words(3)[: theirs.size] = as_words(lists[rank].reshape(-1), 3, "f32")
    assert np.array_equal(outbox.array, sent.array)
    assert token.tolist() == [50, 96, 100]


def test_a_lost_peer_leaves_a_token_of_the_vocabulary(kernel_backend: Any) -> None:
    """Sampled from own candidates that lie below what stands in the lost peer's place, 20 values that are all alike; not from
    what an earlier row of the block, whose words arrived, left in shared memory."""
    rows, mail = 16, Mail(16 * 40, 1, 1024)
    candidates = np.full((rows, 2 * MAX_CANDIDATES), np.nan, np.float32)
    candidates[:, :3], candidates[:, MAX_CANDIDATES : MAX_CANDIDATES + 3] = (-1, -1, -2), (7, 9, 11)
    op = Op("sample_merge", {n: Ref(n) for n in ("candidates", "peer_1")}, {"token": Ref("t")}, attrs={"ordinal": 1}, rank=0)
    spec = merge_spec(op, {"candidates": TensorType(candidates.shape, "f32")}, rows, 1, kernel_backend.caps(sms=2))
    token, step, inbox = np.full(rows, -1, np.int32), np.zeros(4, np.int32), MailBox(mail)
    arrived = np.tile(np.concatenate([np.linspace(0, 1, MAX_CANDIDATES), np.arange(100, 120)]), 2)
    inbox.words(3)[: arrived.size] = as_words(arrived, 3, "f32")
    words = sampling_words({"temperature": 5.0, "top_p": 1.0, "min_p": 0.0, "presence": 0.0, "frequency": 0.0, "top_k": 20,
                            "seed": 1})  # fmt: skip
    launch(kernel_backend, spec, {
        "candidates": candidates, "lane_sampling": np.array([words] * rows, np.int64).astype(np.int32),
        "run_len": np.arange(rows, dtype=np.int32), "run_ncols": np.ones(rows, np.int32),
        "lane_prompt_len": np.ones(rows, np.int32), "pf_control": None, "token": token, "step": step,
        "sequence": np.array([2, 0, 0, 0], np.uint32), "outbox": MailBox(mail).array, "inbox": inbox.array,
        "hang": np.ones(1, np.uint32), "transport": PEER, "slot_words": mail.words, "slot_slices": mail.slices,
        "slot_bytes": mail.nbytes})  # fmt: skip
    assert step[3] == DeviceFault.EXCHANGE
    assert set(token[:2].tolist()) <= {7, 9, 11, *range(100, 120)}
    assert set(token[2:].tolist()) <= {0, 7, 9, 11}


PUSHED = [("NVFP4", 128, 640, 1, None), ("BF16", 40, 200, 8, None), ("Q5G64_F16S", 50, 1280, 3, None),
          ("W8G32_F16S", 80, 2560, 5, Tile(1, 2, 1, 3, True, 1, split=True)),
          ("FP8_E4M3FN_ROW_BF16S", 33, 336, 2, None)]  # fmt: skip


@pytest.mark.parametrize("case", ["peer", "host", "staged", "lost"])
@pytest.mark.parametrize(("format", "n", "k", "columns", "tile"), PUSHED, ids=lambda value: str(value).replace(" ", ""))
def test_a_product_sends_what_it_stores(kernel_backend: Any, format: str, n: int, k: int, columns: int, tile: Tile | None,
                                        case: str) -> None:  # fmt: skip
    """Every partial sum leaves as one word as well, of the exchange's number, none twice and none for rows that do not exist;
    nothing leaves where copies carry the sums or after the peer was lost."""
    rng, target, base, ordinal = np.random.default_rng(5), kernel_backend.caps(sms=3), (1 << 32) - 3, 4
    weights, x = random_weights(rng, format, n, k), to_bf16(rng.standard_normal((columns, k)))
    stored = Product(format, n, k, columns, 2 if tile else 1, "store_f32")
    outputs = []
    mail = Mail(columns * n + 6, 3, 64)
    outbox = MailBox(mail)
    over = {"host": HOST, "staged": STAGED}.get(case, PEER)
    for product in (stored, replace(stored, epilogue="push_f32")):
        spec = spec_of(product, tile or choose(product, target), target)
        y = np.full((columns, n + 8), np.nan, np.float32)
        args: dict[str, Any] = {"x": x, "x_stride": k, "y": y, "y_stride": n + 8, "ordinal": ordinal, "slot_words": mail.words,
                                "transport": over, "outbox": outbox.array,
                                "sequence": np.array([base, 0, 0, 0], np.uint32), "step": np.zeros(4, np.int32)}  # fmt: skip
        args["step"][3] = DeviceFault.EXCHANGE if case == "lost" else 0
        args |= zip(("w_codes", "w_high", "w_scales", "w_divisor"), weights.pointers(), strict=True)
        args |= {name: np.zeros(nbytes, np.uint8) for name, nbytes in spec.scratch.items()}
        launch(kernel_backend, spec, args)
        outputs.append(y[:, :n].copy())
    assert np.array_equal(outputs[0], outputs[1]) and not np.isnan(outputs[0]).any()
    want, sequence = MailBox(mail), number(base, ordinal)
    if case in ("peer", "host"):
        want.words(sequence)[: columns * n] = as_words(outputs[1].reshape(-1), sequence, "f32")
    assert np.array_equal(outbox.array, want.array)


def test_wide_products_do_not_push() -> None:
    assert "at most 8" in str(problem(Product("BF16", 128, 256, 9, 1, "push_f32")))
