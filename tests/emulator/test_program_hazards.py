"""The race checker finds nothing in the kernels of a small program."""

from __future__ import annotations

import pytest

from compiler.driver import CompileOptions, compile_program
from compiler.emit.arch import CARDS, caps, card_as
from tests import models
from tests.emulator import emulator
from tests.emulator.hazards import Hazard
from tests.emulator_backend import EmulatorBackend
from tests.gpu import small_run

pytestmark = pytest.mark.skipif(emulator.missing_reason() is not None, reason=str(emulator.missing_reason()))


@pytest.mark.slow
@pytest.mark.parametrize("part", small_run.PARTS)
@pytest.mark.parametrize("target", ["rtx4090", "sm_90a"])
def test_no_kernel_leaves_shared_memory_unordered(target: str, part: str) -> None:
    card = card_as(target, caps(CARDS[target][0])) if target in CARDS else caps(target)
    program = compile_program(models.artifact("example"), card, CompileOptions(**small_run.OPTIONS), images=False)
    hazards: list[Hazard] = []
    backend = EmulatorBackend(program, models.store("example"), hazards=hazards)
    small_run.run(backend, part)
    assert len(backend.checked) > 15
    assert not hazards, "\n".join(map(str, hazards))
