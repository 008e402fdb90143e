"""The handlers of the routes below /api, which are Ollama's."""

import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import msgspec
from aiohttp import web

from pipeline.stages.gateway.admin.served_model import ServedModel
from pipeline.stages.gateway.apis.ollama import models, parsing, reply
from pipeline.stages.gateway.apis.ollama.names import renamed
from pipeline.stages.gateway.apis.ollama.types import OllamaModelList, OllamaRunningList, OllamaVersion
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.parsing.parsed_request import ParsedRequest, RequestLimits
from pipeline.stages.gateway.readiness import Readiness
from pipeline.stages.gateway.received import Received

VERSION = "0.12.11"
"""The version of Ollama whose API this is: some clients check for a minimum."""

T = TypeVar("T")
Read = Callable[[web.Request, str], Awaitable[tuple[ParsedRequest, Received]]]
"""Reads a request of an API, and parses its body. Raises ApiError."""
Respond = Callable[[web.Request, ParsedRequest, Received], Awaitable[web.StreamResponse]]
"""Opens a request and sends its response."""


class ReadBody(Protocol):
    """Reads and parses any body. Raises ApiError."""

    async def __call__(self, http_request: web.Request, parser: Callable[[bytes], T]) -> T: ...


class OllamaApi:
    """A method for each route below /api."""

    def __init__(
        self,
        read: Read,
        respond: Respond,
        read_body: ReadBody,
        readiness: Readiness,
        limits: Callable[[], RequestLimits],
        model: ServedModel | None,
    ) -> None:
        """`limits` returns those of the current request's client."""
        self._read = read
        self._respond = respond
        self._read_body = read_body
        self._readiness = readiness
        self._limits = limits
        self._model = model
        self._started_s = time.time()

    async def ollama_chat(self, http_request: web.Request) -> web.StreamResponse:
        return await self._generate(http_request, "ollama_chat")

    async def ollama_generate(self, http_request: web.Request) -> web.StreamResponse:
        return await self._generate(http_request, "ollama_generate")

    async def ollama_embed(self, http_request: web.Request) -> web.StreamResponse:
        return await self._generate(http_request, "ollama_embed")

    async def ollama_embeddings(self, http_request: web.Request) -> web.StreamResponse:
        return await self._generate(http_request, "ollama_embeddings")

    async def _generate(self, http_request: web.Request, api: str) -> web.StreamResponse:
        parsed, received = await self._read(http_request, api)
        reply_fields = reply.reply_fields_of(parsed)
        if not parsed.prompts:
            return web.Response(body=reply.loaded(reply_fields), content_type="application/json")
        response = self._respond(http_request, parsed, received)
        del parsed, received  # as in `_respond`
        try:
            return await response
        except ApiError as error:
            raise renamed(error, reply_fields) from error

    async def ollama_tags(self, http_request: web.Request) -> web.StreamResponse:
        model = self._served()
        facts, limits = await model.weight_facts(), self._limits()
        found = [models.listed(model, facts, limits.model, self._started_s)] if limits.allows(limits.model) else []
        return _json(OllamaModelList(found))

    async def ollama_ps(self, http_request: web.Request) -> web.StreamResponse:
        max_model_len = self._readiness.require_ready().max_model_len
        model = self._served()
        facts, limits = await model.weight_facts(), self._limits()
        found = [models.running(model, facts, limits.model, max_model_len)] if limits.allows(limits.model) else []
        return _json(OllamaRunningList(found))

    async def ollama_show(self, http_request: web.Request) -> web.StreamResponse:
        limits = self._limits()
        await self._read_body(http_request, lambda body: parsing.read_show(body, limits))
        model = self._served()
        takes_images = not limits.why_no_images
        facts = await model.weight_facts()
        return _json(models.shown_model(model, facts, self._started_s, takes_images=takes_images))

    async def ollama_version(self, http_request: web.Request) -> web.StreamResponse:
        return _json(OllamaVersion(VERSION))

    def _served(self) -> ServedModel:
        self._readiness.require_ready()
        assert self._model is not None
        return self._model


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
