"""Search for marks in streamed text."""

import re
from functools import lru_cache


class Marks:
    """Finds the first of a set of marks, and a prefix of a mark at the end of a text. Stateless."""

    def __init__(self, marks: frozenset[str]) -> None:
        longest_first = sorted(marks, key=lambda mark: (-len(mark), mark))
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if marks else None
        self._firsts = frozenset(mark[0] for mark in marks)
        self._longest = max(map(len, marks), default=0)
        self._beginnings = frozenset(mark[:end] for mark in marks for end in range(1, len(mark)))

    @staticmethod
    @lru_cache(maxsize=64)
    def of(marks: frozenset[str]) -> "Marks":
        """Cached, because a vocabulary may have hundreds of special tokens, the same for each reply."""
        return Marks(marks)

    def find(self, text: str, at: int = 0) -> "re.Match[str] | None":
        """The first mark in `text[at:]`; the longest if several start at the same offset. More text might still extend
        it to a longer mark, so no mark of a set should be a prefix of another."""
        return None if self._pattern is None else self._pattern.search(text, at)

    def held(self, text: str, at: int = 0) -> int:
        """The offset of the longest suffix of `text[at:]` that is a prefix of a mark; `len(text)` if there is none."""
        for place in range(max(at, len(text) - self._longest + 1), len(text)):
            if text[place] in self._firsts and text[place:] in self._beginnings:
                return place
        return len(text)
