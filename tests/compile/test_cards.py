"""What ``-m gpu`` runs as another card (``NINFERC_TEST_AS``) asks for nothing that this card lacks.

By default: the choice of every kernel of the programs that GPU tests run. Under ``-m slow``: the kernel tests run on the
emulator as that card, and every kernel that they launch is compiled for the card's own architecture, which refuses an
instruction that it lacks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from compiler.emit.arch import CARDS, capability, caps, card_as
from compiler.emit.cache import Job, compile_all
from compiler.emit.render import code_paths, kernel_source
from compiler.kernels.spec import DeviceCaps, KernelSpec
from tests.card import CONSUMER, alone
from tests.compile import instantiations as inst
from tests.emulator import toolchain
from tests.models import ROOT

HOSTS = ("sm_90a", "sm_100a", "sm_120a")  # what the tests run on
NEEDS_WGMMA = ("attn_prefill_wgmma.cu.j2", "linear_rows_wgmma.cu.j2")


def lacking(template: str, smem: int, cluster: tuple[int, ...], target: DeviceCaps) -> list[str]:
    """What a kernel needs and ``target`` has not."""
    out = []
    if smem > target.smem_block:
        out.append(f"{smem} bytes of shared memory, {target.smem_block} allowed")
    if tuple(cluster) != (1, 1, 1) and not target.clusters:
        out.append(f"a cluster of {cluster}")
    if template in NEEDS_WGMMA and not target.wgmma:
        out.append("warpgroup products")
    return out


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("card", CONSUMER)
def test_capabilities_are_those_of_both(card: str, host: str) -> None:
    own, physical = caps(CARDS[card][0]), caps(host)
    target = card_as(card, physical)
    assert target.arch == host and not target.wgmma and not target.clusters
    assert target.smem_block == (64 if card == "rtx2080ti" else 99) * 1024 and target.sms == min(CARDS[card][1], physical.sms)
    assert target.programmatic_edges == (own.programmatic_edges and physical.programmatic_edges)
    same = own.arch == host
    assert target.code_arch == (0 if same else 10 * min(capability(own), capability(physical)))
    assert ("NINFERC_CODE_ARCH" in code_paths(target)) == (not same)


@pytest.mark.parametrize("name", [inst.TINY, *(pytest.param(name, marks=pytest.mark.slow) for name in inst.DENSE)])
@pytest.mark.parametrize("card", CONSUMER)
def test_programs_ask_for_nothing_that_the_card_lacks(card: str, name: str) -> None:
    target = card_as(card, caps("sm_90a"))
    found = inst.kernels_for(name, target, inst.WIDTHS, 1) + inst.kernels_for(name, target, inst.STEP, 2)
    assert len(found) > 20
    wrong = {k.spec.entry: lack for k in found if (lack := lacking(k.spec.template, k.spec.smem, k.spec.cluster, target))}
    assert not wrong


def test_code_paths_are_compiled_as_the_card() -> None:
    """On an sm_90a device an RTX 3090's kernel holds no programmatic wait; the device's own holds one."""
    spec = next(k.spec for k in inst.kernels(inst.TINY, "sm_90a", inst.STEP) if k.spec.template == "rmsnorm.cu.j2")
    own, other = caps("sm_90a"), card_as("rtx3090", caps("sm_90a"))
    images = [compile_ptx(spec, target) for target in (own, other, card_as("rtx5090", caps("sm_90a")))]
    assert [("griddepcontrol" in image) for image in images] == [True, False, True]


def compile_ptx(spec: KernelSpec, target: DeviceCaps) -> str:
    """PTX of a kernel."""
    from cuda.bindings import nvrtc

    from compiler.emit.render import INCLUDE_DIR

    _, program = nvrtc.nvrtcCreateProgram(kernel_source(spec, target).encode(), b"k.cu", 0, [], [])
    flags = [f"--gpu-architecture=compute_{target.arch[3:]}", "--std=c++20", "-default-device", f"-I{INCLUDE_DIR}"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(flags), [flag.encode() for flag in flags])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS
    _, size = nvrtc.nvrtcGetPTXSize(program)
    buffer = bytearray(size)
    nvrtc.nvrtcGetPTX(program, buffer)
    return bytes(buffer).decode()


@pytest.mark.slow
@pytest.mark.parametrize("card", CONSUMER)
def test_kernel_tests_as_the_card(card: str, tmp_path: Path) -> None:
    if reason := toolchain.missing_reason():
        pytest.skip(reason)
    folder = tmp_path / "kernels"
    folder.mkdir()
    workers = max((os.cpu_count() or 1) // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")), 1)
    done = subprocess.run([sys.executable, "-m", "pytest", "tests/kernels", "-q", "-n", str(workers), "--dist", "worksteal"],
                          cwd=ROOT, capture_output=True, text=True, timeout=1800,
                          env=os.environ | {"NINFERC_TEST_AS": card, "NINFERC_TEST_RECORD": str(folder)})  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:]
    found: list[dict[str, Any]] = [json.loads(path.read_text()) for path in sorted(folder.iterdir())]
    assert len(found) > 300
    own = caps(CARDS[card][0])
    jobs, wrong = [], []
    for index, item in enumerate(found):
        name, entry = item["entry"], f"{item['entry'][:80]}_{index}"
        jobs.append(Job(entry, item["source"].replace(f"NINFERC_KERNEL({name},", f"NINFERC_KERNEL({entry},"), own.arch))
    cubins = compile_all(jobs, tmp_path / "cubins", workers)
    for job, item in zip(jobs, found, strict=True):
        smem = item["smem"] + cubins[job.entry].resources.static_smem
        wrong += [f"{item['entry']}: {text}" for text in lacking(item["template"], smem, item["cluster"], own)]
    assert not wrong


def test_one_process_compiles_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NINFERC_CACHE", str(tmp_path))
    order: list[str] = []

    def second() -> None:
        with alone():
            order.append("second")

    with alone():
        thread = threading.Thread(target=second)
        thread.start()
        time.sleep(0.2)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"] and list(tmp_path.iterdir()) == []
    lock = tmp_path / "tests.lock"
    lock.write_text("")
    os.utime(lock, (1, 1))  # of a process that was killed long ago
    with alone():
        order.append("third")
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    lock.write_text(str(child.pid))  # of one that was killed just now
    with alone():
        order.append("fourth")
    assert order[2:] == ["third", "fourth"] and not lock.exists()
