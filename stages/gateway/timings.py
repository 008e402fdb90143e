"""The times of a call: what `"timings": true` puts into its reply, and those of the last calls, for `pipeline trace`.

{"received": unix s, "total_ms", "time_to_first_token_ms",
 "choices": [{"index", "request_id", "prompt_tokens", "cached_tokens", "output_tokens", "time_to_first_token_ms",
              "hops": {"gateway": {"ms", "share"}, "tokenize": …, …}}]}
"""

from collections import deque
from typing import TYPE_CHECKING

import msgspec

from pipeline.metrics.request_timings import HOPS, RequestTimings, SequenceTimings, stamps

if TYPE_CHECKING:
    from pipeline.stages.gateway.requests import Call, Request, Sequence

NUM_KEPT = 512
"""Calls whose times are kept."""


class Hop(msgspec.Struct):
    ms: float
    share: float
    """Of the whole."""


class ChoiceTimings(msgspec.Struct):
    index: int
    request_id: str
    """As it stands in log lines."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    time_to_first_token_ms: float
    hops: dict[str, Hop]


class Timings(msgspec.Struct):
    received: float
    """Unix time, in seconds."""
    total_ms: float
    time_to_first_token_ms: float
    """Of the choice that was first."""
    choices: list[ChoiceTimings]


def times_of(call: "Call", now_s: float = 0.0) -> RequestTimings:
    """A call that has finished. `now_s`: when its response was out, if it is."""
    pairs = [(request, sequence) for request in call.requests for sequence in request.sequences]
    if call.ask.best_of is not None:
        # Those that are returned come first, and their index is their choice's.
        places = {id(sequence): place for place, sequence in enumerate(call.choices)}
        pairs.sort(key=lambda pair: places.get(id(pair[1]), len(places)))
    sequences = [_sequence_times(call, request, sequence, now_s) for request, sequence in pairs]
    for index, sequence in enumerate(sequences):
        sequences[index] = msgspec.structs.replace(sequence, index=index)
    return RequestTimings(call.id, call.requests[0].submit.arrival_s if call.requests else 0.0, sequences)


def _sequence_times(call: "Call", request: "Request", sequence: "Sequence", now_s: float) -> SequenceTimings:
    first = sequence.first
    return SequenceTimings(
        request_id=request.id,
        index=0,
        stamps_s=stamps(
            call.received_s,
            request.began_s,
            request.done_s,
            first.queued_s if first else 0.0,
            first.started_s if first else 0.0,
            first.first_s if first else 0.0,
            sequence.settled_s,
            sequence.sent_s,
            max(now_s, sequence.ended_s),
        ),
        first_text_s=sequence.first_s,
        num_prompt=0 if request.prompt_ids is None else len(request.prompt_ids),
        num_cached=first.num_cached if first else 0,
        num_output=sequence.num_generated,
    )


def timings_of(times: RequestTimings) -> Timings:
    """The same for people."""
    choices = []
    for sequence in times.sequences:
        total_s = sequence.stamps_s[-1] - sequence.stamps_s[0]
        hops = {
            name: Hop(_ms(took_s), round(took_s / total_s, 4) if total_s else 0.0)
            for name, took_s in zip(HOPS, sequence.hops_s, strict=True)
        }
        choices.append(
            ChoiceTimings(
                sequence.index,
                f"{sequence.request_id:x}",
                sequence.num_prompt,
                sequence.num_cached,
                sequence.num_output,
                _ms(sequence.first_text_s - sequence.stamps_s[0]) if sequence.first_text_s else 0.0,
                hops,
            )
        )
    total_ms = max((_ms(one.stamps_s[-1] - one.stamps_s[0]) for one in times.sequences), default=0.0)
    first_ms = min((one.time_to_first_token_ms for one in choices), default=0.0)
    return Timings(times.received_unix_s, total_ms, first_ms, choices)


def json_of(call: "Call") -> str:
    """Those of a call that has finished, as JSON."""
    return msgspec.json.encode(timings_of(times_of(call))).decode()


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


class RecentCalls:
    """The times of the last calls that ended well."""

    def __init__(self) -> None:
        self._kept: deque[RequestTimings] = deque(maxlen=NUM_KEPT)

    def keep(self, times: RequestTimings) -> None:
        self._kept.append(times)

    def find(self, call_id: str) -> RequestTimings | None:
        """By the id in its reply, or by that of one of its requests as log lines have it; the newest."""
        for times in reversed(self._kept):
            if call_id == times.call_id or any(call_id == f"{one.request_id:x}" for one in times.sequences):
                return times
        return None
