"""``doctor`` and ``plan`` on made-up machines: each finding with its fix, exit code 3 exactly when something fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cuda.bindings import driver as cuda

from runtime.cli.pcie import Link, _sysfs, read_link
from runtime.cuda.driver import api
from tests.cli import small_model
from tests.cli.conftest import Result, run_cli
from tests.cli.fake_driver import GIB, FakeDriver


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    monkeypatch.setattr("runtime.cli.doctor.read_link", lambda pci: Link(16, 16, 1, 5))
    yield FakeDriver().install(monkeypatch)
    api.cache_clear()


def row(result: Result, name: str) -> tuple[str, str, str]:
    """State, value and fix of a row."""
    lines = result.text.splitlines()
    at = next(index for index, line in enumerate(lines) if line[5:].startswith(f"{name:<18} "))
    following = lines[at + 1] if at + 1 < len(lines) else ""
    fix = following.strip().removeprefix("fix: ") if following.strip().startswith("fix: ") else ""
    return lines[at][:5].strip(), lines[at][24:], fix


def test_a_sound_machine(fake: FakeDriver) -> None:
    fake.count = 2
    result = run_cli("doctor")
    assert result.code == 0 and result.err == "" and "fail" not in result.text and "fix" not in result.text
    assert row(result, "driver") == ("ok", "CUDA 13.0, 2 GPU(s)", "")
    for index in (0, 1):
        assert row(result, f"gpu {index}")[1].startswith("Made-up GPU, compute capability 9.0, 132 multiprocessors")
        assert row(result, f"gpu {index} memory") == ("ok", "100.00 GiB free of 140.00 GiB", "")
        assert row(result, f"gpu {index} link") == ("ok", "PCIe 1 x16 (at most 5 x16)", "")
        assert row(result, f"gpu {index} mode") == ("ok", "shared", "")
    assert row(result, "peer access 0-1") == ("ok", "yes", "")
    for name in ("packages", "nvrtc", "headers", "cache", "cache space"):
        assert row(result, name)[0] == "ok", name


def test_warnings_are_no_failures(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.count, fake.peers, fake.mode, fake.free = 2, 0, 3, 10 * GIB
    monkeypatch.setattr("runtime.cli.doctor.read_link", lambda pci: Link(8, 16, 4, 5))
    result = run_cli("doctor")
    assert result.code == 0
    assert row(result, "peer access 0-1")[0] == "warn" and "host memory" in row(result, "peer access 0-1")[2]
    assert row(result, "gpu 0 mode")[:2] == ("warn", "exclusive process") and "-c DEFAULT" in row(result, "gpu 0 mode")[2]
    assert row(result, "gpu 0 memory")[0] == "warn" and "nvidia-smi" in row(result, "gpu 0 memory")[2]
    assert row(result, "gpu 0 link")[:2] == ("warn", "PCIe 4 x8 (at most 5 x16)") and "slot" in row(result, "gpu 0 link")[2]
    monkeypatch.setattr("runtime.cli.doctor.read_link", lambda pci: None)
    assert row(run_cli("doctor"), "gpu 0 link")[:2] == ("warn", "unknown")


def test_an_old_driver(fake: FakeDriver) -> None:
    fake.version = 12080
    result = run_cli("doctor")
    assert result.code == 3
    state, value, fix = row(result, "driver")
    assert state == "fail" and "CUDA 12.8" in value and "13.0" in fix


def test_no_driver() -> None:
    if Path("/proc/driver/nvidia").exists():
        pytest.skip("a driver is installed")
    api.cache_clear()
    result = run_cli("doctor")
    assert result.code == 3 and row(result, "driver")[0] == "fail"
    assert "driver 580" in row(result, "driver")[2] and "--device cpu" in row(result, "driver")[2]
    assert row(result, "nvrtc")[0] == "ok"  # the rest is checked all the same


def test_a_gpu_that_is_too_old_or_busy(fake: FakeDriver) -> None:
    fake.capability = (6, 1)
    result = run_cli("doctor")
    assert result.code == 3 and row(result, "gpu 0")[0] == "fail" and "sm_75" in row(result, "gpu 0")[2]
    fake.capability = (9, 0)
    fake.fail["cuDevicePrimaryCtxRetain"] = cuda.CUresult.CUDA_ERROR_DEVICE_UNAVAILABLE
    result = run_cli("doctor")
    assert result.code == 3 and row(result, "gpu 0")[0] == "fail" and "another process" in row(result, "gpu 0")[2]


def test_the_compiler(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("runtime.cli.doctor.INCLUDE_DIR", tmp_path)
    result = run_cli("doctor")
    assert result.code == 3 and row(result, "headers")[:2] == ("fail", f"none in {tmp_path}")

    from compiler.emit.nvrtc import CompileError

    def missing() -> str:
        raise CompileError("NVRTC cannot be loaded (no such file); pip install nvidia-cuda-nvrtc==13.0.88")

    monkeypatch.setattr("runtime.cli.doctor.nvrtc.version", missing)
    result = run_cli("doctor")
    assert result.code == 3
    assert row(result, "nvrtc") == ("fail", "NVRTC cannot be loaded (no such file)", "pip install nvidia-cuda-nvrtc==13.0.88")


def test_packages(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.cli.doctor.version", lambda name: "13.2.0" if "cccl" in name else "13.0.3")
    monkeypatch.setattr("runtime.cli.doctor.requires", lambda name: ["a>=1", "cuda-python==13.0.3", "nvidia-cuda-cccl==13.0.85",
                                                                    'pytest==8; extra == "dev"'])  # fmt: skip
    result = run_cli("doctor")
    assert result.code == 3
    assert row(result, "packages") == ("fail", "nvidia-cuda-cccl 13.2.0", "pip install nvidia-cuda-cccl==13.0.85")


@pytest.mark.skipif(os.name == "nt", reason="POSIX rights")
def test_the_cache(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NINFERC_CACHE", str(tmp_path / "file" / "cache"))
    result = run_cli("doctor")
    assert result.code == 3 and row(result, "cache")[0] == "fail" and "NINFERC_CACHE" in row(result, "cache")[2]
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    monkeypatch.setenv("NINFERC_CACHE", str(open_to_all))
    result = run_cli("doctor")
    assert result.code == 0
    assert row(result, "cache") == ("warn", f"{open_to_all} can be written by others", f"chmod go-w {open_to_all}")


def test_links_from_sysfs(tmp_path: Path) -> None:
    folder = tmp_path / "0000:41:00.0"
    folder.mkdir()
    for name, text in (("current_link_width", "8"), ("max_link_width", "16"), ("current_link_speed", "16.0 GT/s PCIe"),
                       ("max_link_speed", "32.0 GT/s PCIe")):  # fmt: skip
        (folder / name).write_text(text + "\n")
    assert _sysfs("00000000:41:00.0", tmp_path) == Link(8, 16, 4, 5)
    assert _sysfs("00000000:42:00.0", tmp_path) is None
    (folder / "max_link_width").write_text("Unknown\n")
    assert _sysfs("0000:41:00.0", tmp_path) is None
    assert read_link("ffffffff:ff:1f.7") is None


def test_plan_compares_with_the_gpu(fake: FakeDriver) -> None:
    artifact = small_model.small_artifact()
    result = run_cli("plan", artifact)
    assert result.code == 0 and "100.00 GiB of 140.00 GiB on Made-up GPU: fits" in result.text and result.err == ""
    fake.free = 64 << 20
    result = run_cli("plan", artifact)
    assert result.code == 3 and "does not fit" in result.text
    assert len(result.lines) == 1 and "are needed" in result.err and "64 MiB are free" in result.err
    assert run_cli("plan", artifact, "--arch", "sm_90a").code == 0  # for another machine
    assert fake.allocated == 0
