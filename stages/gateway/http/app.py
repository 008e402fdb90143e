"""The application: the routes in routes.py and what handles them. docs/http/ describes each."""

from collections.abc import Callable, Sequence
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from pipeline.stages.gateway.access_details import set_opened
from pipeline.stages.gateway.admin.handlers import GatewayParts, ServerApi
from pipeline.stages.gateway.apis.ollama.handlers import OllamaApi
from pipeline.stages.gateway.apis.openai import reply as responses
from pipeline.stages.gateway.apis.openai.rendering import render_chat, render_completion
from pipeline.stages.gateway.apis.responses.handlers import ResponsesApi
from pipeline.stages.gateway.http import response_writer
from pipeline.stages.gateway.http.applications import Applications, Prepare
from pipeline.stages.gateway.http.request_reader import RequestReader
from pipeline.stages.gateway.http.route import Route
from pipeline.stages.gateway.open_requests.request import Request
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest
from pipeline.stages.gateway.received import Parser, Received


class Api(Applications):
    """What handles the routes of one gateway."""

    def __init__(self, parts: GatewayParts) -> None:
        super().__init__(parts.settings, has_keys=parts.has_keys)
        self._settings = parts.settings
        self._readiness = parts.readiness
        self._requests = parts.requests
        self._reader = reader = RequestReader(parts.readiness, parts.requests, parts.limits, parts.settings)
        self.server = ServerApi(reader, parts)
        self.responses = ResponsesApi(reader.read, parts.requests, parts.aborter, parts.settings)
        self._ollama = OllamaApi(
            reader.read, self._respond, reader.bodies.parse, parts.readiness, reader.limits_of_key, parts.model
        )

    def handler(self, route: Route) -> Handler:
        """The method that is named like it, of the object that has one; else the request is parsed, opened and answered
        as its dialect says."""

        async def generate(http_request: web.Request) -> web.StreamResponse:
            return await self._generate(http_request, route.handler, route.whole)

        for owner in (self, self.server, self.responses, self._ollama):
            if (handler := getattr(owner, route.handler, None)) is not None:
                return handler  # type: ignore[no-any-return]
        assert route.parse is not None, f"{route.path} has neither a handler nor a parser"
        return generate

    def expect_handler(self, route: Route) -> Any:
        return self._reader.answer_expect if route.opens_request else super().expect_handler(route)

    def on_prepare(self) -> Sequence[Prepare]:
        return [self._close_if_leaving]

    async def _close_if_leaving(self, http_request: web.Request, response: web.StreamResponse) -> None:
        if self._readiness.is_leaving:  # so that clients connect to another gateway
            response.force_close()
            response.headers["Connection"] = "close"

    async def render_chat(self, http_request: web.Request) -> web.StreamResponse:
        rendering = render_chat()
        return await self._generate(http_request, "render_chat", rendering.body_of, rendering.parse)

    async def render_completion(self, http_request: web.Request) -> web.StreamResponse:
        rendering = render_completion()
        return await self._generate(http_request, "render_completion", rendering.body_of, rendering.parse)

    async def tokenize(self, http_request: web.Request) -> web.StreamResponse:
        facts = self._readiness.require_ready()
        return await self._generate(
            http_request, "tokenize", lambda request: responses.tokenized(request, facts.max_model_len)
        )

    async def _generate(
        self,
        http_request: web.Request,
        api: str,
        body_of: Callable[[Request], bytes] | None = None,
        parser: Parser | None = None,
    ) -> web.StreamResponse:
        """Handle a request from its body to its response."""
        return await self._respond(http_request, *await self._reader.read(http_request, api, parser), body_of)

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
            unread = self._requests.unread_output
            return await response_writer.send_reply(http_request, request, self._settings, unread, body_of)
        except ConnectionError:
            return web.Response()  # the client has disconnected
        finally:
            self._requests.release(request)
