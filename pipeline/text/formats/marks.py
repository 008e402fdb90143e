"""Marks in text that comes in pieces."""

import re
from functools import lru_cache


class Marks:
    """Finds the first of some marks, and what at the end of a text may be the beginning of one. Has no state."""

    def __init__(self, marks: frozenset[str]) -> None:
        longest_first = sorted(marks, key=lambda mark: (-len(mark), mark))
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if marks else None
        self._firsts = frozenset(mark[0] for mark in marks)
        self._longest = max(map(len, marks), default=0)
        self._beginnings = frozenset(mark[:end] for mark in marks for end in range(1, len(mark)))

    @staticmethod
    @lru_cache(maxsize=64)
    def of(marks: frozenset[str]) -> "Marks":
        """A vocabulary may have hundreds of special tokens, which are the same in each reply."""
        return Marks(marks)

    def find(self, text: str, at: int = 0) -> "re.Match[str] | None":
        """The first mark in `text[at:]`; of two that begin there, the longer. It may be the beginning of a longer one
        still: no mark of one set should begin another."""
        return None if self._pattern is None else self._pattern.search(text, at)

    def held(self, text: str, at: int = 0) -> int:
        """Where what may become a mark begins: the longest end of `text[at:]` that a mark begins with, or the text's
        end."""
        for place in range(max(at, len(text) - self._longest + 1), len(text)):
            if text[place] in self._firsts and text[place:] in self._beginnings:
                return place
        return len(text)
