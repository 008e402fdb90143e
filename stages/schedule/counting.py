"""What the scheduler counts besides its totals: how long sequences wait, prefill and decode, how big steps are. Pure.

    queued ──► started (a step is planned) ──► first id settled ──► ended
       queue_s             prefill_s                decode_s
                           └─────────── inference_s ─────────┘

Sequences that end by stop or length are counted, when they end. Prefill includes what a preemption costs before the
first id, decode what one costs after it.

A step's plan wait is how long the executor had nothing to do before it although there was something to plan: of steps
planned in the wake that handled the result before them, or earlier. What an idle server waits for is requests.
"""

from pipeline.histogram import PLAN_WAIT_S, REQUEST_S, STEP_TOKENS, Histogram
from pipeline.messages import Finish
from pipeline.stages.schedule.request import Sequence


class Counting:
    def __init__(self) -> None:
        self.queue_s = Histogram(REQUEST_S)
        self.prefill_s = Histogram(REQUEST_S)
        self.decode_s = Histogram(REQUEST_S)
        self.inference_s = Histogram(REQUEST_S)
        self.step_tokens = Histogram(STEP_TOKENS)
        self.plan_wait_s = Histogram(PLAN_WAIT_S)
        self.plan_s = 0.0
        self.settle_s = 0.0

    def ended(self, sequence: Sequence, finish: Finish, now_s: float) -> None:
        if finish in (Finish.STOP, Finish.LENGTH) and sequence.first_s:
            self.queue_s.observe(sequence.started_s - sequence.request.queued_s)
            self.prefill_s.observe(sequence.first_s - sequence.started_s)
            self.decode_s.observe(now_s - sequence.first_s)
            self.inference_s.observe(now_s - sequence.started_s)
