"""The executor's counters. Pure."""

from collections.abc import Callable, Sequence

from pipeline.metrics.stats import ExecuteCounts
from pipeline.runtime.messages import NAN_LOGITS, ExecuteLoad


class ExecuteMetrics:
    def __init__(
        self,
        barrier_wait_s: Callable[[], float] = lambda: 0.0,
        pipeline_wait_s: Callable[[], float] = lambda: 0.0,
        rank_name: str = "",
    ) -> None:
        """How long this rank has waited for others of its stage of the pipeline, and for other stages; its place."""
        self._rank_name = rank_name
        self._barrier_wait_s, self._pipeline_wait_s = barrier_wait_s, pipeline_wait_s
        self._num_steps = 0
        self._num_tokens = 0
        self._step_s = 0.0
        self._wait_s = 0.0
        self._num_nan = 0
        self._last_nan_s = 0.0

    def stepped(self, num_tokens: int, step_s: float, wait_s: float) -> None:
        self._num_steps += 1
        self._num_tokens += num_tokens
        self._step_s += step_s
        self._wait_s += wait_s

    def failed(self, errors: Sequence[str], now_s: float) -> None:
        """Count the sequences that a step ended with these errors, at this Unix time."""
        if num := errors.count(NAN_LOGITS):
            self._num_nan += num
            self._last_nan_s = now_s

    def load(self, num_rows: int) -> ExecuteLoad:
        return ExecuteLoad(num_rows, self._num_nan, self._last_nan_s)

    def counts(self, num_rows: int) -> ExecuteCounts:
        return ExecuteCounts(
            *(num_rows, self._num_steps, self._num_tokens, self._step_s, self._wait_s),
            barrier_s=self._barrier_wait_s(),
            pipeline_wait_s=self._pipeline_wait_s(),
            rank_name=self._rank_name,
            num_nan=self._num_nan,
        )
