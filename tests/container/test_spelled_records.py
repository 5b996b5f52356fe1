"""The quick reader of bindings and uses against the reader of single records: same tables, same errors."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifacts.container import json_reader
from artifacts.container.directory_v3 import DirectoryV3, encode_directory, parse_directory
from artifacts.container.records_v3 import BINDING, USE, Binding, Component, FilePart, Part, Use
from artifacts.container.schema import ObjectPlan, place
from artifacts.errors import ArtifactError

ROWS = 300  # enough for several runs of each table


def directory() -> DirectoryV3:
    objects = place([ObjectPlan("a", (ROWS, 64), "Q4G64_F16S"), ObjectPlan("scalar", (), "FP32"), ObjectPlan("r", bytes=3)])
    bindings = {f"text/layers/{i}/down": Binding((Part("a", 64 * i, 64 * i + 64),), False) for i in range(ROWS)}
    uses = [Use(name, f"{name}/product", "A16Only", {}) for name in bindings]
    end = objects[-1].offset + objects[-1].bytes
    return DirectoryV3([FilePart(None, end)], objects, {"text": Component({})}, bindings, uses)


def record_by_record(text: bytes, monkeypatch: pytest.MonkeyPatch) -> DirectoryV3:
    with monkeypatch.context() as patch:
        patch.setattr(json_reader, "SPELLED_SLICE", 0)
        return parse_directory(text, "x")


def outcome(text: bytes, monkeypatch: pytest.MonkeyPatch, quick: bool) -> object:
    try:
        return parse_directory(text, "x") if quick else record_by_record(text, monkeypatch)
    except ArtifactError as error:
        return f"{type(error).__name__}: {error}"


def test_tables_are_read_in_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """All records but the last few of each table go through the quick reader, or it would be no use."""
    rows: list[list[tuple[str, ...]]] = []
    for spelling in (BINDING, USE):
        original = spelling.rows
        monkeypatch.setattr(spelling, "rows", lambda run, original=original: rows.append(original(run)) or rows[-1])
    wanted = directory()
    found = parse_directory(encode_directory(wanted), "x")
    assert found == wanted
    assert sum(map(len, rows)) > 2 * ROWS - 100 and len(rows) > 10


CHANGES: dict[str, tuple[str, str]] = {
    "a space": ('"range":[640,704]', '"range":[640, 704]'),
    "an escape": ("text/layers/10/down", "text/layers/\\u0031\\u0030/down"),
    "another letter": ("text/layers/10/down", "text/läyers/10/down"),
    "a control character": ("text/layers/10/down", "text/layers/\\u000010/down"),
    "a lone surrogate": ("text/layers/10/down", "text/layers/\\ud80010/down"),
    "an empty range": ('"range":[640,704]', '"range":[704,704]'),
    "a reversed range": ('"range":[640,704]', '"range":[704,640]'),
    "a negative range": ('"range":[640,704]', '"range":[-640,704]'),
    "a range past the object": ('"range":[640,704]', f'"range":[640,{64 * ROWS + 1}]'),
    "a range past 64 bits": ('"range":[640,704]', '"range":[640,18446744073709551616]'),
    "the largest range": ('"range":[640,704]', '"range":[640,18446744073709551615]'),
    "a leading zero": ('"range":[640,704]', '"range":[0640,704]'),
    "a float": ('"range":[640,704]', '"range":[640,704.0]'),
    "an unknown object": ('{"object":"a","range":[640,704]}', '{"object":"b","range":[640,704]}'),
    "a resource": ('{"object":"a","range":[640,704]}', '{"object":"r","range":[640,704]}'),
    "a whole object": ('{"parts":[{"object":"a","range":[640,704]}]}', '{"object":"a"}'),
    "two parts": ('{"object":"a","range":[640,704]}', '{"object":"a","range":[640,650]},{"object":"a","range":[650,704]}'),
    "members swapped": ('{"object":"a","range":[640,704]}', '{"range":[640,704],"object":"a"}'),
    "an extra member": ('"range":[640,704]}', '"range":[640,704],"x":1}'),
    "a repeated member": ('"range":[640,704]}', '"range":[640,704],"object":"a"}'),
    "no part": ('[{"object":"a","range":[640,704]}]', "[]"),
    "a name of the run before": ('"text/layers/200/down":{', '"text/layers/10/down":{'),
    "a name of its own run": ('"text/layers/11/down":{', '"text/layers/10/down":{'),
    "a comma missing": ('}]},"text/layers/11/down"', '}]}"text/layers/11/down"'),
    "another character for a comma": ('}]},"text/layers/11/down"', '}]};"text/layers/11/down"'),
    "a comma too many": ('}]},"text/layers/11/down"', '}]},,"text/layers/11/down"'),
    "a number for a binding": ('{"parts":[{"object":"a","range":[640,704]}]}', "7"),
    "an unknown policy": ('"input":"text/layers/10/down/product","activation_policy":"A16Only"',
                          '"input":"text/layers/10/down/product","activation_policy":"A16only"'),
    "no policy": ('"input":"text/layers/10/down/product","activation_policy":"A16Only"',
                  '"input":"text/layers/10/down/product"'),
    "an auxiliary": ('"input":"text/layers/10/down/product","activation_policy":"AllowA4"',
                     '"input":"text/layers/10/down/product","activation_policy":"AllowA4","auxiliaries":{"d":{"object":"scalar"}}'),
    "a use twice": ('"input":"text/layers/11/down/product"', '"input":"text/layers/10/down/product"'),
    "a use without a binding": ('{"parameter":"text/layers/10/down"', '{"parameter":"text/layers/x/down"'),
    "a number for a use": ('"parameter":"text/layers/10/down","input":"text/layers/10/down/product",'
                           '"activation_policy":"A16Only"},{', '"parameter":"text/layers/x/down"},7,{'),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
def test_other_spellings_and_broken_rules(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = encode_directory(directory()).decode()
    if change == "an auxiliary":
        text = text.replace("A16Only", "AllowA4")
    if change == "a use twice":
        text = text.replace('{"parameter":"text/layers/11/down"', '{"parameter":"text/layers/10/down"')
    old, new = CHANGES[change]
    assert old in text
    changed = text.replace(old, new).encode()
    quick, slow = outcome(changed, monkeypatch, True), outcome(changed, monkeypatch, False)
    assert quick == slow
    accepted = {"a space", "an escape", "another letter", "a whole object", "two parts", "members swapped", "no policy",
                "an auxiliary"}  # fmt: skip
    assert isinstance(quick, DirectoryV3) == (change in accepted), quick


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_any_edit(data: st.DataObject) -> None:
    """Characters put in, taken out or copied anywhere in the two tables: both readers agree to the letter."""
    text = encode_directory(directory()).decode()
    start = text.index('"bindings"')
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(start, len(text) - 1))
        length = data.draw(st.sampled_from([0, 1, 2, 10, 90]))
        source = data.draw(st.integers(start, len(text) - 1))
        copied = text[source : source + length]
        piece = data.draw(st.sampled_from(["", copied, '"', ",", "}", "0", " ", "\\", "é", "{}", "[", "\0"]))
        text = text[:at] + piece + text[at + length :]
    monkeypatch = pytest.MonkeyPatch()
    assert outcome(text.encode(), monkeypatch, True) == outcome(text.encode(), monkeypatch, False)


def test_records_are_compared_as_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """White space everywhere: nothing is spelled as expected, and everything is read."""
    loose: Any = json.loads(encode_directory(directory()))
    text = json.dumps(loose, indent=1).encode()
    assert outcome(text, monkeypatch, True) == directory()
