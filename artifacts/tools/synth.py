"""`synth`: a full-size artifact of random weights, for tests and benchmarks that must not need the real ones.

Bits come from `synth_bits`, so that a GPU can produce the same weights without reading the file. Processes make and
write them (`synth_worker`): threads would hand the interpreter's lock around more often than they compute.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path

import numpy as np

from artifacts.container.directory_v2 import Identity
from artifacts.container.schema import ObjectPlan, TensorObject
from artifacts.container.writer import ArtifactWriter
from artifacts.formats.base import default_threads
from artifacts.identities.plan import I32
from artifacts.identities.registry import TOKEN_IDS, registered
from artifacts.layouts import LAYOUTS
from artifacts.tools.synth_bits import WordSource, plane_bits, plane_key, row_masks, token_ids
from artifacts.tools.synth_frontend import frontend
from artifacts.tools.synth_worker import Job, Workers

TASK_BYTES = 32 << 20
SMALL_BYTES = 512 << 20  # below this, starting processes takes longer than the work

Task = tuple[int, int, int]
"""(plane, first byte, end byte); the first byte is a multiple of 8 and starts a row where rows have masks."""
Progress = Callable[[int, int], None]
"""(bytes written, bytes in all)."""


def tensor_bytes(tensor: TensorObject, index: int, seed: int, domain: int = TOKEN_IDS) -> np.ndarray:
    """All bytes of one synthetic tensor, a uint8 array; `index` is its position in the directory."""
    out = np.zeros(tensor.bytes, np.uint8)
    for offset, data in pieces(tensor, index, seed, domain, tasks_of(tensor), WordSource()):
        out[offset : offset + data.size] = data
    return out


def synthesize(
    path: Path,
    identity: Identity,
    plans: Iterable[ObjectPlan],
    resources: Mapping[str, bytes],
    seed: int = 0,
    *,
    domain: int = TOKEN_IDS,
    header_only: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Write an artifact of planned objects: resources as given, every tensor from the generator.

    domain: token ids that the tokenizer knows, for the id map of the proposal head. header_only: tensors, scalars
    excepted, stay holes of a sparse file. workers: processes, 1 for none; None: one per core, none for small files.
    Errors: OutputError, and those of ArtifactWriter.
    """
    with ArtifactWriter(path, identity, plans, overwrite=overwrite, sparse=header_only) as writer:
        for name, data in resources.items():
            writer.write(name, data)
        tensors = [(i, t) for i, t in enumerate(writer.objects.values()) if isinstance(t, TensorObject)]
        if header_only:
            for index, tensor in tensors:
                if tensor.shape == ():  # divisors: zeros there would be illegal
                    writer.write(tensor.name, tensor_bytes(tensor, index, seed))
            return
        total = sum(tensor.bytes for _, tensor in tensors)
        count = workers if workers is not None else 1 if total < SMALL_BYTES else default_threads()
        write = _write_here if count == 1 else _write_in_processes
        for _, tensor in tensors:
            for offset, length in LAYOUTS[tensor.layout].gaps(tensor.format, tensor.shape):
                writer.write_at(tensor.name, offset, bytes(length))
        done = 0
        with closing(write(writer, tensors, seed, domain, count)) as steps:
            for written in steps:
                done += written
                if progress is not None:
                    progress(done, total)


def _write_here(
    writer: ArtifactWriter, tensors: list[tuple[int, TensorObject]], seed: int, domain: int, count: int
) -> Generator[int, None, None]:
    source = WordSource()
    for index, tensor in tensors:
        for offset, data in pieces(tensor, index, seed, domain, tasks_of(tensor), source):
            writer.write_at(tensor.name, offset, data)
            yield data.size


def _write_in_processes(
    writer: ArtifactWriter, tensors: list[tuple[int, TensorObject]], seed: int, domain: int, count: int
) -> Generator[int, None, None]:
    def jobs() -> Iterator[Job]:
        for index, tensor in tensors:
            planes = plane_bits(tensor)
            for task in tasks_of(tensor):
                begin, end = (planes[task[0]].offset + at for at in task[1:])
                path, start = writer.hand_out(tensor.name, begin, end)
                yield Job(path, start - begin, tensor, index, seed, domain, task)

    with Workers(count) as pool:
        yield from pool.run(jobs())


def tasks_of(tensor: TensorObject) -> Iterator[Task]:
    """Shares of about TASK_BYTES."""
    for plane in plane_bits(tensor):
        step = TASK_BYTES // (8 * plane.row_bytes) * 8 * plane.row_bytes or 8 * plane.row_bytes
        for begin in range(0, plane.bytes, step):
            yield plane.index, begin, min(begin + step, plane.bytes)


def pieces(
    tensor: TensorObject, index: int, seed: int, domain: int, tasks: Iterable[Task], source: WordSource
) -> Iterator[tuple[int, np.ndarray]]:
    """(offset in the tensor, bytes) of tasks, a few hundred KiB at a time; valid until the next one is asked for."""
    planes = plane_bits(tensor)
    masks = row_masks(tensor)
    for number, begin, end in tasks:
        plane = planes[number]
        if tensor.format == I32:
            yield begin, token_ids(tensor.shape[0], domain).view(np.uint8)[begin:end]
            continue
        key = plane_key(seed, index, number)
        unit = 8 if masks is None else 8 * plane.row_bytes
        step = max(1, 8 * source.block // unit) * unit
        for first in range(begin, end, step):
            length = min(step, end - first)
            words = source.words(key, first // 8, -(-length // 8), plane.mask, plane.add)
            data = words.view(np.uint8)[:length]
            if masks is not None:
                rows = data.reshape(-1, plane.row_bytes)
                rows &= masks[number]
            yield plane.offset + first, data


def synthesize_registered(
    identity: Identity,
    path: Path,
    seed: int = 0,
    *,
    header_only: bool = False,
    overwrite: bool = False,
    workers: int | None = None,
    progress: Progress | None = None,
) -> None:
    """A registered identity in full size. header_only: only directory, frontend files and scalars take disk space.

    Errors: IdentityError for an unknown identity, OutputError.
    """
    entry = registered(identity)
    synthesize(
        path,
        identity,
        entry.plan(),
        frontend(entry.resources),
        seed,
        header_only=header_only,
        overwrite=overwrite,
        workers=workers,
        progress=progress,
    )
