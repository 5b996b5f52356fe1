"""Small files that ask for large things: sparse payloads, configurations that multiply, endless rows."""

import json
import time
import tracemalloc
from pathlib import Path

import pytest

import artifacts
from artifacts import ArtifactWriter, Identity, ObjectPlan
from artifacts.errors import ArtifactError, IdentityError, PayloadError
from artifacts.identities.plan import CONFIG_RESOURCE
from artifacts.tools.diff import compare
from artifacts.tools.upgrade import plan_upgrade
from artifacts.tools.verify import verify
from tests.container.samples import DIMS, MOE_DIMS
from tests.hostile.test_corpus import MEMORY_LIMIT, check_message


def write(path: Path, plans: list[ObjectPlan], config: dict[str, object]) -> Path:
    data = json.dumps(config).encode()
    with ArtifactWriter(path, Identity("m", "w"), [ObjectPlan(CONFIG_RESOURCE, bytes=len(data)), *plans], sparse=True) as w:
        w.write(CONFIG_RESOURCE, data)
    return path


def cheap(path: Path, deep: bool = False) -> list[str]:
    """The findings of verify, made in under a second of CPU and 64 MiB."""
    seconds = 9.0
    for _ in range(3):  # the machine may be busy
        start = time.process_time()
        with artifacts.open(path) as artifact:
            verify(artifact, deep)
        seconds = min(seconds, time.process_time() - start)
        if seconds < 1.0:
            break
    assert seconds < 1.0
    tracemalloc.start()
    try:
        with artifacts.open(path) as artifact:
            found = verify(artifact, deep)
            try:
                plan_upgrade(artifact, "new.ninfer")
            except ArtifactError as error:
                check_message(str(error))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < MEMORY_LIMIT, peak
    for problem in found:
        check_message(problem)
    return found


def test_experts_multiply(tmp_path: Path) -> None:
    config = {**MOE_DIMS.to_config(), "num_experts": 4096, "moe_intermediate_size": 1, "hidden_size": 1}
    layers = 60
    config |= {"num_hidden_layers": layers, "layer_types": ["linear_attention"] * layers}
    plans = [ObjectPlan(f"text/layers/{i}/moe/routed_gate_up", (8192, 1), "BF16") for i in range(layers)]
    found = cheap(write(tmp_path / "a.ninfer", plans, config))
    assert found == ["the objects hold more than 98304 parameters"]


def test_layers_multiply(tmp_path: Path) -> None:
    layers = 1024
    config = {**DIMS.to_config(), "num_hidden_layers": layers, "layer_types": ["linear_attention"] * layers}
    plans = [ObjectPlan("text/final_norm", (128,), "BF16")]
    (problem,) = cheap(write(tmp_path / "a.ninfer", plans, config))
    assert "missing" in problem


def test_widths_multiply(tmp_path: Path) -> None:
    config = {**DIMS.to_config(), "hidden_size": 1 << 20, "vocab_size": 1 << 24, "intermediate_size": 1 << 20}
    assert cheap(write(tmp_path / "a.ninfer", [ObjectPlan("text/final_norm", (1,), "BF16")], config))


def test_endless_rows(tmp_path: Path) -> None:
    plans = [
        ObjectPlan("text/output_head", (1, 1 << 33), "Q4G64_F16S"),
        ObjectPlan("text/token_embedding", (1, 1 << 33), "FP8_E4M3FN_ROW_BF16S"),
        ObjectPlan("text/layers/0/mlp/down", (128, 1 << 26), "NVFP4"),
    ]
    found = cheap(write(tmp_path / "a.ninfer", plans, DIMS.to_config()), deep=True)
    assert sum("too long to check" in problem for problem in found) == 3


def test_endless_id_map(tmp_path: Path) -> None:
    plans = [ObjectPlan("text/draft_head_token_ids", (1 << 26,), "I32")]
    found = cheap(write(tmp_path / "a.ninfer", plans, DIMS.to_config()), deep=True)
    assert any("must be unique" in problem for problem in found)


def test_endless_resources(tmp_path: Path) -> None:
    plans = [ObjectPlan("frontend/tokenizer.json", bytes=1 << 36)]
    path = write(tmp_path / "a.ninfer", plans, DIMS.to_config())
    with artifacts.open(path) as artifact:
        with pytest.raises(PayloadError, match="at most 67108864 are read"):
            artifact.model.frontend("tokenizer.json")
    with ArtifactWriter(tmp_path / "b.ninfer", Identity("m", "w"), [ObjectPlan(CONFIG_RESOURCE, bytes=1 << 36)], sparse=True):
        pass
    with artifacts.open(tmp_path / "b.ninfer") as artifact, pytest.raises(PayloadError, match="at most 8388608"):
        artifact.text_config()


def test_divisors_of_another_kind(tmp_path: Path) -> None:
    name = "text/layers/0/mlp/down_projection/input_scale_divisor"
    for plan in (ObjectPlan(name, (3,), "BF16"), ObjectPlan(name, (5, 5), "Q4G64_F16S"), ObjectPlan(name, bytes=3)):
        path = tmp_path / "a.ninfer"
        path.unlink(missing_ok=True)
        assert cheap(write(path, [plan], DIMS.to_config()), deep=True)


def test_difference_of_sparse_files_is_streamed(tmp_path: Path) -> None:
    plans = [ObjectPlan("x", (1 << 20, 64), "BF16")]
    for name in ("a", "b"):
        write(tmp_path / name, plans, DIMS.to_config())
    tracemalloc.start()
    try:
        with artifacts.open(tmp_path / "a") as a, artifacts.open(tmp_path / "b") as b:
            assert list(compare(a, b)) == []
        assert tracemalloc.get_traced_memory()[1] < MEMORY_LIMIT
    finally:
        tracemalloc.stop()


def test_claims_of_a_registered_name(tmp_path: Path) -> None:
    with ArtifactWriter(tmp_path / "a", Identity("qwen3.8-27b", "nvfp4"), [ObjectPlan("text/x", bytes=1)], sparse=True):
        pass
    found = cheap(tmp_path / "a")
    assert len(found) == 2 and "1124 missing" in found[0] and "1 not expected" in found[1]
    with artifacts.open(tmp_path / "a") as artifact, pytest.raises(IdentityError, match="no parameter"):
        artifact.parameter("text/final_norm")


def test_names_without_a_site(tmp_path: Path) -> None:
    """A bug that fuzzing found, as its whole kind: object names that are no path, in every place that splits names."""
    names = ["x", "/", "//", "text", "text/", "/layers/", "text/layers/x/mlp/down", "mtp/", "vision/", "dflash/x", "norm1",
             "\0", "vision/layers/0/attention/qkv", "input_scale_divisor", "/input_scale_divisor",
             "a_b_projection"]  # fmt: skip
    for format in ("NVFP4", "BF16", "FP32"):
        plans = [ObjectPlan(name, (128, 64), format) for name in names]
        path = tmp_path / format
        assert cheap(write(path, plans, DIMS.to_config()), deep=True)
        with artifacts.open(path) as artifact:
            for name in names:
                try:
                    artifact.parameter(name)
                except ArtifactError as error:
                    check_message(str(error))
