"""What a client sent, as recordings hold it. Parsed again, it gives the same request.

A request depends on more than its body: on headers, on the key of its client, and on the stored responses that a body
of /v1/responses names. All of that is here. The server's own limits are not: a replay has them from the settings and
from the messages of the stages.
"""

from collections.abc import Callable

import msgspec

from pipeline.http_server.bodies.body_reader import Rest
from pipeline.runtime import messages as m
from pipeline.runtime.transport.inbox import MessageDecoder
from pipeline.stages.gateway.admission.open_bytes import measure
from pipeline.stages.gateway.apis.responses.parsing import Referred, parse_response
from pipeline.stages.gateway.apis.table import API_ROUTES
from pipeline.stages.gateway.http.route import Parse
from pipeline.stages.gateway.parsing import resumption
from pipeline.stages.gateway.parsing.chat.images import LinkedImage
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.zmq.parsing import ReceivedGenerate, parse_generate

Parser = Callable[[bytes, RequestLimits], ParsedRequest | Rest[ParsedRequest]]

RESPONSES = "create_response"
ZMQ = "zmq"
_generates: MessageDecoder[ReceivedGenerate] = MessageDecoder(ReceivedGenerate)


PARSERS: dict[str, Parse] = {one.handler: one.parse for one in API_ROUTES if one.parse is not None} | {
    ZMQ: lambda body, limits: parse_generate(_generates.decode(body), limits)
}
"""By the handler of the route. That of `RESPONSES` needs more than a body."""


class Received(msgspec.Struct, frozen=True, kw_only=True):
    """A client's request before parsing."""

    api: str
    """A key of `PARSERS`, or `RESPONSES`"""
    body: bytes
    """With the resume points in front."""
    received_s: float = 0.0
    """When it began to arrive, by time.monotonic(); 0 if unknown."""
    num_point_bytes: int = 0
    """Of the resume points at the start of `body`."""
    arrived_s: float = 0.0
    """`received_s` in Unix time, for resume points."""
    request_id: str | None = None
    """From the headers; it goes before one in the body."""
    wants_resume_points: bool = False
    """The client asks for resume points in the stream."""
    left_s: float | None = None
    """What it may take from `received_s` on, if an ingress has said so."""
    scope: str = ""
    """Of the client's API key."""
    models: tuple[str, ...] = ()
    """The names that the client's API key may use; empty for all."""
    adapter: m.Adapter | None = None
    """The one that it asked for when it was parsed. It may be gone, or another one, when the request is opened."""
    with_metrics: bool = False
    """The reply has vLLM's metrics."""
    traceparent: str = ""
    """The client's span, as in the W3C header of this name; see `otel.traces`."""
    seed: str = ""
    """Of /v1/responses: makes the ids of new items unique."""
    referred: Referred | None = None
    """Of /v1/responses: what it took from the stored responses."""
    fetched: tuple[bytes, ...] = ()
    """The images of URLs, in order, once they are fetched."""

    def complete(self, parsed: ParsedRequest, limits: RequestLimits) -> ParsedRequest:
        """Add to a parsed body what is not in it, and its size. Raises ApiError."""
        has_resume_points = self.wants_resume_points and resumption.is_resumable(parsed)
        parsed = self.with_fetched(parsed)
        parsed = msgspec.structs.replace(
            parsed,
            size=parsed.size or measure(parsed),
            received_s=self.received_s,
            request_id=self.request_id or parsed.request_id,
            has_resume_points=has_resume_points,
            scope=self.scope,
            with_metrics=self.with_metrics,
            traceparent=self.traceparent,
            left_s=self.left_s,
        )
        if not self.num_point_bytes:
            return parsed
        assert limits.max_prompt_tokens is not None, "the server was ready"
        points = self.body[: self.num_point_bytes]
        return resumption.with_resume_points(parsed, points, self.arrived_s, limits.max_prompt_tokens)

    def with_fetched(self, parsed: ParsedRequest) -> ParsedRequest:
        """Give the images of URLs their data, if it is here."""
        if not self.fetched:
            return parsed
        fetched = iter(self.fetched)
        images = [
            m.EncodedImage(next(fetched), one.param, one.detail) if isinstance(one, LinkedImage) else one
            for one in parsed.images
        ]
        return msgspec.structs.replace(parsed, images=images)


def adapter_of(parsed: ParsedRequest) -> m.Adapter | None:
    """The adapter that a request asks for."""
    return m.Adapter(parsed.model, parsed.options.adapter_id, "") if parsed.options.adapter_id else None


def parse_again(received: Received, limits: RequestLimits) -> ParsedRequest:
    """The request as it was parsed when it arrived. Raises ApiError."""
    limits, body = limits.for_key(received.models), received.body[received.num_point_bytes :]
    if (adapter := received.adapter) is not None:
        limits = msgspec.structs.replace(limits, adapters=limits.adapters | {adapter.name: adapter})
    if received.api == RESPONSES:
        assert received.referred is not None
        return received.complete(parse_response(body, limits, received.referred, received.seed).request, limits)
    return received.complete(PARSERS[received.api](body, limits), limits)
