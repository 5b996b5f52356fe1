"""Frontend files for synthetic artifacts: they work, and they have the length that the published files have.

The tokenizer is a byte-level BPE over the published id domain whose merges are enumerated, not learned: all pairs of
bytes, then triples of common characters. Text survives a round trip; token boundaries mean nothing.
"""

import json
from collections.abc import Mapping
from itertools import product

from artifacts.errors import OutputError
from artifacts.identities.plan import RESOURCES

BASE_TOKENS = 248044
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
ADDED_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
    "<tool_call>",
    "</tool_call>",
    "<|fim_prefix|>",
    "<|fim_middle|>",
    "<|fim_suffix|>",
    "<|fim_pad|>",
    "<|repo_name|>",
    "<|file_sep|>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
    "<|audio_start|>",
    "<|audio_end|>",
    "<tts_pad>",
    "<tts_text_bos>",
    "<tts_text_eod>",
    "<tts_text_bos_single>",
    "<|audio_pad|>",
)
NOT_SPECIAL = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
IN_TOKENIZER_JSON = 26
"""The published tokenizer.json ends at `</think>`; the audio tokens stand only in tokenizer_config.json."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{%- if enable_thinking is defined and not enable_thinking -%}"
    "{{ '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' }}"
    "{%- else -%}"
    "{{ '<|im_start|>assistant\\n<think>\\n' }}"
    "{%- endif -%}{%- endif -%}"
)


def byte_characters() -> list[str]:
    """The printable character that stands for each byte value in byte-level BPE files."""
    kept = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(value if value in kept else next(spare)) for value in range(256)]


def _vocabulary() -> tuple[dict[str, int], list[str]]:
    """Tokens with ids 0 … BASE_TOKENS - 1 and the merges that make all but the first 256, in rank order."""
    table = byte_characters()
    common = [table[v] for v in (*range(0x20, 0x22), *range(0x2C, 0x2F), *range(0x41, 0x5B), *range(0x61, 0x7B))]
    order = common + [c for c in table if c not in common]
    vocabulary = {character: index for index, character in enumerate(table)}
    merges: list[str] = []

    def merge(left: str, right: str) -> None:
        vocabulary[left + right] = len(vocabulary)
        merges.append(f"{left} {right}")

    for left, right in product(order, order):
        merge(left, right)
    for left, middle, right in product(common, common, common):
        if len(vocabulary) == BASE_TOKENS:
            break
        merge(left + middle, right)
    return vocabulary, merges


def _added(index: int) -> dict[str, object]:
    content = ADDED_TOKENS[index]
    return {
        "content": content,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": content not in NOT_SPECIAL,
    }


def _tokenizer_json() -> str:
    vocabulary, merges = _vocabulary()
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": SPLIT_PATTERN}, "behavior": "Isolated", "invert": False}
    return _compact(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [{"id": BASE_TOKENS + i, **_added(i)} for i in range(IN_TOKENIZER_JSON)],
            "normalizer": {"type": "NFC"},
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
            "post_processor": level,
            "decoder": level,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": "",
                "end_of_word_suffix": "",
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": vocabulary,
                "merges": merges,
            },
        }
    )


def _compact(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _media(processor: str, shortest: int, longest: int) -> str:
    return _compact(
        {
            "size": {"shortest_edge": shortest, "longest_edge": longest},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
            "image_processor_type": processor,
        }
    )


def frontend(lengths: Mapping[str, int]) -> dict[str, bytes]:
    """The six frontend resources, each padded to its length in `lengths` (object name -> bytes).

    JSON is padded with spaces, the template with a comment. Errors: OutputError when a length is too short.
    """
    config = {
        "add_prefix_space": False,
        "added_tokens_decoder": {str(BASE_TOKENS + i): _added(i) for i in range(len(ADDED_TOKENS))},
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "Qwen2Tokenizer",
    }
    generation = {
        "do_sample": True,
        "eos_token_id": [BASE_TOKENS + 2, BASE_TOKENS],
        "pad_token_id": BASE_TOKENS,
        "temperature": 1.0,
        "top_k": 20,
        "top_p": 0.95,
    }
    texts = (
        _tokenizer_json(),
        _compact(config),
        CHAT_TEMPLATE,
        _compact(generation),
        _media("Qwen2VLImageProcessor", 65536, 16777216),
        _media("Qwen3VLVideoProcessor", 4096, 25165824),
    )
    return {name: _padded(name, text.encode(), lengths[name]) for name, text in zip(RESOURCES, texts, strict=True)}


def _padded(name: str, data: bytes, length: int) -> bytes:
    if name.endswith(".jinja"):
        opening, closing = b"{#-", b"-#}"
        if length >= len(data) + len(opening) + len(closing):
            return opening + b" " * (length - len(data) - len(opening) - len(closing)) + closing + data
    if len(data) > length:
        raise OutputError(f"synthetic {name} takes {len(data)} bytes, more than the {length} of the published file")
    return data.ljust(length, b" ")
