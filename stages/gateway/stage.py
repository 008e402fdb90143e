"""The gateway process: one asyncio loop between clients and the other stages.

client ──HTTP──► app ──► RequestTable.open ──Submit──► ingest
client ◄──SSE─── response_writer ◄──wake── ResultHandler ◄── Accepted, Rejected, Deltas
"""

import asyncio
import contextlib
import socket
import time
from http import HTTPStatus
from typing import Any, assert_never

import msgspec
import uvloop

from pipeline.client.connection.zmq_address import address_of
from pipeline.http_server.access.guard import OPEN_PATHS
from pipeline.http_server.access_log import AccessLog
from pipeline.http_server.listener import HttpListener
from pipeline.http_server.refusal_log import RefusalLog
from pipeline.http_server.rules import ListenerRules
from pipeline.http_server.sockets import descriptors
from pipeline.http_server.sockets.connections import HttpConnections, limit_of
from pipeline.replay.open_stage import open_stage
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.log.log_file import dropped_log
from pipeline.runtime.model import generation_config
from pipeline.runtime.process import heap
from pipeline.runtime.security.api_keys import Keys
from pipeline.runtime.security.tls import server_context
from pipeline.runtime.stage import Stage
from pipeline.runtime.transport.async_inbox import AsyncInbox
from pipeline.stages.gateway.admin.abort_requests import RequestAborter
from pipeline.stages.gateway.admin.adapters import AdapterRegistry
from pipeline.stages.gateway.admin.health import HealthQuery
from pipeline.stages.gateway.admin.reset_prefix_cache import PrefixCacheResetter
from pipeline.stages.gateway.admin.served_model import ServedModel
from pipeline.stages.gateway.admin.stats import StatsQuery
from pipeline.stages.gateway.admission.preemption import Preemption
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.http.app import Api
from pipeline.stages.gateway.open_requests.recovery import Recovery
from pipeline.stages.gateway.open_requests.results import ResultHandler
from pipeline.stages.gateway.open_requests.table import RequestTable
from pipeline.stages.gateway.page import files
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from pipeline.stages.gateway.readiness import Readiness
from pipeline.stages.gateway.replayed import LEAVING, SHUTTING_DOWN, ReplayedClients
from pipeline.stages.gateway.zmq.listener import max_connections as max_zmq_connections
from pipeline.stages.gateway.zmq.server import ZmqServer

FAIL_S = 1.5
"""After the deadline of a drain: time for streams to send their error, and for the stages to close them."""
LINGER_S = 1.0
"""A gateway that leaves accepts connections for this long: the kernel gives new ones to others, and these are those
whose handshake had begun."""


def run(launch: m.Launch) -> None:
    """Run the stage until `Stop`."""
    heap.unmap_large_blocks()
    stage: Stage[m.GatewayInbox]
    with (
        open_stage(launch, m.GatewayInbox) as stage,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        descriptors.raise_limit(topology.max_open_of_one(launch.settings), stage.log)
        runner.run(GatewayStage(stage).serve())


class GatewayStage:
    """The loop, and the supervisor's messages."""

    def __init__(self, stage: "Stage[m.GatewayInbox]") -> None:
        self._stage = stage
        settings = stage.settings
        self._readiness = Readiness()
        self._requests = RequestTable(stage)
        self._health = HealthQuery(stage)
        self._results = ResultHandler(stage, self._requests)
        self._preemption = Preemption(stage, self._requests)
        self._aborter = RequestAborter(stage, self._requests)
        self._stats = StatsQuery(stage)
        self._resetter = PrefixCacheResetter(stage)
        self._recovery = Recovery(stage, self._requests, self._aborter, self._resetter)
        model = ServedModel(stage.model_dir, settings, self._requests.formats)
        defaults = generation_config.load(settings, stage.model_dir)
        if stage.replica == 0 and defaults != generation_config.GenerationDefaults():
            stage.log.info("sampling defaults of the model", extra={"fields": msgspec.structs.asdict(defaults)})
        self._limits = limits = RequestLimits(
            settings.served_model_name or model.config.name,
            topology.max_open_of_one(settings),
            has_priorities=settings.schedule.policy == "priority",
            caps=settings.limits,
            formats=self._requests.formats,
            defaults=defaults,
            tasks=model.config.tasks,
            pooler=model.config.pooler,
        )
        self._adapters = AdapterRegistry(stage, limits, self._requests.limited_log)
        self._api = Api(
            self._readiness,
            self._requests,
            self._health,
            self._aborter,
            self._stats,
            self._resetter,
            limits,
            settings.gateway,
            has_keys=self._requests.accounts.keys is not None,
            model=model,
            adapters=self._adapters,
        )
        self._refusal_log = RefusalLog(stage.log)
        self._access_log: AccessLog | None = None
        if not stage.replay_context.is_replaying:
            self._access_log = AccessLog.of(settings.access_log, self._requests.accounts.name_of)
            self._api.responses.access_log = self._access_log
        self._dropped_log = dropped_log(stage.log)
        self._descriptor_watch = descriptors.DescriptorWatch(stage.log)
        self._is_stopped = False
        self._tasks: asyncio.TaskGroup
        self._http: list[HttpListener] = []
        """That for clients, then the admin listener."""
        self._keys = self._requests.accounts.keys
        stage.control_requests.reread_keys = self._reread_keys
        self._zmq_server: ZmqServer | None = None
        self._http_port = 0
        self._rescaling: m.Rescaled | None = None
        """A change of this gateway's share that is not answered, because more is open."""
        self._drain_task: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Listen, report that the stage is ready, and handle messages until `Stop`."""
        if self._stage.launch.facts is not None:  # it replaces a gateway, and connections wait
            self._take_requests(self._stage.launch.facts)
        if self._stage.replay_context.is_replaying:  # no client connects
            context = self._stage.replay_context
            ReplayedClients(context, self._requests, self._aborter, self._resetter, self._preemption, self._limits)
        else:
            for listener in self._listeners():
                await listener.start()
        inbox: AsyncInbox[m.GatewayInbox] = AsyncInbox(self._stage.inbox)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                if not self._stage.replay_context.is_replaying:
                    await self._start_zmq_server()
                self._stage.ready()
                await self._loop(inbox)
                self._fail_zmq_requests(SHUTTING_DOWN)
        except BaseExceptionGroup as group:
            # Raise the first error itself, not the group.
            raise group.exceptions[0] from group
        finally:
            self._requests.close_all(SHUTTING_DOWN)
            await self._api.responses.wait_closed()
            if self._zmq_server is not None:
                self._zmq_server.close()
            for listener in self._http:
                await listener.cleanup()
            if self._zmq_server is not None:
                await self._zmq_server.wait_closed()
            inbox.close()
            self._requests.accounts.close()
            if self._access_log is not None:
                self._access_log.writer.close()

    def _listeners(self) -> list[HttpListener]:
        """The HTTP listeners: the one for clients, and the admin listener if there is one."""
        launch, settings = self._stage.launch, self._stage.settings
        gateway = settings.gateway
        has_admin = launch.admin_fd >= 0
        tls = server_context(gateway)
        page_paths = files.paths() if gateway.page else ()
        rules = ListenerRules.main(
            gateway,
            self._refusal_log,
            keys=self._keys,
            open_paths=frozenset((*(() if has_admin else OPEN_PATHS), *page_paths)),
            cors=self._api.cors,
            access_log=self._access_log,
            scheme="http" if tls is None else "https",
        )
        sock = socket.socket(fileno=launch.listen_fd)
        self._http_port = sock.getsockname()[1]
        app = self._api.app(has_admin_routes=not has_admin)
        shared: dict[str, Any] = {
            "max_header_bytes": settings.limits.max_header_bytes,
            "connections": HttpConnections(limit_of(self._limits.max_sequences, max_zmq_connections())),
            "unread": self._requests.unread,
        }
        self._http.append(HttpListener(app, sock, rules, tls=tls, **shared))
        if has_admin:
            sock = socket.socket(fileno=launch.admin_fd)
            rules = ListenerRules.admin(gateway, self._refusal_log, self._access_log)
            admin = self._api.admin_app()
            self._http.append(HttpListener(admin, sock, rules, **shared))
        return self._http

    def _reread_keys(self) -> None:
        """The server's API keys have changed. Requests that are open go on, connections over ZeroMQ with a key that is
        none any more end."""
        if self._keys is not None:
            self._requests.accounts.use(Keys.inherited(self._stage.launch.keys_fd))
            if self._zmq_server is not None:
                self._zmq_server.drop_unknown_keys()

    def _zmq_addresses(self) -> list[str]:
        """Of all gateways; empty if gateway.zmq is off."""
        settings = self._stage.settings.gateway
        # The port of another gateway of this server is the same: they share it.
        addresses = [address_of(settings.zmq, self._http_port, each) for each in range(settings.replicas)]
        return [one for one in addresses if one is not None]

    async def _start_zmq_server(self) -> None:
        """Listen for ZeroMQ clients. Raises UserError if it can't listen on the address."""
        settings, replica = self._stage.settings.gateway, self._stage.replica
        if (address := address_of(settings.zmq, self._http_port, replica)) is not None:
            self._zmq_server = ZmqServer(
                address,
                self._readiness,
                self._requests,
                self._limits,
                settings.max_body_bytes,
                self._tasks,
                self._keys,
                needs_key=address.startswith("tcp://"),  # only processes of this user can connect to ipc
                addresses=self._zmq_addresses(),
                gateway=replica,
                access_log=self._access_log,
            )
            await self._zmq_server.start()

    def _fail_zmq_requests(self, error: ApiError) -> None:
        """Streams over ZeroMQ may stay open after their requests have finished, until their clients grant credit."""
        if self._zmq_server is not None:
            self._zmq_server.fail_all(error)

    async def _loop(self, inbox: AsyncInbox[m.GatewayInbox]) -> None:
        await inbox.handle_all(self._turn)
        if self._drain_task is not None:
            self._drain_task.cancel()

    def _turn(self, messages: list[m.GatewayInbox]) -> bool:
        """One wake: handle all messages, then write to clients. Returns whether the loop goes on."""
        begin_s = time.monotonic()
        for message in messages:
            self._handle(message)
        self._answer_rescaling()
        self._requests.sender.flush()
        self._stage.release()
        self._results.publish()
        self._preemption.update_soon()  # after the replies that are complete now
        if (trace := self._stage.trace).on:
            trace.span("wake", begin_s, time.monotonic(), {"messages": len(messages)})
        return not self._is_stopped

    def _handle(self, message: m.GatewayInbox) -> None:
        match message:
            case m.Deltas() | m.Accepted() | m.Rejected():
                self._results.handle(message)
            case m.Health():
                self._health.handle_reply(message)
            case m.StatsAnswer():
                self._stats.handle_reply(message)
            case m.AbortRequests() | m.RequestsAborted():
                self._aborter.handle(message)
            case m.PrefixCacheReset():
                self._resetter.handle_reply(message)
            case m.Adapters() | m.AdapterSet():
                self._adapters.handle(message)
            case m.PeerRestarted() | m.FailRequests():
                self._recovery.handle(message)
            case m.Rescaled():
                self._rescaled(message)
            case m.LateStages():
                self._requests.late_stages.update(message)
            case m.Ping(nonce):
                self._pinged(nonce)
            case m.Start(facts):
                self._take_requests(facts)
                heap.freeze()
            case m.Drain(deadline_s, is_leaving):
                self._end_service(is_leaving=is_leaving)
                self._start_drain(deadline_s, again=False)
            case m.StageDied(stage, reason):
                self._readiness.failure = f"stage {stage} died: {reason}"
                death = ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, self._readiness.failure, code="stage_died")
                self._requests.close_all(death)
                self._fail_zmq_requests(death)
                self._start_drain(0.0)
            case m.Stop():
                self._is_stopped = True
            case _:
                assert_never(message)

    def _pinged(self, nonce: int) -> None:
        """A heartbeat, once a second."""
        self._readiness.pinged_s = time.monotonic()
        self._requests.refusals.flush()
        self._requests.limited_log.flush()
        self._requests.count_usage()
        self._requests.sender.notify()
        self._refusal_log.flush()
        if self._access_log is not None:
            self._access_log.writer.report(self._dropped_log)
            self._requests.metrics.num_log_lines_dropped = self._access_log.writer.num_dropped
        self._descriptor_watch.check()
        self._stage.supervisor.send(m.Pong(nonce, m.GatewayLoad(self._requests.num_open)))

    def _take_requests(self, facts: m.ExecuteFacts) -> None:
        """All stages run: requests are not refused any more."""
        self._readiness.facts = facts
        self._readiness.pinged_s = time.monotonic()
        self._requests.admission.max_prompt_tokens = facts.max_model_len
        self._limits.max_prompt_tokens = facts.max_model_len
        self._limits.vocab_size, self._limits.hidden_size = facts.vocab_size, facts.hidden_size
        self._requests.hidden_size = facts.hidden_size

    def _rescaled(self, message: m.Rescaled) -> None:
        """The number of processes of ingest or of the gateway has changed."""
        self._stage.rescaled(message)
        self._requests.rescaled()
        if message.stage != "gateway":
            self._stage.reconnected(message)
            return
        self._limits.max_sequences = self._requests.admission.max_sequences
        descriptors.raise_limit(self._limits.max_sequences, self._stage.log)
        self._api.responses.rescaled(message.num_replicas)
        if self._zmq_server is not None:
            self._zmq_server.addresses = self._zmq_addresses()
        self._rescaling = message

    def _answer_rescaling(self) -> None:
        """Answer as soon as no more is open than this gateway's share: then another gateway may have the rest. Called
        in each turn; the supervisor's pings come once a second."""
        admission = self._requests.admission
        fits = admission.num_sequences <= admission.max_sequences and admission.num_bytes <= admission.max_bytes
        if self._rescaling is not None and fits:
            self._stage.reconnected(self._rescaling)
            self._rescaling = None

    def _end_service(self, *, is_leaving: bool) -> None:
        """Refuse requests. A gateway that leaves accepts them until nothing is open, but ends its connections."""
        if is_leaving:
            self._readiness.is_leaving = True
        else:
            self._readiness.is_draining = True
            self._cancel_background(SHUTTING_DOWN)

    def _cancel_background(self, error: ApiError) -> None:
        """End background responses: no client could fetch them after this process has ended."""
        if num_cancelled := self._api.responses.cancel_background(error):
            self._stage.log.info("cancelled background responses", extra={"fields": {"responses": num_cancelled}})

    def _start_drain(self, deadline_s: float, *, again: bool = True) -> None:
        """Start to drain. With `again`, a running drain is replaced: the new deadline is earlier."""
        if self._stage.replay_context.is_replaying:
            return  # its effects are in the recording
        if self._drain_task is not None:
            if not again:
                return
            self._drain_task.cancel()
        self._drain_task = self._tasks.create_task(self._drain(deadline_s))

    async def _drain(self, deadline_s: float) -> None:
        """Wait until the deadline for open streams to finish, fail the rest, then report that nothing is open."""
        self._stage.log.info("draining", extra={"fields": {"open": self._requests.num_open, "deadline_s": deadline_s}})
        error = SHUTTING_DOWN
        if self._readiness.is_leaving:
            error = LEAVING
            linger_s = min(LINGER_S, deadline_s)
            await asyncio.sleep(linger_s)
            await self._idle_within(deadline_s - linger_s)
            deadline_s, self._readiness.is_draining = 0.0, True
            self._cancel_background(error)
        if not await self._idle_within(deadline_s):
            self._requests.fail_all(error, is_leaving=self._readiness.is_leaving)
            self._fail_zmq_requests(error)
            await self._idle_within(FAIL_S)
        if self._readiness.failure is None:  # else keep answering with the reason
            await self._http[0].stop()
        self._stage.supervisor.send(m.Drained())

    async def _idle_within(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._requests.idle()
                return True
        return False
