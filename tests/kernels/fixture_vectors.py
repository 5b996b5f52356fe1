"""Tensors of the golden operator vectors, bf16 as its bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import deserialize

_FILE = Path(__file__).parents[1] / "data" / "ops-prod-heads" / "goldens.safetensors"
_KINDS = {"F32": np.float32, "BF16": np.uint16, "I32": np.int32, "I8": np.int8, "I16": np.int16}


def vectors() -> dict[str, np.ndarray[Any, Any]]:
    """Every tensor by name: float32, int32, int8, int16, or uint16 holding bf16 bits."""
    tensors = deserialize(_FILE.read_bytes())
    return {name: np.frombuffer(t["data"], _KINDS[t["dtype"]]).reshape(t["shape"]) for name, t in tensors}
