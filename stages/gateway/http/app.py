"""The HTTP routes.

Those of routes.py; each is told in docs/http.md.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, TypeVar

import msgspec
from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler

from pipeline.config.settings import Gateway as GatewaySettings
from pipeline.metrics import exposition
from pipeline.runtime import messages as m
from pipeline.stages.gateway.admin import health
from pipeline.stages.gateway.admin.aborts import AbortBody, AbortDesk
from pipeline.stages.gateway.admin.health import HealthDesk
from pipeline.stages.gateway.admin.prefix_cache_resets import ResetDesk
from pipeline.stages.gateway.admin.server_info import Load, ModelCard, ModelList, Version
from pipeline.stages.gateway.admin.stats import StatsDesk
from pipeline.stages.gateway.apidocs.description import Description, address_of
from pipeline.stages.gateway.errors import ENCODINGS, ApiError, shown, unsupported_encoding
from pipeline.stages.gateway.http import request_ids, response_writer
from pipeline.stages.gateway.http.guard import current_scope
from pipeline.stages.gateway.http.large_body_lock import Turns
from pipeline.stages.gateway.http.routes import ROUTES, Route
from pipeline.stages.gateway.http.upload_budget import Upload, UploadRoom
from pipeline.stages.gateway.parsing import parse
from pipeline.stages.gateway.parsing.json_depth import check_depth
from pipeline.stages.gateway.replies import responses
from pipeline.stages.gateway.replies.embeddings import parse_embeddings
from pipeline.stages.gateway.replies.rendering import Rendering
from pipeline.stages.gateway.replies.tokens_only import parse_tokens_only
from pipeline.stages.gateway.requests import Call, Requests
from pipeline.version import VERSION

BODY_TIMEOUT_S = 60.0
"""Longest a client may take to send a request's body."""

_aborts = msgspec.json.Decoder(AbortBody)

T = TypeVar("T")
Parser = Callable[[bytes, parse.Limits], parse.Ask]


class Doors:
    """Whether requests are let in, and what those are told that are not."""

    def __init__(self) -> None:
        self.facts: m.ExecuteFacts | None = None
        """What `Start` said; None before it."""
        self.is_draining = False
        self.death: str | None = None
        """Which stage died, and why."""

    @property
    def status(self) -> str:
        if self.death is not None:
            return "failed"
        if self.is_draining:
            return "draining"
        return "starting" if self.facts is None else "ok"

    def enter(self) -> m.ExecuteFacts:
        """Let a request in, and return what is known about the model. Raises ApiError, 503."""
        if self.death is None and not self.is_draining and self.facts is not None:
            return self.facts
        message = {
            "failed": f"the server is going down: {self.death}",
            "draining": "the server is shutting down and takes no new requests",
            "starting": "the server is starting",
        }[self.status]
        raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code=self.status)


class BodyTimeout(ApiError):
    """408"""


class Api:
    """What each route does."""

    def __init__(
        self,
        doors: Doors,
        requests: Requests,
        desk: HealthDesk,
        aborts: AbortDesk,
        stats: StatsDesk,
        resets: ResetDesk,
        limits: parse.Limits,
        settings: GatewaySettings,
        has_keys: bool = False,
    ) -> None:
        """`has_keys`: whoever comes by HTTP has to show one."""
        self._doors = doors
        self._stats = stats
        self._resets = resets
        self._requests = requests
        self._desk = desk
        self._aborts = aborts
        self._limits = limits
        self._listener = (settings.host, settings.port)
        self._max_body = settings.max_body_bytes
        self._max_depth = limits.caps.max_json_depth
        self._uploads = UploadRoom(settings.max_body_bytes)
        self._turns = Turns()
        self._timeout_s = settings.request_timeout_s
        self._patience_s = settings.slow_client_timeout_s
        self._created = int(time.time())
        self._has_keys = has_keys
        self._has_admin_routes = True

    def app(self, has_admin_routes: bool = True) -> web.Application:
        """All routes; those of `admin_app` may be left out."""
        self._has_admin_routes = has_admin_routes
        app = self._empty()
        app.add_routes([self._def_of(route) for route in ROUTES if not route.is_admin])
        if has_admin_routes:
            app.add_routes(self._admin_routes())
        return app

    def admin_app(self) -> web.Application:
        """What an operator's own programs ask, who have no key."""
        app = self._empty()
        app.add_routes(self._admin_routes())
        return app

    def _admin_routes(self) -> list[web.RouteDef]:
        return [self._def_of(route) for route in ROUTES if route.is_admin]

    def _def_of(self, route: Route) -> web.RouteDef:
        expect = self._expect_call if route.is_call else _expect
        options: dict[str, Any] = {"allow_head": True} if route.method == "GET" else {}
        add = web.get if route.method == "GET" else web.post
        return add(route.resource, getattr(self, route.does), expect_handler=expect, **options)

    def _empty(self) -> web.Application:
        app = web.Application(client_max_size=self._max_body, middlewares=[_errors_in_shape])
        app.on_response_prepare.append(_repeat_name)
        return app

    async def chat_completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, parse.parse_chat)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, parse.parse_completion)

    async def embeddings(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, parse_embeddings)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, parse_tokens_only)

    async def render_chat(self, request: web.Request) -> web.StreamResponse:
        rendering = Rendering(parse.read_chat, parse.parse_chat)
        return await self._generate(request, rendering.parse, rendering.body_of)

    async def render_completion(self, request: web.Request) -> web.StreamResponse:
        rendering = Rendering(parse.read_completion, parse.parse_completion)
        return await self._generate(request, rendering.parse, rendering.body_of)

    async def tokenize(self, request: web.Request) -> web.StreamResponse:
        facts = self._doors.enter()
        return await self._generate(
            request, parse.parse_tokenize, lambda call: responses.tokenized(call, facts.max_model_len)
        )

    async def detokenize(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, parse.parse_detokenize, responses.detokenized)

    async def _generate(
        self, request: web.Request, parser: Parser, body_of: Callable[[Call], bytes] | None = None
    ) -> web.StreamResponse:
        """One call from body to response. Whichever way it ends, what is still open is aborted: aiohttp cancels this
        task as soon as the client leaves."""
        received_s = time.monotonic()
        self._doors.enter()
        self._requests.check_room()
        name = request_ids.of_headers(request.headers)
        ask = await self._ask_of(request, parser, received_s)
        request_id = name or ask.request_id
        ask = msgspec.structs.replace(ask, received_s=received_s, request_id=request_id, scope=current_scope())
        self._doors.enter()
        call = self._requests.open(ask)
        try:
            if ask.stream:
                return await response_writer.send_stream(request, call, self._patience_s)
            return await response_writer.send_whole(request, call, self._patience_s, body_of)
        except ConnectionError:
            return web.Response()  # nobody reads it
        finally:
            self._requests.leave(call)

    async def _expect_call(self, request: web.Request) -> web.StreamResponse | None:
        """An Expect header on a route that opens a call: whoever would be refused is, before the body is sent."""
        try:
            self._doors.enter()
            self._requests.check_room()
            self._check_length(request)
            with self._counted(), self._uploads.upload(request.content_length or 0):
                pass
        except ApiError as error:
            refusal = _error(error)
            refusal.force_close()  # who has not read it yet may send the body still
            return refusal
        return await _expect(request)

    async def _ask_of(self, request: web.Request, parser: Parser, received_s: float) -> parse.Ask:
        """What a request asks for that the server's own deadline holds for."""
        left_s = received_s + self._timeout_s - time.monotonic() if self._timeout_s else BODY_TIMEOUT_S
        try:
            with self._counted():
                return await self._parsed(request, lambda body: parser(body, self._limits), min(BODY_TIMEOUT_S, left_s))
        except BodyTimeout:
            if left_s < BODY_TIMEOUT_S:
                raise self._requests.timed_out(self._timeout_s) from None
            raise

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """A call that is refused because there is no room for its body counts as one that is refused for any other."""
        try:
            yield
        except ApiError as error:
            self._requests.counting.num_overloaded += error.code == "overloaded"
            raise

    async def _parsed(self, request: web.Request, parser: Callable[[bytes], T], timeout_s: float = BODY_TIMEOUT_S) -> T:
        """What a parser makes of the body, which has so long to come. It counts as on its way until then, however long
        it waits for its turn."""
        self._check_length(request)
        if (encoding := request.headers.get("Content-Encoding", "").lower() or "identity") not in ENCODINGS:
            raise unsupported_encoding(encoding)
        try:
            with self._uploads.upload(request.content_length or 0) as upload:
                async with asyncio.timeout(timeout_s):
                    body = await self._read(request, upload)
                async with self._turns.turn(len(body)):
                    check_depth(body, self._max_depth)
                    return parser(body)
        except TimeoutError:
            raise BodyTimeout(HTTPStatus.REQUEST_TIMEOUT, f"the body did not come within {timeout_s:g} s") from None
        except web.RequestPayloadError as error:
            cause = error.__cause__
            reason = cause.message if isinstance(cause, HttpProcessingError) else str(error)
            raise ApiError(HTTPStatus.BAD_REQUEST, f"the body can't be read: {shown(reason)}") from error

    async def _read(self, request: web.Request, upload: Upload) -> bytes:
        """As aiohttp's own, which would not say how far it is, and keep the bytes as long as the request."""
        body = bytearray()
        while chunk := await request.content.readany():
            if len(body) + len(chunk) > self._max_body:
                raise self._too_large()
            upload.grow(len(body) + len(chunk))
            body += chunk
        return bytes(body)

    def _check_length(self, request: web.Request) -> None:
        if request.content_length is not None and request.content_length > self._max_body:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        message = f"the body is larger than {self._max_body} bytes"
        return ApiError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, message, code="body_too_large")

    async def models(self, request: web.Request) -> web.StreamResponse:
        return _json(ModelList(data=[self._card()]))

    async def model(self, request: web.Request) -> web.StreamResponse:
        card = self._card()
        if (name := request.match_info["model"]) != card.id:
            raise ApiError(
                HTTPStatus.NOT_FOUND, f"the model '{name[:100]}' does not exist", "model", code="model_not_found"
            )
        return _json(card)

    def _card(self) -> ModelCard:
        facts = self._doors.enter()
        return ModelCard(id=self._limits.model, created=self._created, max_model_len=facts.max_model_len)

    async def health(self, request: web.Request) -> web.StreamResponse:
        status = self._doors.status
        answer = await self._desk.ask() if status in ("ok", "draining") else None
        status = self._doors.status
        reason = self._doors.death
        if status == "ok" and answer is None:
            status, reason = "late", "the supervisor did not answer in time"
        body = health.body_of(answer, status, reason, self._requests.num_open)
        return _json(body, HTTPStatus.OK if body.status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE)

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        stats = await self._stats.ask()
        if stats is None:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the supervisor did not answer in time", code="late")
        return web.Response(body=exposition.text_of(stats), headers={"Content-Type": exposition.CONTENT_TYPE})

    async def load(self, request: web.Request) -> web.StreamResponse:
        admission = self._requests.admission
        return _json(
            Load(
                server_load=self._requests.num_calls,
                open_sequences=admission.num_sequences,
                max_open_sequences=admission.max_sequences,
                open_tokens=admission.num_tokens,
                max_open_tokens=admission.max_tokens,
            )
        )

    async def abort_requests(self, request: web.Request) -> web.StreamResponse:
        asked = await self._parsed(request, lambda body: parse.decode(_aborts, body, {}))
        return _json(await self._aborts.abort(asked.request_ids, current_scope()))

    async def reset_prefix_cache(self, request: web.Request) -> web.StreamResponse:
        self._doors.enter()
        return _json(await self._resets.reset())

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        return web.Response(body=self._description.as_json, content_type="application/json")

    async def docs(self, request: web.Request) -> web.StreamResponse:
        found = self._description
        listener = request.get_extra_info("sockname") or self._listener
        html = found.as_html(address_of(request.headers.get("Host"), listener))
        return web.Response(body=html, content_type="text/html", charset="utf-8", headers=found.headers)

    @functools.cached_property
    def _description(self) -> Description:
        return Description(self._limits.model, self._limits.caps, self._has_keys, self._has_admin_routes)

    async def version(self, request: web.Request) -> web.StreamResponse:
        return _json(Version(VERSION))


async def _repeat_name(request: web.Request, response: web.StreamResponse) -> None:
    """Every response says what its client calls the request."""
    if (name := request_ids.to_repeat(request.headers)) is not None:
        response.headers[request_ids.HEADER] = name


@web.middleware
async def _errors_in_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error in OpenAI's shape, those of the router too."""
    try:
        return await handler(request)
    except ApiError as error:
        return _error(error)
    except web.HTTPMethodNotAllowed as refusal:
        message = f"{request.method} is not allowed for {shown(request.path)}"
        return _error(ApiError(refusal.status, message), {"Allow": refusal.headers["Allow"]})
    except web.HTTPNotFound as refusal:
        return _error(ApiError(refusal.status, f"there is nothing at {request.method} {shown(request.path)}"))
    except web.HTTPException as refusal:
        return _error(ApiError(refusal.status, refusal.text or refusal.reason))


async def _expect(request: web.Request) -> web.StreamResponse | None:
    """Answer an Expect header: go on, or refuse. aiohttp asks before any middleware runs, so the refusal is returned,
    not raised."""
    expectation = request.headers["Expect"]
    if request.version < HttpVersion11:
        return None  # RFC 9110, 10.1.1: to be ignored
    if expectation.lower() != "100-continue":
        message = f"the server can't meet the expectation '{shown(expectation)}', only 100-continue"
        return _error(ApiError(HTTPStatus.EXPECTATION_FAILED, message))
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the response itself has not begun
    return None


def _error(error: ApiError, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        status=error.status,
        body=error.json(),
        content_type="application/json",
        headers=error.headers | (headers or {}),
    )


def _json(value: Any, status: int = HTTPStatus.OK) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
