"""Where in a text its tokens begin.

What is known of a token are its bytes; a text is made of those of its tokens, but for

- special tokens that are not shown, as `<s>`: no text comes of them;
- characters that are split over tokens: they show once they are complete, and as U+FFFD where they break off;
- text that is held back, because it may be the beginning of a stop string, or that is left out because it was one.

A token's offset is the number of characters that begin before it; one that goes on with a character has the offset
of that character. Whether a token is shown is seen by the text that has come: one that looks like a special token, and
that the text does not go on with, is none of it. Where text is still to come it is believed to be, until the text says
otherwise.
"""

import codecs
import re
from collections import deque

_SPECIAL = re.compile(r"<.*>|\[.*\]", re.DOTALL)
_BROKEN_OFF = "\ufffd"


class TextOffsets:
    """Of one text, which grows, and whose tokens come one after the other."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_within = False
        """The last token ended within a character."""
        self._num_chars = 0
        """That the tokens have, as far as their text has come."""
        self._text = ""
        self._at = 0
        """Where in it that begins which has come behind them."""
        self._waiting: deque[str] = deque()
        """Of tokens whose text has not come, as it is believed to be."""
        self._num_waiting = 0
        """Characters of these."""

    def feed(self, text: str) -> None:
        """Text has come."""
        self._text = self._text[self._at :] + text
        self._at = 0
        while self._waiting and self._settle(self._waiting[0]):
            self._num_waiting -= len(self._waiting.popleft())

    def place(self, piece: bytes) -> int:
        """The offset of the next token, whose bytes these are."""
        text = self._decoder.decode(piece)
        offset = self._num_chars + self._num_waiting
        if self._is_within and text.startswith(_BROKEN_OFF) and not 0x80 <= piece[0] < 0xC0:
            offset += 1
        self._is_within = bool(self._decoder.getstate()[0])
        if self._waiting or not self._settle(text):
            self._waiting.append(text)
            self._num_waiting += len(text)
        return offset

    def _settle(self, text: str) -> bool:
        """Take a token's text from what has come, or find that it is none of it. False where that is not known yet."""
        if self._text.startswith(text, self._at):
            self._at += len(text)
            self._num_chars += len(text)
            return True
        if text.startswith(self._text[self._at : self._at + len(text)]) and len(self._text) - self._at < len(text):
            return False
        if self._num_chars == 0 and self._text.startswith(text.removeprefix(" "), self._at):
            return self._settle(text.removeprefix(" "))  # which such vocabularies leave out where a text begins
        if not _SPECIAL.fullmatch(text):  # as the client wrote it, which the tokenizer made something else of
            num = min(len(text), len(self._text) - self._at)
            self._at += num
            self._num_chars += num
        return True
