"""Synthetic artifacts: the generator's bits, legality, magnitudes, and frontend files that work."""

import json
import math
from pathlib import Path

import jinja2
import numpy as np
import pytest
from numpy.typing import NDArray

import artifacts
from artifacts import Artifact, Identity, ObjectPlan, TensorObject
from artifacts.errors import IdentityError, OutputError
from artifacts.formats import bf16_to_f32
from artifacts.identities import TextDims, plan_objects
from artifacts.identities.dims import FULL, LINEAR
from artifacts.identities.plan import CONFIG_RESOURCE
from artifacts.identities.registry import REGISTRY, registered
from artifacts.layouts import LAYOUTS, align_up, decode
from artifacts.tools import synth, synth_worker
from artifacts.tools.synth import synthesize, synthesize_registered, tensor_bytes
from artifacts.tools.synth_bits import GOLDEN, plane_bits, target_rms, token_ids
from artifacts.tools.synth_frontend import ADDED_TOKENS, BASE_TOKENS, frontend
from artifacts.tools.verify import verify
from runtime.frontend.chat_template import ChatTemplate
from runtime.frontend.tokenizer import Tokenizer
from tests.container.samples import DIMS, write_v2

M = (1 << 64) - 1
QUANTIZED = ["Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S", "NVFP4", "FP8_E4M3FN_ROW_BF16S"]


def scalar_mix(z: int) -> int:
    """The documented function, one word at a time, written apart from the code under test."""
    z = ((z ^ z >> 30) * 0xBF58476D1CE4E5B9) & M
    z = ((z ^ z >> 27) * 0x94D049BB133111EB) & M
    return z ^ z >> 31


def scalar_plane(seed: int, index: int, plane: int, count: int, mask: int, add: int) -> bytes:
    key = scalar_mix((seed + 0x9E3779B97F4A7C15 * (1 + 8 * index + plane)) & M)
    words = [((scalar_mix((key + 0x9E3779B97F4A7C15 * (i + 1)) & M) & mask) + add) & M for i in range(count)]
    return b"".join(word.to_bytes(8, "little") for word in words)


def test_splitmix_reference_value() -> None:
    assert scalar_mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # first output of splitmix64 from state 0
    assert GOLDEN == 0x9E3779B97F4A7C15


def _tensor(shape: tuple[int, ...], format: str, name: str = "x/down") -> TensorObject:
    plan = artifacts.ObjectPlan(name, shape, format)
    return TensorObject(name, shape, format, plan.layout, 0, plan.bytes)


@pytest.mark.parametrize("format", QUANTIZED)
def test_bytes_follow_the_documented_formula(format: str) -> None:
    tensor = _tensor((128, 128), format)
    data = tensor_bytes(tensor, index=5, seed=77).tobytes()
    covered = 0
    for bits in plane_bits(tensor):
        want = scalar_plane(77, 5, bits.index, -(-bits.bytes // 8), bits.mask, bits.add)[: bits.bytes]
        assert data[bits.offset : bits.offset + bits.bytes] == want
        covered += bits.bytes
    gaps = LAYOUTS[tensor.layout].gaps(tensor.format, tensor.shape)
    assert covered + sum(length for _, length in gaps) == tensor.bytes
    assert data != tensor_bytes(tensor, index=6, seed=77).tobytes() != tensor_bytes(tensor, index=5, seed=78).tobytes()


def test_rows_longer_than_a_block_and_many_tasks() -> None:
    tensor = _tensor((300, 70000), "Q5G64_F16S")  # 13 MB, K not a multiple of 128, several tasks per plane
    data = tensor_bytes(tensor, 1, 2)
    base = plane_bits(tensor)[0]
    at = 9_000_000 // base.row_bytes * base.row_bytes  # inside the second task
    first = at // 8
    key = scalar_mix((2 + GOLDEN * 9) & M)
    word = (scalar_mix((key + GOLDEN * (first + 1)) & M) & base.mask) + base.add
    assert int(data[at : at + 8].view("<u8")[0]) == word
    LAYOUTS[tensor.layout].check_padding(tensor.format, tensor.shape, data, 0, 300)


@pytest.mark.parametrize("shape", [(3, 1), (5, 77), (2, 130), (4, 4304)])
@pytest.mark.parametrize("format", ["Q4G64_F16S", "Q5G64_F16S", "Q6G64_F16S", "W8G32_F16S"])
def test_padding_is_clear(format: str, shape: tuple[int, int]) -> None:
    tensor = _tensor(shape, format)
    data = tensor_bytes(tensor, 0, 0)
    layout = LAYOUTS[tensor.layout]
    layout.check_padding(format, shape, data, 0, shape[0])
    values = decode(format, tensor.layout, shape, data)
    assert (values != 0).all()


@pytest.mark.parametrize("format", [*QUANTIZED, "BF16"])
@pytest.mark.parametrize("name", ["a/gate_up", "a/down", "text/token_embedding", "text/output_head"])
def test_magnitudes(format: str, name: str) -> None:
    tensor = _tensor((256, 640), format, name)
    values = decode(format, tensor.layout, tensor.shape, tensor_bytes(tensor, 0, 0), np.float64)
    rms = math.sqrt(float((values**2).mean()))
    assert 0.7 * target_rms(tensor) < rms < 1.4 * target_rms(tensor)
    assert abs(float(values.mean())) < 0.02 * rms


def test_token_ids_are_unique_and_hold_the_special_ones() -> None:
    ids = token_ids(131072, 248077)
    assert np.unique(ids).size == 131072 and ids.min() == 0 and ids.max() == 248076
    assert set(range(248044, 248077)) <= set(ids.tolist())
    assert token_ids(10, 20).tolist() == list(range(10, 20))


def test_processes_do_not_change_the_file(tmp_path: Path) -> None:
    files = []
    data = {CONFIG_RESOURCE: json.dumps(DIMS.to_config()).encode()}
    for workers in (1, 3):
        path = tmp_path / f"{workers}.ninfer"
        plans = plan_objects(DIMS, "nvfp4", with_mtp=True, resources={n: len(v) for n, v in data.items()})
        synthesize(path, Identity("m", "nvfp4"), plans, data, 9, workers=workers)
        files.append(path.read_bytes())
    assert files[0] == files[1]
    with artifacts.open(path) as artifact:
        for name, entry in artifact.objects.items():
            if isinstance(entry, TensorObject):
                want = tensor_bytes(entry, artifact.object_index(name), 9)
                assert (artifact.tensor_bytes(name) == want).all()


def test_an_interruption_ends_the_processes_and_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Recorded(synth_worker.Workers):
        def __init__(self, count: int) -> None:
            super().__init__(count)
            started.extend(self._processes)

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(synth, "Workers", Recorded)
    with pytest.raises(KeyboardInterrupt):
        synthesize(tmp_path / "a", Identity("m", "w"), [ObjectPlan("x", (640, 640), "BF16")], {}, workers=2, progress=stop)
    assert list(tmp_path.iterdir()) == []
    assert len(started) == 2 and all(process.poll() is not None for process in started)


def test_what_a_process_cannot_write(tmp_path: Path) -> None:
    job = synth_worker.Job(tmp_path / "none", 0, _tensor((3, 64), "BF16"), 0, 0, 100, (0, 0, 384))
    with synth_worker.Workers(2) as pool, pytest.raises(OutputError, match="none'?: No such file"):
        list(pool.run(iter([job, job, job])))
    with synth_worker.Workers(1) as pool:
        pool._processes[0].kill()
        with pytest.raises(OutputError, match="a process that writes it"):
            list(pool.run(iter([job])))


def test_header_only_is_sparse(tmp_path: Path) -> None:
    path = tmp_path / "a.ninfer"
    synthesize_registered(Identity("qwen3.8-27b", "nvfp4"), path, header_only=True)
    assert path.stat().st_size == 21492695040
    if hasattr(path.stat(), "st_blocks"):
        assert path.stat().st_blocks * 512 < 16 << 20
    with artifacts.open(path) as artifact:
        assert artifact.model.registered is registered(Identity("qwen3.8-27b", "nvfp4"))
        assert artifact.directory_digest == "dfb9a418f4a474c0b3709f48e1d4d1f878d54cdae726c042981b16f577875899"
        assert verify(artifact) == []  # the input divisors are there
        template = artifact.model.frontend("chat_template.jinja")
        assert template is not None and len(template) == 8952
    with pytest.raises(OutputError, match="exists already"):
        synthesize_registered(Identity("qwen3.8-27b", "nvfp4"), path, header_only=True)
    with pytest.raises(IdentityError, match="not registered"):
        synthesize_registered(Identity("qwen3.8-27b", None), path)


@pytest.fixture(scope="module")
def files() -> dict[str, bytes]:
    return frontend(registered(Identity("qwen3.8-27b", "nvfp4")).resources)


def test_tokenizer_works(files: dict[str, bytes]) -> None:
    tokenizer = Tokenizer(files["frontend/tokenizer.json"], files["frontend/tokenizer_config.json"], vocab_rows=248320)
    assert tokenizer.domain == 248077
    text = "<|im_start|>user\nHello wörld, 你好! Don't  stop\n\n12345 {x: [1]}<|im_end|>\n<think>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text and len(ids) < len(text.encode())
    assert ids[0] == 248045 and ids[-1] == 248068 and 248046 in ids
    assert tokenizer.id_of("<|endoftext|>") == 248044 and tokenizer.id_of("<|audio_pad|>") == 248076
    assert {248044, 248045, 248046, 248056} <= tokenizer.special_ids
    assert tokenizer.special_ids.isdisjoint(range(248058, 248060)) and 248068 not in tokenizer.special_ids
    assert len({tokenizer.token_bytes[i] for i in range(BASE_TOKENS)}) == BASE_TOKENS


def test_frontend_lengths_and_contents(files: dict[str, bytes]) -> None:
    for entry in REGISTRY.values():
        made = files if entry.resources["frontend/chat_template.jinja"] == 8952 else frontend(entry.resources)
        assert {name: len(data) for name, data in made.items()} == dict(entry.resources)
    config = json.loads(files["frontend/generation_config.json"])
    assert config["eos_token_id"] == [248046, 248044]
    decoder = json.loads(files["frontend/tokenizer_config.json"])["added_tokens_decoder"]
    assert {int(key): value["content"] for key, value in decoder.items()} == {
        BASE_TOKENS + i: content for i, content in enumerate(ADDED_TOKENS)
    }
    template = jinja2.Template(files["frontend/chat_template.jinja"].decode())
    messages = [{"role": "system", "content": " be brief "}, {"role": "user", "content": "hi"}]
    prompt = "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(messages=messages, add_generation_prompt=True) == prompt + "<think>\n"
    rendered = template.render(messages=messages, add_generation_prompt=True, enable_thinking=False)
    assert rendered == prompt + "<think>\n\n</think>\n\n"
    assert ChatTemplate(files["frontend/chat_template.jinja"]).render(messages).text == prompt + "<think>\n"
    with pytest.raises(OutputError, match="more than the 100"):
        frontend({**registered(Identity("qwen3.8-27b", "nvfp4")).resources, "frontend/tokenizer.json": 100})


def test_samples_are_legal(tmp_path: Path) -> None:
    for weights in ("bf16", "groupwise-int", "nvfp4", "nvfp4-fp8"):
        with artifacts.open(write_v2(tmp_path / f"{weights}.ninfer", weights, vision=True, draft_rows=40)) as artifact:
            assert verify(artifact, deep=True) == []


# A plain forward pass, to see that activations stay finite and of order one through 64 layers.

Array = NDArray[np.float64]


class Model:
    def __init__(self, artifact: Artifact) -> None:
        self.artifact, self.dims = artifact, artifact.model.dims

    def weight(self, name: str) -> Array:
        rows = []
        for view in self.artifact.parameter(name):
            tensor = view.object
            values = decode(tensor.format, tensor.layout, tensor.shape, self.artifact.tensor_bytes(tensor.name), np.float64)
            rows.append(np.asarray(values[view.r0 : view.r1], np.float64))
        return np.concatenate(rows)

    def norm(self, x: Array, name: str, offset: float = 1.0) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * (offset + self.weight(name))

    def attention(self, h: Array, prefix: str) -> Array:
        d, steps = self.dims, len(h)
        q = (h @ self.weight(prefix + "query").T).reshape(steps, d.heads, d.head_dim)
        k = (h @ self.weight(prefix + "key").T).reshape(steps, d.kv_heads, d.head_dim)
        v = (h @ self.weight(prefix + "value").T).reshape(steps, d.kv_heads, d.head_dim)
        gate = h @ self.weight(prefix + "gate").T
        q, k = self.norm(q, prefix + "query_norm"), self.norm(k, prefix + "key_norm")
        group = d.heads // d.kv_heads
        out = np.zeros((steps, d.heads, d.head_dim))
        for head in range(d.heads):
            scores = q[:, head] @ k[:, head // group].T / math.sqrt(d.head_dim)
            scores[np.triu_indices(steps, 1)] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = p / p.sum(-1, keepdims=True) @ v[:, head // group]
        return (out.reshape(steps, -1) / (1 + np.exp(-gate))) @ self.weight(prefix + "output").T

    def gdn(self, h: Array, prefix: str) -> Array:
        d, steps = self.dims, len(h)
        mixed = np.concatenate([h @ self.weight(prefix + part).T for part in ("query", "key", "value")], -1)
        taps = self.weight(prefix + "convolution")
        padded = np.concatenate([np.zeros((3, mixed.shape[1])), mixed])
        y = sum(taps[j] * padded[j : j + steps] for j in range(4))
        y = y / (1 + np.exp(-y))
        q, k, v = np.split(y, [d.key_width, 2 * d.key_width], -1)
        q, k = q.reshape(steps, d.key_heads, d.key_dim), k.reshape(steps, d.key_heads, d.key_dim)
        q, k = (x / np.sqrt((x * x).sum(-1, keepdims=True) + 1e-6) for x in (q, k))
        v = v.reshape(steps, d.value_heads, d.value_dim)
        a = h @ self.weight(prefix + "a_projection").T + self.weight(prefix + "dt_bias")
        alpha = np.exp(-np.exp(self.weight(prefix + "a_log")) * np.log1p(np.exp(a)))
        beta = 1 / (1 + np.exp(-(h @ self.weight(prefix + "b_projection").T)))
        state = np.zeros((d.value_heads, d.value_dim, d.key_dim))
        out = np.zeros((steps, d.value_heads, d.value_dim))
        for t in range(steps):
            for j in range(d.value_heads):
                key, query = k[t, j * d.key_heads // d.value_heads], q[t, j * d.key_heads // d.value_heads]
                state[j] *= alpha[t, j]
                state[j] += np.outer(beta[t, j] * (v[t, j] - state[j] @ key), key)
                out[t, j] = state[j] @ query / math.sqrt(d.key_dim)
        z = (h @ self.weight(prefix + "z").T).reshape(out.shape)
        out = self.norm(out, prefix + "norm", 0.0) * z / (1 + np.exp(-z))
        return out.reshape(steps, -1) @ self.weight(prefix + "output").T

    def run(self, tokens: list[int]) -> tuple[Array, list[float]]:
        x = self.weight("text/token_embedding")[tokens]
        sizes = []
        for index, kind in enumerate(self.dims.layer_types):
            prefix = f"text/layers/{index}/"
            h = self.norm(x, prefix + "input_norm")
            mixer = self.attention(h, prefix + "attention/") if kind == FULL else self.gdn(h, prefix + "gdn/")
            x = x + mixer
            h = self.norm(x, prefix + "post_attention_norm")
            gate, up = h @ self.weight(prefix + "mlp/gate").T, h @ self.weight(prefix + "mlp/up").T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.weight(prefix + "mlp/down").T
            sizes.append(math.sqrt(float((x * x).mean())))
        return self.norm(x, "text/final_norm") @ self.weight("text/output_head").T, sizes


@pytest.mark.parametrize("weights", ["bf16", "groupwise-int", "nvfp4", "nvfp4-fp8"])
def test_activations_stay_of_order_one_through_64_layers(tmp_path: Path, weights: str) -> None:
    deep = TextDims(**{**DIMS.__dict__, "layer_types": ((LINEAR,) * 3 + (FULL,)) * 16})
    data = {CONFIG_RESOURCE: json.dumps(deep.to_config()).encode()}
    path = tmp_path / "a.ninfer"
    plans = plan_objects(deep, weights, resources={n: len(v) for n, v in data.items()})
    synthesize(path, Identity("deep", weights), plans, data, workers=1)
    with artifacts.open(path) as artifact:
        logits, sizes = Model(artifact).run([1, 50, 7, 7, 299, 3])
    assert np.isfinite(logits).all() and max(sizes) < 50 and min(sizes) > 0.1
    spread = logits.std(-1)
    assert (1 < spread).all() and (spread < 20).all()
    same = logits[2] - logits[3]  # one token at two positions: the states made a difference, and tokens do too
    assert np.abs(same).max() > 1e-3 and np.abs(logits[0] - logits[1]).max() > 0.5


def test_bf16_words_cover_four_octaves() -> None:
    tensor = _tensor((64, 64), "BF16")
    values = np.abs(bf16_to_f32(tensor_bytes(tensor, 0, 0).view(np.uint16)))
    assert 12 < values.max() / values.min() < 16 and align_up(1, 8) == 8
