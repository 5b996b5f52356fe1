"""A run of the example model that touches every kernel of a small program a few times: what a memory checker executes.

``python -m tests.gpu.small_run [brief]`` prints the tokens. Eager launches, so that a report names one kernel. ``brief``: as
few launches as take every kind of step, for tools that make a kernel hundreds of times slower.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from compiler.driver import CompileOptions
from runtime.backend import Backend
from runtime.cuda.backend import CudaBackend
from runtime.cuda.device import Device
from runtime.session import Request, Sampling, Session
from tests import card, models

OPTIONS: dict[str, Any] = {"max_context": 192, "max_concurrency": 2, "prefill_chunk": 64, "test_chunks": True, "score": False,
                           "pairs": ((1, 1), (2, 1), (1, 4))}  # fmt: skip
SAMPLED = Sampling(0.9, 0.95, 20, 0.0, 1.0, 0.2, seed=7)


def run(backend: Backend, brief: bool = False) -> list[list[int]]:
    """Two lanes through two prefill chunks and short ones, greedy and sampled; then a prompt through four decode columns and a
    token through one."""
    session, tokens = Session(backend, depth=0), 2 if brief else 3
    lanes = [session.submit(Request(list(range(300, 330 if brief else 370)), tokens)),
             session.submit(Request(list(range(500, 520)), tokens, sampling=SAMPLED))]  # fmt: skip
    got: dict[int, list[int]] = {lane: [] for lane in lanes}
    while session.active:
        for emission in session.advance():
            got[emission.lane].append(emission.token)
    wide = Session(backend, prefill="none", depth=0, columns=4)
    last = Request(list(range(40, 44 if brief else 48)), tokens)
    return [*got.values(), [emission.token for emission in wide.generate(last)]]


def main() -> None:
    program = card.compiled(models.artifact("example"), Device(0).caps(), CompileOptions(**OPTIONS))
    backend = CudaBackend(program, models.store("example"), [0], eager=True)
    try:
        print(json.dumps(run(backend, sys.argv[1:] == ["brief"])))
    finally:
        backend.close()


if __name__ == "__main__":
    main()
