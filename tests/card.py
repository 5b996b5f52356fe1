"""The card that all tests stand for: ``NINFERC_TEST_AS=rtx4090`` gives kernels that card's capability set, on whatever runs
them (a GPU under ``-m gpu``, else the emulator). Without it, the device's own."""

from __future__ import annotations

import os
from dataclasses import replace

from compiler.emit.arch import CARDS, caps, card_as
from compiler.kernels.spec import DeviceCaps

CARD = os.environ.get("NINFERC_TEST_AS", "")
CONSUMER = ("rtx5090", "rtx4090", "rtx3090", "rtx5060ti")


def target(physical: DeviceCaps, sms: int | None = None) -> DeviceCaps:
    """Capabilities to choose kernels by on a ``physical`` device; ``sms`` replaces the number of multiprocessors."""
    found = card_as(CARD, physical) if CARD else physical
    return found if sms is None else replace(found, sms=sms)


def emulated(sms: int | None = None) -> DeviceCaps:
    """The same where no device is: the card itself, an sm_90a one by default."""
    return target(caps(CARDS[CARD][0] if CARD else "sm_90a"), sms)
