"""The scheduler's stats of its sequences, with a clock that the test controls."""

from typing import Any

import numpy as np
import pytest

from pipeline.metrics.stats import HistogramCounts
from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.stages.schedule.scheduler_config import SchedulerConfig
from tests.stages.schedule.bench import Bench


class Clock(Bench):
    """A bench on which each step takes a second, from its plan to its result."""

    def __init__(self, **config: Any) -> None:
        defaults = {"num_blocks": 64, "max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
        super().__init__(SchedulerConfig(**defaults | config), 1)
        self.scheduler.now_s = 100.0
        self.firsts: list[m.FirstTimes] = []

    def second(self) -> None:
        self.fill()
        self.scheduler.now_s += 1
        if self.steps:
            self.answer()
        report = self.scheduler.output_buffer.pending()
        self.firsts += report.firsts if report is not None else []
        self.report()


def number(histogram: HistogramCounts) -> int:
    return sum(histogram.counts)


def test_a_sequence_alone_does_not_wait_and_decodes_one_id_per_second() -> None:
    clock = Clock()
    clock.admit(range(10), max_tokens=5)
    for _ in range(5):
        clock.second()
    counts = clock.scheduler.counts()
    assert (number(counts.queue_s), counts.queue_s.total) == (1, 0.0)
    assert (number(counts.prefill_s), counts.prefill_s.total) == (1, 1.0)
    assert (number(counts.decode_s), counts.decode_s.total) == (1, 4.0)
    assert (number(counts.inference_s), counts.inference_s.total) == (1, 5.0)
    assert (counts.num_prompt_tokens, counts.num_output_tokens, counts.num_steps) == (10, 5, 5)
    assert (number(counts.step_tokens), counts.step_tokens.total) == (5, 14.0), "10 of the prompt, then one a step"
    assert clock.firsts == [m.FirstTimes(0, 100.0, 100.0, 101.0, 0)]


def test_with_one_row_each_sequence_waits_for_earlier_ones() -> None:
    clock = Clock(max_num_seqs=1)
    for index in range(3):
        clock.admit([index] * 5, max_tokens=4)
    for _ in range(12):
        clock.second()
    counts = clock.scheduler.counts()
    assert number(counts.queue_s) == 3
    assert counts.queue_s.total == 0 + 4 + 8
    assert [first.started_s - first.queued_s for first in clock.firsts] == [0.0, 4.0, 8.0]


def test_a_prompt_in_chunks_prefills_until_its_first_id() -> None:
    clock = Clock(max_num_batched_tokens=16)
    clock.admit(range(40), max_tokens=1)
    for _ in range(3):
        clock.second()
    counts = clock.scheduler.counts()
    assert counts.prefill_s.total == 3.0
    assert counts.decode_s.total == 0.0
    assert counts.step_tokens.total == 40.0


def test_prefix_hits_are_reported_with_the_first_id() -> None:
    clock = Clock()
    clock.admit(range(40), max_tokens=1)
    clock.second()
    clock.admit(range(40), max_tokens=1)
    clock.second()
    assert [first.num_cached for first in clock.firsts] == [0, 32]
    counts = clock.scheduler.counts()
    assert (counts.num_prompt_tokens, counts.num_cached_tokens) == (80, 32)


@pytest.mark.parametrize("seconds", [0, 1, 3])
def test_an_aborted_sequence_is_in_no_histogram(seconds: int) -> None:
    clock = Clock()
    request_id = clock.admit(range(10), max_tokens=8)
    for _ in range(seconds):
        clock.second()
    clock.scheduler.abort(m.Abort(request_id, 1))
    clock.second()
    counts = clock.scheduler.counts()
    assert number(counts.queue_s) == number(counts.decode_s) == 0
    assert (counts.num_running, counts.num_waiting, counts.num_blocks_held) == (0, 0, 0)


def test_a_stop_string_counts_as_an_end() -> None:
    clock = Clock()
    request_id = clock.admit(range(10), max_tokens=8)
    for _ in range(3):
        clock.second()
    clock.scheduler.abort(m.Abort(request_id, 1, 0, Finish.STOP))
    assert number(clock.scheduler.counts().decode_s) == 1


def test_a_preempted_sequence_keeps_its_first_times_and_is_counted_once() -> None:
    clock = Clock(num_blocks=3, max_model_len=48)
    for _ in range(2):
        clock.admit(np.arange(14).tolist(), max_tokens=30, seed=len(clock.admitted))
    for _ in range(120):
        clock.second()
    counts = clock.scheduler.counts()
    assert counts.num_preemptions > 0
    assert len(clock.finished) == 2
    assert len(clock.firsts) == 2
    assert number(counts.queue_s) == number(counts.decode_s) == 2
    assert counts.num_prompt_tokens == 28, "recomputed ids do not count as prompt tokens again"
    assert counts.num_output_tokens == 60
