"""Build op graphs of the text decoder, one per phase, on one logical device."""
from compiler.build.text import PhaseRequest, TextBuilder

__all__ = ["PhaseRequest", "TextBuilder"]
