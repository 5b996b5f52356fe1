"""Model identities as rules: dimensions, object lists, logical parameters and the registry of published files."""

from artifacts.identities.dims import DraftDims, TextDims, VisionDims
from artifacts.identities.plan import SCHEMAS, plan_objects

__all__ = ["SCHEMAS", "DraftDims", "TextDims", "VisionDims", "plan_objects"]
