"""Offsets of tokens in a text, computed from the tokens' bytes.

The text is the concatenation of the bytes of its tokens, except for

- special tokens that are skipped, such as `<s>`: they have no text. In output, they are known by their ids, and the
  caller passes no bytes. A prompt may have the text of one or not, as its client has written it;
- characters that are split over tokens: they appear when they are complete, or as U+FFFD if they stay incomplete;
- text that is held back because it may start a stop string, or removed because it was one.

A token's offset is the number of characters that start before it; a token that continues a character has the offset of
that character. A token of a prompt that looks special is skipped if the text does not continue with it. If that text
has not arrived yet, the token is assumed to have text.
"""

import codecs
import re
from collections import deque

_SPECIAL = re.compile(r"<.*>|\[.*\]", re.DOTALL)
_BROKEN_OFF = "\ufffd"


class TextOffsets:
    """The offsets of one growing text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_within = False
        """The last token ended within a character."""
        self._num_chars = 0
        """Characters of the tokens whose text has arrived."""
        self._text = ""
        self._at = 0
        """Position in `_text` after those tokens."""
        self._waiting: deque[str] = deque()
        """Expected text of the tokens whose text has not arrived."""
        self._num_waiting = 0
        """Characters in `_waiting`."""

    def feed(self, text: str) -> None:
        """Append text that has arrived."""
        self._text = self._text[self._at :] + text
        self._at = 0
        while self._waiting and self._settle(self._waiting[0]):
            self._num_waiting -= len(self._waiting.popleft())

    def offset_of(self, piece: bytes) -> int:
        """The offset of the next token, which has these bytes."""
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
        """Match a token's text with the text that has arrived. Returns False if that is not possible yet."""
        if self._text.startswith(text, self._at):
            self._at += len(text)
            self._num_chars += len(text)
            return True
        if text.startswith(self._text[self._at : self._at + len(text)]) and len(self._text) - self._at < len(text):
            return False
        if self._num_chars == 0 and self._text.startswith(text.removeprefix(" "), self._at):
            return self._settle(text.removeprefix(" "))  # some tokenizers drop a leading space
        if not _SPECIAL.fullmatch(text):  # the tokenizer has normalized the client's text
            num = min(len(text), len(self._text) - self._at)
            self._at += num
            self._num_chars += num
        return True
