"""A row's reasoning budget: what the mask worker knows of the reasoning, id by id.

    BEFORE ──start mark──► OPEN ──end mark──► OVER
       │                    │ budget used, and the last character is complete
       └─other text─► OVER  ▼
                         CLOSING ──the last closing id──► OVER

In CLOSING, the next closing id is the only one allowed. What a model of the `anywhere` kind writes behind its reasoning
may open it again, so for it OVER is BEFORE; the ids of all its reasoning count together.

Marks are found in the bytes of the ids. A special token is the byte 0xFF and its text there, in marks as well
(`pipeline/text/formats/reasoning_budget.py`), so text that only spells a special token is no mark.
"""

from enum import Enum

import numpy as np
from llguidance import LLTokenizer

from pipeline.runtime.messages import ReasoningBudget

SPACE = b" \t\r\n"
SPECIAL = b"\xff"
"""No text in UTF-8 has this byte."""
MAX_INCOMPLETE = 3
"""Ids after the budget that may complete a character: it has at most four bytes. Then the end comes anyway."""
NUM_AT_ONCE = 4096
"""Ids whose bytes are looked through together."""


class Pieces(dict[int, bytes]):
    """The bytes of ids, those of special tokens marked. For all rows: made once for each id."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> bytes:
        text = b""
        if token < self._tokenizer.vocab_size:
            text = self._tokenizer.decode_bytes([token])
            text = SPECIAL + text if self._tokenizer.is_special_token(token) else text
        self[token] = text
        return text


class _State(Enum):
    BEFORE = 0
    OPEN = 1
    CLOSING = 2
    OVER = 3


class BudgetState:
    """The reasoning budget of one row."""

    def __init__(self, budget: ReasoningBudget, pieces: Pieces) -> None:
        self._budget, self._pieces = budget, pieces
        self._closing: list[int] = np.frombuffer(budget.closing_ids, "<i4").tolist()
        self._most_bytes = max(map(len, (*budget.starts, *budget.ends)), default=0)
        self._state = _State.OPEN if budget.is_open else _State.BEFORE
        self._limit = budget.num_tokens
        self._num_used = 0
        self._num_closed = 0
        self._last: list[int] = []
        """The last ids of the open reasoning, as many as close it."""
        self._text = b""
        """The end of what was written in this state: as much as a mark may have."""
        self._close_if_used()

    def copy(self) -> "BudgetState":
        """The same, which goes on by itself: behind proposed ids."""
        other = object.__new__(BudgetState)
        other.__dict__.update(self.__dict__)
        other._last = list(self._last)
        return other

    @property
    def is_over(self) -> bool:
        """Whether nothing will be forced any more, whatever comes."""
        return self._state is _State.OVER

    @property
    def forced(self) -> list[int]:
        """The ids that come next, whatever the model prefers."""
        return self._closing[self._num_closed :] if self._state is _State.CLOSING else []

    def push_all(self, ids: list[int]) -> None:
        """Take the next ids of the output. There may be as many as the budget has."""
        at = 0
        while at < len(ids) and self._state is not _State.OVER:
            num = min(len(ids) - at, NUM_AT_ONCE)
            if self._state is _State.OPEN:
                num = min(num, self._limit - self._num_used - 1)  # none of them uses up the budget
            if num < 2 or not self._skip(ids[at : at + num]):
                num = max(1, num)
                for token in ids[at : at + num]:
                    self._push(token)
            at += num

    def _skip(self, ids: list[int]) -> bool:
        """Take ids that have no mark. Returns whether they have none."""
        is_open = self._state is _State.OPEN
        if not (is_open or (self._state is _State.BEFORE and self._budget.anywhere)):
            return False
        text = self._text + b"".join(map(self._pieces.__getitem__, ids))
        if any(mark in text for mark in (self._budget.ends if is_open else self._budget.starts)):
            return False
        if is_open:
            self._num_used += len(ids)
            self._last = [*self._last, *ids[-len(self._closing) :]][-len(self._closing) :]
        self._text = text[-self._most_bytes :]
        return True

    def _push(self, token: int) -> None:
        match self._state:
            case _State.BEFORE:
                self._before(token)
            case _State.OPEN:
                self._open(token)
            case _State.CLOSING:
                self._num_closed += 1
                if self._num_closed >= len(self._closing):
                    self._end()
            case _State.OVER:
                pass

    def end_now(self) -> None:
        """End the reasoning here, and any that comes. The last ids may be the first of what ends it: of a row that had
        begun with that before."""
        self._limit = min(self._limit, self._num_used)
        if self._state is _State.OPEN:
            first = range(min(len(self._last), len(self._closing) - 1), 0, -1)
            if num := next((num for num in first if self._last[-num:] == self._closing[:num]), 0):
                self._state, self._num_closed = _State.CLOSING, num
        self._close_if_used()

    def _before(self, token: int) -> None:
        starts = self._budget.starts
        if self._budget.anywhere:
            text = self._text + self._pieces[token]  # the mark may end within the id
            is_open = any(start in text for start in starts)
            self._text = text[-self._most_bytes :]
        else:
            self._text = word = (self._text + self._pieces[token]).lstrip(SPACE)
            is_open = word.startswith(tuple(starts))
            if word and not is_open and not any(start.startswith(word) for start in starts):
                self._state = _State.OVER
        if is_open:
            self._state, self._text = _State.OPEN, b""
            self._close_if_used()

    def _open(self, token: int) -> None:
        self._num_used += 1
        self._last = [*self._last, token][-len(self._closing) :]
        # A mark may begin within an id, and end within another.
        self._text = self._text[-self._most_bytes :] + self._pieces[token]
        if any(end in self._text for end in self._budget.ends):
            self._end()
            return
        self._close_if_used()

    def _close_if_used(self) -> None:
        over = self._num_used - self._limit
        if self._state is _State.OPEN and over >= 0 and (over >= MAX_INCOMPLETE or is_complete(self._text)):
            self._state, self._num_closed = _State.CLOSING, 0

    def _end(self) -> None:
        self._state, self._text = (_State.BEFORE if self._budget.anywhere else _State.OVER), b""


def is_complete(text: bytes) -> bool:
    """Whether bytes of UTF-8 don't end within a character."""
    for back, byte in enumerate(reversed(text[-4:]), 1):
        if byte & 0xC0 != 0x80:  # the first byte of a character
            return back >= (4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1)
    return True
