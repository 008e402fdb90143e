"""Timings of a request: for `"timings": true` in its reply, and of the last requests for `pipeline trace`.

{"received": unix s, "total_ms", "time_to_first_token_ms",
 "choices": [{"index", "request_id", "prompt_tokens", "cached_tokens", "output_tokens", "time_to_first_token_ms",
              "hops": {"gateway": {"ms", "share"}, "tokenize": …, …}}]}
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from pipeline.metrics.request_timings import HOPS, RequestTimings, SequenceTimings, stamps

if TYPE_CHECKING:
    from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest, SequenceOutput
    from pipeline.stages.gateway.open_requests.request import Request

NUM_KEPT = 512
"""Requests whose timings are kept."""
MAX_KEPT_SEQUENCES = 4096
"""Of these requests together, half a KiB each. A request of more is kept alone."""


class Hop(msgspec.Struct):
    ms: float
    share: float
    """Fraction of the total."""


class ChoiceTimings(msgspec.Struct):
    index: int
    request_id: str
    """As in log lines."""
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
    """The earliest of its choices."""
    choices: list[ChoiceTimings]


def times_of(request: "Request", now_s: float = 0.0) -> RequestTimings:
    """Timings of a finished request. `now_s`: when its response was complete, if it is."""
    pairs = [
        (prompt_request, sequence)
        for prompt_request in request.prompt_requests
        for sequence in prompt_request.sequences
    ]
    if request.parsed.is_best_of:
        # Returned sequences come first, so their index is that of their choice.
        order = {id(sequence): index for index, sequence in enumerate(request.choices)}
        pairs.sort(key=lambda pair: order.get(id(pair[1]), len(order)))
    sequences = [_sequence_times(request, *pair, index, now_s) for index, pair in enumerate(pairs)]
    return RequestTimings(
        request.id, request.prompt_requests[0].submit.arrival_s if request.prompt_requests else 0.0, sequences
    )


def _sequence_times(
    request: "Request", prompt_request: "PromptRequest", sequence: "SequenceOutput", index: int, now_s: float
) -> SequenceTimings:
    first = sequence.first
    return SequenceTimings(
        request_id=prompt_request.id,
        index=index,
        stamps_s=stamps(
            request.received_s,
            prompt_request.began_s,
            prompt_request.done_s,
            first.queued_s if first else 0.0,
            first.started_s if first else 0.0,
            first.first_s if first else 0.0,
            sequence.settled_s,
            sequence.sent_s,
            max(now_s, sequence.ended_s),
        ),
        first_text_s=sequence.first_s,
        num_prompt=0 if prompt_request.prompt_ids is None else len(prompt_request.prompt_ids),
        num_cached=first.num_cached if first else 0,
        num_output=sequence.num_generated,
    )


def timings_of(times: RequestTimings) -> Timings:
    """The same in milliseconds, for replies."""
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


def json_of(request: "Request") -> str:
    """Timings of a finished request, as JSON."""
    return msgspec.json.encode(timings_of(times_of(request))).decode()


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


class RecentRequests:
    """Timings of the last requests that succeeded."""

    def __init__(self) -> None:
        self._kept: deque[tuple[str, RequestTimings]] = deque()
        """With the scope of each; see `api_keys`."""
        self._num_sequences = 0
        self.on_kept: Callable[[Request, RequestTimings], None] | None = None
        """Sends a request's trace."""

    def keep(self, request: "Request", times: RequestTimings) -> None:
        if self.on_kept is not None:
            self.on_kept(request, times)
        self.add(times, request.parsed.scope)

    def add(self, times: RequestTimings, scope: str) -> None:
        self._kept.append((scope, times))
        self._num_sequences += len(times.sequences)
        while len(self._kept) > NUM_KEPT or (self._num_sequences > MAX_KEPT_SEQUENCES and len(self._kept) > 1):
            self._num_sequences -= len(self._kept.popleft()[1].sequences)

    def newest(self, scope: str) -> Iterator[RequestTimings]:
        """Those of a scope, the newest first."""
        return (times for own, times in reversed(self._kept) if own == scope)

    def find(self, response_id: str) -> RequestTimings | None:
        """Find the newest by the id of its response, or by the id of a prompt request as in log lines."""
        for _, times in reversed(self._kept):
            if response_id == times.response_id or any(response_id == f"{one.request_id:x}" for one in times.sequences):
                return times
        return None
