"""The supervisor: starts the stages, watches them, and stops them in flow order.

    start prepare, then all ──► Prepared ──► begin all ──► Ready from each ──► Start to each ──► serving
                                                                                                    │
      exit 0 ◄── Stop, in flow order ◄── Drained ◄── Drain to the gateway ◄─────────────────────────┤ a signal
      exit 3 ◄── Stop, in flow order ◄── Drained ◄── StageDied to the gateway ◄─────────────────────┘ a stage ends
                                                                                                      once too often

The stages' processes import their code while prepare runs, and begin when the model's folder is known. A stage that
dies while the server serves is restarted (restart/restarts.py).

Nothing outlives it: its children die with it (see processes/process.py), sockets are abstract, shared memory is
anonymous.
"""

import logging
import socket
import time
from collections.abc import Callable

import zmq

from pipeline import torch_needed
from pipeline.config.settings import Settings
from pipeline.config.values.sizes import size_words
from pipeline.errors import UserError
from pipeline.hosts import placement
from pipeline.runtime import messages as m
from pipeline.runtime import topology
from pipeline.runtime.model.kv_groups import described, has_windows
from pipeline.runtime.security import api_keys
from pipeline.runtime.security.key_book import KeyBook
from pipeline.runtime.topology import SUPERVISOR
from pipeline.supervisor import gpu
from pipeline.supervisor.loop import SupervisorLoop
from pipeline.supervisor.processes.child import Child
from pipeline.supervisor.processes.fork_server import ForkServer
from pipeline.supervisor.processes.inline import InlineChild
from pipeline.supervisor.restart.recovery import MAX_FAILED_STARTS
from pipeline.supervisor.restart.server_restart import Done as RestartDone
from pipeline.supervisor.restart.server_restart import RestartOrder, ServerRestart
from pipeline.supervisor.run_mode import RunMode
from pipeline.supervisor.shared.listeners import url_of, zmq_address
from pipeline.supervisor.shared.resources import SharedResources
from pipeline.supervisor.stopping import EXIT_NO_ROOM, EXIT_NOT_STARTED, EXIT_OK, EXIT_STAGE_DIED, StageKilled, Stopping
from pipeline.version import VERSION

NOTIFY_CLIENTS_S = 2.0
"""Maximum time for the gateway to notify its clients that a stage has died."""
MIN_STOP_S = 0.3
"""Each stage gets this long to stop, even if others have used up the timeout."""

START_LIMIT = "supervisor.start_timeout_s"


class Supervisor:
    """Runs the loop that starts, watches and stops the stages."""

    def __init__(
        self,
        settings: Settings,
        listeners: list[socket.socket],
        log: logging.Logger,
        run_mode: RunMode | None = None,
        keys: api_keys.Keys | None = None,
        admins: list[socket.socket] | None = None,
        book: KeyBook | None = None,
        fork_server: ForkServer | None = None,
        restart: ServerRestart | None = None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        """`book` has read the keys; None if they can't be read again. Without a `fork_server`, which belongs to the
        caller, each process is started with exec. `restart` replaces the server; None if it belongs to a program.
        `on_ready` is called when it serves."""
        self._run_mode = run_mode or RunMode()
        admins = admins if admins is not None else []
        self._listeners = listeners
        """One for each gateway, in the same order. The list changes with their number."""
        self._admins = admins
        """One for each gateway, or empty."""
        self._url = url_of(listeners[0], "https" if settings.gateway.ssl_certfile else "http")
        self._log = log
        shared_keys = None if self._run_mode.model is None else self._run_mode.model.keys
        self._resources = SharedResources(settings, listeners, admins, keys, book, shared_keys)
        self._loop = SupervisorLoop(
            *(settings, self._run_mode, self._resources, listeners, admins, self._url, log),
            self._restart_server,
            fork_server,
        )
        self._restart, self._on_ready = restart, on_ready

    # ----------------------------------------------------------------------------------------------------- life

    def run(self, begun: float) -> int:
        """Start, serve and stop. Returns the exit code. `begun` is when the start began, by time.monotonic()."""
        if not self._run_mode.instant and (problem := self._why_no_back_end()) is not None:
            self._log.error(problem)
            return EXIT_NOT_STARTED
        if (problem := self._why_no_hosts()) is not None:
            self._log.error(problem)
            return EXIT_NOT_STARTED
        try:
            self._reserve_swap()
            self._start_all(begun)
            return self._watch()
        except Stopping as stopping:
            return stopping.code
        except MemoryError as error:  # of a segment: the message names the setting to change
            self._log.error(str(error))
            return EXIT_NOT_STARTED

    @property
    def problem(self) -> str:
        """Why the server could not start, if a stage has failed."""
        return self._loop.state.problem

    def _why_no_back_end(self) -> str | None:
        """Why the executor can't compute with what is installed here, for the user; None if it may."""
        settings = self._resources.settings
        missing = None if topology.num_hosts(settings) else torch_needed.why_missing(settings)
        return gpu.why_none(settings) or missing

    def _why_no_hosts(self) -> str | None:
        """Why the executor can't run on other hosts, for the user; None if it may, or needs none."""
        if not topology.num_hosts(self._resources.settings):
            return None
        remote = topology.replicas_of(self._resources.settings, "execute")
        launcher = "execute.launcher = 'ray'"
        if self._run_mode.inline:
            return f"--inline runs all stages in one process, which {launcher} does not allow"
        if self._run_mode.foreground in remote:
            return f"--foreground: {self._run_mode.foreground} runs on another host with {launcher}"
        if named := [name for name in remote if name in self._run_mode.record]:
            return f"--record: {named[0]} can't be recorded, because it runs on another host with {launcher}"
        return placement.why_not_installed()

    def _reserve_swap(self) -> None:
        """Begin to reserve swap space. Nothing waits for it until all stages are ready. Raises MemoryError."""
        self._resources.reserve_swap(with_model=not self._run_mode.instant)
        if self._resources.reservation is not None:
            self._loop.poller.register(self._resources.reservation.fileno(), zmq.POLLIN)

    def _is_swap_reserved(self) -> bool:
        """Whether swap space is reserved. Raises MemoryError if there is too little memory."""
        if self._resources.reservation is not None and self._resources.reservation.check():
            self._end_reservation()
        return self._resources.reservation is None

    def _end_reservation(self) -> None:
        if self._resources.reservation is not None:
            self._loop.poller.unregister(self._resources.reservation.fileno())
            self._resources.end_reservation()

    def _start_all(self, begun: float) -> None:
        """Start prepare and all stages. If a signal kills a stage before the server is ready, all stages start again:
        they own nothing yet. Raises Stopping."""
        self._log_event("starting", version=VERSION, model=self._resources.settings.model)
        peers = [m.PeerInbox(SUPERVISOR, self._resources.addresses[SUPERVISOR], 16)]
        prepare = self._spawn(self._resources.launch("prepare", topology.PREPARE, peers))
        self._resources.create_arenas()
        self._resources.create_rings()
        self._loop.hosts.find()
        may_repeat = self._resources.settings.supervisor.max_restarts and not self._run_mode.is_debugged
        for num_left in reversed(range(MAX_FAILED_STARTS if may_repeat else 1)):
            try:
                self._find_hosts()
                self._spawn_stages()
                self._prepare(prepare)
                self._start(begun)
                return
            except StageKilled as killed:
                if not num_left:
                    self._loop.state.problem = str(killed)
                    self._log.error(f"cannot start: {killed}")
                    raise Stopping(EXIT_NOT_STARTED) from None
                self._log.error(f"{killed}; starting the stages again")
                for name in self._flow():
                    self._resources.renew(name)
                self._loop.forget(self._flow())

    def _find_hosts(self) -> None:
        """Wait until the addresses of processes on other hosts are known."""
        settings = self._resources.settings
        timeout_s = settings.ray.placement_timeout_s + settings.supervisor.start_timeout_s
        self._loop.run_until(lambda: self._loop.hosts.are_found, timeout_s, "hosts for the executor")

    def _spawn_stages(self) -> None:
        """Start the processes of all stages, which wait for the model."""
        for row in topology.TOPOLOGY:
            for replica in range(topology.num_replicas(self._resources.settings, row.name)):
                peers = topology.peers_of(row, self._resources.addresses, self._resources.settings, replica)
                self._spawn(self._resources.launch(row.name, row.entry, peers, replica), waits=True)

    def _prepare(self, child: Child) -> None:
        """Wait for prepare, which resolves the model and exits."""
        timeout_s = self._resources.settings.supervisor.prepare_timeout_s
        limit, what = "supervisor.prepare_timeout_s", "the model to be prepared"
        self._loop.run_until(lambda: self._loop.state.prepared is not None, timeout_s, what, limit)
        self._loop.run_until(lambda: self._loop.hosts.are_ready, timeout_s, f"{what} on other hosts", limit)
        if child.name in self._loop.table.children:
            child.wait(self._resources.settings.supervisor.stop_timeout_s)
            self._loop.table.remove(child)
        model, prepared = self._run_mode.model, self._loop.state.prepared
        if model is not None and prepared is not None and not model.admit(prepared):
            raise Stopping(EXIT_NO_ROOM)

    def _start(self, begun: float) -> None:
        """Let every stage begin, wait until each is ready, and send `Start` to all."""
        settings = self._resources.settings
        assert self._loop.state.prepared is not None
        self._loop.table.begin_all(self._loop.state.prepared.model_dir)
        self._loop.run_until(
            lambda: all(child.state == "ready" for child in self._loop.table.children.values()),
            self._run_mode.patience_s(settings.supervisor.start_timeout_s),
            "stages to be ready",
            START_LIMIT,
        )
        self._loop.run_until(
            self._is_swap_reserved,
            self._run_mode.patience_s(settings.supervisor.start_timeout_s),
            f"{size_words(settings.execute.swap_bytes)} of swap space ({topology.SWAP_KEY})",
        )
        assert self._loop.state.facts is not None, "the executor was ready without facts"
        if self._loop.state.prepared.adapters:
            self._loop.adapters.tell()
        for name in reversed(self._flow()):  # the gateways last: their requests then find every stage started
            self._loop.table.outboxes[name].send(m.Start(self._loop.state.facts))
        self._loop.check_health(self._run_mode.patience_s(settings.supervisor.start_timeout_s))
        self._loop.run_until(
            lambda: self._loop.state.first_health is not None and self._loop.state.first_health.status == "ok",
            self._run_mode.patience_s(settings.supervisor.start_timeout_s),
            "the first answers",
            START_LIMIT,
        )
        facts, prepared = self._loop.state.facts, self._loop.state.prepared
        self._loop.state.is_serving = True
        self._log_event(
            f"ready on {self._url}" if self._run_mode.model is None else "loaded",
            model=settings.served_model_name or prepared.model_name,
            max_model_len=facts.max_model_len,
            kv_blocks=facts.num_blocks,
            kv_dtype=facts.kv_dtype,
            **({"kv_groups": described(groups)} if has_windows(groups := facts.kv_groups) else {}),
            **({"swap_blocks": facts.num_swap_blocks} if facts.num_swap_blocks else {}),
            **(self._where() if self._run_mode.model is None else {}),
            took_s=f"{time.monotonic() - begun:.2f}",
        )
        if self._run_mode.model is not None:
            self._run_mode.model.on_serving()
        self._on_ready()

    def _where(self) -> dict[str, str]:
        """Where clients reach the server, besides its URL, for the log."""
        found = {"zmq": zmq_address(self._resources.settings, self._listeners) or "off"}
        if self._admins:
            found["admin"] = url_of(self._admins[0])
        return found | {"api_keys": "on" if self._resources.has_keys else "off"}

    def _watch(self) -> int:
        """Serve until a signal comes or a stage ends, then stop in order."""
        code = self._run_until_stopped(lambda: self._restart is not None and self._restart.turn(), float("inf"))
        self._loop.state.is_ending = True
        self._loop.end_scaling()
        gateways = topology.among(self._loop.table.children, "gateway")
        if code == EXIT_OK:
            code = self._drain_all(gateways, self._drain)
        if code == EXIT_STAGE_DIED:
            stage, reason = next(iter(self._loop.state.reasons.items()))
            self._loop.state.drained.clear()
            alive = [name for name in gateways if self._loop.table.children[name].is_alive]
            for name in alive:
                self._loop.table.outboxes[name].send(m.StageDied(stage, reason))
            self._run_until_stopped(lambda: self._are_drained(alive), NOTIFY_CLIENTS_S)
        if not self._stop():
            code = max(code, EXIT_STAGE_DIED)
        self._log_event("stopped", code=code)
        return code

    def _drain_all(self, gateways: list[str], drain: m.Drain) -> int:
        """Let open streams end. Returns an exit code."""
        timeout_s, self._loop.state.keeps_sockets = drain.deadline_s, drain.has_successor
        end_s = time.monotonic() + timeout_s
        shown = "none" if timeout_s == m.NO_LIMIT_S else timeout_s
        self._log_event("draining", timeout_s=shown, stop_now="Ctrl-C or SIGTERM again")
        for name in gateways:
            self._loop.table.outboxes[name].send(drain)
        code = self._run_until_stopped(lambda: self._are_drained(gateways), timeout_s + NOTIFY_CLIENTS_S)
        left_s = end_s - time.monotonic()
        if code != EXIT_OK or not drain.has_successor or drain.is_again or self._are_drained(gateways) or left_s <= 0:
            return code
        # The first signal since this server was replaced: it and the next one end as any server does.
        limit_s = min(left_s, self._resources.settings.supervisor.drain_timeout_s)
        return self._drain_all(gateways, m.Drain(limit_s, is_leaving=True, has_successor=True, is_again=True))

    @property
    def _drain(self) -> m.Drain:
        """How the gateways drain."""
        model = self._run_mode.model
        given = model.drain if model is not None else self._restart.drain if self._restart is not None else None
        return given or m.Drain(self._resources.settings.supervisor.drain_timeout_s)

    def _restart_server(self, order: RestartOrder, done: RestartDone) -> None:
        """Replace the whole server."""
        if self._run_mode.model is not None:
            self._run_mode.model.restart_server(order, done)
        elif self._restart is None:
            done(0, "this server belongs to a program: end it, and start it again")
        elif not self._loop.state.takes_changes:
            done(0, "the server is starting or shutting down")
        else:
            self._restart.ask(order, self._loop.reloads.source, 0, done)

    def _run_until_stopped(self, condition: Callable[[], bool], timeout_s: float) -> int:
        """Run the loop until a condition holds, the timeout passes or a signal comes (all `EXIT_OK`), or a stage ends
        (`EXIT_STAGE_DIED`)."""
        try:
            self._loop.run_until(condition, timeout_s, "open streams to end")
        except Stopping as stopping:
            return stopping.code
        return EXIT_OK

    def _flow(self) -> list[str]:
        """The names of the processes with which the server starts, in flow order."""
        return [name for stage in topology.FLOW for name in topology.replicas_of(self._resources.settings, stage)]

    def _are_drained(self, gateways: list[str]) -> bool:
        return self._loop.state.drained.issuperset(gateways)

    def _stop(self) -> bool:
        """Stop the stages in flow order, so that none sends to one that has ended. Returns whether all stopped well."""
        timeout_s = self._resources.settings.supervisor.stop_timeout_s
        end = time.monotonic() + timeout_s
        all_ok = True
        for child in self._loop.table.in_flow_order():
            if not child.is_alive:
                continue
            child.state = "stopping"
            self._loop.table.outboxes[child.name].send(m.Stop())
            if not child.wait(max(MIN_STOP_S, end - time.monotonic())):
                self._log.error(f"{child.name} did not stop within {timeout_s:g} s; killing it")
                child.kill()
            if child.exit_code and child.name != self._run_mode.foreground:  # it may be stopped in a debugger
                self._loop.drain_inbox()
                reason = self._loop.state.reasons.get(child.name, child.describe_end())
                fields = self._loop.crash_reports.died(child, reason)
                self._log.error(f"{child.name} failed while it stopped: {reason}", extra={"fields": fields})
                all_ok = False
        return all_ok

    @property
    def is_asleep(self) -> bool:
        """Whether the server sleeps. Other threads may ask."""
        return self._loop.is_asleep

    def raise_inline(self) -> None:
        """Raise the error of a stage that runs as a thread of this process, for a debugger."""
        for child in self._loop.table.children.values():
            if isinstance(child, InlineChild) and child.error is not None and not isinstance(child.error, UserError):
                raise child.error

    def close(self) -> None:
        """Kill the children that are left and free everything."""
        self._end_reservation()
        self._loop.close()
        self._resources.close()

    def _spawn(self, launch: m.Launch, *, waits: bool = False) -> Child:
        child = self._loop.table.spawn(launch, waits=waits)
        self._log.debug("started", extra={"fields": {"stage": child.name, "pid": child.pid}})
        return child

    def _log_event(self, text: str, **fields: object) -> None:
        self._log.info(text, extra={"fields": fields})
