"""A run of the example model that touches every kernel of a small program a few times: what a memory checker executes.

``python -m tests.gpu.small_run [PART]`` prints the tokens. Eager launches, so that a report names one kernel. ``PART``, for
tools that make a kernel hundreds of times slower, is one of PARTS: as few launches as take every kind of step, shared out.
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


PARTS = ("prefill", "decode")


def _run(session: Session, requests: list[Request]) -> list[list[int]]:
    """The requests at once, each on a lane of its own: their tokens."""
    got: dict[int, list[int]] = {session.submit(request): [] for request in requests}
    while session.active:
        for emission in session.advance():
            got[emission.lane].append(emission.token)
    return list(got.values())


def run(backend: Backend, part: str = "") -> list[list[int]]:
    """Two lanes through two prefill chunks and short ones, greedy and sampled; then a prompt through four decode columns and a
    token through one. Parts: a chunk and its first token; steps of two lanes, of four columns, of one."""
    if part not in ("", *PARTS):
        raise ValueError(f"part {part!r}: {', '.join(PARTS)} are known")
    chunks, wide = Session(backend, depth=0), Session(backend, prefill="none", depth=0, columns=4)
    if part == "prefill":
        return _run(chunks, [Request(list(range(300, 330)), 1)])
    if part == "decode":
        lanes = [Request([300 + lane], 1, sampling=sampling) for lane, sampling in enumerate((Sampling(0.0), SAMPLED))]
        return [*_run(Session(backend, prefill="none", depth=0), lanes), *_run(wide, [Request(list(range(40, 44)), 2)])]
    lanes = [Request(list(range(300, 370)), 3), Request(list(range(500, 520)), 3, sampling=SAMPLED)]
    return [*_run(chunks, lanes), *_run(wide, [Request(list(range(40, 48)), 3)])]


def main() -> None:
    program = card.compiled(models.artifact("example"), Device(0).caps(), CompileOptions(**OPTIONS))
    backend = CudaBackend(program, models.store("example"), [0], eager=True)
    try:
        print(json.dumps(run(backend, *sys.argv[1:])))
    finally:
        backend.close()


if __name__ == "__main__":
    main()
