"""Executing a conversion plan: row blocks on all cores, memory bounded by the blocks in flight."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

import numpy as np

from artifacts.container.writer import PayloadWriter
from artifacts.convert.linear import Linear, exact_bf16
from artifacts.convert.plan import ConversionPlan, Job
from artifacts.errors import ArtifactError, PayloadError, quoted
from artifacts.formats import FORMATS, NVFP4, Array, Fields, Nvfp4Format, absolute_maximum
from artifacts.formats.base import default_threads, rows_per_block
from artifacts.layouts import layout_of

TASK_ELEMENTS = 1 << 19
Progress = Callable[[int], None]
Task = Callable[[], None]


def run_tasks(tasks: Iterable[Task], threads: int | None = None) -> None:
    """Run tasks on `threads` threads with at most twice as many waiting; the first error cancels the rest."""
    count = default_threads() if threads is None else max(1, threads)
    pending: set[Future[None]] = set()
    with ThreadPoolExecutor(count) as pool:
        try:
            for task in tasks:
                pending.add(pool.submit(task))
                if len(pending) >= 2 * count:
                    done, pending = wait(pending, return_when=FIRST_COMPLETED)
                    for future in done:
                        future.result()
            for future in pending:
                future.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _blocks(job: Job) -> Iterator[tuple[int, int]]:
    rows, columns = job.plan.shape
    unit = layout_of(job.plan.format or "BF16").row_unit
    step = max(1, TASK_ELEMENTS // columns // unit) * unit
    for r0 in range(0, rows, step):
        yield r0, min(r0 + step, rows)


def _named(job: Job, error: ArtifactError) -> ArtifactError:
    return type(error)(f"object {quoted(job.plan.name)}: {error}")


def require_equal(twins: Iterable[tuple[Linear, Linear]], threads: int | None, progress: Progress | None = None) -> None:
    """Compare pairs of linears word for word. `progress` gets elements. Errors: PayloadError naming tensor and row."""

    def task(one: Linear, other: Linear, r0: int, r1: int) -> Task:
        def run() -> None:
            equal = one.words(r0, r1)["words"] == other.words(r0, r1)["words"]
            if not equal.all():
                row = r0 + int(equal.all(axis=1).argmin())
                raise PayloadError(f"tensor {quoted(one.name + '.weight')}: row {row} differs from that of --base")
            if progress is not None:
                progress(equal.size)

        return run

    def tasks() -> Iterator[Task]:
        for one, other in twins:
            step = max(1, TASK_ELEMENTS // one.columns)
            for r0 in range(0, one.rows, step):
                yield task(one, other, r0, min(r0 + step, one.rows))

    run_tasks(tasks(), threads)


def find_maxima(jobs: Iterable[Job], threads: int | None, progress: Progress) -> dict[str, float]:
    """max |x| of every object that is encoded to NVFP4: its divisor depends on the whole matrix."""
    maxima: dict[str, float] = {}
    lock = threading.Lock()

    def task(job: Job, r0: int, r1: int) -> Task:
        def run() -> None:
            assert job.stack is not None
            try:
                values = job.stack.values(r0, r1)
                amax = absolute_maximum(values)
            except ArtifactError as error:
                raise _named(job, error) from None
            with lock:
                maxima[job.plan.name] = max(maxima.get(job.plan.name, 0.0), amax)
            progress(values.size)

        return run

    chosen = [j for j in jobs if j.plan.format == NVFP4.name and j.action != "copy" and j.stack is not None]
    run_tasks((task(job, r0, r1) for job in chosen for r0, r1 in _blocks(job)), threads)
    return maxima


def encode_block(format: str, values: Array, divisor: np.float32 | None, scale: str, what: str) -> Fields:
    """Fields of a block of rows, encoded in pieces that fit the cache."""
    if format == "BF16":
        return {"words": exact_bf16(values, what)}
    fmt = FORMATS[format]
    step = rows_per_block(values.shape[1])
    pieces: list[Fields] = []
    for r0 in range(0, len(values), step):
        part = values[r0 : r0 + step]
        if isinstance(fmt, Nvfp4Format):
            assert divisor is not None
            pieces.append(fmt.encode_rows(part, divisor, scale))
        else:
            pieces.append(fmt.encode_rows(part))  # type: ignore[attr-defined]  # grouped integers and FP8 rows
    if len(pieces) == 1:
        return pieces[0]
    return {k: v if v.ndim == 0 else np.concatenate([p[k] for p in pieces]) for k, v in pieces[0].items()}


def _copied(job: Job, r0: int, r1: int) -> Fields:
    assert job.stack is not None and job.plan.format is not None
    fields = job.stack.words(r0, r1)
    if job.divisor is not None:
        fields["divisor"] = np.asarray(job.divisor)
    FORMATS[job.plan.format].check_words(fields)
    return fields


def write_jobs(
    writer: PayloadWriter, jobs: list[Job], scale: str, threads: int | None = None, progress: Progress | None = None
) -> None:
    """Write every job. `progress` gets matrix elements as they are done (NVFP4 from values counts twice).

    Errors: PayloadError for illegal source words, FormatError for values a format cannot hold; both name the object.
    """
    report = progress or (lambda _: None)
    nvfp4 = FORMATS[NVFP4.name]
    assert isinstance(nvfp4, Nvfp4Format)
    divisors: dict[str, np.float32] = {}
    for job in jobs:
        if job.data is not None:
            writer.write(job.plan.name, job.data)
        elif job.array is not None:
            writer.write_rows(job.plan.name, 0, {"words": job.array()})
    for name, amax in find_maxima(jobs, threads, report).items():
        try:
            divisors[name] = nvfp4.divisor_for(amax)
        except ArtifactError as error:
            raise type(error)(f"object {quoted(name)}: {error}") from None

    def task(job: Job, r0: int, r1: int) -> Task:
        def run() -> None:
            name, format = job.plan.name, job.plan.format
            assert job.stack is not None and format is not None
            try:
                if job.action == "copy":
                    fields = _copied(job, r0, r1)
                else:
                    fields = encode_block(format, job.stack.values(r0, r1), divisors.get(name), scale, name)
            except ArtifactError as error:
                raise _named(job, error) from None
            writer.write_rows(name, r0, fields)
            report((r1 - r0) * job.plan.shape[1])

        return run

    matrices = [job for job in jobs if job.stack is not None]
    run_tasks((task(job, r0, r1) for job in matrices for r0, r1 in _blocks(job)), threads)


def work_elements(plan: ConversionPlan) -> int:
    """What `progress` of require_equal and write_jobs adds up to."""
    total = sum(one.rows * one.columns for one, _ in plan.twins)
    for job in plan.jobs:
        if job.stack is not None:
            twice = job.plan.format == NVFP4.name and job.action != "copy"
            total += job.stack.rows * job.stack.columns * (2 if twice else 1)
    return total
