"""Small artifacts of every version for the tests, made by the writers under test from synthetic weights."""

import json
from pathlib import Path
from typing import Any

import artifacts
from artifacts import Identity, ObjectPlan
from artifacts.container.writer import ArtifactWriter
from artifacts.identities import TextDims, plan_objects
from artifacts.identities.dims import FULL, LINEAR, VisionDims
from artifacts.identities.plan import CONFIG_RESOURCE
from artifacts.tools.synth import synthesize
from artifacts.tools.upgrade import upgrade

DIMS = TextDims(
    hidden=128,
    vocabulary=300,
    layer_types=(LINEAR, LINEAR, LINEAR, FULL),
    heads=4,
    kv_heads=2,
    head_dim=32,
    key_heads=2,
    value_heads=4,
    key_dim=32,
    value_dim=32,
    conv_taps=4,
    max_position=4096,
    rope_theta=10000.0,
    partial_rotary_factor=0.25,
    mrope_section=(2, 1, 1),
    rms_norm_eps=1e-6,
    intermediate=128,
)
MOE_DIMS = TextDims(
    **{
        **DIMS.__dict__,
        "intermediate": 0,
        "experts": 6,
        "experts_per_token": 2,
        "moe_intermediate": 64,
        "shared_intermediate": 64,
    }
)
TOWER = VisionDims(
    depth=1, hidden=32, intermediate=48, heads=2, patch=4, temporal_patch=2, merge=2, positions=16
)  # K of 48 and 96 are no multiples of 128: padded rows
RESOURCES = {
    "frontend/tokenizer.json": b"{}",
    "frontend/chat_template.jinja": b"{{ messages[0].content }}",
}


def resources(dims: TextDims = DIMS, vision: bool = False) -> dict[str, bytes]:
    """Resources of a sample, the embedded configuration last."""
    config = dims.to_config()
    if vision:
        config = {"text_config": config, "vision_config": TOWER.to_config()}
    return {**RESOURCES, CONFIG_RESOURCE: json.dumps(config).encode()}


def write_v2(
    path: Path, weights: str = "groupwise-int", dims: TextDims = DIMS, vision: bool = False, draft_rows: int = 0
) -> Path:
    """An unregistered version 2 artifact with MTP."""
    data = resources(dims, vision)
    plans = plan_objects(
        dims,
        weights,
        with_mtp=True,
        with_vision=TOWER if vision else None,
        draft_rows=draft_rows,
        resources={name: len(value) for name, value in data.items()},
    )
    synthesize(path, Identity("sample", weights), plans, data, domain=290, workers=1)
    return path


def write_v1(path: Path) -> Path:
    """A version 1 artifact of two tensors and a resource."""
    plans = [
        ObjectPlan("frontend/tokenizer.json", bytes=5),
        ObjectPlan("text/final_norm", (64,), "BF16"),
        ObjectPlan("text/output_head", (10, 100), "Q5G64_F16S"),
    ]
    with ArtifactWriter(path, Identity("old-model"), plans) as writer:
        writer.write("frontend/tokenizer.json", b"hello")
        writer.write("text/final_norm", bytes(range(128)))
        writer.write("text/output_head", bytes(i % 251 for i in range(writer.objects["text/output_head"].bytes)))
    return path


def write_v3(path: Path, source: Path | None = None, limit: int = 32_000_000_000, **v2: Any) -> Path:
    """The version 3 form of `source`, by default of a fresh sample."""
    if source is None:
        source = write_v2(path.with_name("source-" + path.name), **v2)
    with artifacts.open(source) as artifact:
        upgrade(artifact, path, limit=limit)
    return path
