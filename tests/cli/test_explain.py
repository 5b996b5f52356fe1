"""``explain`` and ``plan``: every call counted once, costs that add up, a page without outside resources."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from xml.dom.minidom import parseString

import pytest

from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import CARDS, caps, supported
from compiler.explain.cost import call_cost, phase_report, phase_seconds
from compiler.explain.fold import fold, ranges
from compiler.explain.html import explain_html
from compiler.explain.memory import USES, amount, device_memory, total_bytes
from compiler.explain.roofline import rates, slots_per_weight
from compiler.explain.text import count, explain_text
from compiler.ir.types import Kind
from compiler.program.io import load
from compiler.program.model import DEVICE_REGIONS, Program
from tests import models
from tests.cli import small_model
from tests.cli.conftest import rejected, run_cli


@pytest.fixture(scope="module")
def example() -> Program:
    return compile_program(models.artifact("example", "bf16"), caps("sm_90a"), CompileOptions(max_context=512), images=False)


def test_the_text_names_every_kernel_and_reason(program: Path) -> None:
    result = run_cli("explain", program)
    assert result.code == 0 and result.err == ""
    loaded = load(program)
    for entry, kernel in loaded.kernels.items():
        assert entry in result.text and (kernel.spec.reason or "-") in result.text
    for phase in loaded.phases.values():
        assert f"{phase.name}: {phase.lanes} lane(s) x {phase.width} column(s), {len(phase.calls)} calls" in result.text
    assert max(map(len, result.text.splitlines())) < 250


def test_options(program: Path) -> None:
    result = run_cli("explain", program, "--phase", "decode1x1", "--context", 100)
    assert result.code == 0 and "decode1x1:" in result.text and "prefill:" not in result.text
    assert "with 100 tokens in the cache" in result.text
    rejected(run_cli("explain", program, "--phase", "encode"), 2, "--phase 'encode'", "decode1x1")
    rejected(run_cli("explain", program, "--context", 500), 2, "--context 500", "384")
    rejected(run_cli("explain", program.parent), 1, "not a program folder")
    rejected(run_cli("explain", program, "--html", program), 1, "not a regular file")


def test_folding_loses_no_call(example: Program) -> None:
    for phase in example.phases.values():
        reports = phase_report(example, phase, 512)
        blocks = fold(reports)
        assert sum(len(block.calls) * block.times for block in blocks) == len(phase.calls)
        layers = [layer for block in blocks for layer in block.layers]
        assert sorted(layers) == list(range(len(example.spec.layer_types)))
        assert sum(bool(block.layers) for block in blocks) == 2  # gated DeltaNet and attention
    text = "\n".join(explain_text(example))
    assert "layers 0-2, 4-6 (6 times)" in text and "layers 3, 7 (2 times)" in text
    assert ranges([0, 1, 2, 4, 6, 7]) == "0-2, 4, 6-7" and ranges([]) == ""


def test_decode_reads_every_weight_once(example: Program) -> None:
    """The bytes of a step are those of the weights it streams, of the cache, of the states, and little else."""
    phase = example.phases["decode1x1"]
    read = sum(call_cost(example, phase, call, 1).read for call in phase.calls)
    embed = {op.inputs["w"].value for call in phase.calls for op in call.ops if op.kind == "embed"}
    weights = sum(v.nbytes for v in example.values.values() if v.kind is Kind.WEIGHT and v.name not in embed)
    spec = example.spec
    state = len(spec.gdn_layers) * spec.value_heads * spec.value_dim * spec.key_dim * 4
    assert weights + state < read < 1.1 * (weights + state)


def test_the_cache_costs_by_its_length(example: Program) -> None:
    for name, columns in (("decode1x1", 1), ("prefill", 1024)):
        phase, spec = example.phases[name], example.spec
        costs = [[call_cost(example, phase, call, keys) for call in phase.calls] for keys in (100, 500)]
        read = sum(b.read - a.read for a, b in zip(*costs, strict=True))
        flops = sum(b.flops - a.flops for a, b in zip(*costs, strict=True))
        layers = len(spec.attention_layers)
        assert read == layers * 400 * 2 * spec.kv_heads * spec.head_dim * 2
        assert flops == layers * 400 * 4 * spec.heads * spec.head_dim * columns
    assert phase_seconds(example, example.phases["prefill"], 500) > phase_seconds(example, example.phases["prefill"], 1)


def test_instruction_slots() -> None:
    """The figures of the design: about 4.3 per NVFP4 weight on an H200, 4.0 for Q4, 5.0 for Q5, 17 on an RTX 5090."""
    h200, rtx = caps("sm_90a"), caps("sm_120a")
    for target, bits, slots in ((h200, 4.5, 4.3), (h200, 4.25, 4.0), (h200, 5.25, 5.0), (rtx, 4.5, 17.5)):
        assert abs(slots_per_weight(target, rates(target), int(bits * 1000), 8000) - slots) < 0.15


def test_rates_of_every_target() -> None:
    for arch in supported():
        assert rates(caps(arch)).bandwidth > 1e11
    for name, (arch, sms, _) in CARDS.items():
        known = rates(caps(arch, sms)).card.lower().replace(" ", "")
        assert known == name


def test_amounts() -> None:
    assert [amount(n) for n in (0, 1023, 1024, 1536, 1 << 20)] == ["0 B", "1023 B", "1 KiB", "1.5 KiB", "1 MiB"]
    assert amount(3 << 30) == "3.00 GiB"
    assert [count(n) for n in (0, 999, 1000, 2.5e9)] == ["0", "999", "1k", "2.5G"]


class Page(HTMLParser):
    """Collects what could reach outside, and text."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[tuple[str, str | None]] = []
        self.tags: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.outside += [(name, value) for name, value in attrs if name in ("src", "href", "data", "srcset", "action")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page(example: Program) -> None:
    html = "".join(explain_html(example))
    page = Page()
    page.feed(html)
    assert not page.outside and not {"script", "link", "img", "iframe", "object"} & set(page.tags)
    assert "url(" not in html and "http:" not in html and "https:" not in html and "@import" not in html
    drawings = re.findall(r"<svg.*?</svg>", html, re.DOTALL)
    assert len(drawings) == len(example.phases)
    for drawing, phase in zip(drawings, example.phases.values(), strict=True):
        tree = parseString(drawing)
        assert len(tree.getElementsByTagName("circle")) == len(tree.getElementsByTagName("title")) == len(phase.calls)
        assert len(tree.getElementsByTagName("path")) >= len(phase.calls) - 1
    called = {call.entry for phase in example.phases.values() for call in phase.calls}
    assert called == {entry for entry in example.kernels if not entry.startswith("arrange_")}
    assert all(entry in html for entry in called)


def test_names_from_the_artifact_are_escaped(example: Program) -> None:
    from dataclasses import replace

    hostile = replace(example, artifact=replace(example.artifact, model_id="<script>alert(1)</script>", weights_id='"&<b>'))
    html = "".join(explain_html(hostile, ["decode1x1"]))
    assert "<script" not in html and "<b>" not in html and "&lt;script&gt;" in html


def test_the_page_is_written_whole(program: Path, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    result = run_cli("explain", program, "--html", out)
    assert result.code == 0 and result.out == b"" and result.err == ""
    assert out.read_text("utf-8").endswith("</html>\n") and [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_card_without_bf16_products_is_named(example: Program) -> None:
    assert not any("matrix instructions" in line for line in explain_text(example, ()))
    old = replace(example, caps=caps("sm_75"))
    assert any("no matrix instructions for bf16" in line for line in explain_text(old, ()))


# -- plan


def test_memory_adds_up(example: Program) -> None:
    (uses,) = device_memory(example)
    assert tuple(uses) == USES and sum(uses.values()) == total_bytes(example)
    assert sum(example.regions[0][region] for region in DEVICE_REGIONS) == total_bytes(example)
    spec, limits = example.spec, example.limits
    assert uses["kv pool"] == len(spec.attention_layers) * limits.pages * 2 * spec.kv_heads * 64 * spec.head_dim * 2
    assert uses["sequence"] < 1 << 20
    assert uses["gdn state"] > len(spec.gdn_layers) * spec.value_heads * spec.value_dim * spec.key_dim * 4


def test_plan_of_an_artifact() -> None:
    result = run_cli("plan", small_model.small_artifact(), "--arch", "sm_90a", "--max-context", 256, "--max-concurrency", 2)
    assert result.code == 0 and result.err == ""
    for part in ("sm_90a", "2 lane(s), context 256", "device 0 kv pool", "decode2x1 at 256", "prefill at", "H200",
                 "host page-locked"):  # fmt: skip
        assert part in result.text
    data = json.loads(run_cli("plan", small_model.small_artifact(), "--as", "rtx4090", "--json").out)
    assert data["target"] == {"arch": "sm_89", "sms": 128} and data["rates"]["card"] == "RTX 4090"
    assert data["limits"]["max_context"] == 1024  # the model's own limit
    for row in data["phases"]:
        assert 0 < row["seconds"] < 1 and row["tokens_per_second"] > 1


def test_plan_compiles_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("plan must not compile")

    monkeypatch.setattr("compiler.driver.compile_all", refuse)
    monkeypatch.setattr("artifacts.Artifact.tensor_bytes", refuse)
    assert run_cli("plan", models.EXAMPLE, "--arch", "sm_80").code == 0


def test_plan_of_a_program(program: Path) -> None:
    result = run_cli("plan", program)
    assert result.code == 0 and "4 lane(s), context 384" in result.text
    rejected(run_cli("plan", program, "--max-context", 100), 2, "--max-context is fixed in a program")
    rejected(run_cli("plan", small_model.small_artifact(), "--max-context", 2000), 2, "--max-context 2000", "1…1024")
