"""What a measurement must carry to be comparable: device, driver, clocks, power, versions, commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

from compiler.emit import nvrtc
from runtime.cuda.device import Device
from runtime.cuda.driver import api, call

_QUERY = ("clocks.sm,clocks.mem,clocks.max.sm,power.limit,power.draw,temperature.gpu,pcie.link.gen.current,"
          "pcie.link.width.current")  # fmt: skip
_PACKAGES = ("cuda-bindings", "numpy", "networkx", "jinja2")


def _run(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def commit() -> str:
    """The source's commit: ``$NINFERC_COMMIT``, else git's, with ``+`` for uncommitted changes; empty when unknown."""
    if given := os.environ.get("NINFERC_COMMIT"):
        return given
    root = Path(__file__).resolve().parents[2]
    head = _run(["git", "-C", str(root), "rev-parse", "--short=12", "HEAD"])
    return head + ("+" if head and _run(["git", "-C", str(root), "status", "--porcelain", "-uno"]) else "")


def gpu_state(index: int) -> dict[str, str]:
    """Clocks, power limit and draw as nvidia-smi reports them now; empty when it is not there."""
    line = _run(["nvidia-smi", f"--id={index}", f"--query-gpu={_QUERY}", "--format=csv,noheader"])
    return dict(zip(_QUERY.split(","), (part.strip() for part in line.split(",")), strict=False)) if line else {}


def describe(devices: list[Device]) -> dict[str, Any]:
    """The environment part of a record."""
    info = [device.info() for device in devices]
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = ""
    return {
        "gpu": [item.name for item in info],
        "sms": [item.sms for item in info],
        "memory_bytes": [item.total for item in info],
        "driver": _run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).splitlines()[:1],
        "cuda_driver_api": int(call(api().cuDriverGetVersion(), "driver version")),
        "nvrtc": nvrtc.version(),
        "python": platform.python_version(),
        "os": platform.platform(),
        "packages": versions,
        "commit": commit(),
        "state_before": [gpu_state(item.index) for item in info],
    }
