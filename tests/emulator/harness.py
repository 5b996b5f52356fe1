"""Helpers for kernel tests: number formats, poisoned outputs, the error bound, schedules.

The bound: an output's error against the FP64 reference may be at most 2.5 times the error that the same formula has when
only its output is rounded to the output format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import jinja2
import numpy as np

from tests.emulator import toolchain

Array = np.ndarray[Any, Any]
# Unit roundoff: half the distance from 1 to the next number.
UNIT_ROUNDOFF = {"bf16": 2.0**-9, "f16": 2.0**-12, "f32": 2.0**-24}
DEFAULT_SEEDS = (0, 1, 2, 3)


def to_bf16(values: Array) -> Array:
    """float array -> uint16 bfloat16 bits, nearest even (float64 input is rounded once); NaN becomes 0x7fff."""
    with np.errstate(over="ignore", invalid="ignore"):  # signalling NaNs and overflow are part of the format
        wide = np.asarray(values, np.float64)
        single = wide.astype(np.float32)
    bits = np.ascontiguousarray(single).view(np.uint32).reshape(single.shape).astype(np.uint64)
    # Round to odd: where the step to float32 lost something, the last bit is set on the exact side, so that the second
    # rounding decides as one rounding would.
    exact = single.astype(np.float64) == wide
    above = np.abs(single.astype(np.float64)) > np.abs(wide)
    finite = np.isfinite(single)
    odd = np.where((bits & 1) == 0, np.where(above, bits - 1, bits + 1), bits)
    bits = np.where(~exact & finite & np.isfinite(wide), odd, bits)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(wide), 0x7FFF, rounded).astype(np.uint16)


def from_bf16(bits: Array) -> Array:
    """uint16 bfloat16 bits -> float32, exact."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


def encode(values: Array, dtype: str) -> Array:
    """Rounds to bf16 (as uint16 bits), f16 or f32."""
    if dtype == "bf16":
        return to_bf16(values)
    if dtype in ("f16", "f32"):
        with np.errstate(over="ignore"):
            return np.asarray(values).astype(np.float16 if dtype == "f16" else np.float32)
    raise ValueError(f"dtype {dtype!r} is not bf16, f16 or f32")


def decode(stored: Array, dtype: str) -> Array:
    """The float64 values of an array stored as bf16 bits (uint16), f16 or f32."""
    if dtype == "bf16":
        return from_bf16(stored).astype(np.float64)
    if dtype in ("f16", "f32"):
        return np.asarray(stored).view(np.float16 if dtype == "f16" else np.float32).astype(np.float64)
    raise ValueError(f"dtype {dtype!r} is not bf16, f16 or f32")


def poisoned(shape: int | tuple[int, ...], dtype: str | type[np.generic] = "bf16") -> Array:
    """An output full of bytes 0xff: NaN in bf16 (uint16), f16, f32, f64; -1 or the largest value in integers."""
    kind = {"bf16": np.uint16, "f16": np.float16, "f32": np.float32, "f64": np.float64}.get(str(dtype), dtype)
    result = np.empty(shape, np.dtype(kind))
    result.view(np.uint8).fill(0xFF) if result.ndim else result.fill(-1)
    return result


def error_ratio(out: Array, reference: Array, dtype: str) -> float:
    """Relative L2 error of ``out`` divided by that of ``reference`` rounded to ``dtype``."""
    reference = np.asarray(reference, np.float64)
    values = decode(out, dtype)
    if values.shape != reference.shape:
        raise AssertionError(f"output has shape {values.shape}, the reference {reference.shape}")
    if not np.isfinite(reference).all():
        raise AssertionError("the reference is not finite")
    if not np.isfinite(values).all():
        where = np.argwhere(~np.isfinite(values))
        raise AssertionError(f"{len(where)} of {values.size} outputs are not finite, the first at {tuple(where[0])}")
    norm = float(np.linalg.norm(reference))
    floor = float(np.linalg.norm(decode(encode(reference, dtype), dtype) - reference))
    # References that happen to be representable have no rounding error of their own: use what rounding costs typically
    # (uniform within half a unit, values spread over a binade).
    floor = max(floor, 0.25 * UNIT_ROUNDOFF[dtype] * norm, 1e-30)
    return float(np.linalg.norm(values - reference)) / floor


def assert_close_to_fp64(out: Array, reference: Array, dtype: str, *, factor: float = 2.5,
                         max_factor: float | None = None, name: str = "output") -> None:
    """Asserts the bound on ``out`` (bf16 as uint16 bits, f16, f32) against a float64 ``reference`` of the same shape.

    Two parts: the L2 norm of the error is at most ``factor`` times that of rounding the reference to ``dtype``; and no
    element errs by more than ``max_factor`` (default 8 x factor) units of roundoff of max(|element|, rms of its last-axis
    row), which catches one wrong element among many.  Inputs must be what the kernel read (already rounded).
    """
    ratio = error_ratio(out, reference, dtype)
    reference = np.asarray(reference, np.float64)
    error = np.abs(decode(out, dtype) - reference)
    rms = np.sqrt(np.mean(reference * reference, axis=-1, keepdims=True)) if reference.ndim else np.abs(reference)
    unit = UNIT_ROUNDOFF[dtype] * np.maximum(np.abs(reference), rms) + 1e-30
    worst = int(np.argmax(error / unit)) if error.size else 0
    worst_ratio = float((error / unit).reshape(-1)[worst]) if error.size else 0.0
    at = tuple(int(i) for i in np.unravel_index(worst, reference.shape)) if reference.ndim else ()
    text = (f"{name}: L2 error is {ratio:.2f} x that of rounding the output (bound {factor}); worst element {at}: "
            f"{decode(out, dtype)[at]!r}, reference {reference[at]!r}, {worst_ratio:.1f} units")
    if ratio > factor:
        raise AssertionError(text)
    limit = 8 * factor if max_factor is None else max_factor
    if worst_ratio > limit:
        raise AssertionError(f"{text} (bound {limit})")


def under_schedules(run: Callable[[int], Iterable[Array]], seeds: Iterable[int] = DEFAULT_SEEDS) -> list[Array]:
    """Calls ``run(seed)``, which launches and returns its outputs, per seed; all must be equal bit by bit.

    Returns the outputs.  A difference means a race: something depends on the order in which threads run.
    """
    first: list[Array] | None = None
    first_seed = 0
    for seed in seeds:
        outputs = [np.array(a, copy=True) for a in run(seed)]
        if first is None:
            first, first_seed = outputs, seed
            continue
        for i, (a, b) in enumerate(zip(first, outputs, strict=True)):
            if a.tobytes() != b.tobytes():
                flat = np.flatnonzero(np.atleast_1d(a).view(np.uint8) != np.atleast_1d(b).view(np.uint8))
                raise AssertionError(f"output {i} differs between schedules {first_seed} and {seed} from byte {flat[0]} on")
    if first is None:
        raise ValueError("at least one seed is needed")
    return first


def render(template: str, **values: Any) -> str:
    """Renders templates/``template`` (a .cu.j2 path relative to templates/) with strict undefined names."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(toolchain.ROOT) / "templates"), undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False)
    return environment.get_template(template).render(**values)
