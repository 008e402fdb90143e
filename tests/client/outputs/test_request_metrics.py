"""A request's metrics from its timings."""

import time

import msgspec
import pytest

from pipeline.client.request_metrics import metrics_of
from pipeline.metrics.request_timings import HOPS


def choice(**ms: float) -> dict[str, object]:
    return {"output_tokens": 5, "hops": {hop: {"ms": ms.get(hop, 0.0), "share": 0.0} for hop in HOPS}}


def test_they_are_of_the_first_sequence_that_began_and_the_last_that_ended() -> None:
    first = choice(gateway=1, tokenize=2, admit=3, queue=4, prefill=5, decode=6, detokenize=7, deliver=8)
    later = choice(gateway=1, tokenize=2, admit=3, queue=40, prefill=5, decode=60, detokenize=7, deliver=8)
    now_s, now_unix_s = time.monotonic(), time.time()
    timings = {"received": now_unix_s, "total_ms": 0.0, "time_to_first_token_ms": 22.0, "choices": [later, first]}
    found = metrics_of(timings)
    assert found is not None
    times_s = [one - now_s for one in (found.queued_ts, found.scheduled_ts, found.first_token_ts, found.last_token_ts)]
    assert times_s == pytest.approx([0.006, 0.010, 0.015, 0.111], abs=0.01)
    assert found.first_token_ts - found.scheduled_ts == pytest.approx(0.005)
    assert (found.arrival_time, found.first_token_latency, found.num_generation_tokens) == (now_unix_s, 0.022, 10)


def test_without_a_sequence_there_are_none_and_other_shapes_are_refused() -> None:
    assert metrics_of({"received": 1.0, "time_to_first_token_ms": 0.0, "choices": []}) is None
    with pytest.raises(msgspec.ValidationError, match="received"):
        metrics_of({})
