"""The handlers of routes about the server and its model."""

import asyncio
import functools
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from pipeline.config.settings import GatewaySettings as GatewaySettings
from pipeline.http_server.access.guard import current_scope
from pipeline.http_server.bodies.abort_body import AbortBody, ControlBody
from pipeline.http_server.errors import RETRY_AFTER_S
from pipeline.http_server.request_turns import another_turn
from pipeline.metrics.stats import ServerStats
from pipeline.runtime import messages as m
from pipeline.runtime.queues.work_pool import WorkPool
from pipeline.stages.gateway.admin import health, live_state
from pipeline.stages.gateway.admin.abort_requests import RequestAborter, controlled, id_of
from pipeline.stages.gateway.admin.adapters import AdapterRegistry, load_bodies, unload_bodies
from pipeline.stages.gateway.admin.health import FINE, HealthBody, HealthQuery
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
from pipeline.stages.gateway.admin.sleep import SleepControl
from pipeline.stages.gateway.admin.stats import StatsQuery
from pipeline.stages.gateway.apidocs.description import Description, address_of
from pipeline.stages.gateway.errors import ApiError, shown
from pipeline.stages.gateway.http.request_reader import RequestReader
from pipeline.stages.gateway.open_requests.table import RequestTable
from pipeline.stages.gateway.parsing.build import check_model, unknown_model
from pipeline.stages.gateway.parsing.decode import decode
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from pipeline.stages.gateway.readiness import Readiness
from pipeline.version import VERSION

PIPELINE_MAX_AGE_S = 0.2
"""Age of the counts in /pipeline, so that any number of open pages asks the stages at most five times a second."""
MAX_KEYS_AT_ONCE = 100
"""The metrics of more API keys are written in a thread: those of a thousand take 20 ms."""

_aborts = msgspec.json.Decoder(AbortBody)
_controls = msgspec.json.Decoder(ControlBody)


class GatewayParts(NamedTuple):
    """What the handlers of a gateway's routes use. `model` and `adapters` are None only if no request is served."""

    readiness: Readiness
    requests: RequestTable
    health: HealthQuery
    aborter: RequestAborter
    stats: StatsQuery
    resetter: PrefixCacheResetter
    sleep_control: SleepControl
    limits: RequestLimits
    settings: GatewaySettings
    has_keys: bool = False
    """Clients need an API key."""
    model: ServedModel | None = None
    adapters: AdapterRegistry | None = None


class ServerApi:
    """A method for each of these routes."""

    def __init__(self, reader: RequestReader, parts: GatewayParts) -> None:
        self._reader = reader
        self._readiness = parts.readiness
        self._requests = parts.requests
        self._health = parts.health
        self._aborter = parts.aborter
        self._stats = parts.stats
        self._resetter = parts.resetter
        self._sleep_control = parts.sleep_control
        self._limits = parts.limits
        self._listener = (parts.settings.host, parts.settings.port)
        self._created = int(time.time())
        self._has_keys = parts.has_keys
        self._model = parts.model
        self._adapters = parts.adapters
        self._bodies: dict[str, bytes] = {}
        """Of replies that stay the same, by name."""
        self._making = WorkPool("making replies that stay the same")
        self._describing = WorkPool("describing the API")
        self._writing_metrics = WorkPool("writing metrics")
        self._written: tuple[ServerStats, asyncio.Task[bytes]] | None = None
        """Of those who wait for the same stats, the first has them written."""
        self._has_admin_routes = parts.settings.admin_port < 0
        """They are served to clients, not by the admin listener."""

    async def models(self, http_request: web.Request) -> web.StreamResponse:
        card, limits = self.card(), self._reader.limits_of_key()
        cards = [card, *(_adapter_card(card, one) for one in limits.adapters.values())]
        return _json(ModelList(data=[one for one in cards if limits.allows(one.id)]))

    async def model(self, http_request: web.Request) -> web.StreamResponse:
        card, name = self.card(), http_request.match_info["model"]
        check_model(name, self._reader.limits_of_key())
        adapter = self._limits.adapters.get(name)
        return _json(card if name == card.id or adapter is None else _adapter_card(card, adapter))

    async def load_lora_adapter(self, http_request: web.Request) -> web.StreamResponse:
        self._readiness.require_ready()
        body = await self._reader.bodies.parse(http_request, lambda body: decode(load_bodies, body, {}))
        self._check_adapter(body.lora_name)
        return web.Response(text=await self._registry().load(body))

    async def unload_lora_adapter(self, http_request: web.Request) -> web.StreamResponse:
        self._readiness.require_ready()
        body = await self._reader.bodies.parse(http_request, lambda body: decode(unload_bodies, body, {}))
        self._check_adapter(body.lora_name)
        return web.Response(text=await self._registry().unload(body))

    def _check_adapter(self, name: str) -> None:
        """Raises ApiError, 404, if the client's key may not use this name: it may not change what others use."""
        limits = self._reader.limits_of_key()
        if not limits.allows(name):
            raise unknown_model(shown(name), limits)

    def _registry(self) -> AdapterRegistry:
        assert self._adapters is not None
        return self._adapters

    def card(self) -> ModelCard:
        """The model's. Raises ApiError, 503, if it does not serve."""
        facts = self._readiness.require_ready()
        return ModelCard.of(self._limits.model, self._created, facts, self._limits.defaults, self._limits.tasks)

    async def health(self, http_request: web.Request) -> web.StreamResponse:
        body = await self.health_body(http_request)
        return _json(body, HTTPStatus.OK if body.status in FINE else HTTPStatus.SERVICE_UNAVAILABLE)

    async def health_body(self, http_request: web.Request | None = None) -> HealthBody:
        """What `health` answers."""
        status = self._readiness.status
        answer = await self._health.fetch() if status in ("ok", "draining") else None
        if http_request is not None:
            await another_turn(http_request)
        status = self._readiness.status
        reason = self._readiness.failure
        if status == "ok" and answer is None:
            status, reason = "late", "Timed out waiting for the supervisor"
        return health.body_of(answer, status, reason, self._requests.num_open, self._readiness.facts)

    async def live(self, http_request: web.Request) -> web.StreamResponse:
        self._readiness.require_live()
        return web.Response()

    async def ping(self, http_request: web.Request) -> web.StreamResponse:
        self._readiness.require_ready()
        self._requests.late_stages.check(generates=True)
        return web.Response()

    post_ping = ping

    async def server_info(self, http_request: web.Request) -> web.StreamResponse:
        config_format, facts = http_request.query.get("config_format", "text"), self._readiness.require_ready()
        build = functools.partial(server_info, self._served().settings, config_format, facts)
        return await self._kept(f"settings {config_format} {facts.quantization}", build)

    async def tokenizer_info(self, http_request: web.Request) -> web.StreamResponse:
        build = functools.partial(tokenizer_info, self._served(), self._readiness.require_ready().max_model_len)
        return await self._kept("tokenizer", build)

    async def _kept(self, name: str, build: Callable[[], Any]) -> web.Response:
        """A reply that stays the same, made once in a thread. It takes 10 ms, and more for a model with many added
        tokens; and 32 requests begin in one turn of the loop."""

        def made() -> bytes:
            if name not in self._bodies:
                self._bodies[name] = msgspec.json.encode(build())
            return self._bodies[name]

        body = self._bodies.get(name) or await self._making.run(made)
        return web.Response(body=body, content_type="application/json")

    def _served(self) -> ServedModel:
        assert self._model is not None
        return self._model

    async def metrics(self, http_request: web.Request) -> web.StreamResponse:
        stats = await self._stats.fetch()
        if stats is None:
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE, "Timed out waiting for the supervisor", code="stage_unresponsive"
            )
        # Imported here, because prometheus_client takes a tenth of this process's start.
        from pipeline.metrics import exposition

        if self._written is None or self._written[0] is not stats:
            self._written = stats, asyncio.create_task(self._write(exposition.text_of, stats))
        body = await asyncio.shield(self._written[1])
        await another_turn(http_request)
        return web.Response(body=body, headers={"Content-Type": exposition.CONTENT_TYPE})

    async def _write(self, text_of: Callable[[ServerStats], bytes], stats: ServerStats) -> bytes:
        return await self._writing_metrics.run(text_of, stats) if len(stats.keys) > MAX_KEYS_AT_ONCE else text_of(stats)

    async def pipeline(self, http_request: web.Request) -> web.StreamResponse:
        stats = await self._stats.fetch_recent(PIPELINE_MAX_AGE_S)
        await another_turn(http_request)
        if stats is None:
            raise ApiError(
                HTTPStatus.SERVICE_UNAVAILABLE, "Timed out waiting for the supervisor", code="stage_unresponsive"
            )
        return _json(live_state.state_of(stats, self._requests, current_scope()))

    async def load(self, http_request: web.Request) -> web.StreamResponse:
        return _json(self.server_load())

    def server_load(self) -> ServerLoad:
        """What `load` answers."""
        admission = self._requests.admission
        return ServerLoad(
            server_load=self._requests.num_requests,
            open_sequences=admission.num_sequences,
            max_open_sequences=admission.max_sequences,
            open_tokens=admission.num_tokens,
            max_open_tokens=admission.max_tokens,
            open_bytes=admission.num_bytes + self._requests.unread.num_bytes,
            max_open_bytes=admission.max_bytes,
            open_media_bytes=admission.media.num_bytes,
            max_open_media_bytes=admission.media.max_bytes,
        )

    async def abort_requests(self, http_request: web.Request) -> web.StreamResponse:
        abort_body = await self._reader.bodies.parse(http_request, lambda body: decode(_aborts, body, {}))
        return _json(await self._aborter.abort(abort_body.request_ids, current_scope()))

    async def control_chat(self, http_request: web.Request) -> web.StreamResponse:
        body = await self._reader.bodies.parse(http_request, lambda body: decode(_controls, body, {}))
        ids = [id_of(body, http_request.match_info.get("chat_id"))]
        done = await self._aborter.abort(ids, current_scope(), ends_reasoning=True)
        return _json(controlled(done.num_aborted))

    control_chat_by_id = control_chat

    async def reset_prefix_cache(self, http_request: web.Request) -> web.StreamResponse:
        self._readiness.require_ready()
        return _json(await self._resetter.reset())

    async def sleep(self, http_request: web.Request) -> web.StreamResponse:
        self._readiness.require_ready()
        await self._sleep_control.sleep(http_request.query)
        return web.Response()

    async def wake_up(self, http_request: web.Request) -> web.StreamResponse:
        self._readiness.require_ready()
        await self._sleep_control.wake_up(http_request.query)
        return web.Response()

    async def is_sleeping(self, http_request: web.Request) -> web.StreamResponse:
        self._readiness.require_ready()
        return _json(await self._sleep_control.is_sleeping())

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
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == HTTPStatus.SERVICE_UNAVAILABLE else None
    return web.Response(
        status=status, headers=headers, body=msgspec.json.encode(value), content_type="application/json"
    )
