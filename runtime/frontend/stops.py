"""Stop strings on a stream of text.

The decision falls at the first character that completes any stop string; of several completed by the same character
the longest counts. It therefore never depends on how the text was cut into tokens, and never needs text beyond the
stop. Text that may still turn out to be the beginning of a stop string is held back.
"""

from collections.abc import Sequence
from typing import NamedTuple

from runtime.frontend.errors import OptionError

MAX_STOPS = 16
MAX_STOP_CHARS = 1024


class Match(NamedTuple):
    """What a piece of text led to: text that is safe to show, the stop string if one matched, and what follows it."""

    text: str
    stop: str | None
    rest: str


def check_stops(stops: Sequence[str], option: str) -> tuple[str, ...]:
    """Checked stop strings without duplicates. Raises OptionError naming `option`."""
    unique = tuple(dict.fromkeys(stops))
    if len(unique) > MAX_STOPS:
        raise OptionError(f"{option}: {len(unique)} stop strings; at most {MAX_STOPS} are allowed")
    for stop in unique:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_CHARS:
            raise OptionError(f"{option}: a stop string must have 1 to {MAX_STOP_CHARS} characters")
    return unique


def _failure(pattern: str) -> list[int]:
    """Knuth-Morris-Pratt: for each prefix the length of its longest proper border."""
    table = [0] * len(pattern)
    length = 0
    for index in range(1, len(pattern)):
        while length and pattern[index] != pattern[length]:
            length = table[length - 1]
        if pattern[index] == pattern[length]:
            length += 1
        table[index] = length
    return table


class StopMatcher:
    """Looks for the first of several strings; `held` is the text not yet shown."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._patterns = [(stop, _failure(stop)) for stop in stops]
        self._matched = [0] * len(self._patterns)
        self.held = ""

    def feed(self, text: str) -> Match:
        """Takes more text. After a match the matcher is back at its start."""
        if not self._patterns:
            return Match(text, None, "")
        buffer = self.held + text
        offset = len(self.held)
        for index, char in enumerate(text):
            found: str | None = None
            for number, (pattern, failure) in enumerate(self._patterns):
                length = self._matched[number]
                while length and pattern[length] != char:
                    length = failure[length - 1]
                length += pattern[length] == char
                if length == len(pattern):
                    found = max(found or "", pattern, key=len)
                self._matched[number] = length
            if found is not None:
                end = offset + index + 1
                self._reset()
                return Match(buffer[: end - len(found)], found, buffer[end:])
        keep = len(buffer) - max(self._matched)
        self.held = buffer[keep:]
        return Match(buffer[:keep], None, "")

    def flush(self) -> str:
        """The text held back; no stop string can match any more."""
        held = self.held
        self._reset()
        return held

    def _reset(self) -> None:
        self.held = ""
        self._matched = [0] * len(self._patterns)
