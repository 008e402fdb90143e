"""The gateway process: one asyncio loop between clients and the other stages.

client ──HTTP──► app ──► RequestTable.open ──Submit──► ingest
client ◄──SSE─── response_writer ◄──wake── ResultHandler ◄── Accepted, Rejected, Deltas
"""

import asyncio
import time
from collections.abc import Callable
from http import HTTPStatus
from socket import gethostname
from typing import Any, assert_never

import msgspec
import uvloop
from aiohttp.typedefs import Handler

from pipeline.config.values.browsers import normalized_host
from pipeline.http_server.access_log import AccessLog
from pipeline.http_server.rejection_log import RejectionLog
from pipeline.http_server.sockets import descriptors
from pipeline.replay.open_stage import open_stage
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.log.log_file import dropped_log
from pipeline.runtime.model.generation_config import GenerationDefaults
from pipeline.runtime.model.pooler import LAST_TOKEN
from pipeline.runtime.process import heap
from pipeline.runtime.queues.work_pool import share_interpreter
from pipeline.runtime.security.api_keys import Keys
from pipeline.runtime.stage import Stage
from pipeline.runtime.transport.async_inbox import AsyncInbox
from pipeline.stages.gateway.admin.abort_requests import RequestAborter
from pipeline.stages.gateway.admin.adapters import AdapterRegistry
from pipeline.stages.gateway.admin.handlers import GatewayParts
from pipeline.stages.gateway.admin.health import HealthQuery
from pipeline.stages.gateway.admin.reset_prefix_cache import PrefixCacheResetter
from pipeline.stages.gateway.admin.served_model import ServedModel
from pipeline.stages.gateway.admin.sleep import SleepControl
from pipeline.stages.gateway.admin.stats import StatsQuery
from pipeline.stages.gateway.admission.preemption import Preemption
from pipeline.stages.gateway.draining import Draining
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.http.app import Api
from pipeline.stages.gateway.http.route import Route
from pipeline.stages.gateway.listeners import Listeners
from pipeline.stages.gateway.open_requests.early_ends import EarlyEnds
from pipeline.stages.gateway.open_requests.recovery import Recovery
from pipeline.stages.gateway.open_requests.results import ResultHandler
from pipeline.stages.gateway.open_requests.table import RequestTable
from pipeline.stages.gateway.otel.traces import Traces
from pipeline.stages.gateway.parsing.build import check_model
from pipeline.stages.gateway.parsing.parsed_request import RequestLimits
from pipeline.stages.gateway.readiness import Readiness
from pipeline.stages.gateway.replayed import SHUTTING_DOWN, UNLOADED, ReplayedClients
from pipeline.stages.gateway.shared_listener import SharedListener
from pipeline.stages.gateway.zmq.serving.model import OnlyModel


def run(launch: m.Launch) -> None:
    """Run the stage until `Stop`."""
    share_interpreter()
    heap.unmap_large_blocks()
    stage: Stage[m.GatewayInbox]
    with (
        open_stage(launch, m.GatewayInbox) as stage,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        descriptors.raise_limit(topology.max_open_of_one(launch.settings), stage.log)
        runner.run(GatewayStage(stage, ServedModel.load(stage.model_dir, stage.settings)).serve())


class GatewayStage:
    """The loop, and the supervisor's messages."""

    def __init__(
        self, stage: "Stage[m.GatewayInbox]", model: ServedModel, shared: SharedListener | None = None
    ) -> None:
        """`shared` is the listener of a process that has a stage for each of several models."""
        self._stage = stage
        self._shared = shared
        settings = stage.settings
        self.readiness = Readiness() if shared is None else Readiness(stage.launch.model, shared.server_ends)
        self.requests = RequestTable(stage, model.formats)
        self.health = HealthQuery(stage)
        self._results = ResultHandler(stage, self.requests)
        self._preemption = Preemption(stage, self.requests)
        self.aborter = RequestAborter(stage, self.requests)
        self.stats = StatsQuery(stage)
        self.resetter = PrefixCacheResetter(stage)
        self._sleep_control = SleepControl(stage)
        self._askers: dict[type, Callable[[Any], None]] = {
            m.Health: self.health.handle_reply,
            m.StatsAnswer: self.stats.handle_reply,
            m.SleepSet: self._sleep_control.handle_reply,
            m.PrefixCacheReset: self.resetter.handle_reply,
        }
        self._recovery = Recovery(stage, self.requests, self.aborter, self.resetter)
        self.served_model, defaults = model, model.defaults
        if stage.replica == 0 and defaults != GenerationDefaults():
            stage.log.info("sampling defaults of the model", extra={"fields": msgspec.structs.asdict(defaults)})
        self.limits = limits = RequestLimits(
            settings.served_model_name or model.config.name,
            topology.max_open_of_one(settings),
            has_priorities=settings.schedule.policy == "priority",
            allowed_media_domains=tuple(filter(None, map(normalized_host, settings.gateway.allowed_media_domains))),
            caps=settings.limits,
            formats=self.requests.formats,
            defaults=defaults,
            tasks=model.config.tasks,
            pooler=model.config.pooler or LAST_TOKEN,
            aliases=settings.aliases,
        )
        self._adapters = AdapterRegistry(stage, limits, self.requests.limited_log)
        self.api = Api(
            GatewayParts(
                self.readiness,
                self.requests,
                self.health,
                self.aborter,
                self.stats,
                self.resetter,
                self._sleep_control,
                limits,
                settings.gateway,
                has_keys=self.requests.accounts.keys is not None,
                model=model,
                adapters=self._adapters,
            )
        )
        self._rejection_log = RejectionLog(stage.log)
        self._access_log: AccessLog | None = None
        if shared is not None:
            self._rejection_log = shared.rejection_log
            self.api.responses.access_log = shared.access_log
        elif not stage.replay_context.is_replaying:
            self._access_log = AccessLog.of(settings.access_log, self.requests.accounts.name_of)
            self.api.responses.access_log = self._access_log
        self._traces: Traces | None = None
        if settings.gateway.otlp_traces_endpoint and not stage.replay_context.is_replaying:
            self._traces = Traces(settings.gateway.otlp_traces_endpoint, f"{gethostname()}/{stage.name}", stage.log)
            self.requests.recent.on_kept = self._traces.add
        self._dropped_log = dropped_log(stage.log)
        self._descriptor_watch = descriptors.DescriptorWatch(stage.log)
        self._handlers: dict[str, Handler] = {}
        self._is_stopped = False
        self._tasks: asyncio.TaskGroup
        self._keys = self.requests.accounts.keys
        stage.control_requests.reread_keys = self._reread_keys
        self._listeners = Listeners(
            stage, self.requests, self.api, self._only_model, self._rejection_log, self._access_log
        )
        self._rescaling: m.Rescaled | None = None
        """A change of this gateway's share that is not answered, because more is open."""
        self._draining = Draining(
            stage,
            self.readiness,
            self.requests,
            self.api.responses,
            self._fail_zmq_requests,
            self._listeners.stop_http,
            self._listeners.leave,
            lambda drain: self._tasks.create_task(drain),
        )

    def handler(self, route: Route) -> Handler:
        """That of this model, for a route of the listener that several models share."""
        if route.handler not in self._handlers:
            self._handlers[route.handler] = self.api.handler(route)
        return self._handlers[route.handler]

    async def serve(self) -> None:
        """Listen, report that the stage is ready, and handle messages until `Stop`."""
        if self._stage.launch.facts is not None:  # it replaces a gateway, and connections wait
            self._take_requests(self._stage.launch.facts)
        if self._stage.replay_context.is_replaying:  # no client connects
            context = self._stage.replay_context
            ReplayedClients(context, self.requests, self.aborter, self.resetter, self._preemption, self.limits)
        elif self._shared is None and not self._stage.launch.takes_over:
            await self._listeners.start_http()
        inbox: AsyncInbox[m.GatewayInbox] = AsyncInbox(self._stage.inbox)
        try:
            async with asyncio.TaskGroup() as self._tasks:
                if self._listeners.have_http:
                    await self._listeners.start_zmq(self._tasks)
                self._stage.ready()
                await self._loop(inbox)
                self._fail_zmq_requests(self._end)
        except BaseExceptionGroup as group:
            # Raise the first error itself, not the group.
            raise group.exceptions[0] from group
        finally:
            self.readiness.is_draining = True  # what is still parsed is not opened
            self.requests.close_all(self._end)
            await self.api.responses.wait_closed()
            await self._listeners.close()
            inbox.close()
            self.requests.accounts.close()
            if self._access_log is not None:
                self._access_log.writer.close()
            if self._traces is not None:
                self._traces.close()

    @property
    def _end(self) -> ApiError:
        """What requests get that are open at the end."""
        return UNLOADED if self.readiness.ends_alone else SHUTTING_DOWN

    def _reread_keys(self) -> None:
        """The server's API keys have changed. Requests that are open go on, connections over ZeroMQ with a key that is
        none any more end."""
        if self._keys is not None:
            self.requests.accounts.use(Keys.inherited(self._stage.launch.keys_fd))
            if self._listeners.zmq is not None:
                self._listeners.zmq.drop_unknown_keys()

    def _only_model(self, name: str | None, scope: str) -> OnlyModel:
        """The model of a ZeroMQ connection. Raises ApiError, 404, if it is for another one."""
        account = self.requests.accounts.of_scope(scope)
        limits = self.limits if account is None else self.limits.for_key(account.key.models)
        if name is not None:
            check_model(name, limits)
        return OnlyModel(self.readiness, self.requests, self.limits, self.sleep_control)

    @property
    def sleep_control(self) -> SleepControl | None:
        """For clients that are not at the admin listener; None if there is one."""
        return self._sleep_control if self._stage.settings.gateway.admin_port < 0 else None

    def _fail_zmq_requests(self, error: ApiError) -> None:
        """Streams over ZeroMQ may stay open after their requests have finished, until their clients grant credit."""
        if self._shared is not None:
            self._shared.fail_streams(self, error)
        if self._listeners.zmq is not None:
            self._listeners.zmq.fail_all(error)

    async def _loop(self, inbox: AsyncInbox[m.GatewayInbox]) -> None:
        await inbox.handle_all(self._turn)
        self._draining.cancel()

    def _turn(self, messages: list[m.GatewayInbox]) -> bool:
        """One wake: handle all messages, then write to clients. Returns whether the loop goes on."""
        begin_s = time.monotonic()
        for message in messages:
            self._handle(message)
        self._answer_rescaling()
        self.requests.sender.flush()
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
            case m.Health() | m.StatsAnswer() | m.SleepSet() | m.PrefixCacheReset():
                self._askers[type(message)](message)
            case m.AbortRequests() | m.RequestsAborted():
                self.aborter.handle(message)
            case m.Adapters() | m.AdapterSet():
                self._adapters.handle(message)
            case m.PeerRestarted() | m.FailRequests():
                self._recovery.handle(message)
            case m.Rescaled():
                self._rescaled(message)
            case m.LateStages():
                self.requests.late_stages.update(message)
            case m.Ping(nonce):
                self._pinged(nonce)
            case m.Start(facts):
                self._start(facts)
            case m.Drain() as drain:
                self._draining.end_service(is_leaving=drain.is_leaving)
                if drain.finish != "request":
                    self._results.end_early(EarlyEnds(drain.finish, drain.closing_text))
                self._draining.start(drain.deadline_s, again=drain.is_again, has_successor=drain.has_successor)
            case m.StageDied(stage, reason):
                self.readiness.failure = f"stage {stage} died: {reason}"
                death = ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, self.readiness.failure, code="stage_died")
                self.requests.close_all(death)
                self._fail_zmq_requests(death)
                self._draining.start(0.0)
            case m.Stop():
                self._is_stopped = True
            case _:
                assert_never(message)

    def _pinged(self, nonce: int) -> None:
        """A heartbeat, once a second."""
        self.readiness.pinged_s = time.monotonic()
        self.requests.rejections.flush()
        self.requests.limited_log.flush()
        self.requests.count_usage()
        self.requests.sender.notify()
        self._rejection_log.flush()
        if self._access_log is not None:
            self._access_log.writer.report(self._dropped_log)
            self.requests.metrics.num_log_lines_dropped = self._access_log.writer.num_dropped
        self._descriptor_watch.check()
        self._stage.supervisor.send(m.Pong(nonce, m.GatewayLoad(self.requests.num_open)))

    def _start(self, facts: m.ExecuteFacts) -> None:
        self._take_requests(facts)
        if self._shared is None:  # else other models come and go
            heap.freeze()
            if self._stage.launch.takes_over and not self._stage.replay_context.is_replaying:
                self._tasks.create_task(self._listeners.take_over(self._tasks))

    def _take_requests(self, facts: m.ExecuteFacts) -> None:
        """All stages run: requests are not refused any more."""
        self.readiness.facts = facts
        self.readiness.pinged_s = time.monotonic()
        self.requests.admission.max_prompt_tokens = facts.max_model_len
        self.limits.max_prompt_tokens = facts.max_model_len
        self.limits.vocab_size, self.limits.hidden_size = facts.vocab_size, facts.hidden_size
        self.limits.why_no_images = self.served_model.why_no_images(facts)
        self.requests.hidden_size = facts.hidden_size
        if self._shared is not None:
            self._shared.on_change()

    def _rescaled(self, message: m.Rescaled) -> None:
        """The number of processes of ingest or of the gateway has changed."""
        self._stage.rescaled(message)
        self.requests.rescaled()
        if message.stage != "gateway":
            self._stage.reconnected(message)
            return
        self.limits.max_sequences = self.requests.admission.max_sequences
        descriptors.raise_limit(self.limits.max_sequences, self._stage.log)
        self.api.responses.rescaled(message.num_replicas)
        self._listeners.rescaled()
        self._rescaling = message

    def _answer_rescaling(self) -> None:
        """Answer as soon as no more is open than this gateway's share: then another gateway may have the rest. Called
        in each turn; the supervisor's pings come once a second."""
        admission = self.requests.admission
        fits = admission.num_sequences <= admission.max_sequences and admission.num_bytes <= admission.max_bytes
        fits &= admission.media.num_bytes <= admission.media.max_bytes
        if self._rescaling is not None and fits:
            self._stage.reconnected(self._rescaling)
            self._rescaling = None
