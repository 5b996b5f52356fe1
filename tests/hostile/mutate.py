"""Mutations of valid files: blind (bytes) and informed (header fields, JSON values, JSON text)."""

import json
import random
from typing import Any

from tests.hostile.corpus import MAGIC, frame, root_v1, root_v2, root_v3, text, text_of, valid

NUMBERS: list[Any] = [
    0, 1, -1, 2, 3, 255, 256, 257, 4095, 4096, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 53) + 1, (1 << 63) - 1, 1 << 63,
    (1 << 64) - 1, 1 << 64, 10**40, 0.0, -0.0, 1.5, 1e308, True, False,
]  # fmt: skip
STRINGS = ["", "a", "r", "p", "text", "tensor", "resource", "BF16", "bf16", "NVFP4", "Q4G64_F16S", "q8_g32_fp16", "..", "a/b",
           "contiguous-le-v1", "row_split_k128_v1", "raw-bytes-v1", "\0", "\ud800", "é", "😀", "x" * 300, "},{", '},"',
           "\u2028", "AllowA4", "object", "parts", "NaN"]  # fmt: skip
TOKENS = [b"{", b"}", b"[", b"]", b",", b":", b'"', b"\\", b"null", b"true", b"NaN", b"-0", b"1e999", b"0x1", b" ", b"\n",
          b"\0", b"\xff", b"\xc3", b"[[[[[[[[", b'{"a":', b'"\\ud800"', b"/**/", b"99999999999999999999",
          b"\xef\xbb\xbf"]  # fmt: skip


def mutate(rng: random.Random) -> bytes:
    """One hostile file."""
    version = rng.choice((1, 2, 3))
    kind = rng.random()
    if kind < 0.35:
        return _values(rng, version)
    if kind < 0.6:
        return _directory_text(rng, version)
    data = bytearray(valid(version))
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        _bytes(rng, data, version)
    return bytes(data)


def _bytes(rng: random.Random, data: bytearray, version: int) -> None:
    """Blind damage, mostly in the header and the directory."""
    length = max(1, len(text_of(valid(version))) + 32)
    at = min(rng.randrange(length) if rng.random() < 0.9 else rng.randrange(len(data) or 1), max(0, len(data) - 1))
    choice = rng.randrange(7)
    if choice == 0 and data:
        data[at] ^= 1 << rng.randrange(8)
    elif choice == 1 and data:
        data[at] = rng.randrange(256)
    elif choice == 2:
        data[at:at] = rng.choice(TOKENS)
    elif choice == 3:
        del data[at : at + rng.randrange(1, 40)]
    elif choice == 4:
        del data[rng.randrange(len(data) + 1) :]
    elif choice == 5:
        data[8:16] = (rng.choice([n for n in NUMBERS if type(n) is int and n >= 0]) & ((1 << 64) - 1)).to_bytes(8, "little")
    else:
        data[0:8] = rng.choice(list(MAGIC.values()))


def _directory_text(rng: random.Random, version: int) -> bytes:
    """Damage to the JSON text, with a header that fits it."""
    raw = bytearray(text_of(valid(version)))
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(raw) + 1)
        choice = rng.randrange(4)
        if choice == 0:
            raw[at:at] = rng.choice(TOKENS)
        elif choice == 1:
            raw[at : at + rng.randrange(1, 12)] = rng.choice(TOKENS)
        elif choice == 2:  # repeat a stretch: duplicate members, duplicate records
            end = min(len(raw), at + rng.randrange(1, 200))
            raw[end:end] = raw[at:end]
        else:
            del raw[at : at + rng.randrange(1, 30)]
    return frame(rng.choice((version, version, 1, 2, 3)), bytes(raw))


def _values(rng: random.Random, version: int) -> bytes:
    """Well-formed JSON with wrong values, names, or structure."""
    root: Any = {1: root_v1, 2: root_v2, 3: root_v3}[version]()
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        container, key = _random_place(rng, root)
        choice = rng.randrange(6)
        if choice == 0:
            _set(container, key, rng.choice(NUMBERS))
        elif choice == 1:
            _set(container, key, rng.choice(STRINGS))
        elif choice == 2:
            _set(container, key, rng.choice([None, [], {}, [1], {"a": 1}, [[]], [{}]]))
        elif choice == 3 and isinstance(container, dict):
            container[rng.choice(STRINGS)] = container[key]
        elif choice == 4:
            del container[key]
        else:  # the value of another place
            other, where = _random_place(rng, root)
            _set(container, key, json.loads(json.dumps(other[where])))
    payload = rng.choice((None, None, None, 0, 1, 516, 1284, 5000))
    return frame(version, text(root), payload)


def _set(container: Any, key: Any, value: Any) -> None:
    container[key] = value


def mutate_model(rng: random.Random, model: bytes) -> bytes:
    """A real model file with wrong values in its directory, its embedded configuration, or both."""
    version = model[7]
    raw = text_of(model)
    root = json.loads(raw)
    start = -(-(len(raw) + (32 if version == 3 else 16)) // 4096) * 4096
    payload = bytearray(model[start:])
    place = next((slice(o["offset"], o["offset"] + o["bytes"]) for o in root["objects"]
                  if o.get("name") == "model/config.json"), slice(0))  # fmt: skip
    config = json.loads(payload[place] or b"{}")
    for _ in range(rng.choice((1, 1, 2))):
        if version == 2 and rng.random() < 0.5:
            container, key = _random_place(rng, config)
            _set(container, key, rng.choice([*NUMBERS, *STRINGS, None, [], {}, {"a": []}]))
            size = place.stop - place.start
            payload[place] = text(config)[:size].ljust(size)
        else:
            part = rng.choice([root[key] for key in ("components", "objects", "bindings", "uses") if root.get(key)])
            container, key = _random_place(rng, part)
            _set(container, key, rng.choice([*NUMBERS, *STRINGS, None, [], {}, {"a": []}]))
    directory = text(root)
    framed = frame(version, directory, 0)
    return framed + bytes(payload)


def _random_place(rng: random.Random, root: Any) -> tuple[Any, Any]:
    """A container and a key or index in it, anywhere in the document."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for key, item in items:
            places.append((value, key))
            walk(item)

    walk(root)
    return rng.choice(places) if places else ({"x": 1}, "x")
