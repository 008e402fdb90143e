"""The gateway's process: clients on one side, messages on the other, one asyncio loop between.

client ──HTTP──► app ──► Requests.open ──Submit──► ingest
client ◄──SSE─── writing ◄──wake── Requests ◄── Accepted, Rejected, Deltas
"""

import asyncio
import contextlib
import gc
import logging
import socket
import time
from http import HTTPStatus
from typing import Any, assert_never

import uvloop
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from pipeline.client.zmq_address import address_of
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.api_keys import Keys
from pipeline.runtime.channels import AsyncInbox
from pipeline.runtime.model_folder import ModelConfig
from pipeline.runtime.stage import Stage
from pipeline.stages.gateway.admin.aborts import AbortDesk
from pipeline.stages.gateway.admin.health import HealthDesk
from pipeline.stages.gateway.admin.prefix_cache_resets import ResetDesk
from pipeline.stages.gateway.admin.stats import StatsDesk
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.http import descriptors
from pipeline.stages.gateway.http.app import Api, Doors
from pipeline.stages.gateway.http.guard import OPEN_PATHS, guarded, guarded_by_origin
from pipeline.stages.gateway.http.listener import MAX_HEADERS, Site
from pipeline.stages.gateway.http.origins import OriginPolicy
from pipeline.stages.gateway.parsing import parse
from pipeline.stages.gateway.replayed import SHUTTING_DOWN, ReplayedClients
from pipeline.stages.gateway.requests import Requests
from pipeline.stages.gateway.zmq.server import Door

LAST_WORDS_S = 1.5
"""After the deadline of a drain: what the streams have to say that it is over, and the stages to close them."""
CLOSE_S = 1.0
"""Longest that responses may take to end after `Stop`."""
IDLE_CONNECTION_S = 300.0
"""How long a connection that asks nothing is kept."""


def run(launch: m.Launch) -> None:
    """Run the stage until `Stop`."""
    stage: Stage[m.GatewayInbox]
    with (
        Stage(launch, m.GatewayInbox) as stage,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        descriptors.allow_many(topology.max_open_of_one(launch.settings), stage.log)
        runner.run(Gateway(stage).serve())


class Gateway:
    """The loop, and what the supervisor asks of it."""

    def __init__(self, stage: "Stage[m.GatewayInbox]") -> None:
        self._stage = stage
        settings = stage.settings
        self._doors = Doors()
        self._requests = Requests(stage)
        self._desk = HealthDesk(stage)
        self._aborts = AbortDesk(stage, self._requests)
        self._stats = StatsDesk(stage)
        self._resets = ResetDesk(stage)
        self._limits = limits = parse.Limits(
            settings.served_model_name or ModelConfig.load(stage.model_dir).name,
            topology.max_open_of_one(settings),
            has_priorities=settings.schedule.policy == "priority",
            caps=settings.limits,
            formats=self._requests.formats,
        )
        self._api = Api(
            self._doors,
            self._requests,
            self._desk,
            self._aborts,
            self._stats,
            self._resets,
            limits,
            settings.gateway,
            has_keys=stage.launch.keys_fd >= 0,
        )
        self._is_stopped = False
        self._tasks: asyncio.TaskGroup
        self._site: Site
        fd = stage.launch.keys_fd
        self._keys = Keys.inherited(fd) if fd >= 0 else None
        self._door: Door | None = None
        self._ending: asyncio.Task[None] | None = None

    async def serve(self) -> None:
        """Listen, say that the stage is ready, and handle messages until `Stop`."""
        options: dict[str, Any] = {"access_log": None, "logger": _http_log(), "keepalive_timeout": IDLE_CONNECTION_S}
        max_header_bytes = self._stage.settings.limits.max_header_bytes
        options |= {"max_line_size": max_header_bytes, "max_field_size": max_header_bytes, "max_headers": MAX_HEADERS}
        has_admin = self._stage.launch.admin_fd >= 0
        runner = await self._runner(self._api.app(has_admin_routes=not has_admin), options)
        admin = await self._runner(self._api.admin_app(), options)
        if self._keys is not None:
            assert runner.server is not None
            handle = runner.server.request_handler
            runner.server.request_handler = guarded(handle, self._keys, () if has_admin else OPEN_PATHS)
        else:
            policy = OriginPolicy(self._stage.settings.gateway)
            for one in (runner, admin):
                assert one.server is not None
                one.server.request_handler = guarded_by_origin(one.server.request_handler, policy)
        if self._stage.replay_context.is_replaying:
            ReplayedClients(self._stage.replay_context, self._requests, self._aborts, self._resets)
        else:
            listener = socket.socket(fileno=self._stage.launch.listen_fd)
            http_port = listener.getsockname()[1]
            self._site = Site(runner, listener, options)
            await self._site.start()
            if has_admin:
                await Site(admin, socket.socket(fileno=self._stage.launch.admin_fd), options).start()
        inbox: AsyncInbox[m.GatewayInbox] = AsyncInbox(self._stage.inbox)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                if not self._stage.replay_context.is_replaying:
                    await self._open_door(http_port)
                self._stage.ready()
                await self._loop(inbox)
                self._fail_door(SHUTTING_DOWN)
        except BaseExceptionGroup as group:
            # The stage ends with what went wrong first, not with the group around it.
            raise group.exceptions[0] from group
        finally:
            self._requests.give_up(SHUTTING_DOWN)
            if self._door is not None:
                self._door.close()
            await runner.cleanup()
            await admin.cleanup()
            if self._door is not None:
                await self._door.wait_closed()
            inbox.close()

    async def _runner(self, app: web.Application, options: dict[str, Any]) -> web.AppRunner:
        runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=CLOSE_S, **options)
        await runner.setup()
        return runner

    async def _open_door(self, http_port: int) -> None:
        """Listen for clients of ZeroMQ. Raises UserError where the address can't be listened on."""
        address = address_of(self._stage.settings.gateway.zmq, http_port, self._stage.replica)
        if address is not None:
            max_bytes = self._stage.settings.gateway.max_body_bytes
            needs_key = address.startswith("tcp://")  # ipc is for processes of this user
            self._door = Door(
                address, self._doors, self._requests, self._limits, max_bytes, self._tasks, self._keys, needs_key
            )
            await self._door.start()

    def _fail_door(self, error: ApiError) -> None:
        """Streams of the door may be open though their requests have ended: they wait for their clients' credit."""
        if self._door is not None:
            self._door.fail_all(error)

    async def _loop(self, inbox: AsyncInbox[m.GatewayInbox]) -> None:
        while not self._is_stopped:
            messages = await inbox.receive_all()
            begin_s = time.monotonic()
            for message in messages:
                self._handle(message)
            self._requests.flush()
            self._stage.release()
            if (trace := self._stage.trace).on:
                trace.span("wake", begin_s, time.monotonic(), {"messages": len(messages)})
        if self._ending is not None:
            self._ending.cancel()

    def _handle(self, message: m.GatewayInbox) -> None:
        match message:
            case m.Deltas():
                self._requests.deltas(message)
            case m.Accepted():
                self._requests.accepted(message)
            case m.Rejected():
                self._requests.rejected(message)
            case m.Health():
                self._desk.answered(message)
            case m.StatsAnswer():
                self._stats.answered(message)
            case m.AbortRequests():
                self._aborts.asked(message)
            case m.RequestsAborted():
                self._aborts.answered(message)
            case m.PrefixCacheReset():
                self._resets.answered(message)
            case m.Ping(nonce):
                self._stage.supervisor.send(m.Pong(nonce, m.GatewayLoad(self._requests.num_open)))
            case m.Start(facts):
                self._doors.facts = facts
                self._requests.admission.max_prompt_tokens = facts.max_model_len
                self._limits.max_prompt_tokens = facts.max_model_len
                self._limits.vocab_size, self._limits.hidden_size = facts.vocab_size, facts.hidden_size
                gc.collect()
                gc.freeze()
            case m.Drain(deadline_s):
                self._doors.is_draining = True
                if self._ending is None:
                    self._end(deadline_s)
            case m.StageDied(stage, reason):
                self._doors.death = f"stage {stage} died: {reason}"
                death = ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, self._doors.death, code="stage_died")
                self._requests.give_up(death)
                self._fail_door(death)
                self._end(0.0)
            case m.Stop():
                self._is_stopped = True
            case _:
                assert_never(message)

    def _end(self, deadline_s: float) -> None:
        """Begin to drain. A drain that goes on is replaced: there is less time now."""
        if self._stage.replay_context.is_replaying:
            return  # what came of it is in the recording
        if self._ending is not None:
            self._ending.cancel()
        self._ending = self._tasks.create_task(self._drain(deadline_s))

    async def _drain(self, deadline_s: float) -> None:
        """Let open streams go on until the deadline, end those that are left, then say that nothing is open."""
        self._stage.log.info("draining", extra={"fields": {"open": self._requests.num_open, "deadline_s": deadline_s}})
        if not await self._idle_within(deadline_s):
            self._requests.fail_all(SHUTTING_DOWN)
            self._fail_door(SHUTTING_DOWN)
            await self._idle_within(LAST_WORDS_S)
        if self._doors.death is None:  # else who comes is told of it
            await self._site.stop()
        self._stage.supervisor.send(m.Drained())

    async def _idle_within(self, timeout_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._requests.idle()
                return True
        return False


class _NotTheClientsFault(logging.Filter):
    """What a client sends that is not even HTTP, or can't be unpacked, is answered, and is no event of the server's
    life."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, HttpProcessingError | web.RequestPayloadError)


def _http_log() -> logging.Logger:
    log = logging.getLogger("pipeline.http")
    if not log.filters:
        log.addFilter(_NotTheClientsFault())
    return log
