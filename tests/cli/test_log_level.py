"""``--log-level``: what each level prints, and that results do not change with it; load rows of a GPU."""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compiler.explain.memory import amount, device_memory, total_bytes
from compiler.program.io import load
from compiler.program.model import WORK
from runtime.cli.capacity import DRIVER_BYTES
from runtime.cli.errors import DEVICE, USAGE
from runtime.cli.io import Diagnostics, Level
from runtime.cli.observe import LOGGER, compile_progress, open_diagnostics
from runtime.cli.options import LEVELS
from runtime.cuda.driver import api
from tests.cli import small_model
from tests.cli.conftest import Result, rejected, run_cli
from tests.cli.fake_driver import FakeDriver
from tests.cli.test_run import THINKING

QUESTION = "What is the capital of France?"
Ids = Callable[[Any], Path]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    yield FakeDriver(graph_bytes=1 << 20).install(monkeypatch)
    api.cache_clear()


def test_every_level_says_what_the_next_one_says(program: Path, tmp_path: Path) -> None:
    """Times aside. The reasoning of this template goes to stderr, from info on."""
    template = tmp_path / "think.jinja"
    template.write_text(THINKING)
    results: dict[str, Result] = {}
    for level in LEVELS:
        results[level] = run_cli("run", program, "--device", "cpu", "--prompt", QUESTION, "--max-new", 12, "--chat-template",
                                 template, "--log-level", level)  # fmt: skip
        assert results[level].code == 0 and results[level].out == results["trace"].out
    default = run_cli("run", program, "--device", "cpu", "--prompt", QUESTION, "--max-new", 12, "--chat-template", template)

    def said(level: str) -> list[str]:
        return [re.sub(r"\b[0-9]+\.[0-9]+\b", "#", line) for line in results[level].lines]

    assert results["off"].err == results["error"].err == results["warning"].err == ""
    assert said("info") == [re.sub(r"\b[0-9]+\.[0-9]+\b", "#", line) for line in default.lines]
    reasoning = [line for line in said("info") if not line.startswith("summary ")]
    assert reasoning and any(line.startswith("summary target ") for line in said("info"))
    rest = [line for line in said("debug") if not line.startswith("debug ")]
    assert rest == said("info") and len(rest) < len(said("debug"))
    steps = [line for line in said("trace") if line.startswith("trace step ")]
    assert len(steps) == sum(count_of(results["trace"]).values())
    fewer = [line for line in said("trace") if line.startswith(("debug ", "summary "))]
    assert fewer == [line for line in said("debug") if line.startswith(("debug ", "summary "))]


def count_of(result: Result) -> dict[str, int]:
    line = next(line for line in result.lines if line.startswith("debug launches: "))
    return {name: int(number) for number, name in (part.split() for part in line.removeprefix("debug launches: ").split(", "))}


def test_warnings_show_without_the_rows(dense_program: Path, ids_file: Ids) -> None:
    run = ("run", dense_program, "--device", "cpu", "--ids", ids_file([1, 2, 3]), "--max-new", 3)
    warned = run_cli(*run, "--log-level", "warning")
    assert warned.code == 0 and warned.lines == ["the artifact has no tokenizer: the answer is printed as token ids"]
    silent = run_cli(*run, "--log-level", "error")
    assert silent.err == "" and silent.out == warned.out and len(silent.text.split()) == 3


def test_errors_show_at_every_level(program: Path) -> None:
    for level in LEVELS:
        result = run_cli("run", program, "--device", "cpu", "--prompt", "x", "--max-new", 0, "--log-level", level)
        assert result.code == USAGE and result.lines[-1].startswith("ninferc: --max-new") and result.out == b""
        assert len(result.lines) == 1 or all(line.startswith("debug ") for line in result.lines[:-1]) and level in LEVELS[:2]


def test_debug_says_what_the_program_is(program: Path) -> None:
    result = run_cli("run", program, "--device", "cpu", "--prompt", QUESTION, "--max-new", 5, "--log-level", "trace")
    loaded = load(program)
    for phase in loaded.phases.values():
        line = next(line for line in result.lines if line.startswith(f"debug graph {phase.name}: "))
        assert f" {len(phase.calls)} nodes of {len({call.entry for call in phase.calls})} kernels, " in line
    sizes = [int(number) for number in re.findall(r"nodes of (\d+) kernels", result.err)]
    assert len(sizes) == len(loaded.phases)
    widest = amount(loaded.regions[0][WORK])
    assert f"work {widest}" in result.err and f"workspace {widest}" in result.err
    for entry in loaded.kernels:
        assert f"trace kernel {entry}: " in result.err
    assert set(count_of(result)) <= set(loaded.phases) and sum(count_of(result).values()) >= 5


def test_batch_and_logits_are_silent_when_told(program: Path, tmp_path: Path, ids_file: Ids) -> None:
    requests = tmp_path / "in.jsonl"
    requests.write_text('{"prompt": "Hi", "max_new": 3}\n')
    for command in (["batch", program, requests], ["logits", program, "--ids", ids_file([1, 2, 3])]):
        written = []
        for level in ("off", "info", "debug"):
            result = run_cli(*command, "-o", tmp_path / level, "--device", "cpu", "--log-level", level)
            assert result.code == 0 and result.out == b"" and (result.err == "") == (level == "off")
            assert ("debug launches: " in result.err) == (level == "debug")
            written.append((tmp_path / level).read_bytes())
        assert written[0] == written[1] == written[2]


def test_compile(no_nvrtc: list[str], tmp_path: Path) -> None:
    command = ["compile", small_model.small_artifact(), "-o", tmp_path / "p", "--arch", "sm_90a", "--rope", "native"]
    assert run_cli(*command, "--log-level", "off").err == ""
    told = run_cli(*command, "--log-level", "trace")
    program = load(tmp_path / "p")
    assert re.search(r"^debug graphs, passes and sources: [0-9.]+ s$", told.err, re.MULTILINE)
    assert re.search(r"^debug program written: [0-9.]+ s$", told.err, re.MULTILINE)
    assert told.err.count("trace kernel ") >= 2 * len(program.kernels) - 2  # compiled, and what it takes
    assert "compiling" in told.err and "debug" not in run_cli(*command).err


def test_kernels_from_the_cache_are_counted() -> None:
    stream = io.StringIO()
    say = Diagnostics(stream, level=Level.TRACE)
    with compile_progress(say, "sm_80") as report:
        for done, entry in ((3, ""), (4, "one"), (5, "two")):
            report(done, 5, entry)
    assert "compiling 2 kernels for sm_80\n" in stream.getvalue()
    assert "debug kernels: 2 compiled, 3 from the cache: 0.0" in stream.getvalue()
    assert [line.split()[2] for line in stream.getvalue().splitlines() if line.startswith("trace kernel ")] == ["one", "two"]
    stream.truncate(0)
    with compile_progress(say, "sm_80") as report:
        report(5, 5, "")
    assert "debug kernels: 0 compiled, 5 from the cache" in stream.getvalue() and "compiling" not in stream.getvalue()
    stream.truncate(0)
    with compile_progress(say, "sm_80"):
        pass
    assert "the whole program is in the cache" in stream.getvalue()


@pytest.mark.parametrize(("level", "shown"), [("trace", "abcd"), ("debug", "bcd"), (None, "cd"), ("warning", "cd"),
                                              ("error", "d"), ("off", "")])  # fmt: skip
def test_log_records_of_the_runtime(level: str | None, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    open_diagnostics(level)
    logger = logging.getLogger(LOGGER)
    logger.debug("it is %s", "a")
    logger.info("it is %s", "b")
    logger.warning("it is %s\non two lines", "c")
    logger.error("it is %s", "d")
    assert [line.split("it is ")[1][0] for line in stream.getvalue().splitlines()] == list(shown)


def test_rows_of_a_gpu(gpu: FakeDriver, program: Path) -> None:
    """A made-up GPU loads the program, and then stops at the first step."""
    result = run_cli("run", program, "--prompt", QUESTION, "--max-new", 3, "--log-level", "debug")
    assert result.code == DEVICE and "the device stopped" in result.lines[-1], result.err
    loaded = load(program)
    need = total_bytes(loaded)
    assert gpu.allocated == need
    assert result.summary("target") == "sm_90a on cuda:0"
    assert result.summary("gpu0 reserved") == amount(need)
    assert result.summary("gpu0 kernels and graphs") == f"{len(loaded.phases)} MiB, 600 MiB allowed with the context"
    assert result.summary("gpu0 free at start") == "100.00 GiB"
    assert result.summary("gpu0 free / total").endswith(" / 140.00 GiB")
    assert result.summary("gpu0 planned slack") == amount(gpu.free - need - DRIVER_BYTES)
    assert re.fullmatch(r"[0-9.]+ MiB in [0-9.]+ s, [0-9.]+ GB/s", result.summary("weight upload"))
    assert re.fullmatch(r"[0-9.]+ s with kernels and graphs", result.summary("load"))
    assert re.search(rf"^debug memory and {len(loaded.kernels)} kernels: [0-9.]+ s$", result.err, re.MULTILINE)
    assert re.search(rf"^debug {len(loaded.phases)} graphs: [0-9.]+ s$", result.err, re.MULTILINE)
    gpu.free = need + (1 << 20)
    gpu.allocated, gpu.names[:] = 0, []
    assert run_cli("run", program, "--prompt", "x").summary("gpu0 planned slack") == f"-{amount(DRIVER_BYTES - (1 << 20))}"


RUN = ["run", "nowhere", "--prompt", "x", "--device", "cpu"]


@pytest.mark.parametrize(("args", "parts"), [
    ([*RUN, "--rope", "yarn"], ["--rope yarn is not supported; native is"]),
    ([*RUN, "--rope", "ntk"], ["--rope 'ntk': native is allowed"]),
    ([*RUN, "--kv-dtype", "int8"], ["--kv-dtype int8 is not supported; bf16 is"]),
    ([*RUN, "--kv-dtype", "nvfp4"], ["--kv-dtype nvfp4 is not supported; bf16 is"]),
    ([*RUN, "--kv-dtype", "fp32"], ["--kv-dtype 'fp32': bf16 is allowed"]),
    ([*RUN, "--log-level", "loud"], ["--log-level 'loud'", "trace, debug, info, warning, error, off"]),
    ([*RUN, "--log-level", "INFO"], ["--log-level 'INFO'"]),
    ([*RUN, "--log-level", "off", "--print-token-ids"], ["--print-token-ids", "--log-level off", "info is needed"]),
    (["compile", "nowhere", "-o", "x", "--rope", "yarn"], ["--rope yarn"]),
    (["compile", "nowhere", "-o", "x", "--kv-dtype", "fp8"], ["--kv-dtype fp8"]),
    (["batch", "nowhere", "x", "-o", "y", "--rope", "yarn"], ["--rope yarn"]),
    (["logits", "nowhere", "--ids", "x", "-o", "y", "--kv-dtype", "k8v4"], ["--kv-dtype k8v4"]),
])  # fmt: skip
def test_refused(args: list[str], parts: list[str]) -> None:
    rejected(run_cli(*args), USAGE, *parts)


def test_what_there_is_can_be_said(program: Path) -> None:
    result = run_cli("run", program, "--device", "cpu", "--prompt", "x", "--max-new", 2, "--rope", "native",
                     "--kv-dtype", "bf16")  # fmt: skip
    assert result.code == 0 and result.summary("rope").startswith("native, factor 1, origin 1024, ceiling 384, mscale 1")
    assert result.summary("kv dtype") == "bf16"
    loaded = load(program)
    assert result.summary("kv pages used / max") == f"1 / {loaded.limits.pages}"
    pool = device_memory(loaded)[0]["kv pool"]
    assert result.summary("kv payload used / max") == f"{amount(pool // loaded.limits.pages)} / {amount(pool)}"
