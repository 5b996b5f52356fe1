"""Sampling parameters and the float64 sampler, against the published vectors and an independent reading."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from runtime.frontend.errors import FrontendError, GenerationConfigError, OptionError
from runtime.frontend.presets import (
    PRESETS,
    SamplingOptions,
    SamplingParams,
    apply_options,
    parse_decimal,
    parse_unsigned,
    preset,
    read_generation_config,
)
from tests.frontend.resources import TINY
from tests.frontend.sampling_reference import (
    Purpose,
    argmax,
    draw,
    processed_distribution,
    sample,
    speculative_round,
    uniform,
)

OPS = TINY.parent / "ops-prod-heads"
META = json.loads((OPS / "meta.json").read_text(encoding="utf-8"))


def golden(name: str) -> Any:
    """A tensor of the fixture as float64; bfloat16 is widened by hand, NumPy has no such type."""
    raw = (OPS / "goldens.safetensors").read_bytes()
    size = int.from_bytes(raw[:8], "little")
    entry = json.loads(raw[8 : 8 + size])[name]
    data = raw[8 + size + entry["data_offsets"][0] : 8 + size + entry["data_offsets"][1]]
    if entry["dtype"] == "BF16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    return np.frombuffer(data, {"I32": "<i4"}[entry["dtype"]]).astype(np.float64)


def test_uniform_vectors() -> None:
    assert len(META["rng_uniform"]) >= 40
    for row in META["rng_uniform"]:
        assert uniform(row["seed"], row["position"], row["purpose"]) == row["u"]


def test_uniforms_of_a_speculative_round() -> None:
    """Seed 7: acceptance tests of two rounds of the mixed-acceptance fixture."""
    assert [round(uniform(7, position, Purpose.ACCEPT), 6) for position in (65, 66, 67, 68, 69)] == [
        0.210434, 0.703799, 0.715808, 0.148612, 0.735149]


@pytest.mark.parametrize("key", [(-1, 0, 0), (1 << 64, 0, 0), (0, 1 << 32, 0), (0, -1, 0), (0, 0, 1 << 32)])
def test_uniform_keys_have_ranges(key: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="allowed are u64, u32, u32"):
        uniform(*key)


def params_of(config: dict[str, Any]) -> SamplingParams:
    return SamplingParams(config["temperature"], config["top_p"], config["top_k"], config["min_p"],
                          config["presence_penalty"], config["frequency_penalty"])


@pytest.mark.parametrize("row", META["sampler"])
def test_processed_distribution_vectors(row: dict[str, Any]) -> None:
    ids, probabilities = processed_distribution(golden("sampler_logits"), golden("sampler_counts"), params_of(row["config"]))
    assert ids.tolist() == row["support"]
    np.testing.assert_allclose(probabilities, row["probs"], rtol=1e-8)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_processed_distribution_against_the_definition(data: st.DataObject) -> None:
    """The five steps written as plain loops over Python numbers."""
    size = data.draw(st.integers(1, 40))
    logits = data.draw(st.lists(st.integers(-8, 8).map(lambda n: n / 2), min_size=size, max_size=size))
    counts = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
    temperature, top_p, min_p, presence, frequency = (data.draw(st.sampled_from(values)) for values in (
        (0.25, 1.0, 2.0), (0.0, 0.5, 0.9, 1.0), (0.0, 0.1, 1.0), (0.0, 1.5, -1.0), (0.0, 0.5)))
    params = SamplingParams(temperature, top_p, data.draw(st.sampled_from((0, 1, 3, 20))), min_p, presence, frequency)
    scores = {i: logits[i] - params.presence * (counts[i] > 0) - params.frequency * counts[i] for i in range(size)}
    best = sorted(scores, key=lambda i: (-scores[i], i))[: params.top_k or 20]
    weights = [float(np.exp((scores[i] - scores[best[0]]) / params.temperature)) for i in best]
    # a running sum at the limit itself is decided by the last bit of the order of summation: not what this test is about
    limit = params.top_p * sum(weights)
    assume(all(abs(sum(weights[:i]) - limit) > 1e-9 for i in range(1, len(weights))))
    kept: list[int] = []
    total = 0.0
    for token, weight in zip(best, weights, strict=True):
        if kept and (weight < params.min_p * weights[0] or total >= limit):
            break
        kept.append(token)
        total += weight
    ids, probabilities = processed_distribution(logits, counts, params)
    assert ids.tolist() == kept
    np.testing.assert_allclose(probabilities, np.array(weights[: len(kept)]) / total, rtol=1e-12)


def test_agrees_with_the_op_of_the_compiler() -> None:
    from compiler.control import FREQUENCY, MIN_P, PRESENCE, TEMPERATURE, TOP_K, TOP_P
    from compiler.ops import sample as op

    rng = np.random.default_rng(5)
    for _ in range(50):
        logits = np.round(rng.normal(0, 3, 300), 1)
        counts = rng.integers(0, 3, 300)
        params = SamplingParams(float(rng.choice([0.5, 1.0, 1.5])), float(rng.choice([0.25, 0.75, 1.0])),
                                int(rng.integers(0, 21)), float(rng.choice([0.0, 0.125])), 0.5, 0.25)
        words = np.zeros(8, np.float32)
        words[[TEMPERATURE, TOP_P, MIN_P, PRESENCE, FREQUENCY]] = (
            params.temperature, params.top_p, params.min_p, params.presence, params.frequency)
        raw = words.view(np.int32).copy()
        raw[TOP_K] = params.top_k
        ids, probabilities = processed_distribution(logits, counts, params)
        other_ids, other = op.processed(logits, counts, raw)
        assert ids.tolist() == other_ids.tolist()
        np.testing.assert_allclose(probabilities, other, rtol=1e-6)
        for seed, position, purpose in rng.integers(0, 1 << 31, (20, 3)).tolist():
            assert uniform(seed, position, purpose) == op.uniform(seed, position, purpose)


def test_draw_boundaries() -> None:
    ids, probabilities = np.array([7, 3, 5]), np.array([0.5, 0.25, 0.25])
    assert [draw(ids, probabilities, u) for u in (0.0, 0.49, 0.5, 0.74, 0.75, 0.9999, 1.0)] == [7, 7, 3, 3, 5, 5, 5]


def test_padded_ids_are_never_sampled() -> None:
    logits = np.array([0.0, 1.0, 9.0, 9.0])
    assert argmax(logits, 2) == 1 and argmax(logits) == 2
    ids, _ = processed_distribution(logits, None, SamplingParams(), domain=2)
    assert sorted(ids.tolist()) == [0, 1]


def test_greedy_ignores_penalties_and_takes_the_smallest_id() -> None:
    greedy = SamplingParams(temperature=0.0, greedy=True, presence=2.0)
    assert sample([1.0, 3.0, 3.0], [0, 9, 0], greedy, 5, Purpose.DECODE) == 1
    with pytest.raises(ValueError, match="temperature 0"):
        processed_distribution([1.0], None, greedy)


def test_samples_follow_the_distribution() -> None:
    logits = np.log([0.5, 0.3, 0.2])
    picks = [sample(logits, None, SamplingParams(seed=9), position, Purpose.DECODE) for position in range(8000)]
    np.testing.assert_allclose(np.bincount(picks, minlength=3) / 8000, [0.5, 0.3, 0.2], atol=0.02)


def test_speculative_rounds_follow_the_distribution() -> None:
    """Whatever is drafted, the first produced token has the target distribution and penalties see accepted drafts."""
    logits = np.log([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])
    for draft in range(3):
        first = [speculative_round(logits, [draft], None, SamplingParams(seed=3), base)[0][0] for base in range(6000)]
        np.testing.assert_allclose(np.bincount(first, minlength=3) / 6000, [0.5, 0.3, 0.2], atol=0.025)
    assert speculative_round(logits, [0], None, SamplingParams(temperature=0.0, greedy=True), 4) == ([0, 2], 1)
    assert speculative_round(logits, [1], None, SamplingParams(temperature=0.0, greedy=True), 4) == ([0], 0)
    harsh = SamplingParams(presence=2.0, frequency=2.0, top_k=1, seed=1)
    same = np.array([[5.0, 4.0], [5.0, 4.0]])
    assert speculative_round(same, [0], None, harsh, 7) == ([0, 1], 1)


def test_presets_of_registered_models() -> None:
    for model in ("qwen3.6-27b", "qwen3.8-27b", "qwen3.6-35b-a3b"):
        thinking, plain = preset(model, True, None), preset(model, False, None)
        assert (thinking.temperature, thinking.top_p, thinking.top_k) == (1.0, 0.95, 20)
        assert (plain.temperature, plain.top_p, plain.top_k, plain.presence) == (0.7, 0.8, 20, 1.5)
        assert thinking.presence == (1.5 if "35b" in model else 0.0)
        assert not thinking.greedy and thinking.frequency == thinking.min_p == 0.0
    assert len(PRESETS) == 3


def test_generation_config_of_the_tiny_model() -> None:
    read = read_generation_config((TINY / "generation_config.json").read_bytes(), 4096)
    assert read.eos_ids == (4091, 4089) and read.sampling.greedy and read.notes == ()
    assert preset("tiny", True, read) == read.sampling
    assert preset("tiny", True, None).greedy


def config(**members: Any) -> Any:
    return read_generation_config(json.dumps(members).encode(), 100)


def test_generation_config_values() -> None:
    read = config(do_sample=True, temperature=0.6, top_p=0.9, top_k=10, min_p=0.05, eos_token_id=7)
    assert read.sampling == SamplingParams(0.6, 0.9, 10, 0.05) and read.eos_ids == (7,)
    assert config(do_sample=True, top_k=50).notes == (
        "generation_config.json: top_k 50 becomes 20, the most the sampler keeps",)
    assert "repetition_penalty" in config(repetition_penalty=1.05).notes[0]
    assert config(do_sample=True).sampling == SamplingParams(1.0, 1.0, 20) and config(do_sample=True).notes == ()
    assert config(do_sample=True, temperature=0).sampling.greedy and config().sampling.greedy
    assert config(eos_token_id=[3, 3, 4]).eos_ids == (3, 4) and config(eos_token_id=None).eos_ids == ()


@pytest.mark.parametrize(("data", "message"), [
    (b"[]", "must be an object"), (b"{", "not JSON"), (b'{"do_sample": 1}', "do_sample"),
    (b'{"temperature": "1"}', "temperature '1'"),
    (b'{"temperature": -1}', "allowed are 0 to 2"), (b'{"top_p": 2}', "top_p"), (b'{"top_k": 1.5}', "top_k"),
    (b'{"top_k": true}', "top_k"),
    (b'{"eos_token_id": 100}', "eos_token_id '100'; allowed are 0 to 99"), (b'{"eos_token_id": ["a"]}', "eos_token_id"),
    (b'{"eos_token_id": [true]}', "eos_token_id"), (json.dumps({"eos_token_id": list(range(17))}).encode(), "17 end tokens"),
    (b'{"temperature": NaN}', "NaN"), (b" " * (1 << 21), "at most"),
])
def test_hostile_generation_config(data: bytes, message: str) -> None:
    with pytest.raises(GenerationConfigError, match=message):
        read_generation_config(data, 100)


BASE = SamplingParams(0.7, 0.8, 20, 0.0, 1.5)


def test_options_override_the_preset() -> None:
    made = apply_options(BASE, SamplingOptions(temperature=1.5, top_k=0, seed=2**64 - 1, max_new=5, presence=-2), (1, 2), 100)
    assert made == SamplingParams(1.5, 0.8, 0, 0.0, -2.0, 0.0, 2**64 - 1, max_new=5, stop_ids=(1, 2))
    assert apply_options(BASE, SamplingOptions(), (1,), 100) == replace(BASE, stop_ids=(1,))


def test_greedy_overrides_everything() -> None:
    made = apply_options(BASE, SamplingOptions(greedy=True, temperature=1.0, top_p=0.5), (), 100)
    assert made.greedy and made.temperature == 0.0
    assert apply_options(BASE, SamplingOptions(temperature=0), (), 100).greedy
    greedy = SamplingParams(greedy=True, temperature=0.0)
    assert not apply_options(greedy, SamplingOptions(temperature=0.5), (), 100).greedy
    with pytest.raises(OptionError, match="need --temperature above 0"):
        apply_options(greedy, SamplingOptions(top_p=0.5), (), 100)


def test_stop_ids() -> None:
    made = apply_options(BASE, SamplingOptions(stop_token_ids=(5, 1)), (1, 2), 100)
    assert made.stop_ids == (1, 2, 5)
    ignoring = apply_options(BASE, SamplingOptions(stop_token_ids=(5,), ignore_eos=True), (1, 2), 100)
    assert ignoring.stop_ids == (5,) and ignoring.ignore_eos


@pytest.mark.parametrize(("options", "message"), [
    (SamplingOptions(temperature=2.1), "--temperature '2.1': allowed are 0.0 to 2.0"),
    (SamplingOptions(temperature=-0.1), "--temp"),
    (SamplingOptions(temperature=float("nan")), "--temperature 'nan'"), (SamplingOptions(top_p=1.5), "--top-p"),
    (SamplingOptions(top_k=21), "--top-k '21': allowed are 0 to 20"),
    (SamplingOptions(top_k=1.0), "--top-k"),  # type: ignore[arg-type]
    (SamplingOptions(min_p=-1), "--min-p"), (SamplingOptions(presence=3), "--presence-penalty"),
    (SamplingOptions(seed=-1), "--seed"),
    (SamplingOptions(frequency=-2.5), "--frequency-penalty"), (SamplingOptions(seed=2**64), "--seed"),
    (SamplingOptions(max_new=0), "--max-new"),
    (SamplingOptions(stop_token_ids=(100,)), "--stop-token-id '100': allowed are 0 to 99"),
    (SamplingOptions(stop_token_ids=(-1,)), "stop-token"),
    (SamplingOptions(stop_token_ids=tuple(range(17))), "17 stop ids"), (SamplingOptions(temperature=True), "--temperature"),
])
def test_options_out_of_range(options: SamplingOptions, message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        apply_options(BASE, options, (), 100)
    assert caught.value.exit_code == 2 and isinstance(caught.value, FrontendError)


def test_strict_numbers() -> None:
    assert [parse_unsigned("--x", text) for text in ("0", "007", "18446744073709551615")] == [0, 7, 2**64 - 1]
    assert [parse_decimal("--x", text) for text in ("0", "-1.5", ".5", "2.", "1e-3")] == [0.0, -1.5, 0.5, 2.0, 0.001]
    for text in ("", " 1", "1 ", "-1", "+1", "1_0", "0x1", "1.0", "²", "１", "1" * 21):
        with pytest.raises(OptionError, match="--x .*a non-negative integer"):
            parse_unsigned("--x", text)
    for text in ("", " 1", "1_0", "nan", "inf", "-inf", "1e999", "1,5", "--1", "1e", ".", "0x1p3", "１"):
        with pytest.raises(OptionError, match="--x .*a finite decimal"):
            parse_decimal("--x", text)
