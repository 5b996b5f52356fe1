"""Incremental detokenisation: ids in, complete characters out.

A token may end inside a character. Its bytes are held back until the character is complete; bytes that can never
become one turn into U+FFFD (one per maximal broken sequence, as `bytes.decode` does), and so does a tail left at
the end. The concatenation of all outputs equals decoding all bytes at once, however the bytes were split.
"""

import codecs
from collections.abc import Iterable

from runtime.frontend.tokenizer import Tokenizer


class Detokenizer:
    """Text of one token stream. `skip_special` withholds special tokens (`<|im_end|>`), but not `<think>` and the like."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token: int) -> str:
        """Characters completed by one more token. Raises TokenizerError for an unknown id."""
        data = self._tokenizer.bytes_of((token,))
        return "" if token in self._skip else self._decoder.decode(data)

    def feed_all(self, tokens: Iterable[int]) -> str:
        """Characters completed by several tokens."""
        return "".join([self.feed(token) for token in tokens])

    def finish(self) -> str:
        """U+FFFD for an incomplete character at the end, else nothing; the stream may go on afterwards from new."""
        rest = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return rest
