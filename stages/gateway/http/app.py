"""The application: handlers of the routes in routes.py. docs/http/ describes each."""

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from pipeline.config.settings import GatewaySettings as GatewaySettings
from pipeline.http_server import body_reader, expect, request_ids, time_left
from pipeline.http_server.abort_body import AbortBody
from pipeline.http_server.body_reader import BodyReader, OutOfTime, Rest
from pipeline.http_server.cors import Cors
from pipeline.http_server.guard import current_scope
from pipeline.http_server.key_accounts import ACCOUNT, Account, add_limit_headers
from pipeline.http_server.server_header import add_headers
from pipeline.runtime import messages as m
from pipeline.runtime.resume_points import RESUMABLE
from pipeline.runtime.work_pool import WorkPool
from pipeline.stages.gateway.access_details import set_opened
from pipeline.stages.gateway.admin import health, pipeline_state
from pipeline.stages.gateway.admin.abort_requests import RequestAborter
from pipeline.stages.gateway.admin.adapters import AdapterRegistry, load_bodies, unload_bodies
from pipeline.stages.gateway.admin.health import HealthQuery
from pipeline.stages.gateway.admin.reset_prefix_cache import PrefixCacheResetter
from pipeline.stages.gateway.admin.served_model import ServedModel
from pipeline.stages.gateway.admin.server_info import (
    ModelCard,
    ModelList,
    ServerLoad,
    Version,
    server_info,
    tokenizer_info,
)
from pipeline.stages.gateway.admin.stats import StatsQuery
from pipeline.stages.gateway.apidocs.description import Description, address_of
from pipeline.stages.gateway.apis.anthropic.reply import counted
from pipeline.stages.gateway.apis.ollama.handlers import OllamaApi
from pipeline.stages.gateway.apis.openai import reply as responses
from pipeline.stages.gateway.apis.responses.handlers import ResponsesApi
from pipeline.stages.gateway.errors import ApiError, shown
from pipeline.stages.gateway.http import middleware, response_writer
from pipeline.stages.gateway.http.routes import ROUTES, Route
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.open_requests.table import RequestTable
from pipeline.stages.gateway.page import files
from pipeline.stages.gateway.parsing import resumption
from pipeline.stages.gateway.parsing.build import check_model, unknown_model
from pipeline.stages.gateway.parsing.decode import decode
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.readiness import Readiness
from pipeline.stages.gateway.received import PARSERS, Parser, Received, adapter_of, render_chat, render_completion
from pipeline.version import VERSION

PIPELINE_MAX_AGE_S = 0.2
"""Age of the counts in /pipeline, so that any number of open pages asks the stages at most five times a second."""

MAX_KEYS_AT_ONCE = 100
"""The metrics of more API keys are written in a thread: those of a thousand take 20 ms."""

_aborts = msgspec.json.Decoder(AbortBody)


class Api:
    """A method for each route."""

    def __init__(
        self,
        readiness: Readiness,
        requests: RequestTable,
        health_query: HealthQuery,
        aborter: RequestAborter,
        stats: StatsQuery,
        resetter: PrefixCacheResetter,
        limits: RequestLimits,
        settings: GatewaySettings,
        has_keys: bool = False,
        model: ServedModel | None = None,
        adapters: AdapterRegistry | None = None,
    ) -> None:
        """`has_keys`: clients need an API key. `model` and `adapters` are None only if no request is served."""
        self._adapters = adapters
        self._readiness = readiness
        self._stats = stats
        self._resetter = resetter
        self._requests = requests
        self._health = health_query
        self._aborter = aborter
        self._limits = limits
        self._listener = (settings.host, settings.port)
        self._max_body = settings.max_body_bytes
        self._bodies = BodyReader(settings.max_body_bytes, limits.caps.max_json_depth)
        self._timeout_s = settings.request_timeout_s
        self._slow_client_timeout_s = settings.slow_client_timeout_s
        self._sse_keep_alive_s = settings.sse_keep_alive_s
        self._with_metrics = settings.per_request_metrics
        self._created = int(time.time())
        self._has_keys = has_keys
        self._model = model
        self._describing = WorkPool("describing the API")
        self._writing_metrics = WorkPool("writing metrics")
        self._has_page = settings.page
        self._has_admin_routes = True
        self.cors = Cors(settings)
        self.responses = ResponsesApi(self._read_request, requests, aborter, settings)
        self._ollama = OllamaApi(
            self._read_request, self._respond, self._bodies.parse, readiness, self._limits_of_key, model
        )

    def app(self, has_admin_routes: bool = True) -> web.Application:
        """All routes, with or without those of `admin_app`."""
        self._has_admin_routes = has_admin_routes
        app = self._empty()
        app.on_response_prepare.append(self._add_cors_headers)
        app.add_routes([self._def_of(route) for route in ROUTES if not route.is_admin])
        if self._has_page:
            app.add_routes(files.routes())
        if has_admin_routes:
            app.add_routes(self._admin_routes())
        return app

    async def _add_cors_headers(self, http_request: web.Request, response: web.StreamResponse) -> None:
        self.cors.add_headers(http_request, response)

    def admin_app(self) -> web.Application:
        """Routes for the operator's programs, which have no key."""
        app = self._empty()
        app.add_routes(self._admin_routes())
        return app

    def _admin_routes(self) -> list[web.RouteDef]:
        return [self._def_of(route) for route in ROUTES if route.is_admin]

    def _def_of(self, route: Route) -> web.RouteDef:
        on_expect = self._expect_call if route.opens_request else expect.answer_expect
        options: dict[str, Any] = {"allow_head": True} if route.method == "GET" else {}
        add = {"GET": web.get, "POST": web.post, "DELETE": web.delete}[route.method]
        return add(route.resource, self._handler(route), expect_handler=on_expect, **options)

    def _handler(self, route: Route) -> Handler:
        """The method of the object that has the routes of its API."""
        owner = next(one for one in (self, self.responses, self._ollama) if hasattr(one, route.handler))
        handler: Handler = getattr(owner, route.handler)
        return handler

    def _empty(self) -> web.Application:
        app = web.Application(client_max_size=self._max_body, middlewares=[middleware.format_errors])
        app.on_response_prepare.append(add_headers)
        app.on_response_prepare.append(add_limit_headers)
        app.on_response_prepare.append(self._close_if_leaving)
        return app

    async def _close_if_leaving(self, http_request: web.Request, response: web.StreamResponse) -> None:
        if self._readiness.is_leaving:  # so that clients connect to another gateway
            response.force_close()
            response.headers["Connection"] = "close"

    async def chat_completions(self, http_request: web.Request) -> web.StreamResponse:
        return await self._generate(http_request, "chat_completions")

    async def completions(self, http_request: web.Request) -> web.StreamResponse:
        return await self._generate(http_request, "completions")

    async def embeddings(self, http_request: web.Request) -> web.StreamResponse:
        return await self._generate(http_request, "embeddings")

    async def generate(self, http_request: web.Request) -> web.StreamResponse:
        return await self._generate(http_request, "generate")

    async def render_chat(self, http_request: web.Request) -> web.StreamResponse:
        rendering = render_chat()
        return await self._generate(http_request, "render_chat", rendering.body_of, rendering.parse)

    async def render_completion(self, http_request: web.Request) -> web.StreamResponse:
        rendering = render_completion()
        return await self._generate(http_request, "render_completion", rendering.body_of, rendering.parse)

    async def messages(self, http_request: web.Request) -> web.StreamResponse:
        return await self._generate(http_request, "messages")

    async def count_tokens(self, http_request: web.Request) -> web.StreamResponse:
        return await self._generate(http_request, "count_tokens", counted)

    async def infill(self, http_request: web.Request) -> web.StreamResponse:
        return await self._generate(http_request, "infill")

    async def invocations(self, http_request: web.Request) -> web.StreamResponse:
        return await self._generate(http_request, "invocations")

    async def tokenize(self, http_request: web.Request) -> web.StreamResponse:
        facts = self._readiness.require_ready()
        return await self._generate(
            http_request, "tokenize", lambda request: responses.tokenized(request, facts.max_model_len)
        )

    async def detokenize(self, http_request: web.Request) -> web.StreamResponse:
        return await self._generate(http_request, "detokenize", responses.detokenized)

    async def _generate(
        self,
        http_request: web.Request,
        api: str,
        body_of: Callable[[Request], bytes] | None = None,
        parser: Parser | None = None,
    ) -> web.StreamResponse:
        """Handle a request from its body to its response."""
        return await self._respond(http_request, *await self._read_request(http_request, api, parser), body_of)

    async def _respond(
        self,
        http_request: web.Request,
        parsed: ParsedRequest,
        received: Received,
        body_of: Callable[[Request], bytes] | None = None,
    ) -> web.StreamResponse:
        """Open a request and send its response. Aborts what is still open at the end: aiohttp cancels this task when
        the client disconnects."""
        request = self._requests.open(parsed, received)
        del parsed, received  # so that the request alone decides how long its prompts are kept
        set_opened(http_request, request)
        try:
            if request.parsed.stream:
                return await response_writer.send_stream(
                    http_request, request, self._slow_client_timeout_s, self._sse_keep_alive_s
                )
            return await response_writer.send_whole(http_request, request, self._slow_client_timeout_s, body_of)
        except ConnectionError:
            return web.Response()  # the client has disconnected
        finally:
            self._requests.release(request)

    async def _read_request(
        self, http_request: web.Request, api: str, parser: Parser | None = None
    ) -> tuple[ParsedRequest, Received]:
        """Read a request of an API that can be opened now, and parse it. Raises ApiError."""
        received_s = time.monotonic()
        self._readiness.require_ready()
        account = self._account(http_request)
        self._requests.check_room(http_request.content_length or 0)
        if account is not None:
            account.arrive()
        limits = self._limits_of_key()
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
        )
        found = await self._parse_request(http_request, head, parser or PARSERS[api], limits)
        self._readiness.require_ready()
        return found

    def _limits_of_key(self) -> RequestLimits:
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

    async def _expect_call(self, http_request: web.Request) -> web.StreamResponse | None:
        """Answer an Expect header of a route that opens a request: refuse before the body is sent, if possible."""
        account = None
        try:
            self._readiness.require_ready()
            account = self._account(http_request)
            self._requests.check_room(http_request.content_length or 0)
            if account is not None:
                account.check()
            with self._count_overloaded():
                self._bodies.check_declared(http_request)
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
            received = msgspec.structs.replace(head, body=body, adapter=adapter_of(parsed))
            return received.complete(parsed, limits), received

        try:
            with self._count_overloaded():
                return await self._bodies.parse(http_request, parse_body, body_reader.BODY_TIMEOUT_S, left_s)
        except OutOfTime:
            raise self._requests.refusals.timed_out(self._timeout_s or given_s) from None

    @contextlib.contextmanager
    def _count_overloaded(self) -> Iterator[None]:
        """Count requests that are refused because the upload budget is used up."""
        try:
            yield
        except ApiError as error:
            if error.code == "overloaded":
                self._requests.refusals.overloaded(error)
            raise

    async def models(self, http_request: web.Request) -> web.StreamResponse:
        card, limits = self._card(), self._limits_of_key()
        cards = [card, *(_adapter_card(card, one) for one in limits.adapters.values())]
        return _json(ModelList(data=[one for one in cards if limits.allows(one.id)]))

    async def model(self, http_request: web.Request) -> web.StreamResponse:
        card, name = self._card(), http_request.match_info["model"]
        check_model(name, self._limits_of_key())
        adapter = self._limits.adapters.get(name)
        return _json(card if name == card.id or adapter is None else _adapter_card(card, adapter))

    async def load_lora_adapter(self, http_request: web.Request) -> web.StreamResponse:
        self._readiness.require_ready()
        body = await self._bodies.parse(http_request, lambda body: decode(load_bodies, body, {}))
        self._check_adapter(body.lora_name)
        return web.Response(text=await self._registry().load(body))

    async def unload_lora_adapter(self, http_request: web.Request) -> web.StreamResponse:
        self._readiness.require_ready()
        body = await self._bodies.parse(http_request, lambda body: decode(unload_bodies, body, {}))
        self._check_adapter(body.lora_name)
        return web.Response(text=await self._registry().unload(body))

    def _check_adapter(self, name: str) -> None:
        """Raises ApiError, 404, if the client's key may not use this name: it may not change what others use."""
        limits = self._limits_of_key()
        if not limits.allows(name):
            raise unknown_model(shown(name), limits)

    def _registry(self) -> AdapterRegistry:
        assert self._adapters is not None
        return self._adapters

    def _card(self) -> ModelCard:
        facts = self._readiness.require_ready()
        return ModelCard.of(self._limits.model, self._created, facts, self._limits.defaults)

    async def health(self, http_request: web.Request) -> web.StreamResponse:
        status = self._readiness.status
        answer = await self._health.fetch() if status in ("ok", "draining") else None
        status = self._readiness.status
        reason = self._readiness.failure
        if status == "ok" and answer is None:
            status, reason = "late", "Timed out waiting for the supervisor"
        body = health.body_of(answer, status, reason, self._requests.num_open, self._readiness.facts)
        return _json(body, HTTPStatus.OK if body.status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE)

    async def live(self, http_request: web.Request) -> web.StreamResponse:
        self._readiness.require_live()
        return web.Response()

    async def ping(self, http_request: web.Request) -> web.StreamResponse:
        self._readiness.require_ready()
        self._requests.late_stages.check(generates=True)
        return web.Response()

    post_ping = ping

    async def server_info(self, http_request: web.Request) -> web.StreamResponse:
        config_format = http_request.query.get("config_format", "text")
        return _json(server_info(self._served().settings, config_format, self._readiness.require_ready()))

    async def tokenizer_info(self, http_request: web.Request) -> web.StreamResponse:
        return _json(tokenizer_info(self._served(), self._readiness.require_ready().max_model_len))

    def _served(self) -> ServedModel:
        assert self._model is not None
        return self._model

    async def metrics(self, http_request: web.Request) -> web.StreamResponse:
        stats = await self._stats.fetch()
        if stats is None:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "Timed out waiting for the supervisor", code="late")
        # Imported here, because prometheus_client takes a tenth of this process's start.
        from pipeline.metrics import exposition

        if len(stats.keys) > MAX_KEYS_AT_ONCE:
            body = await self._writing_metrics.run(exposition.text_of, stats)
        else:
            body = exposition.text_of(stats)
        return web.Response(body=body, headers={"Content-Type": exposition.CONTENT_TYPE})

    async def pipeline(self, http_request: web.Request) -> web.StreamResponse:
        stats = await self._stats.fetch_recent(PIPELINE_MAX_AGE_S)
        if stats is None:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "Timed out waiting for the supervisor", code="late")
        return _json(pipeline_state.state_of(stats, self._requests, current_scope()))

    async def load(self, http_request: web.Request) -> web.StreamResponse:
        admission = self._requests.admission
        return _json(
            ServerLoad(
                server_load=self._requests.num_requests,
                open_sequences=admission.num_sequences,
                max_open_sequences=admission.max_sequences,
                open_tokens=admission.num_tokens,
                max_open_tokens=admission.max_tokens,
                open_bytes=admission.num_bytes + self._requests.unread.num_bytes,
                max_open_bytes=admission.max_bytes,
            )
        )

    async def abort_requests(self, http_request: web.Request) -> web.StreamResponse:
        abort_body = await self._bodies.parse(http_request, lambda body: decode(_aborts, body, {}))
        return _json(await self._aborter.abort(abort_body.request_ids, current_scope()))

    async def reset_prefix_cache(self, http_request: web.Request) -> web.StreamResponse:
        self._readiness.require_ready()
        return _json(await self._resetter.reset())

    async def openapi(self, http_request: web.Request) -> web.StreamResponse:
        found = await self._describing.run(lambda: self._description)
        return web.Response(body=found.as_json, content_type="application/json")

    async def docs(self, http_request: web.Request) -> web.StreamResponse:
        found = await self._describing.run(lambda: self._description)  # its first use takes a third of a second
        listener = http_request.get_extra_info("sockname") or self._listener
        html = found.as_html(address_of(http_request.headers.get("Host"), listener, http_request.scheme))
        return web.Response(body=html, content_type="text/html", charset="utf-8", headers=found.headers)

    @functools.cached_property
    def _description(self) -> Description:
        return Description(self._limits.model, self._limits.caps, self._has_keys, self._has_admin_routes)

    async def version(self, http_request: web.Request) -> web.StreamResponse:
        return _json(Version(VERSION))


def _adapter_card(card: ModelCard, adapter: m.Adapter) -> ModelCard:
    return msgspec.structs.replace(card, id=adapter.name, root=adapter.path, parent=card.id)


def _json(value: Any, status: int = HTTPStatus.OK) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")
