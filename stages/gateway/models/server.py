"""The handlers of routes about the server as a whole."""

import asyncio
import functools
import time
from collections.abc import Collection
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from pipeline.http_server.access.guard import current_scope
from pipeline.http_server.bodies.abort_body import AbortBody, ControlBody
from pipeline.http_server.bodies.body_reader import BodyReader
from pipeline.http_server.errors import RETRY_AFTER_S
from pipeline.http_server.request_turns import another_turn
from pipeline.metrics.stats import ServerStats
from pipeline.runtime.queues.work_pool import WorkPool
from pipeline.stages.gateway.admin.abort_requests import Aborted, controlled, id_of
from pipeline.stages.gateway.admin.health import FINE
from pipeline.stages.gateway.admin.reset_prefix_cache import Reset
from pipeline.stages.gateway.admin.server_info import ServerLoad, Version
from pipeline.stages.gateway.apis.ollama.types import OllamaModelList, OllamaRunningList, OllamaVersion
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.models import lists
from pipeline.stages.gateway.models.shared_answer import SharedAnswer
from pipeline.stages.gateway.models.table import ModelEntry, ModelTable
from pipeline.stages.gateway.parsing.decode import decode
from pipeline.version import VERSION

_aborts = msgspec.json.Decoder(AbortBody)
_controls = msgspec.json.Decoder(ControlBody)


class ModelsApi:
    """A method for each of these routes, with the names of those of a server of one model."""

    def __init__(self, table: ModelTable, bodies: BodyReader) -> None:
        self._table = table
        self._bodies = bodies
        self._created = int(time.time())
        self._writing_metrics = WorkPool("writing metrics")
        self._metrics = SharedAnswer(self._metrics_text)
        self._health = SharedAnswer(self._health_body)

    async def models(self, http_request: web.Request) -> web.StreamResponse:
        allowed = self._table.allowed()
        names = {one.name for one in allowed}
        return _json({"object": "list", "data": [card for one in allowed for card in self._cards(one, names)]})

    def _cards(self, model: ModelEntry, names: Collection[str]) -> list[dict[str, Any]]:
        """Those of the model and its adapters that the client may use. `names` are all models that it may use."""
        card = lists.card_of(model, self._created, [one for one in model.status.waits_for if one in names])
        cards = [card, *lists.adapter_cards(model, card)]
        return [one for one in cards if self._table.allows(model, one["id"])]

    async def model(self, http_request: web.Request) -> web.StreamResponse:
        name = http_request.match_info["model"]
        cards = self._cards(self._table.find(name), {one.name for one in self._table.allowed()})
        return _json(next((one for one in cards if one["id"] == name), cards[0]))

    async def ollama_tags(self, http_request: web.Request) -> web.StreamResponse:
        return _json(OllamaModelList([await lists.tag_of(one, self._created) for one in self._table.allowed()]))

    async def ollama_ps(self, http_request: web.Request) -> web.StreamResponse:
        return _json(OllamaRunningList([await lists.running_of(one) for one in self._table.serving()]))

    async def ollama_version(self, http_request: web.Request) -> web.StreamResponse:
        return _json(OllamaVersion(VERSION))

    async def version(self, http_request: web.Request) -> web.StreamResponse:
        return _json(Version(VERSION))

    # -------------------------------------------------------------------------------------------------------- health

    async def health(self, http_request: web.Request) -> web.StreamResponse:
        """The worst status of the models that are loaded; "starting" until those of the start are."""
        body, status = await self._health.get()
        await another_turn(http_request)
        return _encoded(body, status)

    async def _health_body(self) -> tuple[bytes, int]:
        """What `health` answers, and its status."""
        models = self._table.all()
        bodies = await asyncio.gather(*(self._health_of(one) for one in models))
        worst = [body.status for body in bodies if body is not None and body.status not in FINE]
        if self._table.is_ending:
            status = "draining"
        elif not self._table.is_ready:
            status = "starting"
        else:
            status = worst[0] if worst else "ok"
        found = {
            "status": status,
            "open_requests": sum(body.open_requests for body in bodies if body is not None),
            "models": [lists.health_of(one, body) for one, body in zip(models, bodies, strict=True)],
        }
        return msgspec.json.encode(found), HTTPStatus.OK if status == "ok" else HTTPStatus.SERVICE_UNAVAILABLE

    async def _health_of(self, model: ModelEntry) -> Any:
        return await model.gateway.api.server.health_body() if model.gateway is not None else None

    async def live(self, http_request: web.Request) -> web.StreamResponse:
        for model in self._table.all():
            if model.gateway is not None:
                model.gateway.readiness.require_live()
        return web.Response()

    async def ping(self, http_request: web.Request) -> web.StreamResponse:
        if self._table.is_ending or not self._table.is_ready:
            message = "the server is shutting down" if self._table.is_ending else "the server is starting"
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, message, code="starting")
        return web.Response()

    post_ping = ping

    async def metrics(self, http_request: web.Request) -> web.StreamResponse:
        body, content_type = await self._metrics.get()
        await another_turn(http_request)
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _metrics_text(self) -> tuple[bytes, str]:
        """What `metrics` answers, and its type."""
        # Imported here, because prometheus_client takes a tenth of this process's start.
        from pipeline.metrics import exposition

        serving = [one.gateway for one in self._table.all() if one.gateway is not None and one.serves]
        answers = await asyncio.gather(*(one.stats.fetch() for one in serving))
        found: list[ServerStats] = [one for one in answers if one is not None]
        states = {one.name: one.state for one in self._table.all()}
        turns = {one.name: one.status.num_turns for one in self._table.all()}
        body = await self._writing_metrics.run(functools.partial(exposition.text_of_models, found, states, turns))
        return body, exposition.CONTENT_TYPE

    async def load(self, http_request: web.Request) -> web.StreamResponse:
        """Of all models that are loaded, together."""
        found = [one.gateway.api.server.server_load() for one in self._table.all() if one.gateway is not None]
        fields = ServerLoad.__struct_fields__
        return _json(ServerLoad(**{name: sum(getattr(one, name) for one in found) for name in fields}))

    # ------------------------------------------------------------------------------------------------------ requests

    async def abort_requests(self, http_request: web.Request) -> web.StreamResponse:
        body = await self._bodies.parse(http_request, lambda body: decode(_aborts, body, {}))
        ids, scope = list(dict.fromkeys(body.request_ids)), current_scope()
        gateways = [one.gateway for one in self._table.serving() if one.gateway is not None]
        done = await asyncio.gather(*(one.aborter.abort(ids, scope) for one in gateways))
        num_aborted = sum(one.num_aborted for one in done)
        return _json(Aborted(num_aborted, len(ids) - num_aborted))

    async def control_chat(self, http_request: web.Request) -> web.StreamResponse:
        body = await self._bodies.parse(http_request, lambda body: decode(_controls, body, {}))
        ids, scope = [id_of(body, http_request.match_info.get("chat_id"))], current_scope()
        gateways = [one.gateway for one in self._table.serving() if one.gateway is not None]
        done = await asyncio.gather(*(one.aborter.abort(ids, scope, ends_reasoning=True) for one in gateways))
        return _json(controlled(sum(one.num_aborted for one in done)))

    control_chat_by_id = control_chat

    async def reset_prefix_cache(self, http_request: web.Request) -> web.StreamResponse:
        """Of the model in ?model=, or of all that are loaded."""
        name = http_request.query.get("model")
        chosen = self._table.serving() if name is None else [self._table.find(name)]
        gateways = [one.gateway for one in chosen if one.gateway is not None]
        done = await asyncio.gather(*(one.resetter.reset() for one in gateways))
        return _json(Reset(sum(one.num_blocks for one in done)))


def _json(value: Any) -> web.Response:
    return _encoded(msgspec.json.encode(value))


def _encoded(body: bytes, status: int = HTTPStatus.OK) -> web.Response:
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == HTTPStatus.SERVICE_UNAVAILABLE else None
    return web.Response(status=status, headers=headers, body=body, content_type="application/json")
