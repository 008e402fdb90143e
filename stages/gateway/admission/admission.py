"""Limits on what is open at once: sequences, prompt tokens, and bytes that requests keep (see open_bytes.py). Pure.

    admit ──► take (an estimate) ──► correct (`Accepted` has the number) ──► give, when the request is removed
                                     change_bytes, as its output grows ─┘

A request is always admitted if nothing else is open, so that a prompt longer than the limit of tokens can be served; no
request that exceeds the limit of bytes alone gets here. A prompt's tokens count once, for any number of sequences.
Estimates of tokens may be too low, so their sum may exceed the limit.

A quarter of the bytes is for requests without their output, and no request may need more than three quarters. So one
request can always end, whatever the others keep. Output may exceed the limit by what one turn brings: then requests are
preempted (preemption.py).
"""

from typing import TYPE_CHECKING

from pipeline.config.settings import Settings
from pipeline.runtime import topology
from pipeline.stages.gateway.admission.end_rates import Amounts, EndRates
from pipeline.stages.gateway.admission.media_admission import MediaAdmission
from pipeline.stages.gateway.errors import ApiError, overloaded

if TYPE_CHECKING:
    from pipeline.stages.gateway.apis.responses.event_log import EventLog
    from pipeline.stages.gateway.open_requests.prompt_request import PromptRequest
    from pipeline.stages.gateway.open_requests.request import Request

ID_BYTES = 4
NO_LIMIT = 2**62
BASE_PART = 4
"""The part of the bytes, a quarter, that open requests may have without their output."""


class Admission:
    """Counts what is open at one gateway. Times are by time.monotonic()."""

    def __init__(self, max_sequences: int, max_tokens: int, max_bytes: int = NO_LIMIT) -> None:
        self.max_sequences = max_sequences
        self.max_tokens = max_tokens
        self.max_bytes = max_bytes
        self.max_prompt_tokens: int | None = None
        """Longest prompt that the model takes; None until it is known."""
        self.num_sequences = 0
        self.num_tokens = 0
        self.num_bytes = 0
        self.num_base_bytes = 0
        """The part of `num_bytes` that is there without output."""
        self.num_preempted = 0
        """Requests that wait for room in the limit of bytes; see preemption.py."""
        self.media = MediaAdmission()
        """Of the requests with images among them."""
        self._rates = EndRates()

    @classmethod
    def of(cls, settings: Settings) -> "Admission":
        """With the limits of one of the server's gateways."""
        admission = cls(0, 0)
        admission.rescale(settings)
        return admission

    def rescale(self, settings: Settings) -> None:
        """The number of gateways has changed."""
        self.max_sequences = topology.max_open_of_one(settings)
        self.max_tokens = topology.max_open_tokens_of_one(settings)
        self.max_bytes = topology.max_open_bytes_of_one(settings)
        self.media.rescale(self.max_sequences, self.max_tokens, topology.max_open_media_bytes_of_one(settings))

    @property
    def max_base_bytes(self) -> int:
        """The most that open requests may keep without their output."""
        return self.max_bytes // BASE_PART

    @property
    def max_request_bytes(self) -> int:
        """The most that a request may keep with its output."""
        return self.max_bytes - self.max_bytes // BASE_PART

    def check_room(self, now_s: float, body_bytes: int = 0) -> None:
        """Call it before the body is read. Raises ApiError, 503, if no request at all would be admitted, or none with
        a body of this size."""
        if self.num_sequences >= self.max_sequences:
            raise overloaded(
                f"the limit of {self.max_sequences} open sequences is reached (gateway.max_open_sequences)",
                self._retry_after_s(1, 0, now_s),
            )
        if self.num_sequences and self.num_tokens >= self.max_tokens:
            raise overloaded(
                f"the limit of {self.max_tokens} open prompt tokens is reached (gateway.max_open_tokens)",
                self._retry_after_s(0, 1, now_s),
                by_size=True,
            )
        if self.num_sequences and body_bytes >= self._num_free_bytes:
            raise self._lacks_bytes(body_bytes, now_s, self._num_free_bytes)

    def admit(
        self, num_sequences: int, num_tokens: int, now_s: float, num_bytes: int = 0, num_output_bytes: int = 0
    ) -> None:
        """Raises ApiError, 503, if a request of this size can't be admitted now. `num_output_bytes` are those of
        output that comes all at once."""
        num_left = max(0, self.max_sequences - self.num_sequences)
        if num_sequences > num_left:
            raise overloaded(
                f"{num_left} of {self.max_sequences} sequences are free, and this request needs {num_sequences}: n, or "
                "best_of, for each prompt",
                self._retry_after_s(num_sequences - num_left, 0, now_s),
            )
        num_left = max(0, self.max_tokens - self.num_tokens)
        if self.num_sequences and num_tokens > num_left:
            raise overloaded(
                f"{num_left} of {self.max_tokens} prompt tokens are free, and this request has about {num_tokens} "
                "(gateway.max_open_tokens)",
                self._retry_after_s(0, min(num_tokens - num_left, self.num_tokens), now_s),
                by_size=True,
            )
        if self.num_sequences and num_bytes > self._num_free_bytes:
            raise self._lacks_bytes(num_bytes, now_s, self._num_free_bytes)
        if self.num_sequences and num_bytes + num_output_bytes > (num_left := self.max_bytes - self.num_bytes):
            raise self._lacks_bytes(num_bytes + num_output_bytes, now_s, num_left)

    def _lacks_bytes(self, num_bytes: int, now_s: float, num_free: int) -> ApiError:
        num_left = max(0, num_free)
        return overloaded(
            f"{num_left} of {self.max_bytes} bytes are free for new requests, and this one keeps {num_bytes} at least "
            "(gateway.max_open_bytes)",
            self._retry_after_s(0, 0, now_s, min(num_bytes - num_left, self.num_bytes)),
            by_size=True,
        )

    @property
    def _num_free_bytes(self) -> int:
        """For new requests."""
        return min(self.max_bytes - self.num_bytes, self.max_base_bytes - self.num_base_bytes)

    def take(
        self, num_sequences: int, num_tokens: int, now_s: float, num_bytes: int = 0, num_output_bytes: int = 0
    ) -> None:
        """A prompt request was opened."""
        if not self.num_sequences:
            self._rates.begin(now_s)
        self.num_sequences += num_sequences
        self.num_tokens += num_tokens
        self.change_bytes(num_bytes + num_output_bytes, num_bytes)

    def change_bytes(self, num_more: int, num_base_more: int = 0) -> None:
        """An open request keeps more bytes, or fewer, `num_base_more` of them without its output."""
        self.num_bytes += num_more
        self.num_base_bytes += num_base_more

    def keep(self, request: "Request", num_bytes: int, num_base_bytes: int | None = None) -> None:
        """Count what a request keeps until its response is over, besides its prompt requests, as `num_bytes`. If
        `num_base_bytes` is given, it is the part without output."""
        num_base_bytes = request.num_base_bytes if num_base_bytes is None else num_base_bytes
        self.change_bytes(num_bytes - request.num_bytes, num_base_bytes - request.num_base_bytes)
        request.num_bytes, request.num_base_bytes = num_bytes, num_base_bytes

    def count_output(self, prompt_request: "PromptRequest", num_more: int) -> None:
        """Count more or fewer bytes for the output of an open prompt request."""
        prompt_request.num_bytes += num_more
        self.change_bytes(num_more)

    def count_base(self, prompt_request: "PromptRequest", num_bytes: int) -> None:
        """Count this many bytes for an open prompt request without its output."""
        num_more = num_bytes - prompt_request.base_bytes
        prompt_request.base_bytes = num_bytes
        prompt_request.num_bytes += num_more
        self.change_bytes(num_more, num_more)

    def count_log(self, log: "EventLog") -> None:
        """Count the events of a background response, once for all clients that read them: a client that reads slowly
        keeps them although the request is over, and its response perhaps not stored any more."""
        num_bytes = log.num_bytes if log.readers else 0
        self.change_bytes(num_bytes - log.num_counted)
        log.num_counted = num_bytes

    def correct(self, estimate: int, num_tokens: int) -> None:
        """The number of tokens of an open prompt is known."""
        self.num_tokens += num_tokens - estimate

    def give(
        self, num_sequences: int, num_tokens: int, now_s: float, num_bytes: int = 0, num_base_bytes: int = 0
    ) -> None:
        """A prompt request is removed."""
        self.num_sequences -= num_sequences
        self.num_tokens -= num_tokens
        self.change_bytes(-num_bytes, -num_base_bytes)
        assert min(self.num_sequences, self.num_tokens, self.num_bytes, self.num_base_bytes) >= 0, (
            "more was returned than taken"
        )
        self._rates.end(now_s, Amounts(num_sequences, num_tokens, num_bytes))

    def most_output(self, max_tokens: int | None) -> int | None:
        """What a client asks for, no more than the model can generate."""
        if max_tokens is None or self.max_prompt_tokens is None:
            return max_tokens
        return min(max_tokens, self.max_prompt_tokens)

    def estimate(self, num_tokens: int, *, is_computed: bool) -> int:
        """Tokens to count for a prompt of about `num_tokens`. `is_computed`: the prompt must fit the model, so that
        bounds the estimate."""
        if is_computed and self.max_prompt_tokens is not None:
            num_tokens = min(num_tokens, self.max_prompt_tokens)
        return max(1, num_tokens)

    def _retry_after_s(self, num_sequences: int, num_tokens: int, now_s: float, num_bytes: int = 0) -> int:
        return self._rates.retry_after_s(now_s, Amounts(num_sequences, num_tokens, num_bytes))
