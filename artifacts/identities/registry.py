"""The registered identities: dimensions, schema, published size and checksum (artifact-container.md section 2.4).

`(qwen3.8-27b, nvfp4)` names two schemas on disk: the upstream one, and the file that a fork published under the same
pair and calls `nvfp4-split`. `identify` therefore decides by the object list.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from artifacts.container.directory_v2 import Identity
from artifacts.container.schema import ObjectPlan, StoredObject, TensorObject
from artifacts.errors import IdentityError, quoted
from artifacts.identities.dims import FULL, LINEAR, SLIDING, DraftDims, TextDims, VisionDims
from artifacts.identities.plan import BF16, FP8, Q6, RESOURCES, W8, plan_objects

DRAFT_HEAD_ROWS = 131072
TOKEN_IDS = 248077
"""Ids that the published tokenizers produce; rows above are padding and must never be sampled."""


def _hybrid(layers: int) -> tuple[str, ...]:
    return tuple(FULL if index % 4 == 3 else LINEAR for index in range(layers))


DENSE_27B = TextDims(
    hidden=5120,
    vocabulary=248320,
    layer_types=_hybrid(64),
    heads=24,
    kv_heads=4,
    head_dim=256,
    key_heads=16,
    value_heads=48,
    key_dim=128,
    value_dim=128,
    conv_taps=4,
    max_position=262144,
    rope_theta=1e7,
    partial_rotary_factor=0.25,
    mrope_section=(11, 11, 10),
    rms_norm_eps=1e-6,
    intermediate=17408,
)
MOE_35B = TextDims(
    hidden=2048,
    vocabulary=248320,
    layer_types=_hybrid(40),
    heads=16,
    kv_heads=2,
    head_dim=256,
    key_heads=16,
    value_heads=32,
    key_dim=128,
    value_dim=128,
    conv_taps=4,
    max_position=262144,
    rope_theta=1e7,
    partial_rotary_factor=0.25,
    mrope_section=(11, 11, 10),
    rms_norm_eps=1e-6,
    experts=256,
    experts_per_token=8,
    moe_intermediate=512,
    shared_intermediate=512,
)
TOWER = VisionDims(
    depth=27,
    hidden=1152,
    intermediate=4304,
    heads=16,
    patch=16,
    temporal_patch=2,
    merge=2,
    positions=2304,
)
TOWER_MOE = VisionDims(**{**TOWER.__dict__, "moe": True})
DFLASH_35B = DraftDims(
    layer_types=(SLIDING,) * 5 + (FULL,),
    intermediate=6144,
    heads=32,
    kv_heads=8,
    head_dim=128,
    target_layers=(1, 6, 11, 16, 22, 27, 32, 37),
    mask_token=248077,
    window=4096,
    max_position=262144,
    rope_theta=1e7,
    rms_norm_eps=1e-6,
)
DFLASH2_27B = DraftDims(
    layer_types=(SLIDING,) * 5,
    intermediate=17408,
    heads=32,
    kv_heads=8,
    head_dim=128,
    target_layers=(5, 19, 33, 47, 61),
    mask_token=248070,
    window=2048,
    max_position=262144,
    rope_theta=1e7,
    rms_norm_eps=1e-6,
    conv_taps=2,
    conv_group=16,
    selector_rank=256,
    selector_top_k=16,
)
RESOURCES_3_6 = dict(zip(RESOURCES, (12807982, 16718, 7764, 202, 390, 385), strict=True))
RESOURCES_3_8 = dict(zip(RESOURCES, (12809320, 17928, 8952, 202, 390, 385), strict=True))


def _layer_index(name: str) -> int:
    return int(name.split("/", 3)[2]) if name.startswith("text/layers/") else -1


def _groupwise_3_6(name: str, format: str) -> str:
    return Q6 if name in ("text/token_embedding", "text/output_head") else format


def _nvfp4_3_6(name: str, format: str) -> str:
    """The mixed-precision source keeps early attention inputs and three output projections in BF16."""
    layer, leaf = _layer_index(name), name.split("/", 3)[-1]
    early_input = leaf == "attention/query_key_gate_value" and layer < 24
    early_output = (leaf == "attention/output" and layer in (3, 7)) or (leaf == "gdn/output" and layer == 4)
    return BF16 if layer >= 0 and (early_input or early_output) else format


def _nvfp4_3_8(name: str, format: str) -> str:
    """The source quantizes the MLPs of the last eight layers to FP8 instead of NVFP4."""
    return FP8 if _layer_index(name) >= 56 and "/mlp/" in name else format


def _groupwise_35b(name: str, format: str) -> str:
    return Q6 if name.endswith("moe/routed_down") and _layer_index(name) in (34, 38, 39) else format


@dataclass(frozen=True)
class RegisteredIdentity:
    """One published file: how its object list follows from its dimensions, and what the file is."""

    identity: Identity
    text: TextDims
    vision: VisionDims
    schema: str
    resources: Mapping[str, int]
    file_name: str
    file_bytes: int
    sha256: str
    drafter: DraftDims | None = None
    optional_drafter: DraftDims | None = None
    """A drafter that later files of the same identity add; its objects are not in the published inventory."""
    v1_sha256: str | None = None
    v1_directory_sha256: str | None = None
    published_as: Identity | None = field(default=None)
    """The identity that the published file carries, when it is not this one."""

    def plan(self, resources: Mapping[str, int] | None = None) -> list[ObjectPlan]:
        """The full object list in file order; `resources` replaces the published resource lengths."""
        return plan_objects(
            self.text,
            self.schema,
            with_mtp=True,
            with_vision=self.vision,
            draft_rows=DRAFT_HEAD_ROWS,
            drafter=self.drafter,
            resources=self.resources if resources is None else resources,
            format_rule=_RULES.get(self.identity),
        )


_RULES = {
    Identity("qwen3.6-27b", "groupwise-int"): _groupwise_3_6,
    Identity("qwen3.6-27b", "nvfp4"): _nvfp4_3_6,
    Identity("qwen3.8-27b", "nvfp4"): _nvfp4_3_8,
    Identity("qwen3.8-27b", "nvfp4-split"): _nvfp4_3_6,
    Identity("qwen3.6-35b-a3b", "groupwise-int"): _groupwise_35b,
}

REGISTRY: dict[Identity, RegisteredIdentity] = {
    entry.identity: entry
    for entry in (
        RegisteredIdentity(
            Identity("qwen3.6-27b", "groupwise-int"),
            DENSE_27B,
            TOWER,
            "groupwise-int",
            RESOURCES_3_6,
            "qwen3_6_27b.ninfer",
            17495365888,
            "7b51600ffd10632b9660f56085efdd9b751d79733ad32036a652234b64bebe7b",
            v1_sha256="74fac75f3a6b7ab7b52e08c36969c7a33a8ba23465910eccd72d195adb497127",
            v1_directory_sha256="df352a3e3b8555f15fd00d143be213b9e5ff6fb910a1c2390f0785f9a1e2d386",
        ),
        RegisteredIdentity(
            Identity("qwen3.6-27b", "nvfp4"),
            DENSE_27B,
            TOWER,
            "nvfp4",
            RESOURCES_3_6,
            "qwen3_6_27b_nvfp4.ninfer",
            18324064000,
            "bce5f00d066c0f20f1317bf1fdcb458264cf95837c3b1f3fbec163694627893a",
        ),
        RegisteredIdentity(
            Identity("qwen3.8-27b", "groupwise-int"),
            DENSE_27B,
            TOWER,
            "groupwise-int",
            RESOURCES_3_8,
            "qwen3_8_27b.ninfer",
            18210531328,
            "eec39564993d6e9c7d5e383382a760f093465c9d163ec9a1bd6b80199514bf3e",
            optional_drafter=DFLASH2_27B,
        ),
        RegisteredIdentity(
            Identity("qwen3.8-27b", "nvfp4"),
            DENSE_27B,
            TOWER,
            "nvfp4-fp8",
            RESOURCES_3_8,
            "qwen3_8_27b_nvfp4.ninfer",
            21492695040,
            "bb3360522a06e136e0367f5703414d26272b7285c8a6ab6194135c17dbd81b32",
            optional_drafter=DFLASH2_27B,
        ),
        RegisteredIdentity(
            Identity("qwen3.6-35b-a3b", "groupwise-int"),
            MOE_35B,
            TOWER_MOE,
            "groupwise-int",
            RESOURCES_3_6,
            "qwen3_6_35b_a3b.ninfer",
            22783246080,
            "1fb9ea0b5b8561e49d9604115ec89e5d9f2b6f6434e32c37c57fffd480a325d2",
            drafter=DFLASH_35B,
            v1_sha256="5194407dd6d3092b8c2f81ce41e014b50ca0d6f1ba4e5d8c1492b8652bfa267f",
            v1_directory_sha256="0155278f7e050a4a5c39a697557ea9e2532d44dfc054fd41b496f8b37966732e",
        ),
        RegisteredIdentity(
            Identity("qwen3.8-27b", "nvfp4-split"),
            DENSE_27B,
            TOWER,
            "nvfp4",
            RESOURCES_3_8,
            "qwen3_8_27b_nvfp4.ninfer",
            18324067840,
            "eaf8ad124256d0a0c1ebbbca442ca58eee4f97ab34a60a0b4d57e2b41e2c56d2",
            published_as=Identity("qwen3.8-27b", "nvfp4"),
        ),
    )
}


def registered(identity: Identity) -> RegisteredIdentity:
    """The registry entry. Errors: IdentityError listing what is registered."""
    entry = REGISTRY.get(identity)
    if entry is None:
        known = ", ".join(str(known) for known in REGISTRY)
        raise IdentityError(f"identity {quoted(str(identity))} is not registered; registered: {known}")
    return entry


@lru_cache
def tensor_signature(identity: Identity) -> frozenset[tuple[str, tuple[int, ...], str]]:
    """Name, shape and format of every tensor that a registered identity prescribes."""
    return frozenset((p.name, p.shape, p.format) for p in registered(identity).plan() if p.format is not None)


def identify(identity: Identity, objects: Iterable[StoredObject]) -> RegisteredIdentity | None:
    """The registered identity that a file is, by its declared identity and, where that is ambiguous, its objects.

    A version 1 identity stands for groupwise-int. None when the declared identity is not registered.
    """
    if identity.weights_id is None:
        identity = Identity(identity.model_id, "groupwise-int")
    entry = REGISTRY.get(identity)
    if entry is None:
        return None
    rivals = [other for other in REGISTRY.values() if other.published_as == identity]
    if rivals:
        stored = {(o.name, o.shape, o.format) for o in objects if isinstance(o, TensorObject)}
        for rival in rivals:
            if len(stored ^ tensor_signature(rival.identity)) < len(stored ^ tensor_signature(entry.identity)):
                return rival
    return entry


__all__ = ["REGISTRY", "W8", "RegisteredIdentity", "identify", "registered", "tensor_signature"]
