"""The kernels of both ranks on the emulator (staged transport): the tokens and states of one rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from runtime.session import Request, Sampling, Session
from tests import models
from tests.emulator import toolchain
from tests.emulator_backend import EmulatorBackend

pytestmark = pytest.mark.skipif(bool(toolchain.missing_reason()), reason=str(toolchain.missing_reason()))
OPTIONS: dict[str, Any] = {"max_context": 128, "prefill_chunk": 128, "pairs": ((1, 1), (1, 4))}


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.9, 0.95, 20, 0.0, 1.0, 0.2, seed=3)], ids=["greedy", "sampled"])
def test_two_ranks_equal_one(sampling: Sampling) -> None:
    runs = []
    for tp in (1, 2):
        backend = EmulatorBackend(models.program("dense-small", "bf16", tp=tp, **OPTIONS), models.store("dense-small", "bf16"))
        tokens = [e.token for e in Session(backend, prefill="none", columns=4).generate(
            Request(list(range(3, 10)), 3, sampling=sampling))]  # fmt: skip
        state = np.concatenate([backend.read("recurrent1", rank) for rank in range(tp)], axis=1)
        runs.append((tokens, state[0].tobytes()))
    assert runs[0] == runs[1]
