"""Rates of known cards, and what they allow: time of a call, instruction slots per weight.

Bandwidth is what a plain read kernel reaches. Measured: H200 (docs of this project), RTX 5090 1,674.5 GB/s; elsewhere 93%
of the vendor's figure. FLOP rates are the vendors' dense BF16 figures with FP32 accumulation (sm_75 has no such products:
those of its FP32 units), clocks their boost clocks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from compiler.ir.op import Cost
from compiler.kernels.spec import DeviceCaps

PRACTICAL = 0.93
LANES_PER_CLOCK = 128  # per multiprocessor: four schedulers, one warp instruction each
GAP_PROGRAMMATIC, GAP_FULL = 0.6e-6, 1.7e-6  # seconds between streaming kernels of one graph, measured on an H200


@dataclass(frozen=True)
class Rates:
    """A card: bytes/s it can read, FLOP/s of its products, clock in Hz; ``measured`` speaks of the bandwidth."""

    card: str
    bandwidth: float
    flops: float
    clock: float
    measured: bool = False


# (compute capability, multiprocessors): the card that such a target most likely is
_CARDS: dict[tuple[int, int], Rates] = {
    (75, 68): Rates("RTX 2080 Ti", PRACTICAL * 616e9, 13.45e12, 1.545e9),
    (75, 40): Rates("T4", PRACTICAL * 320e9, 8.1e12, 1.59e9),
    (80, 108): Rates("A100 40GB", PRACTICAL * 1555e9, 312e12, 1.41e9),
    (86, 82): Rates("RTX 3090", PRACTICAL * 936e9, 71e12, 1.695e9),
    (86, 28): Rates("RTX 3060", PRACTICAL * 360e9, 25.5e12, 1.777e9),
    (87, 16): Rates("Jetson AGX Orin", PRACTICAL * 204.8e9, 42.5e12, 1.3e9),
    (89, 128): Rates("RTX 4090", PRACTICAL * 1008e9, 165.2e12, 2.52e9),
    (89, 142): Rates("L40S", PRACTICAL * 864e9, 362e12, 2.52e9),
    (90, 132): Rates("H200", 4400e9, 989e12, 1.98e9, True),
    (100, 148): Rates("B200", PRACTICAL * 8000e9, 2250e12, 1.965e9),
    (103, 148): Rates("B300", PRACTICAL * 8000e9, 2500e12, 1.965e9),
    (110, 20): Rates("Jetson Thor", PRACTICAL * 273e9, 258e12, 1.57e9),
    (120, 170): Rates("RTX 5090", 1674.5e9, 209.5e12, 2.41e9, True),
    (120, 84): Rates("RTX 5080", PRACTICAL * 960e9, 112.6e12, 2.62e9),
    (120, 70): Rates("RTX 5070 Ti", PRACTICAL * 896e9, 87.9e12, 2.45e9),
    (120, 36): Rates("RTX 5060 Ti", PRACTICAL * 448e9, 47.4e12, 2.57e9),
    (121, 48): Rates("GB10", PRACTICAL * 273e9, 62e12, 2.4e9),
}


def rates(caps: DeviceCaps) -> Rates:
    """Rates of the known card of the same compute capability whose multiprocessor count is nearest."""
    match = re.match(r"sm_([0-9]+)", caps.arch)
    capability = int(match[1]) if match else 0
    near = [(abs(sms - caps.sms), sms) for cc, sms in _CARDS if cc == capability]
    if not near:  # every supported capability has a row; tests keep it so
        raise KeyError(f"no rates are known for {caps.arch}")
    return _CARDS[capability, min(near)[1]]


def call_seconds(cost: Cost, at: Rates, programmatic: bool) -> float:
    """Least time of one call in a graph: its bytes or its FLOPs, whichever takes longer, and the gap to the next."""
    return max((cost.read + cost.written) / at.bandwidth, cost.flops / at.flops) + (
        GAP_PROGRAMMATIC if programmatic else GAP_FULL
    )


def slots_per_weight(caps: DeviceCaps, at: Rates, nbytes: int, weights: int) -> float:
    """Instruction slots (of one lane) per weight while ``nbytes`` of ``weights`` weights stream at full bandwidth."""
    issue = caps.sms * LANES_PER_CLOCK * at.clock
    return issue * (nbytes / at.bandwidth) / weights
