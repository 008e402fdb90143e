"""The text of a sequence, as its ids come.

It is a function of (prompt tail, ids, options) and of nothing else: not of how ids were grouped into messages. What is
given out is never taken back: bytes that may begin a character wait for the rest of it.

Joined, it is what decoding the prompt tail and all ids at once gives, less what the prompt tail gives. There is one
exception: where a run of byte tokens of a ByteFallback vocabulary is not UTF-8 as a whole, decoding at once shows
every byte of the run as U+FFFD, also those of good characters, which can't be done while streaming. Here good
characters stay, and only the bytes that make none are U+FFFD.
"""

from codecs import utf_8_decode
from collections.abc import Iterable

from pipeline.text.vocabulary import Vocabulary


class IncrementalDecoder:
    """Grows by one id at a time."""

    __slots__ = ("_errors", "_num_strip", "_partial", "_pieces", "_strip")

    def __init__(self, vocabulary: Vocabulary, prompt_tail: Iterable[int], *, skip_special_tokens: bool) -> None:
        self._pieces = vocabulary.pieces(skip_special_tokens=skip_special_tokens)
        self._errors = vocabulary.errors
        self._strip = vocabulary.strip
        self._num_strip = vocabulary.num_strip
        self._partial = b""
        for token_id in prompt_tail:
            self.add(token_id)

    def add(self, token_id: int) -> str:
        """The text that this id completes."""
        piece = self._pieces[token_id]
        if isinstance(piece, bytes):
            data = self._partial + piece
            text, num_used = utf_8_decode(data, self._errors, False)
            self._partial = data[num_used:]
        elif self._partial and piece:
            text = self._broken_off() + piece
        else:
            text = piece
        return self._stripped(text) if self._num_strip else text

    def finish(self) -> str:
        """What was held back; no id follows."""
        return self._broken_off()

    def _broken_off(self) -> str:
        text, _ = utf_8_decode(self._partial, self._errors, True)
        self._partial = b""
        return text

    def _stripped(self, text: str) -> str:
        while self._num_strip and text.startswith(self._strip):
            text = text[len(self._strip) :]
            self._num_strip -= 1
        if text:
            self._num_strip = 0
        return text
