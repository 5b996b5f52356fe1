"""Cross-rank check after each step (``--check-ranks``): what every rank must hold alike is compared on the host.

Compared are the step's egress entry (tokens, finish reasons, lengths), the whole control block (queues, lengths, page tables,
sampling parameters, sequence of the ring), and a digest of the hidden rows that the output head reads, active columns only.
Each launch is waited for, so this costs the look-ahead; without the option nothing is read, and with one rank nothing is done.
"""

from __future__ import annotations

import hashlib

import numpy as np

from compiler.control import EGRESS_ENTRIES, egress_words
from compiler.program.model import Phase
from runtime.backend import Backend, BackendAround


class RankMismatch(RuntimeError):
    """Two ranks hold different values where they must not; names step, value and place. Nothing after that step is sound."""


class CheckedBackend(BackendAround):
    """``inner``, whose ranks are compared after every launch. ``rounds`` counts comparisons."""

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.rounds = 0

    def launch(self, phase: str) -> None:
        step = self.ingress.step
        self.inner.launch(phase)
        if self.program.tp > 1:
            self.inner.wait()
            self.inner.check()
            self.compare(self.program.phases[phase], step)

    def compare(self, phase: Phase, step: int) -> None:
        """Raise RankMismatch for the first difference after launch ``step`` (counted from 0) of ``phase``."""
        self.rounds += 1
        entry = egress_words(self.program.limits.lanes)
        start = step % EGRESS_ENTRIES * entry
        for rank in range(1, self.program.tp):
            pairs = [("egress", self.inner.rank_egress(0)[start : start + entry],
                      self.inner.rank_egress(rank)[start : start + entry]),
                     ("control block", self.inner.read("block", 0), self.inner.read("block", rank))]  # fmt: skip
            for what, mine, other in pairs:
                if not np.array_equal(mine, other):
                    at = int(np.argmax(mine != other))
                    raise RankMismatch(f"step {step}: word {at} of the {what} is {int(mine[at])} on rank 0, "
                                       f"{int(other[at])} on rank {rank}")  # fmt: skip
        digests = [self.hidden(phase, rank) for rank in range(self.program.tp)]
        for rank, digest in enumerate(digests):
            if digest != digests[0]:
                raise RankMismatch(f"step {step}: the hidden rows before the output head differ between rank 0 and rank {rank}")

    def hidden(self, phase: Phase, rank: int) -> str:
        """Digest of the active rows of what the output head of ``rank`` reads; empty for a phase that keeps none."""
        digest = hashlib.sha256()
        for name in phase.kept:
            value = phase.values[name]
            if value.rank != rank:
                continue
            rows = value.type.shape[0]
            array = np.ascontiguousarray(self.inner.read_activation(phase.name, name, rows))
            counts = self.inner.read("pf_lane_ncols" if phase.phase == "prefill" else "lane_ncols", rank)
            per_lane = rows == phase.lanes
            for lane in range(phase.lanes):
                count = int(counts[lane])
                first = lane if per_lane else lane * phase.width
                digest.update(array[first : first + (count > 0 if per_lane else count)].tobytes())
        return digest.hexdigest() if phase.kept else ""
