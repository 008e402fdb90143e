"""The routes of a server of several models: each request goes to the handlers of the model that it chooses.

body or ?model= ──► its model ──► loaded, if it is not ──► the handler of the model's own stage
"""

import functools
import time
from collections.abc import Collection
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from pipeline.config.settings import Settings
from pipeline.http_server import time_left
from pipeline.http_server.access.guard import current_scope
from pipeline.http_server.access.key_accounts import ACCOUNT, COUNTED, KeyAccounts
from pipeline.http_server.apis.table import family_of
from pipeline.http_server.bodies.body_reader import KEPT_BODY, BodyReader
from pipeline.runtime.resume_points import RESUMABLE
from pipeline.runtime.security.client_address import client_address
from pipeline.stages.gateway.apis.ollama import models as ollama
from pipeline.stages.gateway.errors import ApiError, shown
from pipeline.stages.gateway.http.applications import Applications
from pipeline.stages.gateway.http.early_stream import BEGUN, WAITING, Waiting, fail, wait_with_keep_alives
from pipeline.stages.gateway.http.route import Route
from pipeline.stages.gateway.models.model_fields import ModelFields, keep_s, model_fields_of
from pipeline.stages.gateway.models.server import ModelsApi
from pipeline.stages.gateway.models.table import ModelEntry, ModelTable
from pipeline.stages.gateway.parsing import resumption
from pipeline.stages.gateway.readiness import NotReady

STREAMS = ("chat_completions", "completions", "messages", "infill", "create_response")
"""Handlers whose streams are server-sent events."""
LINES = ("ollama_chat", "ollama_generate")
"""Those whose streams are lines of JSON, which they are by default."""


class ModelsApp(Applications):
    """What handles the routes of the listener that all models share."""

    def __init__(self, table: ModelTable, settings: Settings, accounts: KeyAccounts) -> None:
        gateway = settings.gateway
        super().__init__(gateway, has_keys=accounts.keys is not None)
        self._table = table
        self._keep_alive_s = gateway.sse_keep_alive_s
        self._accounts = accounts
        self._bodies = BodyReader.of_settings(gateway, settings.limits)
        self._server = ModelsApi(table, self._bodies)

    def own_routes(self, is_admin: bool) -> list[web.RouteDef]:
        """llama.cpp's router's. Who unloads a model ends the streams of others, so that is for the operator."""
        if is_admin:
            return [web.post("/models/load", self._load), web.post("/models/unload", self._unload)]
        return [web.get("/models", self._server.models, allow_head=True)]

    def handler(self, route: Route) -> Handler:
        """That of the server as a whole, if it has one for the route; else that of the model which is chosen."""
        if (handler := getattr(self._server, route.handler, None)) is not None:
            return handler  # type: ignore[no-any-return]
        if "{response_id}" in route.path:
            return functools.partial(self._of_response, route)
        if route.opens_request or route.names_model:
            return functools.partial(self._by_body, route)
        return functools.partial(self._by_query, route)

    # ------------------------------------------------------------------------------------------------------ requests

    async def _by_body(self, route: Route, http_request: web.Request) -> web.StreamResponse:
        """A request whose body has the model. One of a key that has used its limits loads nothing."""
        if (account := self._accounts.of_scope(current_scope())) is not None and route.opens_request:
            http_request[ACCOUNT] = account
            account.check()
        folds_names = family_of(route.path).folds_names
        chosen = await self._read(http_request)
        name = chosen.model or (chosen.name if folds_names else None)
        if not isinstance(name, str):
            raise self._table.unnamed()
        model = self._table.find(name, as_ollama=folds_names)
        idle_s = keep_s(chosen.keep_alive) if folds_names else keep_s(chosen.ttl)
        streams = route.handler in STREAMS and chosen.stream is True and not chosen.background
        streams |= route.handler in LINES and chosen.stream in (None, True) and chosen.has_input
        only_unloads = folds_names and idle_s == 0 and not chosen.has_input
        del chosen  # its fields keep the body
        if only_unloads and not model.serves:
            return _json(ollama.unloaded(route.path, name, time.time()))
        try:
            return await self._serve(route, http_request, model, name, streams=streams)
        except ApiError as error:
            if BEGUN in http_request:
                return await fail(http_request, error)
            raise
        finally:
            if idle_s is not None:
                self._table.keep(model, idle_s)

    async def _read(self, http_request: web.Request) -> ModelFields:
        """Read the body, which is kept for the model's own handler. Raises ApiError."""
        num = resumption.num_point_bytes(http_request.headers)
        chosen, body = await self._bodies.parse(  # the model's own handler knows whether it takes images
            http_request, lambda body: (model_fields_of(body[num:]), body), takes_images=True, json_at=num
        )
        http_request[KEPT_BODY] = body
        return chosen

    async def _by_query(self, route: Route, http_request: web.Request) -> web.StreamResponse:
        """A request about a model: that of ?model=, by default the first one. Who only looks neither has it loaded nor
        keeps it from being unloaded. Raises ApiError, 503, if it is not loaded."""
        name = http_request.query.get("model")
        if route.method != "GET":
            model = self._table.default() if name is None else self._table.find(name)
            if route.handler == "load_lora_adapter":
                return await self._load_adapter(route, http_request, model)
            return await self._serve(route, http_request, model)
        found = self._table.serving() or [self._table.default()]
        model = found[0] if name is None else self._table.find(name)
        if model.gateway is None or not model.serves:
            message = f"the model '{model.name}' is not loaded: {waiting_words(model, set())}"
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, "model", "model_not_loaded")
        return await model.gateway.handler(route)(http_request)

    async def _load_adapter(self, route: Route, http_request: web.Request, model: ModelEntry) -> web.StreamResponse:
        """Load an adapter, whose name must not be another model's: requests choose both by their names."""
        name = (await self._read(http_request)).lora_name
        if not isinstance(name, str):  # the model's own stage says what is wrong
            return await self._serve(route, http_request, model)
        with self._table.adapter_name(model, name):
            return await self._serve(route, http_request, model)

    async def _of_response(self, route: Route, http_request: web.Request) -> web.StreamResponse:
        """A request about a stored response, which a model that is loaded has."""
        found = self._table.serving()
        response_id = http_request.match_info["response_id"]
        owner = next((one for one in found if one.gateway and one.gateway.api.responses.has(response_id)), None)
        if owner is None and not found:  # no model is loaded for that: a web page may have sent it
            message = f"Response with id '{shown(response_id)}' not found."
            raise ApiError(HTTPStatus.NOT_FOUND, message, "response_id", "response_not_found")
        return await self._serve(route, http_request, owner or found[0])

    async def _serve(
        self, route: Route, http_request: web.Request, model: ModelEntry, name: str = "", *, streams: bool = False
    ) -> web.StreamResponse:
        """Have the model loaded, and its own handler answer. A stream has keep-alives meanwhile, with the model's
        `name` in the request."""
        shows_position = streams and RESUMABLE not in http_request.headers
        with self._table.use(model):
            while True:
                while not model.serves:
                    await self._wait(http_request, model, name if shows_position else None)
                assert model.gateway is not None
                if streams:
                    http_request[WAITING] = Waiting(name, functools.partial(sleeping_words, model, self._seen()))
                try:
                    return await model.gateway.handler(route)(http_request)
                except NotReady:  # its stages ended while the body was parsed
                    if KEPT_BODY not in http_request:
                        raise

    async def _wait(self, http_request: web.Request, model: ModelEntry, name: str | None) -> None:
        """Wait until the model is loaded. A stream has its `name` in the request, and keep-alives. Raises ApiError as
        `ModelTable.until_loaded`, and 429."""
        if COUNTED not in http_request:
            self._check_limits()
        scope = current_scope() or client_address(http_request.transport)
        left_s = time_left.of_headers(http_request.headers)
        loaded = self._table.until_loaded(model, len(http_request.get(KEPT_BODY, b"")), scope, left_s)
        if name is not None and self._keep_alive_s:
            waiting = Waiting(name, functools.partial(waiting_words, model, self._seen()))
            await wait_with_keep_alives(http_request, loaded, self._keep_alive_s, waiting)
        else:
            await loaded

    def _seen(self) -> Collection[str]:
        """The models that the client may know: a key may not know all."""
        return set(self._table.allowed_names(one.name for one in self._table.all()))

    # ------------------------------------------------------------------------------------- llama.cpp's router routes

    async def _load(self, http_request: web.Request) -> web.StreamResponse:
        """POST /models/load: begin to load a model. Its state is in GET /models."""
        model = await self._named(http_request)
        if not model.serves:
            self._check_limits()
            self._table.load(model)
        return _json({"success": True})

    async def _unload(self, http_request: web.Request) -> web.StreamResponse:
        """POST /models/unload: begin to unload a model."""
        model = await self._named(http_request)
        if model.state not in ("loaded", "loading", "sleeping"):
            message = f"the model '{model.name}' is not loaded: it is {model.state}"
            raise ApiError(HTTPStatus.BAD_REQUEST, message, "model", "model_not_loaded")
        self._table.unload(model)
        return _json({"success": True})

    def _check_limits(self) -> None:
        """Raises ApiError, 429, if the client's key has used its limits: it loads no model, for which others leave."""
        if (account := self._accounts.of_scope(current_scope())) is not None:
            account.check()

    async def _named(self, http_request: web.Request) -> ModelEntry:
        name = (await self._read(http_request)).model
        if not isinstance(name, str):
            raise self._table.unnamed()
        return self._table.find(name)


def waiting_words(model: ModelEntry, seen: Collection[str]) -> str:
    """What a request of a model waits for. Other models than those `seen` are not named."""
    status = model.status
    if not status.position:
        return f"the model is {model.state}"
    return f"the model waits to be loaded: {_position_of(model, seen)}"


def sleeping_words(model: ModelEntry, seen: Collection[str]) -> str:
    """What an open request waits for while its model sleeps, as `waiting_words`; empty if it does not."""
    if model.status.state != "sleeping":
        return ""
    return f"the model sleeps: {_position_of(model, seen)}" if model.status.position else "the model sleeps"


def _position_of(model: ModelEntry, seen: Collection[str]) -> str:
    names = [name for name in model.status.waits_for if name in seen]
    others = f", after {', '.join(names)}" if names else ""
    return f"position {model.status.position}{others}"


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
