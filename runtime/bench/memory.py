"""Device memory of a loaded program: what ``plan`` says, what was reserved for it, what the devices have less of."""

from __future__ import annotations

from dataclasses import dataclass

from compiler.explain.memory import total_bytes
from compiler.program.model import DEVICE_REGIONS, Arg
from runtime.cuda.backend import CudaBackend
from runtime.cuda.driver import api, call
from runtime.cuda.transport import HOST


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes on the device ``index``, of all ranks that it runs.

    ``planned``: what ``ninferc plan`` says the ranks allocate, the mail of exchanges included wherever it lies. ``reserved``:
    what the driver has allocated for them. ``taken``: how much less is free than before loading, that is reserved, kernels
    and graphs. ``resident``: all that is not free, so also contexts and other processes."""

    index: int
    planned: int
    reserved: int
    taken: int
    resident: int


def device_memory(backend: CudaBackend) -> list[DeviceMemory]:
    """Memory as it is now, per device in the order of the ranks. Raises DeviceError."""
    out = []
    for index in dict.fromkeys(device.index for device in backend.devices):
        ranks = [rank for rank, device in enumerate(backend.devices) if device.index == index]
        info = backend.devices[ranks[0]].info()
        out.append(DeviceMemory(index, sum(total_bytes(backend.program, rank) for rank in ranks),
                                sum(_reserved(backend, rank) for rank in ranks),
                                backend.free_at_start[ranks[0]] - info.free, info.total - info.free))  # fmt: skip
    return out


def _reserved(backend: CudaBackend, rank: int) -> int:
    """Sizes of a rank's allocations as the driver knows them."""
    bases = [backend.argument_address(Arg(region, "pointer", region, rank=rank)) for region in DEVICE_REGIONS]
    if backend.exchange is not None and backend.exchange.transport != HOST:
        bases.append(backend.exchange.inbox(rank))
    backend.devices[rank].activate()
    return sum(int(call(api().cuMemGetAddressRange(base), "size of an allocation")[1]) for base in bases)
