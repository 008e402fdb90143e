"""The HTTP server in front of replicas. It answers /health, /live and /metrics, sends /abort_requests and
/reset_prefix_cache to all replicas, and relays everything else to one of them.

Its listener has the same rules as a gateway's (pipeline/http_server), and bodies have the same limits: a request that a
replica would refuse by its key, origin or size is refused before its body is read.
"""

import asyncio
import contextlib
import functools
import logging
import socket
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from pipeline.config.sections.access_log import AccessLogSettings
from pipeline.config.sections.gateway import GatewaySettings
from pipeline.config.sections.requests import LimitSettings
from pipeline.deploy import exposition
from pipeline.deploy.proxy.forwarding import head_bytes
from pipeline.deploy.proxy.relay import NUM_HELD_BODIES, Relay
from pipeline.deploy.proxy.upstream import ResponseCollector, Upstream, UpstreamLost, fetch
from pipeline.deploy.replicas import ReplicaInfo, ReplicaSet
from pipeline.http_server import expect
from pipeline.http_server.access.cors import Cors
from pipeline.http_server.access.guard import OpenPaths, current_scope
from pipeline.http_server.access.key_accounts import ACCOUNT, KeyAccounts, add_limit_headers
from pipeline.http_server.access_log import AccessLog
from pipeline.http_server.bodies import body_reader
from pipeline.http_server.bodies.abort_body import AbortBody
from pipeline.http_server.bodies.body_reader import BodyReader
from pipeline.http_server.error_responses import error_response
from pipeline.http_server.errors import RETRY_AFTER_S, ApiError, shown
from pipeline.http_server.listener import BACKLOG, HttpListener
from pipeline.http_server.rejection_log import RejectionLog
from pipeline.http_server.rules import ListenerRules
from pipeline.http_server.server_header import add_headers
from pipeline.http_server.sockets import descriptors
from pipeline.http_server.sockets.connections import HttpConnections
from pipeline.http_server.sockets.deliveries import Deliveries
from pipeline.http_server.sockets.slow_clients import UnreadReplies, max_unread_bytes
from pipeline.runtime.log.limited_log import INTERVAL_S
from pipeline.runtime.log.log_file import dropped_log
from pipeline.runtime.log.logs import LogFormat
from pipeline.runtime.queues.work_pool import WorkPool
from pipeline.runtime.security.api_keys import Keys
from pipeline.runtime.security.tls import server_context

ALL_TIMEOUT_S = 10.0
"""Time for a replica to answer what is sent to all."""
MAX_ANSWER_BYTES = 1024 * 1024
"""Of a replica, to what is sent to all."""
METRICS_MAX_AGE_S = 1.0
"""However often they are asked for, the replicas' metrics are fetched once in this time."""
NOT_RELAYED = ("/v1/load_lora_adapter", "/v1/unload_lora_adapter")

log = logging.getLogger("pipeline.deploy")
_abort_bodies = msgspec.json.Decoder(AbortBody)


class IngressSettings(msgspec.Struct, frozen=True, kw_only=True):
    gateway: GatewaySettings = GatewaySettings()
    """Its address, and the rules of its listener. With replicas, `max_body_bytes` and `request_timeout_s` should be
    theirs."""
    limits: LimitSettings = LimitSettings()
    access_log: AccessLogSettings = AccessLogSettings()
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
    same_backend: bool = True
    """whether all replicas that take requests compute with the same back end; else a stream that continues at another
    one may get other ids from there on"""


class Ingress:
    """The server. `start`, then `drain` and `close`."""

    def __init__(self, replicas: ReplicaSet, settings: IngressSettings, keys: Keys | None = None) -> None:
        """`keys` are those that clients need; the replicas must have the same ones. Raises UserError if the file of the
        access log can't be opened."""
        gateway = settings.gateway
        self._bodies = BodyReader.of_settings(gateway, settings.limits)
        self._unread = UnreadReplies(
            lambda: max_unread_bytes(gateway.max_open_bytes), gateway.slow_client_timeout_s, Deliveries(log)
        )
        self.relay = Relay(
            replicas,
            self._bodies,
            wait_s=settings.wait_s,
            resume_timeout_s=settings.resume_timeout_s,
            slow_client_s=gateway.slow_client_timeout_s,
            max_held_bytes=NUM_HELD_BODIES * gateway.max_body_bytes,
            request_timeout_s=gateway.request_timeout_s,
            unread=self._unread,
            shares_cache=gateway.share_prefix_cache,
        )
        self._replicas = replicas
        self._settings = settings
        self._accounts = KeyAccounts(keys, counts_tokens=False)
        self._access_log = AccessLog.of(settings.access_log, self._accounts.name_of)
        self._dropped_log = dropped_log(log)
        self._cors = Cors(gateway)
        self._rejection_log = RejectionLog(log)
        self._listener: HttpListener | None = None
        self._flush: asyncio.Task[None] | None = None
        self._metrics_lock = asyncio.Lock()
        self._writing_metrics = WorkPool("writing metrics")
        self._own_text: str | None = None
        self._all_metrics = b""
        self._metrics_s = float("-inf")
        self._is_draining = False
        self.url = ""

    async def start(self) -> None:
        """Listen. Raises OSError, and ConfigError if the certificate can't be read."""
        app = web.Application(middlewares=[_format_errors])
        app.on_response_prepare.append(self._add_headers)
        for method, path, handler in (
            ("GET", "/health", self._health),
            ("GET", "/live", self._live),
            ("GET", "/metrics", self._metrics),
            ("POST", "/abort_requests", self._to_all),
            ("POST", "/v1/chat/completions/control", self._to_all),
            ("POST", "/v1/chat/completions/{chat_id}/control", self._to_all),
            ("POST", "/reset_prefix_cache", self._to_all),
            ("*", "/{path:.*}", self._relay),
        ):
            app.router.add_route(method, path, handler, expect_handler=self._expect)
            if method == "GET":
                app.router.add_route("HEAD", path, handler, expect_handler=self._expect)
        gateway = self._settings.gateway
        tls = server_context(gateway)
        scheme = "http" if tls is None else "https"
        rules = ListenerRules.main(
            gateway,
            self._rejection_log,
            keys=self._accounts.keys,
            open_paths=OpenPaths(),
            cors=self._cors,
            scheme=scheme,
            access_log=self._access_log,
        )
        host, port = gateway.host, gateway.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        self._listener = HttpListener(
            app,
            listener,
            rules,
            max_header_bytes=self._settings.limits.max_header_bytes,
            tls=tls,
            connections=self._connections(),
            unread=self._unread,
        )
        await self._listener.start()
        self._flush = asyncio.create_task(self._flush_log())
        shown_host = f"[{host}]" if ":" in host else host
        self.url = f"{scheme}://{shown_host}:{listener.getsockname()[1]}"

    def _connections(self) -> HttpConnections:
        """Each client's connection may need another one to a replica. If there were no descriptors left for these, the
        replicas would seem dead."""
        limit = descriptors.raise_limit(2 * self._settings.gateway.max_open_sequences, log)
        if limit < 0:
            return HttpConnections()
        return HttpConnections(max(1, (limit - descriptors.num_open() - descriptors.SPARE) // 2), is_strict=True)

    async def _add_headers(self, request: web.Request, response: web.StreamResponse) -> None:
        await add_headers(request, response)
        await add_limit_headers(request, response)  # in place of those of a replica, which knows its own part
        self._cors.add_headers(request, response)

    async def _expect(self, request: web.Request) -> web.StreamResponse | None:
        """Answer an Expect header: refuse before the body is sent, if possible."""
        try:
            self._bodies.check_declared(request, takes_images=True)
        except ApiError as error:
            return expect.refuse(request, error)
        return await expect.answer_expect(request)

    async def _flush_log(self) -> None:
        while True:
            await asyncio.sleep(INTERVAL_S)
            self._rejection_log.flush()
            if self._access_log is not None:
                self._access_log.writer.report(self._dropped_log)

    async def drain(self) -> None:
        """Refuse new requests, and wait until the open responses are over."""
        self._is_draining = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await self.relay.idle.wait()

    async def close(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
        if self._listener is not None:
            await self._listener.cleanup()
        await self._replicas.close()
        self._accounts.close()
        if self._access_log is not None:
            self._access_log.writer.close()

    def use_keys(self, keys: Keys) -> None:
        """Accept these keys from now on, in place of those that it has."""
        self._accounts.use(keys)

    async def _relay(self, request: web.Request) -> web.StreamResponse:
        if self._is_draining:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the ingress is shutting down", code="shutting_down")
        if request.path in NOT_RELAYED:
            message = f"{request.path} changes one replica only: list adapters in lora.adapters instead"
            raise ApiError(HTTPStatus.NOT_IMPLEMENTED, message, code="not_relayed")
        self._count(request)
        return await self.relay.handle(request)

    def _count(self, request: web.Request) -> None:
        """Count a request that may open one at a replica against its key's requests of a minute, for all replicas
        together. Raises RateLimited. A replica counts tokens: it knows them."""
        account = self._accounts.of_scope(current_scope())
        if account is not None and request.method == "POST" and account.key.rpm:
            request[ACCOUNT] = account
            try:
                account.arrive()
            except ApiError as error:
                account.refused(error.status)
                raise

    async def _health(self, _: web.Request) -> web.StreamResponse:
        infos = self._replicas.infos()
        num_ok = sum(one.status == "ok" for one in infos)
        status = "ok" if num_ok == len(infos) else "degraded"
        status = "unavailable" if not num_ok else "draining" if self._is_draining else status
        body = msgspec.json.encode(
            HealthBody(status, self.relay.num_open, infos, self._replicas.routed.have_same_backend)
        )
        if status in ("ok", "degraded"):
            return web.Response(body=body, content_type="application/json")
        headers = {"Retry-After": str(RETRY_AFTER_S)}
        return web.Response(status=503, headers=headers, body=body, content_type="application/json")

    async def _live(self, _: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        """The ingress's own metrics, and with `?replicas=1` those of all replicas too."""
        is_all = request.query.get("replicas", "") not in ("", "0")
        body = await self._metrics_of_all() if is_all else self._own_metrics().encode()
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"})

    def _own_metrics(self) -> str:
        """Written once in a turn of the loop: with a thousand keys it takes 4 ms, and 32 requests may begin."""
        if self._own_text is None:
            relay, routed = self.relay, self._replicas.routed
            usage = self._accounts.usage()
            relay.counts.num_given_up = self._unread.deliveries.num_given_up
            self._own_text = exposition.own_metrics(relay.counts, routed, self._replicas.infos(), relay.num_open, usage)
            asyncio.get_running_loop().call_soon(self._forget_own_metrics)
        return self._own_text

    def _forget_own_metrics(self) -> None:
        self._own_text = None

    async def _metrics_of_all(self) -> bytes:
        """Those of some replicas with many keys are megabytes, and take a second to write."""
        async with self._metrics_lock:
            if time.monotonic() - self._metrics_s > METRICS_MAX_AGE_S:
                upstreams = self._replicas.upstreams()
                found = await asyncio.gather(*(_metrics_of(upstream) for upstream in upstreams.values()))
                texts = dict(zip(upstreams, found, strict=True))
                write = functools.partial(_written, self._own_metrics(), texts)
                self._all_metrics = await self._writing_metrics.run(write)
                self._metrics_s = time.monotonic()
            return self._all_metrics

    async def _to_all(self, request: web.Request) -> web.StreamResponse:
        """Send a request to all replicas, and join the answers: numbers are added. An abort is known if one replica
        knows it."""
        body = await self._bodies.parse(request, bytes, body_reader.BODY_TIMEOUT_S)
        upstreams = self._replicas.upstreams()
        with self.relay.hold(len(body)):
            answers = await asyncio.gather(*(_send(upstream, request, body) for upstream in upstreams.values()))
        for status, answer in answers:
            if status >= 400:
                return web.Response(status=status, body=answer, content_type="application/json")
        if not answers:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "no replica takes requests", code="no_replica")
        return web.json_response(_joined(body, [_decoded(answer) for _, answer in answers]))


def _joined(body: bytes, answers: list[Any]) -> Any:
    joined: dict[str, Any] = {}
    for answer in answers:
        for name, value in answer.items() if isinstance(answer, dict) else ():
            known = joined.get(name, 0)
            joined[name] = known + value if type(value) is int and type(known) is int else value
    if any(isinstance(answer, dict) and answer.get("success") is True for answer in answers):
        return {"success": True}
    if "num_aborted" in joined:
        num_ids, num = _num_ids(body), joined["num_aborted"]
        joined["num_aborted"] = min(num_ids, num) if type(num) is int else 0
        joined["num_unknown"] = num_ids - joined["num_aborted"]
    return joined


def _num_ids(body: bytes) -> int:
    """Ids in a body that a replica has taken: it is read as there, so what only the replica ignores does not count."""
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return len(set(_abort_bodies.decode(body).request_ids))
    return 0


def _decoded(data: bytes) -> Any:
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return msgspec.json.decode(data)
    return {}


async def _send(upstream: Upstream, request: web.Request, body: bytes) -> tuple[int, bytes]:
    sink = ResponseCollector(MAX_ANSWER_BYTES)
    head = head_bytes(request, len(body), {})
    connection = None
    try:
        async with asyncio.timeout(ALL_TIMEOUT_S):
            connection = await upstream.connect(fresh=True)
            await connection.send(head, body, sink=sink)
    except (TimeoutError, UpstreamLost):
        error = {"error": {"message": f"the replica at {upstream.host}:{upstream.port} did not answer"}}
        return 503, msgspec.json.encode(error)
    finally:
        if connection is not None:
            upstream.give_back(connection)
    return sink.response.status, bytes(sink.body)


def _written(own: str, texts: Mapping[str, str]) -> bytes:
    return (own + exposition.of_replicas(texts)).encode()


async def _metrics_of(upstream: Upstream) -> str:
    try:
        status, body = await fetch(upstream, "/metrics", ALL_TIMEOUT_S)
    except UpstreamLost:
        return ""
    return body.decode("utf-8", "replace") if status == 200 else ""


@web.middleware
async def _format_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Return all errors in the shape of their path."""
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(request, error)
    except web.HTTPException as refusal:
        message = f"{request.method} {shown(request.path)}: {refusal.reason}"
        return error_response(request, ApiError(refusal.status, message))
