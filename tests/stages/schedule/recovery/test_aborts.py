"""Aborts and closes: blocks are freed, sequences end once, and the number of tombstones is limited."""

import msgspec
import pytest

from pipeline.runtime import messages as m
from pipeline.runtime.messages import Finish
from pipeline.stages.schedule.request_table import MAX_TOMBSTONES
from tests.stages.schedule.bench import Bench, config


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_an_abort_frees_blocks_when_the_last_step_in_flight_is_settled(depth: int) -> None:
    bench = Bench(config(prefix_caching=False), depth)
    request = bench.admit(range(40), max_tokens=100)
    bench.fill()
    bench.answer()
    bench.fill()
    bench.scheduler.abort(m.Abort(request, 1))
    assert bench.scheduler.load().num_running == 0
    for _ in range(depth):
        assert bench.scheduler.load().num_blocks_held == 3, "a step in flight still uses them"
        bench.answer()
    bench.report()
    assert bench.scheduler.load().num_blocks_held == 0
    assert bench.finished[1] == Finish.ABORT


def test_aborting_a_waiting_request_takes_no_step() -> None:
    bench = Bench(config(max_num_seqs=1), depth=1)
    bench.admit(range(10), max_tokens=50)
    second = bench.admit(range(10), max_tokens=50)
    bench.fill()
    bench.scheduler.abort(m.Abort(second, 1))
    bench.report()
    assert bench.finished == {2: Finish.ABORT}
    bench.run()
    bench.check_outputs()


def test_an_abort_is_idempotent() -> None:
    bench = Bench(config(), depth=1)
    request = bench.admit(range(10), max_tokens=50)
    for _ in range(3):
        bench.scheduler.abort(m.Abort(request, 1))
    bench.report()
    assert bench.finished == {1: Finish.ABORT}


def test_an_abort_that_overtakes_its_request_applies_on_arrival() -> None:
    bench = Bench(config(), depth=1)
    bench.scheduler.abort(m.Abort(77, 1))
    bench.admit(range(10), request_id=77)
    assert bench.refused[0].failure.code == "aborted"
    bench.admit(range(10), request_id=78)
    bench.run()
    assert bench.finished == {1: Finish.LENGTH}, "it applies to one request"


def test_a_stop_string_ends_one_sequence_of_n_and_leaves_the_others() -> None:
    bench = Bench(config(), depth=1)
    request = bench.admit(range(10), max_tokens=20, n=3)
    bench.fill()
    bench.answer()
    bench.scheduler.abort(m.Abort(request, 1, index=1, finish=Finish.STOP))
    bench.run()
    assert [bench.finished[seq] for seq in (1, 2, 3)] == [Finish.LENGTH, Finish.STOP, Finish.LENGTH]


def test_an_abort_of_an_older_attempt_does_not_affect_the_newer() -> None:
    bench = Bench(config(), depth=1)
    request = bench.admit(range(10), max_tokens=4)
    bench.scheduler.abort(m.Abort(request, 0))
    bench.run()
    assert bench.finished == {1: Finish.LENGTH}


def test_an_abort_that_overtakes_its_request_applies_to_its_attempt_and_earlier_ones() -> None:
    bench = Bench(config(), depth=1)
    for attempt in (1, 2, 1):
        bench.scheduler.abort(m.Abort(77, attempt))
    bench.admit(range(10), request_id=77)
    assert bench.refused[0].failure.code == "aborted"
    bench.scheduler.close(m.Closed(77, 1))
    bench.admit(range(10), request_id=77)
    assert len(bench.refused) == 2, "the abort of attempt 2 still waits"
    bench.scheduler.close(m.Closed(77, 2))
    bench.admit(range(10), max_tokens=4, request_id=77)
    assert len(bench.refused) == 2


def test_the_log_of_a_finished_request_stays_until_closed() -> None:
    bench = Bench(config(), depth=1)
    request = bench.admit(range(10))
    bench.run()
    assert request in bench.scheduler.requests
    bench.scheduler.close(m.Closed(request, 1))
    assert not bench.scheduler.requests


def test_closing_an_open_request_ends_its_sequences() -> None:
    bench = Bench(config(), depth=1)
    request = bench.admit(range(10), max_tokens=40, n=2)
    bench.fill()
    bench.answer()
    bench.scheduler.close(m.Closed(request, 1))
    bench.run()
    assert bench.finished == {1: Finish.ABORT, 2: Finish.ABORT}
    assert not bench.scheduler.requests


def test_closing_removes_the_tombstone() -> None:
    bench = Bench(config(), depth=1)
    bench.scheduler.abort(m.Abort(5, 1))
    bench.scheduler.close(m.Closed(5, 1))
    bench.admit(range(10), request_id=5)
    assert not bench.refused


def test_tombstones_are_bounded() -> None:
    bench = Bench(config(), depth=1)
    for request in range(MAX_TOMBSTONES + 1):
        bench.scheduler.abort(m.Abort(10 + request, 1))
    bench.admit(range(10), request_id=10)
    bench.admit(range(10), request_id=11)
    assert [rejection.request_id for rejection in bench.refused] == [11], "the oldest tombstone was dropped"


@pytest.mark.parametrize("use_beam_search", [False, True])
def test_bad_words_are_kept_for_the_executor_only(use_beam_search: bool) -> None:
    """As objects, thirty thousand ids are a megabyte."""
    bench = Bench(config(), 1)
    words = [[1, 2], [3]]
    request_id = bench.admit(range(9), bad_words_ids=words, n=2, use_beam_search=use_beam_search)
    request = bench.scheduler.requests[request_id]
    assert request.options.bad_words_ids == []
    for raw_options in (request.raw_options, request.row_options):
        assert msgspec.msgpack.decode(raw_options, type=m.GenerationOptions).bad_words_ids == words
