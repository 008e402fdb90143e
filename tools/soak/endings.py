"""Checks that each sequence of a reply ends exactly once, and has no output afterwards."""


class ReplyState:
    """The state of one reply with `n` sequences. Faults are sentences; an empty list is good."""

    def __init__(self, n: int) -> None:
        self._n = n
        self.reasons: dict[int, str] = {}
        self.complaints: list[str] = []

    def feed(self, index: int, said: bool, reason: str | None) -> None:
        """Add an event of a sequence: whether it has text or ids, and its finish reason, if any."""
        if not 0 <= index < self._n:
            self.complaints.append(f"sequence {index} of an answer with {self._n}")
        elif index in self.reasons and (said or reason is not None):
            what = f"ended again with {reason}" if reason is not None else "went on"
            self.complaints.append(f"a sequence that had ended with {self.reasons[index]} {what}")
        if reason is not None:
            self.reasons.setdefault(index, reason)

    def end(self) -> list[str]:
        """The reply has ended. Returns all faults."""
        if num_missing := self._n - len(self.reasons):
            self.complaints.append(f"{num_missing} of {self._n} sequences never ended")
        return self.complaints
