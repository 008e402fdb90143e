"""Log lines about events that may be frequent: at most one line a second, with the number of events since the last."""

import logging
import time
from collections.abc import Callable

INTERVAL_S = 1.0


class EventLog:
    """Logs the growth of a counter. The first event is logged at once, those of the next second together."""

    def __init__(self, log: logging.Logger, text: str, clock: Callable[[], float] = time.monotonic) -> None:
        """`text` is the line's message; the line's field `num` is the number of events."""
        self._log = log
        self._text = text
        self._clock = clock
        self.num_logged = 0
        """The total when the last line was logged."""
        self._next_s = 0.0
        self._num = 0
        self._newest: dict[str, object] = {}

    def add(self, num: int, **fields: object) -> None:
        """As `update`, for events that nothing else counts. `flush` repeats it."""
        self._num += num
        self._newest = fields
        self.flush()

    def flush(self) -> None:
        """Log the last events of `add`, if it is time."""
        self.update(self._num, **self._newest)

    def update(self, total: int, **fields: object) -> None:
        """`total` is the number of events so far. Call it at each event, or often; the heartbeat wakes each stage once
        a second, so that the last events are logged too. `fields` describe the newest."""
        if total == self.num_logged or (now_s := self._clock()) < self._next_s:
            return
        self._log.warning(self._text, extra={"fields": {"num": total - self.num_logged, **fields}})
        self.num_logged, self._next_s = total, now_s + INTERVAL_S
