"""A suggestion for a misspelled name."""

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str]) -> str:
    """The known name that is most like a word, as the rest of a sentence; empty if none is like it."""
    near = difflib.get_close_matches(word, [name for name in known if name], n=1, cutoff=0.6)
    return f"; did you mean {near[0]}?" if near else ""
