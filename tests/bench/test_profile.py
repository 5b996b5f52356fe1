"""Profiles: time stamps in kernels, what leaving kernels out measures, the page with the timeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import caps
from compiler.emit.nvrtc import CompileError, Cubin, Resources, compile_source
from compiler.emit.render import RenderError, render
from compiler.emit.stamp import STAMP_BYTES, SUFFIX, stamped
from compiler.kernels.exchange import KINDS
from compiler.program.io import ProgramError
from compiler.program.model import Call, Phase
from runtime.bench import profile as profiling
from runtime.bench.profile import KernelProfile, Profiler, Span, StepProfile, align, is_control, read_stamps
from runtime.bench.profile_page import profile_html, profile_text
from runtime.cuda.driver import DeviceError
from tests import models
from tests.cli.conftest import rejected, run_cli
from tests.compile import instantiations as inst
from tests.emulator.harness import poisoned
from tests.kernels.encoded_weights import random_weights
from tests.kernels.test_embed import spec_for

US = 1e-6


def test_a_stamped_kernel_does_the_same_and_notes_its_time(kernel_backend: Any) -> None:
    rng = np.random.default_rng(1)
    weights = random_weights(rng, "Q4G64_F16S", 256, 192)
    tokens = np.array([0, 255, 7, 128], np.int32)
    spec = spec_for("Q4G64_F16S", 256, 192, 4, kernel_backend.caps())
    source = render(spec.template, spec.entry, spec.params)
    plain, noted, stamp = poisoned((4, 192)), poisoned((4, 192)), np.zeros(2, np.uint64)
    kernel_backend.launch(spec, source, [tokens, *weights.pointers(), plain, 192])
    kernel_backend.launch(replace(spec, entry=spec.entry + SUFFIX), stamped(spec.entry, source),
                          [tokens, *weights.pointers(), noted, 192, stamp])  # fmt: skip
    assert np.array_equal(plain, noted)
    start, end = read_stamps(np.array([stamp]))
    assert start[0] == 0 and 0 < end[0] < 1
    assert ~stamp[0] < stamp[1]


def test_every_kernel_can_be_stamped() -> None:
    kernels = [*inst.kernels(inst.TINY, "sm_90a", inst.STEP, tp=2), *inst.kernels(inst.TINY, "sm_86", inst.WIDTHS)]
    for kernel in kernels:
        spec = kernel.spec
        text = stamped(spec.entry, render(spec.template, spec.entry, spec.params))
        assert text.count("ninferc_stamp") == 3 and text.count("NINFERC_KERNEL(") == 1
        assert f"NINFERC_KERNEL({spec.entry}{SUFFIX}," in text
    by_template = {kernel.spec.template: kernel.spec for kernel in kernels if kernel.decode and "sm90a" in kernel.spec.entry}
    for template in ("gdn_layer.cu.j2", "linear_columns.cu.j2"):
        spec = by_template[template]
        image = compile_source(spec.entry + SUFFIX, stamped(spec.entry, render(template, spec.entry, spec.params)), "sm_90a")
        assert image.resources.local == 0


@pytest.mark.parametrize("source", ["", "NINFERC_KERNEL(other, 1, 1)(int x) {}", "NINFERC_KERNEL(k, 1, 1)() {}" * 2])
def test_what_is_no_single_kernel_is_refused(source: str) -> None:
    with pytest.raises(RenderError, match="kernel k: . definitions"):
        stamped("k", source)


def test_a_node_that_did_not_run_is_an_error() -> None:
    stamps = np.array([[~np.uint64(5), 9], [0, 0]], np.uint64)
    with pytest.raises(DeviceError, match="node 1 .* no time stamp"):
        read_stamps(stamps)
    start, end = read_stamps(np.array([[~np.uint64(1000), 3000], [~np.uint64(2500), 4000]], np.uint64))
    assert start == pytest.approx([0, 1.5 * US]) and end == pytest.approx([2 * US, 3 * US])


def span(index: int, rank: int, kinds: str, start: float, end: float, nbytes: int = 1000) -> Span:
    return Span(index, rank, f"kernel_{kinds}", kinds, index // 4, start * US, end * US, nbytes)


def test_clocks_of_two_devices_meet_at_the_exchanges() -> None:
    """Device 1's timer is 500 us ahead; its product is slower, so it starts the exchange later and both end together."""
    ahead = 500.0
    raw = [span(0, 0, "linear", 0, 10), span(1, 1, "linear", ahead + 1, ahead + 14),
           span(2, 0, "exchange_residual", 10, 17), span(3, 1, "exchange_residual", ahead + 14, ahead + 17),
           span(4, 0, "linear", 17, 20), span(5, 1, "linear", ahead + 17, ahead + 21)]  # fmt: skip
    got = {s.index: (s.start / US, s.end / US) for s in align(raw)}
    assert got[0] == pytest.approx((0, 10)) and got[1] == pytest.approx((1, 14)) and got[3] == pytest.approx((14, 17))
    alone = align([span(0, 0, "begin", 5, 6), span(1, 0, "linear", 5.5, 9)])
    assert (alone[0].start, alone[1].end) == pytest.approx((0, 4 * US))


# -- the page, from recorded measurements

HOSTILE = 'x"><script>alert(1)</script><img src="http://example.com/a.png">'


def recorded(devices: int = 2) -> StepProfile:
    """A step of 1000 us: products of 100 us that start 20 us before the one in front ends."""
    spans = [span(2 * i + rank, rank, ("linear", "attention", "gdn", "rmsnorm")[i % 4], 100 * i - 20 * (i > 0), 100 * (i + 1))
             for i in range(10) for rank in range(devices)]  # fmt: skip
    if devices == 1:
        spans = [replace(s, index=i) for i, s in enumerate(spans)]
    kernels = (KernelProfile("product", "linear", 6, 660 * US, 600 * US, 6 * 400_000_000),
               KernelProfile("product_wide", "linear", 1, 110 * US, 100 * US, 400_000_000),
               KernelProfile("attend", "attention", 3, 300 * US, 300 * US, 0))  # fmt: skip
    return StepProfile(HOSTILE, "decode1x1", 1, 1, 1024, tuple(f"GPU <{i}>" for i in range(devices)), 1000 * US, 1010 * US,
                       kernels, tuple(spans))  # fmt: skip


class Page(HTMLParser):
    """Tags with their attributes, text, and whether every tag was closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def test_page_is_self_contained_and_escaped() -> None:
    text = "".join(profile_html(recorded()))
    page = Page(text)
    assert page.open == [] and "http" not in text.replace(HOSTILE.replace('"', "&quot;").replace("<", "&lt;")
                                                          .replace(">", "&gt;"), "").replace("http-equiv", "")  # fmt: skip
    assert not {tag for tag, _ in page.tags} & {"script", "img", "link", "iframe", "object", "a", "image", "use"}
    assert not any(name in ("src", "href", "srcset", "onload") for _, attrs in page.tags for name in attrs)
    assert HOSTILE in page.text and "<script" not in text and "GPU <0>" in page.text


def bars(text: str) -> list[tuple[str, float, float, float]]:
    found = [attrs for tag, attrs in Page(text).tags if tag == "rect"]
    return [(str(a["class"]), float(str(a["x"])), float(str(a["width"])), float(str(a["y"]))) for a in found]


def test_timeline_shows_every_node_on_every_device_and_its_overlap() -> None:
    """1000 us stand in three lines of at most 400 us; a node that crosses the end of a line is drawn in both."""
    text = "".join(profile_html(recorded()))
    assert text.count("<svg") == 3 and text.count("device 0<") == 3 + 0 and text.count("device 1<") == 3
    work = [bar for bar in bars(text) if bar[0] == "bar"]
    pale = [bar for bar in bars(text) if bar[0] == "bar wait"]
    assert len(pale) == 2 * 9 and all(bar[2] == pytest.approx(20 / 400 * (1180 - 60), abs=0.1) for bar in pale)
    assert len(work) == 2 * 10
    assert {bar[3] for bar in work} == {0, 14, 36, 50}  # two rows for each device
    per_device = sum(bar[2] for bar in work if bar[3] < 20)
    assert per_device == pytest.approx(1000 / 400 * (1180 - 60), rel=1e-3)  # the solid parts fill the step


def test_one_device_short_step() -> None:
    short = recorded(1)
    short = replace(short, spans=short.spans[:3])
    text = "".join(profile_html(short))
    assert text.count("<svg") == 1 and "device 1" not in text
    ends = [x + width for kind, x, width, _ in bars(text) if kind == "bar"]
    assert max(ends) == pytest.approx(1180, abs=0.1)  # 300 us fill the line


def test_text_has_kernels_and_ops() -> None:
    lines = list(profile_text(recorded()))
    kernel, op = lines[1].split(), next(line for line in lines if line.startswith("linear ")).split()
    assert kernel == ["product", "linear", "6", "110.00", "100.00", "10.00", "400.00", "4000", "60.0%"]
    assert op == ["linear", "7", "110.00", "100.00", "10.00", "400.00", "4000", "70.0%"]
    assert lines[3].split() == ["attend", "attention", "3", "100.00", "100.00", "0.00", "0.00", "-", "30.0%"]
    assert "step 1.000 ms, kernels account for 100.0%" in lines[-1] and "1.010 ms while noting" in lines[-1]


# -- measuring, on devices that only keep time


class Clockwork:
    """Stands for the bench and the backend: each call takes its time, less what overlaps with the call in front."""

    OVERLAP = 0.25 * US

    def __init__(self, tp: int) -> None:
        self.program = compile_program(models.artifact("dense-small", "bf16"), caps("sm_90a"),
                                       CompileOptions(max_context=384, prefill_chunk=128, score=False, tp=tp), images=False)
        for entry, image in self.program.kernels.items():
            source = render(image.spec.template, entry, image.spec.params)
            self.program.kernels[entry] = replace(image, source=source)
        self.backend, self.devices = self, [ClockworkDevice(rank) for rank in range(tp)]
        self.modules: Any = None
        self.argument_address: Any = None

    @staticmethod
    def seconds(item: Call) -> float:
        return (1 + len(item.ops[0].kind) % 5) * US

    def replay(self, phase: Phase, modules: Any, address_of: Any, context: int, steps: int) -> float:
        assert all(sum(item.ops[0].kind == kind for item in phase.calls) == len(self.devices) for kind in ("begin", "advance"))
        ranks = range(len(self.devices))
        exchanged = [[op.attrs["ordinal"] for i in phase.calls for op in i.ops if i.rank == rank and "ordinal" in op.attrs]
                     for rank in ranks]  # fmt: skip
        assert all(ordinals == exchanged[0] for ordinals in exchanged)  # a rank whose peer takes no part waits for good
        return max(sum(self.seconds(i) - self.OVERLAP for i in phase.calls if i.rank == rank) for rank in ranks)

    def replay_after(self, plain: Phase, noted: Phase, modules: Any, address_of: Any, context: int, before: int, samples: int,
                     collect: Callable[[int], None]) -> None:  # fmt: skip
        assert [item.entry + SUFFIX for item in plain.calls] == [item.entry for item in noted.calls]
        for sample in range(samples):
            clock = [1000.0 + 7 * rank for rank in range(len(self.devices))]
            for item in noted.calls:
                stamp = item.args[-1]
                words = self.devices[item.rank].memory.view(np.uint64).reshape(-1, 2)
                row = words[(stamp.offset - ClockworkDevice.BASE) // STAMP_BYTES]
                assert not row.any()  # cleared since the last sample
                end = clock[item.rank] + self.seconds(item) * 1e9
                row[:] = ~np.uint64(clock[item.rank]), np.uint64(end)
                clock[item.rank] = end - self.OVERLAP * 1e9
            collect(sample)


class ClockworkDevice:
    BASE = 1 << 20

    def __init__(self, rank: int) -> None:
        self.rank, self.memory = rank, np.zeros(0, np.uint8)

    def info(self) -> Any:
        return type("Info", (), {"name": f"clock {self.rank}"})

    def allocate(self, nbytes: int, what: str) -> int:
        self.memory = np.full(nbytes, 0xFF, np.uint8)
        return self.BASE

    def upload(self, address: int, data: np.ndarray[Any, Any]) -> None:
        self.memory[address - self.BASE :][: data.nbytes] = data

    def download(self, address: int, nbytes: int) -> np.ndarray[Any, Any]:
        return self.memory[address - self.BASE :][:nbytes].copy()

    def release(self, address: int) -> None:
        self.memory = np.zeros(0, np.uint8)


def test_sources_of_another_version_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_all(jobs: Sequence[Any]) -> dict[str, Cubin]:
        raise CompileError(f"kernel {jobs[0].entry}: class Config has no member\n  of that name\n1 error")

    monkeypatch.setattr(profiling, "compile_all", compile_all)
    clockwork: Any = Clockwork(1)
    with pytest.raises(ProgramError, match=r"compile the program again \(kernel .* has no member\)$") as caught:
        Profiler(clockwork).run(1, 1, 100, samples=3)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("tp", [1, 2])
def test_kernels_times_and_timeline(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_all(jobs: Sequence[Any]) -> dict[str, Cubin]:
        return {job.entry: Cubin(b"", Resources(0, 0, 0, 0, 0), "") for job in jobs}

    monkeypatch.setattr(profiling, "compile_all", compile_all)
    monkeypatch.setattr(profiling, "Modules", lambda images, devices: type("M", (), {"close": lambda self: None})())
    clockwork: Any = Clockwork(tp)
    got = Profiler(clockwork).run(1, 1, 100, samples=3)
    phase = clockwork.program.phases["decode1x1"]
    calls = [item for item in phase.calls if item.rank == 0]

    def took(item: Call) -> float:
        return Clockwork.seconds(item) - Clockwork.OVERLAP

    assert got.seconds == pytest.approx(sum(map(took, calls)))
    waits = [i for i in calls if any(op.kind in KINDS for op in i.ops)]
    assert len(calls) - len(waits) <= sum(row.calls for row in got.kernels) <= len(calls)
    rows = [row for row in got.kernels if row.entry != "control"]
    steady = [i for i in calls if is_control(i)]
    assert sum(row.in_graph for row in rows) == pytest.approx(got.seconds - sum(map(took, steady)))  # every call is in one row
    for row in rows:
        assert row.isolated == pytest.approx(row.in_graph) and row.overlap == pytest.approx(0) and row.nbytes > 0
        if "exchange" not in row.kinds and "merge" not in row.kinds:
            assert row.in_graph == pytest.approx(sum(took(i) for i in calls if i.entry == row.entry))
    assert [s.index for s in got.spans] == list(range(len(phase.calls)))
    for rank in range(tp):
        mine = [s for s in got.spans if s.rank == rank]
        assert all(b.start == pytest.approx(a.end - Clockwork.OVERLAP, abs=1e-12) for a, b in zip(mine, mine[1:], strict=False))
    assert min(s.start for s in got.spans) == pytest.approx(0, abs=1e-12)
    assert got.devices == tuple(f"clock {rank}" for rank in range(tp))
    assert len(list(profile_text(got))) > len(got.kernels) and "<svg" in "".join(profile_html(got))


# -- the command


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (["--devices", "0,1,2"], ["--devices '0,1,2'", "0,1"]),
        (["--devices", "-1"], ["--devices '-1'"]),
        (["-b", "0"], ["-b 0", "1…64"]),
        (["-c", "many"], ["-c"]),
    ],
)
def test_bad_options(args: list[str], parts: list[str]) -> None:
    rejected(run_cli("profile", models.EXAMPLE, *args), 2, *parts)
