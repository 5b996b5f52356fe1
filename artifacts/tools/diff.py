"""`diff`: which objects of two artifacts differ, by metadata and by bytes. Versions may differ."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from artifacts.container.artifact import Artifact
from artifacts.container.schema import V3_NAMES, StoredObject, TensorObject
from artifacts.errors import quoted

COMPARE_BYTES = 8 << 20


@dataclass(frozen=True)
class Difference:
    """One difference. `kind`: `only-a`, `only-b`, `metadata`, `bytes` or `identity`; `detail` is one line."""

    name: str
    kind: str
    detail: str

    def record(self) -> dict[str, Any]:
        return {"name": self.name, "kind": self.kind, "detail": self.detail}


def compare(
    a: Artifact, b: Artifact, payload: bool = True, progress: Callable[[int, int], None] | None = None
) -> Iterator[Difference]:
    """Differences in the order of `a`, then what only `b` has. `payload` false compares metadata only.

    Offsets are not compared: where an object lies is not part of what it is. progress: (bytes done, bytes in all).
    Errors: PartError, LayoutError for version 3 objects that cannot be read.
    """
    if a.identity != b.identity:
        yield Difference("", "identity", f"{quoted(str(a.identity))} against {quoted(str(b.identity))}")
    total = sum(entry.bytes for name, entry in a.objects.items() if name in b.objects)
    done = 0
    for name, left in a.objects.items():
        right = b.objects.get(name)
        if right is None:
            yield Difference(name, "only-a", _describe(left))
            continue
        if _describe(left) != _describe(right):
            yield Difference(name, "metadata", f"{_describe(left)} against {_describe(right)}")
        elif payload:
            yield from _compare_bytes(a, b, left, right)
        done += left.bytes
        if progress is not None:
            progress(done, total)
    for name, right in b.objects.items():
        if name not in a.objects:
            yield Difference(name, "only-b", _describe(right))


def _describe(entry: StoredObject) -> str:
    if isinstance(entry, TensorObject):
        return f"tensor {_name(entry.format)} {list(entry.shape)} in {_name(entry.layout)}, {entry.bytes} bytes"
    return f"resource {_name(entry.encoding)}, {entry.bytes} bytes"


def _name(stored: str) -> str:
    """Version 3 files may name formats as they like."""
    return stored if stored in V3_NAMES else quoted(stored)


def _compare_bytes(a: Artifact, b: Artifact, left: StoredObject, right: StoredObject) -> Iterator[Difference]:
    differing, first = 0, -1
    for begin in range(0, left.bytes, COMPARE_BYTES):
        length = min(COMPARE_BYTES, left.bytes - begin)
        unequal = a.read(left.offset + begin, length) != b.read(right.offset + begin, length)
        count = int(np.count_nonzero(unequal))
        if count and first < 0:
            first = begin + int(unequal.argmax())
        differing += count
    if differing:
        yield Difference(left.name, "bytes", f"{differing} of {left.bytes} bytes differ, the first at {first}")
