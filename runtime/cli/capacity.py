"""How many tokens of KV cache a GPU has room for (``--kv-capacity auto``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from compiler.control import PAGE
from compiler.driver import ArtifactSource, CompileOptions, compile_program
from compiler.explain.memory import amount, device_memory, total_bytes
from compiler.kernels.spec import DeviceCaps
from runtime.cuda.driver import DeviceError

DRIVER_BYTES = 600 << 20
"""Device memory that a context, loaded kernels and graphs take besides the plan; an allowance, not a measurement."""
STEPS = 64  # capacities come in this many steps, so that little changes of free memory mean the same program


def auto_capacity(artifact: ArtifactSource, caps: DeviceCaps, options: CompileOptions, free: Sequence[int],
                  headroom: int) -> int:  # fmt: skip
    """Tokens of KV cache for all sequences: what fits ``free`` bytes of each rank's device beside everything else,
    ``headroom`` and the driver's own; at least one full context, at most one per sequence. Raises DeviceError."""
    per_lane = -(-options.max_context // PAGE)
    full = options.max_concurrency * per_lane
    least = max(per_lane, options.max_concurrency)
    program = compile_program(artifact, caps, replace(options, kv_capacity=least * PAGE), images=False)
    pages = full
    for rank, uses in enumerate(device_memory(program)):
        per_page = uses["kv pool"] / program.limits.pages
        need = total_bytes(program, rank) + DRIVER_BYTES + headroom
        if need > free[rank]:
            raise DeviceError(f"device of rank {rank}: {amount(need)} are needed with one context of {options.max_context} "
                              f"tokens and {amount(headroom)} of headroom, {amount(free[rank])} are free; lower --max-context "
                              "or --max-concurrency")  # fmt: skip
        pages = min(pages, program.limits.pages + int((free[rank] - need) / max(per_page, 1)))
    step = max(full // STEPS, 1)
    return max(least, pages if pages == full else pages // step * step) * PAGE
