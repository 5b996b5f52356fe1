"""Byte-level BPE tokenizer of the Qwen family, built from the artifact's `tokenizer.json` and `tokenizer_config.json`.

Both resources are untrusted, so only data is taken from them (vocabulary, merges, added tokens); the pipeline around
it is ours: added tokens cut out by exact text, NFC on the rest, one of the known split patterns (a pattern from a
file could backtrack for ever), bytes through the GPT-2 alphabet, merges in rank order.

Control tokens are recognised only where the caller says that text is not data: `encode_text` recognises none,
`encode` those outside the `literal` spans of a rendered chat template.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Pipeline

from artifacts.errors import quoted
from runtime.frontend.errors import TokenizerError
from runtime.frontend.json_data import parse_json

TOKENIZER_JSON = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

MAX_TOKENIZER_BYTES = 64 * 1024 * 1024
MAX_CONFIG_BYTES = 4 * 1024 * 1024
MAX_TOKENS = 1 << 20
MAX_MERGES = 1 << 20
MAX_TOKEN_CHARS = 4096
MAX_ADDED_TOKENS = 4096
MAX_TEXT_BYTES = 64 * 1024 * 1024
"""Longest text that is encoded at once; a million tokens are about 5 MB."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLIT_PATTERNS = {
    "qwen3.5": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL,
    "qwen2": _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL,
}
"""Known split patterns: combining marks belong to words from Qwen3.5 on; every digit is a piece of its own in both."""


def byte_alphabet() -> list[str]:
    """GPT-2's printable character for each byte value: itself where printable, else the next free one from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table, spare = [], 0x100
    for value in range(256):
        if value in printable:
            table.append(chr(value))
        else:
            table.append(chr(spare))
            spare += 1
    return table


@dataclass(frozen=True)
class AddedToken:
    """A token outside the merges. Special ones (`<|im_end|>`) are withheld from decoded text, others are kept."""

    id: int
    content: str
    special: bool


class Tokenizer:
    """Converts between text and token ids 0 … `domain` - 1.

    `token_bytes[id]` are the bytes that an id stands for, `special_ids` the ids withheld from answers,
    `added` the added tokens by text, `special_tokens` the roles named in the configuration
    (`bos_token`, `eos_token`, `pad_token`, `unk_token`) by text.
    """

    def __init__(self, tokenizer_json: bytes, tokenizer_config: bytes | None = None, *,
                 vocab_rows: int | None = None) -> None:
        """Builds from the two resources. `vocab_rows`: rows of the model's embedding; every id must be below it.

        Raises TokenizerError (one line naming the resource and the member).
        """
        root = _object(parse_json(tokenizer_json, TOKENIZER_JSON, MAX_TOKENIZER_BYTES, TokenizerError), TOKENIZER_JSON)
        config: dict[str, Any] = {}
        if tokenizer_config is not None:
            config = _object(parse_json(tokenizer_config, TOKENIZER_CONFIG, MAX_CONFIG_BYTES, TokenizerError),
                             TOKENIZER_CONFIG)
        self.config = config
        self.pattern = _check_pipeline(root)
        vocab, merges = _read_model(_object(root.get("model"), f"{TOKENIZER_JSON}: model"))
        added = _merge_added(_added_from_json(root), _added_from_config(config))
        self.token_bytes, self.added = _token_table(vocab, added, vocab_rows)
        self.domain = len(self.token_bytes)
        self.special_ids = frozenset(token.id for token in self.added.values() if token.special)
        self._added_ids = frozenset(token.id for token in self.added.values())
        self.special_tokens = _roles(config)
        texts = sorted(self.added, key=len, reverse=True)  # longest first: alternatives are tried in order
        self._control = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._pipeline = _pipeline(vocab, merges, self.pattern)

    def id_of(self, text: str) -> int | None:
        """Id of an added token spelled `text`, None when there is none."""
        token = self.added.get(text)
        return None if token is None else token.id

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text; spellings of control tokens are ordinary characters."""
        return self._encode_pieces([text])[0]

    def encode(self, text: str, literal: Iterable[tuple[int, int]] = ()) -> list[int]:
        """Ids of text with control tokens, except those that touch a `literal` span (half-open, sorted, disjoint)."""
        pieces: list[str] = []
        controls: list[int] = []
        position = 0
        for start, end, token in self._controls(text, literal):
            pieces.append(text[position:start])
            controls.append(token)
            position = end
        pieces.append(text[position:])
        ids: list[int] = []
        for index, encoded in enumerate(self._encode_pieces(pieces)):
            ids += encoded
            if index < len(controls):
                ids.append(controls[index])
        return ids

    def _controls(self, text: str, literal: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
        if self._control is None:
            return
        position = 0
        for start, end in [*literal, (len(text), len(text))]:
            for match in self._control.finditer(text, position, start):
                yield match.start(), match.end(), self.added[match.group()].id
            position = end

    def _encode_pieces(self, pieces: Sequence[str]) -> list[list[int]]:
        size = 0
        for piece in pieces:
            try:
                size += len(piece.encode("utf-8"))
            except UnicodeEncodeError as error:
                code = ord(piece[error.start])
                raise TokenizerError(f"the text holds the lone surrogate U+{code:04X}, which is no character") from None
        if size > MAX_TEXT_BYTES:
            raise TokenizerError(f"the text has {size} bytes; at most {MAX_TEXT_BYTES} are allowed")
        encoded = [list(item.ids) for item in self._pipeline.encode_batch_fast(list(pieces), add_special_tokens=False)]
        for ids in encoded:
            if not self._added_ids.isdisjoint(ids):
                raise TokenizerError(f"{TOKENIZER_JSON}: the merges produce an added token from plain text")
        return encoded

    def bytes_of(self, ids: Iterable[int], *, skip_special: bool = False) -> bytes:
        """Concatenated bytes of ids. Raises TokenizerError for an id outside 0 … domain - 1."""
        return b"".join([self._bytes(token) for token in ids if not (skip_special and token in self.special_ids)])

    def _bytes(self, token: int) -> bytes:
        if not 0 <= token < self.domain:
            raise TokenizerError(f"token id {token} is outside 0 … {self.domain - 1}")
        return self.token_bytes[token]

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of ids; bytes that are not UTF-8 become U+FFFD."""
        return self.bytes_of(ids, skip_special=skip_special).decode("utf-8", "replace")


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TokenizerError(f"{what}: must be an object")
    return value


def _check_pipeline(root: dict[str, Any]) -> str:
    """Name of the split pattern, after checking that the pipeline is the one this module implements."""
    normalizer = root.get("normalizer")
    if normalizer != {"type": "NFC"}:
        raise TokenizerError(f"{TOKENIZER_JSON}: normalizer {quoted(normalizer)}; allowed is NFC")
    pre = _object(root.get("pre_tokenizer"), f"{TOKENIZER_JSON}: pre_tokenizer")
    steps = pre.get("pretokenizers") if pre.get("type") == "Sequence" else None
    if not isinstance(steps, list) or [step.get("type") if isinstance(step, dict) else None for step in steps] != [
            "Split", "ByteLevel"]:
        raise TokenizerError(f"{TOKENIZER_JSON}: pre_tokenizer must be a sequence of Split and ByteLevel")
    split, level = steps
    pattern = split.get("pattern")
    regex = pattern.get("Regex") if isinstance(pattern, dict) else None
    name = next((name for name, known in SPLIT_PATTERNS.items() if known == regex), None)
    if name is None:
        raise TokenizerError(f"{TOKENIZER_JSON}: unknown split pattern {quoted(regex)}; known are those of "
                             f"{', '.join(SPLIT_PATTERNS)}")
    if split.get("behavior") != "Isolated" or split.get("invert") is not False:
        raise TokenizerError(f"{TOKENIZER_JSON}: the split must be Isolated and not inverted")
    if level.get("add_prefix_space") is not False or level.get("use_regex") is not False:
        raise TokenizerError(f"{TOKENIZER_JSON}: ByteLevel must have add_prefix_space and use_regex false")
    return name


def _read_model(model: dict[str, Any]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges, checked."""
    if model.get("type", "BPE") != "BPE":
        raise TokenizerError(f"{TOKENIZER_JSON}: model type {quoted(model.get('type'))}; allowed is BPE")
    for option in ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(option) not in (None, "", 0):
            raise TokenizerError(f"{TOKENIZER_JSON}: model.{option} must be absent")
    for option in ("byte_fallback", "ignore_merges"):
        if model.get(option) not in (None, False):
            raise TokenizerError(f"{TOKENIZER_JSON}: model.{option} must be false")
    vocab = _object(model.get("vocab"), f"{TOKENIZER_JSON}: model.vocab")
    if not 256 <= len(vocab) <= MAX_TOKENS:
        raise TokenizerError(f"{TOKENIZER_JSON}: {len(vocab)} tokens; allowed are 256 to {MAX_TOKENS}")
    for text, token in vocab.items():
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < MAX_TOKENS:
            raise TokenizerError(f"{TOKENIZER_JSON}: token {quoted(text)} has the id {quoted(token)}; allowed are 0 to "
                                 f"{MAX_TOKENS - 1}")
        if not 0 < len(text) <= MAX_TOKEN_CHARS:
            raise TokenizerError(f"{TOKENIZER_JSON}: token {token} has {len(text)} characters; allowed are 1 to "
                                 f"{MAX_TOKEN_CHARS}")
    for char in byte_alphabet():
        if char not in vocab:
            raise TokenizerError(f"{TOKENIZER_JSON}: the vocabulary lacks the byte token {quoted(char)}")
    merges = model.get("merges")
    if not isinstance(merges, list) or len(merges) > MAX_MERGES:
        raise TokenizerError(f"{TOKENIZER_JSON}: model.merges must be a list of at most {MAX_MERGES} pairs")
    pairs: list[tuple[str, str]] = []
    for rank, merge in enumerate(merges):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if not (isinstance(pair, list) and len(pair) == 2 and all(isinstance(part, str) for part in pair)):
            raise TokenizerError(f"{TOKENIZER_JSON}: merge {rank} is not a pair of tokens")
        left, right = pair
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise TokenizerError(f"{TOKENIZER_JSON}: merge {rank} ({quoted(left, 32)}, {quoted(right, 32)}) names a "
                                 "token that the vocabulary lacks")
        pairs.append((left, right))
    return vocab, pairs


def _added(token: Any, fields: Any, what: str) -> AddedToken:
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < MAX_TOKENS:
        raise TokenizerError(f"{what}: the id {quoted(token)}; allowed are 0 to {MAX_TOKENS - 1}")
    fields = _object(fields, f"{what} {token}")
    content, special = fields.get("content"), fields.get("special", False)
    if not isinstance(content, str) or not 0 < len(content) <= MAX_TOKEN_CHARS or not isinstance(special, bool):
        raise TokenizerError(f"{what} {token}: needs a content of 1 to {MAX_TOKEN_CHARS} characters and special as a "
                             "boolean")
    if any("\ud800" <= char <= "\udfff" for char in content):
        raise TokenizerError(f"{what} {token}: the content holds a lone surrogate")
    for flag in ("single_word", "lstrip", "rstrip", "normalized"):
        if fields.get(flag, False) is not False:
            raise TokenizerError(f"{what} {token} ({quoted(content, 32)}): {flag} must be false")
    return AddedToken(token, content, special)


def _added_from_json(root: dict[str, Any]) -> list[AddedToken]:
    what = f"{TOKENIZER_JSON}: added token"
    entries = root.get("added_tokens", [])
    if not isinstance(entries, list) or len(entries) > MAX_ADDED_TOKENS:
        raise TokenizerError(f"{TOKENIZER_JSON}: added_tokens must be a list of at most {MAX_ADDED_TOKENS}")
    return [_added(_object(entry, what).get("id"), entry, what) for entry in entries]


def _added_from_config(config: dict[str, Any]) -> list[AddedToken]:
    what = f"{TOKENIZER_CONFIG}: added_tokens_decoder"
    entries = _object(config.get("added_tokens_decoder", {}), what)
    if len(entries) > MAX_ADDED_TOKENS:
        raise TokenizerError(f"{what}: more than {MAX_ADDED_TOKENS} tokens")
    found = []
    for key, fields in entries.items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 8):
            raise TokenizerError(f"{what}: the id {quoted(key)}; allowed are 0 to {MAX_TOKENS - 1}")
        found.append(_added(int(key), fields, what))
    return found


def _merge_added(*sources: list[AddedToken]) -> list[AddedToken]:
    """Added tokens of both resources; the later source decides the special flag, contradictions are errors."""
    by_id: dict[int, AddedToken] = {}
    ids: dict[str, int] = {}
    for source in sources:
        own: set[int] = set()
        for token in source:
            if token.id in own or by_id.get(token.id, token).content != token.content:
                raise TokenizerError(f"added token id {token.id} is given twice")
            if ids.setdefault(token.content, token.id) != token.id:
                raise TokenizerError(f"added token {quoted(token.content)} has the ids {ids[token.content]} and "
                                     f"{token.id}")
            own.add(token.id)
            by_id[token.id] = token
    return [by_id[token] for token in sorted(by_id)]


def _token_table(vocab: dict[str, int], added: list[AddedToken], vocab_rows: int | None) -> tuple[
        list[bytes], dict[str, AddedToken]]:
    """Bytes per id and the added tokens by text. Ids must fill 0 … n - 1 without holes or collisions."""
    size = max(max(vocab.values()), max((token.id for token in added), default=-1)) + 1
    if vocab_rows is not None and size > vocab_rows:
        raise TokenizerError(f"the tokenizer has the id {size - 1}; the model has {vocab_rows} vocabulary rows")
    table: list[bytes | None] = [None] * size
    value_of = {char: value for value, char in enumerate(byte_alphabet())}
    added_ids = {token.content: token.id for token in added}
    for text, token in vocab.items():
        if table[token] is not None:
            raise TokenizerError(f"{TOKENIZER_JSON}: the id {token} is given to two tokens")
        try:
            table[token] = bytes([value_of[char] for char in text])
        except KeyError as error:
            if added_ids.get(text) != token:
                raise TokenizerError(f"{TOKENIZER_JSON}: token {token} ({quoted(text, 32)}) has the character "
                                     f"{quoted(error.args[0])}, which stands for no byte") from None
            table[token] = text.encode("utf-8")
    for entry in added:
        if table[entry.id] is not None and vocab.get(entry.content) != entry.id:
            raise TokenizerError(f"added token {quoted(entry.content)} has the id {entry.id} of another token")
        table[entry.id] = entry.content.encode("utf-8")
    complete = [piece for piece in table if piece is not None]
    if len(complete) != size:
        raise TokenizerError(f"the id {table.index(None)} has no token; ids must fill 0 to {size - 1}")
    return complete, {token.content: token for token in added}


def _roles(config: dict[str, Any]) -> dict[str, str]:
    """Texts of bos, eos, pad and unk tokens, as strings or `{"content": …}` objects in the configuration."""
    roles = {}
    for role in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(role)
        text = value.get("content") if isinstance(value, dict) else value
        if text is None:
            continue
        if not isinstance(text, str) or len(text) > MAX_TOKEN_CHARS:
            raise TokenizerError(f"{TOKENIZER_CONFIG}: {role} must be a text of at most {MAX_TOKEN_CHARS} characters")
        roles[role] = text
    return roles


def _pipeline(vocab: dict[str, int], merges: list[tuple[str, str]], pattern: str) -> Pipeline:
    pipeline = Pipeline(models.BPE(vocab, merges))
    pipeline.normalizer = normalizers.NFC()
    pipeline.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT_PATTERNS[pattern]), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return pipeline
