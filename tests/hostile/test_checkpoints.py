"""Mutated checkpoints: `convert` makes an artifact that verifies, or says in one line what is wrong."""

import copy
import json
import random
import time
from pathlib import Path
from typing import Any

import pytest

import artifacts
from artifacts.convert import Options, convert
from artifacts.errors import ArtifactError
from artifacts.tools.verify import verify
from tests.convert import checkpoints as make
from tests.convert.test_preflight import LAYOUTS
from tests.hostile.test_corpus import check_message

VALUES: tuple[Any, ...] = (None, True, False, 0, 1, -1, 2, 3, 64, 128, 1 << 16, 1 << 40, 1 << 70, 0.5, 1e300, "", "x", "BF16",
                           "\ud800", [], [1], [[]], {}, {"a": 1}, "F32", "linear_attention",
                           ["full_attention"] * 4)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of everything inside a JSON value."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


def put(value: Any, path: tuple[Any, ...], change: Any, remove: bool) -> None:
    for key in path[:-1]:
        value = value[key]
    if remove and isinstance(value, dict):
        del value[path[-1]]
    else:
        value[path[-1]] = copy.deepcopy(change)  # VALUES stay as they are, however often they are put somewhere


def mutate_json(rng: random.Random, value: Any) -> None:
    """One to three changes somewhere inside."""
    for _ in range(rng.randint(1, 3)):
        known = places(value)
        if known:
            put(value, rng.choice(known), rng.choice(VALUES), rng.random() < 0.25)


def mutate_tensors(rng: random.Random, tensors: make.Tensors) -> make.Tensors:
    """Tensors renamed, dropped, doubled, cut, retyped; the file stays well formed."""
    changed = dict(tensors)
    for _ in range(rng.randint(1, 3)):
        name = rng.choice(list(changed))
        dtype, array = changed[name]
        kind = rng.randrange(6)
        if kind == 0:
            del changed[name]
        elif kind == 1:
            changed[name.replace(rng.choice("abelnw."), rng.choice("aelw._"), 1)] = changed.pop(name)
        elif kind == 2:
            changed[name] = (dtype, array[: max(1, len(array) // 2)] if array.ndim else array.reshape(1))
        elif kind == 3:
            changed[name] = (dtype, array.reshape(rng.choice([(-1,), (1, -1), (-1, 1), (*array.shape, 1)])))
        elif kind == 4:
            other = rng.choice([t for t in make.TYPES if t != dtype])
            changed[name] = (other, array.astype(make.TYPES[other]))
        else:
            suffix = rng.choice((".weight_scale", "_packed", ".weight_scale_2", "x"))
            changed[name + suffix] = rng.choice(list(changed.values()))
    return changed


def fuzz(folder: Path, seed: int, count: int) -> dict[str, int]:
    outcomes: dict[str, int] = {}
    sources = {name: (tensors(), quantization) for name, (tensors, quantization, _) in LAYOUTS.items()}
    for index in range(count):
        rng = random.Random(f"{seed}/{index}")
        layout = rng.choice(list(sources))
        tensors, quantization = sources[layout]
        config = json.loads(json.dumps({"model_type": "qwen3_5", "text_config": make.TEXT_CONFIG,
                                        "vision_config": make.VISION_CONFIG, "quantization_config": quantization}))  # fmt: skip
        header = None
        kind = rng.randrange(3)
        if kind == 0:
            mutate_json(rng, config)
        elif kind == 1:
            tensors = mutate_tensors(rng, tensors)
        else:
            raw = make.safetensors_bytes(tensors)
            header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
            mutate_json(rng, header)
        directory = make.write_checkpoint(folder / "m", {}, config)
        (directory / "model.safetensors").write_bytes(make.safetensors_bytes(tensors, header))
        options = Options(rng.choice(("nvfp4", "groupwise-int", "bf16")), model_id="m", threads=1, overwrite=True,
                          vision=rng.choice((None, None, True)), container=rng.choice((2, 3)))  # fmt: skip
        start = time.process_time()
        try:
            convert(directory, folder / "x.ninfer", options)
            with artifacts.open(folder / "x.ninfer") as artifact:
                assert verify(artifact, deep=True) == []
            outcome = "valid"
        except ArtifactError as error:
            check_message(str(error).replace("…", "."))
            outcome = type(error).__name__
        except Exception as error:
            raise AssertionError(f"seed {seed}, input {index}: {error!r}") from error
        assert time.process_time() - start < 3.0, (seed, index)
        outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return outcomes


def test_mutated_checkpoints(tmp_path: Path) -> None:
    outcomes = fuzz(tmp_path, 1, 150)
    assert outcomes["valid"] > 5 and outcomes["ConfigError"] > 50 and outcomes["FramingError"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_many_mutated_checkpoints(tmp_path: Path, seed: int) -> None:
    fuzz(tmp_path, seed, 2000)
