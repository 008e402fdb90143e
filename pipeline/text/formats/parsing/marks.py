"""Search for marks in streamed text."""

import re
from collections.abc import Collection
from functools import lru_cache

MAX_NESTING = 32
"""Of groups in a pattern."""


class Marks:
    """Finds the first of a set of marks, and a prefix of a mark at the end of a text. Stateless."""

    def __init__(self, marks: frozenset[str]) -> None:
        self._pattern = pattern_of(marks)
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
        for index in range(max(at, len(text) - self._longest + 1), len(text)):
            if text[index] in self._firsts and text[index:] in self._beginnings:
                return index
        return len(text)


def pattern_of(marks: Collection[str]) -> "re.Pattern[str] | None":
    """A pattern that finds the longest of these marks; None without marks.

    It is a tree of their common beginnings. A plain alternation would try all marks at each `<` of a text, and a model
    has hundreds.
    """
    return re.compile(_tree(sorted(set(marks)))) if marks else None


def _shared(first: str, last: str) -> str:
    """How two texts begin alike."""
    num = next((at for at, (one, other) in enumerate(zip(first, last, strict=False)) if one != other), None)
    return first[:num] if num is not None else min(first, last, key=len)


def _tree(ends: list[str], nesting: int = 0) -> str:
    """A regular expression of the longest of some texts, which are sorted."""
    if nesting == MAX_NESTING:
        return f"(?:{'|'.join(map(re.escape, sorted(ends, key=len, reverse=True)))})"
    by_first: dict[str, list[str]] = {}
    for end in ends:
        by_first.setdefault(end[:1], []).append(end)
    is_end = by_first.pop("", None) is not None
    branches = []
    for some in by_first.values():
        shared = _shared(some[0], some[-1])  # they are sorted
        rest = _tree([one[len(shared) :] for one in some], nesting + 1) if len(some) > 1 else ""
        branches.append(re.escape(shared) + rest)
    if not branches:
        return ""
    whole = "|".join(branches)
    if is_end:
        return f"(?:{whole})?"
    return whole if len(branches) == 1 else f"(?:{whole})"
