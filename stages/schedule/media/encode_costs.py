"""What encoding takes, and how much of it running streams put up with."""

from pipeline.runtime.messages import NUM_PARTS

KEPT = 0.9
"""How much of all earlier observations counts beside a new one."""
UNLIMITED = float("inf")
FIRST = NUM_PARTS // 32
"""Parts of the first item that a step computes, while no one knows how long they take."""
LEAST = NUM_PARTS // 1024
"""Fewer parts than these are not worth a step's message."""
MAX_CREDIT = 2
"""Steps whose time for encodes is kept, if they had none: as many may be planned before the first is settled."""


class EncodeCosts:
    """Learns the seconds of a row of the encoder cache, and of a step in which rows decode.

    Each of these steps earns the time by which it may be longer, its allowance. A step spends one at most. An executor
    can't stop everywhere, so it may take more than was planned; later steps then wait until that is earned, too. What
    steps have spent in which no op ended counts for the op that they have waited for."""

    def __init__(self, max_slowdown: float) -> None:
        self._max_slowdown = max_slowdown
        self._rows = self._seconds = self._decode_s = 0.0
        self._untimed_rows = 0.0
        """Rows of steps that took no time: no op ended within their parts, and a later step takes longer."""
        self._prepaid_s = 0.0
        """What such steps have spent."""
        self.credit_s = 0.0
        """What steps have earned and not spent; less than 0 if they have spent more."""
        self.encode_s = 0.0
        """What all encodes took."""

    @property
    def row_s(self) -> float:
        """Seconds of a row; 0 before the first one."""
        return self._seconds / self._rows if self._rows else 0.0

    @property
    def _allowance_s(self) -> float:
        return self._decode_s * (self._max_slowdown - 1)

    def parts(self, num_rows: int, num_left: int) -> int:
        """How many of the `num_left` parts that an item of `num_rows` rows lacks the next step may compute beside rows
        that decode; 0 if none."""
        if self._max_slowdown == UNLIMITED:
            return num_left
        if not self._seconds:
            return min(num_left, FIRST)
        if self.credit_s <= 0:
            return 0
        parts = min(self.credit_s, self._allowance_s) / (self.row_s * num_rows) * NUM_PARTS
        return min(num_left, max(LEAST, int(parts)))

    def spend(self, num_rows: float) -> float:
        """A step is planned that encodes as many rows beside others that decode. Returns its predicted seconds."""
        seconds = self.row_s * num_rows
        self.credit_s -= seconds
        return seconds

    def observe(
        self,
        num_rows: float,
        planned_s: float | None,
        encode_s: float,
        compute_s: float,
        *,
        decodes: bool,
        decodes_only: bool,
    ) -> None:
        """A step has encoded `num_rows` rows within `encode_s` of its `compute_s`, for which `planned_s` were spent;
        None: no rows decoded that had to wait for it. Rows decoded in this step, or nothing else was computed
        (`decodes_only`)."""
        self.encode_s += encode_s
        self._untimed_rows += num_rows
        if self._untimed_rows and encode_s:
            self._rows = self._rows * KEPT + self._untimed_rows
            self._seconds, self._untimed_rows = self._seconds * KEPT + encode_s, 0.0
        if planned_s is None or not decodes or self._max_slowdown == UNLIMITED:
            self.credit_s = self._prepaid_s = 0.0
            return
        if decodes_only:
            step_s = compute_s - encode_s
            self._decode_s = self._decode_s * KEPT + step_s * (1 - KEPT) if self._decode_s else step_s
        self._prepaid_s += planned_s
        if encode_s:
            self.credit_s += self._prepaid_s - encode_s
            self._prepaid_s = 0.0
        self.credit_s = min(self.credit_s + self._allowance_s, MAX_CREDIT * self._allowance_s)
