"""What the writers write, the reader reads: every version, split files, partial reads."""

import builtins
import json
import threading
from pathlib import Path

import numpy as np
import pytest

import artifacts
from artifacts import ArtifactWriter, Identity, ObjectPlan
from artifacts.container.directory_v3 import encode_directory
from artifacts.container.writer import Coverage
from artifacts.container.writer_v3 import ArtifactWriterV3
from artifacts.errors import (
    ConfigError,
    FramingError,
    GeometryError,
    IdentityError,
    LayoutError,
    OutputError,
    PartError,
)
from artifacts.formats import FORMATS
from artifacts.layouts import decode, layout_of
from tests.container.samples import DIMS, MOE_DIMS, RESOURCES, write_v1, write_v2, write_v3


def test_v1(tmp_path: Path) -> None:
    artifact = artifacts.open(write_v1(tmp_path / "a.ninfer"))
    assert (artifact.version, artifact.identity) == (1, ("old-model", None))
    assert list(artifact.objects) == ["frontend/tokenizer.json", "text/final_norm", "text/output_head"]
    assert artifact.resource("frontend/tokenizer.json") == b"hello"
    assert artifact.tensor_bytes("text/final_norm").tobytes() == bytes(range(128))
    assert artifact.tensor_bytes("text/final_norm", 3, 7).tobytes() == bytes(range(3, 7))
    assert artifact.file_bytes == (tmp_path / "a.ninfer").stat().st_size
    raw = (tmp_path / "a.ninfer").read_bytes()
    assert raw[:8] == bytes.fromhex("4e494e4645520001")
    assert raw[16:].startswith(
        b'{"model_id":"old-model","objects":[{"name":"frontend/tokenizer.json","kind":"resource","encoding":"raw-bytes-v1",'
        b'"offset":0,"bytes":5},{"name":"text/final_norm","kind":"tensor","shape":[64],"format":"BF16",'
        b'"layout":"contiguous-le-v1","offset":256,"bytes":128}'
    )


def test_v2_members_and_errors(tmp_path: Path) -> None:
    path = write_v2(tmp_path / "a.ninfer")
    with artifacts.open(path) as artifact:
        assert artifact.version == 2 and str(artifact.identity) == "sample/groupwise-int"
        assert artifact.resource("frontend/chat_template.jinja") == RESOURCES["frontend/chat_template.jinja"]
        assert artifact.directory().tobytes() == path.read_bytes()[16 : 16 + artifact.directory_bytes]
        assert artifact.object_index("frontend/chat_template.jinja") == 1
        for entry in artifact.objects.values():
            assert artifact.read(entry.offset, entry.bytes).size == entry.bytes
        with pytest.raises(IdentityError, match="no object 'text/nothing'"):
            artifact.tensor_bytes("text/nothing")
        with pytest.raises(IdentityError, match="is a tensor"):
            artifact.resource("text/final_norm")
        with pytest.raises(IdentityError, match="is a resource"):
            artifact.tensor("frontend/tokenizer.json")
        with pytest.raises(LayoutError, match="leave its 256 bytes"):
            artifact.tensor_bytes("text/final_norm", 0, 257)
        with pytest.raises(GeometryError):
            artifact.read(artifact.payload_bytes - 1, 2)
        with pytest.raises(GeometryError):
            artifact.read(-1, 1)
        kept = artifact.tensor_bytes("text/final_norm")
        assert not kept.flags.writeable
        before = kept.tobytes()
    assert kept.tobytes() == before  # arrays outlive the artifact
    with pytest.raises(ValueError, match="closed"):
        artifact.read(0, 1)
    with pytest.raises(ValueError, match="closed"):
        artifact.directory()


@pytest.mark.parametrize("weights", ["bf16", "groupwise-int", "nvfp4", "nvfp4-fp8"])
def test_v3_is_the_same_model(tmp_path: Path, weights: str) -> None:
    source = write_v2(tmp_path / "v2.ninfer", weights, vision=True, draft_rows=40)
    target = write_v3(tmp_path / "v3.ninfer", source)
    old, new = artifacts.open(source), artifacts.open(target)
    assert new.version == 3 and new.identity == ("sample", None)
    assert new.text_config() == old.text_config() == DIMS.to_config()
    assert dict(new.model.bindings) == dict(old.model.bindings)
    assert set(new.model.uses) == set(old.model.uses)
    for name in old.model.bindings:
        assert [(v.object.name, v.r0, v.r1) for v in old.parameter(name)] == [
            (v.object.name, v.r0, v.r1) for v in new.parameter(name)
        ]
    for name, entry in old.objects.items():
        assert new.objects[name] == entry
        assert (old.read(entry.offset, entry.bytes) == new.read(entry.offset, entry.bytes)).all()
    assert list(new.directory_v3.components) == ["text", "vision", "mtp"]
    assert new.directory_v3.components["text"].proposal == ("indexed", 40)
    assert new.model.frontend("chat_template.jinja") == old.model.frontend("chat_template.jinja")
    assert new.model.vision == old.model.vision
    for (parameter, position), use in old.model.uses.items():
        divisor = old.model.input_divisor(parameter, position)
        assert divisor == new.model.input_divisor(parameter, position)
        assert (divisor is not None) == (use.policy == "AllowA4")


def test_parameters_split_fused_parents(tmp_path: Path) -> None:
    artifact = artifacts.open(write_v2(tmp_path / "a.ninfer", "nvfp4"))
    views = {name: artifact.parameter(f"text/layers/3/attention/{name}") for name in ("query", "key", "gate", "value")}
    parent = artifact.tensor("text/layers/3/attention/query_key_gate_value")
    assert [(v.object, v.r0, v.r1) for (v,) in views.values()] == [
        (parent, 0, 128), (parent, 128, 192), (parent, 192, 320), (parent, 320, 384)
    ]  # fmt: skip
    z = artifact.parameter("text/layers/0/gdn/z")
    assert [(v.object.name, v.r0, v.r1) for v in z] == [("text/layers/0/gdn/query_key_value_z", 256, 384)]
    (norm,) = artifact.parameter("mtp/layers/0/input_norm")
    assert (norm.object.name, norm.r0, norm.r1) == ("mtp/layer/input_norm", 0, 128)
    with pytest.raises(IdentityError, match="no parameter"):
        artifact.parameter("text/layers/3/attention/query_key_gate_value")
    assert artifact.model.uses[("text/layers/0/gdn/z", "text/layers/0/mixer_input")].policy == "AllowA4"
    assert artifact.model.input_divisor("text/layers/0/gdn/z", "text/layers/0/mixer_input") == 64.0
    with pytest.raises(IdentityError, match="no use"):
        artifact.model.input_divisor("text/layers/0/gdn/z", "text/layers/0/ffn_input")


def test_experts(tmp_path: Path) -> None:
    artifact = artifacts.open(write_v2(tmp_path / "a.ninfer", dims=MOE_DIMS))
    up = artifact.parameter("text/layers/1/moe/experts/4/up")
    assert [(v.object.name, v.r0, v.r1) for v in up] == [("text/layers/1/moe/routed_gate_up", 576, 640)]
    down = artifact.parameter("text/layers/1/moe/experts/4/down")
    assert [(v.object.name, v.r0, v.r1) for v in down] == [("text/layers/1/moe/routed_down", 512, 640)]
    score = artifact.parameter("mtp/layers/0/moe/shared_score")
    assert [(v.object.name, v.r0, v.r1) for v in score] == [("mtp/layer/moe/router_shared_gate", 6, 7)]
    with artifacts.open(write_v3(tmp_path / "b.ninfer", tmp_path / "a.ninfer")) as new:
        assert dict(new.model.bindings) == dict(artifact.model.bindings)
        assert new.model.dims == artifact.model.dims


def test_configuration_sources(tmp_path: Path) -> None:
    with artifacts.open(write_v2(tmp_path / "a.ninfer", vision=True)) as artifact:
        assert artifact.model.dims.to_config() == DIMS.to_config()  # composite configuration
        assert artifact.model.vision is not None and artifact.model.vision.depth == 1
    plans = [ObjectPlan("text/final_norm", (64,), "BF16")]
    with ArtifactWriter(tmp_path / "b.ninfer", Identity("x", "y"), plans) as writer:
        writer.write("text/final_norm", bytes(128))
    with artifacts.open(tmp_path / "b.ninfer") as artifact:
        with pytest.raises(ConfigError, match="not registered and the file has no resource model/config.json"):
            artifact.text_config()
        with pytest.raises(ConfigError, match="not registered"):
            artifact.parameter("text/final_norm")


@pytest.mark.parametrize("limit", [40960, 65536, 100000])
def test_parts(tmp_path: Path, limit: int) -> None:
    source = write_v2(tmp_path / "v2.ninfer")
    target = write_v3(tmp_path / "v3.ninfer", source, limit=limit)
    with artifacts.open(source) as old, artifacts.open(target) as new:
        count = len(new.files)
        assert count > 2
        names = [f"v3.ninfer.part-{i:04d}" for i in range(1, count)]
        assert [file.path for file in new.files] == [None, *names]
        sizes = [(tmp_path / name).stat().st_size for name in ("v3.ninfer", *names)]
        assert all(size <= limit for size in sizes) and sum(sizes) == new.file_bytes
        assert all(file.payload_bytes % 4096 == 0 for file in new.files[:-1])
        for name, entry in old.objects.items():
            assert (old.read(entry.offset, entry.bytes) == new.read(entry.offset, entry.bytes)).all(), name
        assert new.read(new.payload_bytes, 0).size == 0
        whole = new.read(0, new.payload_bytes)
        assert whole.size == new.payload_bytes and not whole.flags.writeable


def test_parts_are_opened_when_needed(tmp_path: Path) -> None:
    target = write_v3(tmp_path / "v3.ninfer", limit=65536)
    second = tmp_path / "v3.ninfer.part-0002"
    content = second.read_bytes()
    second.unlink()
    with artifacts.open(target) as artifact:
        start = artifact.files[0].payload_bytes
        assert artifact.read(start - 10, 20).size == 20
        beyond = start + artifact.files[1].payload_bytes
        with pytest.raises(PartError, match="part 2 .*part-0002.*No such file"):
            artifact.read(beyond - 1, 2)

    def broken(data: bytes, match: str) -> None:
        second.write_bytes(data)
        with artifacts.open(target) as artifact, pytest.raises(PartError, match=match):
            artifact.open_parts()

    broken(content[:-1], "bytes; .* are required")
    broken(content + b"\0", "bytes; .* are required")
    broken(content[:31], "has at least 32")
    broken(b"NINFER\0\x03" + content[8:], "not a continuation part")
    broken(content[:8] + (1).to_bytes(8, "little") + content[16:], "says it is part 1")
    broken(content[:16] + bytes(16) + content[32:], "belongs to artifact")
    second.write_bytes(content)
    with artifacts.open(target) as artifact:
        artifact.open_parts()


def test_renamed_entry_cannot_be_its_own_part(tmp_path: Path) -> None:
    target = write_v3(tmp_path / "v3.ninfer", limit=65536)
    renamed = target.rename(tmp_path / "v3.ninfer.part-0001")
    with pytest.raises(artifacts.ArtifactError, match="names the entry itself"):
        artifacts.open(renamed)


def test_unknown_formats_are_lazy_in_v3(tmp_path: Path) -> None:
    target = write_v3(tmp_path / "v3.ninfer")
    raw = target.read_bytes()
    edited = raw.replace(b'"format":"q8_g32_fp16","layout"', b'"format":"q7_g32_fp16","layout"', 1)
    assert edited != raw
    target.write_bytes(edited)
    with artifacts.open(target) as artifact:
        broken = [entry for entry in artifact.objects.values() if entry.problem]
        assert len(broken) == 1
        with pytest.raises(LayoutError, match="unknown format or layout 'q7_g32_fp16'"):
            artifact.tensor_bytes(broken[0].name)
        artifact.tensor_bytes("text/final_norm")
        with pytest.raises(LayoutError):
            ArtifactWriterV3(tmp_path / "new.ninfer", artifact.directory_v3)


def test_v3_spelling_of_v2_names_is_unknown(tmp_path: Path) -> None:
    target = write_v3(tmp_path / "v3.ninfer")
    raw = target.read_bytes()
    at = raw.index(b'"format":"bf16"')
    edited = raw[: at + 10] + b"BF16" + raw[at + 14 :]
    target.write_bytes(edited)
    with artifacts.open(target) as artifact:
        assert sum(entry.problem is not None for entry in artifact.objects.values()) == 1


def test_v3_directory_survives_reencoding(tmp_path: Path) -> None:
    with artifacts.open(write_v3(tmp_path / "v3.ninfer", vision=True, draft_rows=20)) as artifact:
        raw = encode_directory(artifact.directory_v3)
        stored = artifact.directory().tobytes()
        assert stored.rstrip(b" ") == raw and len(stored) % 4096 == 4096 - 32
        assert list(json.loads(raw)) == ["components", "objects", "bindings", "uses", "metadata", "provenance", "files"]


def test_file_is_torn_or_special(tmp_path: Path) -> None:
    path = write_v2(tmp_path / "a.ninfer")
    raw = path.read_bytes()
    for data, match in (
        (b"", "empty"),
        (raw[:15], "too few"),
        (b"GGUF" + raw[4:], "not a .ninfer artifact"),
        (raw[:4096], "leaves the file"),
    ):
        path.write_bytes(data)
        with pytest.raises(FramingError, match=match):
            artifacts.open(path)
    path.write_bytes(raw[:-1])
    with pytest.raises(GeometryError, match="the payload has"):
        artifacts.open(path)
    with pytest.raises(FramingError, match="not a regular file"):
        artifacts.open(tmp_path)
    with pytest.raises(FramingError, match="No such file"):
        artifacts.open(tmp_path / "absent.ninfer")
    path.write_bytes(raw + b"trailing")  # tolerated before version 3
    artifacts.open(path).close()


def test_v3_length_is_exact(tmp_path: Path) -> None:
    path = write_v3(tmp_path / "a.ninfer")
    raw = path.read_bytes()
    for data in (raw + b"\0", raw[:-1]):
        path.write_bytes(data)
        with pytest.raises(FramingError, match="requires exactly"):
            artifacts.open(path)


# Writers


def _plans() -> list[ObjectPlan]:
    return [ObjectPlan("r", bytes=3), ObjectPlan("w", (256, 64), "NVFP4"), ObjectPlan("q", (5, 200), "Q6G64_F16S")]


@pytest.mark.parametrize("missing", [0, 1, 2])
def test_a_single_missing_byte_is_named(tmp_path: Path, missing: int) -> None:
    with pytest.raises(OutputError, match=f"'r': byte {missing} of 3 was never written"), ArtifactWriter(
        tmp_path / "a.ninfer", Identity("m", "w"), [ObjectPlan("r", bytes=3)]
    ) as writer:
        for at in {0, 1, 2} - {missing}:
            writer.write_at("r", at, b"x")
    assert list(tmp_path.iterdir()) == []


def test_writer_demands_every_byte_once(tmp_path: Path) -> None:
    path = tmp_path / "a.ninfer"
    with pytest.raises(OutputError, match="'w': byte 0 of .* was never written"), ArtifactWriter(
        path, Identity("m", "w"), _plans()
    ) as writer:
        writer.write("r", b"abc")
    assert list(tmp_path.iterdir()) == []
    with ArtifactWriter(path, Identity("m", "w"), _plans()) as writer:
        writer.write_at("r", 1, b"bc")
        with pytest.raises(OutputError, match="overlap"):
            writer.write_at("r", 0, b"ab")
        with pytest.raises(OutputError, match="leave its 3 planned bytes"):
            writer.write_at("r", 2, b"xy")
        with pytest.raises(OutputError, match="not in the plan"):
            writer.write("x", b"abc")
        with pytest.raises(OutputError, match="2 bytes given, 3 are planned"):
            writer.write("r", b"ab")
        writer.write_at("r", 0, b"a")
        for name in ("w", "q"):
            writer.write(name, bytes(writer.objects[name].bytes))
    with artifacts.open(path) as artifact:
        assert artifact.resource("r") == b"abc"
    with pytest.raises(OutputError, match="closed"):
        writer.write_at("r", 0, b"a")
    with pytest.raises(OutputError, match="exists already"):
        ArtifactWriter(path, Identity("m", "w"), _plans())
    assert [p.name for p in tmp_path.iterdir()] == ["a.ninfer"]


def test_writer_leaves_nothing_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), ArtifactWriter(tmp_path / "a.ninfer", Identity("m", "w"), _plans()):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_write_rows_in_any_order_from_threads(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    path = tmp_path / "a.ninfer"
    values = {"w": rng.standard_normal((256, 64), np.float32), "q": rng.standard_normal((5, 200), np.float32)}
    encoded = {"w": FORMATS["NVFP4"].encode(values["w"]), "q": FORMATS["Q6G64_F16S"].encode(values["q"])}
    with ArtifactWriter(path, Identity("m", "w"), _plans()) as writer:
        writer.write("r", b"abc")

        def rows(name: str, r0: int, r1: int) -> None:
            fields = {k: v if v.ndim == 0 else v[r0:r1] for k, v in encoded[name].fields.items()}
            writer.write_rows(name, r0, fields)

        jobs = [("w", 128, 256), ("q", 3, 5), ("w", 0, 128), ("q", 0, 1), ("q", 1, 3)]
        threads = [threading.Thread(target=rows, args=job) for job in jobs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(LayoutError, match="'w'"):
            writer.write_rows("w", 0, {"codes": np.zeros((128, 3), np.uint8)})
        with pytest.raises(OutputError, match="has no rows"):
            writer.write_rows("r", 0, {})
    with artifacts.open(path) as artifact:
        for name, tensor in encoded.items():
            entry = artifact.tensor(name)
            packed = layout_of(entry.format).pack(tensor)
            assert (artifact.tensor_bytes(name) == packed).all()
            decoded = decode(entry.format, entry.layout, entry.shape, artifact.tensor_bytes(name))
            assert np.abs(decoded - values[name]).max() < 0.7


def test_writer_rejects_bad_plans(tmp_path: Path) -> None:
    path = tmp_path / "a.ninfer"
    for plans, match in (
        ([], "at least one object"),
        ([ObjectPlan("a", bytes=0)], "at least 1"),
        ([ObjectPlan("a", bytes=1), ObjectPlan("a", bytes=1)], "occurs twice"),
    ):
        with pytest.raises(artifacts.ArtifactError, match=match):
            ArtifactWriter(path, Identity("m", "w"), plans)
    for identity in (Identity("", "w"), Identity("m", "")):
        with pytest.raises(artifacts.ArtifactError, match="nonempty"):
            ArtifactWriter(path, identity, _plans())
    with pytest.raises(artifacts.ArtifactError, match="version 1 cannot hold format NVFP4"):
        ArtifactWriter(path, Identity("m"), _plans())
    with pytest.raises(artifacts.ArtifactError, match="unknown format 'Q3'"):
        ObjectPlan("a", (2, 2), "Q3")
    with pytest.raises(artifacts.ArtifactError, match="'a'"):
        ObjectPlan("a", (2, 2), "NVFP4")
    with pytest.raises(OutputError, match="No such file"):
        ArtifactWriter(tmp_path / "no" / "a.ninfer", Identity("m", "w"), _plans())
    assert list(tmp_path.iterdir()) == []


def test_disk_full_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full, raising=False)
    with pytest.raises(OutputError, match="no space left"):
        ArtifactWriter(tmp_path / "a.ninfer", Identity("m", "w"), _plans())
    monkeypatch.undo()
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 10})())
    with pytest.raises(OutputError, match="bytes are needed, 10 are free"):
        ArtifactWriter(tmp_path / "a.ninfer", Identity("m", "w"), _plans())


def test_without_pwrite_and_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.pwrite")

    def no_links(*arguments: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("os.link", no_links)
    path = write_v1(tmp_path / "a.ninfer")
    with artifacts.open(path) as artifact:
        assert artifact.resource("frontend/tokenizer.json") == b"hello"
    with pytest.raises(OutputError, match="exists already"):
        write_v1(path)


def test_a_file_that_appears_meanwhile_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.ninfer"
    with pytest.raises(OutputError, match="exists already"), ArtifactWriter(path, Identity("m", "w"), _plans()[:1]) as w:
        w.write("r", b"abc")
        path.write_bytes(b"mine")
    assert path.read_bytes() == b"mine" and [p.name for p in tmp_path.iterdir()] == ["a.ninfer"]


def test_v3_writer_publishes_all_or_nothing(tmp_path: Path) -> None:
    source = write_v2(tmp_path / "v2.ninfer")
    blocker = tmp_path / "v3.ninfer.part-0002"
    blocker.write_bytes(b"mine")
    with pytest.raises(OutputError, match="part-0002.* exists already"):
        write_v3(tmp_path / "v3.ninfer", source, limit=65536)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["v2.ninfer", blocker.name]
    with pytest.raises(OutputError, match="leaves no room"):
        write_v3(tmp_path / "v3.ninfer", source, limit=8192)


def test_coverage_against_a_set() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        coverage, seen = Coverage(), set[int]()
        for _ in range(30):
            begin = int(rng.integers(0, 40))
            span = range(begin, begin + int(rng.integers(1, 6)))
            fits = seen.isdisjoint(span)
            assert coverage.add(span.start, span.stop) == fits
            if fits:
                seen |= set(span)
        missing = [i for i in range(46) if i not in seen]
        for size in range(1, 47):
            assert coverage.first_missing(size) == next((i for i in missing if i < size), None)


def test_sparse_writer_keeps_holes(tmp_path: Path) -> None:
    path = tmp_path / "a.ninfer"
    with ArtifactWriter(path, Identity("m", "w"), [ObjectPlan("big", (1 << 20, 1024), "BF16")], sparse=True):
        pass
    assert path.stat().st_size > 1 << 31
    if hasattr(path.stat(), "st_blocks"):
        assert path.stat().st_blocks * 512 < 1 << 20
    with artifacts.open(path) as artifact:
        assert not artifact.tensor_bytes("big", (1 << 31) - 100, 1 << 31).any()
    assert builtins.open is not artifacts.open
