"""A rank whose part of a step or a chunk is missing, on the emulator: no kernel leaves its memory, and both ranks recover."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pytest

from compiler.control import FAULT, DeviceFault
from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import caps
from compiler.program.model import Placement
from runtime.cuda.backend import CudaBackend
from runtime.session import EngineFault, Request, Sampling, Session
from tests import models
from tests.emulator import toolchain
from tests.emulator_backend import EmulatorBackend

pytestmark = pytest.mark.skipif(bool(toolchain.missing_reason()), reason=str(toolchain.missing_reason()))
Array = np.ndarray[Any, Any]
SAMPLED = Sampling(0.9, 1.0, 20, 0.0, 1.0, 0.2, seed=3)
LEFT_BEHIND = (0xFF, 0x3C)  # bytes: NaN, finite values


class Memory:
    """A device of the emulator by address."""

    def download(self, address: int, nbytes: int) -> Array:
        return np.frombuffer(ctypes.string_at(address, nbytes), np.uint8)

    def upload(self, address: int, data: Array) -> None:
        ctypes.memmove(address, np.ascontiguousarray(data).ctypes.data, data.nbytes)


@dataclass
class Recovery:
    """What ``CudaBackend.resynchronise`` uses of a backend, on the emulator's memory."""

    backend: EmulatorBackend

    def __post_init__(self) -> None:
        self.exchange, self.program, self.devices = self, self.backend.program, [Memory(), Memory()]

    def wait(self) -> None:
        return None

    def address(self, place: Placement) -> int:
        return int(self.backend.memory[place.rank][place.region].ctypes.data) + place.offset

    def clear(self) -> None:
        for array in (*self.backend.boxes, self.backend.hang):
            array[:] = 0


@pytest.mark.parametrize("left_behind", [pytest.param(LEFT_BEHIND[0], marks=pytest.mark.slow), LEFT_BEHIND[1]])
@pytest.mark.parametrize(("transport", "prefill", "fused", "sampling"), [
    ("peer", "chunks", True, Sampling()), ("host", "chunks", True, SAMPLED),
    ("peer", "chunks", False, Sampling()), ("peer", "none", True, SAMPLED)],
    ids=["tiles", "sent over the host", "sent", "pushed words"])  # fmt: skip
def test_a_rank_that_sends_nothing(transport: str, prefill: str, fused: bool, sampling: Sampling,
                                   left_behind: int) -> None:  # fmt: skip
    """All that rank 1 sends is left out, with what it computes from it: activations that nobody wrote, a token that nobody
    chose. Rank 0 gives up. Afterwards both have the tokens of a fresh run."""
    options = CompileOptions(tp=2, max_context=128, prefill_chunk=128, pairs=((1, 1),), fused=fused)
    program = compile_program(models.artifact("dense-small"), replace(caps("sm_90a", sms=6)), options, images=False)
    backend = EmulatorBackend(program, models.store("dense-small", "bf16"), transport=transport)
    request = Request([3, 4, 5] if prefill == "chunks" else [3], 2, sampling=sampling)  # its first launch emits a token
    want = [e.token for e in Session(backend, prefill=prefill, columns=1).generate(request)]
    backend.silent, backend.unwritten = 1, left_behind
    backend.hang.view(np.uint32)[0] = 1  # as if another wait had ended already
    session = Session(backend, prefill=prefill, columns=1, depth=0)
    session.submit(request)
    with pytest.raises(EngineFault, match=DeviceFault.EXCHANGE.name):
        session.advance()
    assert backend.read("step", 0)[FAULT] == DeviceFault.EXCHANGE
    backend.silent, backend.unwritten = None, 0xFF
    CudaBackend.resynchronise(cast(Any, Recovery(backend)))
    assert not backend.read("step", 0)[FAULT] and not backend.read("step", 1)[FAULT]
    session.cancel(0)
    assert [e.token for e in Session(backend, prefill=prefill, columns=1).generate(request)] == want
