"""Bind logical parameters to the artifact's objects.

A *product* is one matrix product over one object: the parameters of a projection group that lie in the same object
are computed together, each is a section of the product's output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from artifacts.errors import ArtifactError
from compiler.ir.types import WeightSource
from compiler.model.spec import ModelError, ModelSpec


class ArtifactLike(Protocol):
    """The part of ``artifacts.Artifact`` that binding needs."""

    def parameter(self, name: str) -> Sequence[tuple[Any, int, int]]:
        """Row-range views (object, first row, end row) whose concatenation is the parameter."""

    def object_index(self, name: str) -> int:
        """Position of an object in the directory."""


@dataclass(frozen=True)
class Section:
    """Rows of one parameter inside a product's output."""

    parameter: str
    offset: int
    rows: int


@dataclass(frozen=True)
class Product:
    """One object (or row ranges of it) and the parameters its rows hold, in output order."""

    source: WeightSource
    sections: tuple[Section, ...]

    @property
    def shape(self) -> tuple[int, int]:
        rows = sum(end - begin for begin, end in self.source.rows)
        cols = sum(end - begin for begin, end in self.source.cols)
        return rows, cols


@dataclass(frozen=True)
class Binding:
    """All weights of the text model. Vectors and control matrices are single sources."""

    embedding: Product
    head: Product
    final_norm: WeightSource
    layers: tuple[dict[str, Any], ...]


def _matrix_views(artifact: ArtifactLike, name: str, rows: int, cols: int) -> Sequence[tuple[Any, int, int]]:
    try:
        views = artifact.parameter(name)
    except (KeyError, ArtifactError) as error:
        raise ModelError(f"artifact has no parameter {name} ({error})") from error
    if not views:
        raise ModelError(f"artifact has no parameter {name}")
    total = 0
    for obj, begin, end in views:
        width = obj.shape[-1] if len(obj.shape) == 2 else (1 if rows == obj.shape[0] else 0)
        if len(obj.shape) != 2 or width != cols or not 0 <= begin < end <= obj.shape[0]:
            raise ModelError(f"parameter {name}: object of shape {tuple(obj.shape)} rows {begin}…{end} does not give "
                             f"[{rows}, {cols}]")  # fmt: skip
        total += end - begin
    if total != rows:
        raise ModelError(f"parameter {name} has {total} rows, {rows} are needed")
    return views


def _source(artifact: ArtifactLike, obj: Any, rows: tuple[tuple[int, int], ...]) -> WeightSource:
    shape = tuple(obj.shape)
    return WeightSource(artifact.object_index(obj.name), obj.format, obj.layout, shape, rows, ((0, shape[-1]),))


def products(artifact: ArtifactLike, parameters: Sequence[tuple[str, int]], cols: int) -> tuple[Product, ...]:
    """Group ``parameters`` (name, rows), all [rows, cols], by object. Order: first appearance; inside a product by
    the order given, which is the order of rows in every published file.

    Raises ModelError when a parameter is missing, has another shape or lies in several objects.
    """
    groups: dict[int, tuple[Any, list[tuple[int, int]], list[Section]]] = {}
    for name, rows in parameters:
        views = _matrix_views(artifact, name, rows, cols)
        indices = {artifact.object_index(obj.name) for obj, _, _ in views}
        if len(indices) != 1:
            raise ModelError(f"parameter {name} lies in {len(indices)} objects; one is supported")
        _, ranges, sections = groups.setdefault(indices.pop(), (views[0][0], [], []))
        offset = sum(end - begin for begin, end in ranges)
        for _, begin, end in views:
            if ranges and ranges[-1][1] == begin:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((begin, end))
        sections.append(Section(name, offset, rows))
    return tuple(Product(_source(artifact, obj, tuple(ranges)), tuple(sections))
                 for obj, ranges, sections in groups.values())  # fmt: skip


def vector(artifact: ArtifactLike, name: str, shape: tuple[int, ...], format_: str) -> WeightSource:
    """A whole direct object of exactly ``shape`` and ``format_`` (BF16 or FP32). Raises ModelError."""
    try:
        views = artifact.parameter(name)
    except (KeyError, ArtifactError) as error:
        raise ModelError(f"artifact has no parameter {name} ({error})") from error
    if len(views) != 1 or tuple(views[0][0].shape) != shape or views[0][0].format != format_:
        found = [(tuple(view[0].shape), view[0].format) for view in views]
        raise ModelError(f"parameter {name}: found {found}, one {format_} object of shape {shape} is needed")
    obj = views[0][0]
    return WeightSource(artifact.object_index(obj.name), obj.format, obj.layout, shape, ((0, shape[0]),),
                        ((0, shape[-1]),))  # fmt: skip


def bind(artifact: ArtifactLike, spec: ModelSpec) -> Binding:
    """Bind every weight of the text decoder by the logical names of spec/artifact-container-v3.md §7.

    Raises ModelError naming the first parameter that is missing or has another shape or format.
    """
    h = spec.hidden
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    k_rows, v_rows = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    layers: list[dict[str, Any]] = []
    for index in range(len(spec.layer_types)):
        base = f"text/layers/{index}/"
        layer: dict[str, Any] = {
            "input_norm": vector(artifact, base + "input_norm", (h,), "BF16"),
            "post_attention_norm": vector(artifact, base + "post_attention_norm", (h,), "BF16"),
            "gate_up": products(artifact, [(base + "mlp/gate", spec.intermediate), (base + "mlp/up", spec.intermediate)],
                                h),
            "down": products(artifact, [(base + "mlp/down", h)], spec.intermediate),
        }  # fmt: skip
        if index in spec.attention_layers:
            a = base + "attention/"
            layer["in"] = products(artifact, [(a + "query", q_rows), (a + "key", kv_rows), (a + "gate", q_rows),
                                              (a + "value", kv_rows)], h)  # fmt: skip
            layer["query_norm"] = vector(artifact, a + "query_norm", (spec.head_dim,), "BF16")
            layer["key_norm"] = vector(artifact, a + "key_norm", (spec.head_dim,), "BF16")
            layer["out"] = products(artifact, [(a + "output", h)], q_rows)
        else:
            g = base + "gdn/"
            layer["in"] = products(artifact, [(g + "query", k_rows), (g + "key", k_rows), (g + "value", v_rows),
                                              (g + "z", v_rows)], h)  # fmt: skip
            layer["ab"] = products(artifact, [(g + "a_projection", spec.value_heads),
                                              (g + "b_projection", spec.value_heads)], h)  # fmt: skip
            layer["a_log"] = vector(artifact, g + "a_log", (spec.value_heads,), "FP32")
            layer["dt_bias"] = vector(artifact, g + "dt_bias", (spec.value_heads,), "FP32")
            layer["norm"] = vector(artifact, g + "norm", (spec.value_dim,), "BF16")
            layer["conv"] = vector(artifact, g + "convolution", (spec.conv_taps, spec.conv_channels), "BF16")
            layer["out"] = products(artifact, [(g + "output", h)], v_rows)
        if len(layer["gate_up"]) != 1 or len(layer["gate_up"][0].source.rows) != 1:
            raise ModelError(f"parameters {base}mlp/gate and mlp/up must be consecutive rows of one object")
        layers.append(layer)
    return Binding(
        embedding=products(artifact, [("text/token_embedding", spec.vocab_rows)], h)[0],
        head=products(artifact, [("text/output_head", spec.vocab_rows)], h)[0],
        final_norm=vector(artifact, "text/final_norm", (h,), "BF16"),
        layers=tuple(layers),
    )
