"""Frontend resources of an artifact (conversion.md section 2) and the draft head's token ranking (section 4)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from artifacts.convert.checkpoint import parse_json
from artifacts.errors import ConfigError, quoted, quoted_path
from artifacts.formats import Array
from artifacts.identities.plan import RESOURCES

MAX_RESOURCE_BYTES = 64 << 20
MAX_TEMPLATE_BYTES = 1 << 20
TOKENIZER, TOKENIZER_CONFIG, CHAT_TEMPLATE = RESOURCES[:3]


def _read(path: Path) -> bytes:
    try:
        size = path.stat().st_size
        if not 1 <= size <= MAX_RESOURCE_BYTES:
            raise ConfigError(f"{quoted(path.name)}: {size} bytes; 1..{MAX_RESOURCE_BYTES} are allowed")
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{quoted_path(path)}: {error.strerror or error}") from None


def frontend_resources(directory: Path) -> dict[str, bytes]:
    """Object name -> bytes of the frontend files that exist, in file order, copied byte for byte.

    A chat template that stands only inside tokenizer_config.json becomes `frontend/chat_template.jinja`.
    Errors: ConfigError for an empty, oversized or unreadable file or a template that is no text.
    """
    found: dict[str, bytes] = {}
    for name in RESOURCES:
        path = directory / name.removeprefix("frontend/")
        if path.is_file():
            found[name] = _read(path)
        elif name == CHAT_TEMPLATE and TOKENIZER_CONFIG in found:
            template = embedded_template(found[TOKENIZER_CONFIG])
            if template is not None:
                found[name] = template
    return found


def embedded_template(raw: bytes) -> bytes | None:
    """The chat template inside a tokenizer_config.json (the one called `default` of several), or None."""
    record = parse_json(raw, "tokenizer_config.json")
    template = record.get("chat_template") if isinstance(record, dict) else None
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    if template is None:
        return None
    if not isinstance(template, str) or not template:
        raise ConfigError("'tokenizer_config.json': chat_template must be a nonempty string")
    try:
        encoded = template.encode("utf-8")
    except UnicodeEncodeError:
        raise ConfigError("'tokenizer_config.json': chat_template holds a lone surrogate") from None
    if len(encoded) > MAX_TEMPLATE_BYTES:
        raise ConfigError(f"'tokenizer_config.json': chat_template exceeds {MAX_TEMPLATE_BYTES} bytes")
    return encoded


def token_domain(resources: Mapping[str, bytes], vocabulary: int) -> tuple[int, list[int]]:
    """Number of token ids the tokenizer can produce, and the ids flagged special in added_tokens_decoder.

    Errors: ConfigError when the tokenizer is missing, or has ids outside the vocabulary.
    """
    if TOKENIZER not in resources:
        raise ConfigError("a draft head needs tokenizer.json, which says how many token ids there are")
    tokenizer = parse_json(resources[TOKENIZER], "tokenizer.json")
    config: Any = {}
    if TOKENIZER_CONFIG in resources:
        config = parse_json(resources[TOKENIZER_CONFIG], "tokenizer_config.json")
    ids, special = [], set()
    try:
        ids += list(tokenizer["model"]["vocab"].values())
        ids += [token["id"] for token in tokenizer.get("added_tokens", [])]
        for key, token in config.get("added_tokens_decoder", {}).items():
            ids.append(int(key))
            if token.get("special") is True:
                special.add(int(key))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise ConfigError("tokenizer.json or tokenizer_config.json: vocabulary or added tokens are malformed") from None
    if not ids or any(type(i) is not int or not 0 <= i < vocabulary for i in ids):
        raise ConfigError(f"tokenizer ids must be integers below the {vocabulary} rows of the embedding")
    return max(ids) + 1, sorted(special)


def read_ranking(path: str | os.PathLike[str], vocabulary: int) -> Array:
    """Row 0 (total counts) of a ranking file: little-endian int64 [rows, vocabulary]. Errors: ConfigError."""
    file = Path(path)
    try:
        size = file.stat().st_size
        if size == 0 or size % (vocabulary * 8):
            raise ConfigError(f"{quoted(file.name)}: {size} bytes; a positive multiple of {vocabulary * 8} is needed")
        with file.open("rb") as handle:
            raw = handle.read(vocabulary * 8)
    except OSError as error:
        raise ConfigError(f"{quoted_path(path)}: {error.strerror or error}") from None
    return np.frombuffer(raw, "<i8").astype(np.int64)


def draft_token_ids(counts: Array, domain: int, special: list[int], rows: int) -> Array:
    """The `rows` token ids of the draft head, int32, by descending count (conversion.md section 4).

    Special ids are always in; at equal counts they come after picked ids. Errors: ConfigError when `rows` > `domain`.
    """
    if rows > domain:
        raise ConfigError(f"a draft head of {rows} rows needs as many token ids; the tokenizer has {domain}")
    totals = counts[:domain]
    forced = np.unique(np.array([i for i in special if i < domain], np.int64))
    if len(forced) >= rows:
        chosen = forced
    else:
        order = np.argsort(-totals, kind="stable")
        picked = order[~np.isin(order, forced)][: rows - len(forced)]
        chosen = np.concatenate([picked, forced])
    ranked = chosen[np.argsort(-totals[chosen], kind="stable")][:rows]
    return ranked.astype(np.int32)
