"""What a session needs of whatever executes a program: CUDA devices or the Python VM."""

from __future__ import annotations

from typing import Protocol

from compiler.control import egress_extent
from compiler.ir.op import Array
from compiler.passes.halves import PREFILL
from compiler.program.model import Program
from runtime.control import Ingress
from runtime.vm import Machine


class Backend(Protocol):
    """Executes phases of one program in launch order.

    ``ring`` (u32) and ``egress`` (i32) are the host rings, ``ingress`` the one writer of the ring and the count
    of launches, so that sessions may follow one another on a backend. ``launch`` may return before the work is done; ``wait``
    blocks until every launch so far has completed and raises DeviceError when one failed. ``prefill`` names the phase that
    runs a chunk of a prompt.
    """

    program: Program
    ring: Array
    egress: Array
    ingress: Ingress
    prefill: str

    def launch(self, phase: str) -> None: ...

    def wait(self) -> None: ...

    def check(self) -> None:
        """Raise DeviceError when the ranks lost touch: outputs since then must not be used."""

    def rank_egress(self, rank: int) -> Array:
        """The egress ring of ``rank``, like ``egress``, which is that of rank 0."""

    def read(self, name: str, rank: int = 0) -> Array:
        """A copy of a shared value (state or table) in float32/int32, after ``wait``."""

    def read_activation(self, phase: str, name: str, rows: int) -> Array:
        """The first ``rows`` rows of an activation of the last launch of ``phase``, float32/float64/int32."""

    def close(self) -> None: ...


class BackendAround:
    """``inner`` unchanged: the base of backends that add something to another one's launches."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.program: Program = inner.program
        self.ring: Array = inner.ring
        self.egress: Array = inner.egress
        self.ingress: Ingress = inner.ingress
        self.prefill = inner.prefill

    def launch(self, phase: str) -> None:
        self.inner.launch(phase)

    def wait(self) -> None:
        self.inner.wait()

    def check(self) -> None:
        self.inner.check()

    def rank_egress(self, rank: int) -> Array:
        return self.inner.rank_egress(rank)

    def read(self, name: str, rank: int = 0) -> Array:
        return self.inner.read(name, rank)

    def read_activation(self, phase: str, name: str, rows: int) -> Array:
        return self.inner.read_activation(phase, name, rows)

    def close(self) -> None:
        self.inner.close()


class VMBackend:
    """The Python VM as a backend. Launches run at once."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.program = machine.program
        self.ring = machine.ring
        self.egress = self.rank_egress(0)
        self.ingress = Ingress(self.ring, self.program.limits)
        self.prefill = PREFILL

    def launch(self, phase: str) -> None:
        self.machine.run(phase)

    def wait(self) -> None:
        return None

    def check(self) -> None:
        return None

    def rank_egress(self, rank: int) -> Array:
        words = egress_extent(self.program.limits)
        ring: Array = self.machine.egress[rank * words : (rank + 1) * words]
        return ring

    def read(self, name: str, rank: int = 0) -> Array:
        return self.machine.read(name, rank).copy()

    def read_activation(self, phase: str, name: str, rows: int) -> Array:
        copy: Array = self.machine.activation(phase, name)[:rows].copy()
        return copy

    def close(self) -> None:
        return None
