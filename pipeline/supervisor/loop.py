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

from pipeline.config.settings import Settings
from pipeline.hosts.hosts import Hosts
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.control_requests import with_execute_facts
from pipeline.runtime.process.suspension import Suspension
from pipeline.runtime.topology import SUPERVISOR
from pipeline.runtime.transport.inbox import Inbox
from pipeline.supervisor.admin.admin_server import AdminServer
from pipeline.supervisor.admin.questions import Questions
from pipeline.supervisor.admin.stats_collector import StatsCollector
from pipeline.supervisor.crashes.crash_reports import CrashReports
from pipeline.supervisor.processes.children import ChildTable
from pipeline.supervisor.processes.fork_server import ForkServer
from pipeline.supervisor.processes.health import HealthChecks
from pipeline.supervisor.processes.heartbeats import HEARTBEAT_S, Heartbeats
from pipeline.supervisor.reconfigure.adapters import Adapters
from pipeline.supervisor.reconfigure.reload import Reloads
from pipeline.supervisor.reconfigure.scaling import Scaling
from pipeline.supervisor.reconfigure.stage_processes import StageProcesses
from pipeline.supervisor.restart.restarts import Restarts
from pipeline.supervisor.restart.server_restart import AskRestart
from pipeline.supervisor.restart.sleep import Sleeper
from pipeline.supervisor.restart.stage_deaths import StageDeaths
from pipeline.supervisor.run_mode import RunMode
from pipeline.supervisor.server_state import ServerState
from pipeline.supervisor.shared.resources import SharedResources
from pipeline.supervisor.signals import StopSignals, TerminationSignals
from pipeline.supervisor.stopping import EXIT_NOT_STARTED, EXIT_OK, EXIT_STAGE_DIED, Stopping


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
        restart_server: AskRestart,
        fork_server: ForkServer | None = None,
    ) -> None:
        """`listeners` has one socket for each gateway, in order; each is closed when its gateway has drained. So has
        `admins`, unless it is empty."""
        self._listeners = listeners
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
        self.state = ServerState()
        self.hosts = Hosts(resources, self._inbox, self._context, log, lambda name: self.state.reasons.pop(name, ""))
        self.hosts.receive = self._receive
        self.table = ChildTable(settings, run_mode, self._context, self.poller, self.hosts, fork_server)
        self._resources = resources
        self._restarts = Restarts(run_mode, resources, self.table, self._inbox, log)
        self._restarts.has_host = self.hosts.has_host
        self.hosts.on_ready = self._restarts.hosts_found
        self.crash_reports = CrashReports(settings, resources.black_boxes, log, is_on=not run_mode.inline)
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
        self._questions = Questions(
            lambda name, request: self.table.outboxes[name].send(with_execute_facts(request, self.state.facts))
        )
        self._sleeper = Sleeper(run_mode, resources, self.state, self.table, self._restarts, self._falls_asleep, log)
        self._deaths = StageDeaths(
            resources,
            self.state,
            self.table,
            self._inbox,
            self.drain_inbox,
            self._restarts,
            self._scaling,
            self._questions,
            self._heartbeats,
            self._sleeper,
            self.crash_reports,
            log,
        )
        self.reloads = Reloads(
            run_mode,
            resources,
            self.state,
            self.table,
            self._restarts,
            self._scaling,
            self._questions,
            self._use,
            log,
        )
        self.adapters = Adapters(resources, self.table, log)
        self._stats_collector = StatsCollector(
            *(resources, self.state, self.table, url, self._questions, self._heartbeats.is_computing),
            lambda: self._sleeper.counts,
        )
        self._admin_server = AdminServer(
            self._context,
            resources.server,
            self._questions,
            self._stats_collector.gather,
            self.table.names_of_ready,
            self._restart,
            self.reloads.ask,
            lambda: self.reloads.source,
            self._restarts.spans.trace,
            self._sleeper.change,
            restart_server,
        )
        self._signals: StopSignals = TerminationSignals() if run_mode.model is None else run_mode.model.signals
        for fd in (self._inbox.fileno(), self._signals.fileno(), self._admin_server.fileno()):
            self.poller.register(fd, zmq.POLLIN)

    @property
    def is_asleep(self) -> bool:
        """Whether the executor is away, or about to leave or to come back."""
        return self._sleeper.phase != "awake"

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
        self.state.facts = self.state.first_health = None
        self._resources.backends.clear()
        self.state.reasons.clear()

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
        if not self.state.is_serving:
            self._log.error(f"cannot start: {problem}")
            raise Stopping(EXIT_NOT_STARTED)
        self._log.error(f"the executor can't be restarted: {problem}")
        self.state.reasons = {topology.EXECUTE: problem}
        raise Stopping(EXIT_STAGE_DIED)

    def run_until(self, condition: Callable[[], bool], timeout_s: float, what: str, setting: str = "") -> None:
        """Run the loop until a condition holds. Raises Stopping if a signal, a stage's end or the deadline is first;
        StageKilled if a signal ends a stage before the server is ready. `setting` is that of the deadline, which waits
        while the executor compiles."""
        turned = time.monotonic()
        end = turned + timeout_s
        self._suspension.begin()
        while True:
            if seconds := self._suspension.turn():
                end += seconds
                self._suspended(seconds)
            passed_s, turned = time.monotonic() - turned, time.monotonic()
            if not seconds:
                end += self._compiled(passed_s)
            self.drain_inbox()
            if condition():
                return
            if number := self._signals.take():
                if self.state.is_serving:
                    raise Stopping(EXIT_OK)
                self.table.end_starting()  # first: a progress bar ends its line
                self._log.info(f"stopped by {signal.Signals(number).name} during the start")
                raise Stopping(128 + number)
            self._check_hosts()
            self.table.turn()
            self._deaths.check()
            self._health_checks.end_rounds(self.table.children.values())
            if self.state.is_serving:
                self._heartbeats.turn(self.table.children.values())
                assert self.state.prepared is not None and self.state.facts is not None
                self._restarts.turn(self.state.prepared.model_dir, self.state.facts)
                self._processes.turn(self.state.prepared.model_dir, self.state.facts)
                self._scaling.turn()
                self._sleeper.turn()
                if self._run_mode.model is not None:
                    self._run_mode.model.take_turn(self._sleeper)
            self._admin_server.turn()
            self.crash_reports.turn(self.table.children.values())
            self._questions.end_late()
            now = time.monotonic()
            if now >= end:
                children = self.table.children.values()
                late = ", ".join(child.name for child in children if child.state == "starting" and child.has_begun)
                words = f"timed out after {timeout_s:g} s waiting for {what}{f': {late}' if late else ''}"
                self._log.error(words + (f"; if this machine needs longer, raise {setting}" if setting else ""))
                raise Stopping(EXIT_OK if self.state.is_serving else EXIT_NOT_STARTED)
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
            looks_often = self.hosts.num_hosts or not self.state.is_serving
            rest_s = HEARTBEAT_S if looks_often else self._heartbeats.rest_s
            soonest = min([end, now + rest_s, *itertools.chain(*deadlines)])
            self._suspension.sleep(soonest - now - HEARTBEAT_S)
            self.poller.poll(max(0, round((soonest - now) * 1000)))

    def _suspended(self, seconds: float) -> None:
        """This process did not run for so long: no deadline of others passes because of that."""
        self._log.info("was suspended", extra={"fields": {"seconds": f"{seconds:.1f}"}})
        for part in (self._heartbeats, self._health_checks, self._restarts, self._scaling, self.hosts):
            part.suspended(seconds)

    def _compiled(self, seconds: float) -> float:
        """How much of the last turn does not count, because executors compiled before it."""
        compiling = [child for child in self.table.children.values() if child.is_compiling and child.is_alive]
        for child in compiling:
            child.suspended_s += seconds
        return seconds if compiling else 0.0

    def drain_inbox(self) -> None:
        while (message := self._inbox.receive()) is not None:
            if isinstance(message, m.HostReport):
                self.hosts.handle(message, self._inbox.last_sender)
            else:
                self._handle(message, self._inbox.last_sender)

    def _handle(self, message: m.StageReport, sender: str) -> None:
        match message:
            case m.Ready(facts):
                self._ready(sender, facts)
            case m.Reconnected(epoch):
                self._restarts.answered(sender, epoch)
                self._scaling.answered(sender, epoch)
            case m.Compiling(is_running):
                self.table.children[sender].is_compiling = is_running
            case m.Cleared(request_ids):
                self._resources.crash_counts.cleared(request_ids)
            case m.StageFailed(reason):
                self.state.reasons[sender] = reason
            case m.Prepared():
                self._prepared(message, sender)
            case m.SetAdapter():
                self.adapters.set(message, sender)
            case m.Drained():
                self._drained(sender)
            case m.AskHealth(nonce):
                timeout_s = self._resources.settings.supervisor.health_timeout_s
                self._health_checks.start(sender, nonce, timeout_s, self.table.children.values())
            case m.Pong(nonce, load):
                self._heartbeats.answered(sender, load.num_open_requests if isinstance(load, m.GatewayLoad) else 0)
                if self._processes.is_idle(sender, load):
                    self._scaling.drained(sender)
                self._health_checks.answered(nonce, sender, message, self.table.children.values())
            case m.AskServerStats(nonce):
                self._stats_collector.gather(
                    float("inf"), lambda stats: self.table.reply(sender, m.StatsAnswer(nonce, stats))
                )
            case m.SetSleep() | m.AskSleep() | m.KVSaved() | m.WakeRequested():
                self._sleeper.handle(message, sender)
            case m.Answer():
                self._questions.answered(sender, message)
            case _:
                assert_never(message)

    def _ready(self, sender: str, facts: m.ExecuteFacts | None) -> None:
        child = self.table.children[sender]
        self._log.debug("ready", extra={"fields": {"stage": sender}})
        if child.state == "joining":
            assert self.state.facts is not None
            self.table.outboxes[sender].send(m.Start(self.state.facts))
            self._scaling.ready(sender)
            return
        is_successor, child.state = child.state in ("recovering", "waking"), "ready"
        self._learn(facts, sender)
        if is_successor:
            assert self.state.facts is not None
            self._restarts.ready(child, self.state.facts)
            self._sleeper.ready(sender)
            self._admin_server.trace_successor(sender)
            if self.state.is_ending and child.stage == "gateway":
                self.table.outboxes[sender].send(m.Drain(self._resources.settings.supervisor.drain_timeout_s))

    def _learn(self, facts: m.ExecuteFacts | None, sender: str) -> None:
        """An executor is ready, perhaps one of several ranks; other stages have no facts."""
        if facts is not None:
            backends = self._resources.backends
            backends[sender] = facts.backend
            self.state.facts = msgspec.structs.replace(facts, backend=m.Backend.of_ranks(backends.values()))

    def _prepared(self, message: m.Prepared, sender: str) -> None:
        """The model is prepared, on this host or on another one."""
        if topology.is_remote(self._resources.settings, sender):
            self.hosts.prepared(sender, message)
            return
        self.state.prepared = message
        self.hosts.prepared_here(message.digest)
        self._resources.hold_model(message.model_dir)
        self._resources.adapters = {one.name: one for one in message.adapters}

    def _drained(self, name: str) -> None:
        if not self.state.is_ending or not name.startswith("gateway."):
            self._restarts.planned.drained(name)
            self._scaling.drained(name)
            return
        self.state.drained.add(name)
        if not self.state.keeps_sockets:  # new connections are refused instead of waiting in the backlog
            self._listeners[topology.replica_of(name)].close()

    # -------------------------------------------------------------------------------------------- stats and health

    def _restart(self, name: str, done: Callable[[float, str], None]) -> None:
        """Restart a stage that is ready."""
        if not self.state.takes_changes:
            done(0.0, "the server is starting or shutting down")
        else:
            self._restarts.planned.ask(name, "pipeline restart", done)

    def _falls_asleep(self, name: str) -> None:
        """A process is going to end, since the server sleeps."""
        self._heartbeats.forget(name)
        self._questions.lost(name)

    def _forget(self, name: str) -> None:
        """A process is going to be removed."""
        self._falls_asleep(name)
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

    def _answer_health(self, asker: str, health: m.Health) -> None:
        health = msgspec.structs.replace(health, reason=self._sleeper.problem)
        if asker == SUPERVISOR:
            self.state.first_health = health
        else:
            self.table.reply(asker, health)
