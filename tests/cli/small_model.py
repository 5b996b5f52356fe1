"""A model of two layers with random weights and the tokenizer of tiny-hybrid: small enough to answer at once."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import artifacts
from artifacts.convert import Options, convert
from tests.convert import checkpoints
from tests.models import DATA

FRONTEND = DATA / "tiny-hybrid-frontend"
TEMPLATE = """{%- if tools %}tools {{ tools | length }}\n{% endif -%}
{%- for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and enable_thinking %}<think>\n
{%- endif %}{% endif -%}"""
CONFIG = checkpoints.TEXT_CONFIG | {
    "vocab_size": 4224,  # 4096 ids and 128 padded rows
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "max_position_embeddings": 1024,
}
_folder = tempfile.TemporaryDirectory(prefix="ninferc-tests-")


@cache
def small_artifact() -> Path:
    """The converted model, BF16, about 3 MB."""
    make = checkpoints.Maker(seed=5)
    make.bf16("model.embed_tokens.weight", CONFIG["vocab_size"], checkpoints.HIDDEN)
    make.bf16("model.norm.weight", checkpoints.HIDDEN)
    make.bf16("lm_head.weight", CONFIG["vocab_size"], checkpoints.HIDDEN, scale=0.1)  # flat enough to sample from
    checkpoints.layer(make, "model.layers.0.", False)
    checkpoints.layer(make, "model.layers.1.", True)
    files = {name: (FRONTEND / name).read_text("utf-8") for name in ("tokenizer.json", "tokenizer_config.json")}
    files |= {"generation_config.json": (FRONTEND / "generation_config.json").read_text(), "chat_template.jinja": TEMPLATE}
    source = checkpoints.write_checkpoint(Path(_folder.name) / "source", make.tensors, CONFIG, files=files)
    out = Path(_folder.name) / "small.ninfer"
    convert(source, out, Options(weights="bf16", model_id="small"))
    return out


@cache
def opened() -> artifacts.Artifact:
    return artifacts.open(small_artifact())
