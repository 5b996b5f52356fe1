"""The equality hash over ranks: what is compared, and a deep model of random weights in which all quantised formats occur.

Random weights keep activations of order one through any number of layers (``artifacts.tools.synth``), and rounding that
differs anywhere spreads over all values within a few layers."""

from __future__ import annotations

import json
import random
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

import artifacts
from artifacts import Identity
from artifacts.identities import TextDims, plan_objects
from artifacts.identities.dims import FULL, LINEAR
from artifacts.identities.plan import CONFIG_RESOURCE, FP8, NVFP4, Q4, Q5, Q6, W8
from artifacts.tools.synth import synthesize
from runtime.backend import Backend
from runtime.lockstep import CheckedBackend
from runtime.open import ArtifactWeights
from runtime.session import Request, Sampling, Session
from runtime.vm.weights import WeightStore

DEEP = 48  # layers: 96 exchanges a token
PERIOD = 12  # layers after which the formats repeat
SPLITS = tuple((lanes, columns) for lanes in (1, 8) for columns in (1, 4, 8))
SAMPLED = Sampling(0.9, 0.95, 20, 0.0, 1.0, 0.2, seed=7)
_folder = tempfile.TemporaryDirectory(prefix="ninferc-tests-")

# By four layers: the mixers in FP8 and the MLP in NVFP4, as the schema has it; the other way around; grouped integers.
_FORMATS: tuple[dict[str, str], ...] = (
    {},
    {"attention/query_key_gate_value": NVFP4, "attention/output": NVFP4, "gdn/query_key_value_z": NVFP4, "gdn/output": NVFP4,
     "mlp/gate_up": FP8, "mlp/down": FP8},
    {"attention/query_key_gate_value": W8, "attention/output": Q5, "gdn/query_key_value_z": Q6, "gdn/output": W8,
     "mlp/gate_up": Q4, "mlp/down": Q5},
)  # fmt: skip


def _dims(layers: int) -> TextDims:
    """The smallest widths that NVFP4 can be halved at: 128 rows of every section, 128 columns of whole groups of Q4."""
    return TextDims(hidden=256, vocabulary=512, layer_types=((LINEAR,) * 3 + (FULL,)) * (layers // 4), heads=4, kv_heads=2,
                    head_dim=128, key_heads=2, value_heads=4, key_dim=128, value_dim=128, conv_taps=4, max_position=4096,
                    rope_theta=10000.0, partial_rotary_factor=0.25, mrope_section=(6, 5, 5), rms_norm_eps=1e-6,
                    intermediate=512)  # fmt: skip


def _format(name: str, default: str) -> str:
    if not name.startswith("text/layers/"):
        return default
    _, _, layer, leaf = name.split("/", 3)
    return _FORMATS[int(layer) // 4 % len(_FORMATS)].get(leaf, default)


def deep_artifact(layers: int = DEEP) -> artifacts.Artifact:
    return _deep_artifact(layers)


@cache  # by the number alone, said or not: the file is made once
def _deep_artifact(layers: int) -> artifacts.Artifact:
    """Three layers of Gated DeltaNet to one of attention, random weights, 0.75 MB a layer, no tokenizer."""
    dims, path = _dims(layers), Path(_folder.name) / f"deep-{layers}.ninfer"
    config = json.dumps(dims.to_config()).encode()
    plans = plan_objects(dims, "nvfp4-fp8", resources={CONFIG_RESOURCE: len(config)}, format_rule=_format)
    synthesize(path, Identity("deep", "nvfp4-fp8"), plans, {CONFIG_RESOURCE: config}, workers=1)
    return artifacts.open(path)


@cache
def deep_store(layers: int = DEEP) -> WeightStore:
    return WeightStore(ArtifactWeights(deep_artifact(layers)))


def tokens_and_logits(backend: Backend, columns: int, lanes: int, sampling: Sampling, prompt: int = 70,
                      new: int = 12) -> tuple[list[int], bytes]:  # fmt: skip
    """Tokens of one request on lane 0 among ``lanes``, its prompt fed through decode columns, and the logits after each but
    the first; all ranks compared after each step."""
    session = Session(CheckedBackend(backend), prefill="none", columns=columns, depth=0)
    rng = random.Random(3)
    session.submit(Request([rng.randrange(500) for _ in range(prompt)], new, sampling=sampling), 0)
    for lane in range(1, lanes):
        session.submit(Request([rng.randrange(500) for _ in range(5 + lane)], 200), lane)
    tokens: list[int] = []
    logits: list[np.ndarray[Any, Any]] = []
    while 0 in session._lanes:
        for emission in session.advance():
            if emission.lane == 0:
                if tokens:  # from here on the step has one active column, the first
                    logits.append(session.logits(session.last_phase, 1))
                tokens.append(emission.token)
    for lane in list(session._lanes):
        session.cancel(lane)
    assert np.isfinite(logits).all()
    return tokens, np.concatenate(logits).tobytes()
