"""Two devices on the emulator: memory by address, graphs that run call by call, copies of the staged transport.

A kernel that waits for the other rank finds what that rank sends in its mail already, as the protocol says it
(docs/tensor-parallel.md); what a kernel sends must be just that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from compiler.emit.arch import caps
from compiler.emit.nvrtc import Cubin, Resources
from compiler.emit.render import render
from compiler.kernels.exchange import LINE
from compiler.kernels.spec import DeviceCaps, KernelSpec
from compiler.ops.exchange_begin import number
from compiler.program.model import Call, Phase
from tests.emulator.emulator import compile_kernel, launch

Array = np.ndarray[Any, Any]


class Memory:
    """Every allocation of the process by address."""

    def __init__(self) -> None:
        self.spans: dict[int, Array] = {}
        self._next = 1 << 20

    def allocate(self, nbytes: int) -> int:
        address = self._next
        self.spans[address] = np.zeros(-(-max(nbytes, 1) // 16) * 16, np.uint8)
        self._next += -(-nbytes // 4096) * 4096 + 4096
        return address

    def at(self, address: int) -> Array:
        """The bytes from ``address`` to the end of its allocation."""
        base = max(start for start in self.spans if start <= address)
        assert address - base < self.spans[base].size, f"{address:#x} lies behind an allocation"
        return self.spans[base][address - base :]


MEMORY = Memory()


@dataclass
class Device:
    index: int
    sms: int = 4
    handle: int = 0
    context: int = 0
    stream: Any = None
    live: set[int] = field(default_factory=set)

    def caps(self) -> DeviceCaps:
        return caps("sm_90a", sms=self.sms)

    def allocate(self, nbytes: int, what: str) -> int:
        address = MEMORY.allocate(nbytes)
        self.live.add(address)
        return address

    def release(self, address: int) -> None:
        self.live.remove(address)
        del MEMORY.spans[address]

    def upload(self, address: int, data: Array) -> None:
        flat = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        MEMORY.at(address)[: flat.size] = flat

    def download(self, address: int, nbytes: int) -> Array:
        return MEMORY.at(address)[:nbytes].copy()

    def activate(self) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def close(self) -> None:
        return None


class Pinned:
    def __init__(self, nbytes: int) -> None:
        self.nbytes, self.address = nbytes, MEMORY.allocate(nbytes)
        self.array = MEMORY.at(self.address)[:nbytes]

    def close(self) -> None:
        del MEMORY.spans[self.address]


class Modules:
    """Emulated kernels by entry, compiled at first use."""

    def __init__(self, kernels: Any, devices: Any = None) -> None:
        self.specs: dict[str, KernelSpec] = {entry: image.spec for entry, image in kernels.items()}
        self._kernels: dict[str, Any] = {}

    def kernel(self, entry: str) -> Any:
        if entry not in self._kernels:
            spec = self.specs[entry]
            self._kernels[entry] = compile_kernel(render(spec.template, entry, spec.params), name=entry)
        return self._kernels[entry]

    def close(self) -> None:
        return None


class Graph:
    """The calls of a phase, in order."""

    def __init__(self, phase: Phase, modules: Modules, packed: Any, devices: Any, programmatic: bool,
                 staging: Any = None) -> None:  # fmt: skip
        self.phase, self.modules, self.packed, self.staging = phase, modules, packed, staging

    def launch(self, device: Any) -> None:
        arguments = [self._arguments(item, packed) for item, packed in zip(self.phase.calls, self.packed, strict=True)]
        for index, item in enumerate(self.phase.calls):
            if self.staging is not None and (pulls := self.staging.pulls(self.phase, item)) is not None:
                for _, target, source, nbytes in pulls:
                    MEMORY.at(target)[:nbytes] = MEMORY.at(source)[:nbytes]
            spec, named = self.modules.specs[item.entry], arguments[index]
            waits = spec.template == "exchange_residual.cu.j2" and self.staging is None
            waits = waits and not spec.params["pushed"] and not named.get("tiles")  # else products have sent all
            if waits:
                other = next(i for i, twin in enumerate(self.phase.calls) if twin.rank != item.rank
                             and (twin.ops[0].kind, twin.ops[0].attrs) == (item.ops[0].kind, item.ops[0].attrs))  # fmt: skip
                self._put(arguments[other], self.modules.specs[self.phase.calls[other].entry])
            values = [MEMORY.at(named[name]) if arg.kind == "pointer" else None if arg.kind == "null" else named[name]
                      for name, arg in zip(spec.args, item.args, strict=True)]  # fmt: skip
            launch(self.modules.kernel(item.entry), item.grid, item.block, values, item.smem, schedule_seed=1)
            if waits:
                self._put(named, spec, check=True)

    @staticmethod
    def _arguments(item: Call, packed: Any) -> dict[str, Any]:
        return {arg.name: cell.value for arg, cell in zip(item.args, packed._cells, strict=True)}

    @staticmethod
    def _put(named: dict[str, Any], spec: KernelSpec, check: bool = False) -> None:
        """Put what a call sends into the other rank's mail, or compare with what it sent."""
        outbox = MEMORY.at(named["outbox"])
        columns = int(MEMORY.at(named["rows"])[:4].view(np.int32)[0]) if named["rows"] else named["columns"]
        size = columns * int(spec.params["width"]) * (2 if spec.params["half"] else 4)
        raw = MEMORY.at(named["partial"])[:size]
        base = int(MEMORY.at(named["sequence"])[:4].view(np.uint32)[0])
        stamp = number(base, named["ordinal"])
        words, slices, nbytes, slot = named["slot_words"], named["slot_slices"], named["slot_bytes"], stamp % 2
        pieces: list[tuple[int, Array]] = []
        if spec.params["host_slices" if named["transport"] else "peer_slices"]:
            pieces.append((2 * (8 * words + LINE * slices) + slot * nbytes, raw))
            line = np.array([stamp << 32], np.uint64).view(np.uint8)
            pieces += [(16 * words + LINE * (slot * slices + i), line) for i in range(columns * int(spec.params["parts"]))]
        else:
            pieces.append((8 * slot * words, (raw.view(np.uint32).astype(np.uint64) | np.uint64(stamp << 32)).view(np.uint8)))
        for offset, data in pieces:
            if check:
                assert np.array_equal(outbox[offset : offset + data.size], data), f"{spec.entry} sent something else"
            outbox[offset : offset + data.size] = data

    def close(self) -> None:
        return None


def install(patch: pytest.MonkeyPatch) -> None:
    """Put the emulated pair in the place of devices, graphs and modules for exchanges, self-tests and their benchmark."""
    for module in ("runtime.cuda.chain", "runtime.bench.exchange"):
        patch.setattr(f"{module}.GraphPhase", Graph)
    patch.setattr("runtime.bench.exchange.Device", Device)
    patch.setattr("runtime.bench.exchange.Modules", Modules)
    patch.setattr("runtime.bench.exchange.compile_all",
                  lambda jobs, *rest: {job.entry: Cubin(b"", Resources(0, 0, 0, 0, 0), "") for job in jobs})  # fmt: skip
    patch.setattr("runtime.cuda.transport.PinnedBuffer", Pinned)
    for module in ("runtime.cuda.self_test", "runtime.bench.exchange"):
        patch.setattr(f"{module}.peer_access", lambda devices: None)
