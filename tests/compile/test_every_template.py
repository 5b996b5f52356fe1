"""Every kernel compiles for every target, fits a block, and no decode kernel uses local memory.

By default: the example model on every target (on sm_75 one kernel of each template, as products on FP32 units are long),
and one 27B model on a data centre and on a consumer target. Under ``-m slow``: every registered dense model, all targets,
one and two ranks.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from compiler.emit.arch import caps
from compiler.emit.nvrtc import Cubin, Resources
from compiler.emit.render import TEMPLATE_DIR
from tests.compile import instantiations as inst
from tests.compile.instantiations import DENSE, STEP, TARGETS, TINY, WIDTHS, Kernel


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh cubin cache: a kernel is compiled once per run, and never taken from an earlier one."""
    return tmp_path_factory.mktemp("cubins")


def check(found: tuple[Kernel, ...], arch: str, cache: Path) -> None:
    cubins = inst.compiled(found, arch, cache)
    wrong = [line for kernel in found for line in inst.faults(kernel, cubins[kernel.spec.entry], arch)]
    assert not wrong, f"{arch}: " + "; ".join(wrong)


def example_kernels(arch: str) -> tuple[Kernel, ...]:
    """One and several lanes on one rank, on two targets many columns as well; of two ranks (products that send what they store
    among them), and of chunks too short for the chunked delta rule, what these have not; tools."""
    wide = ((1, 32),) if arch in ("sm_90a", "sm_120a") else ()
    one = inst.kernels(TINY, arch, ((1, 1), (8, 1), *wide))
    more = (*inst.kernels(TINY, arch, STEP, tp=2), *inst.kernels(TINY, arch, STEP, chunk=16))
    known = {kernel.spec.template for kernel in one}
    new = (kernel for kernel in more if kernel.spec.template not in known or "_push_" in kernel.spec.entry)
    return (*one, *new, *inst.tool_kernels(arch))


WHOLE = ("sm_80", "sm_90a", "sm_120a")  # of the others by default one kernel of each template


@pytest.mark.parametrize("arch", [arch if arch in WHOLE else pytest.param(arch, marks=pytest.mark.slow) for arch in TARGETS])
def test_example_on_every_target(arch: str, cache: Path) -> None:
    check(example_kernels(arch), arch, cache)


@pytest.mark.parametrize("arch", [arch for arch in TARGETS if arch not in WHOLE])
def test_templates_on_other_targets(arch: str, cache: Path) -> None:
    of_template = {kernel.spec.template: kernel for kernel in reversed(example_kernels(arch))}
    assert len(of_template) > 20
    check(tuple(of_template.values()), arch, cache)


@pytest.mark.parametrize("arch", ["sm_90a", *(pytest.param(arch, marks=pytest.mark.slow) for arch in ("sm_75", "sm_120a"))])
def test_27b_step(arch: str, cache: Path) -> None:
    check(inst.kernels("qwen3.8-27b/nvfp4", arch, (*STEP, (1, 24))), arch, cache)


@pytest.mark.slow
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", [TINY, *DENSE])
@pytest.mark.parametrize("arch", TARGETS)
def test_every_model_on_every_target(name: str, arch: str, tp: int, cache: Path) -> None:
    check(inst.kernels(name, arch, WIDTHS, tp), arch, cache)


def test_no_template_is_left_out() -> None:
    files = {path.name for path in TEMPLATE_DIR.glob("*.cu.j2")}
    used = {kernel.spec.template for arch in ("sm_80", "sm_90a") for kernel in example_kernels(arch)}
    assert files == used


GOOD = Resources(registers=64, stack=0, spill_stores=0, spill_loads=0, static_smem=1024)


def test_the_rules_see_each_fault() -> None:
    spec = replace(inst.tool_kernels("sm_86")[0].spec, entry="k", block=256, smem=1000)

    def found(kernel: Kernel, resources: Resources) -> list[str]:
        return inst.faults(kernel, Cubin(b"", resources, ""), "sm_86")

    assert found(Kernel(spec, True), GOOD) == []
    for name in ("stack", "spill_stores", "spill_loads", "local"):
        worse = replace(GOOD, **{name: 8})
        assert len(found(Kernel(spec, True), worse)) == 1
        assert found(Kernel(spec, False), worse) == []  # prefill kernels may spill
    limit = caps("sm_86").smem_block
    for decode in (True, False):
        assert found(Kernel(replace(spec, smem=limit - 1024), decode), GOOD) == []
        assert "shared memory" in found(Kernel(replace(spec, smem=limit - 1023), decode), GOOD)[0]
        assert "registers" in found(Kernel(replace(spec, block=1024), decode), replace(GOOD, registers=65))[0]
