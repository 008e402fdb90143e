"""The supervisor: creates what the stages share, starts them, watches them, and stops them in flow order.

    prepare ──► start all, execute first ──► Ready from each ──► Start to each ──► serving
                                                                                      │
      exit 0 ◄── Stop, in flow order ◄── Drained ◄── Drain to the gateway ◄───────────┤ SIGINT, SIGTERM
      exit 3 ◄── Stop, in flow order ◄── Drained ◄── StageDied to the gateway ◄───────┘ a stage ends

Nothing outlives it: children die with it (see child.py), sockets are abstract, shared memory is anonymous.
"""

import errno
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, assert_never

import zmq

from pipeline.client.zmq_address import address_of as address_of_door
from pipeline.client.zmq_address import check_free
from pipeline.config.by_device import kv_bytes_in_ram
from pipeline.config.settings import Settings
from pipeline.errors import UserError
from pipeline.metrics.stats import ServerStats
from pipeline.runtime import api_keys, topology
from pipeline.runtime import messages as m
from pipeline.runtime.channels import Inbox, Outbox, address_of
from pipeline.runtime.control_requests import with_execute_facts
from pipeline.runtime.logs import open_log
from pipeline.runtime.run_mode import RunMode
from pipeline.runtime.stage import SUPERVISOR
from pipeline.shm import segment
from pipeline.supervisor import bind_policy, gpu
from pipeline.supervisor.admin_server import AdminServer, Questions
from pipeline.supervisor.health import HealthRound
from pipeline.supervisor.inline import InlineChild
from pipeline.supervisor.process import Child
from pipeline.supervisor.stats_collector import ServerFacts, StatsCollector
from pipeline.version import VERSION

EXIT_OK = 0
EXIT_NOT_STARTED = 1
EXIT_STAGE_DIED = 3
LISTEN_BACKLOG = 1024
INCARNATION = 1
TELL_CLIENTS_S = 2.0
"""How long the gateway may take to tell its clients that a stage has died."""
LAST_WORDS_S = 0.5
MIN_STOP_S = 0.3
"""What each stage has to stop in, though others took all the time."""
SAME_SIGNAL_S = 0.5
POLL_S = 1.0
"""The longest that deadlines wait to be looked at."""


def serve(settings: Settings, run_mode: RunMode | None = None) -> int:
    """Run a server until it is told to stop. Returns the process's exit code.

    Raises OSError, in words for the user, where the address can't be listened on, and ConfigError where API keys can't
    be read, or others could come in without.
    """
    log = open_log(SUPERVISOR, settings.log_level, settings.log_format)
    begun = time.monotonic()
    if settings.gateway.api_keys_file or api_keys.SERVER_VARIABLE in os.environ:
        api_keys.keep_out_of_core_dumps()
    keys, warnings = api_keys.read(settings.gateway.api_keys_file, os.environ)
    api_keys.forget(os.environ)
    bind_policy.check(settings, keys is not None)
    for warning in warnings:
        log.warning(warning)
    if (hint := bind_policy.hint(settings, keys is not None)) is not None:
        log.info(hint)
    listeners = listen(settings.gateway.host, settings.gateway.port, settings.gateway.replicas)
    admins: list[socket.socket] = []
    try:
        if settings.gateway.admin_port >= 0:
            admins = listen(
                settings.gateway.admin_host, settings.gateway.admin_port, settings.gateway.replicas, "gateway.admin_"
            )
        for replica in range(settings.gateway.replicas):
            if (address := door_address(settings, listeners, replica)) is not None:
                check_free(address)
        supervisor = Supervisor(settings, listeners, log, run_mode, keys, admins)
        try:
            code = supervisor.run(begun)
            supervisor.raise_inline()
            return code
        finally:
            supervisor.close()
    finally:
        for listener in (*listeners, *admins):
            listener.close()


def listen(host: str, port: int, num_sockets: int = 1, keys: str = "gateway.") -> list[socket.socket]:
    """The HTTP sockets, one for each gateway; the kernel divides connections among them. Opened before anything that
    takes time, so that a taken port is said at once. `keys` is how the settings that say where begin.

    Raises OSError, in words for the user, where the address can't be listened on.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sockets: list[socket.socket] = []
    try:
        # A port that may be shared would also be shared with another server of this user: so it is taken alone first.
        sockets.append(socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG))
        if num_sockets > 1:
            alone = sockets.pop()
            port = alone.getsockname()[1]
            alone.close()
            for _ in range(num_sockets):
                one = socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG, reuse_port=True)
                sockets.append(one)
        return sockets
    except OSError as error:
        for one in sockets:
            one.close()
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        why = os.strerror(error.errno) if is_port and error.errno else (error.strerror or str(error))
        key = f"{keys}{'port' if is_port else 'host'}"
        flag = f" (--{key.removeprefix('gateway.')})" if keys == "gateway." else ""
        raise OSError(f"cannot listen on {host}:{port}: {why}; choose another {key}{flag}") from error


def url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def door_address(settings: Settings, listeners: list[socket.socket], replica: int = 0) -> str | None:
    """Where the ZeroMQ door of a gateway listens; None where there is none."""
    return address_of_door(settings.gateway.zmq, listeners[0].getsockname()[1], replica)


class Stopping(Exception):
    """The start is cut short: by a signal, or because a stage failed. `code` is what to exit with."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


class Supervisor:
    """Owns the process table, the segments and the listening sockets."""

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
        self._manner = run_mode or RunMode()
        self._listeners = listeners
        """One for each gateway, in order."""
        self._gateways = topology.replicas_of(settings, "gateway")
        self._admins = admins
        """Likewise; empty where there is no admin listener."""
        self._url = url_of(listeners[0])
        self._keys_fd = -1 if keys is None else keys.share()
        self._log = log
        self._server = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._addresses = {SUPERVISOR: address_of(self._server, SUPERVISOR, INCARNATION)}
        self._inbox: Inbox[m.SupervisorInbox] = Inbox(self._context, self._addresses[SUPERVISOR], m.SupervisorInbox)
        self._outboxes: dict[str, Outbox[Any]] = {}
        self._children: dict[str, Child] = {}
        self._segments: dict[str, m.Segment] = {}
        self._reservation: segment.Reservation | None = None
        self._death_read, self._death_write = os.pipe()
        self._facts: m.ExecuteFacts | None = None
        self._prepared: m.Prepared | None = None
        self._reasons: dict[str, str] = {}
        self._drained: set[str] = set()
        """Gateways."""
        self._is_serving = False
        self._is_ending = False
        self._first_health: m.Health | None = None
        self._rounds: dict[int, HealthRound] = {}
        self._next_nonce = 1
        self._questions = Questions(
            lambda name, request: self._outboxes[name].send(with_execute_facts(request, self._facts))
        )
        self._stats_collector = StatsCollector(self._server, SUPERVISOR, self._questions)
        self._door = AdminServer(self._context, self._server, self._questions, self._gather_stats, self._names_of_ready)
        self._signals = _Signals()
        self._poller = zmq.Poller()
        self._poller.register(self._inbox.fileno(), zmq.POLLIN)
        self._poller.register(self._signals.fileno(), zmq.POLLIN)
        self._poller.register(self._door.fileno(), zmq.POLLIN)

    # ----------------------------------------------------------------------------------------------------- life

    def run(self, begun: float) -> int:
        """From nothing to an exit code."""
        if not self._manner.instant and (problem := gpu.why_none(self._settings)) is not None:
            self._log.error(problem)
            return EXIT_NOT_STARTED
        try:
            self._reserve()
            self._prepare()
            self._start(begun)
            return self._watch()
        except Stopping as stopping:
            return stopping.code
        except MemoryError as error:  # of the segments: it says what to change
            self._log.error(str(error))
            return EXIT_NOT_STARTED

    def _reserve(self) -> None:
        """Begin to reserve swap space. It is needed when a sequence is swapped and not before, so nobody waits for it
        until all are ready. Raises MemoryError."""
        num_bytes = self._settings.execute.swap_bytes
        if num_bytes:
            kv_bytes = 0 if self._manner.instant else kv_bytes_in_ram(self._settings)
            self._reservation = segment.Reservation(topology.SWAP, num_bytes, topology.SWAP_KEY, kv_bytes)
            self._segments[topology.SWAP] = m.Segment(topology.SWAP, self._reservation.fd, num_bytes, True)
            self._poller.register(self._reservation.fileno(), zmq.POLLIN)

    def _is_reserved(self) -> bool:
        """Whether swap space is there. Raises MemoryError where it can't be."""
        if self._reservation is not None and self._reservation.check():
            self._end_reservation()
        return self._reservation is None

    def _end_reservation(self) -> None:
        if self._reservation is not None:
            self._poller.unregister(self._reservation.fileno())
            self._reservation.close()
            self._reservation = None

    def _prepare(self) -> None:
        """Let prepare resolve the model; it ends by itself."""
        self._say("starting", version=VERSION, model=self._settings.model)
        launch = self._launch("prepare", topology.PREPARE, [m.Peer(SUPERVISOR, self._addresses[SUPERVISOR], 16)])
        child = self._spawn(launch)
        timeout_s = self._settings.supervisor.prepare_timeout_s
        self._turn_until(lambda: self._prepared is not None, timeout_s, "the model to be prepared")
        child.wait(self._settings.supervisor.stop_timeout_s)
        self._forget(child)

    def _start(self, begun: float) -> None:
        """Start every stage and wait until each is ready; then let them begin."""
        settings = self._settings
        for row in topology.TOPOLOGY:
            for name in topology.replicas_of(settings, row.name):
                self._addresses[name] = address_of(self._server, name, INCARNATION)
                if row.has_arena:
                    size = topology.arena_bytes(settings, row.name)
                    self._segments[name] = m.Segment(name, segment.create(name, size), size, False)
        for row in topology.TOPOLOGY:
            for replica in range(topology.num_replicas(settings, row.name)):
                peers = topology.peers_of(row, self._addresses, settings, replica)
                self._spawn(self._launch(row.name, row.entry, peers, replica))
        self._turn_until(
            lambda: all(child.state == "ready" for child in self._children.values()),
            self._manner.patience_s(settings.supervisor.start_timeout_s),
            "stages to be ready",
        )
        self._turn_until(
            self._is_reserved,
            self._manner.patience_s(settings.supervisor.start_timeout_s),
            f"{settings.execute.swap_bytes} bytes of swap space ({topology.SWAP_KEY})",
        )
        assert self._facts is not None, "the executor was ready without facts"
        for name in reversed(self._flow()):  # the gateways last: what they let in finds everybody at work
            self._outboxes[name].send(m.Start(self._facts))
        self._ask_health(SUPERVISOR, 0, self._manner.patience_s(settings.supervisor.start_timeout_s))
        self._turn_until(
            lambda: self._first_health is not None and self._first_health.status == "ok",
            self._manner.patience_s(settings.supervisor.start_timeout_s),
            "the first answers",
        )
        self._is_serving = True
        assert self._prepared is not None
        self._say(
            f"ready on {self._url}",
            model=settings.served_model_name or self._prepared.model_name,
            max_model_len=self._facts.max_model_len,
            kv_blocks=self._facts.num_blocks,
            **({"swap_blocks": self._facts.num_swap_blocks} if self._facts.num_swap_blocks else {}),
            zmq=door_address(settings, self._listeners) or "off",
            **({"admin": url_of(self._admins[0])} if self._admins else {}),
            api_keys="off" if self._keys_fd < 0 else "on",
            took_s=f"{time.monotonic() - begun:.2f}",
        )

    def _watch(self) -> int:
        """Serve until a signal or a death, then end in order."""
        code = self._turn_until_stopped(lambda: False, float("inf"))
        self._is_ending = True
        if code == EXIT_OK:
            timeout_s = self._settings.supervisor.drain_timeout_s
            self._say("draining", timeout_s=timeout_s)
            for name in self._gateways:
                self._outboxes[name].send(m.Drain(timeout_s))
            code = self._turn_until_stopped(lambda: self._are_drained(self._gateways), timeout_s + TELL_CLIENTS_S)
        if code == EXIT_STAGE_DIED:
            stage, reason = next(iter(self._reasons.items()))
            self._drained.clear()
            alive = [name for name in self._gateways if self._children[name].is_alive]
            for name in alive:
                self._outboxes[name].send(m.StageDied(stage, reason))
            self._turn_until_stopped(lambda: self._are_drained(alive), TELL_CLIENTS_S)
        if not self._stop():
            code = max(code, EXIT_STAGE_DIED)
        self._say("stopped", code=code)
        return code

    def _turn_until_stopped(self, condition: Callable[[], bool], timeout_s: float) -> int:
        """Turn the loop until a condition holds or the time is up (`EXIT_OK`), a signal comes (the same), or a stage
        ends (`EXIT_STAGE_DIED`)."""
        try:
            self._turn_until(condition, timeout_s, "open streams to end")
        except Stopping as stopping:
            return stopping.code
        return EXIT_OK

    def _flow(self) -> list[str]:
        """The processes, in the order of flow."""
        return [name for stage in topology.FLOW for name in topology.replicas_of(self._settings, stage)]

    def _are_drained(self, gateways: list[str]) -> bool:
        return self._drained.issuperset(gateways)

    def _stop(self) -> bool:
        """Stop what runs, in flow order, so that nobody sends to the dead. Returns whether all ended well in time."""
        timeout_s = self._settings.supervisor.stop_timeout_s
        end = time.monotonic() + timeout_s
        well = True
        for name in self._flow():
            child = self._children.get(name)
            if child is None or not child.is_alive:
                continue
            child.state = "stopping"
            self._outboxes[child.name].send(m.Stop())
            if not child.wait(max(MIN_STOP_S, end - time.monotonic())):
                self._log.error(f"{child.name} did not stop within {timeout_s:g} s and is killed")
                child.kill()
            if child.exit_code and child.name != self._manner.foreground:  # that may be stopped in a debugger
                self._drain_inbox()
                reason = self._reasons.get(child.name, child.describe_end())
                self._log.error(f"{child.name} ended badly: {reason}")
                well = False
        return well

    def raise_inline(self) -> None:
        """Raise what a stage raised that is a thread of this process, for a debugger to look at it."""
        for child in self._children.values():
            if isinstance(child, InlineChild) and child.error is not None and not isinstance(child.error, UserError):
                raise child.error

    def close(self) -> None:
        """Kill what is left and give everything back."""
        for child in list(self._children.values()):
            self._forget(child)
        self._end_reservation()
        for shared in self._segments.values():
            os.close(shared.fd)
        if self._keys_fd >= 0:
            os.close(self._keys_fd)
        os.close(self._death_read)
        os.close(self._death_write)
        self._signals.close()
        self._inbox.close()
        self._door.close()
        for outbox in self._outboxes.values():
            outbox.close()
        self._context.term()

    # --------------------------------------------------------------------------------------------------- children

    def _launch(self, stage: str, entry: str, peers: list[m.Peer], replica: int = 0) -> m.Launch:
        """What a child is told."""
        name = f"{stage}.{replica}"
        row = next((row for row in topology.TOPOLOGY if row.name == stage), None)
        shared = []
        if row is not None:
            own = [name] if row.has_arena else []
            others = [owner for read in row.reads for owner in topology.replicas_of(self._settings, read)]
            private = list(topology.private_segments(self._settings, stage))
            for owner in (*own, *private, *others):
                one = self._segments[owner]
                writable = owner == name or owner in private
                shared.append(m.Segment(one.name, one.fd, one.num_bytes, writable))
        launch = m.Launch(
            stage=stage,
            replica=replica,
            rank=0,
            incarnation=INCARNATION,
            entry=entry,
            settings=self._settings,
            model_dir=self._prepared.model_dir if self._prepared else "",
            address=self._addresses.get(name) or address_of(self._server, name, INCARNATION),
            peers=peers,
            segments=shared,
            death_fd=self._death_read,
            listen_fd=self._listeners[replica].fileno() if stage == "gateway" else -1,
            keys_fd=self._keys_fd if stage == "gateway" else -1,
            admin_fd=self._admins[replica].fileno() if stage == "gateway" and self._admins else -1,
        )
        return self._manner.launch(launch)

    def _spawn(self, launch: m.Launch) -> Child:
        num_cores = len(os.sched_getaffinity(0))
        num_threads = self._settings.execute.num_threads if launch.stage == "execute" else 0
        child = self._manner.start(launch, num_threads or num_cores)
        self._children[child.name] = child
        self._poller.register(child.pidfd, zmq.POLLIN)
        self._outboxes[child.name] = Outbox(
            self._context,
            launch.address,
            m.Envelope(SUPERVISOR, INCARNATION),
            topology.bound_of(self._settings),
        )
        self._log.debug("started", extra={"fields": {"stage": child.name, "pid": child.pid}})
        return child

    def _forget(self, child: Child) -> None:
        if child.state != "dead":
            self._poller.unregister(child.pidfd)
        child.close()
        del self._children[child.name]
        self._outboxes.pop(child.name).close()

    def _check_children(self) -> None:
        """Raise Stopping where a stage has ended that should be running."""
        for child in self._children.values():
            if child.state in ("starting", "ready") and not child.is_alive:
                self._hear_last_words(child)
                if child.stage == "prepare" and self._prepared is not None:
                    continue
                reason = self._reasons.get(child.name, child.describe_end())
                self._reasons = {child.name: reason}
                code = EXIT_STAGE_DIED if self._is_serving else EXIT_NOT_STARTED
                child.state = "dead"
                self._poller.unregister(child.pidfd)  # it would stay readable
                self._questions.lost(child.name)
                what = f"{child.name} died" if self._is_serving else f"cannot start: {child.stage}"
                self._log.error(f"{what}: {reason}")
                raise Stopping(code)

    def _hear_last_words(self, child: Child) -> None:
        """Wait a little for what a child said before it ended: its socket may still be on the way to ours."""
        end = time.monotonic() + LAST_WORDS_S
        self._drain_inbox()

        def has_spoken() -> bool:  # prepare's last words are its result, and it ends well
            return child.name in self._reasons or (child.stage == "prepare" and self._prepared is not None)

        while not has_spoken() and (child.exit_code or 0) >= 0:
            left_s = end - time.monotonic()
            if left_s <= 0 or not self._inbox.wait(left_s):
                return
            self._drain_inbox()

    # ------------------------------------------------------------------------------------------------------- loop

    def _turn_until(self, condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Turn the loop until a condition holds. Raises Stopping where a signal, a death or the deadline is first."""
        end = time.monotonic() + timeout_s
        while True:
            self._drain_inbox()
            if condition():
                return
            if number := self._signals.take():
                if self._is_serving:
                    raise Stopping(EXIT_OK)
                self._say(f"stopped by {signal.Signals(number).name} before it was ready")
                raise Stopping(128 + number)
            self._check_children()
            self._end_rounds()
            self._door.turn()
            self._questions.end_late()
            now = time.monotonic()
            if now >= end:
                late = ", ".join(child.name for child in self._children.values() if child.state == "starting")
                self._log.error(f"gave up waiting for {what} after {timeout_s:g} s{f': {late}' if late else ''}")
                raise Stopping(EXIT_OK if self._is_serving else EXIT_NOT_STARTED)
            if self._inbox.wait(0) or self._door.has_message():
                continue  # their descriptors are edge-triggered, so look before sleeping on them
            rounds = (one.deadline for one in self._rounds.values())
            soonest = min([end, now + POLL_S, *rounds, *self._questions.deadlines])
            self._poller.poll(max(0, round((soonest - now) * 1000)))

    def _drain_inbox(self) -> None:
        while (message := self._inbox.receive()) is not None:
            self._handle(message, self._inbox.last_sender)

    def _handle(self, message: m.SupervisorInbox, sender: str) -> None:
        match message:
            case m.Ready(facts):
                child = self._children[sender]
                child.state = "ready"
                self._facts = facts or self._facts
                self._log.debug("ready", extra={"fields": {"stage": sender}})
            case m.Failed(reason):
                self._reasons[sender] = reason
            case m.Prepared():
                self._prepared = message
            case m.Drained():
                self._drained.add(sender)
                # Who comes now is refused, rather than kept waiting in the backlog.
                self._listeners[self._gateways.index(sender)].close()
            case m.AskHealth(nonce):
                self._ask_health(sender, nonce, self._settings.supervisor.health_timeout_s)
            case m.Pong(nonce):
                if nonce in self._rounds:
                    self._rounds[nonce].answered(sender, message)
                    self._end_rounds()
            case m.AskServerStats(nonce):
                self._gather_stats(float("inf"), lambda stats: self._answer_stats(sender, nonce, stats))
            case m.Answer():
                self._questions.answered(sender, message)
            case _:
                assert_never(message)

    # ------------------------------------------------------------------------------------------------------ stats

    def _names_of_ready(self) -> list[str]:
        return [child.name for child in self._in_flow_order() if child.state == "ready"]

    def _in_flow_order(self) -> list[Child]:
        places = {name: place for place, name in enumerate(topology.FLOW)}
        return sorted(self._children.values(), key=lambda child: (places.get(child.stage, -1), child.name))

    def _answer_stats(self, asker: str, nonce: int, stats: ServerStats) -> None:
        if asker in self._outboxes:
            self._outboxes[asker].send(m.StatsAnswer(nonce, stats))

    def _gather_stats(self, timeout_s: float, then: Callable[[ServerStats], None]) -> None:
        """`timeout_s`: what who asks waits for stages at most, besides what the settings say."""
        timeout_s = min(timeout_s, self._settings.supervisor.health_timeout_s)
        name = self._settings.served_model_name or (self._prepared.model_name if self._prepared else "")
        state = "draining" if self._is_ending else "serving" if self._is_serving else "starting"
        facts = ServerFacts(name, self._url, state, self._facts)
        self._stats_collector.gather(facts, self._in_flow_order(), timeout_s, then)

    # ----------------------------------------------------------------------------------------------------- health

    def _ask_health(self, asker: str, asker_nonce: int, timeout_s: float) -> int:
        """Ping every stage; the answer goes to `asker` when all have answered or the time is up."""
        nonce, self._next_nonce = self._next_nonce, self._next_nonce + 1
        self._rounds[nonce] = HealthRound(asker, asker_nonce, timeout_s)
        for outbox in self._outboxes.values():
            outbox.send(m.Ping(nonce))
        return nonce

    def _end_rounds(self) -> None:
        for nonce, one in list(self._rounds.items()):
            if one.is_over(self._children.values()):
                del self._rounds[nonce]
                health = one.result(self._children.values())
                if one.asker == SUPERVISOR:
                    self._first_health = health
                elif one.asker in self._outboxes:
                    self._outboxes[one.asker].send(health)

    def _say(self, text: str, **fields: object) -> None:
        self._log.info(text, extra={"fields": fields})


class _Signals:
    """SIGINT and SIGTERM as a readable descriptor, so that one poll waits for everything."""

    WATCHED = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._taken = -SAME_SIGNAL_S
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, lambda *_: None) for number in self.WATCHED}

    def fileno(self) -> int:
        return self._read

    def take(self) -> int:
        """The number of one that came since the last call, or 0. What comes right behind another is the same: a process
        group and whoever started us may both pass on what they were sent."""
        try:
            numbers = os.read(self._read, 64)
        except BlockingIOError:
            return 0
        number = next((number for number in numbers if number in self.WATCHED), 0)
        now = time.monotonic()
        if number and now - self._taken < SAME_SIGNAL_S:
            return 0
        self._taken = now if number else self._taken
        return number

    def close(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._read)
        os.close(self._write)
