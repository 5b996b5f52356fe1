"""Hostile `.ninfer` files, made by code: every container rule broken once, and the attacks of other formats' history.

A case is the bytes of one file and what must come of it: an error class with a word of its message, or acceptance.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from artifacts.errors import ArtifactError, DirectoryError, FormatError, FramingError, GeometryError, LayoutError

Json = dict[str, Any]
MAGIC = {1: b"NINFER\0\x01", 2: b"NINFER\0\x02", 3: b"NINFER\0\x03"}
ID = bytes(range(16))


@dataclass(frozen=True)
class Case:
    """`error` None: the file is valid. `match` is a part of the message."""

    name: str
    data: bytes
    error: type[ArtifactError] | None = None
    match: str = ""


# Valid files


def root_v2() -> Json:
    return {
        "identity": {"model_id": "m", "weights_id": "w"},
        "objects": [
            {"name": "r", "kind": "resource", "encoding": "raw-bytes-v1", "offset": 0, "bytes": 3},
            {"name": "a", "kind": "tensor", "shape": [4, 8], "format": "BF16", "layout": "contiguous-le-v1",
             "offset": 256, "bytes": 64},
            {"name": "q", "kind": "tensor", "shape": [2, 130], "format": "Q5G64_F16S", "layout": "row-split-k128-v1",
             "offset": 512, "bytes": 528},
            {"name": "s", "kind": "tensor", "shape": [], "format": "FP32", "layout": "contiguous-le-v1",
             "offset": 1280, "bytes": 4},
        ],
    }  # fmt: skip


def root_v1() -> Json:
    root = root_v2()
    return {"model_id": "m", "objects": root["objects"]}


def root_v3() -> Json:
    return {
        "components": {
            "text": {"config": {"model_type": "x"}, "resources": {"tokenizer.json": "r"}, "target": "text"},
            "extra": {"config": {}, "target": "text"},
        },
        "objects": [
            {"id": "r", "kind": "resource", "encoding": "raw_bytes_v1", "offset": 0, "bytes": 3},
            {"id": "a", "kind": "tensor", "shape": [4, 8], "format": "bf16", "layout": "contiguous_le_v1",
             "offset": 256, "bytes": 64},
            {"id": "s", "kind": "tensor", "shape": [], "format": "fp32", "layout": "contiguous_le_v1",
             "offset": 512, "bytes": 4},
        ],
        "bindings": {"p": {"object": "a"}, "half": {"parts": [{"object": "a", "range": [0, 16]}]}},
        "uses": [{"parameter": "p", "input": "x", "activation_policy": "AllowA8",
                  "auxiliaries": {"activation_input_divisor": {"object": "s"}}}],
        "files": [{"path": None, "payload_bytes": 516}],
        "metadata": {"name": "n"},
        "provenance": {},
    }  # fmt: skip


def text(value: object) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def frame(version: int, directory: bytes, payload: int | None = None, length: int | None = None) -> bytes:
    """A file around directory bytes; `payload` zero bytes follow, `length` overrides the stored directory length."""
    head = MAGIC[version] + (len(directory) if length is None else length).to_bytes(8, "little")
    if version == 3:
        head += ID
    body = head + directory
    if payload is None:
        payload = 516 if version == 3 else 1284
    return body.ljust(-(-len(body) // 4096) * 4096, b"\0") + bytes(payload)


def valid(version: int) -> bytes:
    return frame(version, text({1: root_v1, 2: root_v2, 3: root_v3}[version]()))


# Cases


def edited(version: int, change: Callable[[Json], None]) -> bytes:
    """A file whose directory was changed in place."""
    root = {1: root_v1, 2: root_v2, 3: root_v3}[version]()
    change(root)
    return frame(version, text(root))


def put(*path: Any, value: Any) -> Callable[[Json], None]:
    """Set one member or element."""

    def change(root: Any) -> None:
        for step in path[:-1]:
            root = root[step]
        root[path[-1]] = value

    return change


def drop(*path: Any) -> Callable[[Json], None]:
    def change(root: Any) -> None:
        for step in path[:-1]:
            root = root[step]
        del root[path[-1]]

    return change


NOT_INTEGERS: list[Any] = [True, False, None, 3.0, "3", [3], {}, -1, 1 << 64, 10**30]
NOT_STRINGS: list[Any] = [None, True, 3, "", ["m"], {}]


def framing_cases() -> Iterator[Case]:
    for version in (1, 2, 3):
        good = valid(version)
        header = 32 if version == 3 else 16
        for size in sorted({1, 7, 8, 15, header - 1}):
            yield Case(f"v{version}-short-{size}", good[:size], FramingError, "too few")
        yield Case(f"v{version}-header-only", good[:header], FramingError, "leaves the file")
        yield Case(f"v{version}-cut-in-directory", good[: header + 20], FramingError, "leaves the file")
        body = good[header:]
        for length, error, match in (
            (0, FramingError, "length is 0"),
            (len(good), FramingError, "leaves the file"),
            (1 << 63, FramingError, "leaves the file"),
            ((1 << 64) - 1, FramingError, "leaves the file"),
            ((1 << 64) - 17, FramingError, "leaves the file"),
        ):
            data = good[:8] + length.to_bytes(8, "little") + good[16:]
            yield Case(f"v{version}-length-{length}", data, error, match)
        yield Case(f"v{version}-length-one-less", good[:8] + (len(text_of(good)) - 1).to_bytes(8, "little") + good[16:],
                   DirectoryError, "")  # fmt: skip
        yield Case(f"v{version}-big-endian-length", good[:8] + good[8:16][::-1] + good[16:], FramingError, "leaves the file")
        assert body
    good = valid(2)
    for index in range(8):
        data = bytearray(good)
        data[index] ^= 0x20
        yield Case(f"magic-bit-{index}", bytes(data), FramingError, "not a .ninfer artifact")
    for name, magic in {"gguf": b"GGUF\3\0\0\0", "zip": b"PK\3\4\0\0\0\0", "pickle": b"\x80\x04\x95\0\0\0\0\0",
                        "elf": b"\x7fELF\2\1\1\0", "part": b"NINPRT\0\x03", "v0": b"NINFER\0\0", "v4": b"NINFER\0\x04",
                        "safetensors": (100).to_bytes(8, "little")}.items():  # fmt: skip
        yield Case(f"magic-{name}", magic + good[8:], FramingError, "not a .ninfer artifact")
    for version in (1, 2):
        yield Case(f"v{version}-trailing-bytes", valid(version) + b"x" * 100)
        yield Case(f"v{version}-payload-cut", valid(version)[:-1], GeometryError, "the payload has")
        other = text({1: root_v2, 2: root_v1}[version]())
        yield Case(f"v{version}-members-of-the-other", frame(version, other), DirectoryError, "unknown member")
        filled = bytearray(valid(version))
        filled[4000:4096] = b"\xff" * 96
        yield Case(f"v{version}-nonzero-padding", bytes(filled))
    yield Case("v3-longer", valid(3) + b"\0", FramingError, "requires exactly")
    yield Case("v3-shorter", valid(3)[:-1], FramingError, "requires exactly")


def text_of(data: bytes) -> bytes:
    """The directory bytes of a well-framed file."""
    start = 32 if data[7] == 3 else 16
    return data[start : start + int.from_bytes(data[8:16], "little")]


def syntax_cases() -> Iterator[Case]:
    for version in (1, 2, 3):
        good = text_of(valid(version))

        def case(name: str, directory: bytes, match: str = "", v: int = version) -> Case:
            return Case(f"v{v}-{name}", frame(v, directory), DirectoryError, match)

        yield case("bom", b"\xef\xbb\xbf" + good, "byte order mark")
        yield case("utf16", good.decode().encode("utf-16-le"))
        yield case("bad-utf8", good.replace(b'"r"', b'"\xff"', 1), "not UTF-8")
        yield case("overlong-utf8", good.replace(b'"r"', b'"\xc0\xaf"', 1), "not UTF-8")
        yield case("surrogate-bytes", good.replace(b'"r"', b'"\xed\xa0\x80"', 1), "not UTF-8")
        yield case("lone-surrogate-escape", good.replace(b'"r"', b'"\\ud800"', 1))
        yield case("control-character", good.replace(b'"r"', b'"\n"', 1))
        yield case("bad-escape", good.replace(b'"r"', b'"\\x41"', 1))
        yield case("trailing-value", good + b"{}", "end of the document")
        yield case("trailing-comma", good[:-1] + b",}", "expected a string")
        yield case("trailing-nul", good + b"\0", "end of the document")
        yield case("truncated", good[:-1])
        yield case("unclosed-string", good[:-2] + b'"')
        yield case("single-quotes", good.replace(b'"', b"'"))
        yield case("comment", b"/* */" + good, "expected an object")
        yield case("nan", good.replace(b'"bytes":3', b'"bytes":NaN', 1))
        yield case("infinity", good.replace(b'"bytes":3', b'"bytes":Infinity', 1))
        yield case("leading-zero", good.replace(b'"bytes":3', b'"bytes":03', 1))
        yield case("plus-sign", good.replace(b'"bytes":3', b'"bytes":+3', 1))
        yield case("hex", good.replace(b'"bytes":3', b'"bytes":0x3', 1))
        yield case("exponent", good.replace(b'"bytes":3', b'"bytes":3e0', 1), "integer")
        yield case("huge-exponent", good.replace(b'"bytes":3', b'"bytes":1e999', 1), "overflows")
        yield case("digits", good.replace(b'"bytes":3', b'"bytes":' + b"9" * 5000, 1))
        yield case("unicode-digits", good.replace(b'"bytes":3', '"bytes":３'.encode(), 1))
        yield case("array-root", b"[" + good + b"]", "expected an object")
        yield case("string-root", b'"x"', "expected an object")
        yield case("number-root", b"1", "expected an object")
        yield case("empty-object", b"{}", "missing member")
        yield case("space", b"   ", "expected an object")
        first = good[1 : good.index(b":")]
        yield case("duplicate-root-member", b"{" + first + b":1," + good[1:])
        yield case("duplicate-object-member", good.replace(b'"offset":0', b'"offset":0,"offset":0', 1), "repeats member")
        yield case("duplicate-escaped", good.replace(b'"offset":0', b'"offset":0,"\\u006fffset":0', 1), "repeats member")
        for opener, closer in ((b"[", b"]"), (b'{"a":', b"}")):
            deep = opener * 5000 + b"1" + closer * 5000
            yield case(f"deep-{opener[:1].decode()}", good.replace(b'"bytes":3', b'"bytes":' + deep, 1))
            yield case(f"deep-root-{opener[:1].decode()}", deep)
            yield case(f"deep-unclosed-{opener[:1].decode()}", opener * 100000)
        spaced = good.replace(b",", b" ,\n\t").replace(b":", b" : ") + b" \r\n "
        yield Case(f"v{version}-white-space", frame(version, spaced))
        escaped = good.replace(b'"offset"', b'"\\u006f\\u0066fset"')
        yield Case(f"v{version}-escaped-names", frame(version, escaped))
        yield Case(f"v{version}-reordered", frame(version, text(_reversed(json.loads(good)))))
    yield Case("v2-minus-zero", frame(2, text_of(valid(2)).replace(b'"offset":0', b'"offset":-0', 1)), DirectoryError, "-0")
    yield Case("v3-minus-zero", frame(3, text_of(valid(3)).replace(b'"offset":0', b'"offset":-0', 1)))


def _reversed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _reversed(item) for key, item in reversed(value.items())}
    return [_reversed(item) for item in value] if isinstance(value, list) else value


def object_cases() -> Iterator[Case]:
    """Members, domains, formats and geometry of version 1 and 2; the shared part for version 3."""
    for version in (1, 2, 3):
        key = "id" if version == 3 else "name"

        def case(name: str, change: Callable[[Json], None], error: type[ArtifactError] | None = DirectoryError,
                 match: str = "", v: int = version) -> Case:  # fmt: skip
            return Case(f"v{v}-{name}", edited(v, change), error, match)

        yield case("objects-empty", put("objects", value=[]), match="at least one object")
        yield case("objects-object", put("objects", value={}), match="expected an array")
        yield case("objects-null", put("objects", value=None), match="expected an array")
        yield case("objects-missing", drop("objects"), match="missing member objects")
        yield case("root-extra", put("extra", value=1), match="unknown member 'extra'")
        for junk in (None, 1, "x", [], [[]]):
            yield case(f"object-{junk!r}", put("objects", 0, value=junk))
        for member in (key, "kind", "encoding", "offset", "bytes"):
            yield case(f"resource-without-{member}", drop("objects", 0, member))
        for member in (key, "kind", "shape", "format", "layout", "offset", "bytes"):
            yield case(f"tensor-without-{member}", drop("objects", 1, member))
        yield case("resource-extra", put("objects", 0, "shape", value=[1]), match="unknown member 'shape'")
        yield case("tensor-extra", put("objects", 1, "encoding", value="raw-bytes-v1"), match="unknown member 'encoding'")
        yield case("tensor-divisors", put("objects", 1, "divisors", value=2), match="unknown member 'divisors'")
        for kind in ("Tensor", "", "weights", None, 1, [], {}):
            yield case(f"kind-{kind!r}", put("objects", 1, "kind", value=kind), match="kind must be")
        for junk in NOT_STRINGS:
            yield case(f"name-{junk!r}", put("objects", 1, key, value=junk), match="nonempty string")
            yield case(f"format-{junk!r}", put("objects", 1, "format", value=junk), match="nonempty string")
            yield case(f"layout-{junk!r}", put("objects", 1, "layout", value=junk), match="nonempty string")
        yield case("same-name", put("objects", 1, key, value="r"), match="occurs twice")
        for junk in NOT_INTEGERS:
            yield case(f"offset-{junk!r}", put("objects", 0, "offset", value=junk), match="integer")
            yield case(f"bytes-{junk!r}", put("objects", 0, "bytes", value=junk), match="integer")
            yield case(f"dimension-{junk!r}", put("objects", 1, "shape", 0, value=junk), match="integer")
        yield case("bytes-0", put("objects", 0, "bytes", value=0), match="integer")
        yield case("dimension-0", put("objects", 1, "shape", 0, value=0), match="integer")
        for junk in (None, 4, "4", {}, [1] * 17):
            yield case(f"shape-{junk!r}", put("objects", 1, "shape", value=junk), match="dimensions")
        yield case("product-overflow", put("objects", 1, "shape", value=[1 << 32, 1 << 32]), match="exceeds 2^64-1")
        yield case("product-wraps", put("objects", 1, "shape", value=[1 << 63, 4, 8]), match="exceeds 2^64-1")
        yield case("overlap", put("objects", 1, "offset", value=2), GeometryError, "")
        yield case("overlap-by-one", put("objects", 2, "offset", value=319), GeometryError, "lies before the end 320")
        yield case("swapped", lambda root: root["objects"].reverse(), GeometryError, "lies before the end")
        yield case("beyond", put("objects", -1, "offset", value=4096), GeometryError, "the payload has")
        yield case("far-beyond", put("objects", -1, "offset", value=(1 << 64) - 256), GeometryError, "the payload has")
        yield case("resource-too-long", put("objects", 0, "bytes", value=1 << 40), GeometryError, "the payload has")
        yield case("gap", put("objects", 0, "bytes", value=1), None)
    for version in (1, 2):

        def older(name: str, change: Callable[[Json], None], error: type[ArtifactError] | None = DirectoryError,
                  match: str = "", v: int = version) -> Case:  # fmt: skip
            return Case(f"v{v}-{name}", edited(v, change), error, match)

        yield older("misaligned", put("objects", 1, "offset", value=257), GeometryError, "multiple of 256")
        for junk in ("bf16", "BF16 ", "FP16", "Q4G32_F16S", "../../etc", "GGUF"):
            yield older(f"format-{junk}", put("objects", 1, "format", value=junk), FormatError, "unknown format")
        for junk in ("contiguous_le_v1", "row-split", "x" * 5000):
            yield older(f"layout-{junk[:20]}", put("objects", 1, "layout", value=junk), LayoutError, "unknown layout")
        yield older("encoding", put("objects", 0, "encoding", value="gzip"), FormatError, "unknown encoding")
        yield older("pair", put("objects", 1, "layout", value="row-split-k128-v1"), LayoutError, "does not hold")
        yield older("size-less", put("objects", 1, "bytes", value=63), LayoutError, "takes 64")
        yield older("size-more", put("objects", 1, "bytes", value=65), LayoutError, "takes 64")
        yield older("quantized-vector", put("objects", 2, "shape", value=[260]), FormatError, "shape must be [N,K]")
        for junk in NOT_STRINGS:
            member = ("model_id",) if version == 1 else ("identity", "model_id")
            yield older(f"model-id-{junk!r}", put(*member, value=junk))
    for junk in NOT_STRINGS:
        yield Case(f"v2-weights-id-{junk!r}", edited(2, put("identity", "weights_id", value=junk)), DirectoryError)
    yield Case("v2-identity-extra", edited(2, put("identity", "x", value=1)), DirectoryError, "unknown member 'x'")
    yield Case("v2-identity-list", edited(2, put("identity", value=["m", "w"])), DirectoryError, "expected an object")
    yield Case("v2-identity-missing", edited(2, drop("identity")), DirectoryError, "missing member identity")
    for format, layout, shape in (("NVFP4", "blockscale-k16-m128x4-v1", [127, 64]),
                                  ("NVFP4", "blockscale-k16-m128x4-v1", [128, 32])):  # fmt: skip
        tensor = {"name": "z", "kind": "tensor", "shape": shape, "format": format, "layout": layout, "offset": 1536, "bytes": 9}
        yield Case(f"v2-nvfp4-{shape}", edited(2, lambda root, t=tensor: root["objects"].append(t)),  # type: ignore[misc]
                   FormatError, "'z'")  # fmt: skip
    for format in ("NVFP4", "FP8_E4M3FN_ROW_BF16S"):
        yield Case(f"v1-{format}", edited(1, put("objects", 1, "format", value=format)), FormatError, "version 1 knows")


def v3_cases() -> Iterator[Case]:
    def case(name: str, change: Callable[[Json], None], match: str = "",
             error: type[ArtifactError] | None = DirectoryError) -> Case:  # fmt: skip
        return Case(f"v3-{name}", edited(3, change), error, match)

    for member in ("components", "objects", "bindings", "uses", "files"):
        yield case(f"without-{member}", drop(member), f"missing member {member}")
    for member in ("metadata", "provenance"):
        yield case(f"without-{member}", drop(member), error=None)
        yield case(f"{member}-list", put(member, value=[]), "expected an object")
    yield case("name-empty", put("metadata", "name", value=""), "nonempty string")
    yield case("nul-in-id", put("objects", 1, "id", value="a\0b"), "not allowed")
    # files
    yield case("files-empty", put("files", value=[]), "at least one file")
    yield case("files-object", put("files", value={}), "expected an array")
    yield case("entry-named", put("files", 0, "path", value="x"), "must be null")
    yield case("file-extra", put("files", 0, "sha", value=1), "unknown member 'sha'")
    yield case("file-without-length", drop("files", 0, "payload_bytes"), "missing member payload_bytes")
    for junk in [*NOT_INTEGERS, 0]:
        yield case(f"payload-{junk!r}", put("files", 0, "payload_bytes", value=junk), "integer")
    second = {"path": "b.part", "payload_bytes": 5}
    yield case("second-file", lambda root: root["files"].append(second), error=None)
    for path in ("..", ".", "../x", "a/b", "/etc/passwd", "a\\b", "..\\x", "C:\\x", "", "a\0b", None, 5, [], "\ud800"):
        yield case(f"path-{path!r}", lambda root, p=path: root["files"].append({"path": p, "payload_bytes": 5}))  # type: ignore[misc]
    yield case("path-is-entry", lambda root: root["files"].append({"path": "case.ninfer", "payload_bytes": 5}), "entry itself")
    yield case("path-twice", lambda root: root["files"].extend([second, second]), "occurs twice")
    yield case("payload-overflow", lambda root: root["files"].append({"path": "b", "payload_bytes": (1 << 64) - 1}),
               "add up", GeometryError)  # fmt: skip
    # components
    yield case("components-list", put("components", value=[]), "expected an object")
    yield case("no-text", drop("components", "text"), "component text is required")
    yield case("config-missing", drop("components", "text", "config"), "config must be an object")
    for junk in (None, [], "x", 1):
        yield case(f"config-{junk!r}", put("components", "text", "config", value=junk), "config must be an object")
        yield case(f"resources-{junk!r}", put("components", "text", "resources", value=junk), "resources must be an object")
        yield case(f"proposal-{junk!r}", put("components", "text", "proposal", value=junk), "proposal must be an object")
    yield case("component-extra", put("components", "text", "weights", value=1), "unknown member 'weights'")
    yield case("component-empty-name", put("components", "", value={"config": {}}), "nonempty string")
    yield case("target-unknown", put("components", "extra", "target", value="nobody"), "is not a component")
    yield case("target-null", put("components", "extra", "target", value=None), "nonempty string")
    yield case("resource-is-tensor", put("components", "text", "resources", "x", value="a"), "not a resource object")
    yield case("resource-unknown", put("components", "text", "resources", "x", value="zz"), "not a resource object")
    yield case("resource-number", put("components", "text", "resources", "x", value=1), "nonempty string")
    yield case("config-nan", lambda root: root["components"]["text"]["config"].update(x=float("nan")))
    yield case("config-nested-duplicate", put("components", "text", "config", value="@dup@"))
    yield case("proposal-elsewhere", put("components", "extra", "proposal", value={"domain": "full"}), "only component text")
    for proposal in ({"domain": "full", "rows": 5}, {"domain": "indexed"}, {"domain": "half"}, {"rows": 5},
                     {"domain": "indexed", "rows": 0}, {"domain": "indexed", "rows": True},
                     {"domain": "full", "x": 1}):  # fmt: skip
        yield case(f"proposal-{proposal}", put("components", "text", "proposal", value=proposal))
    yield case("proposal-full", put("components", "text", "proposal", value={"domain": "full"}), error=None)
    yield case("proposal-indexed", put("components", "text", "proposal", value={"domain": "indexed", "rows": 9}), error=None)
    # bindings
    yield case("bindings-list", put("bindings", value=[]), "expected an object")
    yield case("bindings-empty", lambda root: root.update(bindings={}, uses=[]), error=None)
    yield case("binding-empty-name", put("bindings", "", value={"object": "a"}), "nonempty string")
    for junk in (None, 1, "a", [], {}, {"object": "a", "parts": []}, {"x": 1}, {"object": 5}, {"object": ""},
                 {"object": "zz"}, {"object": "r"}, {"parts": []}, {"parts": {}}, {"parts": None}, {"parts": [1]},
                 {"parts": [{"object": "a"}]}, {"parts": [{"object": "a", "range": [0, 1], "x": 0}]},
                 {"parts": [{"object": "r", "range": [0, 1]}]}, {"parts": [{"object": "zz", "range": [0, 1]}]}):  # fmt: skip
        yield case(f"binding-{junk!r}", put("bindings", "p", value=junk))
    for span in ([0], [0, 1, 2], [1, 1], [2, 1], [0, 33], [32, 33], [-1, 1], [0, True], [0.0, 1], [0, None], "01", {}, None,
                 [0, 1 << 64], [1 << 63, 1 << 65]):  # fmt: skip
        yield case(f"range-{span!r}", put("bindings", "half", "parts", 0, "range", value=span))
    many = [{"object": "a", "range": [0, 32]}] * 300
    yield case("many-parts", put("bindings", "half", "parts", value=many), error=None)
    # uses
    yield case("uses-object", put("uses", value={}), "expected an array")
    yield case("use-unknown-parameter", put("uses", 0, "parameter", value="q"), "has no binding")
    yield case("use-extra", put("uses", 0, "x", value=1), "unknown member 'x'")
    yield case("use-without-input", drop("uses", 0, "input"), "missing member input")
    yield case("use-twice", lambda root: root["uses"].append(dict(root["uses"][0])), "occur twice")
    yield case("use-default-policy", drop("uses", 0, "activation_policy"), error=None)
    for policy in ("allowa8", "A4", "", None, 1, ["A16Only"], {}):
        yield case(f"policy-{policy!r}", put("uses", 0, "activation_policy", value=policy), "is not one of")
    for junk in (None, [], 1, {"d": {"object": "r"}}, {"d": {}}, {"d": 1}, {"": {"object": "s"}},
                 {"d": {"parts": [{"object": "s", "range": [0, 2]}]}}):  # fmt: skip
        yield case(f"auxiliaries-{junk!r}", put("uses", 0, "auxiliaries", value=junk))
    # storage problems are lazy
    for member, value in (("format", "bf17"), ("layout", "heap"), ("offset", 257), ("bytes", 60)):
        yield case(f"lazy-{member}", put("objects", 1, member, value=value), error=None)


def _directory_of_size(version: int, opening: bytes, item: bytes, closing: bytes, size: int) -> bytes:
    """opening, item, item, … closing, close to `size` bytes; `%d` in the item becomes a running number."""
    count = (size - len(opening) - len(closing)) // (len(item.replace(b"%d", b"1000000")) + 1)
    numbered = (item.replace(b"%d", b"%d" % i) for i in range(count)) if b"%d" in item else [item] * count
    return frame(version, opening + b",".join(numbered) + closing)


def resource_cases(size: int = 8 << 20) -> Iterator[Case]:
    """Directories up to the size cap that try to exhaust memory or time; all must fail, quickly and cheaply."""
    v2 = b'{"identity":{"model_id":"m","weights_id":"w"},"objects":['
    obj = b'{"name":"n%d","kind":"resource","encoding":"raw-bytes-v1","offset":0,"bytes":1}'
    base = text_of(valid(3))

    def v3(member: bytes, opening: bytes, item: bytes, closing: bytes) -> bytes:
        at = base.index(b'"' + member + b'":')
        return _directory_of_size(3, base[:at] + b'"' + member + b'":' + opening, item, closing + b"}", size)

    yield Case("big-over-cap", frame(2, b" " * ((8 << 20) + 1)), DirectoryError, "at most 8388608")
    yield Case("big-spaces", frame(2, b" " * size), DirectoryError)
    yield Case("big-brackets", frame(2, b"[" * size), DirectoryError)
    yield Case("big-open-objects", frame(3, b'{"a":' * (size // 5)), DirectoryError)
    yield Case("big-digits", frame(2, v2 + b"1" * (size - 100)), DirectoryError)
    yield Case("big-string", frame(2, b'{"' + b"a" * (size - 10) + b'":1}'), DirectoryError, "more than 262144")
    yield Case("big-escapes", frame(2, b'{"' + b"\\u00e9" * (size // 6 - 10) + b'":1}'), DirectoryError)
    yield Case("big-wide-escapes", frame(2, b'{"\\ud83d\\ude00' + b"a" * (size - 100) + b'":1}'), DirectoryError)
    wide = b'"\\ud83d\\ude00' + b"a" * 200000 + b'"'
    yield Case("big-wide-strings", v3(b"metadata", b'{"x":[', wide, b"],"), DirectoryError)
    yield Case("big-quotes", frame(2, b'{"' + b'\\"' * (size // 2 - 10) + b'":1}'), DirectoryError, "more than 262144")
    yield Case("big-wide", frame(2, b'{"' + "😀".encode() + b"a" * (size - 100) + b'":1}'), DirectoryError, "decodes to more")
    yield Case("big-empty-lists", _directory_of_size(2, v2, b"[]", b"]}", size), DirectoryError)
    yield Case("big-empty-objects", _directory_of_size(2, v2, b"{}", b"]}", size), DirectoryError)
    yield Case("big-nulls", _directory_of_size(2, v2, b"null", b"]}", size), DirectoryError)
    yield Case("big-objects", _directory_of_size(2, v2, obj, b"]}", size), DirectoryError, "more than 32768")
    yield Case("big-spaced-objects", _directory_of_size(2, v2, obj + b" ", b"]}", size), DirectoryError, "more than 32768")
    trap = b'{"name":"},{%d","kind":"resource","encoding":"raw-bytes-v1","offset":0,"bytes":1} '
    yield Case("big-batch-traps", _directory_of_size(2, v2, trap, b"]}", size), DirectoryError)
    long = b'{"name":"n%d","kind":"' + b"x" * 2100 + b'"}'
    yield Case("big-long-records", _directory_of_size(2, v2, long, b"]}", size), DirectoryError)
    shape = b'{"name":"n%d","kind":"tensor","shape":[' + b"1," * 1000 + b"1]}"
    yield Case("big-shapes", _directory_of_size(2, v2, shape, b"]}", size), DirectoryError)
    yield Case("big-one-record", frame(2, v2 + b'{"a":[' + b"[]," * (size // 3 - 100) + b"1]}]}"), DirectoryError)
    yield Case("big-bindings", v3(b"bindings", b"{", b'"%d":{"object":"a"}', b"}"), DirectoryError)
    spelled = b'"%d":{"parts":[{"object":"a","range":[0,1]}]}'
    yield Case("big-spelled-bindings", v3(b"bindings", b"{", spelled, b"}"), DirectoryError, "more than 131072 records")
    yield Case("big-spelled-names", v3(b"bindings", b"{", spelled.replace(b"%d", b"%d" + b"n" * 90), b"}"), DirectoryError)
    trap = spelled.replace(b"[0,1]}]}", b"[0,1]}]" + b" }")
    yield Case("big-nearly-spelled-bindings", v3(b"bindings", b"{", trap, b"}"), DirectoryError)
    use = b'{"parameter":"%d","input":"i","activation_policy":"A16Only"}'
    yield Case("big-spelled-uses", v3(b"uses", b"[", use, b"]"), DirectoryError)
    yield Case("big-nearly-spelled-uses", v3(b"uses", b"[", use.replace(b"Only", b"only"), b"]"), DirectoryError, "policy")
    yield Case("big-quoted-uses", v3(b"uses", b"[", b'{"parameter":"' + b'","input":"' * 180 + b'%d"}', b"]"), DirectoryError)
    yield Case("big-spaced-bindings", v3(b"bindings", b"{", b'"%d" :{"object":"a"} ', b"}"), DirectoryError)
    yield Case("big-parts", v3(b"bindings", b'{"p":{"parts":[', b'{"object":"a","range":[0,1]}', b"]}}"), DirectoryError)
    yield Case("big-same-binding", v3(b"bindings", b"{", b'"p":{"object":"a"}', b"}"), DirectoryError, "repeats member")
    yield Case("big-uses", v3(b"uses", b"[", b'{"parameter":"%d","input":"i"}', b"]"), DirectoryError)
    yield Case("big-auxiliaries", v3(b"uses", b'[{"parameter":"p","input":"i","auxiliaries":{', b'"%d":{"object":"s"}', b"}}]"),
               DirectoryError)  # fmt: skip
    yield Case("big-files", v3(b"files", b"[", b'{"path":"%d","payload_bytes":1}', b"]"), DirectoryError)
    yield Case("big-config", v3(b"components", b'{"text":{"config":{', b'"%d":[]', b"}}}"), DirectoryError, "more values")
    yield Case("big-components", v3(b"components", b"{", b'"%d":{"config":{}}', b"}"), DirectoryError)
    yield Case("big-metadata", v3(b"metadata", b'{"x":[', b'{"a":0}', b"]}"), DirectoryError, "more values")
    yield Case("big-deep-metadata", v3(b"metadata", b'{"x":[', b"[[[[[[[[[[[[[[[[]]]]]]]]]]]]]]]]", b"]}"), DirectoryError)
    yield Case("big-names", v3(b"objects", b"[", b'{"id":"%d' + b"x" * 180 + b'","kind":"resource","encoding":"e","offset":0,'
               b'"bytes":1}', b"]"), DirectoryError)  # fmt: skip


def small_cases() -> list[Case]:
    """Every rule once."""
    cases = [*framing_cases(), *syntax_cases(), *object_cases(), *v3_cases()]
    cases = [_with_duplicate(case) for case in cases]
    names = [case.name for case in cases]
    assert len(set(names)) == len(names), [name for name in names if names.count(name) > 1]
    return cases


def _with_duplicate(case: Case) -> Case:
    """`json.dumps` cannot spell a duplicate member, so a marker is replaced in the text."""
    if b'"@dup@"' not in case.data:
        return case
    return Case(case.name, frame(3, text_of(case.data).replace(b'"@dup@"', b'{"a":{"b":1,"b":1}}')), case.error, "repeats")
