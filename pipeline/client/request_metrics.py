"""A request's metrics from the timings that the server sends at its end."""

import time
from itertools import accumulate

import msgspec

from pipeline.client.outputs import RequestStateStats
from pipeline.metrics.request_timings import HOPS

QUEUED, STARTED, FIRST, LAST = (HOPS.index(hop) for hop in ("queue", "prefill", "decode", "detokenize"))
"""The hops that begin at these times"""


class _Hop(msgspec.Struct):
    ms: float


class _Choice(msgspec.Struct):
    output_tokens: int
    hops: dict[str, _Hop]


class _Timings(msgspec.Struct):
    received: float
    time_to_first_token_ms: float
    choices: list[_Choice]


def metrics_of(timings: object) -> RequestStateStats | None:
    """The metrics of a finished request, from the object in `timings` of its last message. None if nothing was
    computed. Raises msgspec.ValidationError if the object has another shape."""
    found = msgspec.convert(timings, _Timings)
    begins_ms = [[0.0, *accumulate(one.hops[hop].ms for hop in HOPS)] for one in found.choices]
    if not begins_ms:
        return None
    received_s = found.received - time.time() + time.monotonic()

    def at(begin_ms: float) -> float:
        return received_s + begin_ms / 1000

    return RequestStateStats(
        found.received,
        at(min(one[QUEUED] for one in begins_ms)),
        at(min(one[STARTED] for one in begins_ms)),
        at(min(one[FIRST] for one in begins_ms)),
        at(max(one[LAST] for one in begins_ms)),
        found.time_to_first_token_ms / 1000,
        sum(one.output_tokens for one in found.choices),
    )
