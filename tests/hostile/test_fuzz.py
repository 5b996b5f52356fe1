"""Mutated files: never anything but a valid artifact or one clear error, in bounded time and memory."""

import random
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import artifacts
from artifacts.container.directory_v2 import parse_directory as parse_v2
from artifacts.container.directory_v3 import parse_directory as parse_v3
from artifacts.container.json_reader import JsonCursor, decode_text
from artifacts.errors import ArtifactError
from artifacts.tools.inspect import object_records, summary
from artifacts.tools.upgrade import plan_upgrade
from artifacts.tools.verify import verify
from tests.container.samples import write_v2, write_v3
from tests.hostile.corpus import small_cases
from tests.hostile.mutate import mutate, mutate_model
from tests.hostile.test_corpus import MEMORY_LIMIT, check_message

ERRORS = set(ArtifactError.__subclasses__())


def attempt(function: Callable[..., object], *arguments: object) -> None:
    """Whatever a query of an open artifact meets, it is one of our errors."""
    try:
        function(*arguments)
    except ArtifactError as error:
        check_message(str(error))


def use(path: Path) -> str:
    """Open a file and do with it what the tools do; returns what became of it."""
    try:
        with artifacts.open(path) as artifact:
            summary(artifact)
            object_records(artifact)
            for problem in verify(artifact, deep=True):
                check_message(problem)
            for name, entry in artifact.objects.items():
                attempt(artifact.object, name)
                attempt(artifact.read, entry.offset, entry.bytes)
                attempt(artifact.parameter, name)
            attempt(artifact.text_config)
            attempt(plan_upgrade, artifact, "new.ninfer")
            attempt(lambda: [artifact.parameter(name) for name in artifact.model.bindings])
            attempt(lambda: [artifact.model.input_divisor(*place) for place in artifact.model.uses])
    except ArtifactError as error:
        assert type(error) in ERRORS
        check_message(str(error))
        return type(error).__name__
    return "valid"


def fuzz(path: Path, seed: int, count: int, traced: int) -> dict[str, int]:
    """`count` inputs, of which the first `traced` have their memory measured (that is slow)."""
    outcomes: dict[str, int] = {}
    source = write_v2(path.with_name("v2.ninfer"), "nvfp4", vision=True, draft_rows=20)
    models = [source.read_bytes(), write_v3(path.with_name("v3.ninfer"), source).read_bytes()]
    tracemalloc.start()
    try:
        for index in range(count):
            rng = random.Random(f"{seed}/{index}")
            path.write_bytes(mutate_model(rng, rng.choice(models)) if rng.random() < 0.05 else mutate(rng))
            if index == traced:
                tracemalloc.stop()
            if index < traced:
                tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            start = time.process_time()
            try:
                outcome = use(path)
            except Exception as error:  # the fuzzer's whole point: name the input, then fail
                raise AssertionError(f"seed {seed}, input {index}: {error!r}") from error
            assert time.process_time() - start < 1.0, (seed, index)
            assert tracemalloc.get_traced_memory()[1] - before < MEMORY_LIMIT, (seed, index)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    finally:
        tracemalloc.stop()
    return outcomes


def test_fuzz_some(tmp_path: Path) -> None:
    outcomes = fuzz(tmp_path / "case.ninfer", 1, 2000, traced=200)
    # A fuzzer that only ever meets one check finds nothing.
    assert outcomes["valid"] > 50 and outcomes["DirectoryError"] > 400 and outcomes["FramingError"] > 80
    assert outcomes["GeometryError"] > 20 and outcomes["LayoutError"] > 10 and outcomes["FormatError"] > 10


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 22))
def test_fuzz_200000(tmp_path: Path, seed: int) -> None:
    fuzz(tmp_path / "case.ninfer", seed, 10000, traced=500)


def test_corpus_through_the_tools(tmp_path: Path) -> None:
    for case in small_cases()[::3]:
        path = tmp_path / "case.ninfer"
        path.write_bytes(case.data)
        assert (use(path) == "valid") == (case.error is None), case.name


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=30,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(value=json_values, indent=st.sampled_from([None, 0, 3]), ascii=st.booleans())
def test_cursor_agrees_with_the_standard_parser(value: object, indent: int | None, ascii: bool) -> None:
    """Open values: the budgeted parser gives what `json.loads` gives."""
    import json

    document = json.dumps(value, indent=indent, ensure_ascii=ascii)
    cursor = JsonCursor(decode_text(document.encode("utf-8", "surrogatepass")), negative_zero=True)
    assert cursor.open_value("value") == json.loads(document)
    cursor.end()


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=200))
def test_arbitrary_bytes_as_directory(raw: bytes) -> None:
    for parse in (lambda: parse_v2(raw, 1, 100), lambda: parse_v2(raw, 2, 100), lambda: parse_v3(raw, "x")):
        with pytest.raises(ArtifactError) as caught:
            parse()
        check_message(str(caught.value))


@settings(max_examples=300, deadline=None)
@given(raw=st.text(alphabet='{}[]",:\\ 01-.eEtruefalsn\n', max_size=60))
def test_json_like_text_as_open_value(raw: str) -> None:
    """Accepts exactly what the standard parser accepts, duplicates and lone surrogates aside."""
    import json

    try:
        want: object = json.loads(raw, object_pairs_hook=lambda pairs: pairs)
    except (ValueError, RecursionError):
        want = ValueError
    cursor = JsonCursor(raw, negative_zero=True)
    try:
        cursor.open_value("value")
        cursor.end()
    except ArtifactError as error:
        stricter = ("repeats", "surrogate", "overflows", "deeper", "digits")
        assert want is ValueError or any(word in str(error) for word in stricter)
    else:
        assert want is not ValueError
