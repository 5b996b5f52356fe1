"""Tensor parallelism: what each rank holds of every weight, and when a width is legal."""

from compiler.shard.plan import Cut, ShardDims, ShardError, check_width, even_ranges, object_cut, parameter_cut

__all__ = ["Cut", "ShardDims", "ShardError", "check_width", "even_ranges", "object_cut", "parameter_cut"]
