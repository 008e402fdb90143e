"""The admin door: what `pipeline ps`, `top`, `trace` and `record` ask of a running server.

    command ──AskStats, StageCommand──► door (supervisor) ──ControlRequest──► stages
            ◄──Stats, StageReplies───── door ◄────────────Answer──── stages

A ROUTER at `ipc://@pipeline/<server>/admin`, open to processes of the same user alone. It lives in the supervisor's
loop and never makes it wait: messages are small and few, the questions open at once are bounded, each has a deadline,
and an answer that its asker does not take is dropped. Bytes that are no message are answered with `Problem`.
"""

import os
import time
from collections.abc import Callable, Iterable
from typing import assert_never

import msgspec
import zmq

from pipeline.metrics.stats import ServerStats
from pipeline.runtime import messages as m
from pipeline.runtime.channels import MessageDecoder

MAX_QUESTION_BYTES = 64 * 1024
MAX_OPEN_QUESTIONS = 64
MAX_TAKEN_AT_ONCE = 16
"""Messages taken in one turn of the supervisor's loop, so that a flood leaves it room for its work."""
MAX_WAITING = 16
"""Messages of one peer that may wait, each way."""
MAX_TIMEOUT_S = 600.0


def address_of(server: str) -> str:
    return f"ipc://@pipeline/{server}/admin"


# ------------------------------------------------------------------------------------------------------------ messages


class AskStats(m.Message, frozen=True, tag="ask_stats"):
    """Answered with `Stats` when all stages have answered, or the time is up: `timeout_s`, or the server's
    health_timeout_s where that is shorter."""

    nonce: int
    """Comes back with the answer."""
    timeout_s: float = 3.0


class StageCommand(m.Message, frozen=True, tag="tell"):
    """Pass an aside on to stages; answered with `StageReplies` when all have answered, or the time is up."""

    nonce: int
    stages: list[str]
    """Names as `schedule` (every replica of it) or `schedule.0`; empty is all."""
    request: m.ControlRequest
    """Its own nonce counts for nothing."""
    timeout_s: float = 10.0


class Stats(m.Message, frozen=True, tag="stats"):
    nonce: int
    stats: ServerStats


class StageAnswer(msgspec.Struct, array_like=True, frozen=True):
    stage: str
    body: msgspec.Raw
    """Nil where there is an error."""
    error: str = ""
    """Also where the stage did not answer in time."""


class StageReplies(m.Message, frozen=True, tag="told"):
    nonce: int
    answers: list[StageAnswer]


class Problem(m.Message, frozen=True, tag="problem"):
    """Why a question is not answered, in the user's words."""

    nonce: int
    """0 where the question could not be read."""
    message: str


AdminInbox = AskStats | StageCommand
AdminReply = Stats | StageReplies | Problem

Answers = dict[str, m.Answer]
"""By stage; who is not in it did not answer in time, or could not be asked."""


# ----------------------------------------------------------------------------------------------------------- questions


class _AdminQuestion(msgspec.Struct, eq=False):
    awaited: set[str]
    deadline: float
    then: Callable[[Answers], None]
    answers: Answers


class Questions:
    """ControlRequests that stages have been sent and not answered. `then` is called once for each, on every path but
    `close`."""

    def __init__(self, send: Callable[[str, m.ControlRequest], bool]) -> None:
        self._send = send
        self._open: dict[int, _AdminQuestion] = {}
        self._next_nonce = 1

    @property
    def is_full(self) -> bool:
        return len(self._open) >= MAX_OPEN_QUESTIONS

    @property
    def deadlines(self) -> list[float]:
        """By time.monotonic()."""
        return [question.deadline for question in self._open.values()]

    def ask(
        self,
        stages: Iterable[str],
        request: m.ControlRequest,
        timeout_s: float,
        then: Callable[[Answers], None],
    ) -> None:
        nonce, self._next_nonce = self._next_nonce, self._next_nonce + 1
        numbered = msgspec.structs.replace(request, nonce=nonce)
        awaited = {name for name in stages if self._send(name, numbered)}
        self._open[nonce] = _AdminQuestion(awaited, time.monotonic() + timeout_s, then, {})
        self._end_if_answered(nonce)

    def answered(self, stage: str, answer: m.Answer) -> None:
        """An answer came; one that is late, or that nobody asked for, is dropped."""
        question = self._open.get(answer.nonce)
        if question is not None and stage in question.awaited:
            question.awaited.discard(stage)
            question.answers[stage] = answer
            self._end_if_answered(answer.nonce)

    def lost(self, stage: str) -> None:
        """A stage has ended: nobody waits for it any more."""
        for nonce in list(self._open):
            self._open[nonce].awaited.discard(stage)
            self._end_if_answered(nonce)

    def end_late(self) -> None:
        """Answer the questions whose time is up with what there is."""
        now = time.monotonic()
        for nonce, question in list(self._open.items()):
            if now >= question.deadline:
                del self._open[nonce]
                question.then(question.answers)

    def _end_if_answered(self, nonce: int) -> None:
        if not self._open[nonce].awaited:
            question = self._open.pop(nonce)
            question.then(question.answers)


# ---------------------------------------------------------------------------------------------------------------- door


class AdminServer:
    """The socket. The supervisor calls `turn` in its loop, and sleeps on `fileno` where `has_message` is False.

    `stats(timeout_s, then)` gathers the server's stats and calls `then` with them; `names()` are the stages that can be
    asked now.
    """

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        server: str,
        questions: Questions,
        stats: Callable[[float, Callable[[ServerStats], None]], None],
        names: Callable[[], list[str]],
    ) -> None:
        self._questions = questions
        self._stats = stats
        self._names = names
        self._decoder: MessageDecoder[AdminInbox] = MessageDecoder(AdminInbox)
        self._encoder = msgspec.msgpack.Encoder()
        self._socket = context.socket(zmq.ROUTER)
        self._socket.set_hwm(MAX_WAITING)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MAX_QUESTION_BYTES)
        self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())  # the kernel reports the user of who connects
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(address_of(server))
        except zmq.ZMQError:
            self._socket.close()
            raise

    def fileno(self) -> int:
        """As of `Inbox`: edge-triggered, so ask `has_message` before sleeping on it."""
        return int(self._socket.get(zmq.FD))

    def has_message(self) -> bool:
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def turn(self) -> None:
        """Take what came, a bounded part of it."""
        for _ in range(MAX_TAKEN_AT_ONCE):
            try:
                peer, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) != 1:
                self._reply(peer, Problem(0, "a question is one frame"))
                continue
            try:
                message = self._decoder.decode(frames[0])
            except msgspec.DecodeError as error:
                self._reply(peer, Problem(0, f"this is no question: {error}"))
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
                self._tell(peer, message)
            case _:
                assert_never(message)

    def _tell(self, peer: bytes, message: StageCommand) -> None:
        known = self._names()
        wanted = [name for name in known if not message.stages or {name, name.partition(".")[0]} & set(message.stages)]
        unknown = [name for name in message.stages if not any(name in (one, one.partition(".")[0]) for one in known)]
        if unknown:
            problem = f"no stage {unknown[0][:100]!r} is ready; there are {', '.join(known) or 'none yet'}"
            self._reply(peer, Problem(message.nonce, problem))
            return
        if not 0 < message.timeout_s <= MAX_TIMEOUT_S:
            self._refuse_timeout(peer, message.nonce)
            return

        def then(answers: Answers) -> None:
            late = m.Answer(0, error=f"did not answer within {message.timeout_s:g} s")
            given = {name: answers.get(name, late) for name in wanted}
            said = [StageAnswer(name, answer.body, answer.error) for name, answer in given.items()]
            self._reply(peer, StageReplies(message.nonce, said))

        self._questions.ask(wanted, message.request, message.timeout_s, then)

    def _refuse_timeout(self, peer: bytes, nonce: int) -> None:
        self._reply(peer, Problem(nonce, f"timeout_s must be above 0 and at most {MAX_TIMEOUT_S:g}"))

    def _reply(self, peer: bytes, reply: AdminReply) -> None:
        """Answer; who has left, or takes nothing, gets nothing."""
        try:
            self._socket.send_multipart((peer, self._encoder.encode(reply)), zmq.NOBLOCK)
        except zmq.ZMQError:
            return

    def close(self) -> None:
        self._socket.close()
