"""Log lines about what clients can bring about as fast as they like, and with one request for each of its prompts: at
most MAX_LINES of each kind in INTERVAL_S. The others are counted."""

import logging
import time
from collections import Counter
from collections.abc import Callable

MAX_LINES = 20
"""Of one kind in one interval, besides the line with the number of the others."""
INTERVAL_S = 1.0


class LimitedLog:
    """A kind is a line's message."""

    def __init__(
        self,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        rest: Callable[[str], str] = "left out lines: {}".format,
    ) -> None:
        """`rest` makes the message of the line with the number of those that were left out."""
        self._log = log
        self._clock = clock
        self._rest = rest
        self._end_s = 0.0
        self._nums: Counter[tuple[int, str]] = Counter()
        """Lines in the current interval, by level and kind."""

    def has_room(self, level: int, message: str) -> bool:
        """Count a line that the caller writes. Returns whether it may."""
        self.flush()
        self._nums[level, message] += 1
        return self._nums[level, message] <= MAX_LINES

    def info(self, message: str, **fields: object) -> None:
        """As `log`."""
        self.log(logging.INFO, message, **fields)

    def log(self, level: int, message: str, **fields: object) -> None:
        """Write a line, or count it."""
        if self.has_room(level, message):
            self.write(level, message, **fields)

    def write(self, level: int, message: str, **fields: object) -> None:
        """Write a line that was counted before."""
        self._log.log(level, message, extra={"fields": fields})

    def flush(self) -> None:
        """Log the numbers of the lines that were left out, if their interval is over. Call it once per heartbeat."""
        if (now_s := self._clock()) < self._end_s:
            return
        for (level, message), num in self._nums.items():
            if num > MAX_LINES:
                self._log.log(level, self._rest(message), extra={"fields": {"num": num - MAX_LINES}})
        self._nums.clear()
        self._end_s = now_s + INTERVAL_S
