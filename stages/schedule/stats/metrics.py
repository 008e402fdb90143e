"""The scheduler's histograms: how long sequences wait, prefill and decode, and how large steps are. Pure.

    queued ──► started (a step is planned) ──► first id settled ──► finished
       queue_s             prefill_s                decode_s
                           └─────────── inference_s ─────────┘

Sequences that finish with `stop` or `length` are counted when they finish. Prefill time includes preemptions before the
first id, decode time those after it.

A step's plan wait is the time that the executor was idle before it although there was work to plan. It counts only for
steps planned in the wake that handled the previous result, or earlier: otherwise the server waited for requests. Plan
waits are divided by the step's batch size, because short steps leave a device idle for a larger share of the time.
"""

from pipeline.metrics.batch_size_buckets import BATCH_SIZE_BUCKETS, bucket_of
from pipeline.metrics.histogram import PLAN_WAIT_S, REQUEST_S, STEP_TOKENS, Histogram, summed
from pipeline.metrics.stats import GapCounts, HistogramCounts
from pipeline.runtime.messages import Finish
from pipeline.stages.schedule.request import Sequence


class StepGaps:
    """Plan waits and step times of one class of batch sizes."""

    __slots__ = ("gap_s", "step_s")

    def __init__(self) -> None:
        self.gap_s = Histogram(PLAN_WAIT_S)
        self.step_s = 0.0


class ScheduleMetrics:
    """Owns the histograms and the time spent in `plan` and `settle`."""

    def __init__(self) -> None:
        self.queue_s = Histogram(REQUEST_S)
        self.prefill_s = Histogram(REQUEST_S)
        self.decode_s = Histogram(REQUEST_S)
        self.inference_s = Histogram(REQUEST_S)
        self.step_tokens = Histogram(STEP_TOKENS)
        self._gaps: list[StepGaps | None] = [None] * len(BATCH_SIZE_BUCKETS)
        self.plan_s = 0.0
        self.settle_s = 0.0

    def observe_step(self, num_rows: int, num_tokens: int, wait_s: float, step_s: float) -> None:
        """Count a step that was planned as soon as there was work."""
        bucket = bucket_of(num_rows, num_tokens)
        gaps = self._gaps[bucket]
        if gaps is None:
            gaps = self._gaps[bucket] = StepGaps()
        gaps.gap_s.observe(wait_s)
        gaps.step_s += step_s

    def gaps(self) -> list[GapCounts]:
        """One entry for each class of batch sizes with any steps."""
        buckets = enumerate(self._gaps)
        return [GapCounts(bucket, of.gap_s.counts(), of.step_s) for bucket, of in buckets if of is not None]

    def plan_wait_s(self) -> HistogramCounts:
        """Over all classes."""
        return summed((of.gap_s for of in self.gaps()), PLAN_WAIT_S)

    def observe_finished(self, sequence: Sequence, finish: Finish, now_s: float) -> None:
        """Count a sequence that finishes."""
        if finish in (Finish.STOP, Finish.LENGTH) and sequence.first_s:
            self.queue_s.observe(sequence.started_s - sequence.request.queued_s)
            self.prefill_s.observe(sequence.first_s - sequence.started_s)
            self.decode_s.observe(now_s - sequence.first_s)
            self.inference_s.observe(now_s - sequence.started_s)
