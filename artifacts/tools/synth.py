"""`synth`: a full-size artifact of random weights, for tests and benchmarks that must not need the real ones.

Bits come from `synth_bits`, so that a GPU can produce the same weights without reading the file.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from artifacts.container.directory_v2 import Identity
from artifacts.container.schema import ObjectPlan, TensorObject
from artifacts.container.writer import ArtifactWriter
from artifacts.formats.base import default_threads
from artifacts.identities.plan import I32
from artifacts.identities.registry import TOKEN_IDS, registered
from artifacts.layouts import LAYOUTS
from artifacts.tools.synth_bits import PlaneBits, WordSource, plane_bits, plane_key, row_masks, token_ids
from artifacts.tools.synth_frontend import frontend

TASK_BYTES = 8 << 20

Progress = Callable[[int, int], None]
"""(bytes written, bytes in all)."""


def tensor_bytes(tensor: TensorObject, index: int, seed: int, domain: int = TOKEN_IDS) -> np.ndarray:
    """All bytes of one synthetic tensor, a uint8 array; `index` is its position in the directory."""
    out = np.zeros(tensor.bytes, np.uint8)
    source = WordSource()
    for offset, data in _pieces(tensor, index, seed, domain, _tasks(tensor), source):
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
    threads: int | None = None,
    progress: Progress | None = None,
) -> None:
    """Write an artifact of planned objects: resources as given, every tensor from the generator.

    domain: token ids that the tokenizer knows, for the id map of the proposal head. header_only: tensors, scalars
    excepted, stay holes of a sparse file. Errors: OutputError, and those of ArtifactWriter.
    """
    count = default_threads() if threads is None else threads
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
        local = threading.local()

        def work(index: int, tensor: TensorObject, task: tuple[int, int, int]) -> int:
            if not hasattr(local, "source"):
                local.source = WordSource()
            written = 0
            for offset, data in _pieces(tensor, index, seed, domain, [task], local.source):
                writer.write_at(tensor.name, offset, data)
                written += data.size
            return written

        done = 0
        with ThreadPoolExecutor(count) as pool:
            running: list[Future[int]] = []
            try:
                for index, tensor in tensors:
                    for offset, length in LAYOUTS[tensor.layout].gaps(tensor.format, tensor.shape):
                        writer.write_at(tensor.name, offset, bytes(length))
                        done += length
                    for task in _tasks(tensor):
                        running.append(pool.submit(work, index, tensor, task))
                        if len(running) >= 4 * count:  # bounded, so that an error stops the run soon
                            done += running.pop(0).result()
                            if progress is not None:
                                progress(done, total)
                for future in running:
                    done += future.result()
                    if progress is not None:
                        progress(done, total)
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise


def _tasks(tensor: TensorObject) -> Iterator[tuple[int, int, int]]:
    """(plane, first byte, end byte) of about TASK_BYTES; starts are multiples of 8 bytes and of whole rows' masks."""
    for plane in plane_bits(tensor):
        step = TASK_BYTES // (8 * plane.row_bytes) * 8 * plane.row_bytes or 8 * plane.row_bytes
        for begin in range(0, plane.bytes, step):
            yield plane.index, begin, min(begin + step, plane.bytes)


def _pieces(
    tensor: TensorObject,
    index: int,
    seed: int,
    domain: int,
    tasks: Iterable[tuple[int, int, int]],
    source: WordSource,
) -> Iterator[tuple[int, np.ndarray]]:
    """(offset in the tensor, bytes); the bytes are valid until the next piece is asked for."""
    planes = plane_bits(tensor)
    masks = row_masks(tensor)
    for number, begin, end in tasks:
        plane = planes[number]
        if tensor.format == I32:
            yield begin, token_ids(tensor.shape[0], domain).view(np.uint8)[begin:end]
            continue
        words = np.empty(-(-(end - begin) // 8), np.uint64)
        key = plane_key(seed, index, number)
        for first in range(0, words.size, source.block):
            source.fill(words[first : first + source.block], key, begin // 8 + first, plane.mask, plane.add)
        data = words.view(np.uint8)[: end - begin]
        if masks is not None:
            _clear_padding(data, plane, masks[number])
        yield plane.offset + begin, data


def _clear_padding(data: np.ndarray, plane: PlaneBits, mask: np.ndarray) -> None:
    """AND whole rows with the mask of one row; tasks start at row boundaries."""
    rows = data.reshape(-1, plane.row_bytes)
    rows &= mask


def synthesize_registered(
    identity: Identity,
    path: Path,
    seed: int = 0,
    *,
    header_only: bool = False,
    overwrite: bool = False,
    threads: int | None = None,
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
        threads=threads,
        progress=progress,
    )
