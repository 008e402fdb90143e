"""Client of the admin server: finds this user's servers and sends commands to them."""

import re
import time
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from pipeline.config.settings import Settings
from pipeline.config.source import SettingsSource
from pipeline.errors import UserError
from pipeline.metrics.stats import ServerStats
from pipeline.runtime import messages as m
from pipeline.runtime.security.peer_credentials import NEVER_MS, Monitor, connect_again, is_listening, problem_of
from pipeline.runtime.tracing import StageTrace
from pipeline.runtime.transport.inbox import MessageDecoder
from pipeline.supervisor.admin import admin_server
from pipeline.supervisor.restart.server_restart import RestartOrder
from pipeline.version import VERSION

ANSWER_S = 5.0
"""Added to the stages' timeout: the time in which the supervisor must answer."""
RETRY_S = 0.005
"""Time between two attempts to connect."""
STAGES_S = 3.0
"""Time for stages to report their counts."""

_ADMIN_SOCKET = re.compile(r"@(pipeline/((\d+)-[0-9a-f]+)/admin)$", re.MULTILINE | re.ASCII)

R = TypeVar("R")


def find_servers() -> list[str]:
    """The names of this user's running servers, by pid. The kernel lists their abstract sockets.

    Any user can listen at any name, also one with the pid of another process of ours, which `stop` would end. So a
    server is what listens itself."""
    # Reading the list takes several calls. If a socket is closed between two of them, the next one may be left out.
    named = {one for _ in range(2) for one in _ADMIN_SOCKET.findall(_sockets())}
    found = {name: int(pid) for address, name, pid in named if is_listening(address, int(pid))}
    return sorted(found, key=lambda name: found[name])


def is_running(server: str) -> bool:
    """Whether a server of this user still runs, by its name."""
    return is_listening(admin_server.address_of(server).removeprefix("ipc://@"), int(server.partition("-")[0]))


def _is_open(address: str) -> bool:
    """Whether some process listens there, even if so many wait for it that it takes no further connection."""
    name = address.removeprefix("ipc://")
    return any(name in _sockets() for _ in range(2))  # twice, as in `find_servers`


def _sockets() -> str:
    return Path("/proc/net/unix").read_text()


class Admin:
    """A connection to a server's admin socket. Use as a context manager. Raises UserError if the server does not
    answer."""

    def __init__(self, server: str) -> None:
        self.server = server
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(
            zmq.RECONNECT_IVL, NEVER_MS
        )  # each new connection must first pass the check of the server's user
        self._monitor = Monitor(self._context, self._socket)
        self._address = admin_server.address_of(server)
        self._is_connected = False
        self._socket.connect(self._address)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: MessageDecoder[admin_server.AdminReply] = MessageDecoder(admin_server.AdminReply)
        self._nonce = 0

    def stats(self, timeout_s: float = STAGES_S) -> ServerStats:
        """The server's stats. Stages that do not answer within `timeout_s` are reported as late."""
        self._nonce += 1
        return self._ask(admin_server.AskStats(self._nonce, timeout_s), admin_server.Stats, timeout_s + ANSWER_S).stats

    def send_command(
        self, request: m.ControlRequest, stages: list[str], timeout_s: float = ANSWER_S
    ) -> dict[str, admin_server.StageAnswer]:
        """Send a control request to stages; an empty list means all. Returns their answers by name."""
        self._nonce += 1
        reply = self._ask(
            admin_server.StageCommand(self._nonce, stages, request, timeout_s),
            admin_server.StageReplies,
            timeout_s + ANSWER_S,
        )
        return {answer.stage: answer for answer in reply.answers}

    def restart(self, stage: str, timeout_s: float) -> float:
        """Restart the process of a stage, such as `schedule.0`. Returns the pause in seconds. Raises UserError with the
        reason if it was not restarted."""
        self._nonce += 1
        question = admin_server.RestartStage(self._nonce, stage)
        return self._ask(question, admin_server.StageRestarted, timeout_s + ANSWER_S).pause_s

    def change_sleep(self, *, sleeps: bool, wakes_on_request: bool = False, timeout_s: float) -> None:
        """Put the server to sleep, or wake it. Raises UserError with the reason if it does not do that."""
        self._nonce += 1
        question = admin_server.ChangeSleep(self._nonce, sleeps, wakes_on_request)
        self._ask(question, admin_server.SleepChanged, timeout_s + ANSWER_S)

    def restart_server(self, order: RestartOrder, timeout_s: float) -> int:
        """Replace the server. Returns the pid of the next one. Raises UserError with the reason if there is none."""
        self._nonce += 1
        question = admin_server.RestartServer(self._nonce, order)
        return self._ask(question, admin_server.ServerRestarted, timeout_s + ANSWER_S).pid

    def restarts(self, since_s: float) -> StageTrace:
        """The restarts and reloads that had not ended before `since_s` (by time.monotonic()), as spans."""
        self._nonce += 1
        return self._ask(admin_server.AskRestarts(self._nonce, since_s), admin_server.RestartSpans, ANSWER_S).trace

    def settings_source(self) -> SettingsSource | None:
        """Where the server's settings came from; None if a program gave them."""
        self._nonce += 1
        return self._ask(admin_server.AskSource(self._nonce), admin_server.Source, ANSWER_S).source

    def reload(
        self, settings: Settings, source: SettingsSource, timeout_s: float, *, is_dry_run: bool = False
    ) -> admin_server.Reloaded:
        """Change the settings. `source` is where they come from."""
        self._nonce += 1
        question = admin_server.Reload(self._nonce, settings, source, is_dry_run)
        return self._ask(question, admin_server.Reloaded, timeout_s + ANSWER_S)

    def _ask(self, question: admin_server.AdminInbox, kind: type[R], timeout_s: float) -> R:
        end = time.monotonic() + timeout_s
        if not self._connect(end) or not self._send(self._encoder.encode(question)):
            raise UserError(f"server {self.server} did not answer within {timeout_s:g} s")
        while self._wait(end):
            try:
                reply = self._decoder.decode(self._socket.recv())
            except msgspec.DecodeError as error:
                raise UserError(
                    f"server {self.server} is of another version than this command ({VERSION}), which can't read its "
                    f"answer: {error}"
                ) from error
            if isinstance(reply, admin_server.Problem) and not reply.nonce:
                raise UserError(
                    f"server {self.server} does not understand this, it has another version: {reply.message}"
                )
            if reply.nonce != question.nonce:
                continue  # answers a question that timed out earlier
            if isinstance(reply, admin_server.Problem):
                raise UserError(reply.message)
            assert isinstance(reply, kind)
            return reply
        raise UserError(f"server {self.server} did not answer within {timeout_s:g} s")

    def _wait(self, end: float) -> bool:
        """Wait for a reply until `end`, by time.monotonic(). Returns whether there is one. Raises UserError if the
        connection ends first: no reply can come any more."""
        poller = zmq.Poller()
        for one in (self._socket, self._monitor.socket):
            poller.register(one, zmq.POLLIN)
        while poller.poll(max(0, round((end - time.monotonic()) * 1000))):
            events = [event for event, _ in self._monitor.take()]
            if self._socket.poll(0):
                return True
            if zmq.EVENT_DISCONNECTED in events:
                self._is_connected = False
                raise UserError(f"server {self.server} has ended without an answer")
        return False

    def _connect(self, end: float) -> bool:
        """Wait for a connection to a server of this user. Returns whether there is one. Raises UserError if the server
        has ended, or if another user owns it."""
        while True:
            for event, fd in self._monitor.take():
                self._is_connected = event == zmq.EVENT_CONNECTED
                if not self._is_connected:
                    if not _is_open(self._address):
                        raise UserError(f"server {self.server} has ended")
                    time.sleep(RETRY_S)
                    connect_again(self._socket, self._address)
                else:
                    self._check_user(fd)
            left_s = end - time.monotonic()
            if self._is_connected or not self._monitor.socket.poll(max(0, round(left_s * 1000))):
                return self._is_connected

    def _check_user(self, fd: int) -> None:
        try:
            problem = problem_of(fd, self._address)
        except OSError:
            self._is_connected = False  # it has ended; the next event says so
            return
        if problem:
            raise UserError(problem)

    def _send(self, data: bytes) -> bool:
        try:
            self._socket.send(data, zmq.NOBLOCK)
        except zmq.Again:  # the connection has just ended
            return False
        return True

    def __enter__(self) -> "Admin":
        return self

    def __exit__(self, *_: object) -> None:
        self._monitor.close()
        self._socket.close()
        self._context.term()
