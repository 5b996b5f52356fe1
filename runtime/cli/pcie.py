"""PCIe link of a GPU: width and generation now and at most, from NVML, else from Linux's sysfs.

NVML: "NVML API Reference", nvmlDeviceGetCurrPcieLinkWidth and its relatives. sysfs: PCI ABI of the Linux kernel,
``current_link_width``, ``current_link_speed`` (GT/s).
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from pathlib import Path

GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6}
"""Generation by transfer rate of a lane in GT/s."""


@dataclass(frozen=True)
class Link:
    """Lanes and generation; a card that idles may show a lower generation than it will use."""

    width: int
    max_width: int
    generation: int
    max_generation: int


def read_link(pci: str) -> Link | None:
    """The link of the GPU at PCI address ``pci`` (``00000000:01:00.0``), None where nothing tells."""
    return _nvml(pci) or _sysfs(pci, Path("/sys/bus/pci/devices"))


def _nvml(pci: str) -> Link | None:
    name = "nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1"
    try:
        library = ctypes.CDLL(name)
        if library.nvmlInit_v2() != 0:
            return None
    except (OSError, AttributeError):
        return None
    try:
        handle = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByPciBusId_v2(pci.encode(), ctypes.byref(handle)) != 0:
            return None
        values = []
        for call in ("CurrPcieLinkWidth", "MaxPcieLinkWidth", "CurrPcieLinkGeneration", "MaxPcieLinkGeneration"):
            value = ctypes.c_uint()
            if getattr(library, f"nvmlDeviceGet{call}")(handle, ctypes.byref(value)) != 0:
                return None
            values.append(value.value)
        return Link(*values)
    except AttributeError:
        return None
    finally:
        library.nvmlShutdown()


def _sysfs(pci: str, root: Path) -> Link | None:
    domain, _, rest = pci.lower().partition(":")
    folder = root / f"{domain[-4:]:0>4}:{rest}"
    try:
        width, most = (int((folder / f"{kind}_link_width").read_text()) for kind in ("current", "max"))
        speeds = [float((folder / f"{kind}_link_speed").read_text().split()[0]) for kind in ("current", "max")]
    except (OSError, ValueError, IndexError):
        return None
    generation, best = (GENERATIONS.get(speed, 0) for speed in speeds)
    return Link(width, most, generation, best)
