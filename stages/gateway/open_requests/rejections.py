"""Counts requests that are refused before they are opened, and logs those that get 503, at most once a second."""

import logging

from pipeline.runtime.log.event_log import EventLog
from pipeline.stages.gateway.errors import ApiError, Overloaded, timeout_error
from pipeline.stages.gateway.metrics import GatewayMetrics


class Rejections:
    """Those of one gateway."""

    def __init__(self, metrics: GatewayMetrics, log: logging.Logger) -> None:
        self._metrics = metrics
        self._event_log = EventLog(log, "refused requests with 503")

    def overloaded(self, error: ApiError) -> None:
        """Count a request that an admission limit refused."""
        self._metrics.num_overloaded += 1
        self._metrics.num_overloaded_by_size += isinstance(error, Overloaded) and error.by_size
        self.log(error)

    def timed_out(self, timeout_s: float) -> ApiError:
        """Count a request that timed out before it was opened. Returns its error, 504."""
        self._metrics.num_timed_out += 1
        return timeout_error(timeout_s)

    def log(self, error: ApiError) -> None:
        """Log a request that got 503."""
        self._event_log.add(1, code=error.code, why=error.message)

    def flush(self) -> None:
        """Log those that have no line yet. Call it once per heartbeat."""
        self._event_log.flush()
