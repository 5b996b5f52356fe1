"""Reading a Hugging Face checkpoint directory: safetensors headers with every size checked, tensor bytes by range.

The files are hostile input: a header is bounded before it is parsed, and every offset is compared with the file length
before anything is read. Tensor bytes are read into fresh arrays, never mapped, so memory stays what a block needs.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from artifacts.errors import ConfigError, FramingError, quoted, quoted_path
from artifacts.formats import Array

MAX_HEADER_BYTES = 32 << 20  # a header of the largest supported checkpoint takes under 1 MiB
MAX_JSON_BYTES = 64 << 20
MAX_RANK = 16

# NumPy has no BF16 or FP8 type: those words are carried as unsigned integers.
WORD_TYPES: Mapping[str, Any] = {
    "BF16": np.uint16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "F8_E4M3": np.uint8,
    "F8_E5M2": np.uint8,
    "F8_E8M0": np.uint8,
    "U8": np.uint8,
    "I8": np.int8,
    "BOOL": np.uint8,
    "U16": np.uint16,
    "I16": np.int16,
    "U32": np.uint32,
    "I32": np.int32,
    "U64": np.uint64,
    "I64": np.int64,
}


@dataclass(frozen=True, slots=True)
class SourceTensor:
    """One tensor of a checkpoint: safetensors `dtype`, `shape`, and its byte range in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: int
    offset: int
    nbytes: int

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


def read_json(path: Path, limit: int = MAX_JSON_BYTES) -> Any:
    """A JSON file of at most `limit` bytes. Errors: ConfigError naming the file."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise ConfigError(f"{quoted(path.name)}: {size} bytes; at most {limit} are allowed")
        return parse_json(path.read_bytes(), path.name)
    except OSError as error:
        raise ConfigError(f"{quoted_path(path)}: {error.strerror or error}") from None


def parse_json(raw: bytes, what: str) -> Any:
    """Strict JSON: UTF-8, no repeated members, no NaN. Errors: ConfigError naming `what`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        record = dict(pairs)
        if len(record) != len(pairs):
            raise ConfigError(f"{quoted(what)}: an object repeats a member")
        return record

    def constant(name: str) -> Any:
        raise ConfigError(f"{quoted(what)}: {name} is not JSON")

    try:
        return json.loads(raw.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{quoted(what)}: not valid JSON ({str(error)[:80]})") from None


class SourceFile:
    """One open safetensors file; `read` may be called from several threads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            self._handle = path.open("rb", buffering=0)
            self.size = os.fstat(self._handle.fileno()).st_size
        except OSError as error:
            raise ConfigError(f"{quoted_path(path)}: {error.strerror or error}") from None

    def close(self) -> None:
        self._handle.close()

    def read(self, offset: int, nbytes: int) -> NDArray[np.uint8]:
        """Exactly `nbytes` bytes at `offset`. Errors: FramingError when the file is shorter."""
        out = np.empty(nbytes, np.uint8)
        view, done = memoryview(out.data), 0
        try:
            while done < nbytes:
                count = self._read_into(view[done:], offset + done)
                if not count:
                    raise FramingError(f"{quoted(self.path.name)}: the file ended at byte {offset + done}")
                done += count
        except OSError as error:
            raise FramingError(f"{quoted(self.path.name)}: {error.strerror or error}") from None
        return out

    def _read_into(self, view: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._handle.fileno(), [view[: 1 << 30]], offset)
        with self._lock:  # one file position per handle
            self._handle.seek(offset)
            return self._handle.readinto(view[: 1 << 30]) or 0

    def header(self, index: int) -> list[SourceTensor]:
        """The tensors of this file. Errors: FramingError naming the file and the rule."""
        name = quoted(self.path.name)
        if self.size < 8:
            raise FramingError(f"{name}: {self.size} bytes is too short for a safetensors file")
        length = int.from_bytes(self.read(0, 8).tobytes(), "little")
        if length > min(self.size - 8, MAX_HEADER_BYTES):
            raise FramingError(f"{name}: header of {length} bytes; at most {min(self.size - 8, MAX_HEADER_BYTES)} fit")
        try:
            record = parse_json(self.read(8, length).tobytes(), self.path.name)
        except ConfigError as error:
            raise FramingError(str(error)) from None
        if not isinstance(record, dict):
            raise FramingError(f"{name}: the header is not a JSON object")
        start, data = 8 + length, self.size - 8 - length
        tensors = [_entry(name, k, v, index, start, data) for k, v in record.items() if k != "__metadata__"]
        cursor = start
        for tensor in sorted(tensors, key=lambda t: (t.offset, t.nbytes)):
            if tensor.offset != cursor:
                raise FramingError(f"{name}: tensor {quoted(tensor.name)} overlaps another one or leaves a gap")
            cursor += tensor.nbytes
        if cursor != self.size:
            raise FramingError(f"{name}: {self.size - cursor} bytes after the last tensor")
        return tensors


def _entry(file: str, name: str, value: Any, index: int, start: int, data: int) -> SourceTensor:
    what = f"{file}: tensor {quoted(name)}"
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise FramingError(f"{what}: members must be dtype, shape, data_offsets")
    dtype, shape, span = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in WORD_TYPES:
        raise FramingError(f"{what}: unknown dtype {quoted(dtype)}")
    if not isinstance(shape, list) or len(shape) > MAX_RANK or any(type(d) is not int or d < 0 for d in shape):
        raise FramingError(f"{what}: shape must be at most {MAX_RANK} integers >= 0")
    if not isinstance(span, list) or len(span) != 2 or any(type(x) is not int for x in span):
        raise FramingError(f"{what}: data_offsets must be two integers")
    begin, end = span
    if not 0 <= begin <= end <= data:
        raise FramingError(f"{what}: bytes [{begin},{end}) leave the {data} data bytes of the file")
    if math.prod(shape) * np.dtype(WORD_TYPES[dtype]).itemsize != end - begin:
        raise FramingError(f"{what}: {end - begin} bytes do not hold {dtype} {shape}")
    return SourceTensor(name, dtype, tuple(shape), index, start + begin, end - begin)


class Checkpoint:
    """A directory with config.json and model.safetensors, or an index and its shards."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self.directory = Path(directory)
        if not self.directory.is_dir():
            raise ConfigError(f"{quoted(str(directory))} is not a checkpoint directory")
        self.config: dict[str, Any] = self._object("config.json")
        self.tensors: dict[str, SourceTensor] = {}
        self.strays: list[str] = []  # safetensors files beside the shards that the index does not name
        self._files: list[SourceFile] = []
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    def _object(self, name: str) -> dict[str, Any]:
        record = read_json(self.directory / name)
        if not isinstance(record, dict):
            raise ConfigError(f"{quoted(name)}: not a JSON object")
        return record

    def _open(self) -> None:
        index = self.directory / "model.safetensors.index.json"
        if not index.is_file():
            single = self.directory / "model.safetensors"
            if not single.is_file():
                raise ConfigError(
                    f"{quoted(str(self.directory))} has neither model.safetensors nor model.safetensors.index.json"
                )
            self._add(single)
            return
        weight_map = self._object(index.name).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index.name}: weight_map must be a non-empty object")
        shards = {str(v) for v in weight_map.values()}
        self.strays = sorted({path.name for path in self.directory.glob("*.safetensors")} - shards)
        for shard in sorted(shards):
            if shard in (".", "..") or any(c in shard for c in "/\\\0:"):
                raise ConfigError(f"{index.name}: shard name {quoted(shard)} is not a plain file name")
            self._add(self.directory / shard)
        for name, shard in weight_map.items():
            found = self.tensors.get(name)
            if found is None or self._files[found.file].path.name != shard:
                raise ConfigError(f"{index.name}: tensor {quoted(name)} is not in {quoted(shard)}")

    def _add(self, path: Path) -> None:
        file = SourceFile(path)
        self._files.append(file)
        for tensor in file.header(len(self._files) - 1):
            if tensor.name in self.tensors:
                raise ConfigError(f"tensor {quoted(tensor.name)} is in two files of the checkpoint")
            self.tensors[tensor.name] = tensor

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def close(self) -> None:
        for file in self._files:
            file.close()

    def tensor(self, name: str) -> SourceTensor:
        """The tensor called `name`. Errors: ConfigError when the checkpoint lacks it."""
        try:
            return self.tensors[name]
        except KeyError:
            raise ConfigError(f"checkpoint has no tensor {quoted(name)}") from None

    def rows(self, tensor: SourceTensor, r0: int, r1: int) -> Array:
        """Rows [r0, r1) of the first axis as an array of the carrier type (see WORD_TYPES)."""
        stride = tensor.nbytes // tensor.shape[0]
        raw = self._files[tensor.file].read(tensor.offset + r0 * stride, (r1 - r0) * stride)
        words = raw.view(np.dtype(WORD_TYPES[tensor.dtype]).newbyteorder("<"))
        array: Array = words.astype(WORD_TYPES[tensor.dtype], copy=False).reshape(r1 - r0, *tensor.shape[1:])
        return array

    def read(self, tensor: SourceTensor) -> Array:
        """The whole tensor (for small ones)."""
        if not tensor.shape:
            one = SourceTensor(tensor.name, tensor.dtype, (1,), tensor.file, tensor.offset, tensor.nbytes)
            return self.rows(one, 0, 1).reshape(())
        return self.rows(tensor, 0, tensor.shape[0])
