"""Conversion of Hugging Face checkpoints to `.ninfer` artifacts."""

from __future__ import annotations

from artifacts.convert.convert import Options, convert
from artifacts.convert.recipe import SHIPPED, Recipe, load_recipe, parse_recipe

__all__ = ["SHIPPED", "Options", "Recipe", "convert", "load_recipe", "parse_recipe"]
