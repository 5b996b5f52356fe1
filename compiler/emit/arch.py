"""Targets: the NVRTC architectures this compiler builds for and their capabilities.

Shared-memory limits: CUDA C++ Programming Guide, table "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

import re
from dataclasses import replace

from compiler.kernels.spec import DeviceCaps

KIB = 1024
# compute capability -> (largest shared memory of one block, of one multiprocessor), KiB
_SHARED_KIB = {
    75: (64, 64),
    80: (163, 164),
    86: (99, 100),
    87: (163, 164),
    89: (99, 100),
    90: (227, 228),
    100: (227, 228),
    103: (227, 228),
    110: (227, 228),
    120: (99, 100),
    121: (99, 100),
}
# multiprocessors and L2 of a typical card, used only when no GPU is present to ask (cross compilation)
_TYPICAL = {75: (68, 5.5), 80: (108, 40), 86: (82, 6), 87: (16, 4), 89: (128, 72), 90: (132, 50), 100: (148, 126),
            103: (148, 126), 110: (20, 32), 120: (170, 96), 121: (48, 24)}  # fmt: skip
_ARCH = re.compile(r"sm_(\d{2,3})([af]?)\Z")

# Cards by name for `--as`: their architecture, multiprocessors, L2 in MiB (vendor data sheets).
CARDS = {
    "rtx5090": ("sm_120a", 170, 96),
    "rtx4090": ("sm_89", 128, 72),
    "rtx3090": ("sm_86", 82, 6),
    "rtx2080ti": ("sm_75", 68, 5.5),
    "rtx5060ti": ("sm_120a", 36, 32),
    "h200": ("sm_90a", 132, 50),
}


class ArchError(ValueError):
    """An unknown target; the message lists what is allowed."""


def supported() -> list[str]:
    """Names accepted by ``--arch`` besides ``native``."""
    plain = [f"sm_{cc}" for cc in sorted(_SHARED_KIB)]
    return plain + [f"sm_{cc}a" for cc in sorted(_SHARED_KIB) if cc >= 90]


def caps(arch: str, sms: int | None = None, l2_bytes: int | None = None) -> DeviceCaps:
    """Capabilities of ``arch`` (``sm_90a`` …). ``sms`` and ``l2_bytes`` of the card at hand replace typical values.

    Raises ArchError for a name outside ``supported()``."""
    match = _ARCH.match(arch)
    if not match or int(match[1]) not in _SHARED_KIB or (match[2] and (int(match[1]) < 90 or match[2] != "a")):
        raise ArchError(f"architecture {arch!r} is unknown; allowed: native, {', '.join(supported())}")
    cc = int(match[1])
    block, multiprocessor = _SHARED_KIB[cc]
    typical_sms, typical_l2 = _TYPICAL[cc]
    return DeviceCaps(
        arch=arch,
        sms=sms or typical_sms,
        smem_block=block * KIB,
        smem_sm=multiprocessor * KIB,
        l2_bytes=l2_bytes or int(typical_l2 * KIB * KIB),
        bf16_mma=cc >= 80,
        cp_async=cc >= 80,
        bulk_copy=cc >= 90,
        wgmma=arch == "sm_90a",
        fp8_convert=cc >= 89,
        programmatic_edges=cc >= 90,
        clusters=90 <= cc < 120,
    )


def native_arch(major: int, minor: int) -> str:
    """NVRTC target of a device with this compute capability: the architecture-specific one where it exists."""
    cc = major * 10 + minor
    if cc not in _SHARED_KIB:
        raise ArchError(f"compute capability {major}.{minor} is not supported; allowed: {', '.join(supported())}")
    return f"sm_{cc}a" if cc >= 90 else f"sm_{cc}"


def card_as(card: str, physical: DeviceCaps) -> DeviceCaps:
    """Capability set and code paths of ``card`` restricted to what runs on the ``physical`` device (``--as``)."""
    if card not in CARDS:
        raise ArchError(f"card {card!r} is unknown; allowed: {', '.join(sorted(CARDS))}")
    arch, sms, l2_mib = CARDS[card]
    wanted = caps(arch, sms, int(l2_mib * KIB * KIB))
    return replace(
        wanted,
        arch=physical.arch,
        sms=min(wanted.sms, physical.sms),
        smem_block=min(wanted.smem_block, physical.smem_block),
        smem_sm=min(wanted.smem_sm, physical.smem_sm),
        bf16_mma=wanted.bf16_mma and physical.bf16_mma,
        cp_async=wanted.cp_async and physical.cp_async,
        bulk_copy=wanted.bulk_copy and physical.bulk_copy,
        wgmma=wanted.wgmma and physical.wgmma,
        fp8_convert=wanted.fp8_convert and physical.fp8_convert,
        programmatic_edges=wanted.programmatic_edges and physical.programmatic_edges,
        clusters=wanted.clusters and physical.clusters,
        code_arch=0 if wanted.arch == physical.arch else min(capability(wanted), capability(physical)) * 10,
    )


def capability(caps: DeviceCaps) -> int:
    """Compute capability as one number: 86, 120."""
    match = _ARCH.match(caps.arch)
    if not match:
        raise ArchError(f"architecture {caps.arch!r} is unknown; allowed: {', '.join(supported())}")
    return int(match[1])
