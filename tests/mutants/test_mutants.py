"""Every planted fault still applies, and (``-m slow``) the suite sees it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.emulator import toolchain
from tests.mutants.plant import ROOT, Copy, Fault, load, occurrences

FAULTS = load()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_fault_applies(fault: Fault) -> None:
    assert occurrences(fault) == 1, f"{fault.file} must hold this text once: {fault.old}"
    assert fault.old != fault.new and (ROOT / fault.test.split("::")[0]).is_file()
    assert not fault.file.startswith("tests/"), "faults belong into the product"


def test_names_are_distinct_and_the_tests_exist() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 25
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
               *sorted({fault.test for fault in FAULTS})]  # fmt: skip
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-2000:] + found.stderr[-2000:]


@pytest.fixture(scope="session")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    """A copy whose tests pass as long as no fault is planted."""
    made = Copy(tmp_path_factory.mktemp("mutants"))
    code, output = made.pytest(sorted({fault.test for fault in FAULTS}))
    assert code == 0, output
    return made


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_suite_sees_the_fault(fault: Fault, copy: Copy) -> None:
    if fault.file.endswith(".cuh") and (reason := toolchain.missing_reason()):
        pytest.skip(reason)
    verdict = copy.check(fault)
    assert not verdict.invalid, verdict.output[-3000:]
    assert verdict.seen, f"{fault.test} passes with this fault: {fault.new}"
