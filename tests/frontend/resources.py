"""Frontend resources for tests: those of the small trained model, and a synthetic tokenizer that tests can bend."""

import json
from pathlib import Path
from typing import Any

from runtime.frontend.tokenizer import SPLIT_PATTERNS, byte_alphabet

TINY = Path(__file__).parent.parent / "data" / "tiny-hybrid-frontend"


def synthetic(merges: list[tuple[str, str]] | None = None, pattern: str = "qwen3.5") -> dict[str, Any]:
    """A tokenizer.json of 256 byte tokens plus `merges`, with `<|im_start|>`, `<|im_end|>`, `<think>`, `</think>`."""
    vocab = {char: value for value, char in enumerate(byte_alphabet())}
    for left, right in merges or []:
        vocab[left + right] = len(vocab)
    names = (("<|im_start|>", True), ("<|im_end|>", True), ("<think>", False), ("</think>", False))
    return {
        "added_tokens": [{"id": len(vocab) + i, "content": name, "special": special, "single_word": False,
                          "lstrip": False, "rstrip": False, "normalized": False}
                         for i, (name, special) in enumerate(names)],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": SPLIT_PATTERNS[pattern]}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]},
        "model": {"type": "BPE", "vocab": vocab, "merges": [list(pair) for pair in merges or []]},
    }


def as_bytes(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8")
