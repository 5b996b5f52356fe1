"""Where a program runs and what it is compiled for: ``--device``, ``--arch``, ``--as``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from compiler.emit.arch import CARDS, ArchError, caps, card_as
from compiler.kernels.spec import DeviceCaps
from runtime.cli.errors import UsageError
from runtime.cli.options import read_devices
from runtime.cuda.driver import DeviceError, NoDevice, api, call

CPU_ARCH = "sm_90a"
"""What is compiled for where no GPU says otherwise: the CPU executes the schedule, whatever the kernels are."""
_DEVICE = re.compile(r"cpu|cuda(?::([0-9]{1,3}))?")


@dataclass(frozen=True)
class Place:
    """``devices``: CUDA indices, one per rank; none is the CPU. ``reason`` says why the CPU was chosen for the user."""

    devices: tuple[int, ...] = ()
    reason: str = ""

    @property
    def cpu(self) -> bool:
        return not self.devices

    @property
    def shared(self) -> bool:
        """Whether several ranks are on one device, a test mode."""
        return len(set(self.devices)) < len(self.devices)

    def __str__(self) -> str:
        return ",".join(map(str, self.devices))


def choose_place(text: str | None, devices: tuple[int, ...] | None = None) -> Place:
    """``cpu``, ``cuda``, ``cuda:N``, or ``devices``, one per rank; by default the first GPU and else the CPU.

    Raises UsageError for another text. A driver that is there but does not work is an error (DeviceError), not a
    reason to be slow in silence.
    """
    if devices is not None:
        listed = ",".join(map(str, devices))
        if text is not None and text not in (f"cuda:{devices[0]}", *(("cuda",) if devices[0] == 0 else ())):
            raise UsageError(f"--device {text[:40]} and --devices {listed}: rank 0 is on the first of --devices")
        count = count_devices()
        if max(devices) >= count:
            raise DeviceError(f"--devices {listed}: {count} GPU(s) are visible, 0 is the first")
        return Place(devices)
    if text is None:
        try:
            if count_devices():
                return Place((0,))
        except NoDevice:
            pass
        return Place((), "no NVIDIA GPU is visible")
    match = _DEVICE.fullmatch(text)
    if not match:
        raise UsageError(f"--device {text[:40]!r}: cpu, cuda or cuda:N is allowed")
    if text == "cpu":
        return Place()
    index, count = int(match[1] or 0), count_devices()
    if index >= count:
        raise DeviceError(f"--device {text}: {count} GPU(s) are visible, cuda:0 is the first")
    return Place((index,))


def count_devices() -> int:
    """Visible GPUs. Raises NoDevice when there is no driver or none is visible, DeviceError when it does not work."""
    return int(call(api().cuDeviceGetCount(), "cuDeviceGetCount"))


def device_caps(devices: tuple[int, ...]) -> DeviceCaps:
    """What ranks on these GPUs of this machine are compiled for. Raises DeviceError."""
    from runtime.cuda.device import Device, rank_caps

    opened = [Device(index) for index in devices]
    try:
        return rank_caps(opened)
    finally:
        for device in opened:
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


def compile_place(arch: str | None, tp: int | None, devices: str | None) -> tuple[Place | None, int]:
    """GPUs to compile for, None for the first, and the number of ranks: ``tp``, or one per device. Raises UsageError,
    DeviceError."""
    if devices is None:
        return None, tp or 1
    if arch not in (None, "native"):
        raise UsageError(f"--devices {devices} and --arch {arch}: the target is the GPUs, or the architecture")
    place = choose_place(None, read_devices(devices))
    if tp not in (None, len(place.devices)):
        raise UsageError(f"--tp {tp} and --devices {devices}: {len(place.devices)} device(s) are named, one per rank is needed")
    return place, len(place.devices)


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
            physical = device_caps((0,) if place is None or place.cpu else place.devices)
        except NoDevice as error:
            raise DeviceError("--arch native needs an NVIDIA GPU and none is visible; name the target, "
                              f"for example --arch {CPU_ARCH}") from error  # fmt: skip
    return physical if card is None else card_as(card, physical)
