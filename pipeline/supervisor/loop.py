"""The supervisor's event loop: what the stages' processes send, their ends, signals, and deadlines.

    messages, pidfds, signals, admin requests ──► run_until ──► the parts that each of them is for
                                                     └─────────► Stopping, StageKilled: the loop's caller must act

`supervisor.py` runs it through the server's life.
"""

import itertools
import logging
import os
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import assert_never

import msgspec
import zmq

from pipeline.config.load import ConfigError
from pipeline.config.settings import Settings
from pipeline.config.source import SettingsSource
from pipeline.hosts.hosts import Hosts
from pipeline.metrics.stats import ServerStats
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.api_keys import Keys
from pipeline.runtime.channels import Inbox
from pipeline.runtime.control_requests import with_execute_facts
from pipeline.runtime.suspension import Suspension
from pipeline.runtime.topology import SUPERVISOR
from pipeline.supervisor.admin_server import AdminServer, Answers, Questions, ReloadDone
from pipeline.supervisor.changed_settings import Change, changes, to_restart, to_scale
from pipeline.supervisor.children import ChildTable
from pipeline.supervisor.crash_reports import CrashReports
from pipeline.supervisor.health import HealthChecks
from pipeline.supervisor.heartbeats import Heartbeats
from pipeline.supervisor.process import Child
from pipeline.supervisor.resources import SharedResources
from pipeline.supervisor.restarts import LIVING, Restarts
from pipeline.supervisor.run_mode import RunMode
from pipeline.supervisor.scaling import Scaling
from pipeline.supervisor.signals import TerminationSignals
from pipeline.supervisor.stage_processes import StageProcesses
from pipeline.supervisor.stats_collector import ServerFacts, StatsCollector

EXIT_OK = 0
EXIT_NOT_STARTED = 1
EXIT_STAGE_DIED = 3
LAST_MESSAGES_S = 0.5
"""Maximum time to wait for the last messages of a child that has ended."""
KEYS_S = 5.0
"""Time for a gateway to read changed API keys."""
POLL_S = 1.0
"""Deadlines are checked at least this often."""


class Stopping(Exception):
    """A signal came, a stage ended, or a deadline passed. `code` is the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class StageKilled(Exception):
    """A signal has ended a stage's process before the server was ready."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")


class SupervisorLoop:
    """Owns the supervisor's inbox, the table of children, and what answers questions about them."""

    def __init__(
        self,
        settings: Settings,
        run_mode: RunMode,
        resources: SharedResources,
        listeners: list[socket.socket],
        admins: list[socket.socket],
        url: str,
        log: logging.Logger,
    ) -> None:
        """`listeners` has one socket for each gateway, in order; each is closed when its gateway has drained. So has
        `admins`, unless it is empty."""
        self._listeners = listeners
        self._url = url
        self._run_mode = run_mode
        self._log = log
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        tcp = resources.tcp.of_process(SUPERVISOR)
        if tcp is not None:  # the inbox closes its descriptor
            tcp = msgspec.structs.replace(tcp, listen_fd=os.dup(tcp.listen_fd))
        self._inbox: Inbox[m.SupervisorInbox] = Inbox(
            self._context, resources.addresses[SUPERVISOR], m.SupervisorInbox, tcp=tcp
        )
        self.poller = zmq.Poller()
        self.reasons: dict[str, str] = {}
        """Why stages failed, in their own words."""
        self.hosts = Hosts(resources, self._inbox, self._context, log, lambda name: self.reasons.pop(name, ""))
        self.hosts.receive = self._receive
        self.table = ChildTable(settings, run_mode, self._context, self.poller, self.hosts)
        self._resources = resources
        self._restarts = Restarts(run_mode, resources, self.table, self._inbox, log)
        self._restarts.is_placed = self.hosts.is_placed
        self.hosts.on_ready = self._restarts.placed
        self.crash_reports = CrashReports(settings, resources.black_boxes, log, is_on=not run_mode.inline)
        self.facts: m.ExecuteFacts | None = None
        self.prepared: m.Prepared | None = None
        self.drained: set[str] = set()
        """Names of gateways."""
        self.is_serving = False
        self.is_ending = False
        self.first_health: m.Health | None = None
        self._heartbeats = Heartbeats(self.table.ping, 0.0, self.table.tell_gateways, log)
        self._health_checks = HealthChecks(
            self.table.ping, self._answer_health, self._heartbeats.is_computing, self._heartbeats.is_late
        )
        self._use(settings)
        self._processes = StageProcesses(
            resources, self.table, self._inbox, self._restarts, listeners, admins, log, self._use, self._forget
        )
        self._scaling = Scaling(self._processes)
        self._suspension = Suspension()
        self._is_reloading = False
        self._source = run_mode.source
        """Where the settings come from."""
        self._questions = Questions(
            lambda name, request: self.table.outboxes[name].send(with_execute_facts(request, self.facts))
        )
        server = resources.server
        self._stats_collector = StatsCollector(server, SUPERVISOR, self._questions, self._heartbeats.is_computing)
        self._admin_server = AdminServer(
            self._context,
            server,
            self._questions,
            self._gather_stats,
            self.table.names_of_ready,
            self._restart,
            self._reload,
            lambda: self._source,
            self._restarts.spans.trace,
        )
        self._signals = TerminationSignals()
        self.poller.register(self._inbox.fileno(), zmq.POLLIN)
        self.poller.register(self._signals.fileno(), zmq.POLLIN)
        self.poller.register(self._admin_server.fileno(), zmq.POLLIN)

    def check_health(self, timeout_s: float) -> None:
        """Ask every stage for an answer; `first_health` is set when all have answered, or after the timeout."""
        self._health_checks.start(SUPERVISOR, 0, timeout_s, self.table.children.values())

    def forget(self, names: Sequence[str]) -> None:
        """Processes of a start that failed: remove them, and drop what they have sent."""
        for name in names:
            if name in self.table.children:
                self.table.remove(self.table.children[name])
            self._inbox.replaced(name, self._resources.incarnations[name])
        self._health_checks.clear()
        self.facts = self.first_health = None
        self._resources.backends.clear()
        self.reasons.clear()

    def close(self) -> None:
        """Kill the children that are left and free everything. The resources belong to the caller."""
        self._restarts.planned.close()
        self.table.close()
        self.hosts.close()
        self.crash_reports.close()
        self._signals.close()
        self._inbox.close()
        self._admin_server.close()
        self._context.term()

    def _receive(self, timeout_s: float) -> None:
        """Handle messages, and wait for one."""
        self._inbox.wait(timeout_s)
        self.drain_inbox()

    # --------------------------------------------------------------------------------------------------- children

    def _check_hosts(self) -> None:
        """Notice hosts that are lost. Raises Stopping if the executor can't run any more."""
        self.hosts.turn()
        if not (problem := self.hosts.problem):
            return
        if not self.is_serving:
            self._log.error(f"cannot start: {problem}")
            raise Stopping(EXIT_NOT_STARTED)
        self._log.error(f"the executor can't be restarted: {problem}")
        self.reasons = {topology.EXECUTE: problem}
        raise Stopping(EXIT_STAGE_DIED)

    def _check_children(self) -> None:
        """Restart stages that have ended and should be running. Raises Stopping if one can't be restarted."""
        for child in list(self.table.children.values()):
            if child.state not in LIVING or child.is_alive or not self.table.is_watched(child):
                continue
            self._receive_last_messages(child)
            if child.stage == "prepare" and self.prepared is not None:
                continue
            if child.name in self.drained:
                self.table.mark_dead(child)
                continue
            if child.state == "leaving" and not self._scaling.owns(child.name):
                self.drained.add(child.name)  # the server ends
                self.table.mark_dead(child)
                continue
            reason = self.reasons.pop(child.name, child.describe_end())
            self._questions.lost(child.name)
            if self._scaling.died(child.name, reason):
                self._left(child, reason)
                continue
            is_asked_for = self._restarts.planned.has_killed(child.name)
            fields = {} if is_asked_for else self.crash_reports.died(child, reason)
            if not self.is_serving:
                self.table.mark_dead(child)
                if (child.exit_code or 0) < 0 and child.stage != "prepare":
                    raise StageKilled(child.name, reason)
                self._log.error(f"cannot start: {child.stage}: {reason}", extra={"fields": fields})
                raise Stopping(EXIT_NOT_STARTED)
            why_not = self._restarts.died(child, reason)
            if not is_asked_for:
                text = f"{child.name} died: {reason}{f'; not restarted: {why_not}' if why_not else ''}"
                self._log.error(text, extra={"fields": fields})
            if why_not:
                self.reasons = {child.name: reason}
                self.table.mark_dead(child)
                raise Stopping(EXIT_STAGE_DIED)
            for name in topology.lives_with(self._resources.settings, child.name):
                self._questions.lost(name)
                self._heartbeats.lost(name)

    def _left(self, child: Child, reason: str) -> None:
        """A process that was being added or removed has ended: it is not restarted."""
        self.table.unwatch(child)
        if child.exit_code:
            fields = self.crash_reports.died(child, reason)
            self._log.error(f"{child.name} died while it was {child.state}: {reason}", extra={"fields": fields})

    def _receive_last_messages(self, child: Child) -> None:
        """Wait for the messages that a child sent before it ended: they may still be on the way."""
        if child.state == "leaving":
            self.drain_inbox()
            return
        end = time.monotonic() + LAST_MESSAGES_S
        self.drain_inbox()

        def is_complete() -> bool:  # prepare's last message is its result, and it exits with 0
            return child.name in self.reasons or (child.stage == "prepare" and self.prepared is not None)

        while not is_complete() and (child.exit_code or 0) >= 0:
            left_s = end - time.monotonic()
            if left_s <= 0 or not self._inbox.wait(left_s):
                return
            self.drain_inbox()

    def run_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Run the loop until a condition holds. Raises Stopping if a signal, a stage's end or the deadline is first;
        StageKilled if a signal ends a stage before the server is ready."""
        end = time.monotonic() + timeout_s
        self._suspension.begin()
        while True:
            if seconds := self._suspension.turn():
                end += seconds
                self._suspended(seconds)
            self.drain_inbox()
            if condition():
                return
            if number := self._signals.take():
                if self.is_serving:
                    raise Stopping(EXIT_OK)
                self._log.info(f"stopped by {signal.Signals(number).name} during the start")
                raise Stopping(128 + number)
            self._check_hosts()
            self._check_children()
            self._health_checks.end_rounds(self.table.children.values())
            if self.is_serving:
                self._heartbeats.turn(self.table.children.values())
                assert self.prepared is not None and self.facts is not None
                self._restarts.turn(self.prepared.model_dir, self.facts)
                self._processes.turn(self.prepared.model_dir, self.facts)
                self._scaling.turn()
            self._admin_server.turn()
            self.crash_reports.turn(self.table.children.values())
            self._questions.end_late()
            now = time.monotonic()
            if now >= end:
                children = self.table.children.values()
                late = ", ".join(child.name for child in children if child.state == "starting" and child.has_begun)
                self._log.error(f"timed out after {timeout_s:g} s waiting for {what}{f': {late}' if late else ''}")
                raise Stopping(EXIT_OK if self.is_serving else EXIT_NOT_STARTED)
            if self._inbox.wait(0) or self._admin_server.has_message():
                continue  # the descriptors are edge-triggered, so check before sleeping
            deadlines = (
                self._health_checks.deadlines,
                self._heartbeats.deadlines,
                self._questions.deadlines,
                self._restarts.deadlines,
                self._processes.deadlines,
                self._scaling.deadlines,
            )
            soonest = min([end, now + POLL_S, *itertools.chain(*deadlines)])
            self.poller.poll(max(0, round((soonest - now) * 1000)))

    def _suspended(self, seconds: float) -> None:
        """This process did not run for so long: no deadline of others passes because of that."""
        self._log.info("was suspended", extra={"fields": {"seconds": f"{seconds:.1f}"}})
        for part in (self._heartbeats, self._health_checks, self._restarts, self._scaling, self.hosts):
            part.suspended(seconds)

    def drain_inbox(self) -> None:
        while (message := self._inbox.receive()) is not None:
            if isinstance(message, m.HostReport):
                self.hosts.handle(message, self._inbox.last_sender)
            else:
                self._handle(message, self._inbox.last_sender)

    def _handle(self, message: m.StageReport, sender: str) -> None:
        match message:
            case m.Ready(facts):
                child = self.table.children[sender]
                self._log.debug("ready", extra={"fields": {"stage": sender}})
                if child.state == "joining":
                    assert self.facts is not None
                    self.table.outboxes[sender].send(m.Start(self.facts))
                    self._scaling.ready(sender)
                    return
                is_successor, child.state = child.state == "recovering", "ready"
                self._learn(facts, sender)
                if is_successor:
                    assert self.facts is not None
                    self._restarts.ready(child, self.facts)
                    self._admin_server.trace_successor(sender)
                    if self.is_ending and child.stage == "gateway":
                        self.table.outboxes[sender].send(m.Drain(self._resources.settings.supervisor.drain_timeout_s))
            case m.Reconnected(epoch):
                self._restarts.answered(sender, epoch)
                self._scaling.answered(sender, epoch)
            case m.StageFailed(reason):
                self.reasons[sender] = reason
            case m.Prepared():
                self._prepared(message, sender)
            case m.SetAdapter():
                self._set_adapter(message, sender)
            case m.Drained():
                self._drained(sender)
            case m.AskHealth(nonce):
                timeout_s = self._resources.settings.supervisor.health_timeout_s
                self._health_checks.start(sender, nonce, timeout_s, self.table.children.values())
            case m.Pong(nonce, load):
                self._heartbeats.answered(sender)
                if self._processes.is_idle(sender, load):
                    self._scaling.drained(sender)
                self._health_checks.answered(nonce, sender, message, self.table.children.values())
            case m.AskServerStats(nonce):
                self._gather_stats(float("inf"), lambda stats: self.table.reply(sender, m.StatsAnswer(nonce, stats)))
            case m.Answer():
                self._questions.answered(sender, message)
            case _:
                assert_never(message)

    def _learn(self, facts: m.ExecuteFacts | None, sender: str) -> None:
        """An executor is ready, perhaps one of several ranks; other stages have no facts."""
        if facts is not None:
            backends = self._resources.backends
            backends[sender] = facts.backend
            self.facts = msgspec.structs.replace(facts, backend=m.Backend.of_ranks(backends.values()))

    def _prepared(self, message: m.Prepared, sender: str) -> None:
        """The model is prepared, on this host or on another one."""
        if topology.is_remote(self._resources.settings, sender):
            self.hosts.prepared(sender, message)
            return
        self.prepared = message
        self.hosts.prepared_here(message.digest)
        self._resources.hold_model(message.model_dir)
        self._resources.adapters = {one.name: one for one in message.adapters}

    def _drained(self, name: str) -> None:
        if not self.is_ending or not name.startswith("gateway."):
            self._restarts.planned.drained(name)
            self._scaling.drained(name)
            return
        self.drained.add(name)
        # New connections are refused instead of waiting in the backlog.
        self._listeners[topology.replica_of(name)].close()

    def _set_adapter(self, message: m.SetAdapter, sender: str) -> None:
        """Clients may use an adapter, or no longer."""
        adapter, adapters = message.adapter, self._resources.adapters
        if adapter.id:
            adapters[adapter.name] = adapter
        else:
            adapters.pop(adapter.name, None)
        self._log.info("adapter" if adapter.id else "adapter removed", extra={"fields": {"name": adapter.name}})
        self.tell_adapters()
        self.table.reply(sender, m.AdapterSet(message.nonce))

    def tell_adapters(self) -> None:
        """Tell all gateways which adapters clients may use, and the executor, which loads them before they are used."""
        adapters = list(self._resources.adapters.values())
        for name in (topology.EXECUTE, *topology.among(self.table.children, "gateway")):
            self.table.reply(name, m.Adapters(adapters))

    # -------------------------------------------------------------------------------------------- stats and health

    def _gather_stats(self, timeout_s: float, then: Callable[[ServerStats], None]) -> None:
        """Collect stats; waits for stages at most `timeout_s`, and at most supervisor.health_timeout_s."""
        timeout_s = min(timeout_s, self._resources.settings.supervisor.health_timeout_s)
        name = self._resources.settings.served_model_name or (self.prepared.model_name if self.prepared else "")
        state = "draining" if self.is_ending else "serving" if self.is_serving else "starting"
        facts = ServerFacts(
            name,
            self._url,
            state,
            self.facts,
            {one.name: one.id for one in self._resources.adapters.values()},
            self._resources.keys.usage(),
        )
        self._stats_collector.gather(facts, self.table.in_flow_order(), timeout_s, then)

    def _restart(self, name: str, done: Callable[[float, str], None]) -> None:
        """Restart a stage that is ready."""
        if not self.is_serving or self.is_ending:
            done(0.0, "the server is starting or shutting down")
        else:
            self._restarts.planned.ask(name, "pipeline restart", done)

    def _forget(self, name: str) -> None:
        """A process is going to be removed."""
        self._heartbeats.forget(name)
        self._questions.lost(name)
        self._stats_collector.forget(name)

    def end_scaling(self) -> None:
        """The server ends: nothing is added or removed any more."""
        self._scaling.cancel()

    def _use(self, settings: Settings) -> None:
        """Use these settings from now on, and for processes that start."""
        self._resources.settings = self.table.settings = self.crash_reports.settings = settings
        supervisor = settings.supervisor
        self._restarts.budget.max_restarts = supervisor.max_restarts
        self._heartbeats.timeout_s = self._run_mode.patience_s(supervisor.health_timeout_s)
        self._heartbeats.hang_timeout_s = 0.0 if self._run_mode.is_debugged else supervisor.hang_timeout_s

    def _reload(
        self,
        settings: Settings,
        source: SettingsSource,
        is_dry_run: bool,
        done: ReloadDone,
    ) -> None:
        """Change the settings, add and remove processes, and restart the stages that use them, one process after the
        other. If one of them can't be started, the settings stay as they were, except the numbers of processes that
        have changed before."""
        before = self._resources.settings
        changed = changes(before, settings)
        if any(one.refusal for one in changed):
            done(changed, "", "")
            return
        if not is_dry_run and (not self.is_serving or self.is_ending or self._is_reloading):
            done(changed, "the server is starting, reloading or shutting down", "")
            return
        try:  # always: the files of the keys may have changed
            api_keys, warnings = self._resources.keys.read_again(settings)
        except ConfigError as error:
            self._log.error("the API keys stay as they were", extra={"fields": {"why": str(error)}})
            done(changed, str(error), "")
            return
        if is_dry_run:
            done(changed, "", self._resources.keys.change_to(api_keys))
            return
        for warning in warnings:
            self._log.warning(warning)
        if not changed:
            self._use_keys(api_keys, changed, done)
            return
        to_change = to_scale(changed)
        if to_change and self._run_mode.is_debugged:
            done(changed, "the number of processes is fixed while stages are debugged", "")
            return
        self._is_reloading = True
        self._use(_with_replicas_of(before, settings))
        keys = ",".join(one.key for one in changed)
        self._log.info("reloading", extra={"fields": {"changed": keys}})
        self._restarts.spans.begin("server", "reloads", changed=keys)
        names = [name for stage in to_restart(changed) for name in topology.replicas_of(settings, stage)]
        names = [name for name in names if name == topology.lives_with(settings, name)[-1]]

        def go_on() -> None:
            if to_change:
                stage, num = to_change.pop(0)
                now, limits = topology.num_replicas(self._resources.settings, stage), settings.supervisor
                self._scaling.ask(
                    stage,
                    now,
                    num,
                    limits.start_timeout_s,
                    limits.drain_timeout_s,
                    lambda problem: ended(f"{stage}.replicas stays {now}: {problem}" if problem else ""),
                )
            elif names:
                name = names.pop(0)
                self._restarts.planned.ask(
                    name,
                    f"pipeline reload: {keys}",
                    lambda _, problem: ended(f"{name} was not restarted: {problem}" if problem else ""),
                )
            else:
                self._is_reloading = False
                self._restarts.spans.end("server")
                self._source = source
                self._use_keys(api_keys, changed, done)

        def ended(problem: str) -> None:
            if not problem:
                go_on()
                return
            self._is_reloading = False
            self._restarts.spans.end("server", problem=problem)
            now = self._resources.settings
            self._use(_with_replicas_of(now, before))
            scaled = [
                f"{stage}.replicas is {topology.num_replicas(now, stage)} now"
                for stage in topology.SCALABLE
                if topology.num_replicas(now, stage) != topology.num_replicas(before, stage)
            ]
            done(changed, "; ".join((problem, *scaled)), "")

        go_on()

    def _use_keys(self, keys: Keys | None, changed: list[Change], done: ReloadDone) -> None:
        """The last part of a reload: have all gateways accept these API keys, if they differ."""
        change = self._resources.keys.change_to(keys)
        if keys is None or not change:
            done(changed, "", "")
            return
        self._resources.keys.use(keys)
        self._log.info("changed API keys", extra={"fields": {"keys": change}})
        gateways = topology.among(self.table.names_of_ready(), "gateway")

        def then(answers: Answers) -> None:
            late = [name for name in gateways if name not in answers or answers[name].error]
            done(changed, f"{', '.join(late)} did not answer: restart it" if late else "", change)

        self._questions.ask(gateways, m.RereadKeys(0), KEYS_S, then)

    def _answer_health(self, asker: str, health: m.Health) -> None:
        if asker == SUPERVISOR:
            self.first_health = health
        else:
            self.table.reply(asker, health)


def _with_replicas_of(source: Settings, settings: Settings) -> Settings:
    """Settings with the numbers of processes of others."""
    for stage in topology.SCALABLE:
        settings = topology.with_replicas(settings, stage, topology.num_replicas(source, stage))
    return settings
