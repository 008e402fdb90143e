"""Ingest's counters. Pure."""

from collections.abc import Callable

from pipeline.metrics.media_stats import ImageCounts
from pipeline.metrics.stats import IngestCounts


class IngestMetrics:
    """Counts accepted and rejected prompts."""

    def __init__(self, images: Callable[[], ImageCounts | None]) -> None:
        """`images` returns the counts about images."""
        self._images = images
        self.num_rejected = 0
        self._num_accepted = 0
        self._num_tokens = 0
        self._encode_s = 0.0

    def accepted(self, num_tokens: int, duration_s: float) -> None:
        self._num_accepted += 1
        self._num_tokens += num_tokens
        self._encode_s += duration_s

    def counts(self, num_waiting: int, num_encoding: int) -> IngestCounts:
        return IngestCounts(
            num_waiting=num_waiting,
            num_encoding=num_encoding,
            num_accepted=self._num_accepted,
            num_rejected=self.num_rejected,
            num_tokens=self._num_tokens,
            encode_s=self._encode_s,
            images=self._images(),
        )
