"""verify, inspect, diff, upgrade and their commands."""

import json
import struct
import time
from pathlib import Path

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

import artifacts
from artifacts import ArtifactWriter, Identity, ObjectPlan
from artifacts.container.directory_v3 import encode_directory
from artifacts.container.schema import place
from artifacts.errors import IdentityError, OutputError, PayloadError
from artifacts.formats import FORMATS
from artifacts.identities import plan_objects
from artifacts.identities.plan import CONFIG_RESOURCE
from artifacts.identities.registry import DFLASH2_27B, REGISTRY, registered
from artifacts.layouts import layout_of
from artifacts.tools import upgrade as upgrade_tool
from artifacts.tools.diff import compare
from artifacts.tools.inspect import summary
from artifacts.tools.upgrade import plan_upgrade, upgrade
from artifacts.tools.verify import verify
from runtime.cli.artifact import register
from tests.container.samples import DIMS, MOE_DIMS, resources, write_v1, write_v2, write_v3

app = typer.Typer()
register(app)
runner = CliRunner()


def problems(path: Path, deep: bool = False) -> list[str]:
    with artifacts.open(path) as artifact:
        return verify(artifact, deep)


def edit(path: Path, name: str, offset: int, data: bytes) -> None:
    """Replace stored bytes of an object."""
    with artifacts.open(path) as artifact:
        at = artifact.payload_start + artifact.objects[name].offset + offset
    with open(path, "r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize("weights", ["bf16", "groupwise-int", "nvfp4", "nvfp4-fp8"])
def test_samples_are_sound(tmp_path: Path, weights: str) -> None:
    path = write_v2(tmp_path / "a.ninfer", weights, vision=True, draft_rows=30)
    assert problems(path, deep=True) == []
    assert problems(write_v3(tmp_path / "b.ninfer", path), deep=True) == []
    assert problems(write_v3(tmp_path / "c.ninfer", path, limit=65536), deep=True) == []


def test_moe_sample_is_sound(tmp_path: Path) -> None:
    path = write_v2(tmp_path / "a.ninfer", dims=MOE_DIMS)
    assert problems(path, deep=True) == []
    assert problems(write_v3(tmp_path / "b.ninfer", path), deep=True) == []


@pytest.mark.parametrize("identity", REGISTRY, ids=str)
def test_registered_inventories_verify_without_payload(tmp_path: Path, identity: Identity) -> None:
    entry = REGISTRY[identity]
    path = tmp_path / "a.ninfer"
    with ArtifactWriter(path, identity, entry.plan(), sparse=True) as writer:
        for name in writer.objects:
            if name.endswith("input_scale_divisor"):
                writer.write(name, struct.pack("<f", 3.0))
    assert problems(path) == []


@pytest.mark.parametrize("change", ["missing", "extra", "format", "shape", "kind"])
def test_registered_inventory_problems(tmp_path: Path, change: str) -> None:
    entry = registered(Identity("qwen3.6-27b", "groupwise-int"))
    plans = entry.plan()
    at = next(i for i, plan in enumerate(plans) if plan.name == "text/layers/5/mlp/down")
    if change == "missing":
        del plans[at]
    elif change == "extra":
        plans.append(ObjectPlan("text/layers/64/input_norm", (5120,), "BF16"))
    elif change == "format":
        plans[at] = ObjectPlan(plans[at].name, plans[at].shape, "Q6G64_F16S")
    elif change == "shape":
        plans[at] = ObjectPlan(plans[at].name, (5121, 17408), "Q5G64_F16S")
    else:
        plans[at] = ObjectPlan(plans[at].name, bytes=100)
    path = tmp_path / "a.ninfer"
    with ArtifactWriter(path, entry.identity, plans, sparse=True):
        pass
    (problem,) = problems(path)
    expected = {
        "missing": "1 missing, the first is 'text/layers/5/mlp/down'",
        "extra": "1 not expected, the first is 'text/layers/64/input_norm'",
        "format": "requires Q5G64_F16S",
        "shape": "requires Q5G64_F16S [5120, 17408]",
        "kind": "has a tensor there",
    }
    assert expected[change] in problem


def test_dflash2_is_an_optional_component(tmp_path: Path) -> None:
    entry = registered(Identity("qwen3.8-27b", "nvfp4"))
    drafter = plan_objects(entry.text, entry.schema, drafter=DFLASH2_27B)
    plans = [*entry.plan(), *(p for p in drafter if p.name.startswith("dflash2/"))]
    assert len(plans) == 1190
    path = tmp_path / "a.ninfer"
    with ArtifactWriter(path, entry.identity, plans, sparse=True) as writer:
        for name in writer.objects:
            if name.endswith("input_scale_divisor"):
                writer.write(name, struct.pack("<f", 3.0))
    assert problems(path) == []
    with artifacts.open(path) as artifact:
        plan = plan_upgrade(artifact, "new.ninfer")
    assert len(plan.directory.bindings) == 1513 and "dflash2" in plan.directory.components


# Files outside the registry


def _custom(path: Path, change: str) -> Path:
    data = resources()
    plans = plan_objects(DIMS, "nvfp4", with_mtp=True, resources={n: len(v) for n, v in data.items()})
    index = {plan.name: i for i, plan in enumerate(plans)}
    if change == "missing":
        del plans[index["text/layers/1/gdn/a_log"]]
    elif change == "extra":
        plans.append(ObjectPlan("text/layers/9/input_norm", (128,), "BF16"))
    elif change == "norm-format":
        plans[index["text/final_norm"]] = ObjectPlan("text/final_norm", (128,), "FP32")
    elif change == "norm-shape":
        plans[index["text/final_norm"]] = ObjectPlan("text/final_norm", (64,), "BF16")
    elif change == "rows":
        plans[index["text/layers/0/mlp/gate_up"]] = ObjectPlan("text/layers/0/mlp/gate_up", (384, 128), "NVFP4")
    elif change == "width":
        plans[index["text/output_head"]] = ObjectPlan("text/output_head", (300, 64), "W8G32_F16S")
    elif change == "divisor-missing":
        del plans[index["text/layers/0/mlp/down_projection/input_scale_divisor"]]
    elif change == "divisor-extra":
        plans.append(ObjectPlan("mtp/layer/mlp/down_projection/input_scale_divisor", (), "FP32"))
    elif change == "divisor-shape":
        at = index["text/layers/0/mlp/down_projection/input_scale_divisor"]
        plans[at] = ObjectPlan(plans[at].name, (1,), "FP32")
    elif change == "resource":
        plans.append(ObjectPlan("frontend/readme.md", bytes=1))
    with ArtifactWriter(path, Identity("custom", "nvfp4"), plans, sparse=True) as writer:
        for name, value in data.items():
            writer.write(name, value)
        for name, entry in writer.objects.items():
            if name.endswith("input_scale_divisor") and change != "divisor-zero":
                writer.write(name, np.full(entry.bytes // 4, 2.0, "<f4"))
    return path


def test_activations_that_nobody_measured(tmp_path: Path) -> None:
    """An NVFP4 parent without its scalar is used with unquantized activations; a registered one must have it."""
    path = _custom(tmp_path / "a.ninfer", "divisor-missing")
    assert problems(path) == []
    new = write_v3(tmp_path / "b.ninfer", path)
    assert problems(new) == []
    with artifacts.open(new) as artifact:
        uses = {use.parameter: use for use in artifact.directory_v3.uses if use.parameter.startswith("text/layers/0/mlp")}
        assert {name.rpartition("/")[2]: use.policy for name, use in uses.items()} == {
            "gate": "AllowA4", "up": "AllowA4", "down": "A16Only"
        }  # fmt: skip
        assert uses["text/layers/0/mlp/down"].auxiliaries == {}
    entry = registered(Identity("qwen3.8-27b", "nvfp4"))
    plans = [plan for plan in entry.plan() if plan.name != "text/layers/0/mlp/down_projection/input_scale_divisor"]
    with ArtifactWriter(tmp_path / "c.ninfer", entry.identity, plans, sparse=True) as writer:
        for name in writer.objects:
            if name.endswith("input_scale_divisor"):
                writer.write(name, struct.pack("<f", 3.0))
    (problem,) = problems(tmp_path / "c.ninfer")
    assert "1 missing, the first is 'text/layers/0/mlp/down_projection/input_scale_divisor'" in problem


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("missing", "parameters: 1 missing, the first is 'text/layers/1/gdn/a_log'"),
        ("extra", "parameters: 1 not expected, the first is 'text/layers/9/input_norm'"),
        ("norm-format", "parameter 'text/final_norm': stored as FP32, BF16 required"),
        ("norm-shape", "parameter 'text/final_norm': 64 elements stored, [128] required"),
        ("rows", "'text/layers/0/mlp/gate_up': 384 rows; the model's dimensions need 256"),
        ("width", "parameter 'text/output_head': 19200 elements stored, [300, 128] required"),
        ("divisor-extra", "an input divisor without an NVFP4 parent"),
        ("divisor-shape", "an input divisor must be one FP32 scalar"),
        ("divisor-zero", "input divisor 0.0 must be finite and positive"),
        ("resource", "'frontend/readme.md': not a resource of this schema"),
    ],
)
def test_unregistered_inventory_problems(tmp_path: Path, change: str, match: str) -> None:
    found = problems(_custom(tmp_path / "a.ninfer", change))
    assert any(match in problem for problem in found), found
    assert len(found) == (1 if change != "divisor-zero" else 16)  # 4 layers, 4 sites each


def test_v3_binder_rules(tmp_path: Path) -> None:
    source = write_v2(tmp_path / "a.ninfer", "nvfp4")
    path = write_v3(tmp_path / "b.ninfer", source)

    def broken(old: bytes, new: bytes, match: str) -> None:
        raw = path.read_bytes()
        assert raw.count(old) >= 1 and len(old) == len(new)
        copy = tmp_path / "c.ninfer"
        copy.write_bytes(raw.replace(old, new, 1))
        found = problems(copy)
        assert any(match in problem for problem in found), found

    broken(b'{"text/token_embedding":', b'{"text/token_embeddinh":', "parameters: 1 missing")
    use = b'{"parameter":"text/layers/0/mlp/down","input":"text/layers/0/mlp/product"'
    broken(use, use[:-2] + b'T"', "no use at input 'text/layers/0/mlp/product'")
    broken(b'"activation_input_divisor"', b'"activation_input_divisox"', "needs an activation_input_divisor")
    edit(path, "text/layers/0/mlp/down_projection/input_scale_divisor", 0, struct.pack("<f", float("nan")))
    assert any("input divisor nan must be finite" in problem for problem in problems(path))


# Stored values


def test_deep_finds_illegal_words(tmp_path: Path) -> None:
    clean = write_v2(tmp_path / "a.ninfer", "nvfp4-fp8", vision=True, draft_rows=30)
    with artifacts.open(clean) as artifact:
        sizes = {name: entry.bytes for name, entry in artifact.objects.items()}
    cases = [
        ("mtp/layer/mlp/down", 5, b"\x80", "rows 0 to 127"),  # W8 code -128
        ("mtp/layer/mlp/down", sizes["mtp/layer/mlp/down"] - 2, b"\x00\x80", "scale"),  # binary16 -0
        ("text/layers/0/mlp/down", sizes["text/layers/0/mlp/down"] - 5, b"\x7f", "rows"),  # E4M3FN NaN scale
        ("text/layers/0/mlp/down", sizes["text/layers/0/mlp/down"] - 4, bytes(4), "rows"),  # divisor 0
        ("text/layers/3/attention/output", 9, b"\xff", "rows"),  # FP8 NaN
        ("text/layers/3/attention/output", sizes["text/layers/3/attention/output"] - 1, b"\xbf", "rows"),  # negative scale
        ("vision/layers/0/attention/qkv", 40, b"\x01", "padding"),  # code past K = 32
        ("text/draft_head_token_ids", 0, struct.pack("<i", 261), "must be unique"),
        ("text/draft_head_token_ids", 0, struct.pack("<i", 300), "must lie in 0 to 299"),
    ]
    for name, offset, data, match in cases:
        path = tmp_path / "b.ninfer"
        path.write_bytes(clean.read_bytes())
        edit(path, name, offset, data)
        assert problems(path) == []
        (problem,) = problems(path, deep=True)
        assert name in problem and match in problem
    for name, offset, data, _ in cases[:7]:
        edit(path, name, offset, data)
    assert len(problems(path, deep=True)) == 5  # one line per object


def test_deep_progress_covers_everything(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    with artifacts.open(write_v2(tmp_path / "a.ninfer")) as artifact:
        verify(artifact, deep=True, progress=lambda done, total: seen.append((done, total)))
        quantized = sum(o.bytes for o in artifact.objects.values() if getattr(o, "layout", "") == "row-split-k128-v1")
    assert seen == sorted(seen) and 0.9 * quantized < seen[-1][0] <= seen[-1][1]


# inspect and diff


def test_summaries(tmp_path: Path) -> None:
    path = write_v2(tmp_path / "a.ninfer", "nvfp4")
    with artifacts.open(path) as artifact:
        facts = summary(artifact)
        assert json.loads(json.dumps(facts)) == facts
        assert facts["file_bytes"] == path.stat().st_size and facts["registered_as"] is None
        assert facts["formats"]["NVFP4"] == 16 and facts["resources"] == 3
        assert facts["objects"] == facts["tensors"] + facts["resources"] == len(artifact.objects)
    with artifacts.open(write_v3(tmp_path / "b.ninfer", path, limit=65536)) as artifact:
        facts = summary(artifact)
        assert facts["name"] == "sample" and facts["components"] == ["text", "mtp"]
        assert facts["formats"]["nvfp4"] == 16 and facts["layouts"]["block_scale_k16_m128x4_v1"] == 16
        assert facts["bindings"] == len(artifact.model.bindings) and len(facts["files"]) == len(artifact.files)
        assert facts["artifact_id"] == path.with_name("b.ninfer").read_bytes()[16:32].hex()
        total = facts["payload_offset"] + facts["payload_bytes"] + 4096 * (len(facts["files"]) - 1)
        assert facts["file_bytes"] == total


def test_diff(tmp_path: Path) -> None:
    a, b = write_v2(tmp_path / "a.ninfer", "nvfp4"), tmp_path / "b.ninfer"
    b.write_bytes(a.read_bytes())
    with artifacts.open(a) as left, artifacts.open(b) as right:
        assert list(compare(left, right)) == []
    edit(b, "text/final_norm", 100, b"\xaa\xbb")
    edit(b, "text/layers/0/mlp/down", 7, b"\x00")
    with artifacts.open(a) as left, artifacts.open(b) as right:
        found = {d.name: d for d in compare(left, right)}
        assert found["text/final_norm"].kind == "bytes"
        assert found["text/final_norm"].detail == "2 of 256 bytes differ, the first at 100"
        assert set(found) <= {"text/final_norm", "text/layers/0/mlp/down"}
        assert list(compare(left, right, payload=False)) == []
    other = write_v2(tmp_path / "c.ninfer", "nvfp4-fp8")
    with artifacts.open(a) as left, artifacts.open(other) as right:
        kinds = {(d.kind, d.name) for d in compare(left, right)}
        assert ("identity", "") in kinds
        assert ("only-a", "text/layers/0/gdn/a_projection") in kinds
        assert ("only-b", "text/layers/0/gdn/a_b_projection") in kinds
        assert ("metadata", "text/output_head") in kinds
        assert ("metadata", "text/layers/0/mlp/down") not in kinds
    with artifacts.open(a) as left, artifacts.open(write_v3(tmp_path / "d.ninfer", a)) as right:
        assert [d.kind for d in compare(left, right)] == ["identity"]


# upgrade


def test_upgrade_has_the_published_directory_lengths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JSON text, padded directory and file length of artifact-container-v3.md section 11."""
    monkeypatch.setattr(upgrade_tool, "_check_divisors", lambda artifact: None)  # the payload is sparse
    table = {
        "qwen3.6-27b/groupwise-int": (384437, 384992, 17495583503),
        "qwen3.6-27b/nvfp4": (474092, 475104, 18324338959),
        "qwen3.8-27b/groupwise-int": (384449, 384992, 18210750116),
        "qwen3.8-27b/nvfp4": (411915, 413664, 21492938404),
        "qwen3.6-35b-a3b/groupwise-int": (8010410, 8011744, 22791115023),
    }
    for name, expected in table.items():
        identity = Identity(*name.split("/"))
        path = tmp_path / "a.ninfer"
        with ArtifactWriter(path, identity, registered(identity).plan(), sparse=True, overwrite=True):
            pass
        template = bytes(9892 if identity.model_id == "qwen3.8-27b" else 8719)
        with artifacts.open(path) as artifact:
            plan = plan_upgrade(artifact, "b.ninfer", template)
        assert (len(encode_directory(plan.directory)), plan.directory_bytes, plan.file_bytes) == expected


def test_upgrade_replaces_the_template(tmp_path: Path) -> None:
    source = write_v2(tmp_path / "a.ninfer")
    with open(source, "ab") as file:
        file.write(b"tail")  # tolerated in version 2; the new template starts at the next multiple of 256
    with artifacts.open(source) as old:
        upgrade(old, tmp_path / "b.ninfer", template=b"new template")
        with artifacts.open(tmp_path / "b.ninfer") as new:
            assert new.model.frontend("chat_template.jinja") == b"new template"
            assert list(new.objects)[-1] == "frontend/chat_template.jinja"
            assert new.objects["frontend/chat_template.jinja"].offset % 256 == 0
            assert (new.read(0, old.payload_bytes) == old.read(0, old.payload_bytes)).all()
            assert new.directory_v3.provenance == {
                "upgraded_from": {"version": 2, "model_id": "sample", "weights_id": "groupwise-int"}
            }
        with pytest.raises(OutputError, match="exists already"):
            upgrade(old, tmp_path / "b.ninfer")


def test_upgrade_refusals(tmp_path: Path) -> None:
    with artifacts.open(write_v1(tmp_path / "v1.ninfer")) as artifact:
        with pytest.raises(IdentityError, match="migrate"):
            plan_upgrade(artifact, "x")
    with artifacts.open(write_v3(tmp_path / "v3.ninfer")) as artifact:
        with pytest.raises(IdentityError, match="version 3 already"):
            plan_upgrade(artifact, "x")
    with artifacts.open(_custom(tmp_path / "zero.ninfer", "divisor-zero")) as artifact:
        with pytest.raises(PayloadError, match="finite positive"):
            plan_upgrade(artifact, "x")
    entry = registered(Identity("qwen3.6-27b", "groupwise-int"))
    with ArtifactWriter(tmp_path / "short.ninfer", entry.identity, entry.plan()[:-1], sparse=True):
        pass
    with artifacts.open(tmp_path / "short.ninfer") as artifact:
        with pytest.raises(IdentityError, match="1421 logical parameters"):
            plan_upgrade(artifact, "x")


# Commands


def run(*arguments: object) -> tuple[int, str, str]:
    result = runner.invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        return 1, result.stdout, str(result.exception)
    return result.exit_code, result.stdout, result.stderr


def test_inspect_command(tmp_path: Path) -> None:
    path = write_v2(tmp_path / "a.ninfer", "nvfp4")
    code, out, err = run("inspect", path, "--json")
    facts = json.loads(out)
    assert (code, err) == (0, "") and facts["file_bytes"] == path.stat().st_size
    assert len(facts["object_records"]) == facts["objects"]
    assert facts["object_records"][0] == {
        "name": "frontend/tokenizer.json", "offset": 0, "bytes": 2, "kind": "resource", "encoding": "raw-bytes-v1"
    }  # fmt: skip
    code, out, err = run("inspect", path, "--objects")
    assert code == 0 and "model_id           sample" in out and out.count("\nobject ") == facts["objects"]
    new = write_v3(tmp_path / "b.ninfer", path)
    facts = json.loads(run("inspect", new, "--json")[1])
    assert len(facts["binding_records"]) == facts["bindings"] and len(facts["use_records"]) == facts["uses"]
    assert "binding text/layers/0/gdn/z = text/layers/0/gdn/query_key_value_z[32768:49152]" in run(
        "inspect", new, "--bindings"
    )[1]
    path.write_bytes(b"NINFER\0\x02" + bytes(8))
    code, out, err = run("inspect", path)
    assert (code, out) == (1, "") and err == "the directory length is 0; at least one byte is required"


def test_inspect_is_fast_on_a_sparse_20_gb_file(tmp_path: Path) -> None:
    path = tmp_path / "a.ninfer"
    entry = registered(Identity("qwen3.8-27b", "nvfp4"))
    with ArtifactWriter(path, entry.identity, entry.plan(), sparse=True):
        pass
    best = 9.0
    for _ in range(3):
        start = time.process_time()
        code, out, _ = run("inspect", path, "--json")
        best = min(best, time.process_time() - start)
    assert code == 0 and json.loads(out)["registered_as"] == "qwen3.8-27b/nvfp4" and best < 0.3


def test_hostile_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "a.ninfer"
    name = "evil\x1b[2J\nname"
    with ArtifactWriter(path, Identity("m\x07", "w"), [ObjectPlan(name, bytes=1)]) as writer:
        writer.write(name, b"x")
    for arguments in (("inspect", path, "--objects"), ("inspect", path, "--json"), ("verify", path), ("diff", path, path)):
        code, out, err = run(*arguments)
        assert not any(ord(c) < 32 and c != "\n" for c in out + err), arguments


def test_verify_command(tmp_path: Path) -> None:
    path = write_v2(tmp_path / "a.ninfer")
    code, out, _ = run("verify", path, "--deep")
    assert code == 0 and out.endswith("objects: sound\n")
    edit(path, "mtp/layer/mlp/down", 5, b"\x80")
    assert run("verify", path)[0] == 0
    code, out, err = run("verify", path, "--deep")
    assert code == 1 and out == "" and "mtp/layer/mlp/down" in err and "\n" not in err


def test_diff_command(tmp_path: Path) -> None:
    a = write_v2(tmp_path / "a.ninfer")
    b = tmp_path / "b.ninfer"
    b.write_bytes(a.read_bytes())
    assert run("diff", a, b) == (0, "", "")
    edit(b, "text/final_norm", 0, b"\xaa\xaa")
    assert run("diff", a, b, "--metadata")[0] == 0
    code, out, _ = run("diff", a, b, "--json")
    assert code == 1 and [d["name"] for d in json.loads(out)] == ["text/final_norm"]


def test_migrate_relabel_upgrade_commands(tmp_path: Path) -> None:
    path = write_v1(tmp_path / "v1.ninfer")
    assert "would become version 2, old-model/groupwise-int" in run("migrate", path, "--dry-run")[1]
    assert "is now version 2" in run("migrate", path)[1]
    assert "is version 2 already" in run("migrate", path)[1]
    assert "is now old-model/other" in run("relabel", path, "--weights-id", "other")[1]
    source = write_v2(tmp_path / "a.ninfer")
    target = tmp_path / "b.ninfer"
    code, out, err = run("upgrade", source, "-o", target, "--dry-run")
    assert code == 0 and out.startswith("would write") and not target.exists()
    code, out, err = run("upgrade", source, "-o", target)
    assert code == 0 and f"{target.stat().st_size} bytes in 1 file(s)" in out and "--chat-template" in err
    assert run("upgrade", source)[0] == 2
    template = tmp_path / "t.jinja"
    assert "No such file" in run("upgrade", source, "-o", tmp_path / "c", "--chat-template", template)[2]
    template.write_text("hello")
    assert run("upgrade", source, "-o", tmp_path / "c.ninfer", "--chat-template", template)[0] == 0


def test_a_torn_file_is_announced(tmp_path: Path) -> None:
    path = write_v1(tmp_path / "a.ninfer")
    raw = path.read_bytes()
    (tmp_path / "a.ninfer.v1-metadata-backup").write_bytes(raw[:4096])
    path.write_bytes(raw[:8] + bytes(4088) + raw[4096:])
    code, out, err = run("inspect", path)
    assert code == 0 and "version            1" in out and "interrupted rewrite" in err
    assert "undone first" in run("migrate", path)[2]


def test_packed_data_verifies(tmp_path: Path) -> None:
    """Values from the encoders pass the deep check whatever their shape."""
    rng = np.random.default_rng(5)
    plans = [ObjectPlan(f"x/{name}", (128, 64) if name == "NVFP4" else (3, 77), name)
             for name in FORMATS if name not in ("BF16", "FP32", "I32")]  # fmt: skip
    plans.append(ObjectPlan(CONFIG_RESOURCE, bytes=2))
    path = tmp_path / "a.ninfer"
    with ArtifactWriter(path, Identity("m", "w"), plans) as writer:
        writer.write(CONFIG_RESOURCE, b"{}")
        for plan in plans[:-1]:
            assert plan.format is not None
            values = rng.standard_normal(plan.shape, np.float32)
            words = (values.view(np.uint32) >> 16).astype(np.uint16)
            encoded = FORMATS[plan.format].encode(words if plan.format.startswith("FP8") else values)
            writer.write(plan.name, layout_of(plan.format).pack(encoded))
    found = problems(path, deep=True)
    assert len(found) == 2 and all("configuration: missing member model_type" in problem for problem in found)
    assert place(plans)[-1].bytes == 2
