"""Processes that make synthetic weights and write them into the file under construction.

A worker reads one JSON job per line from its standard input and answers with one JSON line: bytes written, or an error.
Workers are started by module name and not forked, so that it works the same on every system and with threads around.
"""

import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from artifacts.container.output import write_all
from artifacts.container.schema import TensorObject
from artifacts.errors import OutputError, quoted_path


@dataclass(frozen=True)
class Job:
    """A share of a tensor to write: the tensor starts at byte `start` of `path`; `task` is (plane, first byte, end byte)."""

    path: Path
    start: int
    tensor: TensorObject
    index: int
    seed: int
    domain: int
    task: tuple[int, int, int]

    def line(self) -> str:
        """The job as a worker reads it."""
        return json.dumps({**asdict(self), "path": str(self.path)}) + "\n"


def _job(record: dict[str, Any]) -> Job:
    tensor = record["tensor"]
    shape, task = tuple(tensor["shape"]), tuple(record["task"])
    return Job(**{**record, "path": Path(record["path"]), "tensor": TensorObject(**{**tensor, "shape": shape}), "task": task})


class Workers:
    """A few processes; leaving the block ends them."""

    def __init__(self, count: int) -> None:
        self._processes = [_start() for _ in range(count)]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                with suppress(OSError):  # a line that the process did not take
                    pipe.close()

    def run(self, jobs: Iterator[Job]) -> Iterator[int]:
        """Bytes written, job by job in any order. Errors: OutputError, the first one."""
        waiting, results = iter(jobs), queue.SimpleQueue[int | Exception | None]()
        lock = threading.Lock()

        def serve(process: subprocess.Popen[str]) -> None:
            try:
                while True:
                    with lock:
                        job = next(waiting, None)
                    if job is None:
                        break
                    results.put(_ask(process, job))
            except Exception as error:  # reported where the results are read
                results.put(error)
            results.put(None)

        threads = [threading.Thread(target=serve, args=(process,), daemon=True) for process in self._processes]
        for thread in threads:
            thread.start()
        ended = 0
        while ended < len(threads):
            result = results.get()
            if isinstance(result, Exception):
                raise result
            if result is None:
                ended += 1
            else:
                yield result


def _ask(process: subprocess.Popen[str], job: Job) -> int:
    assert process.stdin is not None and process.stdout is not None
    try:
        process.stdin.write(job.line())
        process.stdin.flush()
        answer = json.loads(process.stdout.readline() or "{}")
    except (OSError, ValueError) as error:
        raise OutputError(f"{quoted_path(job.path)}: a process that writes it failed ({error})") from None
    if "error" in answer:
        raise OutputError(answer["error"])
    if "written" not in answer:
        raise OutputError(f"{quoted_path(job.path)}: a process that writes it ended")
    return int(answer["written"])


def _start() -> "subprocess.Popen[str]":
    """A worker. It finds this package wherever the caller found it, never in the current folder (`-P`), and is in a
    process group of its own: Ctrl-C reaches the caller alone, which ends its workers."""
    path = os.pathsep.join([str(Path(__file__).resolve().parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-P", "-m", "artifacts.tools.synth_worker"]
    environment = os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    if sys.platform == "win32":
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, encoding="utf-8", env=environment,
                                creationflags=subprocess.CREATE_NEW_PROCESS_GROUP)  # fmt: skip
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, encoding="utf-8", env=environment, process_group=0)


def main() -> int:
    """Serve jobs until the input ends."""
    from artifacts.tools.synth import pieces
    from artifacts.tools.synth_bits import WordSource

    source, path, handle = WordSource(), None, -1
    for line in sys.stdin:
        job = _job(json.loads(line))
        try:
            if job.path != path:
                handle = os.open(job.path, os.O_WRONLY | getattr(os, "O_BINARY", 0))
                path = job.path
            written = 0
            for offset, data in pieces(job.tensor, job.index, job.seed, job.domain, [job.task], source):
                write_all(handle, job.start + offset, data.data)
                written += data.size
            answer: dict[str, Any] = {"written": written}
        except OSError as error:
            answer = {"error": f"{quoted_path(job.path)}: {error.strerror or error}"}
        print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BrokenPipeError:  # whoever asked is gone
        os._exit(1)
