"""Options, recipes, resources, draft head, interruption and hostile checkpoints."""

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import artifacts.container.artifact as container
from artifacts.convert import SHIPPED, Options, convert, load_recipe, parse_recipe
from artifacts.convert.checkpoint import Checkpoint
from artifacts.convert.config import text_dimensions
from artifacts.convert.convert import default_model_id
from artifacts.convert.frontend import draft_token_ids, embedded_template, frontend_resources, token_domain
from artifacts.errors import ArtifactError, ConfigError, FormatError, FramingError, OutputError
from artifacts.formats import FORMATS
from artifacts.identities import TextDims
from artifacts.layouts import LAYOUTS
from tests.convert import checkpoints as make

SHARED = Path(__file__).resolve().parents[3] / "shared"
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "tiny-hybrid.ninfer"


def tiny(tmp_path: Path, name: str = "m", **kwargs: Any) -> Path:
    return make.write_checkpoint(tmp_path / name, make.text_tensors(), **kwargs)


# --- the committed example


@pytest.mark.shared
@pytest.mark.skipif(not SHARED.is_dir(), reason="the bf16 checkpoint is not beside this repository")
def test_the_example_is_reproduced_byte_for_byte(tmp_path: Path) -> None:
    out = tmp_path / "tiny-hybrid.ninfer"
    convert(SHARED / "models" / "tiny-hybrid", out, Options("groupwise-int", vocabulary="W8", threads=2))
    assert out.read_bytes() == EXAMPLE.read_bytes()


def test_the_example_is_small_and_holds_its_parts() -> None:
    artifact = container.open(EXAMPLE)
    assert EXAMPLE.stat().st_size <= 12_000_000
    assert artifact.tensor("text/output_head").format == "W8G32_F16S"
    assert "mtp/layer/mlp/down" in artifact.objects and "frontend/chat_template.jinja" in artifact.objects
    dims = TextDims.from_config(json.loads(artifact.resource("model/config.json")))
    assert (dims.hidden, len(dims.layer_types), dims.vocabulary) == (256, 8, 4096)
    for name in artifact.objects:
        if name.startswith(("text/", "mtp/")):
            t, data = artifact.tensor(name), artifact.tensor_bytes(name)
            layout = LAYOUTS[t.layout]
            FORMATS[t.format].check(layout.unpack(t.format, t.shape, data))
            layout.check_padding(t.format, t.shape, data, 0, t.shape[0])


# --- output handling


def test_result_does_not_depend_on_threads(tmp_path: Path) -> None:
    directory = tiny(tmp_path)
    for weights in ("groupwise-int", "nvfp4"):
        for threads in (1, 3):
            convert(directory, tmp_path / f"{weights}{threads}.ninfer", Options(weights, threads=threads))
        one, three = (tmp_path / f"{weights}{n}.ninfer" for n in (1, 3))
        assert one.read_bytes() == three.read_bytes()


def test_existing_output_is_kept_unless_asked(tmp_path: Path) -> None:
    directory, out = tiny(tmp_path), tmp_path / "x.ninfer"
    out.write_bytes(b"precious")
    with pytest.raises(OutputError, match="exists already"):
        convert(directory, out)
    assert out.read_bytes() == b"precious"
    convert(directory, out, Options(overwrite=True))
    assert container.open(out).tensor("text/final_norm").shape == (make.HIDDEN,)


@pytest.mark.parametrize("at", [1, 7, 20])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_interruption_leaves_no_file(tmp_path: Path, at: int, error: type[BaseException]) -> None:
    directory, target = tiny(tmp_path), tmp_path / "out"
    target.mkdir()
    calls = 0

    def progress(total: int) -> Callable[[int], None]:
        def tick(done: int) -> None:
            nonlocal calls
            calls += 1
            if calls == at:
                raise error

        return tick

    with pytest.raises(error):
        convert(directory, target / "x.ninfer", Options(threads=2), progress=progress)
    assert list(target.iterdir()) == []


def test_progress_adds_up(tmp_path: Path) -> None:
    for weights in ("groupwise-int", "nvfp4", "bf16"):
        totals, done = [], []

        def progress(total: int, totals: list[int] = totals, done: list[int] = done) -> Callable[[int], None]:
            totals.append(total)
            return done.append

        convert(tiny(tmp_path), tmp_path / f"{weights}.ninfer", Options(weights), progress=progress)
        assert totals == [sum(done)]


def test_report(tmp_path: Path) -> None:
    out = tmp_path / "x.ninfer"
    report = convert(tiny(tmp_path), out)
    stored = json.loads((tmp_path / "x.ninfer.conversion.json").read_text())
    assert stored == report and stored["file"] == {"name": "x.ninfer", "bytes": out.stat().st_size}
    assert [o["name"] for o in stored["objects"]] == list(container.open(out).objects)
    assert str(tmp_path) not in json.dumps(stored)


def test_missing_directory_of_output(tmp_path: Path) -> None:
    with pytest.raises(OutputError):
        convert(tiny(tmp_path), tmp_path / "nowhere" / "x.ninfer")


# --- options and recipes


def formats_of(path: Path) -> dict[str, str]:
    artifact = container.open(path)
    return {n: artifact.tensor(n).format for n in artifact.objects if not n.startswith(("frontend/", "model/"))}


def test_overrides_and_recipe_files(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text(
        'extends = "groupwise-int"\nweights_id = "mine"\n[formats]\n"text/layers/*/mlp/*" = "W8G32_F16S"\n'
        '"text/layers/1/mlp/down" = "Q6G64_F16S"\n"mtp/*" = "BF16"\n'
    )
    out = tmp_path / "x.ninfer"
    overrides = {"text/layers/2/mlp/down": "FP8_E4M3FN_ROW_BF16S", "text/output_head": "Q6G64_F16S"}
    report = convert(tiny(tmp_path), out, Options(str(recipe), overrides=overrides))
    formats = formats_of(out)
    assert report["identity"]["weights_id"] == "mine"
    assert formats["text/layers/0/mlp/down"] == "W8G32_F16S" and formats["text/layers/1/mlp/down"] == "Q6G64_F16S"
    assert formats["text/layers/2/mlp/down"] == "FP8_E4M3FN_ROW_BF16S" and formats["text/output_head"] == "Q6G64_F16S"
    assert formats["mtp/input_projection"] == "BF16" and formats["text/layers/0/gdn/output"] == "Q5G64_F16S"
    assert formats["text/layers/0/gdn/a_log"] == "FP32"


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        (Options("int4"), ConfigError, "unknown recipe"),
        (Options("nowhere.toml"), ConfigError, "nowhere.toml"),
        (Options(vocabulary="Q8"), ConfigError, "--vocabulary"),
        (Options("bf16", vocabulary="W8"), ConfigError, "belongs to groupwise-int"),
        (Options("nvfp4", scale="best"), ConfigError, "--scale"),
        (Options(overrides={"text/nothing": "BF16"}), FormatError, "matches no matrix"),
        (Options(overrides={"text/final_norm": "W8G32_F16S"}), FormatError, "matches no matrix"),
        (Options(overrides={"text/layers/0/gdn/convolution": "W8G32_F16S"}), FormatError, "matches no matrix"),
        (Options(overrides={"text/output_head": "Q7"}), ConfigError, "unknown format"),
        (Options(overrides={"text/output_head": "I32"}), ConfigError, "unknown format"),
        (Options("nvfp4", overrides={"text/layers/*/gdn/a_projection": "NVFP4"}), FormatError, "a_projection"),
        (Options(model_id=""), ConfigError, "--model-id"),
        (Options(ranking="counts"), ConfigError, "draft head needs"),
        (Options(vision=True), ConfigError, "vision_config"),
        (Options(base="nowhere"), ConfigError, "not a checkpoint directory"),
    ],
)
def test_bad_options(tmp_path: Path, options: Options, error: type[ArtifactError], match: str) -> None:
    with pytest.raises(error, match=match) as caught:
        convert(tiny(tmp_path), tmp_path / "x.ninfer", options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "x.ninfer").exists() and not (tmp_path / "x.ninfer.conversion.json").exists()


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("weights_id = 'x'", "schema must be"),
        ("weights_id = 'x'\nschema = []", "schema must be"),
        ("schema = 'bf16'", "weights_id must be"),
        ("extends = 'none'", "extends must be"),
        ("extends = 'bf16'\nspeed = 1", "unknown member"),
        ("extends = 'bf16'\nscale = 'best'", "scale must be"),
        ("extends = 'bf16'\n[formats]\n'*' = 4", "unknown format"),
        ("extends = 'bf16'\n[sources]\n'*' = 'elsewhere'", "main or base"),
        ("extends = 'bf16'\nformats = 1", "must be a table"),
        ("[", "not valid TOML"),
    ],
)
def test_bad_recipes(text: str, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        parse_recipe(text, "r")


def test_shipped_recipes_load() -> None:
    for name in SHIPPED:
        assert load_recipe(name).name == name


def test_model_ids() -> None:
    assert default_model_id(Path("/x/Qwen3.6-27B")) == "qwen3.6-27b"
    assert default_model_id(Path("/x/ä b_C")) == "b-c" and default_model_id(Path("/x/__")) == "model"


# --- configuration


def test_older_spellings() -> None:
    old = {k: v for k, v in make.TEXT_CONFIG.items() if k not in ("layer_types", "rope_parameters", "model_type")}
    old |= {"full_attention_interval": 4, "rope_theta": 10000.0, "partial_rotary_factor": 0.25}
    old["rope_scaling"] = {"type": "default", "mrope_section": [3, 3, 2]}
    assert text_dimensions({"model_type": "qwen3_5", "text_config": old}) == text_dimensions(make.TEXT_CONFIG)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"model_type": "llama"}, "model_type"),
        ({"model_type": {}}, "model_type"),
        ({"rms_norm_eps": 1e300}, "rms_norm_eps"),
        ({"rms_norm_eps": 1e-60}, "rms_norm_eps"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps"),
        ({"model_type": "qwen3_5_moe_text"}, "num_experts"),
        ({"attention_bias": True}, "attention_bias"),
        ({"attn_output_gate": False}, "attn_output_gate"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_hidden_layers": 5}, "layer_types"),
        ({"rope_parameters": None}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
        ({"hidden_size": True}, "hidden_size"),
        ({"vocab_size": 10**30}, "vocab_size"),
    ],
)
def test_unsupported_configurations(tmp_path: Path, change: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        convert(tiny(tmp_path, config={**make.TEXT_CONFIG, **change}), tmp_path / "x.ninfer")


# --- resources


def test_resources_are_copied_byte_for_byte(tmp_path: Path) -> None:
    files = {"tokenizer.json": '{ "a":1 }\n', "tokenizer_config.json": '{"chat_template": "{{ x }}ü"}',
             "generation_config.json": "{}", "config.json": json.dumps(make.TEXT_CONFIG)}  # fmt: skip
    out = tmp_path / "x.ninfer"
    convert(tiny(tmp_path, files=files), out)
    artifact = container.open(out)
    assert list(artifact.objects)[:5] == [
        "frontend/tokenizer.json", "frontend/tokenizer_config.json", "frontend/chat_template.jinja",
        "frontend/generation_config.json", "model/config.json",
    ]  # fmt: skip
    assert artifact.resource("frontend/tokenizer.json") == b'{ "a":1 }\n'
    assert artifact.resource("frontend/chat_template.jinja") == "{{ x }}ü".encode()


def test_template_file_wins_over_the_embedded_one(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    (tmp_path / "chat_template.jinja").write_text("new")
    assert frontend_resources(tmp_path)["frontend/chat_template.jinja"] == b"new"


def test_embedded_templates() -> None:
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert embedded_template(json.dumps({"chat_template": named}).encode()) == b"d"
    assert embedded_template(b"{}") is None and embedded_template(b"[]") is None
    for bad in (b'{"chat_template": 5}', b'{"chat_template": ""}', b"{", b'{"chat_template": "\\ud800"}'):
        with pytest.raises(ConfigError):
            embedded_template(bad)


def test_empty_resource_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tokenizer.json"):
        convert(tiny(tmp_path, files={"tokenizer.json": ""}), tmp_path / "x.ninfer")


# --- draft head


def draft_oracle(counts: list[int], domain: int, special: list[int], rows: int) -> list[int]:
    """conversion.md section 4, step by step."""
    forced = sorted({i for i in special if i < domain})
    order = sorted(range(domain), key=lambda i: (-counts[i], i))
    if len(forced) >= rows:
        return sorted(forced, key=lambda i: -counts[i])[:rows]
    picked = [i for i in order if i not in forced][: rows - len(forced)]
    return sorted(picked + forced, key=lambda i: -counts[i])


def test_draft_token_ids_follow_the_ranking() -> None:
    rng = np.random.default_rng(1)
    for trial in range(50):
        domain = int(rng.integers(5, 60))
        counts = rng.integers(0, 4, domain + 5)  # many ties
        special = rng.choice(domain + 5, int(rng.integers(0, domain)), replace=False).tolist()
        rows = int(rng.integers(1, domain + 1))
        got = draft_token_ids(counts, domain, special, rows)
        assert got.dtype == np.int32 and got.tolist() == draft_oracle(counts.tolist(), domain, special, rows), trial
    with pytest.raises(ConfigError):
        draft_token_ids(np.zeros(5, np.int64), 5, [], 6)


def test_token_domain() -> None:
    tokenizer = b'{"model": {"vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 2}]}'
    config = b'{"added_tokens_decoder": {"4": {"special": true}, "3": {"special": false}}}'
    resources = {"frontend/tokenizer.json": tokenizer, "frontend/tokenizer_config.json": config}
    assert token_domain(resources, 8) == (5, [4])
    with pytest.raises(ConfigError, match="below the 4 rows"):
        token_domain(resources, 4)
    with pytest.raises(ConfigError, match="malformed"):
        token_domain({"frontend/tokenizer.json": b'{"model": []}'}, 4)
    with pytest.raises(ConfigError, match="needs tokenizer.json"):
        token_domain({}, 4)


def test_draft_head(tmp_path: Path) -> None:
    rows = 131200
    config = {**make.TEXT_CONFIG, "vocab_size": rows}
    tensors = make.text_tensors(vocabulary=rows, mtp=False)
    vocabulary = {f"t{i}": i for i in range(rows - 100)}
    added = {str(rows - 99): {"special": True}}
    files = {"tokenizer.json": json.dumps({"model": {"vocab": vocabulary}}),
             "tokenizer_config.json": json.dumps({"added_tokens_decoder": added})}  # fmt: skip
    directory = make.write_checkpoint(tmp_path / "m", tensors, config, files=files)
    counts = np.random.default_rng(0).integers(0, 1000, (2, rows)).astype("<i8")
    counts.tofile(tmp_path / "counts.i64")
    head = tensors["lm_head.weight"][1]
    convert(directory, tmp_path / "x.ninfer", Options(ranking=tmp_path / "counts.i64", threads=2))
    artifact = container.open(tmp_path / "x.ninfer")
    ids = np.frombuffer(artifact.tensor_bytes("text/draft_head_token_ids"), "<i4")
    assert len(np.unique(ids)) == 131072 and rows - 99 in ids and ids.max() < rows - 98
    want = FORMATS["Q4G64_F16S"].encode(np.ascontiguousarray(head[ids])).fields
    t = artifact.tensor("text/draft_head")
    got = LAYOUTS[t.layout].unpack(t.format, t.shape, artifact.tensor_bytes("text/draft_head")).fields
    assert all(np.array_equal(got[k], want[k]) for k in want)
    names = list(artifact.objects)
    assert names.index("text/draft_head_token_ids") == names.index("text/draft_head") + 1


@pytest.mark.parametrize("weights", ["groupwise-int", "nvfp4", "bf16"])
def test_memory_is_bounded_by_blocks(tmp_path: Path, weights: str) -> None:
    rows = 1 << 17  # embedding and head: 33 MB each as BF16, 67 MB as float32
    make_config = {**make.TEXT_CONFIG, "vocab_size": rows}
    directory = make.write_checkpoint(tmp_path / "m", make.text_tensors(vocabulary=rows, mtp=False), make_config)
    tracemalloc.start()
    try:
        convert(directory, tmp_path / "x.ninfer", Options(weights, threads=2))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 40 << 20, peak


# --- hostile checkpoints


GOOD: make.Tensors = {"a": ("BF16", np.zeros((2, 3), np.uint16)), "b": ("F32", np.zeros(4, np.float32))}


def entry(dtype: Any = "BF16", shape: Any = (2, 3), span: Any = (0, 12), **extra: Any) -> dict[str, Any]:
    return {"a": {"dtype": dtype, "shape": shape, "data_offsets": span, **extra}}


@pytest.mark.parametrize(
    ("header", "match"),
    [
        (entry("BF17"), "unknown dtype"),
        (entry(["BF16"]), "unknown dtype"),
        (entry(shape=[2, -3]), "shape"),
        (entry(shape=[2, True, 3]), "shape"),
        (entry(shape=[2.0, 3]), "shape"),
        (entry(shape=[1] * 17), "shape"),
        (entry(shape=[2**62, 2**62]), "do not hold"),
        (entry(shape=[2, 4]), "do not hold"),
        (entry(span=[0, 13]), "leave"),
        (entry(span=[4, 0]), "leave"),
        (entry(span=[-12, 0]), "leave"),
        (entry(span=[0, 12, 24]), "two integers"),
        (entry(span=[False, 12]), "two integers"),
        (entry(extra=1), "members"),
        ({"a": 5}, "members"),
        ([], "not a JSON object"),
        ({"a": entry()["a"], "b": entry()["a"]}, "overlaps"),
        (entry(shape=[2, 2], span=[4, 12]), "gap"),
        (entry(shape=[2, 2], span=[0, 8]), "after the last"),
    ],
)
def test_hostile_safetensors_headers(tmp_path: Path, header: Any, match: str) -> None:
    raw = make.safetensors_bytes({"a": GOOD["a"]}, header)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(FramingError, match=match) as caught:
        Checkpoint(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("raw", "match"),
    [
        (b"", "too short"),
        (b"\x10\0\0\0\0\0\0\0{}", "fit"),
        (b"\xff" * 8 + b"{}", "fit"),
        (b"\x02\0\0\0\0\0\0\0{]", "not valid JSON"),
        (b"\x02\0\0\0\0\0\0\0\xff\xff", "not valid JSON"),
        ((40000).to_bytes(8, "little") + b"[" * 40000, "not valid JSON"),
        ((22).to_bytes(8, "little") + b'{"a": {}, "a": {}}    ', "repeats a member"),
        ((8).to_bytes(8, "little") + b'{"a":NaN', "JSON"),
    ],
)
def test_hostile_safetensors_bytes(tmp_path: Path, raw: bytes, match: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(raw)
    with pytest.raises(FramingError, match=match):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "match"),
    [
        ({"a": "../m/model-00001-of-00002.safetensors"}, "plain file name"),
        ({"a": "/etc/passwd"}, "plain file name"),
        ({"a": ".."}, "plain file name"),
        ({"a": "C:x"}, "plain file name"),
        ({"a": "none.safetensors"}, "none.safetensors"),
        ({}, "non-empty"),
        ([], "non-empty"),
    ],
)
def test_hostile_indexes(tmp_path: Path, weight_map: Any, match: str) -> None:
    directory = make.write_checkpoint(tmp_path / "m", GOOD, shards=2)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(ConfigError, match=match):
        Checkpoint(directory)


def test_index_and_shards_must_agree(tmp_path: Path) -> None:
    directory = make.write_checkpoint(tmp_path / "m", GOOD, shards=2)
    index = directory / "model.safetensors.index.json"
    record = json.loads(index.read_text())
    first, second = sorted(set(record["weight_map"].values()))
    index.write_text(json.dumps({"weight_map": {"a": first, "b": first}}))
    with pytest.raises(ConfigError, match="'b' is not in"):
        Checkpoint(directory)
    (directory / second).write_bytes((directory / first).read_bytes())
    index.write_text(json.dumps({"weight_map": {"a": first, "b": second}}))
    with pytest.raises(ConfigError, match="two files"):
        Checkpoint(directory)


def test_truncation_while_reading(tmp_path: Path) -> None:
    directory = tiny(tmp_path)
    with Checkpoint(directory) as checkpoint:
        os.truncate(directory / "model.safetensors", 20000)
        with pytest.raises(FramingError, match="ended at byte"):
            for tensor in checkpoint.tensors.values():
                checkpoint.read(tensor)


def test_a_directory_without_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="config.json"):
        Checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="neither"):
        Checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="not a checkpoint directory"):
        Checkpoint(tmp_path / "config.json")


def test_non_finite_weights_name_the_object(tmp_path: Path) -> None:
    for weights in ("groupwise-int", "nvfp4"):
        tensors = make.text_tensors()
        tensors["model.layers.2.mlp.down_proj.weight"][1][7, 7] = 0x7F80
        directory = make.write_checkpoint(tmp_path / "m", tensors)
        with pytest.raises(FormatError, match="text/layers/2/mlp/down"):
            convert(directory, tmp_path / "x.ninfer", Options(weights))
        assert not (tmp_path / "x.ninfer").exists()


def test_values_that_bf16_cannot_hold(tmp_path: Path) -> None:
    tensors = make.text_tensors()
    tensors["model.norm.weight"] = ("F32", np.full(make.HIDDEN, 1.5, np.float32))  # exact: accepted
    tensors["model.layers.0.linear_attn.A_log"] = ("F32", np.array([0.1, 0.2], np.float32))  # FP32 stays FP32
    convert(make.write_checkpoint(tmp_path / "m", tensors), tmp_path / "x.ninfer")
    stored = container.open(tmp_path / "x.ninfer").tensor_bytes("text/layers/0/gdn/a_log")
    assert np.array_equal(np.frombuffer(stored, "<f4"), np.array([0.1, 0.2], np.float32))
    tensors["model.norm.weight"] = ("F32", np.full(make.HIDDEN, 0.1, np.float32))
    with pytest.raises(FormatError, match="model.norm.weight"):
        convert(make.write_checkpoint(tmp_path / "m", tensors), tmp_path / "y.ninfer")
