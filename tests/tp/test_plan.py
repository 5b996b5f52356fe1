"""The shard plan: what the ranks hold, put together, is every stored object; illegal widths are refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from artifacts import Identity
from artifacts.container.schema import TensorObject, place
from artifacts.identities.parameters import DIVISOR_SUFFIX, bindings_of
from artifacts.identities.registry import REGISTRY
from artifacts.layouts import get_layout
from compiler.build import TextBuilder
from compiler.driver import CompileOptionError, CompileOptions, limits_of, model_of, phase_requests
from compiler.ir.graph import check
from compiler.ir.types import Kind
from compiler.model import bind
from compiler.passes.shard import Sharder, concatenated
from compiler.shard.plan import (
    COLUMNS,
    ROWS,
    ShardDims,
    ShardError,
    check_width,
    even_ranges,
    object_cut,
    object_parts,
    parameter_cut,
)
from tests import models

DIMS_27B = ShardDims(24, 4, 256, 16, 48, 128, 128, 17408)


def inventory(identity: Identity) -> tuple[dict[str, TensorObject], dict[str, list[tuple[str, int, int]]], ShardDims]:
    entry = REGISTRY[identity]
    placed = {o.name: o for o in place(entry.plan()) if isinstance(o, TensorObject) and not o.name.endswith(DIVISOR_SUFFIX)}
    widths = {name: int(np.prod(o.shape[1:], dtype=np.int64)) for name, o in placed.items()}
    bindings = bindings_of(placed.values(), entry.text, entry.drafter)
    return placed, object_parts(bindings, widths), ShardDims.of(entry.text, entry.drafter)


def logical_ranges(parts: list[tuple[str, int, int]], shape: tuple[int, ...], dims: ShardDims, tp: int,
                   rank: int) -> tuple[str, list[tuple[int, int]]]:  # fmt: skip
    """Axis and ranges of an object, from its parameters."""
    out: list[tuple[int, int]] = []
    axis = "whole"
    for name, begin, end in dict(((b, e), (n, b, e)) for n, b, e in parts).values():
        cut = parameter_cut(name, (end - begin, *shape[1:]), dims, tp, rank)
        axis = cut.axis
        if axis == ROWS:
            out += [(begin + a, begin + b) for a, b in cut.ranges]
        elif axis == COLUMNS:
            out = list(cut.ranges)
    return axis, out


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("identity", REGISTRY, ids=str)
def test_ranks_cover_every_object_once(identity: Identity, tp: int) -> None:
    """Row and column ranges of all ranks partition the cut axis; every layout accepts the cut; half the bytes each."""
    placed, parts, dims = inventory(identity)
    if tp > dims.kv_heads:
        with pytest.raises(ShardError, match="KV heads"):
            check_width(dims, tp)
        return
    assert set(parts) == set(placed)
    cut = 0
    for name, obj in placed.items():
        shards = [object_cut(parts[name], obj.shape, obj.format, obj.layout, dims, tp, rank) for rank in range(tp)]
        if shards[0] is None:
            assert shards == [None] * tp
            continue
        cut += 1
        axis = logical_ranges(parts[name], obj.shape, dims, tp, 0)[0]
        ranges = sorted(r for rank in range(tp) for r in logical_ranges(parts[name], obj.shape, dims, tp, rank)[1])
        extent = obj.shape[0] if axis == ROWS else obj.shape[-1]
        if axis == COLUMNS:
            assert len({s.shape for s in shards if s}) == 1
        assert ranges[0][0] == 0 and ranges[-1][1] == extent
        assert all(a[1] == b[0] for a, b in zip(ranges, ranges[1:], strict=False)), name
        for shard in shards:
            assert shard is not None
            narrow = (obj.shape[0] // tp, *obj.shape[1:]) if axis == ROWS else (*obj.shape[:-1], obj.shape[-1] // tp)
            assert shard.shape == narrow
            assert all(s.source >= 0 and s.source + s.width <= obj.bytes for s in shard.spans)
    assert cut > 200


@pytest.mark.parametrize("identity", REGISTRY, ids=str)
def test_shards_of_random_bytes_join_to_the_original(identity: Identity) -> None:
    """Per kind of object (role, format, shape): encode random bytes at a quarter of both axes, cut for two ranks, decode
    and put the parts back: the very fields of the original. Objects that cannot be shrunk are cut whole where small."""
    placed, parts, dims = inventory(identity)
    rng = np.random.default_rng(7)
    seen: set[Any] = set()
    checked = 0
    for name, obj in placed.items():
        kind = (tuple(p.rpartition("/")[2] for p, _, _ in parts[name][:4]), obj.format, obj.shape)
        if kind in seen or len(obj.shape) == 0:
            continue
        seen.add(kind)
        axis, _ = logical_ranges(parts[name], obj.shape, dims, 2, 0)
        if axis == "whole":
            continue
        layout = get_layout(obj.layout)
        # narrow the axis that is not cut: its extent does not matter to the cut
        shape = (obj.shape[0], 128) if axis == ROWS and len(obj.shape) == 2 else (128, obj.shape[1]) if (
            axis == COLUMNS and obj.shape[0] > 128) else obj.shape  # fmt: skip
        ranges = [logical_ranges(parts[name], obj.shape, dims, 2, rank)[1] for rank in range(2)]
        if shape[0] * (shape[1] if len(shape) > 1 else 1) > 1 << 24:
            shape = shape[:1] + (64,) if obj.format == "BF16" else shape
        size = layout.encoded_size(obj.format, shape)
        if size > 40 << 20:
            continue
        raw = rng.integers(0, 256, size, dtype=np.uint8)
        whole = layout.unpack_rows(obj.format, shape, raw, 0, shape[0])
        joined = {field: np.zeros_like(value) for field, value in whole.items()}
        for rank in range(2):
            rows, columns = (ranges[rank], None) if axis == ROWS else (None, ranges[rank])
            narrow, data = layout.slice(obj.format, shape, raw, rows, columns)
            fields = layout.unpack_rows(obj.format, narrow, data, 0, narrow[0])
            at = 0
            for begin, end in ranges[rank]:
                for field, value in fields.items():
                    target = joined[field]
                    if value.ndim == 0 or (axis == COLUMNS and value.ndim == 1):
                        target[...] = value  # a divisor or a row scale: the same on both ranks
                    elif axis == ROWS:
                        target[begin:end] = value[at : at + end - begin]
                    else:
                        unit = shape[1] // target.shape[1]
                        target[:, begin // unit : end // unit] = value[:, at // unit : (at + end - begin) // unit]
                at += end - begin
        for field in whole:
            assert joined[field].tobytes() == whole[field].tobytes(), (name, field)
        checked += 1
    assert checked >= 8


def test_ranges_of_the_published_table() -> None:
    """spec/tp2.md §3: the fused orders that obvious readings get wrong."""
    cut = parameter_cut("text/layers/0/gdn/convolution", (4, 10240), DIMS_27B, 2, 1)
    assert cut.ranges == ((1024, 2048), (3072, 4096), (7168, 10240))
    names = ("query", "key", "gate", "value")
    rows = [parameter_cut(f"text/layers/3/attention/{n}", (w, 5120), DIMS_27B, 2, 1).ranges
            for n, w in zip(names, (6144, 1024, 6144, 1024), strict=True)]  # fmt: skip
    assert rows == [((3072, 6144),), ((512, 1024),), ((3072, 6144),), ((512, 1024),)]
    assert parameter_cut("text/layers/0/gdn/output", (5120, 6144), DIMS_27B, 2, 0) == parameter_cut(
        "text/layers/3/attention/output", (5120, 6144), DIMS_27B, 2, 0)  # fmt: skip
    assert parameter_cut("text/output_head", (248320, 5120), DIMS_27B, 2, 1).ranges == ((124160, 248320),)
    assert parameter_cut("mtp/input_projection", (5120, 10240), DIMS_27B, 2, 1).ranges == ((5120, 10240),)


def test_refusals_name_the_rule() -> None:
    for tp, rule in ((3, "power of two"), (8, "KV heads"), (0, "power of two")):
        with pytest.raises(ShardError, match=rule):
            check_width(DIMS_27B, tp)
    with pytest.raises(ShardError, match="no shard rule"):
        parameter_cut("text/layers/0/unheard_of", (5, 5), DIMS_27B, 2, 0)
    assert parameter_cut("text/layers/0/unheard_of", (5, 5), DIMS_27B, 1, 0).axis == "whole"
    with pytest.raises(ShardError, match="dimensions give"):
        parameter_cut("text/layers/0/mlp/down", (5120, 17000), DIMS_27B, 2, 0)
    narrow = ShardDims(24, 4, 256, 16, 48, 128, 128, 64)
    with pytest.raises(ShardError, match="128 rows"):
        object_cut([("text/layers/0/mlp/gate", 0, 64), ("text/layers/0/mlp/up", 64, 128)], (128, 5120), "NVFP4",
                   "blockscale-k16-m128x4-v1", narrow, 2, 0)  # fmt: skip
    with pytest.raises(ShardError, match="128 columns"):
        object_cut([("text/layers/0/mlp/down", 0, 128)], (128, 64), "Q4G64_F16S", "row-split-k128-v1", narrow, 2, 0)
    for name, tp, rule in (("dense-prod-heads", 2, "GDN key heads"), ("dense-small", 4, "KV heads"),
                           ("dense-small", 3, "power")):  # fmt: skip
        with pytest.raises(CompileOptionError, match=f"--tp {tp}: .*{rule}"):
            models.program(name, tp=tp, prefill_chunk=128)


def test_kernels_run_on_two_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A width that the plan allows and kernels do not is refused with that rule, not somewhere inside the compiler."""
    monkeypatch.setattr("compiler.driver.check_width", lambda dims, tp: None)
    with pytest.raises(CompileOptionError, match="--tp 4: 1 or 2 is allowed; .* kernels exchange between 2"):
        models.program("dense-small", tp=4, prefill_chunk=128)


def test_concatenated_ranges() -> None:
    assert concatenated(((10, 20), (40, 60)), ((5, 15),)) == ((15, 20), (40, 45))
    assert concatenated(((0, 8),), ((0, 4), (4, 8))) == ((0, 8),)
    assert even_ranges((8, 4), 2, 1) == ((4, 8), (10, 12))


@pytest.mark.parametrize("name", ["dense-small", "example"])
def test_the_pass_cuts_as_the_plan_says(name: str) -> None:
    """The pass reads the cuts off the graph, the plan off the parameters' names: both must agree on every weight."""
    artifact = models.artifact(name, "bf16")
    spec = model_of(artifact)
    options = CompileOptions(max_context=256, prefill_chunk=128)
    limits = limits_of(spec, options)
    builder = TextBuilder(spec, bind(artifact, spec), limits, 64)
    sharder = Sharder(spec, 2, builder.shared)
    for request in phase_requests(limits, options):
        check(sharder.run(check(builder.build(request))))
    parameters = [f"text/{n}" for n in ("token_embedding", "output_head", "final_norm")]
    for layer, kind in enumerate(spec.layer_types):
        mixer = ("attention", ("query", "key", "gate", "value", "query_norm", "key_norm", "output"))
        if kind != "full_attention":
            mixer = ("gdn", ("query", "key", "value", "z", "a_projection", "b_projection", "a_log", "dt_bias", "convolution",
                             "norm", "output"))  # fmt: skip
        leaves = [f"{mixer[0]}/{leaf}" for leaf in mixer[1]]
        leaves += ["mlp/gate", "mlp/up", "mlp/down", "input_norm", "post_attention_norm"]
        parameters += [f"text/layers/{layer}/{leaf}" for leaf in leaves]
    for rank in range(2):
        wanted: dict[tuple[int, str], set[int]] = {}
        for parameter in parameters:
            for obj, begin, end in artifact.parameter(parameter):
                cut = parameter_cut(parameter, (end - begin, *obj.shape[1:]), ShardDims.of(spec), 2, rank)
                ranges = cut.ranges if cut.axis != "whole" else ((0, end - begin),)
                key = (artifact.object_index(obj.name), "cols" if cut.axis == COLUMNS else "rows")
                shift = 0 if cut.axis == COLUMNS else begin
                for a, b in ranges:
                    wanted.setdefault(key, set()).update(range(shift + a, shift + b))
        held: dict[tuple[int, str], set[int]] = {}
        for value in sharder.shared.values():
            if value.kind is Kind.WEIGHT and value.rank == rank:
                assert value.source is not None
                for axis in ("rows", "cols"):
                    for a, b in getattr(value.source, axis):
                        held.setdefault((value.source.object_index, axis), set()).update(range(a, b))
        for key, rows in wanted.items():
            assert held[key] == rows, key
