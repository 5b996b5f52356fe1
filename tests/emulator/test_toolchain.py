"""Building and caching of emulated kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulator import toolchain
from tests.emulator.emulator import CompileError, compile_kernel

pytestmark = pytest.mark.skipif(toolchain.missing_reason() is not None, reason=str(toolchain.missing_reason()))


def test_edited_headers_rebuild_and_nothing_else_does(tmp_path: Path) -> None:
    header = tmp_path / "value.cuh"
    header.write_text("#define VALUE 1\n")
    source = '#include "value.cuh"\n'

    def build(text: str) -> Path:
        return toolchain.build(text, (), [tmp_path])

    text = source + 'extern "C" int value() { return VALUE; }'
    first = build(text)
    stamp = first.stat().st_mtime_ns
    assert build(text) == first and first.stat().st_mtime_ns == stamp
    header.write_text("#define VALUE 2\n")
    assert build(text) != first
    header.write_text("#define VALUE 1\n")
    assert build(text) == first


def test_errors_name_the_line() -> None:
    with pytest.raises(CompileError, match=r"kernel\.cu:2:.*nonsense"):
        compile_kernel('extern "C" __global__ void broken() {\n  nonsense();\n}')
    with pytest.raises(CompileError, match="no kernel"):
        compile_kernel("int x;")
    with pytest.raises(CompileError, match="'missing' is not one of"):
        compile_kernel('extern "C" __global__ void there() {}', name="missing")
    with pytest.raises(ValueError, match="arch 123 is not one of"):
        compile_kernel('extern "C" __global__ void there() {}', arch=123)


def test_portable_context_switch() -> None:
    tests = ["tests/emulator/test_mma.py::test_f16_k8", "tests/emulator/test_faults.py::test_whole_grid"]
    result = subprocess.run([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *tests], cwd=toolchain.ROOT,
                            env={**os.environ, "NINFERC_EMULATOR_UCONTEXT": "1"}, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def test_readme_example_runs() -> None:
    text = (toolchain.HERE / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0]
    exec(compile(code, "README.md", "exec"), {})


def test_zig_links_without_building_libraries() -> None:
    """Zig's own linking would first build C and C++ libraries that nothing here needs."""
    assert toolchain._linker(("/somewhere/ziglang/zig", "c++")) == ["/somewhere/ziglang/zig", "ld.lld", "-shared"]
    assert toolchain._linker(("python", "-m", "ziglang", "c++")) == ["python", "-m", "ziglang", "ld.lld", "-shared"]
    assert toolchain._linker(("/usr/bin/g++",)) == ["/usr/bin/g++", "-shared"]
    assert toolchain._linker(("clang++",)) == ["clang++", "-shared"]


@pytest.mark.parametrize("tests", [("tests/kernels/test_attention_prefill.py", "-k", "no_race or forgotten_page"),
                                   ("tests/kernels/test_linear_columns.py", "-k", "no_race or epilogue")])  # fmt: skip
def test_without_a_compiler_tests_are_skipped(tests: tuple[str, ...]) -> None:
    """Whether they ask for the fixture, name the condition, or just compile."""
    code = ("import sys, pytest; from tests.emulator import toolchain; toolchain.find_compiler = lambda: None;"
            "sys.exit(pytest.main(['-p', 'no:cacheprovider', '-rs', *sys.argv[1:]]))")  # fmt: skip
    result = subprocess.run([sys.executable, "-c", code, *tests], cwd=toolchain.ROOT, capture_output=True, text=True)
    assert result.returncode == 0 and "failed" not in result.stdout and "passed" not in result.stdout, result.stdout
    assert "no host C++20 compiler" in result.stdout
