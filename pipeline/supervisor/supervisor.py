"""The supervisor: starts the stages, watches them, and stops them in flow order.

    start prepare, then all ──► Prepared ──► begin all ──► Ready from each ──► Start to each ──► serving
                                                                                                    │
      exit 0 ◄── Stop, in flow order ◄── Drained ◄── Drain to the gateway ◄─────────────────────────┤ SIGINT, SIGTERM
      exit 3 ◄── Stop, in flow order ◄── Drained ◄── StageDied to the gateway ◄─────────────────────┘ a stage ends
                                                                                                      once too often

The stages' processes import their code while prepare runs, and begin when the model's folder is known. A stage that
dies while the server serves is restarted (restarts.py).

Nothing outlives it: its children die with it (see process.py), sockets are abstract, shared memory is anonymous.
"""

import itertools
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import assert_never

import zmq

from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.metrics.stats import ServerStats
from pipeline.runtime import api_keys, topology
from pipeline.runtime import messages as m
from pipeline.runtime.channels import Inbox
from pipeline.runtime.control_requests import with_execute_facts
from pipeline.runtime.run_mode import RunMode
from pipeline.runtime.topology import SUPERVISOR
from pipeline.supervisor import gpu
from pipeline.supervisor.admin_server import AdminServer, Questions
from pipeline.supervisor.children import ChildTable
from pipeline.supervisor.crash_reports import CrashReports
from pipeline.supervisor.health import HealthChecks
from pipeline.supervisor.heartbeats import Heartbeats
from pipeline.supervisor.inline import InlineChild
from pipeline.supervisor.listeners import url_of, zmq_address
from pipeline.supervisor.process import Child
from pipeline.supervisor.resources import SharedResources
from pipeline.supervisor.restarts import LIVING, Restarts
from pipeline.supervisor.signals import TerminationSignals
from pipeline.supervisor.stats_collector import ServerFacts, StatsCollector
from pipeline.version import VERSION

EXIT_OK = 0
EXIT_NOT_STARTED = 1
EXIT_STAGE_DIED = 3
NOTIFY_CLIENTS_S = 2.0
"""Maximum time for the gateway to notify its clients that a stage has died."""
LAST_MESSAGES_S = 0.5
"""Maximum time to wait for the last messages of a child that has ended."""
MIN_STOP_S = 0.3
"""Each stage gets this long to stop, even if others have used up the timeout."""
POLL_S = 1.0
"""Deadlines are checked at least this often."""


class Stopping(Exception):
    """A signal came, a stage ended, or a deadline passed. `code` is the exit code."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Supervisor:
    """Runs the loop that starts, watches and stops the stages."""

    def __init__(
        self,
        settings: Settings,
        listeners: list[socket.socket],
        log: logging.Logger,
        run_mode: RunMode | None = None,
        keys: api_keys.Keys | None = None,
        admins: Sequence[socket.socket] = (),
    ) -> None:
        self._settings = settings
        self._run_mode = run_mode or RunMode()
        self._listeners = listeners
        """One for each gateway, in the same order."""
        self._gateways = topology.replicas_of(settings, "gateway")
        self._admins = admins
        """One for each gateway, or empty."""
        self._url = url_of(listeners[0], "https" if settings.gateway.ssl_certfile else "http")
        self._log = log
        self._resources = SharedResources(settings, listeners, admins, keys)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._inbox: Inbox[m.SupervisorInbox] = Inbox(
            self._context, self._resources.addresses[SUPERVISOR], m.SupervisorInbox
        )
        self._poller = zmq.Poller()
        self._table = ChildTable(settings, self._run_mode, self._context, self._poller)
        self._restarts = Restarts(settings, self._run_mode, self._resources, self._table, self._inbox, log)
        is_inline = self._run_mode.inline
        self._crash_reports = CrashReports(settings, self._resources.black_boxes, log, is_on=not is_inline)
        self._facts: m.ExecuteFacts | None = None
        self._prepared: m.Prepared | None = None
        self._reasons: dict[str, str] = {}
        self._drained: set[str] = set()
        """Names of gateways."""
        self._is_serving = False
        self._is_ending = False
        self._first_health: m.Health | None = None
        self._health_checks = HealthChecks(self._table.ping_all, self._answer_health)
        answer_s = self._run_mode.patience_s(settings.supervisor.health_timeout_s)
        hang_s = 0.0 if self._run_mode.is_debugged else settings.supervisor.hang_timeout_s
        self._heartbeats = Heartbeats(self._table.ping, answer_s, self._table.tell_gateways, log, hang_timeout_s=hang_s)
        self._questions = Questions(
            lambda name, request: self._table.outboxes[name].send(with_execute_facts(request, self._facts))
        )
        server = self._resources.server
        self._stats_collector = StatsCollector(server, SUPERVISOR, self._questions)
        self._admin_server = AdminServer(
            self._context, server, self._questions, self._gather_stats, self._table.names_of_ready
        )
        self._signals = TerminationSignals()
        self._poller.register(self._inbox.fileno(), zmq.POLLIN)
        self._poller.register(self._signals.fileno(), zmq.POLLIN)
        self._poller.register(self._admin_server.fileno(), zmq.POLLIN)

    # ----------------------------------------------------------------------------------------------------- life

    def run(self, begun: float) -> int:
        """Start, serve and stop. Returns the exit code."""
        if not self._run_mode.instant and (problem := gpu.why_none(self._settings)) is not None:
            self._log.error(problem)
            return EXIT_NOT_STARTED
        try:
            self._reserve_swap()
            prepare = self._spawn_all()
            self._prepare(prepare)
            self._start(begun)
            return self._watch()
        except Stopping as stopping:
            return stopping.code
        except MemoryError as error:  # of a segment: the message names the setting to change
            self._log.error(str(error))
            return EXIT_NOT_STARTED

    def _reserve_swap(self) -> None:
        """Begin to reserve swap space. Nothing waits for it until all stages are ready. Raises MemoryError."""
        self._resources.reserve_swap(with_model=not self._run_mode.instant)
        if self._resources.reservation is not None:
            self._poller.register(self._resources.reservation.fileno(), zmq.POLLIN)

    def _is_swap_reserved(self) -> bool:
        """Whether swap space is reserved. Raises MemoryError if there is too little memory."""
        if self._resources.reservation is not None and self._resources.reservation.check():
            self._end_reservation()
        return self._resources.reservation is None

    def _end_reservation(self) -> None:
        if self._resources.reservation is not None:
            self._poller.unregister(self._resources.reservation.fileno())
            self._resources.end_reservation()

    def _spawn_all(self) -> Child:
        """Start the processes of all stages, which wait for the model, and of prepare, which is returned."""
        self._log_event("starting", version=VERSION, model=self._settings.model)
        peers = [m.PeerInbox(SUPERVISOR, self._resources.addresses[SUPERVISOR], 16)]
        prepare = self._spawn(self._resources.launch("prepare", topology.PREPARE, peers))
        self._resources.create_arenas()
        self._resources.create_rings()
        for row in topology.TOPOLOGY:
            for replica in range(topology.num_replicas(self._settings, row.name)):
                peers = topology.peers_of(row, self._resources.addresses, self._settings, replica)
                self._spawn(self._resources.launch(row.name, row.entry, peers, replica), waits=True)
        return prepare

    def _prepare(self, child: Child) -> None:
        """Wait for prepare, which resolves the model and exits."""
        timeout_s = self._settings.supervisor.prepare_timeout_s
        self._run_until(lambda: self._prepared is not None, timeout_s, "the model to be prepared")
        child.wait(self._settings.supervisor.stop_timeout_s)
        self._table.remove(child)

    def _start(self, begun: float) -> None:
        """Let every stage begin, wait until each is ready, and send `Start` to all."""
        settings = self._settings
        assert self._prepared is not None
        self._table.begin_all(self._prepared.model_dir)
        self._run_until(
            lambda: all(child.state == "ready" for child in self._table.children.values()),
            self._run_mode.patience_s(settings.supervisor.start_timeout_s),
            "stages to be ready",
        )
        self._run_until(
            self._is_swap_reserved,
            self._run_mode.patience_s(settings.supervisor.start_timeout_s),
            f"{settings.execute.swap_bytes} bytes of swap space ({topology.SWAP_KEY})",
        )
        assert self._facts is not None, "the executor was ready without facts"
        for name in reversed(self._flow()):  # the gateways last: their requests then find every stage started
            self._table.outboxes[name].send(m.Start(self._facts))
        self._health_checks.start(SUPERVISOR, 0, self._run_mode.patience_s(settings.supervisor.start_timeout_s))
        self._run_until(
            lambda: self._first_health is not None and self._first_health.status == "ok",
            self._run_mode.patience_s(settings.supervisor.start_timeout_s),
            "the first answers",
        )
        self._is_serving = True
        self._log_event(
            f"ready on {self._url}",
            model=settings.served_model_name or self._prepared.model_name,
            max_model_len=self._facts.max_model_len,
            kv_blocks=self._facts.num_blocks,
            **({"swap_blocks": self._facts.num_swap_blocks} if self._facts.num_swap_blocks else {}),
            zmq=zmq_address(settings, self._listeners) or "off",
            **({"admin": url_of(self._admins[0])} if self._admins else {}),
            api_keys="on" if self._resources.has_keys else "off",
            took_s=f"{time.monotonic() - begun:.2f}",
        )

    def _watch(self) -> int:
        """Serve until a signal comes or a stage ends, then stop in order."""
        code = self._run_until_stopped(lambda: False, float("inf"))
        self._is_ending = True
        if code == EXIT_OK:
            timeout_s = self._settings.supervisor.drain_timeout_s
            self._log_event("draining", timeout_s=timeout_s)
            for name in self._gateways:
                self._table.outboxes[name].send(m.Drain(timeout_s))
            code = self._run_until_stopped(lambda: self._are_drained(self._gateways), timeout_s + NOTIFY_CLIENTS_S)
        if code == EXIT_STAGE_DIED:
            stage, reason = next(iter(self._reasons.items()))
            self._drained.clear()
            alive = [name for name in self._gateways if self._table.children[name].is_alive]
            for name in alive:
                self._table.outboxes[name].send(m.StageDied(stage, reason))
            self._run_until_stopped(lambda: self._are_drained(alive), NOTIFY_CLIENTS_S)
        if not self._stop():
            code = max(code, EXIT_STAGE_DIED)
        self._log_event("stopped", code=code)
        return code

    def _run_until_stopped(self, condition: Callable[[], bool], timeout_s: float) -> int:
        """Run the loop until a condition holds, the timeout passes or a signal comes (all `EXIT_OK`), or a stage ends
        (`EXIT_STAGE_DIED`)."""
        try:
            self._run_until(condition, timeout_s, "open streams to end")
        except Stopping as stopping:
            return stopping.code
        return EXIT_OK

    def _flow(self) -> list[str]:
        """The names of the processes, in flow order."""
        return [name for stage in topology.FLOW for name in topology.replicas_of(self._settings, stage)]

    def _are_drained(self, gateways: list[str]) -> bool:
        return self._drained.issuperset(gateways)

    def _stop(self) -> bool:
        """Stop the stages in flow order, so that none sends to one that has ended. Returns whether all stopped well."""
        timeout_s = self._settings.supervisor.stop_timeout_s
        end = time.monotonic() + timeout_s
        all_ok = True
        for name in self._flow():
            child = self._table.children.get(name)
            if child is None or not child.is_alive:
                continue
            child.state = "stopping"
            self._table.outboxes[child.name].send(m.Stop())
            if not child.wait(max(MIN_STOP_S, end - time.monotonic())):
                self._log.error(f"{child.name} did not stop within {timeout_s:g} s; killing it")
                child.kill()
            if child.exit_code and child.name != self._run_mode.foreground:  # it may be stopped in a debugger
                self._drain_inbox()
                reason = self._reasons.get(child.name, child.describe_end())
                fields = self._crash_reports.died(child, reason)
                self._log.error(f"{child.name} failed while it stopped: {reason}", extra={"fields": fields})
                all_ok = False
        return all_ok

    def raise_inline(self) -> None:
        """Raise the error of a stage that runs as a thread of this process, for a debugger."""
        for child in self._table.children.values():
            if isinstance(child, InlineChild) and child.error is not None and not isinstance(child.error, UserError):
                raise child.error

    def close(self) -> None:
        """Kill the children that are left and free everything."""
        self._table.close()
        self._end_reservation()
        self._crash_reports.close()
        self._resources.close()
        self._signals.close()
        self._inbox.close()
        self._admin_server.close()
        self._context.term()

    # --------------------------------------------------------------------------------------------------- children

    def _spawn(self, launch: m.Launch, *, waits: bool = False) -> Child:
        child = self._table.spawn(launch, waits=waits)
        self._log.debug("started", extra={"fields": {"stage": child.name, "pid": child.pid}})
        return child

    def _check_children(self) -> None:
        """Restart stages that have ended and should be running. Raises Stopping if one can't be restarted."""
        for child in list(self._table.children.values()):
            if child.state not in LIVING or child.is_alive or not self._table.is_watched(child):
                continue
            self._receive_last_messages(child)
            if child.stage == "prepare" and self._prepared is not None:
                continue
            if child.name in self._drained:
                self._table.mark_dead(child)
                continue
            reason = self._reasons.pop(child.name, child.describe_end())
            self._questions.lost(child.name)
            fields = self._crash_reports.died(child, reason)
            if not self._is_serving:
                self._log.error(f"cannot start: {child.stage}: {reason}", extra={"fields": fields})
                self._table.mark_dead(child)
                raise Stopping(EXIT_NOT_STARTED)
            why_not = self._restarts.died(child)
            text = f"{child.name} died: {reason}{f'; not restarted: {why_not}' if why_not else ''}"
            self._log.error(text, extra={"fields": fields})
            if why_not:
                self._reasons = {child.name: reason}
                self._table.mark_dead(child)
                raise Stopping(EXIT_STAGE_DIED)
            self._heartbeats.lost(child.name)

    def _receive_last_messages(self, child: Child) -> None:
        """Wait for the messages that a child sent before it ended: they may still be on the way."""
        end = time.monotonic() + LAST_MESSAGES_S
        self._drain_inbox()

        def is_complete() -> bool:  # prepare's last message is its result, and it exits with 0
            return child.name in self._reasons or (child.stage == "prepare" and self._prepared is not None)

        while not is_complete() and (child.exit_code or 0) >= 0:
            left_s = end - time.monotonic()
            if left_s <= 0 or not self._inbox.wait(left_s):
                return
            self._drain_inbox()

    # ------------------------------------------------------------------------------------------------------- loop

    def _run_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Run the loop until a condition holds. Raises Stopping if a signal, a stage's end or the deadline is first."""
        end = time.monotonic() + timeout_s
        while True:
            self._drain_inbox()
            if condition():
                return
            if number := self._signals.take():
                if self._is_serving:
                    raise Stopping(EXIT_OK)
                self._log_event(f"stopped by {signal.Signals(number).name} during the start")
                raise Stopping(128 + number)
            self._check_children()
            self._health_checks.end_rounds(self._table.children.values())
            if self._is_serving:
                self._heartbeats.turn(self._table.children.values())
                assert self._prepared is not None and self._facts is not None
                self._restarts.turn(self._prepared.model_dir, self._facts)
            self._admin_server.turn()
            self._crash_reports.turn(self._table.children.values())
            self._questions.end_late()
            now = time.monotonic()
            if now >= end:
                children = self._table.children.values()
                late = ", ".join(child.name for child in children if child.state == "starting" and child.has_begun)
                self._log.error(f"timed out after {timeout_s:g} s waiting for {what}{f': {late}' if late else ''}")
                raise Stopping(EXIT_OK if self._is_serving else EXIT_NOT_STARTED)
            if self._inbox.wait(0) or self._admin_server.has_message():
                continue  # the descriptors are edge-triggered, so check before sleeping
            deadlines = (
                self._health_checks.deadlines,
                self._heartbeats.deadlines,
                self._questions.deadlines,
                self._restarts.deadlines,
            )
            soonest = min([end, now + POLL_S, *itertools.chain(*deadlines)])
            self._poller.poll(max(0, round((soonest - now) * 1000)))

    def _drain_inbox(self) -> None:
        while (message := self._inbox.receive()) is not None:
            self._handle(message, self._inbox.last_sender)

    def _handle(self, message: m.SupervisorInbox, sender: str) -> None:
        match message:
            case m.Ready(facts):
                child = self._table.children[sender]
                is_successor, child.state = child.state == "recovering", "ready"
                self._facts = facts or self._facts
                self._log.debug("ready", extra={"fields": {"stage": sender}})
                if is_successor:
                    assert self._facts is not None
                    self._restarts.ready(child, self._facts)
                    if self._is_ending and child.stage == "gateway":
                        self._table.outboxes[sender].send(m.Drain(self._settings.supervisor.drain_timeout_s))
            case m.Reconnected(epoch):
                self._restarts.answered(sender, epoch)
            case m.StageFailed(reason):
                self._reasons[sender] = reason
            case m.Prepared():
                self._prepared = message
                self._resources.hold_model(message.model_dir)
            case m.Drained():
                self._drained.add(sender)
                # New connections are refused instead of waiting in the backlog.
                self._listeners[self._gateways.index(sender)].close()
            case m.AskHealth(nonce):
                self._health_checks.start(sender, nonce, self._settings.supervisor.health_timeout_s)
            case m.Pong(nonce):
                self._heartbeats.answered(sender)
                self._health_checks.answered(nonce, sender, message, self._table.children.values())
            case m.AskServerStats(nonce):
                self._gather_stats(float("inf"), lambda stats: self._table.reply(sender, m.StatsAnswer(nonce, stats)))
            case m.Answer():
                self._questions.answered(sender, message)
            case _:
                assert_never(message)

    # -------------------------------------------------------------------------------------------- stats and health

    def _gather_stats(self, timeout_s: float, then: Callable[[ServerStats], None]) -> None:
        """Collect stats; waits for stages at most `timeout_s`, and at most supervisor.health_timeout_s."""
        timeout_s = min(timeout_s, self._settings.supervisor.health_timeout_s)
        name = self._settings.served_model_name or (self._prepared.model_name if self._prepared else "")
        state = "draining" if self._is_ending else "serving" if self._is_serving else "starting"
        facts = ServerFacts(name, self._url, state, self._facts)
        self._stats_collector.gather(facts, self._table.in_flow_order(), timeout_s, then)

    def _answer_health(self, asker: str, health: m.Health) -> None:
        if asker == SUPERVISOR:
            self._first_health = health
        else:
            self._table.reply(asker, health)

    def _log_event(self, text: str, **fields: object) -> None:
        self._log.info(text, extra={"fields": fields})
