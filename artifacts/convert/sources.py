"""Where every artifact object comes from in a checkpoint (the mapping tables of conversion.md sections 3 to 6).

Values are never transformed: rows are selected and stacked, the convolution is transposed to tap-major order, the
vision patch filter is flattened, and gates are widened to FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from artifacts.convert.checkpoint import Checkpoint, SourceTensor
from artifacts.convert.linear import SUFFIXES, Linear, Notes, Piece, Stack, exact_bf16, find_linear
from artifacts.errors import ConfigError, quoted
from artifacts.formats import Array, bf16_to_f32
from artifacts.identities import TextDims

TRUNKS = ("model.language_model.", "language_model.model.", "model.")
HEADS = ("lm_head", "language_model.lm_head", "model.lm_head")
TOWERS = ("model.visual.", "visual.")

VECTORS = {
    "input_norm": "input_layernorm.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "attention/query_norm": "self_attn.q_norm.weight",
    "attention/key_norm": "self_attn.k_norm.weight",
    "gdn/norm": "linear_attn.norm.weight",
    "gdn/a_log": "linear_attn.A_log",
    "gdn/dt_bias": "linear_attn.dt_bias",
    "gdn/convolution": "linear_attn.conv1d.weight",
}
MTP_VECTORS = {
    "mtp/embedding_norm": "mtp.pre_fc_norm_embedding.weight",
    "mtp/hidden_norm": "mtp.pre_fc_norm_hidden.weight",
    "mtp/final_norm": "mtp.norm.weight",
}
WHOLE = {
    "attention/output": "self_attn.o_proj",
    "gdn/output": "linear_attn.out_proj",
    "mlp/down": "mlp.down_proj",
    "gdn/a_projection": "linear_attn.in_proj_a",
    "gdn/b_projection": "linear_attn.in_proj_b",
}
VISION_NAMES = {
    "patch_embedding": "patch_embed.proj.weight",
    "patch_embedding_bias": "patch_embed.proj.bias",
    "position_embedding": "pos_embed.weight",
}
VISION_PARTS = (
    ("attention/qkv", "attn.qkv"),
    ("attention/output", "attn.proj"),
    ("mlp/fc1", "mlp.linear_fc1"),
    ("mlp/fc2", "mlp.linear_fc2"),
    ("merger/fc1", "merger.linear_fc1"),
    ("merger/fc2", "merger.linear_fc2"),
)


class Source:
    """One checkpoint seen through the model's names. Every tensor that is looked up counts as used."""

    def __init__(self, checkpoint: Checkpoint, dims: TextDims, notes: Notes) -> None:
        self.checkpoint, self.dims, self.notes = checkpoint, dims, notes
        self.used: set[str] = set()
        self._linears: dict[str, Linear] = {}
        self.trunk = self._trunk()
        self.tower = next((t for t in TOWERS if any(n.startswith(t) for n in checkpoint)), None)

    def _trunk(self) -> str:
        for prefix in TRUNKS:
            if any(name.startswith(prefix + "layers.") for name in self.checkpoint):
                return prefix
        wanted = " or ".join(f"{prefix}layers" for prefix in TRUNKS)
        raise ConfigError(f"checkpoint {quoted(self.checkpoint.directory.name)} has no text layers: no {wanted}")

    @property
    def has_mtp(self) -> bool:
        return any(name.startswith("mtp.") for name in self.checkpoint)

    @property
    def has_vision(self) -> bool:
        return self.tower is not None

    def quantized_kinds(self) -> set[str]:
        """`nvfp4` and `fp8`, as far as weights of the text layers are stored so."""
        kinds = set()
        for name, tensor in self.checkpoint.tensors.items():
            if name.startswith(self.trunk + "layers."):
                if name.endswith(".weight_packed") or (name.endswith(".weight") and tensor.dtype == "U8"):
                    kinds.add("nvfp4")
                elif name.endswith(".weight") and tensor.dtype == "F8_E4M3":
                    kinds.add("fp8")
        return kinds

    def head_name(self) -> str:
        """The linear of the output head; the embedding when the checkpoint ties them."""
        for name in HEADS:
            if name + ".weight" in self.checkpoint or name + ".weight_packed" in self.checkpoint:
                return name
        if self.dims.tied:
            return self.trunk + "embed_tokens"
        raise ConfigError("checkpoint has no lm_head.weight and its configuration does not tie the embeddings")

    def linear(self, name: str, rows: int, columns: int) -> Linear:
        """The linear `name`, checked to be [rows, columns]."""
        linear = self._linears.get(name)
        if linear is None or (linear.rows, linear.columns) != (rows, columns):
            linear = find_linear(self.checkpoint, name, rows, columns, self.notes)
            self._linears[name] = linear
            self.use_linear(name)
        return linear

    def use_linear(self, name: str) -> None:
        """Count the tensors of a linear as used."""
        self.used.update(part for suffix in SUFFIXES if (part := f"{name}.{suffix}") in self.checkpoint)

    def tensor(self, name: str, shape: tuple[int, ...]) -> SourceTensor:
        tensor = self.checkpoint.tensor(name)
        if tensor.shape != shape:
            raise ConfigError(f"tensor {quoted(name)} has shape {list(tensor.shape)}; {list(shape)} is needed")
        self.used.add(name)
        return tensor

    def unused(self) -> list[str]:
        """Tensors that nothing was made of."""
        return sorted(n for n in self.checkpoint if n not in self.used)

    # -- matrices

    def stack(self, name: str, shape: tuple[int, ...], draft_ids: Array | None = None) -> Stack:
        """The rows that make matrix object `name` of `shape`. Errors: ConfigError naming the tensor."""
        return Stack(list(self._pieces(name, shape, draft_ids)))

    def _pieces(self, name: str, shape: tuple[int, ...], draft_ids: Array | None) -> Iterator[Piece]:
        rows, columns = shape
        if name == "text/token_embedding":
            yield self._whole(self.trunk + "embed_tokens", rows, columns)
        elif name == "text/output_head":
            yield self._whole(self.head_name(), rows, columns)
        elif name == "text/draft_head":
            assert draft_ids is not None
            head = self.linear(self.head_name(), self.dims.vocabulary, columns)
            for row in draft_ids.tolist():
                yield Piece(head, row, row + 1)
        elif name == "mtp/input_projection":
            yield self._whole("mtp.fc", rows, columns)
        elif name.startswith("vision/"):
            yield self._whole(self.tower_name(name).removesuffix(".weight"), rows, columns)
        else:
            prefix, leaf = self.layer(name)
            yield from self._layer_pieces(prefix, leaf, name, rows, columns)

    def _whole(self, name: str, rows: int, columns: int) -> Piece:
        return Piece(self.linear(name, rows, columns), 0, rows)

    def layer(self, name: str) -> tuple[str, str]:
        """Checkpoint prefix and object suffix of an object of a text or MTP layer."""
        if name.startswith("mtp/layer/"):
            return "mtp.layers.0.", name.removeprefix("mtp/layer/")
        _, _, index, leaf = name.split("/", 3)
        return f"{self.trunk}layers.{int(index)}.", leaf

    def _layer_pieces(self, prefix: str, leaf: str, name: str, rows: int, columns: int) -> Iterator[Piece]:
        site, _, parts = leaf.partition("/")
        if leaf in WHOLE:
            yield self._whole(prefix + WHOLE[leaf], rows, columns)
        elif leaf == "mlp/gate_up":
            for part in ("gate", "up"):
                yield self._whole(f"{prefix}mlp.{part}_proj", rows // 2, columns)
        elif leaf == "gdn/a_b_projection":
            for part in ("a", "b"):
                yield self._whole(f"{prefix}linear_attn.in_proj_{part}", rows // 2, columns)
        elif site == "attention":
            for part in parts.split("_"):
                yield from self._attention(prefix + "self_attn.", part, columns)
        elif site == "gdn":
            for part in parts.split("_"):
                yield self._gdn(prefix + "linear_attn.", part, columns)
        else:
            raise ConfigError(f"object {quoted(name)} has no source rule")

    def _attention(self, prefix: str, part: str, columns: int) -> Iterator[Piece]:
        """q_proj holds, head by head, head_dim query rows and then head_dim gate rows."""
        if part in ("key", "value"):
            yield self._whole(f"{prefix}{part[0]}_proj", self.dims.kv_width, columns)
            return
        linear = self.linear(prefix + "q_proj", 2 * self.dims.query_width, columns)
        dim, shift = self.dims.head_dim, {"query": 0, "gate": self.dims.head_dim}[part]
        for head in range(self.dims.heads):
            begin = 2 * dim * head + shift
            yield Piece(linear, begin, begin + dim)

    def _gdn(self, prefix: str, part: str, columns: int) -> Piece:
        key, value = self.dims.key_width, self.dims.value_width
        if part == "z":
            return self._whole(prefix + "in_proj_z", value, columns)
        linear = self.linear(prefix + "in_proj_qkv", 2 * key + value, columns)
        begin, end = {"query": (0, key), "key": (key, 2 * key), "value": (2 * key, 2 * key + value)}[part]
        return Piece(linear, begin, end)

    def tower_name(self, name: str) -> str:
        """The checkpoint tensor of a vision object."""
        rest = name.removeprefix("vision/")
        if rest in VISION_NAMES:
            return f"{self.tower}{VISION_NAMES[rest]}"
        rest = rest.replace("layers/", "blocks/")
        for ours, theirs in VISION_PARTS:
            if rest.endswith((ours, ours + "_bias")):
                kind = "bias" if rest.endswith("_bias") else "weight"
                site = rest.removesuffix("_bias").removesuffix(ours)
                return f"{self.tower}{site.replace('/', '.')}{theirs}.{kind}"
        return f"{self.tower}{rest.replace('/', '.')}"  # norm1/weight, merger/norm/bias

    # -- everything else

    def array(self, name: str, shape: tuple[int, ...], format: str) -> Callable[[], Array]:
        """A function that reads a norm, gate, bias or table object as words of `format` (BF16 or FP32).

        Names, shapes and types are checked at once, values when the function is called. Errors: ConfigError,
        FormatError for values that BF16 does not hold exactly.
        """
        source, stored = self._array_name(name), shape
        if name.endswith("gdn/convolution"):
            stored = (shape[1], 1, shape[0])
        tensor = self.tensor(source, stored)
        if tensor.dtype not in ("BF16", "F16", "F32"):
            raise ConfigError(f"tensor {quoted(source)} is {tensor.dtype}; BF16 is needed")

        def read() -> Array:
            values = self.checkpoint.read(tensor)
            if name.endswith("gdn/convolution"):
                values = np.ascontiguousarray(values[:, 0, :].T)
            if format == "FP32":
                wide = bf16_to_f32(values) if values.dtype == np.uint16 else values.astype(np.float32)
                return wide.view(np.uint32)
            return exact_bf16(values, source)

        return read

    def _array_name(self, name: str) -> str:
        if name == "text/final_norm":
            return self.trunk + "norm.weight"
        if name in MTP_VECTORS:
            return MTP_VECTORS[name]
        if name.startswith("vision/"):
            return self.tower_name(name)
        prefix, leaf = self.layer(name)
        if leaf not in VECTORS:
            raise ConfigError(f"object {quoted(name)} has no source rule")
        return prefix + VECTORS[leaf]
