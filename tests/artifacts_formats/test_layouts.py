"""Storage layouts: the worked examples and tables of the specification, round trips, row blocks, shards, padding."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from artifacts.errors import FormatError, LayoutError, PayloadError
from artifacts.formats import FORMATS, EncodedTensor, GroupedIntFormat, get_format
from artifacts.layouts import LAYOUTS, RAW_BYTES, V3_LAYOUTS, Shard, Span, decode, decode_rows, get_layout, layout_of

QUANTIZED = [n for n, f in FORMATS.items() if f.kind != "direct"]
GROUPED = [n for n, f in FORMATS.items() if isinstance(f, GroupedIntFormat)]


def random_tensor(name: str, shape: tuple[int, ...], seed: int = 0) -> EncodedTensor:
    """A tensor of uniformly random legal words."""
    rng, fmt = np.random.default_rng(seed), get_format(name)
    if fmt.kind == "direct":
        dtype = fmt.field_shapes(shape)["words"][1]
        info = np.iinfo(dtype)
        return EncodedTensor(name, shape, {"words": rng.integers(info.min, info.max, shape, dtype, endpoint=True)})
    rows, columns = shape
    if isinstance(fmt, GroupedIntFormat):
        codes = rng.integers(fmt.qmin, fmt.qmax, shape, np.int8, endpoint=True)
        scales = rng.integers(1, 0x7C00, (rows, fmt.groups(columns)), np.uint16)
        return EncodedTensor(name, shape, {"codes": codes, "scales": scales})
    if name == "NVFP4":
        codes = rng.integers(0, 16, shape, np.uint8)
        scales = rng.integers(0, 0x7F, (rows, columns // 16), np.uint8)
        return EncodedTensor(name, shape, {"codes": codes, "scales": scales, "divisor": np.asarray(np.float32(3.5))})
    codes = rng.integers(0, 0x7F, shape, np.uint8) | (rng.integers(0, 2, shape, np.uint8) << 7)
    return EncodedTensor(name, shape, {"codes": codes, "scales": rng.integers(1, 0x7F80, rows, np.uint16)})


def same(a: EncodedTensor, b: EncodedTensor) -> bool:
    keys = set(a.fields)
    return (a.format, a.shape, keys) == (b.format, b.shape, set(b.fields)) and all(
        a.fields[k].dtype == b.fields[k].dtype and np.array_equal(a.fields[k], b.fields[k]) for k in keys
    )


def legal_shape(name: str, rows: int, columns: int) -> tuple[int, int]:
    return (rows * 128, columns * 64) if name == "NVFP4" else (rows, columns)


# --- worked examples


@pytest.mark.parametrize(
    ("name", "shape", "values", "want"),
    [
        ("BF16", (2,), np.array([0x3F80, 0xC000], np.uint16), "803f00c0"),
        ("FP32", (), np.array(3.0, np.float32), "00004040"),
        ("I32", (1, 2), np.array([[-2, 258]], np.int32), "feffffff02010000"),
    ],
)
def test_contiguous_example(name: str, shape: tuple[int, ...], values: np.ndarray, want: str) -> None:
    tensor = FORMATS[name].encode(values)
    layout = layout_of(name)
    data = layout.pack(tensor)
    assert data.tobytes().hex() == want and layout.encoded_size(name, shape) == len(want) // 2
    assert same(layout.unpack(name, shape, data), tensor)
    assert decode(name, layout.name, shape, data).shape == shape


@pytest.mark.parametrize(
    ("name", "least", "size", "nonzero", "decoded"),
    [
        ("Q4G64_F16S", -8, 260, {0: 0xF1, 1: 0x08, 257: 0x38}, [0.5, -0.5, -4.0]),
        ("Q5G64_F16S", -16, 516, {0: 0xF1, 256: 0x06, 513: 0x38}, [0.5, -0.5, -8.0]),
        ("Q6G64_F16S", -32, 516, {0: 0xF1, 256: 0x2C, 513: 0x38}, [0.5, -0.5, -16.0]),
        ("W8G32_F16S", -127, 264, {0: 0x01, 1: 0xFF, 2: 0x81, 257: 0x38}, [0.5, -0.5, -63.5]),
    ],
)
def test_row_split_example(name: str, least: int, size: int, nonzero: dict[int, int], decoded: list[float]) -> None:
    fields = {"codes": np.array([[1, -1, least]], np.int8), "scales": np.array([[0x3800]], np.uint16)}
    layout = LAYOUTS["row-split-k128-v1"]
    data = layout.pack(EncodedTensor(name, (1, 3), fields))
    assert data.size == size == layout.encoded_size(name, (1, 3))
    assert {int(i): int(data[i]) for i in np.flatnonzero(data)} == nonzero
    assert decode(name, layout.name, (1, 3), data).tolist() == [decoded]


@pytest.mark.parametrize(
    ("name", "shape", "high_offset", "scale_offset", "size"),
    [
        ("Q4G64_F16S", (2, 130), 256, 256, 272), ("Q5G64_F16S", (2, 130), 256, 512, 528),
        ("Q6G64_F16S", (2, 130), 256, 512, 528), ("W8G32_F16S", (2, 130), 512, 512, 544),
        ("Q4G64_F16S", (3, 200), 512, 512, 536), ("Q5G64_F16S", (3, 200), 512, 768, 792),
        ("Q6G64_F16S", (3, 200), 512, 768, 792), ("W8G32_F16S", (3, 200), 768, 768, 816),
        ("Q4G64_F16S", (5120, 6144), 15728640, 15728640, 16711680),
        ("Q5G64_F16S", (5120, 6144), 15728640, 19660800, 20643840),
        ("Q6G64_F16S", (5120, 6144), 15728640, 23592960, 24576000),
        ("W8G32_F16S", (5120, 6144), 31457280, 31457280, 33423360),
    ],
)  # fmt: skip
def test_row_split_sizes(name: str, shape: tuple[int, int], high_offset: int, scale_offset: int, size: int) -> None:
    planes = {p.name: p for p in layout_of(name).planes(name, shape)}
    assert planes["scale"].offset == scale_offset and planes["scale"].end == size
    assert planes["high"].offset == high_offset if "high" in planes else high_offset == scale_offset


def test_block_scale_example() -> None:
    fields = {
        "codes": np.zeros((128, 64), np.uint8),
        "scales": np.zeros((128, 4), np.uint8),
        "divisor": np.asarray(np.float32(2)),
    }
    fields["codes"][0, 0], fields["codes"][0, 1], fields["codes"][127, 63] = 1, 2, 15
    fields["scales"][0, 0], fields["scales"][1, 0], fields["scales"][33, 2], fields["scales"][127, 3] = 56, 64, 48, 126
    layout = LAYOUTS["blockscale-k16-m128x4-v1"]
    data = layout.pack(EncodedTensor("NVFP4", (128, 64), fields))
    assert data.size == 4612 and data[4608:].tobytes().hex() == "00000040"
    nonzero = {int(i): int(data[i]) for i in np.flatnonzero(data[:4608])}
    assert nonzero == {0: 0x21, 4095: 0xF0, 4096: 0x38, 4112: 0x40, 4118: 0x30, 4607: 0x7E}
    values = decode("NVFP4", layout.name, (128, 64), data)
    assert values[0, :2].tolist() == [0.25, 0.5] and values[127, 63] == -1344


@pytest.mark.parametrize(
    ("row", "group", "offset"), [(0, 0, 0), (31, 0, 496), (32, 0, 4), (1, 3, 19), (0, 4, 512), (128, 0, 1024), (200, 7, 1675)]
)  # fmt: skip
def test_block_scale_swizzle(row: int, group: int, offset: int) -> None:
    shape = (256, 128)
    fields = {
        "codes": np.zeros(shape, np.uint8), "scales": np.zeros((256, 8), np.uint8), "divisor": np.asarray(np.float32(1))
    }  # fmt: skip
    fields["scales"][row, group] = 0x7E
    layout = LAYOUTS["blockscale-k16-m128x4-v1"]
    plane = layout.planes("NVFP4", shape)[1]
    data = layout.pack(EncodedTensor("NVFP4", shape, fields))[plane.offset : plane.end]
    assert np.flatnonzero(data).tolist() == [offset]


def test_row_scale_example() -> None:
    codes = np.array([[0x38, 0xB8, 0x01], [0x80, 0x7E, 0x08]], np.uint8)
    layout = LAYOUTS["row-scale-v1"]
    tensor = EncodedTensor(
        "FP8_E4M3FN_ROW_BF16S", (2, 3), {"codes": codes, "scales": np.array([0x3F00, 0x4000], np.uint16)}
    )
    data = layout.pack(tensor)
    assert data[:6].tobytes().hex() == "38b801807e08" and data[256:].tobytes().hex() == "003f0040" and data.size == 260
    assert not data[6:256].any()
    values = decode(tensor.format, layout.name, (2, 3), data)
    assert values.tolist() == [[0.5, -0.5, 0.0009765625], [-0.0, 896, 0.03125]] and np.signbit(values[1, 0])


def test_raw_bytes() -> None:
    assert RAW_BYTES.encoded_size(7) == 7 and RAW_BYTES.alignment == 1
    with pytest.raises(LayoutError):
        RAW_BYTES.encoded_size(0)


# --- names and pairs


def test_registry() -> None:
    assert list(LAYOUTS) == ["contiguous-le-v1", "row-split-k128-v1", "blockscale-k16-m128x4-v1", "row-scale-v1"]
    assert list(V3_LAYOUTS) == ["contiguous_le_v1", "row_split_k128_v1", "block_scale_k16_m128x4_v1", "row_scale_v1"]
    assert all(layout_of(f) is LAYOUTS[n] for n in LAYOUTS for f in LAYOUTS[n].formats)
    for name in ("row_split_k128_v1", "raw-bytes-v1", "x"):
        with pytest.raises(LayoutError, match="unknown layout"):
            get_layout(name)
    with pytest.raises(LayoutError):
        get_layout("row-split-k128-v1", version=3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FORMATS)
def test_only_the_listed_pairs_are_accepted(layout: str, name: str) -> None:
    shape = (128, 64)
    if name in LAYOUTS[layout].formats:
        assert LAYOUTS[layout].encoded_size(name, shape) > 0
    else:
        with pytest.raises(LayoutError, match="does not hold"):
            LAYOUTS[layout].encoded_size(name, shape)


def test_huge_shapes_cost_nothing() -> None:
    assert layout_of("Q4G64_F16S").encoded_size("Q4G64_F16S", (2**62, 2**62)) > 2**122
    with pytest.raises(LayoutError, match="takes"):
        decode_rows("Q4G64_F16S", "row-split-k128-v1", (2**62, 2**62), b"\0" * 100, 0, 1)
    with pytest.raises(LayoutError, match="takes"):
        decode("FP8_E4M3FN_ROW_BF16S", "row-scale-v1", (2**40, 2**40), b"\0" * 100)


# --- round trips


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 6), columns=st.integers(1, 300), seed=st.integers(0, 2**32 - 1))
def test_round_trip(name: str, rows: int, columns: int, seed: int) -> None:
    shape = legal_shape(name, min(rows, 3), min(columns, 5)) if name == "NVFP4" else (rows, columns)
    tensor, layout = random_tensor(name, shape, seed), layout_of(name)
    data = layout.pack(tensor)
    assert data.size == layout.encoded_size(name, shape)
    unpacked = layout.unpack(name, shape, data.tobytes())
    assert same(unpacked, tensor)
    assert np.array_equal(layout.pack(unpacked), data)
    layout.check_padding(name, shape, data, 0, shape[0])
    values = FORMATS[name].decode(tensor)
    assert np.array_equal(decode(name, layout.name, shape, data, threads=2), values, equal_nan=True)
    r0 = seed % shape[0]
    assert np.array_equal(decode_rows(name, layout.name, shape, data, r0, shape[0]), values[r0:], equal_nan=True)


@pytest.mark.parametrize("name", ["BF16", "FP32", "I32"])
@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 1, 4), (2, 3, 4, 5)])
def test_direct_round_trip_of_any_rank(name: str, shape: tuple[int, ...]) -> None:
    tensor, layout = random_tensor(name, shape), layout_of(name)
    data = layout.pack(tensor)
    assert same(layout.unpack(name, shape, data), tensor)
    assert decode(name, layout.name, shape, data).shape == shape


@pytest.mark.parametrize("name", FORMATS)
def test_row_blocks_in_any_order_write_the_same_bytes(name: str) -> None:
    shape = legal_shape(name, 3, 2) if name == "NVFP4" else (37, 130)
    tensor, layout = random_tensor(name, shape), layout_of(name)
    whole, out = layout.pack(tensor), np.full(layout.encoded_size(name, shape), 0xEE, np.uint8)
    for offset, length in layout.gaps(name, shape):
        out[offset : offset + length] = 0
    step = layout.row_unit if layout.row_unit > 1 else 10
    for r0 in reversed(range(0, shape[0], step)):
        block = {k: v if v.ndim == 0 else v[r0 : r0 + step] for k, v in tensor.fields.items()}
        for offset, data in layout.pack_rows(name, shape, r0, block):
            out[offset : offset + data.size] = data
    assert np.array_equal(out, whole)


def test_pack_rows_rejects_wrong_blocks() -> None:
    layout = layout_of("NVFP4")
    block = random_tensor("NVFP4", (128, 64)).fields
    for r0 in (64, 256, -128):
        with pytest.raises(LayoutError):
            layout.pack_rows("NVFP4", (256, 64), r0, block)
    with pytest.raises(LayoutError, match="field"):
        layout.pack_rows("NVFP4", (256, 128), 0, block)
    with pytest.raises(LayoutError):
        layout_of("BF16").pack_rows("BF16", (2, 2), 1, {"words": np.zeros((2, 2), np.uint16)})


# --- shards


def encode_cut(tensor: EncodedTensor, rows: list[int], columns: list[int] | None) -> np.ndarray:
    """Bytes of the tensor made of these rows and columns, from its logical words."""
    fmt, layout = get_format(tensor.format), layout_of(tensor.format)
    group = fmt.group or 1
    fields = {}
    for key, value in tensor.fields.items():
        cut = value
        if value.ndim:
            cut = value[rows]
            if columns is not None and value.ndim == 2:
                cut = cut[:, columns] if key != "scales" else cut[:, sorted({c // group for c in columns})]
        fields[key] = cut.copy()
    shape = (len(rows), len(columns) if columns is not None else tensor.shape[1])
    return layout.pack(EncodedTensor(tensor.format, shape, fields))


def expand(ranges: list[tuple[int, int]]) -> list[int]:
    return [i for a, b in ranges for i in range(a, b)]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_shard_of_bytes_is_encoding_of_shard(name: str, data: st.DataObject) -> None:
    layout = layout_of(name)
    unit, column_unit = layout.row_unit, layout.column_unit
    shape = (
        data.draw(st.integers(1, 4)) * unit,
        data.draw(st.integers(1, 5)) * 64 if name == "NVFP4" else data.draw(st.integers(1, 400)),
    )
    tensor = random_tensor(name, shape, data.draw(st.integers(0, 99)))

    def cut(total: int, step: int) -> tuple[int, int]:
        points = sorted({*range(0, total, step), total})
        a = data.draw(st.sampled_from(points[:-1]))
        return a, data.draw(st.sampled_from([p for p in points if p > a]))

    rows = [cut(shape[0], unit) for _ in range(data.draw(st.integers(1, 3)))]
    columns = None
    if data.draw(st.booleans()):
        columns = [cut(shape[1], column_unit)]
        if layout.several_column_ranges:
            columns += [cut(shape[1], column_unit) for _ in range(data.draw(st.integers(0, 2)))]
    narrowed, got = layout.slice(name, shape, layout.pack(tensor), rows, columns)
    want = encode_cut(tensor, expand(rows), None if columns is None else expand(columns))
    assert np.array_equal(got, want)
    assert narrowed == (len(expand(rows)), shape[1] if columns is None else len(expand(columns)))
    shard, begin, parent = layout.shard(name, shape, rows, columns), 0, layout.pack(tensor)
    size = data.draw(st.integers(-(-shard.nbytes // 40), shard.nbytes))
    while begin < shard.nbytes:  # the same in pieces, each copied on its own
        piece = np.zeros(min(size, shard.nbytes - begin), np.uint8)
        covered = np.zeros(piece.size, int)
        for span in shard.parts(begin, begin + piece.size):
            span.copy(parent, piece)
            for _, target, width in span.ranges():
                assert width > 0
                covered[target : target + width] += 1
        assert covered.max(initial=0) <= 1 and np.array_equal(piece, want[begin : begin + piece.size])
        begin += piece.size


def test_spans_cover_every_byte_of_the_shard_once() -> None:
    for name in FORMATS:
        layout = layout_of(name)
        shape = (256, 256) if name == "NVFP4" else (12, 256)
        shard = layout.shard(name, shape, [(0, shape[0] // 2)], [(128, 256)])
        touched = np.zeros(shard.nbytes, int)
        for span in shard.spans:
            for _, target, length in span.ranges():
                touched[target : target + length] += 1
        gaps = sum(length for _, length in layout.gaps(name, shard.shape))
        assert touched.max() == 1 and (touched == 0).sum() == gaps


def test_convolution_cut_takes_three_column_ranges() -> None:
    tensor = random_tensor("BF16", (4, 1280))
    ranges = [(128, 256), (384, 512), (896, 1280)]
    shape, data = LAYOUTS["contiguous-le-v1"].slice(
        "BF16", (4, 1280), LAYOUTS["contiguous-le-v1"].pack(tensor), columns=ranges
    )
    assert shape == (4, 640)
    assert np.array_equal(data.view("<u2").reshape(4, 640), tensor.fields["words"][:, expand(ranges)])


@pytest.mark.parametrize(
    ("name", "shape", "rows", "columns", "rule"),
    [
        ("NVFP4", (256, 128), [(0, 64)], None, "128 rows"),
        ("NVFP4", (256, 128), [(64, 192)], None, "128 rows"),
        ("NVFP4", (256, 128), None, [(0, 32)], "64 columns"),
        ("NVFP4", (256, 256), None, [(0, 64), (128, 192)], "one column range"),
        ("Q4G64_F16S", (4, 256), None, [(0, 64)], "128 columns"),
        ("Q4G64_F16S", (4, 544), None, [(0, 544 // 2)], "128 columns"),
        ("W8G32_F16S", (4, 384), None, [(0, 128), (256, 384)], "one column range"),
        ("BF16", (4, 4), [(2, 2)], None, "non-empty"),
        ("BF16", (4, 4), [(3, 5)], None, "non-empty"),
        ("BF16", (4, 4), [], None, "at least one row range"),
        ("BF16", (4, 4), None, [(-1, 2)], "non-empty"),
        ("BF16", (4,), None, [(0, 2)], "only \\[N,K\\]"),
        ("FP32", (), [(0, 1)], None, "scalar"),
    ],
)
def test_illegal_cuts_name_the_rule(name: str, shape, rows, columns, rule: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(LayoutError, match=rule):
        layout_of(name).shard(name, shape, rows, columns)


def test_a_shard_never_reads_past_its_parent() -> None:
    shard = layout_of("BF16").shard("BF16", (4, 4), [(2, 4)])
    assert isinstance(shard, Shard)
    with pytest.raises(LayoutError, match="parent"):
        shard.copy(b"\0" * 31)
    short, whole = np.zeros(31, np.uint8), np.zeros(32, np.uint8)
    for span in (*shard.spans, Span(0, 0, 4, 4, 8, 4), Span(0, 0, 4, 4, 4, 8)):
        with pytest.raises(LayoutError, match="leaves the"):
            span.copy(short if span.source else whole[:16], whole[:16])


# --- padding and sizes


@pytest.mark.parametrize("name", GROUPED)
def test_padding_is_checked(name: str) -> None:
    layout, shape = layout_of(name), (2, 130)
    data = layout.pack(random_tensor(name, shape))
    planes = {p.name: p for p in layout.planes(name, shape)}
    for plane in planes.values():
        broken = data.copy()
        broken[plane.end - 1] = 1  # the last group of the last row lies past K
        with pytest.raises(PayloadError):
            layout.check_padding(name, shape, broken, 1, 2)
        layout.check_padding(name, shape, broken, 0, 1)
    for offset, length in layout.gaps(name, shape):
        for at in (offset, offset + length - 1):
            broken = data.copy()
            broken[at] = 1
            with pytest.raises(PayloadError, match="between planes"):
                layout.check_padding(name, shape, broken, 0, 2)


@pytest.mark.parametrize("name", FORMATS)
def test_wrong_buffer_sizes_and_rows(name: str) -> None:
    shape, layout = (128, 64), layout_of(name)
    data = layout.pack(random_tensor(name, shape))
    for buffer in (data[:-1], np.append(data, np.uint8(0)), b""):
        with pytest.raises(LayoutError, match="takes"):
            layout.unpack(name, shape, buffer)
    for r0, r1 in ((0, 0), (5, 4), (-1, 1), (0, 129)):
        with pytest.raises(LayoutError, match="not inside"):
            decode_rows(name, layout.name, shape, data, r0, r1)
    with pytest.raises(LayoutError, match="flat uint8"):
        layout.unpack(name, shape, data.view(np.int8))
    with pytest.raises(FormatError):
        layout.unpack(name, (0, 64), data)


@settings(max_examples=30, deadline=None)
@given(blob=st.binary(min_size=0, max_size=700), rows=st.integers(1, 3), columns=st.integers(1, 140))
def test_any_bytes_of_the_right_size_unpack_and_pack_back(blob: bytes, rows: int, columns: int) -> None:
    """Hostile payloads: unpacking never fails on words, and legality checks give one clear error or none."""
    for name in GROUPED:
        layout, shape = layout_of(name), (rows, columns)
        size = layout.encoded_size(name, shape)
        data = np.frombuffer((blob * (size // max(1, len(blob)) + 1))[:size].ljust(size, b"\0"), np.uint8)
        assume(data.size == size)
        tensor = layout.unpack(name, shape, data)
        try:
            layout.check_padding(name, shape, data, 0, rows)
            FORMATS[name].check(tensor)
        except PayloadError as error:
            assert "\n" not in str(error)
        else:
            assert np.array_equal(layout.pack(tensor), data)
