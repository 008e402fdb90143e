"""A suggestion for a misspelled name."""

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str]) -> str:
    """The known name that is most like a word, in any case, as the rest of a sentence; empty if none is like it."""
    spelled = {name.lower(): name for name in known if name}
    near = difflib.get_close_matches(word.lower(), list(spelled), n=1, cutoff=0.6)
    return f"; did you mean {spelled[near[0]]}?" if near else ""
