"""A request that kills every executor is found, and only requests that the executor was computing are suspected."""

import numpy as np
import pytest

from pipeline.runtime.messages import Finish
from tests.fakes import inline
from tests.stages.schedule.bench import Bench, config


def is_next(bench: Bench, seq: int) -> bool:
    """Whether the executor's next step computes this sequence."""
    return any(bench.in_rows.get(row) == seq for row in np.frombuffer(inline(bench.steps[0].rows), np.int32).tolist())


@pytest.mark.parametrize("num_requests", [1, 2, 8, 30])
def test_a_request_that_kills_each_executor_fails_alone(num_requests: int) -> None:
    bench = Bench(config(max_num_seqs=32), 1)
    for number in range(num_requests):
        bench.admit(range(number, number + 10), max_tokens=8)
    poison = max(bench.opened)
    bench.fill()
    num_deaths = 0
    while bench.steps:
        if is_next(bench, poison):
            bench.lose_executor(0)
            num_deaths += 1
        else:
            bench.answer()
        bench.fill()
        bench.report()
    assert bench.finished.pop(poison) == Finish.ERROR
    assert 3 <= num_deaths <= 4
    bench.check_outputs()
    assert len(bench.finished) == num_requests - 1
    assert all(len(ids) == 8 for seq, ids in bench.received.items() if seq != poison)


@pytest.mark.parametrize("num_requests", [1, 8])
def test_what_says_nothing_about_requests_harms_none(num_requests: int) -> None:
    """The executor is restarted on purpose, or dies before it is ready."""
    bench = Bench(config(), 1)
    for number in range(num_requests):
        bench.admit(range(number, number + 10), max_tokens=8)
    for _ in range(6):
        bench.fill()
        bench.lose_executor(0, has_crashed=False)
    bench.run()
    bench.check_outputs()
    assert len(bench.finished) == num_requests and not bench.errors
