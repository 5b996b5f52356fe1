"""What the schedule needs to know of one kernel instantiation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class DeviceCaps:
    """Capabilities of the target, by which kernels are chosen; never a list of architecture names.

    ``arch`` is an NVRTC target such as ``sm_90a``. ``smem_block`` is the largest shared memory of one block in
    bytes (opt-in), ``smem_sm`` that of one multiprocessor. ``sms`` multiprocessors, ``l2_bytes`` L2 size.
    """

    arch: str
    sms: int
    smem_block: int
    smem_sm: int
    l2_bytes: int
    bf16_mma: bool  # sm_80+; else products run on FP32 units (base/mma.cuh)
    cp_async: bool  # sm_80+; else copies happen at once (base/async.cuh)
    bulk_copy: bool  # sm_90+: cp.async.bulk, mbarrier transactions
    wgmma: bool  # sm_90a only
    fp8_convert: bool  # sm_89+
    programmatic_edges: bool  # sm_90+
    clusters: bool  # sm_90+
    code_arch: int = 0  # as in NINFERC_ARCH (860): kernels take this architecture's code paths instead of those of arch


BLOCK_RESERVED = 1024  # bytes of shared memory that the driver keeps per block


def smem_alone(smem: int, caps: DeviceCaps) -> int:
    """Shared memory to launch a block with that uses ``smem`` bytes, so that no multiprocessor holds two of its kernel.

    A kernel made for one block per multiprocessor takes twice as long where two stand on one and others hold none. That
    happens when blocks are small enough: behind a programmatic edge the hardware puts them wherever the kernel before has
    ended first.
    """
    return max(smem, caps.smem_sm // 2 - BLOCK_RESERVED + 128)


@dataclass(frozen=True)
class KernelSpec:
    """One instantiation of a template and its launch.

    ``entry`` is the extern "C" name, readable and stable: it states family, format, shape, column bucket and
    architecture. ``params`` go to the Jinja template as they are (ints, bools, closed identifiers only).
    ``args`` names the kernel's parameters in order; each name is an operand of the fused call (pointer), or one of
    ``scalars`` (32-bit integers or floats known at compile time). ``scratch`` are per-call buffers in bytes by
    argument name, poisoned by the VM. ``zeroed`` scratch must be zero at first launch and is left zero by the kernel.
    ``waits_first``: no block lets dependents start before its own dependency wait has returned; what it has stored by then of
    ``published`` arguments, it has stored for all to see. ``early``: arguments besides weights that the kernel touches before
    its wait (compiler/passes/early.py proves that it may).
    """

    entry: str
    template: str
    params: Mapping[str, int | str | bool]
    grid: tuple[int, int, int]
    block: int
    smem: int
    args: tuple[str, ...]
    scalars: Mapping[str, int | float] = field(default_factory=dict)
    scratch: Mapping[str, int] = field(default_factory=dict)
    zeroed: frozenset[str] = frozenset()
    cluster: tuple[int, int, int] = (1, 1, 1)
    waits_first: bool = False
    published: tuple[str, ...] = ()
    early: tuple[str, ...] = ()
    reason: str = ""
