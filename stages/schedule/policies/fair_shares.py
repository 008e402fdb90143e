"""The order of texts that are computed whole: each scope gets an equal share of the tokens, however many
texts it has and whenever they came.

Start-time fair queueing (Goyal et al., 1996, "Start-time Fair Queuing"). A text's tag is the virtual time at which its
scope has had the tokens of all its texts before, and the text with the smallest tag goes first. A scope without waiting
texts saves nothing up: its next one begins now. With one scope, texts go in the order in which they come.
"""

MAX_IDLE_SCOPES = 1024
"""Scopes without waiting texts that are remembered."""


class FairShares:
    """Owns the virtual time, in tokens."""

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str, float] = {}
        """By scope: the tag of its next text, as far as that comes soon."""

    def tag(self, scope_id: str, num_tokens: int, first_waiting: float | None) -> float:
        """The tag of a new text. `first_waiting` is the smallest tag of those that wait; None if none does."""
        self._now = max(self._now, max(self._ends.values(), default=0.0) if first_waiting is None else first_waiting)
        if len(self._ends) > MAX_IDLE_SCOPES:
            self._ends = {scope: end for scope, end in self._ends.items() if end > self._now}
        begin = max(self._now, self._ends.get(scope_id, 0.0))
        self._ends[scope_id] = begin + num_tokens
        return begin
