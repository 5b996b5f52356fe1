"""How long the Python VM will take on this machine, from two short measurements."""

from __future__ import annotations

import time

import numpy as np

from artifacts import Artifact, TensorObject
from artifacts.layouts import decode_rows
from compiler.model import ModelSpec

SMALL_MODEL = 100_000_000  # parameters below which the constants of a two-core machine are near enough
DECODE_RATE = 1.5e8  # weights per second from packed bytes to float32
PRODUCT_RATE = 1.0e9  # weights per second of a matrix-vector product in float32
CALL_SECONDS = 3e-4  # NumPy's own time per kernel call
CALLS_PER_LAYER = 11
CACHE_BYTES = 2 << 30  # runtime.vm.weights: what does not fit is decoded at every use


def parameters(spec: ModelSpec) -> int:
    """Matrix weights of the text decoder that a token passes through, head included."""
    h, q, kv = spec.hidden, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    k, v = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    attention = h * (2 * q + 2 * kv) + q * h
    gdn = h * (2 * k + 2 * v + 2 * spec.value_heads) + v * h
    mlp = 3 * h * spec.intermediate * len(spec.layer_types)
    return attention * len(spec.attention_layers) + gdn * len(spec.gdn_layers) + mlp + spec.vocab_rows * h


def _decode_rate(artifact: Artifact) -> float:
    """Weights per second of decoding a piece of the artifact's largest matrix."""
    matrices = [item for item in artifact.objects.values() if isinstance(item, TensorObject) and len(item.shape) == 2]
    if not matrices:
        return DECODE_RATE
    largest = max(matrices, key=lambda item: item.bytes)
    rows, columns = largest.shape
    count = max(1, min(rows, (1 << 20) // columns))
    started = time.perf_counter()
    decode_rows(largest.format, largest.layout, largest.shape, artifact.tensor_bytes(largest.name), 0, count, np.float32)
    return count * columns / max(time.perf_counter() - started, 1e-9)


def _product_rate(exact: bool) -> float:
    """Weights per second of a product of a matrix with one vector."""
    kind = np.float64 if exact else np.float32
    matrix, vector = np.ones((2048, 2048), kind), np.ones(2048, kind)
    started = time.perf_counter()
    for _ in range(4):
        matrix @ vector
    return 4 * matrix.size / max(time.perf_counter() - started, 1e-9)


def cpu_seconds(artifact: Artifact, spec: ModelSpec, prompt: int, generated: int, chunk: int, exact: bool) -> float:
    """Predicted seconds of a prompt of ``prompt`` and an answer of ``generated`` tokens on the VM.

    Each launch passes all weights (decoded anew where they exceed the VM's cache); prompt columns cost products of
    their own and, in the mixers, a Python step each.
    """
    weights, layers = parameters(spec), len(spec.layer_types)
    measured = weights > SMALL_MODEL
    decode = _decode_rate(artifact) if measured else DECODE_RATE
    product = _product_rate(exact) if measured else PRODUCT_RATE / (2 if exact else 1)
    launches = -(-prompt // chunk) + generated
    decodings = launches if weights * (8 if exact else 4) > CACHE_BYTES else 1
    per_launch = CALL_SECONDS * CALLS_PER_LAYER * layers + weights / product
    per_column = CALL_SECONDS * layers + weights / (8 * product)  # wide products reuse what they read
    return decodings * weights / decode + launches * per_launch + prompt * per_column


def duration(seconds: float) -> str:
    """A span of time for people, two digits or so."""
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds / 86400:.0f} days"
