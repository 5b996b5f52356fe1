"""Plant a fault in a copy of the tree and run the test that must see it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("artifacts", "compiler", "runtime", "templates", "tests", "pyproject.toml")
LINKED = ("examples",)  # read only: not worth a copy
TIMEOUT = 600.0  # seconds per test; a fault may also be a hang, which counts as seen
FAILED = 1  # pytest's exit code when tests ran and some failed


@dataclass(frozen=True)
class Fault:
    """``old``, which stands once in ``file``, becomes ``new``; then ``test`` must fail."""

    name: str
    file: str
    old: str
    new: str
    test: str


@dataclass(frozen=True)
class Verdict:
    """``seen``: the test failed because of the fault. ``invalid`` says why the run proves nothing, else it is empty."""

    seen: bool
    invalid: str
    output: str


def load() -> list[Fault]:
    """All faults, in file order."""
    data = tomllib.loads(Path(__file__).with_name("faults.toml").read_text())
    return [Fault(**item) for item in data["fault"]]


def occurrences(fault: Fault, root: Path = ROOT) -> int:
    return (root / fault.file).read_text().count(fault.old)


class Copy:
    """A copy of the tree in ``folder``, with caches of its own; one fault at a time."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "tree"
        self.root.mkdir(parents=True)
        ignore = shutil.ignore_patterns("__pycache__")
        for name in PARTS:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.root / name, ignore=ignore)
            else:
                shutil.copy(source, self.root / name)
        for name in LINKED:
            (self.root / name).symlink_to(ROOT / name)
        # No bytecode: a fault may keep a file's size and the second of its time, by which Python knows a change.
        self.environment = os.environ | {
            "PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1", "NINFERC_CACHE": str(folder / "cubins"),
            "NINFERC_EMULATOR_CACHE": str(folder / "objects"), "PYTEST_ADDOPTS": "",
        }  # fmt: skip
        for name in ("PYTEST_XDIST_WORKER", "PYTEST_CURRENT_TEST"):
            self.environment.pop(name, None)

    @contextmanager
    def planted(self, fault: Fault) -> Iterator[None]:
        """The fault in place; afterwards the file is as before."""
        path = self.root / fault.file
        text = path.read_text()
        if text.count(fault.old) != 1:
            raise ValueError(f"fault {fault.name!r}: its text stands {text.count(fault.old)} times in {fault.file}, not once")
        path.write_text(text.replace(fault.old, fault.new))
        try:
            yield
        finally:
            path.write_text(text)

    def pytest(self, tests: Sequence[str], *options: str) -> tuple[int, str]:
        """Exit code and output of a run of ``tests`` in the copy; -1 when it took longer than TIMEOUT."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "--tb=short", *options, *tests]
        try:
            done = subprocess.run(command, cwd=self.root, env=self.environment, capture_output=True, text=True,
                                  timeout=TIMEOUT)  # fmt: skip
        except subprocess.TimeoutExpired as late:
            return -1, str(late.stdout or "")
        return done.returncode, done.stdout + done.stderr

    def check(self, fault: Fault) -> Verdict:
        """Plant the fault and run its test."""
        with self.planted(fault):
            code, output = self.pytest([fault.test])
        if "the host compiler failed" in output:
            return Verdict(False, "the fault does not compile", output)
        if "skipped" in output and " failed" not in output:
            return Verdict(False, "the test was skipped", output)
        if code not in (0, FAILED, -1):
            return Verdict(False, f"pytest ended with {code}", output)
        return Verdict(code != 0, "", output)
