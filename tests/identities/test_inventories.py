"""The six registered identities against the published inventories."""

import hashlib
import json
from collections import Counter
from pathlib import Path

import pytest

from artifacts import Identity, ObjectPlan, TensorObject
from artifacts.container.directory_v2 import encode_directory
from artifacts.container.schema import place
from artifacts.errors import ConfigError, IdentityError
from artifacts.identities import SCHEMAS, TextDims, VisionDims, plan_objects
from artifacts.identities.dims import DraftDims
from artifacts.identities.parameters import bindings_of, uses_of
from artifacts.identities.plan import divisor_name
from artifacts.identities.registry import (
    DFLASH2_27B,
    DFLASH_35B,
    MOE_35B,
    REGISTRY,
    TOWER,
    identify,
    registered,
)
from artifacts.layouts import align_up
from tests.container.samples import DIMS, MOE_DIMS

# SHA-256 of the version 2 directory, object count, tensor bytes: inventory-*.json, checked against published files.
PUBLISHED = {
    "qwen3.6-27b/groupwise-int": ("0abb85fde318b5980c126f9c44a5bae09e852034de79ea269bd09693aa34e7f7", 1124, 17482342304),
    "qwen3.6-27b/nvfp4": ("50677ebddbeb17566a1c7837a122872fada8244f54d4d7b78ee95d7b567033ff", 1307, 18310883160),
    "qwen3.8-27b/groupwise-int": ("45912dd83c71a1b3b3b644c15ce3ef83b0b60d77cd7c82a39b21d9ba6267d742", 1124, 18197503904),
    "qwen3.8-27b/nvfp4": ("dfb9a418f4a474c0b3709f48e1d4d1f878d54cdae726c042981b16f577875899", 1124, 21479607072),
    "qwen3.8-27b/nvfp4-split": ("a67aa69b2f37cd2f4f9206409081fb6d6b091df686714553230fac0f958dd059", 1307, 18310883160),
    "qwen3.6-35b-a3b/groupwise-int": ("4c65958b2a56b372481be2f333fa3837ac996ed4f067430de499657da0a083be", 940, 22770245536),
}
# Uses, uses with a divisor, policies, bindings: artifact-container-v3.md section 11.
UPGRADED = {
    "qwen3.6-27b/groupwise-int": (1422, 785, 0, {"A16Only": 785}),
    "qwen3.6-27b/nvfp4": (1422, 785, 485, {"A16Only": 300, "AllowA4": 485}),
    "qwen3.8-27b/groupwise-int": (1422, 785, 0, {"A16Only": 785}),
    "qwen3.8-27b/nvfp4": (1422, 785, 168, {"A16Only": 271, "AllowA8": 346, "AllowA4": 168}),
    "qwen3.6-35b-a3b/groupwise-int": (32713, 32184, 0, {"A16Only": 32184}),
}


@pytest.mark.parametrize("identity", REGISTRY, ids=str)
def test_directory_and_size_are_the_published_ones(identity: Identity) -> None:
    entry = REGISTRY[identity]
    placed = place(entry.plan())
    digest, count, tensor_bytes = PUBLISHED[str(identity)]
    raw = encode_directory(identity, placed)
    assert hashlib.sha256(raw).hexdigest() == digest
    assert len(placed) == count
    assert sum(o.bytes for o in placed if isinstance(o, TensorObject)) == tensor_bytes
    assert align_up(16 + len(raw), 4096) + placed[-1].offset + placed[-1].bytes == entry.file_bytes
    if entry.v1_directory_sha256 is not None:
        v1 = encode_directory(Identity(identity.model_id), placed)
        assert hashlib.sha256(v1).hexdigest() == entry.v1_directory_sha256


SPECIFICATION = Path(__file__).parents[3] / "shared" / "spec"


@pytest.mark.shared
@pytest.mark.skipif(not SPECIFICATION.is_dir(), reason="needs ../shared/spec")
@pytest.mark.parametrize("identity", REGISTRY, ids=str)
def test_every_object_against_the_inventory_file(identity: Identity) -> None:
    name = f"inventory-{identity.model_id}-{identity.weights_id}.json"
    facts = json.loads((SPECIFICATION / name).read_text())
    assert facts["validation"]["published_file_bytes"] == REGISTRY[identity].file_bytes
    placed = place(REGISTRY[identity].plan())
    for want, have in zip(facts["objects"], placed, strict=True):
        assert (want["name"], want["offset"], want["bytes"]) == (have.name, have.offset, have.bytes)
        if isinstance(have, TensorObject):
            assert (want["shape"], want["format"], want["layout"]) == (list(have.shape), have.format, have.layout)


@pytest.mark.parametrize("identity", UPGRADED)
def test_parameters_and_uses_have_the_published_counts(identity: str) -> None:
    entry = registered(Identity(*identity.split("/")))
    placed = {o.name: o for o in place(entry.plan())}
    bindings = bindings_of(placed.values(), entry.text, entry.drafter)
    uses = uses_of(bindings, placed)
    count, total, divided, policies = UPGRADED[identity]
    assert (len(bindings), len(uses)) == (count, total)
    assert sum(bool(use.auxiliaries) for use in uses) == divided
    assert Counter(use.policy for use in uses) == policies
    assert len({(use.parameter, use.input) for use in uses}) == total


def test_parameter_shapes() -> None:
    entry = registered(Identity("qwen3.6-35b-a3b", "groupwise-int"))
    placed = {o.name: o for o in place(entry.plan())}
    bindings = bindings_of(placed.values(), entry.text, entry.drafter)

    def rows(parameter: str) -> int:
        (part,) = bindings[parameter].parts
        tensor = placed[part.object]
        assert isinstance(tensor, TensorObject)
        return (part.end - part.begin) // tensor.shape[-1]

    assert rows("text/layers/3/attention/gate") == 4096 and rows("text/layers/3/attention/value") == 512
    assert rows("text/layers/0/gdn/b_projection") == 32 and rows("text/layers/0/gdn/z") == 4096
    assert rows("text/layers/39/moe/experts/255/up") == 512 and rows("text/layers/39/moe/experts/255/down") == 2048
    assert rows("mtp/layers/0/moe/shared_score") == 1 and rows("mtp/layers/0/moe/shared/down") == 2048
    assert bindings["dflash/layers/2/attention/context_key"] == bindings["dflash/layers/2/attention/key"]
    assert rows("dflash/layers/2/attention/query") == 4096 and rows("dflash/layers/2/mlp/up") == 6144
    assert rows("vision/layers/26/attention/value") == 1152
    assert bindings["vision/layers/0/norm1_weight"].whole and bindings["proposal/token_ids"].whole


def test_dflash2_objects_bind_to_91_parameters() -> None:
    entry = registered(Identity("qwen3.8-27b", "groupwise-int"))
    plans = [p for p in plan_objects(entry.text, "groupwise-int", drafter=DFLASH2_27B) if p.name.startswith("dflash2/")]
    assert len(plans) == 66
    bindings = bindings_of(place(plans), entry.text, DFLASH2_27B)
    assert len(bindings) == 91
    placed = {o.name: o for o in place([*entry.plan(), *plans])}
    uses = uses_of(bindings_of(placed.values(), entry.text, DFLASH2_27B), placed)
    positions = {use.input for use in uses if use.parameter.startswith("dflash2/layers/4/")}
    assert positions == {
        "dflash2/layers/4/query_projection_input", "dflash2/context_input", "dflash2/layers/4/attention_output",
        "dflash2/layers/4/mlp_input", "dflash2/layers/4/mlp_product", "dflash2/layers/4/attention_conv_input",
        "dflash2/layers/4/mlp_conv_input",
    }  # fmt: skip
    assert ("text/output_head", "dflash2/final_hidden") in {(use.parameter, use.input) for use in uses}


def test_identify_decides_by_objects() -> None:
    upstream = registered(Identity("qwen3.8-27b", "nvfp4"))
    split = registered(Identity("qwen3.8-27b", "nvfp4-split"))
    assert identify(upstream.identity, place(upstream.plan())) is upstream
    assert identify(upstream.identity, place(split.plan())) is split
    assert identify(split.identity, place(split.plan())) is split
    damaged = split.plan()
    del damaged[100:110]
    assert identify(upstream.identity, place(damaged)) is split
    assert identify(Identity("qwen3.6-27b"), place(upstream.plan())) is registered(Identity("qwen3.6-27b", "groupwise-int"))
    assert identify(Identity("tiny", "nvfp4"), place(split.plan())) is None
    with pytest.raises(IdentityError, match="'nobody/none' is not registered; registered: qwen3.6-27b/groupwise-int, "):
        registered(Identity("nobody", "none"))


@pytest.mark.parametrize("schema", sorted(SCHEMAS))
def test_every_schema_holds_the_same_parameters(schema: str) -> None:
    moe = schema.endswith("-moe")
    dims = MOE_DIMS if moe else DIMS
    weights = schema.removesuffix("-moe")
    placed = place(plan_objects(dims, weights, with_mtp=True, draft_rows=50))
    reference = place(plan_objects(dims, "bf16", with_mtp=True, draft_rows=50))
    found, wanted = bindings_of(placed, dims), bindings_of(reference, dims)
    assert found.keys() == wanted.keys()
    for name, binding in wanted.items():
        size = sum(part.end - part.begin for part in binding.parts)
        assert sum(part.end - part.begin for part in found[name].parts) == size


def test_format_rule_moves_divisors() -> None:
    def rule(name: str, default: str) -> str:
        return "Q6G64_F16S" if name == "text/layers/2/mlp/down" else default

    names = [p.name for p in plan_objects(DIMS, "nvfp4", format_rule=rule)]
    plain = [p.name for p in plan_objects(DIMS, "nvfp4")]
    assert set(plain) - set(names) == {"text/layers/2/mlp/down_projection/input_scale_divisor"}
    at = names.index("text/layers/1/mlp/down")
    assert names[at + 1] == divisor_name(names[at]) == "text/layers/1/mlp/down_projection/input_scale_divisor"
    assert divisor_name("text/layers/0/gdn/query_key_value_z") == "text/layers/0/gdn/input_projection/input_scale_divisor"


def test_unknown_schemas_are_named() -> None:
    with pytest.raises(IdentityError, match="unknown weights id 'int3'; known: bf16, groupwise-int"):
        plan_objects(DIMS, "int3")
    with pytest.raises(IdentityError, match="'nvfp4' has no rule for mixture-of-experts models"):
        plan_objects(MOE_DIMS, "nvfp4")
    with pytest.raises(IdentityError, match="has no rule for dense"):
        plan_objects(DIMS, "groupwise-int-moe")


def test_configurations_round_trip() -> None:
    for dims in (DIMS, MOE_DIMS, MOE_35B):
        config = dims.to_config()
        assert TextDims.from_config(config).to_config() == config
        assert TextDims.from_config({"text_config": config}).to_config() == config
    assert VisionDims.from_config(TOWER.to_config()) == TOWER
    for drafter in (DFLASH_35B, DFLASH2_27B):
        assert DraftDims.from_config(drafter.to_config()).to_config() == drafter.to_config()
    assert DFLASH2_27B.component == "dflash2" and DFLASH_35B.component == "dflash"
    assert MOE_35B.to_config()["rms_norm_eps"] == 9.999999974752427e-07


@pytest.mark.parametrize(
    ("member", "value", "match"),
    [
        ("hidden_size", None, "hidden_size must be an integer"),
        ("hidden_size", True, "hidden_size must be an integer"),
        ("hidden_size", 128.0, "hidden_size must be an integer"),
        ("hidden_size", 1 << 40, "hidden_size must be an integer from 1 to 1048576"),
        ("num_attention_heads", 3, "query heads must be a multiple"),
        ("linear_num_value_heads", 3, "value heads of key heads"),
        ("layer_types", ["full_attention"], "layer_types must list 4 times"),
        ("layer_types", ["mamba"] * 4, "layer_types must list"),
        ("num_hidden_layers", 2000000, "num_hidden_layers must be an integer"),
        ("model_type", "llama", "unknown model architecture 'llama'; known: qwen3_5_text, qwen3_5_moe_text"),
        ("rope_parameters", [], "rope_parameters must be an object"),
        ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.25}, "missing member mrope_section"),
        ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [1, 1, 1]}, "add up to half"),
        ("rope_parameters", {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [0, 0, 4]}, "interleave"),
        ("rope_parameters", {"rope_theta": -1, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]}, "rope_theta"),
        ("rms_norm_eps", "small", "rms_norm_eps must be a positive binary32 number"),
        ("rms_norm_eps", float("inf"), "rms_norm_eps must be a positive binary32 number"),
    ],
)
def test_bad_configurations(member: str, value: object, match: str) -> None:
    config = DIMS.to_config()
    config[member] = value
    with pytest.raises(ConfigError, match=match):
        TextDims.from_config(config)
    del config[member]
    with pytest.raises(ConfigError, match=f"missing member {member}"):
        TextDims.from_config(config)


def test_bindings_reject_wrong_rows() -> None:
    plans = [ObjectPlan("text/layers/3/attention/query_key", (100, 128), "BF16")]
    with pytest.raises(IdentityError, match="100 rows; the model's dimensions need 192"):
        bindings_of(place(plans), DIMS)
    twice = [ObjectPlan(f"text/layers/3/attention/{n}", (192, 128), "BF16") for n in ("query_key", "query_key")]
    with pytest.raises(IdentityError, match="held twice"):
        bindings_of(place(twice), DIMS)
    with pytest.raises(IdentityError, match="dimensions of its drafter are not known"):
        bindings_of(place([ObjectPlan("dflash/layers/0/mlp/gate_up", (2, 2), "BF16")]), DIMS)
