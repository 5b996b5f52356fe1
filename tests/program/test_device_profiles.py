"""Device profiles: a file with anything else than tiles in it is refused with one line, whatever stands there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import MISSING, asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from compiler import profiles
from compiler.emit.arch import caps
from compiler.kernels.linear_columns import FORMATS, Product, Tile, best_tile, choose, fits
from compiler.profiles import FIELDS, OPTIONAL, ProfileError, load

PRODUCT = Product("NVFP4", 34816, 5120, 24, 1, "swiglu")
TILE: dict[str, Any] = asdict(Tile(1, 4, 2, 4, False, 2, warpgroup=True))


def written(folder: Path, tile: Any, arch: str = "sm_90a", **changed: Any) -> Path:
    path = folder / "card.json"
    data = {"ninferc_profile": profiles.VERSION, "gpu": "a card", "arch": arch, "sms": caps(arch).sms}
    data["tiles"] = {PRODUCT.key: tile}
    path.write_text(json.dumps(data | changed))
    return path


@pytest.fixture
def clean() -> Iterator[None]:
    """No profile of this test is left for others."""
    yield
    profiles._chosen.clear()
    profiles._merged.cache_clear()
    best_tile.cache_clear()


def test_fields_are_those_of_a_tile() -> None:
    assert list(FIELDS) == [field.name for field in fields(Tile)]
    assert {field.name for field in fields(Tile) if field.default is not MISSING} == OPTIONAL


@pytest.mark.parametrize("path", sorted(Path(profiles.__file__).parent.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_tiles_are_legal(path: Path) -> None:
    """A tile that no longer fits would give way to the built-in choice, and nobody would see that it is slower."""
    profile, names = load(path), {kernel: name for name, (kernel, *_) in FORMATS.items()}
    target = replace(caps(profile.arch), sms=profile.sms)
    for key, tile in profile.tiles.items():
        found = re.fullmatch(r"(\w+)(?:\+(\w+))? (\d+)(?:\+(\d+))?x(\d+) c(\d+) s(\d+) (\w+?)(\+norm)?", key)
        assert found, key
        kernel, other, *numbers, epilogue, norm = found.groups()
        n, other_n, k, columns, segments = (int(number or 0) for number in numbers)
        second = (names[other], other_n) if other else None
        product = Product(names[kernel], n, k, columns, segments, epilogue, norm is not None, second=second)
        assert product.key == key and fits(product, Tile(**tile), target), key


@pytest.mark.parametrize("name", FIELDS)
def test_missing_fields(tmp_path: Path, name: str) -> None:
    """Profiles from before a field existed have its default; fields that always were there have none."""
    path = written(tmp_path, {k: v for k, v in TILE.items() if k != name})
    if name in OPTIONAL:
        assert Tile(**load(path).tiles[PRODUCT.key]) == Tile(**{k: v for k, v in TILE.items() if k != name})
    else:
        with pytest.raises(ProfileError, match=f"card.json, tile of .*c24.*: {name} is missing"):
            load(path)


@pytest.mark.parametrize("value", [None, -1, 0, 1, 3, 1.0, 4.0, True, 1 << 70, 1e300, "1", "late", "a;b", "late\n", [], {}],
                         ids=repr)  # fmt: skip
@pytest.mark.parametrize("name", FIELDS)
def test_values_are_of_their_type_and_range(tmp_path: Path, name: str, value: Any) -> None:
    """Whatever is read gives a tile that can be asked whether it fits; nothing else is read."""
    path, kind = written(tmp_path, TILE | {name: value}), type(TILE[name])
    try:
        tile = Tile(**load(path).tiles[PRODUCT.key])
    except ProfileError as error:
        assert f": {name} is " in str(error) and "\n" not in str(error)
    else:
        assert type(value) is kind and value in FIELDS[name]
        for product in (PRODUCT, Product("BF16", 40, 200, 9), Product("Q5G64_F16S", 64, 2560, 2, 2, "residual")):
            assert fits(product, tile, caps("sm_90a")) in (True, False)


@pytest.mark.parametrize("changed", [
    {"tiles": [TILE]}, {"tiles": None}, {"tiles": {"x": 3}}, {"tiles": {"x": [["mtiles", 1]]}},
    {"tiles": {"x": TILE | {"wide": 1}}}, {"sms": None}, {"sms": "many"}, {"sms": float("inf")}, {"ninferc_profile": 0},
    {"ninferc_profile": None},
], ids=lambda changed: json.dumps(changed)[:40])  # fmt: skip
def test_other_damage(tmp_path: Path, changed: dict[str, Any]) -> None:
    with pytest.raises(ProfileError, match="device profile .*card.json") as error:
        load(written(tmp_path, TILE, **changed))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, "3", '{"tiles": {}}', "\xff"], ids=lambda text: text[:10])
def test_other_files(tmp_path: Path, text: str) -> None:
    (tmp_path / "card.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ProfileError, match="card.json is damaged"):
        load(tmp_path / "card.json")


@pytest.mark.parametrize(("arch", "change", "used"), [
    ("sm_90a", {}, True), ("sm_90a", {"warpgroup": False}, True), ("sm_120a", {}, False), ("sm_90a", {"warps_r": 6}, False),
    ("sm_90a", {"mtiles": 2}, False), ("sm_90a", {"resident": True}, False), ("sm_90a", {"warps_r": 32, "warps_k": 32}, False),
    ("sm_90a", {"split": True}, False), ("sm_90a", {"stages": 2}, False), ("sm_90a", {"stages": 64}, False),
])  # fmt: skip
@pytest.mark.usefixtures("clean")
def test_tiles_that_do_not_fit_are_passed_over(tmp_path: Path, arch: str, change: dict[str, Any], used: bool) -> None:
    """Of the product or of the target: the built-in choice stands in."""
    tile = Tile(**TILE | change)
    best_tile.cache_clear()
    profiles.use(written(tmp_path, asdict(tile), arch), None)
    chosen = choose(PRODUCT, caps(arch))
    assert (chosen == tile) == used == fits(PRODUCT, tile, caps(arch))
    assert fits(PRODUCT, chosen, caps(arch))
