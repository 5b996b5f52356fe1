"""Pick a token per row of logits: exact argmax at temperature 0, else the processed distribution of spec/mtp.md §7.

1. domain ids < vocab; x = logit − presence·[c>0] − frequency·c (c counts generated tokens of the row's slot);
2. the top k by (x desc, id asc), k = top_k if 1…19, else 20; 3. w = exp((x − x_max)/temperature);
4. stop before the first w < min_p·w_max, stop after the running sum reaches top_p·Σw; 5. inverse-CDF draw.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from compiler.control import FREQUENCY, MIN_P, PRESENCE, SEED_HIGH, SEED_LOW, TEMPERATURE, TOP_K, TOP_P
from compiler.ir.op import Array, Context, Cost, Op, OpDef, register, require
from compiler.ir.types import TensorType, Value

MAX_CANDIDATES = 20
PREFILL, DECODE = 0, 1  # purposes of a random number
_MASK = (1 << 64) - 1


def _mix(key: int) -> int:
    """One splitmix64 step on a 64-bit integer."""
    key = (key + 0x9E3779B97F4A7C15) & _MASK
    key = ((key ^ (key >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    key = ((key ^ (key >> 27)) * 0x94D049BB133111EB) & _MASK
    return key ^ (key >> 31)


def uniform(seed: int, position: int, purpose: int) -> float:
    """Stateless uniform in [0, 1) with 24 bits for (u64 seed, u32 position, u32 purpose)."""
    key = _mix((seed ^ ((position & 0xFFFFFFFF) * 0xD1B54A32D192ED03)) & _MASK)
    key = _mix((key ^ ((purpose & 0xFFFFFFFF) << 21)) & _MASK)
    return (key >> 40) / float(1 << 24)


def penalised(logits: Array, counts: Array, words: Array) -> Array:
    """Logits [n] minus presence and frequency penalties, float64; ``counts`` [n] of generated tokens, ``words`` i32[8]."""
    params = words.astype(np.int32).view(np.float32)
    x: Array = logits.astype(np.float64) - float(params[PRESENCE]) * (counts > 0) - float(params[FREQUENCY]) * counts
    return x


def kept_candidates(words: Array) -> int:
    """How many candidates the sampling parameters look at."""
    top_k = int(words[TOP_K])
    return top_k if 1 <= top_k < MAX_CANDIDATES else MAX_CANDIDATES


def best(x: Array, kept: int) -> Array:
    """Positions of the ``kept`` largest values, largest first, ties to the lowest position."""
    if kept == 1 and x.size:
        return np.array([int(np.argmax(x))])  # the first of equal maxima
    order: Array = np.lexsort((np.arange(x.size), -x))[:kept]
    return order


def distribution(x: Array, words: Array) -> tuple[int, Array]:
    """Survivors of min_p and top_p among candidates ``x`` in order, and all candidates' weights, not normalised."""
    params = words.astype(np.int32).view(np.float32)
    weights = np.exp((x - x[0]) / float(params[TEMPERATURE]))
    limit = float(params[TOP_P]) * weights.sum()
    survivors, running = 1, weights[0]
    while survivors < len(x) and running < limit and weights[survivors] >= float(params[MIN_P]) * weights[0]:
        running += weights[survivors]
        survivors += 1
    return survivors, weights


def support(x: Array, words: Array) -> tuple[Array, Array]:
    """Ids that may be drawn and their weights, of one row of penalised logits ``x`` [vocab]; ``words`` i32[8]."""
    ids = best(x, kept_candidates(words))
    survivors, weights = distribution(x[ids], words)
    return ids[:survivors], weights[:survivors]


def processed(logits: Array, counts: Array, words: Array) -> tuple[Array, Array]:
    """Support (ids) and float64 probabilities of one row. ``logits`` [vocab], ``counts`` [vocab], ``words`` i32[8]."""
    ids, weights = support(penalised(logits, counts, words), words)
    return ids, weights / weights.sum()


def draw(weights: Array, words: Array, consumed: int, prompt: int) -> int:
    """Index drawn from ``weights`` by the lane's seed at its position: ``consumed`` tokens stand before the column."""
    first = consumed + 1 == prompt
    seed = (int(words[SEED_HIGH]) & 0xFFFFFFFF) << 32 | (int(words[SEED_LOW]) & 0xFFFFFFFF)
    u = uniform(seed, consumed + 1 if first else consumed, PREFILL if first else DECODE)
    running = np.cumsum(weights)
    return min(int(np.searchsorted(running, u * running[-1], side="right")), len(weights) - 1)


@register
class Sample(OpDef):
    kind = "sample"
    inputs = ("logits", "lane_sampling", "run_slot", "run_len", "run_ncols", "lane_prompt_len", "token_counts",
              "pf_control")  # fmt: skip
    outputs = ("token",)
    optional = frozenset({"pf_control"})
    attrs = {"vocab": int}

    def check(self, op: Op, types: Mapping[str, TensorType]) -> None:
        logits, token = types["logits"], types["token"]
        require(logits.dtype == "bf16" and len(logits.shape) == 2, op, f"logits is {logits}, bf16 [rows, V] is needed")
        require(token == TensorType(logits.shape[:1], "i32"), op, f"token is {token}, i32 [{logits.shape[0]}] is needed")
        require(op.int_attr("vocab") <= logits.shape[1], op, f"domain {op.attrs['vocab']} exceeds {logits.shape[1]} rows")

    def reference(self, op: Op, ctx: Context) -> None:
        vocab = op.int_attr("vocab")
        logits = ctx.get("logits")[:, :vocab]
        slots, lengths, prompt = ctx.whole("run_slot"), ctx.whole("run_len"), ctx.whole("lane_prompt_len")
        words, counts = ctx.whole("lane_sampling"), ctx.whole("token_counts")
        picked = np.zeros(len(logits), dtype=np.int64)
        for row, (run_lane, t) in enumerate(ctx.rows("logits")):
            lane = int(ctx.whole("pf_control")[0]) if "pf_control" in op.inputs else run_lane
            params = words[lane]
            if float(params[TEMPERATURE : TEMPERATURE + 1].astype(np.int32).view(np.float32)[0]) <= 0:
                picked[row] = int(np.argmax(logits[row]))  # the first of equal maxima is the smallest id
                continue
            x = ctx.round(penalised(logits[row], counts[slots[run_lane]][:vocab], params), "f32")
            ids, weights = support(x.astype(np.float64), params)
            picked[row] = ids[draw(weights, params, int(lengths[run_lane]) + t, int(prompt[lane]))]
        ctx.put("token", picked)

    def cost(self, op: Op, types: Mapping[str, TensorType], values: Mapping[str, Value]) -> Cost:
        return Cost(types["logits"].nbytes, types["token"].nbytes, types["logits"].elements)
