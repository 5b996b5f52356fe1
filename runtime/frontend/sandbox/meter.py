"""Budgets of one rendering: evaluation steps, characters, nesting and wall time."""

import time
from dataclasses import dataclass

MAX_TEMPLATE_BYTES = 256 * 1024
"""Largest template source. The published templates have 8 to 17 KiB."""
MAX_TREE_DEPTH = 150
"""Deepest syntax tree. The published templates stay under 20."""
MAX_VALUE_DEPTH = 100
"""Deepest nesting of lists and mappings, in messages as well as built by the template."""
MAX_CALL_DEPTH = 32
"""Deepest nesting of macro calls."""
MAX_RANGE = 100_000
"""Longest `range(...)`, the limit of Jinja2's own sandbox."""
MAX_INTEGER_BITS = 64


class SandboxError(Exception):
    """A template did what it must not do. The renderer adds the line number."""


@dataclass(frozen=True)
class Limits:
    """What one rendering may use.

    steps: evaluated nodes plus touched list elements. output_chars: length of the result.
    chars_per_input, chars_floor: characters that all string operations together may produce or scan, relative to the
    size of messages and template (real templates copy each text five to ten times). seconds: wall time, the
    last resort on a slow machine.
    """

    steps: int = 2_000_000
    output_chars: int = 16 * 1024 * 1024
    chars_per_input: int = 64
    chars_floor: int = 16 * 1024 * 1024
    seconds: float = 10.0


class Meter:
    """Counts down the budgets of one rendering; raises SandboxError when one is used up."""

    def __init__(self, limits: Limits, input_chars: int) -> None:
        self.limits = limits
        self.steps_left = limits.steps
        self.chars_left = limits.chars_floor + limits.chars_per_input * input_chars
        self.deadline = time.monotonic() + limits.seconds
        self._next_clock = self.steps_left - 1024

    def step(self, count: int = 1) -> None:
        """Pays for `count` nodes or list elements."""
        self.steps_left -= count
        if self.steps_left < 0:
            raise SandboxError(f"takes more than {self.limits.steps} steps")
        if self.steps_left < self._next_clock:
            self._next_clock = self.steps_left - 1024
            self.clock()

    def clock(self) -> None:
        """Checks the wall time."""
        if time.monotonic() > self.deadline:
            raise SandboxError(f"takes longer than {self.limits.seconds:g} s")

    def chars(self, count: int) -> None:
        """Pays for a string of `count` characters; call it before the string is made."""
        self.chars_left -= count
        if self.chars_left < 0:
            raise SandboxError("builds or scans too much text")
        if count > 65536:
            self.clock()
