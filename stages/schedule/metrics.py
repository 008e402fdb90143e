"""What the scheduler counts besides its totals: how long sequences wait, prefill and decode, how big steps are. Pure.

    queued ──► started (a step is planned) ──► first id settled ──► ended
       queue_s             prefill_s                decode_s
                           └─────────── inference_s ─────────┘

Sequences that end by stop or length are counted, when they end. Prefill includes what a preemption costs before the
first id, decode what one costs after it.

A step's plan wait is how long the executor had nothing to do before it although there was something to plan: of steps
planned in the wake that handled the result before them, or earlier. What an idle server waits for is requests. It is
counted by the size of the step's batch: how much of the time a device computes depends on how long its steps are.
"""

from pipeline.metrics.batch_size_buckets import BATCHES, batch_of
from pipeline.metrics.histogram import PLAN_WAIT_S, REQUEST_S, STEP_TOKENS, Histogram, summed
from pipeline.metrics.stats import GapCounts, HistogramCounts
from pipeline.runtime.messages import Finish
from pipeline.stages.schedule.request import Sequence


class StepGaps:
    """The waits before steps of one class of batches, and how long the steps took."""

    __slots__ = ("gap_s", "step_s")

    def __init__(self) -> None:
        self.gap_s = Histogram(PLAN_WAIT_S)
        self.step_s = 0.0


class ScheduleMetrics:
    def __init__(self) -> None:
        self.queue_s = Histogram(REQUEST_S)
        self.prefill_s = Histogram(REQUEST_S)
        self.decode_s = Histogram(REQUEST_S)
        self.inference_s = Histogram(REQUEST_S)
        self.step_tokens = Histogram(STEP_TOKENS)
        self._gaps: list[StepGaps | None] = [None] * len(BATCHES)
        self.plan_s = 0.0
        self.settle_s = 0.0

    def followed(self, num_rows: int, num_tokens: int, wait_s: float, step_s: float) -> None:
        """A step has come back that was planned as soon as there was something to plan."""
        place = batch_of(num_rows, num_tokens)
        gaps = self._gaps[place]
        if gaps is None:
            gaps = self._gaps[place] = StepGaps()
        gaps.gap_s.observe(wait_s)
        gaps.step_s += step_s

    def gaps(self) -> list[GapCounts]:
        """By class, of those there have been any of."""
        places = enumerate(self._gaps)
        return [GapCounts(place, of.gap_s.counts(), of.step_s) for place, of in places if of is not None]

    def plan_wait_s(self) -> HistogramCounts:
        """Of all of them together."""
        return summed((of.gap_s for of in self.gaps()), PLAN_WAIT_S)

    def ended(self, sequence: Sequence, finish: Finish, now_s: float) -> None:
        if finish in (Finish.STOP, Finish.LENGTH) and sequence.first_s:
            self.queue_s.observe(sequence.started_s - sequence.request.queued_s)
            self.prefill_s.observe(sequence.first_s - sequence.started_s)
            self.decode_s.observe(now_s - sequence.first_s)
            self.inference_s.observe(now_s - sequence.started_s)
