"""Logical parameters of version 1 and 2 files, by the published mapping (artifact-container-v3.md sections 7, 8, 11).

A fused parent is split by rows in a fixed order; names are respelled where version 3 names a parameter differently.
"""

from collections.abc import Iterable, Iterator, Mapping

from artifacts.container.directory_v3 import Binding, Part, Use
from artifacts.container.schema import StoredObject, TensorObject
from artifacts.errors import IdentityError, quoted
from artifacts.identities.dims import DraftDims, TextDims
from artifacts.identities.plan import FP8, NVFP4, divisor_name

DIVISOR_SUFFIX = "/input_scale_divisor"
DIVISOR_ROLE = "activation_input_divisor"
MAX_PARAMETERS = 98304
"""Policy: what a configuration of a few bytes may make of the objects of a file. The largest published model has 32,713."""
SPECULATIVE = ("mtp", "dflash", "dflash2")

_PLAIN_NAMES = (
    ("mtp/layer/", "mtp/layers/0/"),
    ("/norm1/", "/norm1_"),
    ("/norm2/", "/norm2_"),
    ("vision/merger/norm/", "vision/merger/norm_"),
    ("moe/shared_down", "moe/shared/down"),
)
_RENAMED = {"text/draft_head": "proposal/head", "text/draft_head_token_ids": "proposal/token_ids"}


def plain_parameter(name: str) -> str:
    """The parameter that a whole object holds."""
    if name in _RENAMED:
        return _RENAMED[name]
    for old, new in _PLAIN_NAMES:
        name = name.replace(old, new)
    return name


def split_rows(name: str, dims: TextDims, drafter: DraftDims | None) -> list[tuple[str, int, int]] | None:
    """(parameter, first row, end row) of a fused parent, or None for an object that is one whole parameter.

    Errors: IdentityError for a drafter parent without drafter dimensions.
    """
    site, _, leaf = name.rpartition("/")
    prefix = site.replace("mtp/layer/", "mtp/layers/0/") + "/"
    query, kv, key, value = dims.query_width, dims.kv_width, dims.key_width, dims.value_width
    rows: list[tuple[str, int]]
    if name.startswith(("dflash/", "dflash2/")) and leaf in ("query_key_value", "gate_up"):
        if drafter is None:
            raise IdentityError(f"object {quoted(name)}: the dimensions of its drafter are not known")
        if leaf == "gate_up":
            return _consecutive(prefix, [("gate", drafter.intermediate), ("up", drafter.intermediate)])
        parts = [("query", drafter.query_width), ("key", drafter.kv_width), ("value", drafter.kv_width)]
        split = _consecutive(prefix, parts)
        return split + [(f"{prefix}context_{n}", *span[1:]) for n, span in zip(("key", "value"), split[1:], strict=True)]
    if site.endswith("/attention") and leaf in ("query_key", "gate_value", "query_key_gate_value"):
        rows = [(part, kv if part in ("key", "value") else query) for part in leaf.split("_")]
    elif site.endswith("/gdn") and leaf in ("query_key", "value_z", "query_key_value_z"):
        rows = [(part, key if part in ("query", "key") else value) for part in leaf.split("_")]
    elif leaf == "a_b_projection":
        rows = [("a_projection", dims.value_heads), ("b_projection", dims.value_heads)]
    elif leaf == "gate_up":
        rows = [("gate", dims.intermediate), ("up", dims.intermediate)]
    elif leaf == "router_shared_gate":
        rows = [("router", dims.experts), ("shared_score", 1)]
    elif leaf == "routed_gate_up":
        rows = [(f"experts/{e}/{part}", dims.moe_intermediate) for e in range(dims.experts) for part in ("gate", "up")]
    elif leaf == "routed_down":
        rows = [(f"experts/{e}/down", dims.hidden) for e in range(dims.experts)]
    elif leaf == "shared_gate_up":
        rows = [("shared/gate", dims.shared_intermediate), ("shared/up", dims.shared_intermediate)]
    else:
        return None
    return _consecutive(prefix, rows)


def _consecutive(prefix: str, rows: Iterable[tuple[str, int]]) -> list[tuple[str, int, int]]:
    spans: list[tuple[str, int, int]] = []
    start = 0
    for parameter, count in rows:
        spans.append((prefix + parameter, start, start + count))
        start += count
    return spans


def _split_vision(tensor: TensorObject) -> list[tuple[str, int, int]] | None:
    if not tensor.name.startswith("vision/") or not tensor.name.endswith(("attention/qkv", "attention/qkv_bias")):
        return None
    site, _, leaf = tensor.name.rpartition("/")
    suffix = leaf.removeprefix("qkv")
    third, rest = divmod(tensor.shape[0] if tensor.shape else 1, 3)
    if rest:
        raise IdentityError(f"object {quoted(tensor.name)}: {tensor.shape[0]} rows do not split into query, key, value")
    return _consecutive(f"{site}/", [(part + suffix, third) for part in ("query", "key", "value")])


def bindings_of(
    objects: Iterable[StoredObject], dims: TextDims, drafter: DraftDims | None = None
) -> dict[str, Binding]:
    """Logical parameter -> elements of objects, for the tensors of a version 1 or 2 file.

    Input divisor scalars belong to uses, not to parameters, and are left out. Errors: IdentityError when a fused
    parent has other rows than its parts, or two objects claim one parameter.
    """
    bindings: dict[str, Binding] = {}
    for tensor in objects:
        if not isinstance(tensor, TensorObject) or tensor.name.endswith(DIVISOR_SUFFIX):
            continue
        spans = _split_vision(tensor) or split_rows(tensor.name, dims, drafter)
        width = 1
        for dimension in tensor.shape[1:]:
            width *= dimension
        rows = tensor.shape[0] if tensor.shape else 1
        whole = spans is None
        if spans is None:
            spans = [(plain_parameter(tensor.name), 0, rows)]
        elif max(end for _, _, end in spans) != rows:
            needed = max(end for _, _, end in spans)
            raise IdentityError(f"object {quoted(tensor.name)}: {rows} rows; the model's dimensions need {needed}")
        for parameter, begin, end in spans:
            if parameter in bindings:
                raise IdentityError(f"object {quoted(tensor.name)}: parameter {quoted(parameter)} is held twice")
            bindings[parameter] = Binding((Part(tensor.name, begin * width, end * width),), whole)
        if len(bindings) > MAX_PARAMETERS:
            raise IdentityError(f"the objects hold more than {MAX_PARAMETERS} parameters")
    return bindings


def _input_positions(parameter: str, speculative: Iterable[str]) -> Iterator[str]:
    """Where a parameter meets an activation; nothing for norms, tables and other parameters without a product."""
    site, _, leaf = parameter.rpartition("/")
    block, _, module = site.rpartition("/")
    if parameter == "text/output_head":
        yield "text/final_hidden"
    if parameter in ("text/output_head", "proposal/head"):
        yield from (f"{component}/final_hidden" for component in speculative)
    elif parameter == "mtp/input_projection":
        yield "mtp/stem_input"
    elif parameter.startswith("vision/"):
        yield from _vision_positions(parameter, block, module, leaf)
    elif parameter.startswith(("dflash/", "dflash2/")):
        yield from _drafter_positions(parameter, block, module, leaf)
    elif module == "attention":
        if leaf in ("query", "key", "gate", "value"):
            yield f"{block}/mixer_input"
        elif leaf == "output":
            yield f"{block}/attention/gated_output"
    elif module == "gdn":
        if leaf in ("query", "key", "value", "z", "a_projection", "b_projection"):
            yield f"{block}/mixer_input"
        elif leaf == "output":
            yield f"{block}/gdn/gated_output"
    elif module == "mlp":
        yield f"{block}/mlp/product" if leaf == "down" else f"{block}/ffn_input"
    elif "/moe/" in parameter:
        layer = parameter[: parameter.index("/moe/")]
        yield f"{site}/product" if leaf == "down" else f"{layer}/ffn_input"


def _vision_positions(parameter: str, block: str, module: str, leaf: str) -> Iterator[str]:
    if parameter == "vision/patch_embedding":
        yield "vision/patch_input"
    elif module == "merger" and leaf in ("fc1", "fc2"):
        yield "vision/merger/input" if leaf == "fc1" else "vision/merger/activation"
    elif module == "attention" and leaf in ("query", "key", "value"):
        yield f"{block}/attention_input"
    elif module == "attention" and leaf == "output":
        yield f"{block}/attention_output"
    elif module == "mlp" and leaf in ("fc1", "fc2"):
        yield f"{block}/mlp_input" if leaf == "fc1" else f"{block}/mlp_activation"


def _drafter_positions(parameter: str, block: str, module: str, leaf: str) -> Iterator[str]:
    root = parameter.split("/", 1)[0]
    if leaf == "feature_projection":
        yield f"{root}/target_features"
    elif leaf == "hidden_projection":
        yield f"{root}/final_hidden"
    elif leaf == "kernel_projection":
        yield f"{block}/{module}_input"
    elif leaf in ("context_key", "context_value"):
        yield f"{root}/context_input"
    elif module == "attention" and leaf in ("query", "key", "value"):
        yield f"{block}/query_projection_input"
    elif module == "attention" and leaf == "output":
        yield f"{block}/attention_output"
    elif module == "mlp":
        yield f"{block}/mlp_product" if leaf == "down" else f"{block}/mlp_input"


def uses_of(bindings: Mapping[str, Binding], objects: Mapping[str, StoredObject]) -> list[Use]:
    """One use per parameter and input position, with the default policy of the stored format and the input divisor.

    Policies: NVFP4 with an input divisor AllowA4, FP8 AllowA8, everything else A16Only.
    """
    speculative = [component for component in SPECULATIVE if any(p.startswith(component + "/") for p in bindings)]
    uses: list[Use] = []
    for parameter, binding in bindings.items():
        parent = objects[binding.parts[0].object]
        assert isinstance(parent, TensorObject)
        policy = "AllowA8" if parent.format == FP8 else "A16Only"
        divisor = divisor_name(parent.name)
        auxiliaries: dict[str, Binding] = {}
        if parent.format == NVFP4 and divisor in objects:
            policy = "AllowA4"
            auxiliaries[DIVISOR_ROLE] = Binding((Part(divisor, 0, 1),), True)
        for position in _input_positions(parameter, speculative):
            uses.append(Use(parameter, position, policy, auxiliaries))
    return uses
