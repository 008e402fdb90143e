"""Reads the body of a request that opens one in the table, within the limits of the server and of the client's key."""

import functools
import math
import time

import msgspec
from aiohttp import web

from pipeline.config.settings import GatewaySettings as GatewaySettings
from pipeline.http_server import expect, request_ids, time_left
from pipeline.http_server.access.guard import current_scope
from pipeline.http_server.access.key_accounts import ACCOUNT, COUNTED, Account
from pipeline.http_server.bodies import body_reader
from pipeline.http_server.bodies.body_reader import KEPT_BODY, BodyReader, OutOfTime, Rest
from pipeline.http_server.bodies.image_data import base64_bytes
from pipeline.runtime.resume_points import RESUMABLE
from pipeline.stages.gateway.admission.open_bytes import measure
from pipeline.stages.gateway.admission.waiting_room import MESSAGE_PARTS, WaitingRoom
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.media.fetcher import MediaFetcher
from pipeline.stages.gateway.open_requests.table import RequestTable
from pipeline.stages.gateway.otel.traces import TRACEPARENT, checked_traceparent
from pipeline.stages.gateway.parsing import resumption
from pipeline.stages.gateway.parsing.chat.images import LinkedImage
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.readiness import NotReady, Readiness
from pipeline.stages.gateway.received import PARSERS, Parser, Received, adapter_of


class RequestReader:
    """Reads requests of all APIs."""

    def __init__(
        self,
        readiness: Readiness,
        requests: RequestTable,
        limits: RequestLimits,
        settings: GatewaySettings,
        fetcher: MediaFetcher | None = None,
    ) -> None:
        self._readiness = readiness
        self._requests = requests
        self._limits = limits
        self.bodies = BodyReader.of_settings(settings, limits.caps)
        self._timeout_s = settings.request_timeout_s
        self._with_metrics = settings.per_request_metrics
        self._has_traces = bool(settings.otlp_traces_endpoint)
        self._fetcher = MediaFetcher() if fetcher is None else fetcher
        self._settings = settings

    async def read(
        self, http_request: web.Request, api: str, parser: Parser | None = None
    ) -> tuple[ParsedRequest, Received]:
        """Read a request of an API that can be opened now, and parse it. Raises ApiError."""
        received_s = time.monotonic()
        self._readiness.require_ready()
        account = self._account(http_request)
        self._check_room(http_request)
        if account is not None and COUNTED not in http_request:
            account.arrive()
            http_request[COUNTED] = True
        limits = self.limits_of_key()
        given_s = time_left.of_headers(http_request.headers)
        head = Received(
            api=api,
            body=b"",
            received_s=received_s,
            num_point_bytes=resumption.num_point_bytes(http_request.headers),
            arrived_s=time.time(),
            request_id=request_ids.of_headers(http_request.headers),
            wants_resume_points=RESUMABLE in http_request.headers,
            left_s=given_s if given_s < math.inf else None,
            scope=current_scope(),
            models=limits.allowed,
            with_metrics=self._with_metrics,
            traceparent=checked_traceparent(http_request.headers.get(TRACEPARENT)) if self._has_traces else "",
        )
        parsed, received = await self._parse_request(http_request, head, parser or PARSERS[api], limits)
        parsed, received = await self._with_images(parsed, received)
        try:
            self._readiness.require_ready()
        except NotReady:
            http_request[KEPT_BODY] = received.body  # of a model of several, which may be loaded again for it
            raise
        return parsed, received

    async def _with_images(self, parsed: ParsedRequest, received: Received) -> tuple[ParsedRequest, Received]:
        """Fetch the images that the request has as URLs. Raises ApiError."""
        if not (linked := [one for one in parsed.images if isinstance(one, LinkedImage)]):
            return parsed, received
        given_s = math.inf if received.left_s is None else received.left_s
        timeout_s = min(parsed.timeout_s or self._timeout_s or math.inf, given_s)
        left_s = received.received_s + timeout_s - time.monotonic()
        try:
            with self._waiting.hold(MESSAGE_PARTS * len(received.body), received.scope):
                fetched = await self._fetcher.fetch(linked, received.scope, left_s)
        except TimeoutError:
            raise self._requests.rejections.timed_out(timeout_s) from None
        except ApiError as error:
            self._count_overloaded(error)
            raise
        received = msgspec.structs.replace(received, fetched=tuple(fetched))
        parsed = received.with_fetched(parsed)
        parsed = msgspec.structs.replace(parsed, size=measure(parsed))
        self._requests.check_room(media_bytes=sum(map(len, fetched)))
        return parsed, received

    @functools.cached_property
    def _waiting(self) -> WaitingRoom:
        """For requests whose images are fetched."""
        return WaitingRoom(self._settings, self._requests.accounts.keys, "wait for images that are fetched")

    def _check_room(self, http_request: web.Request) -> None:
        """Check that there is room for the declared body. Beyond max_body_bytes, images alone can have it; what is
        within may be images, too, whose limit is another one. Raises ApiError, 503."""
        num_bytes = http_request.content_length or 0
        if self._takes_images:
            num_beyond = max(0, num_bytes - self._settings.max_body_bytes)
            self._requests.check_room(media_bytes=num_beyond * 3 // 4)
        else:
            self._requests.check_room(num_bytes)

    @property
    def _takes_images(self) -> bool:
        return not self._limits.why_no_images

    def limits_of_key(self) -> RequestLimits:
        """The limits of the current request's client."""
        account = self._requests.accounts.of_scope(current_scope())
        return self._limits if account is None else self._limits.for_key(account.key.models)

    def _account(self, http_request: web.Request) -> Account | None:
        """The account of a request that opens one in the table: its errors count there, and its response has the
        headers of the limits."""
        account = self._requests.accounts.of_scope(current_scope())
        if account is not None:
            http_request[ACCOUNT] = account
        return account

    async def answer_expect(self, http_request: web.Request) -> web.StreamResponse | None:
        """Answer an Expect header of a route that opens a request: refuse before the body is sent, if possible."""
        account = None
        try:
            self._readiness.require_ready()
            account = self._account(http_request)
            self._check_room(http_request)
            if account is not None:
                account.check()
            try:
                self.bodies.check_declared(http_request, takes_images=self._takes_images)
            except ApiError as error:
                self._count_overloaded(error)
                raise
        except ApiError as error:
            if account is not None:
                account.refused(error.status)
            return expect.refuse(http_request, error)
        return await expect.answer_expect(http_request)

    async def _parse_request(
        self, http_request: web.Request, head: Received, parser: Parser, limits: RequestLimits
    ) -> tuple[ParsedRequest, Received]:
        """Read and parse the body, within the server's deadline and in what is left of the time that an ingress has
        given. Returns `head` with it."""
        given_s = math.inf if head.left_s is None else head.left_s
        left_s = head.received_s + min(self._timeout_s or math.inf, given_s) - time.monotonic()

        def parse_body(body: bytes) -> tuple[ParsedRequest, Received] | Rest[tuple[ParsedRequest, Received]]:
            parsed = parser(body[head.num_point_bytes :], limits)
            if isinstance(parsed, Rest):
                return parsed.then(lambda parsed: complete(parsed, body))
            return complete(parsed, body)

        def complete(parsed: ParsedRequest, body: bytes) -> tuple[ParsedRequest, Received]:
            num_base64 = sum(base64_bytes(len(one.data)) for one in parsed.images)
            self.bodies.check_beside_images(len(body) - num_base64)
            received = msgspec.structs.replace(head, body=body, adapter=adapter_of(parsed))
            return received.complete(parsed, limits), received

        try:
            return await self.bodies.parse(
                http_request,
                parse_body,
                body_reader.BODY_TIMEOUT_S,
                left_s,
                takes_images=self._takes_images,
                json_at=head.num_point_bytes,
            )
        except OutOfTime:
            raise self._requests.rejections.timed_out(self._timeout_s or given_s) from None
        except ApiError as error:
            self._count_overloaded(error)
            raise

    def _count_overloaded(self, error: ApiError) -> None:
        """Count a request that is refused because too much is received, or waits."""
        if error.code == "overloaded":
            self._requests.rejections.overloaded(error)
