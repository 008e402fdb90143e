"""What encoding takes, and how much of it running streams put up with."""

KEPT = 0.9
"""How much of all earlier observations counts beside a new one."""
UNLIMITED = float("inf")


class EncodeCosts:
    """Learns the seconds of a row. While rows decode, the time of encodes is a debt, which steps without them pay back:
    on average, encodes slow running streams no more than parts of prompts may."""

    def __init__(self, max_slowdown: float) -> None:
        self._max_slowdown = max_slowdown
        self._rows = self._seconds = 0.0
        self.debt_s = self.encode_s = 0.0
        """What is not paid back; what all encodes took."""

    @property
    def row_s(self) -> float:
        """Seconds of a row; 0 before the first one."""
        return self._seconds / self._rows if self._rows else 0.0

    def observe(self, num_rows: int, encode_s: float, compute_s: float, num_decodes: int) -> None:
        """A step has encoded `num_rows` rows within `encode_s` of its `compute_s`, beside rows that decode."""
        self.encode_s += encode_s
        if num_rows:
            self._rows, self._seconds = self._rows * KEPT + num_rows, self._seconds * KEPT + encode_s
        if not num_decodes or self._max_slowdown == UNLIMITED:
            self.debt_s = 0.0
            return
        if num_rows:
            self.debt_s += encode_s
            return
        paid_s = compute_s * (max(self._max_slowdown, 1 + 1 / num_decodes) - 1)
        self.debt_s = max(0.0, self.debt_s - paid_s)

    def forgive(self) -> bool:
        """Nothing else can be computed. Returns whether there was a debt."""
        had, self.debt_s = self.debt_s > 0, 0.0
        return had
