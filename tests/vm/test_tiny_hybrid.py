"""The trained miniature on the VM: reference continuations, perplexity, an answer from the committed example."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer

from runtime.session import Request
from tests import models

WINDOW = 4096
HAYSTACK_PERPLEXITY = 27.23  # models/tiny-hybrid/eval.json, non-overlapping 4096-token windows
OPTIONS: dict[str, Any] = {"max_context": WINDOW, "prefill_chunk": 1024}


def window_nll(logits: np.ndarray[Any, Any], targets: np.ndarray[Any, Any]) -> float:
    """Sum of negative log likelihoods of ``targets`` [T] under ``logits`` [T, V]."""
    wide = logits.astype(np.float64)
    top = wide.max(axis=1)
    total = top + np.log(np.exp(wide - top[:, None]).sum(axis=1))
    return float((total - wide[np.arange(len(targets)), targets]).sum())


def perplexity(vm: Any, ids: np.ndarray[Any, Any], windows: range) -> float:
    """exp of the mean loss over the windows of these numbers, fresh state each, every token after the first scored; the last
    target of a window is the first token of the next."""
    session, total = models.session(vm), 0.0
    for w in windows:
        chunk = ids[w * WINDOW : (w + 1) * WINDOW + 1]
        at = 0
        for logits in session.score([int(t) for t in chunk[:-1]]):
            total += window_nll(logits, chunk[1 + at : 1 + at + len(logits)])
            at += len(logits)
    return float(np.exp(total / (len(windows) * WINDOW)))


def haystack() -> np.ndarray[Any, Any]:
    folder = models.SHARED / "models" / "tiny-hybrid"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return np.array(tokenizer.encode((folder / "haystack.txt").read_text(), add_special_tokens=False).ids)


@pytest.mark.shared
def test_reference_continuations() -> None:
    references = json.loads((models.SHARED / "models" / "tiny-hybrid" / "eval.json").read_text())["reference_continuations"]
    assert len(references) == 10
    vm = models.machine("tiny-hybrid", numerics="exact", **OPTIONS)
    session = models.session(vm)
    for reference in references:
        tokens = [e.token for e in session.generate(Request(reference["prompt_ids"], len(reference["output_ids"])))]
        assert tokens == reference["output_ids"], reference["name"]


# Two neighbouring windows whose text is as hard as that of all 98 (tests/gpu/test_quality.py): the perplexity of two neighbours
# is 16 to 42, that of the first two 28.1.
TYPICAL = range(24, 26)


@pytest.mark.shared
@pytest.mark.parametrize("numerics", ["exact", "engine"])
def test_haystack_perplexity_of_two_windows(numerics: str) -> None:
    found = perplexity(models.machine("tiny-hybrid", numerics=numerics, **OPTIONS), haystack(), TYPICAL)
    print(f"perplexity of two windows, {numerics}: {found:.3f}")
    assert abs(found / HAYSTACK_PERPLEXITY - 1) < 0.005
