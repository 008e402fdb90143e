"""The HTTP server in front of replicas. It answers /health, /live and /metrics, sends /abort_requests and
/reset_prefix_cache to all replicas, and relays everything else to one of them."""

import asyncio
import contextlib
import logging
import socket
from typing import Any

import msgspec
from aiohttp import web

from pipeline.deploy import exposition
from pipeline.deploy.relay import HOP_HEADERS, Relay
from pipeline.deploy.replicas import ReplicaInfo, ReplicaSet
from pipeline.deploy.upstream import Upstream, UpstreamLost, Whole, fetch
from pipeline.runtime.logs import LogFormat

MAX_BODY_BYTES = 256 * 1024 * 1024
"""A replica's own limit, `gateway.max_body_bytes`, is usually lower."""
ALL_TIMEOUT_S = 10.0
"""Time for a replica to answer what is sent to all."""
NOT_RELAYED = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")

log = logging.getLogger("pipeline.deploy")


class IngressSettings(msgspec.Struct, frozen=True, kw_only=True):
    host: str = "127.0.0.1"
    port: int = 8000
    """0 picks a free one"""
    wait_s: float = 30.0
    """Time that a new request waits for a replica."""
    resume_timeout_s: float = 60.0
    """Time that a stream waits for a replica that continues it."""
    drain_timeout_s: float = 30.0
    """Time for open responses to end when the ingress stops."""
    log_level: str = "info"
    log_format: LogFormat = "text"


class HealthBody(msgspec.Struct):
    """GET /health"""

    status: str
    """ok, degraded (some replicas are down), unavailable or draining"""
    open_requests: int
    replicas: list[ReplicaInfo]


class Ingress:
    """The server. `start`, then `drain` and `close`."""

    def __init__(self, replicas: ReplicaSet, settings: IngressSettings) -> None:
        self.relay = Relay(replicas, wait_s=settings.wait_s, resume_timeout_s=settings.resume_timeout_s)
        self._replicas = replicas
        self._settings = settings
        self._runner: web.AppRunner | None = None
        self._is_draining = False
        self.url = ""

    async def start(self) -> None:
        """Listen. Raises OSError."""
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/health", self._health)
        app.router.add_get("/live", self._live)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/abort_requests", self._to_all)
        app.router.add_post("/reset_prefix_cache", self._to_all)
        app.router.add_route("*", "/{path:.*}", self._relay)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
        await self._runner.setup()
        host, port = self._settings.host, self._settings.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=1024)
        await web.SockSite(self._runner, listener).start()
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{listener.getsockname()[1]}"

    async def drain(self) -> None:
        """Refuse new requests, and wait until the open responses are over."""
        self._is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await self.relay.idle.wait()

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        await self._replicas.close()

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        if self._is_draining:
            return _error(503, "the ingress is shutting down", "shutting_down")
        if request.path in NOT_RELAYED:
            message = f"{request.path} changes one replica only: list adapters in lora.adapters instead"
            return _error(501, message, "not_relayed")
        return await self.relay.handle(request)

    async def _health(self, _: web.Request) -> web.StreamResponse:
        infos = self._replicas.infos()
        num_ok = sum(one.status == "ok" for one in infos)
        status = "ok" if num_ok == len(infos) else "degraded"
        status = "unavailable" if not num_ok else "draining" if self._is_draining else status
        body = msgspec.json.encode(HealthBody(status, self.relay.num_open, infos))
        code = 200 if status in ("ok", "degraded") else 503
        return web.Response(status=code, body=body, content_type="application/json")

    async def _live(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        """The ingress's own metrics, and with `?replicas=1` those of all replicas too."""
        infos = self._replicas.infos()
        text = exposition.own_metrics(self.relay.counts, self._replicas.routed, infos, self.relay.num_open)
        if request.query.get("replicas", "") not in ("", "0"):
            upstreams = self._replicas.upstreams()
            found = await asyncio.gather(*(_metrics_of(upstream) for upstream in upstreams.values()))
            text += exposition.of_replicas(dict(zip(upstreams, found, strict=True)))
        return web.Response(text=text, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    async def _to_all(self, request: web.Request) -> web.StreamResponse:
        """Send a request to all replicas, and join the answers: numbers are added. An abort is known if one replica
        knows it."""
        body = await request.read()
        upstreams = self._replicas.upstreams()
        answers = await asyncio.gather(*(_send(upstream, request, body) for upstream in upstreams.values()))
        for status, answer in answers:
            if status >= 400:
                return web.Response(status=status, body=answer, content_type="application/json")
        if not answers:
            return _error(503, "no replica takes requests", "no_replica")
        return web.json_response(_joined(body, [_decoded(answer) for _, answer in answers]))


def _joined(body: bytes, answers: list[Any]) -> Any:
    joined: dict[str, Any] = {}
    for answer in answers:
        for name, value in answer.items() if isinstance(answer, dict) else ():
            known = joined.get(name, 0)
            joined[name] = known + value if type(value) is int and type(known) is int else value
    if "num_aborted" in joined:
        ids = _decoded(body).get("request_ids", [])
        joined["num_aborted"] = min(len(set(ids)), joined["num_aborted"])
        joined["num_unknown"] = len(set(ids)) - joined["num_aborted"]
    return joined


def _decoded(data: bytes) -> Any:
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
        return msgspec.json.decode(data)
    return {}


async def _send(upstream: Upstream, request: web.Request, body: bytes) -> tuple[int, bytes]:
    sink = Whole()
    lines = [f"{request.method} {request.raw_path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in request.headers.items() if name.lower() not in HOP_HEADERS]
    data = "\r\n".join([*lines, f"Content-Length: {len(body)}\r\n\r\n"]).encode("utf-8", "surrogateescape") + body
    connection = None
    try:
        async with asyncio.timeout(ALL_TIMEOUT_S):
            connection = await upstream.connect(fresh=True)
            await connection.send(data, sink)
    except (TimeoutError, UpstreamLost):
        error = {"error": {"message": f"the replica at {upstream.host}:{upstream.port} did not answer"}}
        return 503, msgspec.json.encode(error)
    finally:
        if connection is not None:
            upstream.give_back(connection)
    return sink.response.status, bytes(sink.body)


async def _metrics_of(upstream: Upstream) -> str:
    try:
        status, body = await fetch(upstream, "/metrics", ALL_TIMEOUT_S)
    except UpstreamLost:
        return ""
    return body.decode() if status == 200 else ""


def _error(status: int, message: str, code: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return web.json_response({"error": error}, status=status, headers={"Retry-After": "1"} if status == 503 else {})
