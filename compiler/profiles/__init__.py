"""Device profiles: tiles of products measured inside whole steps by ``ninferc tune``, as versioned data.

A profile speaks of one architecture and multiprocessor count; compile reads the shipped ones and any given by the user.
Tiles change speed, never bits (compiler/kernels/linear_columns.py), so a profile cannot change a result.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

VERSION = 1
MAX_BYTES = 4 << 20
# What a field of a tile (compiler/kernels/linear_columns.py) may hold; those of OPTIONAL may be absent.
FIELDS: Mapping[str, Collection[int | str]] = {
    "mtiles": (1, 2, 4), "warps_r": range(1, 33), "warps_k": range(1, 33), "stages": range(2, 65), "resident": (False, True),
    "blocks_per_sm": range(33), "split": (False, True), "release": ("early", "late", "end"), "warpgroup": (False, True),
    "mixed": (False, True), "clustered": (False, True), "claimed": (False, True),
    "primed": range(65), "stream": (False, True),
}  # fmt: skip
OPTIONAL = frozenset({"split", "release", "warpgroup", "mixed", "clustered", "claimed", "primed", "stream"})


class ProfileError(ValueError):
    """A device profile is damaged, of another version or of another GPU; names the file and the field."""


@dataclass(frozen=True)
class Profile:
    """``tiles``: product key → tile fields. ``gpu`` is the name of the card that was measured."""

    gpu: str
    arch: str
    sms: int
    tiles: Mapping[str, Mapping[str, Any]]


def load(path: Path) -> Profile:
    """Read a profile; tiles have the fields and values of FIELDS. Raises ProfileError."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ProfileError(f"device profile {path} has more than {MAX_BYTES >> 20} MiB")
        data = json.loads(path.read_text())
        if data["ninferc_profile"] != VERSION:
            raise ProfileError(f"device profile {path} has version {data['ninferc_profile']!r}; {VERSION} is read")
        tiles = {key: _tile(f"device profile {path}, tile of {key[:80]!r}", tile) for key, tile in data["tiles"].items()}
        return Profile(str(data["gpu"]), str(data["arch"]), int(data["sms"]), tiles)
    except OSError as error:
        raise ProfileError(f"device profile {path}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        if isinstance(error, ProfileError):
            raise
        raise ProfileError(f"device profile {path} is damaged ({type(error).__name__}: {error})") from error


def _tile(what: str, tile: Any) -> Mapping[str, Any]:
    if not isinstance(tile, dict):
        raise ProfileError(f"{what}: {str(tile)[:40]!r} is no tile")
    for name in sorted(FIELDS.keys() - tile.keys() - OPTIONAL):
        raise ProfileError(f"{what}: {name} is missing")
    for name, value in tile.items():
        if name not in FIELDS:
            raise ProfileError(f"{what}: {name[:40]!r} is no field; {', '.join(FIELDS)} are")
        allowed = FIELDS[name]
        if type(value) is not type(next(iter(allowed))) or value not in allowed:  # True and 1.0 equal 1
            shown = [f"{allowed[0]} to {allowed[-1]}"] if isinstance(allowed, range) else map(json.dumps, allowed)
            raise ProfileError(f"{what}: {name} is {json.dumps(value)[:40]}; {', '.join(shown)} are allowed")
    return tile


_chosen: list[Profile] = []


def use(path: Path, gpu: str | None) -> None:
    """Prefer the profile at ``path``. Raises ProfileError when it was measured on another GPU model than ``gpu``."""
    profile = load(path)
    if gpu is not None and profile.gpu != gpu:
        raise ProfileError(f"device profile {path} was measured on {profile.gpu}, the GPU here is {gpu}")
    _chosen.insert(0, profile)
    _merged.cache_clear()


@cache
def _merged(arch: str, sms: int) -> Mapping[str, Mapping[str, Any]]:
    shipped = [load(path) for path in sorted(Path(__file__).parent.glob("*.json"))]
    out: dict[str, Mapping[str, Any]] = {}
    for profile in [*shipped, *reversed(_chosen)]:
        if (profile.arch, profile.sms) == (arch, sms):
            out.update(profile.tiles)
    return out


def tile_fields(key: str, arch: str, sms: int) -> Mapping[str, Any] | None:
    """Fields of the tile measured best for a product, None where no profile of this target names it."""
    return _merged(arch, sms).get(key)
