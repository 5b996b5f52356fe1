"""The Python VM: executes a program's schedule on the CPU over the same arena offsets, per rank, in NumPy."""
from runtime.vm.machine import Machine

__all__ = ["Machine"]
