"""Each sequence of an answer ends exactly once, and says nothing afterwards."""


class Endings:
    """Of one answer with `n` sequences. Complaints are sentences; none is good."""

    def __init__(self, n: int) -> None:
        self._n = n
        self.reasons: dict[int, str] = {}
        self.complaints: list[str] = []

    def feed(self, index: int, said: bool, reason: str | None) -> None:
        """Something of a sequence: whether it has text or ids, and why it ended, if it did."""
        if not 0 <= index < self._n:
            self.complaints.append(f"sequence {index} of an answer with {self._n}")
        elif index in self.reasons and (said or reason is not None):
            what = f"ended again by {reason}" if reason is not None else "went on"
            self.complaints.append(f"a sequence that had ended by {self.reasons[index]} {what}")
        if reason is not None:
            self.reasons.setdefault(index, reason)

    def end(self) -> list[str]:
        """The answer is over. Returns all complaints."""
        if num_missing := self._n - len(self.reasons):
            self.complaints.append(f"{num_missing} of {self._n} sequences never ended")
        return self.complaints
