"""``ninferc batch``: lanes join and leave, results in the order given, one bad line stops everything before it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from runtime.frontend.frontend import Frontend
from tests.cli import small_model
from tests.cli.conftest import Result, plan_folder, rejected, run_cli

REQUESTS: list[dict[str, Any]] = [
    {"id": "long", "prompt": "Tell me a long story", "max_new": 24},
    {"ids": [9, 8, 7], "max_new": 3, "id": 7},
    {"prompt": "Hi", "max_new": 6, "temperature": 1.0, "seed": 5},
    {"messages": [{"role": "user", "content": "Hello"}], "max_new": 9, "raw": True},
    {"ids": list(range(150)), "max_new": 4, "ignore_eos": True},
    {"prompt": "Hi", "max_new": 6, "temperature": 1.0, "seed": 6},
    {"prompt": "Tell me", "max_new": 1},
]


def write(path: Path, requests: list[Any]) -> Path:
    path.write_text("\n\n".join(json.dumps(item) for item in requests) + "\n")
    return path


def batch(program: Path, source: Path, out: Path, *args: object) -> Result:
    return run_cli("batch", program, source, "-o", out, "--device", "cpu", *args)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def alone(program: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The results of one lane at a time."""
    folder = tmp_path_factory.mktemp("alone")
    result = batch(program, write(folder / "in.jsonl", REQUESTS), folder / "out.jsonl", "--max-concurrency", 1)
    assert result.code == 0 and result.out == b"", result.err
    return read(folder / "out.jsonl")


def test_results(alone: list[dict[str, Any]]) -> None:
    frontend = Frontend.from_artifact(small_model.opened())
    assert [item["index"] for item in alone] == list(range(len(REQUESTS)))
    assert [item.get("id") for item in alone] == ["long", 7, None, None, None, None, None]
    for item, request in zip(alone, REQUESTS, strict=True):
        assert item["generated_tokens"] == len(item["ids"]) <= request["max_new"]
        assert item["finish_reason"] in ("output-limit", "stop-token")
        assert item["prompt_tokens"] == len(request["ids"]) if "ids" in request else item["prompt_tokens"] > 4
    assert alone[3]["text"] == frontend.tokenizer.decode(alone[3]["ids"])
    assert alone[2]["ids"] != alone[5]["ids"]


@pytest.mark.parametrize("lanes", [2, 4])
def test_every_lane_equals_its_solo_run(program: Path, tmp_path: Path, alone: list[dict[str, Any]], lanes: int) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text("replaced as a whole")
    result = batch(program, write(tmp_path / "in.jsonl", REQUESTS), out, "--max-concurrency", lanes)
    assert result.code == 0 and read(out) == alone
    assert result.summary("requests") == "7" and result.summary("generated tokens") == str(sum(len(i["ids"]) for i in alone))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_results_as_they_finish(program: Path, tmp_path: Path, alone: list[dict[str, Any]]) -> None:
    out = tmp_path / "out.jsonl"
    assert batch(program, write(tmp_path / "in.jsonl", REQUESTS), out, "--as-finished").code == 0
    found = read(out)
    assert [item["index"] for item in found] != list(range(len(REQUESTS)))  # the first is the longest
    assert sorted(found, key=lambda item: item["index"]) == alone


def test_stop_strings_free_a_lane_for_the_next(program: Path, tmp_path: Path, alone: list[dict[str, Any]]) -> None:
    """Steps in flight when a lane is cancelled must not reach the request that follows on it."""
    word = alone[0]["text"][8:12]
    requests = [REQUESTS[0] | {"stop": [word]}, REQUESTS[0] | {"stop": [word]}, *REQUESTS[1:]]
    out = tmp_path / "out.jsonl"
    assert batch(program, write(tmp_path / "in.jsonl", requests), out, "--max-concurrency", 2).code == 0
    found = read(out)
    for item in found[:2]:
        assert item["finish_reason"] == "stop-string" and item["stop"] == word
        assert item["text"] == alone[0]["text"][: alone[0]["text"].index(word)]
        assert item["ids"] == alone[0]["ids"][: len(item["ids"])] and len(item["ids"]) < 24
    assert [item["ids"] for item in found[2:]] == [item["ids"] for item in alone[1:]]


def test_pages_are_waited_for(tmp_path: Path, alone: list[dict[str, Any]]) -> None:
    """Four lanes share a cache for one full context and a little: requests wait for pages, not only for lanes."""
    folder = plan_folder(tmp_path / "tight", small_model.opened(), max_context=192, max_concurrency=4, prefill_chunk=128,
                         kv_capacity=192, pairs=((1, 1), (4, 1)))  # fmt: skip
    out = tmp_path / "out.jsonl"
    result = batch(folder, write(tmp_path / "in.jsonl", [REQUESTS[4], REQUESTS[4], *REQUESTS]), out)
    assert result.code == 0
    assert [item["ids"] for item in read(out)] == [alone[4]["ids"]] * 2 + [item["ids"] for item in alone]


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("{", ["not JSON"]),
        ("[1]", ["a JSON object is needed"]),
        ("\\xff", ["not UTF-8"]),
        ('{"prompt": "x", "temperature": NaN}', ["NaN"]),
        ('{"prompt": "x", "ids": [1]}', ["exactly one of prompt, messages, ids", "prompt, ids given"]),
        ('{"max_new": 3}', ["none given"]),
        ('{"prompt": "x", "max_tokens": 3}', ["unknown member", "max_tokens", "max_new"]),
        ('{"prompt": 3}', ["prompt must be a string"]),
        ('{"prompt": "x", "id": [1]}', ["id must be"]),
        ('{"prompt": "x", "max_new": 0}', ["max-new", "1 to"]),
        ('{"prompt": "x", "max_new": "3"}', ["max-new"]),
        ('{"prompt": "x", "temperature": 9}', ["temperature", "0.0 to 2.0"]),
        ('{"prompt": "x", "greedy": 1}', ["greedy must be true or false"]),
        ('{"prompt": "x", "stop": "a"}', ["stop must be an array of strings"]),
        ('{"prompt": "x", "stop": [""]}', ["stop", "1 to 1024"]),
        ('{"prompt": "x", "stop_token_ids": [5000]}', ["5000", "4095"]),
        ('{"prompt": "x", "tools": []}', ["tools belong to messages"]),
        ('{"prompt": "x", "reasoning_effort": "low"}', ["reasoning-effort", "no effort levels"]),
        ('{"ids": [4096]}', ["4096"]),
        ('{"ids": [1.5]}', ["entry 0 is 1.5"]),
        ('{"ids": []}', ["non-empty"]),
        ('{"messages": []}', ["non-empty array"]),
        ('{"messages": [{"role": "user", "content": "' + "word " * 500 + '"}]}', ["--max-context 384"]),
    ],
)
def test_a_bad_line_stops_everything(program: Path, tmp_path: Path, untouched: Path, line: str, parts: list[str]) -> None:
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"prompt": "fine"}\n\n' + line.encode().replace(b"\\xff", b"\xff") + b'\n{"prompt": "fine"}\n')
    rejected(batch(program, source, untouched / "out.jsonl"), 1, "in.jsonl, line 3: ", *parts)


def test_files_and_limits(program: Path, tmp_path: Path, untouched: Path) -> None:
    source = tmp_path / "in.jsonl"
    rejected(batch(program, source, untouched / "o"), 1, "IN.jsonl", "no such file")
    source.write_text("\n \n")
    rejected(batch(program, source, untouched / "o"), 1, "in.jsonl holds no requests")
    source.write_text('{"prompt": "x"}')
    rejected(batch(program, source, untouched / "o", "--max-concurrency", 5), 2, "--max-concurrency 5", "4 lane(s)")
    rejected(batch(program, source, untouched / "no" / "o"), 1, "no/o", "No such file")


def test_an_output_limit_beyond_the_context(tmp_path: Path, untouched: Path) -> None:
    folder = plan_folder(tmp_path / "tight", small_model.opened(), max_context=256, max_concurrency=4, prefill_chunk=128,
                         kv_capacity=256)  # fmt: skip
    assert run_cli("plan", folder).code == 0
    source = write(tmp_path / "in.jsonl", [{"ids": [1] * 100, "max_new": 1000}])
    assert batch(folder, source, tmp_path / "fits.jsonl").code == 0  # ends at the context, whose pages exist
