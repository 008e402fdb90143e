"""The admin server of the supervisor, for `pipeline ps`, `top`, `trace`, `restart`, `reload`, `sleep` and others.

    command ──AskStats, StageCommand──► AdminServer (supervisor) ──ControlRequest──► stages
            ◄──Stats, StageReplies───── AdminServer ◄────────────Answer──── stages
            ──RestartStage, Reload──► … ──StageRestarted, Reloaded──► command

A ROUTER at `ipc://@pipeline/<server>/admin`, open to processes of the same user only. It runs in the supervisor's loop
and never blocks it: messages are small and few, the number of open questions is bounded, each has a deadline, and an
answer that its peer does not read is dropped. Bytes that are not a message are answered with `Problem`.
"""

import os
import time
from collections.abc import Callable
from typing import assert_never

import msgspec
import zmq

from pipeline.config.settings import Settings
from pipeline.config.source import SettingsSource
from pipeline.metrics.stats import ServerStats
from pipeline.runtime import messages as m
from pipeline.runtime.tracing import StageTrace
from pipeline.runtime.transport.inbox import MessageDecoder
from pipeline.supervisor.admin.questions import MAX_OPEN_QUESTIONS, Answers, Questions
from pipeline.supervisor.reconfigure.changed_settings import Change
from pipeline.supervisor.restart.server_restart import AskRestart, RestartOrder

MAX_QUESTION_BYTES = 1024 * 1024
"""Settings with 1,024 named API keys have a third of it."""
MAX_TAKEN_AT_ONCE = 16
"""Messages handled in one turn of the supervisor's loop, so that a flood cannot stall it."""
MAX_WAITING = 16
"""High-water mark of each peer, in messages, both ways."""
MAX_TIMEOUT_S = 600.0


def address_of(server: str) -> str:
    return f"ipc://@pipeline/{server}/admin"


# ------------------------------------------------------------------------------------------------------------ messages


class AskStats(m.Message, frozen=True, tag="ask_stats"):
    """Answered with `Stats` when all stages have answered or `timeout_s` has passed. The server's
    supervisor.health_timeout_s is an upper limit."""

    nonce: int
    """Repeated in the answer."""
    timeout_s: float = 3.0


class StageCommand(m.Message, frozen=True, tag="tell"):
    """Forward a control request to stages. Answered with `StageReplies` when all have answered or the timeout has
    passed."""

    nonce: int
    stages: list[str]
    """Names such as `schedule` (all replicas) or `schedule.0`; empty for all stages."""
    request: m.ControlRequest
    """Its nonce is ignored."""
    timeout_s: float = 10.0


class RestartStage(m.Message, frozen=True, tag="restart_stage"):
    """Restart the process of a stage. Answered with `StageRestarted` when its successor serves, or with `Problem`."""

    nonce: int
    stage: str
    """A name such as `schedule.0`."""


class StageRestarted(m.Message, frozen=True, tag="stage_restarted"):
    nonce: int
    pause_s: float
    """From the end of the process before to the start of its successor's service."""


class RestartServer(m.Message, frozen=True, tag="restart_server"):
    """Replace the whole server. Answered with `ServerRestarted` when the next one serves, or is about to start because
    this one ends first; or with `Problem`."""

    nonce: int
    order: RestartOrder


class ServerRestarted(m.Message, frozen=True, tag="server_restarted"):
    nonce: int
    pid: int
    """Of the next server: another process, or this one."""


class ChangeSleep(m.Message, frozen=True, tag="change_sleep"):
    """Put the server to sleep, or wake it. Answered when that is done with `SleepChanged`, or with `Problem`."""

    nonce: int
    sleeps: bool
    wakes_on_request: bool = False


class SleepChanged(m.Message, frozen=True, tag="sleep_changed"):
    nonce: int


class AskRestarts(m.Message, frozen=True, tag="ask_restarts"):
    """Answered with `RestartSpans`."""

    nonce: int
    since_s: float
    """By time.monotonic()."""


class RestartSpans(m.Message, frozen=True, tag="restart_spans"):
    """The restarts and reloads that had not ended before `since_s`, as a trace of the supervisor."""

    nonce: int
    trace: StageTrace


class AskSource(m.Message, frozen=True, tag="ask_source"):
    """Answered with `Source`."""

    nonce: int


class Source(m.Message, frozen=True, tag="source"):
    nonce: int
    source: SettingsSource | None
    """Where the server's settings came from; None if a program gave them."""


class Reload(m.Message, frozen=True, tag="reload"):
    """Change the settings. Answered with `Reloaded` when all stages that use them have been restarted."""

    nonce: int
    settings: Settings
    source: SettingsSource
    is_dry_run: bool


class Reloaded(m.Message, frozen=True, tag="reloaded"):
    nonce: int
    changes: list[Change]
    """If one of them is refused, nothing was changed."""
    problem: str = ""
    """Why the settings stay as they were, unless a change is refused."""
    keys: str = ""
    """Which API keys were added, changed or removed, in words."""


class Stats(m.Message, frozen=True, tag="stats"):
    nonce: int
    stats: ServerStats


class StageAnswer(msgspec.Struct, array_like=True, frozen=True):
    stage: str
    body: msgspec.Raw
    """Nil on an error."""
    error: str = ""
    """Also set if the stage did not answer in time."""


class StageReplies(m.Message, frozen=True, tag="told"):
    nonce: int
    answers: list[StageAnswer]


class Problem(m.Message, frozen=True, tag="problem"):
    """An invalid question, with the reason for the user."""

    nonce: int
    """0 if the question could not be decoded."""
    message: str


AdminInbox = AskStats | StageCommand | RestartStage | AskRestarts | AskSource | Reload | ChangeSleep | RestartServer
AdminReply = (
    Stats | StageReplies | StageRestarted | RestartSpans | Source | Reloaded | SleepChanged | Problem | ServerRestarted
)

ReloadDone = Callable[[list[Change], str, str], None]
"""Called with the fields of `Reloaded`."""

# ------------------------------------------------------------------------------------------------------------ socket


class AdminServer:
    """The socket. The supervisor calls `turn` in its loop, and may sleep on `fileno` if `has_message` is False.
    `stats(timeout_s, then)` collects the server's stats and calls `then` with them. `names()` returns the stages that
    are ready. `restart(name, done)` restarts one, and calls `done` with the pause or with the reason why it was not
    restarted. `reload(settings, source, is_dry_run, done)` changes the settings, and `source()` says where they came
    from. `restarts(since_s)` returns the spans of restarts. `change_sleep` is `Sleeper.change`.
    `restart_server(order, done)` replaces the server, and calls `done` as `ServerRestart.ask`."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        server: str,
        questions: Questions,
        stats: Callable[[float, Callable[[ServerStats], None]], None],
        names: Callable[[], list[str]],
        restart: Callable[[str, Callable[[float, str], None]], None],
        reload: Callable[[Settings, SettingsSource, bool, ReloadDone], None],
        source: Callable[[], SettingsSource | None],
        restarts: Callable[[float], StageTrace],
        change_sleep: Callable[[bool, bool, Callable[[str], None]], None],
        restart_server: AskRestart,
    ) -> None:
        self._questions = questions
        self._stats = stats
        self._names = names
        self._restart = restart
        self._reload = reload
        self._source = source
        self._restarts = restarts
        self._change_sleep = change_sleep
        self._restart_server = restart_server
        self._traced_until_s = 0.0
        """End of the window of a trace that was asked for, by time.monotonic()."""
        self._decoder: MessageDecoder[AdminInbox] = MessageDecoder(AdminInbox)
        self._encoder = msgspec.msgpack.Encoder()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set_hwm(MAX_WAITING)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_QUESTION_BYTES)
        self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())  # the kernel reports the peer's user
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(address_of(server))
        except zmq.ZMQError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """Edge-triggered like an `Inbox`: check `has_message` before sleeping on it."""
        return int(self._socket.get(zmq.FD))

    def has_message(self) -> bool:
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def turn(self) -> None:
        """Handle a bounded number of messages."""
        for _ in range(MAX_TAKEN_AT_ONCE):
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 1:
                self._reply(peer, Problem(0, "a question must be one frame"))
                continue
            try:
                message = self._decoder.decode(frames[0])
            except msgspec.DecodeError as error:
                self._reply(peer, Problem(0, f"invalid question: {error}"))
                continue
            self._handle(peer, message)

    def _handle(self, peer: bytes, message: AdminInbox) -> None:
        if self._questions.is_full:
            self._reply(peer, Problem(message.nonce, f"{MAX_OPEN_QUESTIONS} questions are open; ask again later"))
            return
        match message:
            case AskStats(nonce, timeout_s):
                if not 0 < timeout_s <= MAX_TIMEOUT_S:
                    self._refuse_timeout(peer, nonce)
                    return
                self._stats(timeout_s, lambda stats: self._reply(peer, Stats(nonce, stats)))
            case StageCommand():
                self._send_command(peer, message)
            case RestartStage():
                self._restart_stage(peer, message)
            case ChangeSleep(nonce, sleeps, wakes_on_request):
                self._change_sleep(
                    sleeps,
                    wakes_on_request,
                    lambda problem: self._reply(peer, Problem(nonce, problem) if problem else SleepChanged(nonce)),
                )
            case RestartServer(nonce, order):
                self._restart_server(
                    order,
                    lambda pid, problem: self._reply(
                        peer, Problem(nonce, problem) if problem else ServerRestarted(nonce, pid)
                    ),
                )
            case AskRestarts(nonce, since_s):
                self._reply(peer, RestartSpans(nonce, self._restarts(since_s)))
            case AskSource(nonce):
                self._reply(peer, Source(nonce, self._source()))
            case Reload(nonce, settings, source, is_dry_run):
                self._reload(
                    settings,
                    source,
                    is_dry_run,
                    lambda changes, problem, keys: self._reply(peer, Reloaded(nonce, changes, problem, keys)),
                )
            case _:
                assert_never(message)

    def _send_command(self, peer: bytes, message: StageCommand) -> None:
        known = self._names()
        wanted = [name for name in known if not message.stages or {name, name.partition(".")[0]} & set(message.stages)]
        unknown = [name for name in message.stages if not any(name in (one, one.partition(".")[0]) for one in known)]
        if unknown:
            problem = f"no stage {unknown[0][:100]!r} is ready; ready: {', '.join(known) or 'none'}"
            self._reply(peer, Problem(message.nonce, problem))
            return
        if not 0 < message.timeout_s <= MAX_TIMEOUT_S:
            self._refuse_timeout(peer, message.nonce)
            return

        match message.request:
            case m.Trace(_, window_s):
                self._traced_until_s = time.monotonic() + window_s
            case m.TakeTrace(_, goes_on):
                self._traced_until_s = self._traced_until_s if goes_on else 0.0

        def then(answers: Answers) -> None:
            late = m.Answer(0, error=f"did not answer within {message.timeout_s:g} s")
            given = {name: answers.get(name, late) for name in wanted}
            said = [StageAnswer(name, answer.body, answer.error) for name, answer in given.items()]
            self._reply(peer, StageReplies(message.nonce, said))

        self._questions.ask(wanted, message.request, message.timeout_s, then)

    def trace_successor(self, name: str) -> None:
        """A process that replaces another one is ready: it records too, if the others do."""
        if (left_s := self._traced_until_s - time.monotonic()) > 0:
            self._questions.ask([name], m.Trace(0, left_s), left_s, lambda _: None)

    def _restart_stage(self, peer: bytes, message: RestartStage) -> None:
        if message.stage not in (known := self._names()):
            problem = f"no stage {message.stage[:100]!r} is ready; ready: {', '.join(known) or 'none'}"
            self._reply(peer, Problem(message.nonce, problem))
            return

        def done(pause_s: float, problem: str) -> None:
            reply = Problem(message.nonce, problem) if problem else StageRestarted(message.nonce, pause_s)
            self._reply(peer, reply)

        self._restart(message.stage, done)

    def _refuse_timeout(self, peer: bytes, nonce: int) -> None:
        self._reply(peer, Problem(nonce, f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:g}"))

    def _reply(self, peer: bytes, reply: AdminReply) -> None:
        """Send a reply. Drop it if the peer is gone or does not read."""
        try:
            self._socket.send_multipart((peer, self._encoder.encode(reply)), zmq.NOBLOCK)
        except zmq.ZMQError:
            return

    def close(self) -> None:
        self._socket.close()
