"""The shard plan: row and column ranges per rank as a pure function of (parameter, width, dimensions).

Column-parallel into a mixer or MLP, row-parallel out of it, heads never cut, the hidden axis never cut (spec/tp2.md §3).
A shard is the stand-alone encoding of the parent with one axis narrowed, cut at bytes, never repacked (§4).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from artifacts.errors import LayoutError
from artifacts.layouts import Shard, get_layout
from compiler.ir.types import IRError

Range = tuple[int, int]
WHOLE, ROWS, COLUMNS = "whole", "rows", "columns"


class ShardError(IRError):
    """A model cannot be cut for this many ranks; names the parameter or dimension and the rule."""


@dataclass(frozen=True)
class ShardDims:
    """Dimensions that the plan looks at. ``moe``: expert widths (routed, shared), 0 in a dense model; ``draft``: query
    heads, KV heads, head width and MLP width of a drafter, zeros without one."""

    heads: int
    kv_heads: int
    head_dim: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    intermediate: int
    moe: tuple[int, int] = (0, 0)
    draft: tuple[int, int, int, int] = (0, 0, 0, 0)

    @staticmethod
    def of(dims: Any, drafter: Any = None) -> ShardDims:
        """From a ModelSpec or the dimensions of an artifact (TextDims), and those of its drafter."""
        moe = (getattr(dims, "moe_intermediate", 0), getattr(dims, "shared_intermediate", 0))
        draft = (drafter.heads, drafter.kv_heads, drafter.head_dim, drafter.intermediate) if drafter else (0, 0, 0, 0)
        return ShardDims(dims.heads, dims.kv_heads, dims.head_dim, dims.key_heads, dims.value_heads, dims.key_dim,
                         dims.value_dim, dims.intermediate, moe, draft)  # fmt: skip


@dataclass(frozen=True)
class Cut:
    """What one rank holds of a parameter: ``axis`` WHOLE, ROWS or COLUMNS and the half-open ranges of that axis."""

    axis: str
    ranges: tuple[Range, ...] = ()


def check_width(dims: ShardDims, tp: int) -> None:
    """Raise ShardError when ``tp`` ranks cannot share a model of these dimensions."""
    if tp < 1 or tp & (tp - 1):
        raise ShardError(f"--tp {tp}: a power of two is needed")
    if tp > dims.kv_heads:
        raise ShardError(f"--tp {tp}: the model has {dims.kv_heads} KV heads and a head is never cut; at most that many ranks")
    for name, heads in (("query", dims.heads), ("KV", dims.kv_heads), ("GDN key", dims.key_heads),
                        ("GDN value", dims.value_heads)):  # fmt: skip
        if heads % tp:
            raise ShardError(f"--tp {tp}: {heads} {name} heads cannot be shared evenly, a head is never cut")


def even_ranges(sections: Sequence[int], tp: int, rank: int) -> tuple[Range, ...]:
    """Rank's part of an axis made of ``sections`` (widths), each cut into ``tp`` equal parts. Raises ShardError."""
    ranges: list[Range] = []
    at = 0
    for width in sections:
        if width % tp:
            raise ShardError(f"{width} cannot be cut into {tp} equal parts")
        part = width // tp
        begin = at + rank * part
        if ranges and ranges[-1][1] == begin:
            ranges[-1] = (ranges[-1][0], begin + part)
        else:
            ranges.append((begin, begin + part))
        at += width
    return tuple(ranges)


def _replicated(name: str, leaf: str) -> bool:
    if leaf.endswith("norm") or name.startswith("vision/") or name in ("text/token_embedding", "proposal/token_ids"):
        return True
    if name.startswith(("dflash/", "dflash2/")):  # convolutions, feature projection and candidate selector stay whole
        return not any(f"/{part}/" in name for part in ("attention", "mlp"))
    return leaf in ("router", "shared_score")


def _attention(leaf: str, heads: int, kv_heads: int, dim: int) -> tuple[str, tuple[int, ...]] | None:
    if leaf in ("query", "gate"):
        return ROWS, (heads * dim,)
    if leaf in ("key", "value", "context_key", "context_value"):
        return ROWS, (kv_heads * dim,)
    return (COLUMNS, (heads * dim,)) if leaf == "output" else None


def _rule(name: str, shape: Sequence[int], dims: ShardDims) -> tuple[str, tuple[int, ...]] | None:
    """Axis and sections of that axis, None for an unknown parameter."""
    site, _, leaf = name.rpartition("/")
    module = site.rpartition("/")[2]
    draft = name.startswith(("dflash/", "dflash2/"))
    if _replicated(name, leaf):
        return WHOLE, ()
    if name in ("text/output_head", "proposal/head"):
        return ROWS, (shape[0],)
    if name == "mtp/input_projection":  # rank r consumes its half of [embedding norm | hidden norm]
        return COLUMNS, (shape[1],)
    if module == "attention":
        return _attention(leaf, *(dims.draft[:3] if draft else (dims.heads, dims.kv_heads, dims.head_dim)))
    if module == "gdn":
        key, value = dims.key_heads * dims.key_dim, dims.value_heads * dims.value_dim
        table = {"query": (ROWS, (key,)), "key": (ROWS, (key,)), "value": (ROWS, (value,)), "z": (ROWS, (value,)),
                 "a_projection": (ROWS, (dims.value_heads,)), "b_projection": (ROWS, (dims.value_heads,)),
                 "a_log": (ROWS, (dims.value_heads,)), "dt_bias": (ROWS, (dims.value_heads,)),
                 "convolution": (COLUMNS, (key, key, value)), "output": (COLUMNS, (value,))}  # fmt: skip
        return table.get(leaf)
    if module == "mlp" or "/moe/" in name:
        width = dims.moe[module == "shared"] if "/moe/" in name else dims.draft[3] if draft else dims.intermediate
        return {"gate": (ROWS, (width,)), "up": (ROWS, (width,)), "down": (COLUMNS, (width,))}.get(leaf)
    return None


def parameter_cut(name: str, shape: Sequence[int], dims: ShardDims, tp: int, rank: int) -> Cut:
    """What ``rank`` of ``tp`` holds of the logical parameter ``name`` of ``shape``.

    Width 1 keeps every parameter whole, unknown names included. Raises ShardError for an unknown name, an illegal width,
    or a shape that is not the one the dimensions give."""
    if tp == 1:
        return Cut(WHOLE)
    check_width(dims, tp)
    if not 0 <= rank < tp:
        raise ShardError(f"rank {rank} is outside 0…{tp - 1}")
    found = _rule(name, shape, dims)
    if found is None:
        raise ShardError(f"parameter {name!r} has no shard rule")
    axis, sections = found
    if axis == WHOLE:
        return Cut(WHOLE)
    extent = shape[0] if axis == ROWS else shape[-1]
    if sum(sections) != extent:
        raise ShardError(f"parameter {name!r} has {extent} {axis}, the dimensions give {sum(sections)}")
    try:
        return Cut(axis, even_ranges(sections, tp, rank))
    except ShardError as error:
        raise ShardError(f"--tp {tp}: parameter {name!r}: {error}") from error


def object_cut(parts: Sequence[tuple[str, int, int]], shape: Sequence[int], format: str, layout: str, dims: ShardDims, tp: int,
               rank: int) -> Shard | None:  # fmt: skip
    """The byte shard of one stored object that holds ``parts`` (parameter, first row, end row) for ``rank``; None: whole.

    Parameters that share rows count once. Raises ShardError where the layout forbids the cut, naming its rule."""
    rows: list[Range] = []
    columns: set[tuple[Range, ...]] = set()
    axes: set[str] = set()
    seen: set[Range] = set()
    for name, begin, end in parts:
        if (begin, end) in seen:
            continue
        seen.add((begin, end))
        cut = parameter_cut(name, (end - begin, *shape[1:]), dims, tp, rank)
        axes.add(cut.axis)
        if cut.axis == ROWS:
            for a, b in cut.ranges:
                rows.append((begin + a, begin + b))
        elif cut.axis == COLUMNS:
            columns.add(cut.ranges)
    what = f"object of {', '.join(name for name, _, _ in parts[:4])}"
    if axes == {WHOLE}:
        return None
    if len(axes) != 1 or len(columns) > 1:
        raise ShardError(f"{what}: its parameters are cut in different ways")
    try:
        cut_columns = list(columns.pop()) if columns else None
        return get_layout(layout).shard(format, shape, rows or None, cut_columns)
    except LayoutError as error:
        raise ShardError(f"--tp {tp}: {what}: {error}") from error


def object_parts(bindings: Mapping[str, Any], widths: Mapping[str, int]) -> dict[str, list[tuple[str, int, int]]]:
    """(parameter, first row, end row) by object, in row order, from an artifact's bindings (parameter → parts counted in
    elements) and the elements of one row of each object. Works for every container version."""
    out: dict[str, list[tuple[str, int, int]]] = {}
    for parameter, binding in bindings.items():
        for part in binding.parts:
            width = widths[part.object]
            if part.begin % width or part.end % width:
                raise ShardError(f"parameter {parameter!r}: elements {part.begin}…{part.end} are no whole rows")
            out.setdefault(part.object, []).append((parameter, part.begin // width, part.end // width))
    for parts in out.values():
        parts.sort(key=lambda part: (part[1], part[2]))
    return out
