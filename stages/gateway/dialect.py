"""What differs between the APIs over HTTP, in one object: how a request of each is answered.

`ParsedRequest.dialect` is set where the body is parsed. Nothing else asks which API a request belongs to: it asks its
dialect. A dialect whose replies repeat more of the request than `ParsedRequest` has keeps that.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pipeline.stages.gateway.errors import ApiError
    from pipeline.stages.gateway.open_requests.request import Request

EVENT_STREAM = "text/event-stream; charset=utf-8"
COMMENT = b": keep-alive\n\n"
"""Clients ignore comments (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""


class ReplyEvents(ABC):
    """The events of one streamed response: first(), due() as output arrives, and then last() or failed()."""

    has_more = False
    """`due` must be called again, after other tasks have run."""

    def __init__(self, request: "Request") -> None:
        self._request = request

    @property
    @abstractmethod
    def are_over(self) -> bool:
        """Whether only `last` remains."""

    def first(self) -> bytes:
        """The first events, before any output."""
        return self._request.log_output("first", self._first())

    def due(self) -> bytes:
        """Events for the output that has arrived since the last call."""
        begin_s = time.monotonic()
        data = b"".join(self._due())
        trace_write(self._request, begin_s, data)
        return self._request.log_output("due", data)

    def last(self) -> bytes:
        """The end of a successful stream."""
        return self._request.log_output("last", self.ended())

    @abstractmethod
    def ended(self) -> bytes:
        """As `last`, in any thread: the caller records it."""

    @abstractmethod
    def failed(self, error: "ApiError") -> bytes:
        """The end of a failed stream."""

    def _first(self) -> bytes:
        return b""

    @abstractmethod
    def _due(self) -> Iterator[bytes]: ...


class Dialect(ABC):
    """How requests of one API are answered."""

    id_prefix: str
    """Of the response's id."""
    takes_id: ClassVar[bool] = True
    """The rest of the id may be the client's."""
    makes_ids: ClassVar[bool] = False
    """Replies have ids that are made from the request's salt."""
    media_type: ClassVar[str] = EVENT_STREAM
    """Of a stream."""
    keep_alive: ClassVar[bytes] = COMMENT
    """What a stream says while there is no output."""
    is_resumable: ClassVar[bool] = False
    """A stream is a function of the ids of its sequences, so it can have resume points."""
    begins_with_usage: ClassVar[bool] = False
    """A stream begins with the number of prompt tokens."""
    has_text_logprobs: ClassVar[bool] = False
    """Log probabilities have the form of completions, with offsets in the text."""
    repeats_prompt_logprobs: ClassVar[bool] = False
    """Each choice of a complete reply has those of its prompt."""
    ends_with_output: ClassVar[bool] = False
    """The last event of a stream has the whole output."""
    keeps_events: bool = False
    """The events are kept for clients that come later."""
    prompt_field: ClassVar[str] = "messages"
    """What makes the prompt long, like `tools`, and what makes log probabilities large, for errors."""
    has_tools: ClassVar[bool] = True
    logprobs_field: ClassVar[str] = "top_logprobs"

    @abstractmethod
    def whole(self, request: "Request") -> bytes:
        """The response body of a finished request. Raises ApiError if there is none."""

    def result(self, request: "Request") -> bytes:
        """The pooler's numbers for a client over ZeroMQ, float32; empty if none were asked for. Raises ApiError."""
        return b""

    def events(self, request: "Request") -> ReplyEvents:
        """The events of a streamed response."""
        raise NotImplementedError(f"{type(self).__name__} has no streams")

    def headers(self, request: "Request") -> dict[str, str]:
        """Headers of a response, besides those of every response."""
        return {}

    def field(self, name: str) -> str:
        """The path of a field, as clients of this API write it."""
        return name

    def prompt_name(self, param: str, index: int, num: int) -> str:
        """The path of a prompt, of `num` in the field `param`."""
        return f"{param}[{index}]" if num > 1 else param

    def reply_bytes(self, *, stream: bool) -> int:
        """What the dialect keeps for the reply, and what the reply repeats of it."""
        return 0


def trace_write(request: "Request", begin_s: float, data: bytes) -> None:
    """Trace that a part of a response was written. The last part ends the traces of its prompt requests."""
    if request.trace.on:
        requests = [one.id for one in request.prompt_requests] if request.is_finished else []
        fields: dict[str, int | float | str] = {"response_id": request.id, "bytes": len(data)}
        request.trace.span("write", begin_s, time.monotonic(), fields, requests)
