"""Conversion recipes: TOML data that says which format every object gets and which checkpoint it comes from.

    weights_id = "groupwise-int"      # identity member of the artifact
    schema = "groupwise-int"          # grouping of weights into objects (artifacts.identities.plan.SCHEMAS)
    scale = "absmax"                  # NVFP4 scale choice: absmax | mse
    extends = "groupwise-int"         # optional: start from a shipped recipe

    [formats]                         # object name or shell pattern -> format; later lines win
    "text/layers/5/mlp/down" = "Q6G64_F16S"
    [sources]                         # object name or shell pattern -> "main" | "base"; later lines win
    "mtp/*" = "base"

    equal_to_base = ["text/layers/*"] # (before the tables) matrices whose unquantized words must be those of the base

The format "source" keeps what the checkpoint holds: NVFP4, FP8 rows or BF16. Everything not named keeps the format of
its schema. Only matrices have a choice; norms, gates, convolutions, biases and ids are fixed by the mathematics.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from importlib.resources import files
from pathlib import Path
from typing import Any

from artifacts.errors import ConfigError, quoted
from artifacts.formats import FORMATS, SCALE_METHODS
from artifacts.identities import SCHEMAS

SOURCE = "source"
MATRIX_FORMATS = tuple(n for n in FORMATS if n not in ("FP32", "I32"))
SHIPPED = ("bf16", "groupwise-int", "nvfp4", "nvfp4-packed", "nvfp4-mixed")
MAX_RECIPE_BYTES = 1 << 20
_MEMBERS = {"weights_id", "schema", "scale", "extends", "formats", "sources", "equal_to_base"}


@dataclass(frozen=True)
class Recipe:
    """A parsed recipe; `name` is for messages and the report."""

    name: str
    weights_id: str
    schema: str
    scale: str = "absmax"
    formats: tuple[tuple[str, str], ...] = ()
    sources: tuple[tuple[str, str], ...] = ()
    overrides: tuple[tuple[str, str], ...] = field(default=())
    equal_to_base: tuple[str, ...] = ()

    def format_of(self, name: str, default: str) -> str:
        """The format that the recipe gives a matrix object; `default` is the schema's."""
        return _last_match((*self.formats, *self.overrides), name, default)

    def source_of(self, name: str) -> str:
        """`main` or `base`: the checkpoint an object is read from when there are two."""
        return _last_match(self.sources, name, "main")

    def equals_base(self, name: str) -> bool:
        """Whether a matrix object that the quantized checkpoint left unquantized must be the base's."""
        return any(fnmatchcase(name, pattern) for pattern in self.equal_to_base)

    def with_overrides(self, overrides: Mapping[str, str], scale: str | None = None) -> Recipe:
        """The recipe with formats by object name or pattern on top, and another NVFP4 scale choice."""
        for pattern, format in overrides.items():
            _check_format(pattern, format, "override")
        if scale is not None and scale not in SCALE_METHODS:
            raise ConfigError(f"--scale {quoted(scale)} is unknown; allowed: {', '.join(SCALE_METHODS)}")
        return replace(self, overrides=(*self.overrides, *overrides.items()), scale=scale or self.scale)


def _last_match(rules: tuple[tuple[str, str], ...], name: str, default: str) -> str:
    for pattern, value in reversed(rules):
        if fnmatchcase(name, pattern):
            return value
    return default


def _check_format(pattern: str, format: Any, what: str) -> None:
    if format not in MATRIX_FORMATS and format != SOURCE:
        allowed = ", ".join((*MATRIX_FORMATS, SOURCE))
        raise ConfigError(f"{what} {quoted(pattern)}: unknown format {quoted(format)}; allowed: {allowed}")


def _table(record: Mapping[str, Any], member: str, what: str) -> tuple[tuple[str, str], ...]:
    table = record.get(member, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{what}: {member} must be a table")
    for pattern, value in table.items():
        if member == "formats":
            _check_format(pattern, value, what)
        elif value not in ("main", "base"):
            raise ConfigError(f"{what}: source of {quoted(pattern)} must be main or base, not {quoted(value)}")
    return tuple(table.items())


def parse_recipe(text: str, name: str) -> Recipe:
    """A recipe from TOML text. Errors: ConfigError naming the recipe and the member."""
    what = f"recipe {quoted(name)}"
    try:
        record = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{what}: not valid TOML ({str(error)[:80]})") from None
    unknown = sorted(set(record) - _MEMBERS)
    if unknown:
        raise ConfigError(f"{what}: unknown member {quoted(unknown[0])}; allowed: {', '.join(sorted(_MEMBERS))}")
    base: Recipe | None = None
    if "extends" in record:
        if record["extends"] not in SHIPPED:
            raise ConfigError(f"{what}: extends must be one of {', '.join(SHIPPED)}")
        base = load_recipe(record["extends"])
    weights_id = record.get("weights_id", base.weights_id if base else None)
    schema = record.get("schema", base.schema if base else None)
    scale = record.get("scale", base.scale if base else "absmax")
    if not isinstance(weights_id, str) or not weights_id:
        raise ConfigError(f"{what}: weights_id must be a nonempty string")
    if not isinstance(schema, str) or schema not in SCHEMAS:
        raise ConfigError(f"{what}: schema must be one of {', '.join(SCHEMAS)}, not {quoted(schema)}")
    if scale not in SCALE_METHODS:
        raise ConfigError(f"{what}: scale must be one of {', '.join(SCALE_METHODS)}, not {quoted(scale)}")
    equal = record.get("equal_to_base", list(base.equal_to_base) if base else [])
    if not isinstance(equal, list) or not all(isinstance(pattern, str) for pattern in equal):
        raise ConfigError(f"{what}: equal_to_base must be an array of object names or patterns")
    formats, sources = _table(record, "formats", what), _table(record, "sources", what)
    if base:
        formats, sources = base.formats + formats, base.sources + sources
    return Recipe(name, weights_id, schema, scale, formats, sources, equal_to_base=tuple(equal))


def load_recipe(name: str) -> Recipe:
    """A shipped recipe by name, or a recipe file when `name` ends in .toml. Errors: ConfigError."""
    if name.endswith(".toml"):
        path = Path(name)
        try:
            if path.stat().st_size > MAX_RECIPE_BYTES:
                raise ConfigError(f"recipe {quoted(name)}: more than {MAX_RECIPE_BYTES} bytes")
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"recipe {quoted(name)}: {getattr(error, 'strerror', None) or error}") from None
        return parse_recipe(text, path.stem)
    if name not in SHIPPED:
        raise ConfigError(f"unknown recipe {quoted(name)}; shipped: {', '.join(SHIPPED)}; or a file ending in .toml")
    text = (files("artifacts.convert") / "recipes" / f"{name}.toml").read_text("utf-8")
    return parse_recipe(text, name)
