"""Kernels that wait for other blocks must find room beside whatever else may run: checked on the schedule of two ranks.

An exchange waits for the other rank. With a device per rank all blocks that wait must be resident at once. On one device (a
test mode) each rank is compiled for half the multiprocessors; then, at worst, a rank's waiting blocks hold one multiprocessor
each, and every kernel of the other rank must do with the other half, or share:

* blocks that wait are at most as many as multiprocessors that the rank is compiled for;
* every block fits a multiprocessor that holds nothing else;
* a cluster finds its places in one group of multiprocessors although half of them are held: at most MAX_CLUSTER blocks.

Blocks that only send wait for nothing and are not counted. That on one device dependents start only when the wait is over is a
property of the exchange kernels (templates/include/ninferc/exchange/residual.cuh, `apart`).
"""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from compiler.ir.types import IRError
from compiler.kernels.exchange import KINDS
from compiler.kernels.linear_columns import MAX_CLUSTER
from compiler.kernels.spec import BLOCK_RESERVED, DeviceCaps
from compiler.program.model import Call, KernelImage, Phase

BLOCK_THREADS = 1024
REGISTERS = 65536


def waiting_blocks(item: Call) -> int:
    """Blocks of an exchange call that wait for the other rank; with slices half of the grid only sends."""
    if not any(op.kind in KINDS for op in item.ops):
        return 0
    return item.grid[0] * item.grid[1]


def check_coresident(phases: Mapping[str, Phase], kernels: Mapping[str, KernelImage], caps: DeviceCaps) -> None:
    """Raise IRError naming the kernel and the rule that it breaks. Registers are looked at where kernels are compiled."""
    for phase in phases.values():
        for item in phase.calls:
            where = f"graph {phase.name}, kernel {item.entry}"
            if (blocks := waiting_blocks(item)) > caps.sms:
                raise IRError(f"{where}: {blocks} blocks wait for others, {caps.sms} multiprocessors hold one each")
            used = kernels[item.entry].resources
            shared = item.smem + used.static_smem + BLOCK_RESERVED
            registers = ceil(used.registers / 8) * 8 * item.block
            if item.block > BLOCK_THREADS or shared > caps.smem_sm or registers > REGISTERS:
                raise IRError(f"{where}: a block of {item.block} threads, {shared} bytes of shared memory and {registers} "
                              "registers does not fit a multiprocessor")  # fmt: skip
            size = item.cluster[0] * item.cluster[1] * item.cluster[2]
            if size > MAX_CLUSTER:
                raise IRError(f"{where}: clusters of {size} blocks; at most {MAX_CLUSTER} find room beside another rank")
