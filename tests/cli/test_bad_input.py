"""Every kind of bad input: one line on stderr that names the thing and what is allowed, the exit code of its kind,
nothing on stdout, no traceback, nothing left behind."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver as cuda

from artifacts import Artifact
from compiler.program.io import MANIFEST, VERSION, load, save
from runtime.cli import files
from runtime.cli.load import PATIENCE
from runtime.cuda.driver import api
from runtime.frontend.sandbox.meter import Limits
from tests.cli import small_model
from tests.cli.conftest import rejected, run_cli
from tests.cli.fake_driver import GIB, FakeDriver
from tests.models import ROOT

Ids = Callable[[Any], Path]
CPU = ["--device", "cpu"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the small model that a test may damage."""
    path = tmp_path / "model.ninfer"
    shutil.copyfile(small_model.small_artifact(), path)
    return path


@pytest.fixture
def copy(program: Path, tmp_path: Path) -> Path:
    """A copy of the program that a test may damage, beside nothing else."""
    folder = tmp_path / "programs" / "copy"
    shutil.copytree(program, folder)
    loaded = load(folder)
    loaded.options["artifact_path"] = os.path.relpath(small_model.small_artifact(), folder)
    save(loaded, folder)
    return folder


def overwrite(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(data)


# -- artifacts


@pytest.mark.parametrize("command", [["run", "--prompt", "x", *CPU], ["compile", "--arch", "sm_90a", "-o", "out"], ["plan"],
                                     ["inspect"], ["verify"]], ids=lambda command: command[0])  # fmt: skip
def test_files_that_are_no_artifacts(model: Path, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    name, *options = command

    def reject(*parts: str) -> None:
        rejected(run_cli(name, model, *options), 1, *parts)
        assert not (tmp_path / "out").exists()

    overwrite(model, 0, b"GGUF")
    reject("not a .ninfer artifact", "magic 47475546")
    overwrite(model, 0, b"NINFER\x00\x02")
    with model.open("r+b") as file:
        file.truncate(model.stat().st_size - 4096)
    reject("payload")
    with model.open("r+b") as file:
        file.truncate(900)
    reject("900 bytes")
    model.write_bytes(b"")
    reject("model.ninfer", "is empty")
    model.unlink()
    reject("model.ninfer", "No such file")
    model.mkdir()
    rejected(run_cli(name, model, *options), 1, "model.ninfer")


def test_unknown_formats_and_identities(model: Path) -> None:
    data = model.read_bytes()
    for old, new, parts in (
        (b'"format":"BF16"', b'"format":"BF61"', ["unknown format 'BF61'", "NVFP4"]),
        (b'"model/config.json"', b'"model/konfig.json"', ["small/bf16", "model/config.json"]),
        (b'"text/final_norm"', b'"text/final_form"', ["text/final_norm"]),
    ):
        assert data.count(old) >= 1
        model.write_bytes(data.replace(old, new, 1))
        rejected(run_cli("run", model, "--prompt", "x", *CPU), 1, *parts)


def test_an_unknown_architecture(model: Path) -> None:
    data = model.read_bytes()
    assert data.count(b"qwen3_5_text") == 1
    model.write_bytes(data.replace(b"qwen3_5_text", b"llama9_9_txt"))
    rejected(run_cli("run", model, "--prompt", "x", *CPU), 1, "llama9_9_txt", "qwen3_5_text")


# -- prompts


def test_prompts_that_do_not_fit(program: Path, ids_file: Ids) -> None:
    rejected(run_cli("run", program, *CPU, "--prompt", "word " * 500), 1, "--max-context 384", "383")
    rejected(run_cli("run", program, *CPU, "--ids", ids_file([1] * 384)), 1, "384 tokens", "--max-context 384")
    rejected(run_cli("run", program, *CPU, "--ids", ids_file([])), 1, "--ids", "non-empty")


@pytest.mark.parametrize("token", [4096, 4223, 4224, 1 << 40])
def test_ids_out_of_range(program: Path, ids_file: Ids, token: int) -> None:
    """4096 … 4223 are rows of the embedding that only fill it up."""
    rejected(run_cli("run", program, *CPU, "--ids", ids_file([1, 2, token])), 1, str(token))


def test_padded_rows_without_a_tokenizer(dense_program: Path, ids_file: Ids, untouched: Path) -> None:
    rejected(run_cli("run", dense_program, *CPU, "--ids", ids_file([1, 999999])), 1, "token 1", "999999")
    rejected(run_cli("logits", dense_program, *CPU, "--ids", ids_file([1, 999999]), "-o", untouched / "x.npy"), 1, "999999")


@pytest.mark.parametrize("text", ["[1, 2", "{}", '["a"]', "[1.5]", "[true]", "[-1]", "[" * 100_000, "\xff", "[1] [2]", "[NaN]"])
def test_ids_files_that_are_none(program: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "ids.json"
    path.write_bytes(text.encode("latin-1"))
    rejected(run_cli("run", program, *CPU, "--ids", path), 1, "--ids", "ids.json")


def test_missing_input_files(program: Path, tmp_path: Path) -> None:
    for option in ("--ids", "--messages"):
        rejected(run_cli("run", program, *CPU, option, tmp_path / "no"), 1, option, "no such file")
        rejected(run_cli("run", program, *CPU, option, tmp_path), 1, option, "not a regular file")
    rejected(run_cli("run", program, *CPU, "--prompt", "x", "--chat-template", tmp_path / "no"), 1, "--chat-template")


@pytest.mark.parametrize(
    ("value", "part"),
    [([], "non-empty array"), ([{"role": "robot", "content": "x"}], "role 'robot'"), ("[", "not JSON"),
     ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], "image input is not supported"),
     ({"messages": [{"role": "user", "content": "x"}], "more": 1}, "'more'")],
)  # fmt: skip
def test_messages_that_are_none(program: Path, tmp_path: Path, value: Any, part: str) -> None:
    path = tmp_path / "m.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    rejected(run_cli("run", program, *CPU, "--messages", path), 1, "m.json", part)


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{% for i in range(100000000) %}{% for j in range(100000000) %}x{% endfor %}{% endfor %}", "line 1"),
        ("{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}{{ n.x }}", ""),
        ("{{ messages.__class__ }}", "line 1"),
        ("\n\n{% for %}", "line 3"),
        ("{{ raise_exception('no thanks') }}", "no thanks"),
    ],
)
def test_templates(program: Path, tmp_path: Path, template: str, part: str) -> None:
    path = tmp_path / "t.jinja"
    path.write_text(template)
    started = time.monotonic()
    rejected(run_cli("run", program, *CPU, "--prompt", "x", "--chat-template", path), 1, "--chat-template", part)
    assert time.monotonic() - started < 30 and Limits()


def test_a_huge_template(program: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.jinja"
    path.write_bytes(b"x" * (2 << 20))
    rejected(run_cli("run", program, *CPU, "--prompt", "x", "--chat-template", path), 1, "--chat-template", "at most")


# -- programs


def reject_program(folder: Path, *parts: str) -> None:
    rejected(run_cli("run", folder, *CPU, "--prompt", "x"), 1, *parts)


def test_damaged_programs(copy: Path) -> None:
    assert run_cli("run", copy, *CPU, "--prompt", "x", "--max-new", 1).code == 0
    cubin = next((copy / "cubin").iterdir())
    cubin.write_bytes(b"x")
    reject_program(copy, cubin.name, "was altered", "compile again")
    cubin.unlink()
    reject_program(copy, cubin.name, "No such file")
    cubin.write_bytes(b"")
    source = next((copy / "src").iterdir())
    source.write_bytes(source.read_bytes() + b"\n")
    reject_program(copy, source.name, "was altered")


def test_damaged_manifests(copy: Path) -> None:
    manifest = copy / MANIFEST
    whole = manifest.read_bytes()
    for data, part in (
        (whole.replace(b'"lanes":4', b'"lanes":5', 1), "altered"),
        (whole[:-1], "altered or cut short"),
        (whole[: len(whole) // 2], "altered or cut short"),
        (b"{}", "no program manifest"),
        (b"", "no program manifest"),
        (whole.replace(b'"ninferc_program":', b'"ninferc_program":9', 1), f"program version 9{VERSION}"),
    ):
        assert data != whole
        manifest.write_bytes(data)
        reject_program(copy, MANIFEST, part)
    manifest.unlink()
    reject_program(copy, "not a program folder")


def test_the_wrong_artifact(copy: Path, model: Path, dense_program: Path) -> None:
    wrong = model.parent / "other.ninfer"
    wrong.write_bytes(load(dense_program) and (ROOT / "examples" / "tiny-hybrid.ninfer").read_bytes())
    command = ["run", copy, *CPU, "--prompt", "x", "--max-new", 1, "--artifact"]
    rejected(run_cli(*command, wrong), 1, "other.ninfer is not the artifact of this program", "--artifact")
    assert run_cli(*command, model).code == 0
    overwrite(model, model.stat().st_size - 4096, b"\x55" * 4096)  # other weights under the same directory
    rejected(run_cli(*command, model), 1, "was replaced since the program was compiled")


# -- devices


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = FakeDriver()
    made.install(monkeypatch)
    yield made
    api.cache_clear()


def test_no_gpu(program: Path, tmp_path: Path, untouched: Path) -> None:
    if "libcuda" in Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else False:
        pytest.skip("a driver is installed")
    rejected(run_cli("run", program, "--device", "cuda", "--prompt", "x"), 3, "--device cpu")
    rejected(run_cli("compile", small_model.small_artifact(), "-o", untouched / "p", "--arch", "native"), 3, "--arch sm_90a")


def test_a_driver_that_is_too_old(fake: FakeDriver, program: Path) -> None:
    fake.version = 12040
    for device in ([], ["--device", "cuda"]):  # an old driver is no reason to fall back to the CPU in silence
        rejected(run_cli("run", program, *device, "--prompt", "x"), 3, "CUDA 12.4", "13.0")
    assert run_cli("run", program, *CPU, "--prompt", "x", "--max-new", 1).code == 0


def test_a_device_that_does_not_exist(fake: FakeDriver, program: Path) -> None:
    rejected(run_cli("run", program, "--device", "cuda:1", "--prompt", "x"), 3, "--device cuda:1", "1 GPU(s)")


def test_a_program_for_another_card(fake: FakeDriver, program: Path) -> None:
    fake.capability = (12, 0)
    rejected(run_cli("run", program, "--prompt", "x"), 3, "Made-up GPU", "sm_120a", "sm_90a", "--arch native")
    assert fake.allocated == 0
    fake.capability = (6, 1)
    rejected(run_cli("run", program, "--prompt", "x"), 3, "6.1")


def test_out_of_device_memory(fake: FakeDriver, program: Path) -> None:
    fake.free = 1 << 20
    rejected(run_cli("run", program, "--prompt", "x"), 3, "GiB are needed", "0.00 GiB are free", "--max-context")
    assert fake.allocated == 0
    fake.free, fake.fail["cuMemAlloc"] = 100 * GIB, cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY  # someone else was quicker
    rejected(run_cli("run", program, "--prompt", "x"), 3, "needs", "GiB are free")


@pytest.mark.parametrize(
    ("call", "status", "part"),
    [
        ("cuDevicePrimaryCtxRetain", cuda.CUresult.CUDA_ERROR_DEVICE_UNAVAILABLE, "in use by another process"),
        ("cuInit", cuda.CUresult.CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, "reboot"),
        ("cuLibraryLoadData", cuda.CUresult.CUDA_ERROR_NO_BINARY_FOR_GPU, "--arch native"),
        ("cuMemcpyHtoDAsync", cuda.CUresult.CUDA_ERROR_UNKNOWN, "device was lost"),
        ("cuStreamSynchronize", cuda.CUresult.CUDA_ERROR_ECC_UNCORRECTABLE, "faulty"),
    ],
)
def test_devices_that_are_busy_or_lost(fake: FakeDriver, program: Path, call: str, status: Any, part: str) -> None:
    fake.fail[call] = status
    rejected(run_cli("run", program, "--prompt", "x"), 3, status.name, part)


# -- places to write


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, untouched: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NINFERC_CACHE", str(tmp_path / "file" / "cache"))
    rejected(run_cli("run", small_model.small_artifact(), *CPU, "--prompt", "x"), 1, "cache", "NINFERC_CACHE")
    result = run_cli("compile", small_model.small_artifact(), "-o", untouched / "p", "--arch", "sm_90a")
    rejected(result, 1, "cache", "NINFERC_CACHE")


def test_a_full_disk(no_nvrtc: list[str], untouched: Path, monkeypatch: pytest.MonkeyPatch, dense_program: Path, program: Path,
                     ids_file: Ids, tmp_path: Path) -> None:  # fmt: skip
    def full(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    requests = tmp_path / "in.jsonl"
    requests.write_text('{"prompt": "x", "max_new": 1}')
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        result = run_cli("compile", small_model.small_artifact(), "-o", untouched / "p", "--arch", "sm_90a")
    assert result.code == 1 and result.out == b""
    assert result.lines[-1].endswith("/p: No space left on device") and len(result.lines) == 2  # after "compiling …"
    monkeypatch.setattr("runtime.cli.files.os.fsync", full)
    for command in (["logits", dense_program, "--ids", ids_file([1, 2, 3]), "-o", untouched / "x.npy"],
                    ["batch", program, requests, "-o", untouched / "out.jsonl"]):  # fmt: skip
        result = run_cli(*command, *CPU)
        assert result.code == 1 and result.out == b"" and "Traceback" not in result.err
        assert "No space left on device; nothing was written" in result.lines[-1]


def test_output_paths_that_cannot_be(program: Path, dense_program: Path, ids_file: Ids, tmp_path: Path) -> None:
    ids = ids_file([1])
    rejected(run_cli("logits", dense_program, *CPU, "--ids", ids, "-o", tmp_path / "no" / "x.npy"), 1, "no/x.npy")
    rejected(run_cli("logits", dense_program, *CPU, "--ids", ids, "-o", tmp_path), 1, "not a regular file")
    occupied = tmp_path / "occupied"
    occupied.mkdir()
    (occupied / "letter.txt").write_text("x")
    result = run_cli("compile", small_model.small_artifact(), "-o", occupied, "--arch", "sm_90a")
    rejected(result, 1, "occupied exists and is no program folder")
    assert (occupied / "letter.txt").read_text() == "x"


# -- time, interrupts, closed streams


def test_the_cpu_is_slow_for_large_models(tmp_path: Path, ids_file: Ids, monkeypatch: pytest.MonkeyPatch) -> None:
    """A 20 GB artifact, all holes: its size alone is known."""
    path = tmp_path / "large.ninfer"
    assert run_cli("synth", "qwen3.8-27b/nvfp4", "-o", path, "--header-only").code == 0
    assert path.stat().st_size > 20_000_000_000
    rejected(run_cli("run", path, *CPU, "--ids", ids_file([1, 2, 3])), 2, "--device cpu is predicted to take", "--yes")
    monkeypatch.setattr("runtime.cli.load.Source.compiled", _stop)
    rejected(run_cli("run", path, *CPU, "--ids", ids_file([1, 2, 3]), "--yes"), 1, "out of host memory")


def test_every_command_predicts(program: Path, tmp_path: Path, ids_file: Ids, monkeypatch: pytest.MonkeyPatch,
                                untouched: Path) -> None:  # fmt: skip
    monkeypatch.setattr("runtime.cli.load.PATIENCE", 0.0)
    requests = tmp_path / "in.jsonl"
    requests.write_text('{"ids": [1, 2, 3]}')
    for command in (["run", program, "--prompt", "x"], ["logits", program, "--ids", ids_file([1]), "-o", untouched / "x.npy"],
                    ["batch", program, requests, "-o", untouched / "out"]):  # fmt: skip
        rejected(run_cli(*command, *CPU), 2, "--device cpu is predicted to take", "--yes")


def _stop(source: Any) -> Any:
    raise MemoryError


def test_the_prediction(monkeypatch: pytest.MonkeyPatch, program: Path) -> None:
    """Small models on the CPU are predicted within an order of magnitude of what they take, and need no --yes."""
    from runtime.cli.predict import cpu_seconds, duration

    artifact: Artifact = small_model.opened()
    spec = load(program).spec
    seconds = cpu_seconds(artifact, spec, 14, 40, 128, False)
    started = time.monotonic()
    run_cli("run", program, *CPU, "--prompt", "x", "--max-new", 40)
    taken = time.monotonic() - started
    assert taken / 30 < seconds < 10 * taken and seconds < PATIENCE
    assert cpu_seconds(artifact, spec, 14, 400, 128, False) > 5 * seconds
    assert [duration(s) for s in (3, 600, 36000, 1e6)] == ["3 s", "10 min", "10 h", "12 days"]


def start(*args: object, **streams: Any) -> subprocess.Popen[bytes]:
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    code = "import sys; from runtime.cli.main import main; sys.exit(main())"
    return subprocess.Popen([sys.executable, "-c", code, *map(str, args)], cwd=ROOT, **settings)


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_an_interrupt(program: Path) -> None:
    process = start("run", program, *CPU, "--prompt", "Tell me all", "--max-new", 350, "--ignore-eos")
    assert process.stdout is not None and process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.decode().splitlines()[-1] == "ninferc: interrupted" and b"Traceback" not in errors


def test_a_reader_that_leaves(program: Path) -> None:
    process = start("run", program, *CPU, "--prompt", "Tell me all", "--max-new", 350, "--ignore-eos")
    assert process.stdout is not None and process.stderr is not None and process.stdout.read(1)
    process.stdout.close()
    errors = process.stderr.read().decode()
    assert process.wait(timeout=60) == 1
    assert "stdout was closed by its reader" in errors.splitlines()[-1] and "Traceback" not in errors


def test_an_interrupt_before_the_first_word_leaves_no_file(untouched: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Just after the file was made: the block that would remove it has not begun."""
    real = files.os.open

    def interrupted(*args: Any, **options: Any) -> int:
        os.close(real(*args, **options))
        raise KeyboardInterrupt

    monkeypatch.setattr("runtime.cli.files.os.open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        files.AtomicFile(untouched / "out.jsonl")
    monkeypatch.undo()
    made = files.AtomicFile(untouched / "out.jsonl")  # and between that and the block
    assert len(list(untouched.iterdir())) == 1
    del made
    gc.collect()


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
def test_an_interrupted_batch_leaves_no_results(program: Path, tmp_path: Path, untouched: Path) -> None:
    requests = tmp_path / "in.jsonl"
    requests.write_text('{"prompt": "Tell me all", "max_new": 350, "ignore_eos": true}\n' * 8)
    process = start("batch", program, requests, "-o", untouched / "out.jsonl", *CPU, "--max-concurrency", 2)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not list(untouched.iterdir()):  # the file under construction
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and out == b""
    assert errors.decode().splitlines()[-1] == "ninferc: interrupted" and b"Traceback" not in errors


@pytest.mark.parametrize("command", ["explain", "inspect", "plan"])
def test_a_listing_into_a_pipe_that_is_closed(command: str, program: Path) -> None:
    target = program if command == "explain" else small_model.small_artifact()
    reader, writer = os.pipe()
    os.close(reader)
    process = start(command, target, *(["--json"] if command == "inspect" else []),
                    *(["--arch", "sm_90a"] if command == "plan" else []), stdout=writer)  # fmt: skip
    os.close(writer)
    _, errors = process.communicate(timeout=60)
    lines = errors.decode().splitlines()
    assert process.returncode == 1 and len(lines) == 1 and "stdout was closed by its reader" in lines[0], lines


def test_two_compiles_into_one_folder(tmp_path: Path) -> None:
    """Both end well, one after the other has the folder, and what stands there is one of the two, whole."""
    code = """
import sys
from compiler.emit.nvrtc import Cubin, Resources
import compiler.driver
compiler.driver.compile_all = lambda jobs, *rest: {job.entry: Cubin(job.source.encode(), Resources(32, 0, 0, 0, 0), "")
                                                   for job in jobs}
from runtime.cli.main import main
sys.exit(main())
"""
    target = tmp_path / "program"
    processes = [subprocess.Popen([sys.executable, "-c", code, "compile", small_model.small_artifact(), "-o", target, "--arch",
                                   "sm_90a", "--max-context", context], cwd=ROOT, stdout=subprocess.PIPE,
                                  stderr=subprocess.PIPE) for context in ("128", "256")]  # fmt: skip
    for process in processes:
        out, errors = process.communicate(timeout=120)
        assert process.returncode == 0 and out == b"", errors.decode()
        assert f"summary {'program':<26} {target}" in errors.decode()
    assert load(target).limits.max_context in (128, 256)
    assert [path.name for path in tmp_path.iterdir()] == ["program"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_stdout() -> None:
    with open("/dev/full", "wb") as full:
        process = start("inspect", small_model.small_artifact(), stdout=full)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1 and errors.decode().splitlines() == ["ninferc: stdout: No space left on device"]


def test_logits_are_not_left_half_written(dense_program: Path, ids_file: Ids, untouched: Path,
                                          monkeypatch: pytest.MonkeyPatch) -> None:  # fmt: skip
    """Interrupted after the first chunk."""
    from runtime.session import Session

    real = Session.score

    def interrupted(self: Session, ids: Any) -> Any:
        yield next(iter(real(self, ids)))
        raise KeyboardInterrupt

    monkeypatch.setattr(Session, "score", interrupted)
    ids = ids_file([int(i) for i in np.arange(200) % 100])
    result = run_cli("logits", dense_program, *CPU, "--ids", ids, "-o", untouched / "x.npy")
    assert result.code == 130 and result.lines[-1] == "ninferc: interrupted" and result.out == b""
