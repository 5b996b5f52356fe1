"""Where a program runs and what it is compiled for: ``--device``, ``--arch``, ``--as``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from compiler.emit.arch import CARDS, ArchError, caps, card_as
from compiler.kernels.spec import DeviceCaps
from runtime.cli.errors import UsageError
from runtime.cuda.driver import DeviceError, NoDevice, api, call

CPU_ARCH = "sm_90a"
"""What is compiled for where no GPU says otherwise: the CPU executes the schedule, whatever the kernels are."""
_DEVICE = re.compile(r"cpu|cuda(?::([0-9]{1,3}))?")


@dataclass(frozen=True)
class Place:
    """``index`` of a CUDA device; None is the CPU. ``reason`` says why the CPU was chosen for the user."""

    index: int | None
    reason: str = ""

    @property
    def cpu(self) -> bool:
        return self.index is None


def choose_place(text: str | None) -> Place:
    """``cpu``, ``cuda``, ``cuda:N``, or by default the first GPU and else the CPU.

    Raises UsageError for another text. A driver that is there but does not work is an error (DeviceError), not a
    reason to be slow in silence.
    """
    if text is None:
        try:
            if count_devices():
                return Place(0)
        except NoDevice:
            pass
        return Place(None, "no NVIDIA GPU is visible")
    match = _DEVICE.fullmatch(text)
    if not match:
        raise UsageError(f"--device {text[:40]!r}: cpu, cuda or cuda:N is allowed")
    if text == "cpu":
        return Place(None)
    index, count = int(match[1] or 0), count_devices()
    if index >= count:
        raise DeviceError(f"--device {text}: {count} GPU(s) are visible, cuda:0 is the first")
    return Place(index)


def count_devices() -> int:
    """Visible GPUs. Raises NoDevice when there is no driver or none is visible, DeviceError when it does not work."""
    return int(call(api().cuDeviceGetCount(), "cuDeviceGetCount"))


def device_caps(index: int) -> DeviceCaps:
    """Capabilities of a GPU of this machine. Raises DeviceError."""
    from runtime.cuda.device import Device

    device = Device(index)
    try:
        return device.caps()
    finally:
        device.close()


def gpu_name(index: int = 0) -> str:
    """Model name of a GPU of this machine. Raises DeviceError."""
    from runtime.cuda.device import Device

    device = Device(index)
    try:
        return device.info().name
    finally:
        device.close()


def free_memory(index: int) -> int:
    """Free bytes of a GPU of this machine. Raises DeviceError."""
    from runtime.cuda.device import Device

    device = Device(index)
    try:
        return device.info().free
    finally:
        device.close()


def compile_target(arch: str | None, card: str | None, place: Place | None = None) -> DeviceCaps:
    """Capabilities to compile for.

    ``native``, and no ``--arch`` at all, mean the GPU of ``place`` (default the first); on the CPU no ``--arch`` means
    CPU_ARCH. ``card`` narrows the result to that card. Raises ArchError, DeviceError naming the fix.
    """
    if card is not None and card not in CARDS:
        raise ArchError(f"--as {card[:40]!r}: allowed are {', '.join(sorted(CARDS))}")
    if arch not in (None, "native"):
        physical = caps(str(arch))
    elif place is not None and place.cpu and arch is None:
        physical = caps(CARDS[card][0] if card else CPU_ARCH)
    else:
        try:
            physical = device_caps(0 if place is None or place.index is None else place.index)
        except NoDevice as error:
            raise DeviceError("--arch native needs an NVIDIA GPU and none is visible; name the target, "
                              f"for example --arch {CPU_ARCH}") from error  # fmt: skip
    return physical if card is None else card_as(card, physical)
