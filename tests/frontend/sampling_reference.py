"""The sampler in float64 NumPy: processed distribution, inverse-CDF draw, stateless uniforms (spec mtp.md, section 7).

Written apart from the compiler's op so that two independent readings of the specification can be compared. Also
holds the acceptance rule of a speculative round (section 5), which uses the same distribution and the same numbers.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from runtime.frontend.presets import SamplingParams

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

MAX_CANDIDATES = 20
_MASK = (1 << 64) - 1


class Purpose(IntEnum):
    """What a uniform number is for; part of its key."""

    PREFILL = 0
    DECODE = 1
    ACCEPT = 2
    CORRECTION = 3
    BONUS = 4


def splitmix64(state: int) -> int:
    """One splitmix64 output for a 64-bit state."""
    value = (state + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, position: int, purpose: int) -> float:
    """Uniform in [0, 1) with 24 bits. seed: u64, position: u32 token index, purpose: `Purpose`.

    key = mix(seed xor position * 0xD1B54A32D192ED03), key = mix(key xor purpose * 2**21), u = (key >> 40) / 2**24.
    """
    if not (0 <= seed <= _MASK and 0 <= position < 1 << 32 and 0 <= purpose < 1 << 32):
        raise ValueError(f"seed {seed}, position {position}, purpose {purpose}: allowed are u64, u32, u32")
    key = splitmix64(seed ^ (position * 0xD1B54A32D192ED03 & _MASK))
    key = splitmix64(key ^ (purpose << 21))
    return (key >> 40) / float(1 << 24)


def argmax(logits: npt.ArrayLike, domain: int | None = None) -> int:
    """Smallest id of the largest logit among the first `domain` ids."""
    return int(np.argmax(np.asarray(logits, np.float64)[:domain]))


def processed_distribution(logits: npt.ArrayLike, counts: npt.ArrayLike | None, params: SamplingParams,
                           domain: int | None = None) -> tuple[Ids, Floats]:
    """Candidates (best first) and their probabilities, both [n] with 1 <= n <= 20.

    logits [V]; counts [V]: how often each id was generated (None: never); domain: ids that may be sampled, padded
    rows of the head lie above it. Penalties, top-k (ties to the smaller id), temperature, then min_p and top_p
    against the kept candidates. Needs temperature > 0.
    """
    if params.temperature <= 0:
        raise ValueError("temperature 0 has no distribution; use argmax")
    scores = np.array(logits, np.float64)[:domain]
    if counts is not None:
        seen = np.asarray(counts, np.float64)[: scores.size]
        scores -= params.presence * (seen > 0) + params.frequency * seen
    top_k = params.top_k if 0 < params.top_k < MAX_CANDIDATES else MAX_CANDIDATES
    order = np.argsort(-scores, kind="stable")[:top_k]
    weights = np.exp((scores[order] - scores[order[0]]) / params.temperature)
    below = weights < params.min_p * weights[0]
    reached = np.cumsum(weights) >= params.top_p * weights.sum()
    first_below = int(np.argmax(below)) if below.any() else len(weights)
    last_needed = int(np.argmax(reached)) + 1 if reached.any() else len(weights)
    kept = max(1, min(first_below, last_needed))
    return order[:kept].astype(np.int64), weights[:kept] / weights[:kept].sum()


def draw(ids: Ids, probabilities: Floats, u: float) -> int:
    """Inverse CDF: the first candidate whose running sum exceeds u times the total mass."""
    running = np.cumsum(probabilities)
    return int(ids[min(int(np.searchsorted(running, u * running[-1], side="right")), len(ids) - 1)])


def sample(logits: npt.ArrayLike, counts: npt.ArrayLike | None, params: SamplingParams, position: int,
           purpose: Purpose, domain: int | None = None) -> int:
    """One token. position: prompt length for the first token, index of the consumed token in decode steps."""
    if params.greedy:
        return argmax(logits, domain)
    ids, probabilities = processed_distribution(logits, counts, params, domain)
    return draw(ids, probabilities, uniform(params.seed, position, purpose))


def speculative_round(logits: npt.NDArray[Any], drafts: Sequence[int], counts: npt.ArrayLike | None,
                      params: SamplingParams, base: int, domain: int | None = None) -> tuple[list[int], int]:
    """Produced tokens and the number of accepted drafts.

    logits [K+1, V]: column i judges drafts[i], column K gives the bonus. base: tokens processed before the round.
    Greedy accepts while a draft is the argmax. Otherwise draft d of column i is accepted when u < p_i(d); the first
    rejected one is replaced by a draw from p_i without d; after K acceptances the bonus comes from p_K.
    """
    seen = np.zeros(np.asarray(logits).shape[1]) if counts is None else np.array(counts, np.float64)
    produced: list[int] = []
    for column, draft in enumerate(drafts):
        if params.greedy:
            best = argmax(logits[column], domain)
            produced.append(best)
            if best != draft:
                return produced, column
            continue
        ids, probabilities = processed_distribution(logits[column], seen, params, domain)
        position = base + column + 1
        chance = float(probabilities[ids == draft].sum())
        if uniform(params.seed, position, Purpose.ACCEPT) < chance:
            produced.append(draft)
            seen[draft] += 1
            continue
        others = ids != draft
        produced.append(draw(ids[others], probabilities[others], uniform(params.seed, position, Purpose.CORRECTION)))
        return produced, column
    last = len(drafts)
    produced.append(sample(logits[last], seen, params, base + last + 1, Purpose.BONUS, domain))
    return produced, last
