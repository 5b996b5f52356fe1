"""The command line's streams: closed readers, full disks, interrupts, redirected and interactive stderr."""

import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from runtime.cli.io import Diagnostics, Output, OutputError, ProgressBar, run_main

ROOT = Path(__file__).parents[2]
PRELUDE = """
import itertools, os, sys, time
sys.path.insert(0, sys.argv[1])
from runtime.cli.io import Diagnostics, Output, OutputError, run_main
def guard(function):
    try:
        return function() or 0
    except OutputError as error:
        print("ninferc:", error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("ninferc: interrupted", file=sys.stderr)
        return 130
"""
MAIN = "\nsys.exit(run_main(main, guard))\n"
FOREVER = """
def main():
    output = Output()
    for number in itertools.count():
        output.write(f"line {number} é🙂\\n")
"""
posix = pytest.mark.skipif(os.name == "nt", reason="POSIX descriptors and signals")


def start(body: str, **streams: Any) -> subprocess.Popen[bytes]:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}  # a console that cannot spell the answer
    environment.pop("PYTHONUNBUFFERED", None)
    settings: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    return subprocess.Popen([sys.executable, "-c", PRELUDE + body + MAIN, str(ROOT)], env=environment, **settings)


def finish(process: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Exit code and stderr; stdout was dealt with before."""
    try:
        _, errors = process.communicate(timeout=30)
    finally:
        process.kill()
    return process.returncode, (errors or b"").decode().replace("\r\n", "\n")


def test_results_are_utf_8_whatever_the_console_says() -> None:
    process = start("def main():\n    out = Output(); out.write('é🙂\\n'); out.write('x'); out.end_line(); out.end_line()\n")
    output, errors = process.communicate(timeout=30)
    assert (process.returncode, output, errors) == (0, "é🙂\nx\n".encode(), b"")


def test_a_reader_that_leaves_ends_the_command_in_one_line() -> None:
    process = start(FOREVER)
    assert process.stdout is not None and process.stdout.readline() == "line 0 é🙂\n".encode()
    process.stdout.close()
    process.stdout = None
    assert finish(process) == (1, "ninferc: stdout was closed by its reader; the rest of the output is lost\n")


@posix
@pytest.mark.parametrize("close", ["os.close(1)", "sys.stdout = None", "sys.stdout.close()"])
def test_a_stdout_that_is_closed_from_the_start(close: str) -> None:
    code, errors = finish(start(f"{close}\n{FOREVER}", stdout=subprocess.DEVNULL))
    assert code == 1 and errors.count("\n") == 1 and errors.startswith("ninferc: stdout")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk() -> None:
    with open("/dev/full", "wb") as full:
        assert finish(start(FOREVER, stdout=full)) == (1, "ninferc: stdout: No space left on device\n")
        text = "def main():\n    print('x' * 99)\n"  # text left in Python's own buffer fails at the last flush
        assert finish(start(text, stdout=full)) == (1, "ninferc: stdout: No space left on device\n")


@posix
def test_an_interrupt_gives_130() -> None:
    process = start(FOREVER)
    assert process.stdout is not None and process.stdout.readline()
    process.send_signal(signal.SIGINT)
    process.stdout.read()
    code, errors = finish(process)
    assert (code, errors) == (130, "ninferc: interrupted\n")


@posix
def test_a_second_interrupt_while_the_first_is_reported() -> None:
    process = start("""
def main():
    Output().write("ready\\n")
    time.sleep(30)
def guard(function):
    try:
        return function()
    except KeyboardInterrupt:
        print("cleaning", file=sys.stderr, flush=True)
        time.sleep(30)
""")
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGINT)
    assert process.stderr.readline() == b"cleaning\n"
    process.send_signal(signal.SIGINT)
    assert finish(process) == (130, "")


def test_a_closed_stderr_does_not_stop_the_command() -> None:
    body = "def main():\n    d = Diagnostics()\n    for n in range(5000): d.line('x' * 99)\n    Output().write('done\\n')\n"
    process = start(body)
    assert process.stdout is not None and process.stderr is not None
    process.stderr.close()
    process.stderr = None
    assert process.stdout.read() == b"done\n"
    assert process.wait(timeout=30) == 0


def test_errors_that_cannot_be_shown() -> None:
    def guard(function: Any) -> int:
        raise BrokenPipeError

    assert run_main(lambda: None, guard) == 1
    assert run_main(lambda: 3, lambda function: function() or 0) == 3


def test_output_remembers_the_end_of_the_line() -> None:
    raw = io.BytesIO()
    output = Output(raw)
    for text in ("", "a", "b\n", "c"):
        output.write(text)
    output.end_line()
    output.end_line()
    assert raw.getvalue() == b"ab\nc\n"


def test_output_after_a_failure() -> None:
    class Broken(io.BytesIO):
        def flush(self) -> None:
            raise OSError(22, "Invalid argument")  # what Windows says for a closed pipe

    output = Output(Broken())
    with pytest.raises(OutputError, match="closed by its reader"):
        output.write("x")
    with pytest.raises(OutputError, match="stdout is closed"):
        output.write("x")


class Terminal(io.StringIO):
    """A terminal that keeps what it would show."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """Lines as seen: a carriage return moves the cursor to the start of the line."""
        rows = []
        for line in self.getvalue().split("\n"):
            cells: list[str] = []
            at = 0
            for char in line:
                if char == "\r":
                    at = 0
                    continue
                cells[at : at + 1] = [char]
                at += 1
            rows.append("".join(cells).rstrip())
        return rows


def test_redirected_stderr_has_no_carriage_returns_or_escapes() -> None:
    stream = io.StringIO()
    diagnostics = Diagnostics(stream)
    with diagnostics.progress("upload", 100, "B") as bar:
        for _ in range(100):
            bar.advance()
        diagnostics.line("half")
    diagnostics.stream("thinking")
    diagnostics.summary("prompt tokens", 12)
    diagnostics.summary("a name that is longer than its column", "two\nlines")
    assert stream.getvalue() == ("half\nthinking\nsummary prompt tokens              12\n"
                                 "summary a name that is longer than its column two lines\n")


def test_bars_vanish_from_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    diagnostics = Diagnostics(terminal)
    diagnostics.stream("thinking")
    with diagnostics.progress("upload", 4 * 1024**3, "B") as bar:
        bar.advance(1024**3)
        assert terminal.screen()[-1].startswith("upload [#") and terminal.screen()[-1].endswith("25% 1.0 GiB of 4.0 GiB")
        diagnostics.line("a line")
        assert terminal.screen()[:2] == ["thinking", "a line"] and "upload" in terminal.screen()[2]
    assert terminal.screen() == ["thinking", "a line", ""]
    assert "\x1b" not in terminal.getvalue()
    with pytest.raises(KeyboardInterrupt), diagnostics.progress("more", 3):
        raise KeyboardInterrupt
    assert terminal.screen() == ["thinking", "a line", ""]


def test_bars_are_redrawn_ten_times_a_second_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal, now = Terminal(), [0.0]
    diagnostics = Diagnostics(terminal, clock=lambda: now[0])
    with diagnostics.progress("x", 1000) as bar:
        for _ in range(1000):
            now[0] += 0.001
            bar.advance()
        assert terminal.getvalue().count("x [") <= 12


def test_dumb_and_closed_terminals_have_no_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    assert not Diagnostics(Terminal()).interactive
    closed = io.StringIO()
    closed.close()
    diagnostics = Diagnostics(closed)
    assert not diagnostics.interactive
    diagnostics.line("nobody hears")


@pytest.mark.parametrize(("done", "total", "columns", "text"), [
    (0, 10, 40, "load [....................]   0% 0 of 10"), (10, 10, 40, "load [###################] 100% 10 of 10"),
    (20, 10, 40, "load [###################] 100% 20 of 10"), (0, 0, 40, "load [#####################] 100% 0 of 0"),
    (5, 10, 20, "load  50% 5 of 10"), (5, 10, 8, "load  50"),
])
def test_bar_text(done: int, total: int, columns: int, text: str) -> None:
    bar = ProgressBar(Diagnostics(io.StringIO()), "load", total, "")
    bar.done = done
    assert bar.text(columns) == text and len(text) <= columns


def test_importing_the_streams_is_cheap() -> None:
    """They must not drag in the compiler: `--help` and early errors use them."""
    code = ("import sys; sys.path.insert(0, sys.argv[1]); import runtime.cli.io\n"
            "print(sorted({'numpy', 'jinja2'} & sys.modules.keys()))")
    done = subprocess.run([sys.executable, "-c", code, str(ROOT)], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
