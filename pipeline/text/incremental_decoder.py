"""Incremental detokenization: the text of a sequence, id by id.

The text depends on (prompt tail, ids, options) alone, not on how ids were grouped into messages. Text is never revised:
bytes that may begin a character wait for the rest of it.

The joined text equals the decoded prompt tail and ids, less the decoded prompt tail. There is one exception. If a run
of byte tokens of a ByteFallback vocabulary is not valid UTF-8 as a whole, one-shot decoding shows every byte of the run
as U+FFFD, which can't be done while streaming. Here valid characters stay, and only invalid bytes become U+FFFD.
"""

from codecs import utf_8_decode
from collections.abc import Iterable

from pipeline.text.vocabulary import Vocabulary


class IncrementalDecoder:
    """Decodes one id at a time."""

    __slots__ = ("_at_start", "_errors", "_num_strip", "_partial", "_pieces", "_strip")

    def __init__(self, vocabulary: Vocabulary, prompt_tail: Iterable[int], *, skip_special_tokens: bool) -> None:
        self._pieces = vocabulary.pieces(skip_special_tokens=skip_special_tokens)
        self._errors = vocabulary.errors
        self._strip = vocabulary.strip
        self._num_strip = vocabulary.num_strip
        self._at_start = vocabulary.has_words
        """No text yet, and its first token has another piece."""
        self._partial = b""
        for token_id in prompt_tail:
            self.add(token_id)

    def add(self, token_id: int) -> str:
        """Return the text that this id completes."""
        if self._at_start:
            return self._begin(token_id)
        piece = self._pieces[token_id]
        if isinstance(piece, bytes):
            data = self._partial + piece
            text, num_used = utf_8_decode(data, self._errors, False)
            self._partial = data[num_used:]
        elif self._partial and piece:
            text = self._decode_partial() + piece
        else:
            text = piece
        return self._stripped(text) if self._num_strip else text

    def piece(self, token_id: int) -> str | bytes:
        """The text or bytes of an id."""
        return self._pieces[token_id]

    def finish(self) -> str:
        """Return the text that was held back. Call it after the last id."""
        return self._decode_partial()

    def _decode_partial(self) -> str:
        text, _ = utf_8_decode(self._partial, self._errors, True)
        self._partial = b""
        return text

    def _begin(self, token_id: int) -> str:
        piece = self._pieces.first(token_id)
        if piece is None:
            return ""
        self._at_start = False
        assert isinstance(piece, str), "words have no bytes"
        return piece

    def _stripped(self, text: str) -> str:
        while self._num_strip and text.startswith(self._strip):
            text = text[len(self._strip) :]
            self._num_strip -= 1
        if text:
            self._num_strip = 0
        return text
