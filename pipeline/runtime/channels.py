"""Typed inboxes and outboxes over ZeroMQ.

A process has one inbox, at an address that carries its incarnation, and an outbox for each peer. Sockets are abstract
Unix sockets: they leave no file behind, whatever dies; the kernel tells libzmq who connects, and other users are
refused.

    Outbox.send  ──►  PUSH, bounded, never blocks  ──►  PULL  ──►  Inbox.receive / AsyncInbox.receive

Nobody blocks in a send: an outbox whose bound is reached says so, and its owner decides what then. An edge holds its
bound on the sender's side, `INBOX_BOUND` on the receiver's, and what fits the kernel's buffer between them.
"""

import asyncio
import os
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar, get_args

import msgspec
import zmq

from pipeline.runtime.messages import ControlRequest, Envelope
from pipeline.runtime.replay_context import ReplayContext

T = TypeVar("T")

INBOX_BOUND = 1024
"""Messages of each sender that may wait inside a receiver. Without it the receiver's I/O thread would go on taking
messages for a stage that hangs, and no sender would ever reach its bound."""

CONTROL_REQUESTS = frozenset(get_args(ControlRequest))


def address_of(server: str, name: str, incarnation: int) -> str:
    """Where the inbox of one incarnation of `name` listens. `server` tells servers on one machine apart."""
    return f"ipc://@pipeline/{server}/{name}.{incarnation}"


class MessageDecoder(Generic[T]):
    """Decodes MessagePack of one type or union. Raises msgspec.DecodeError alone, whatever the bytes are."""

    def __init__(self, union: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)

    def decode(self, data: bytes | bytearray) -> T:
        try:
            return self._decoder.decode(data)
        except UnicodeDecodeError as error:
            raise msgspec.DecodeError(f"a string is not UTF-8: {error}") from error
        except RecursionError as error:
            raise msgspec.DecodeError("nested too deeply") from error


class Inbox(Generic[T]):
    """Where a stage receives. `union` is the union of messages it takes.

    With `control_request`, the inbox takes every `ControlRequest` besides, and hands those to that function rather than
    to its owner. With a `replay_context`, what is received is recorded. One that replays is filled by a tape:
    pipeline.replay.player.
    """

    is_replayed = False
    replay_context: ReplayContext | None = None
    _poller: zmq.Poller | None = None

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        union: Any,
        control_request: Callable[[ControlRequest], None] | None = None,
    ) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.set_hwm(INBOX_BOUND)
        # The kernel reports the effective user of who connects.
        self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            self._socket.bind(address)
        except zmq.ZMQError:
            self._socket.close()
            raise
        self._envelopes: MessageDecoder[Envelope] = MessageDecoder(Envelope)
        self._messages: MessageDecoder[T] = MessageDecoder(union if control_request is None else union | ControlRequest)
        self._aside = control_request
        self._incarnations: dict[str, int] = {}
        self.num_received = 0
        self.num_stale = 0
        """Messages from incarnations that are over."""
        self.last_sender = ""
        self.wait_s = 0.0
        """How long its owner has waited here; of an asyncio stage, how long messages waited for its loop."""
        self.num_wakes = 0

    def fileno(self) -> int:
        """The descriptor that turns readable when something has happened, perhaps a message.

        It stays readable until the socket is used, and then says nothing about messages that wait: ask `has_message`
        after each wake, and again before each wait.
        """
        return int(self._socket.get(zmq.FD))

    def wake_by(self, fd: int) -> None:
        """Let `wait` end when another descriptor is readable too."""
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(fd, zmq.POLLIN)

    def has_message(self) -> bool:
        """Whether a message waits now. Makes the descriptor unreadable until something new happens."""
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def wait(self, timeout_s: float) -> bool:
        """Wait until a message is there, at most `timeout_s`. Returns whether one is, or what `wake_by` was given."""
        begun, timeout_ms = time.monotonic(), max(0, round(timeout_s * 1000))
        is_there = bool(self._socket.poll(timeout_ms) if self._poller is None else self._poller.poll(timeout_ms))
        self.wait_s += time.monotonic() - begun
        self.num_wakes += 1
        return is_there

    async def replayed(self) -> list[T]:
        """Of an inbox that replays: what is received next, when it is its turn."""
        raise NotImplementedError

    def took(self) -> None:
        """Note that what was received since the last time was handed over at once: one wake of a recording."""
        if self.replay_context is not None:
            self.replay_context.took()

    def receive(self) -> T | None:
        """The next message, or None where there is none now. Raises msgspec.DecodeError as `take`."""
        message = self.take()
        if message is not None:
            self.took()
        return message

    def take(self) -> T | None:
        """`receive`, as one of several messages of a wake: `took` is to be called after the last.

        Raises msgspec.DecodeError if a peer sent what this inbox does not take: peers are our own stages, so that is
        a bug and ends the stage.
        """
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return None
            head, body = frames
            envelope = self._envelopes.decode(head)
            if envelope.incarnation < self._incarnations.get(envelope.sender, 0):
                self.num_stale += 1
                continue
            self._incarnations[envelope.sender] = envelope.incarnation
            self.num_received += 1
            self.last_sender = envelope.sender
            message = self._messages.decode(body)
            if self._aside is not None and type(message) in CONTROL_REQUESTS:
                self._aside(message)  # type: ignore[arg-type]
                continue
            if self.replay_context is not None:
                self.replay_context.received(envelope.sender, envelope.incarnation, body, message)
            return message

    def receive_all(self) -> list[T]:
        """Everything that is there now."""
        messages = []
        while (message := self.take()) is not None:
            messages.append(message)
        self.took()
        return messages

    def wait_all(self, timeout_s: float) -> list[T]:
        """Wait for a message at most `timeout_s`, then take everything that is there."""
        self.wait(timeout_s)
        return self.receive_all()

    def close(self) -> None:
        self._socket.close()


class AsyncInbox(Generic[T]):
    """The same for an asyncio stage: one wake for however many messages have come."""

    def __init__(self, inbox: Inbox[T]) -> None:
        self._inbox = inbox
        self._readable = asyncio.Event()
        self._woken_s = 0.0
        self._loop = asyncio.get_running_loop()
        if not inbox.is_replayed:
            self._loop.add_reader(inbox.fileno(), self._wake)

    def _wake(self) -> None:
        # Asking is also what makes the descriptor unreadable: else the loop would spin through this callback for as
        # long as the receiver is busy with something else.
        if self._inbox.has_message() and not self._readable.is_set():
            self._woken_s = time.monotonic()
            self._readable.set()

    async def receive_all(self, limit: int = 256) -> list[T]:
        """Wait for a message, then take what is there, at most `limit` so that a flood leaves room for other tasks.
        They have a turn before each receive, also when messages are there already. No message is lost to a
        cancellation.

        The wait has no deadline of its own: an idle server has nothing to receive. The supervisor's death and `Stop`
        both end it.
        """
        await asyncio.sleep(0)
        if self._inbox.is_replayed:
            return await self._inbox.replayed()
        while True:
            messages: list[T] = []
            while len(messages) < limit and (message := self._inbox.take()) is not None:
                messages.append(message)
            if messages:
                self._inbox.took()
                return messages
            self._readable.clear()
            if not self._inbox.has_message():
                await self._readable.wait()
                self._inbox.wait_s += time.monotonic() - self._woken_s
                self._inbox.num_wakes += 1

    async def receive_now(self) -> list[T]:
        """Everything that is there now, perhaps nothing."""
        return await self._inbox.replayed() if self._inbox.is_replayed else self._inbox.receive_all()

    def close(self) -> None:
        if not self._inbox.is_replayed:
            self._loop.remove_reader(self._inbox.fileno())
        self._inbox.close()


class Outbox(Generic[T]):
    """Where one peer is sent to. With a `replay_context`, what is sent is recorded, as to `peer`."""

    replay_context: ReplayContext | None = None
    peer = ""

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", address: str, envelope: Envelope, bound: int) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.set_hwm(bound)
        self._socket.setsockopt(zmq.LINGER, 0)
        # Peers start in any order; the library's own 100 ms would show in the time to start.
        self._socket.setsockopt(zmq.RECONNECT_IVL, 5)
        self._socket.setsockopt(zmq.RECONNECT_IVL_MAX, 50)
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()
        self._head = self._encoder.encode(envelope)
        self.num_sent = 0
        self.num_refused = 0

    def send(self, message: T) -> bool:
        """Send, or return False where the edge's bound is reached. Never blocks."""
        body = self._encoder.encode(message)
        try:
            self._socket.send_multipart((self._head, body), zmq.NOBLOCK)
        except zmq.Again:
            self.num_refused += 1
            if self.replay_context is not None:
                self.replay_context.refused(self.peer)
            return False
        self.num_sent += 1
        if self.replay_context is not None:
            self.replay_context.sent(self.peer, body, message)
        return True

    def flush(self, timeout_s: float) -> None:
        """Close, giving what is queued at most `timeout_s` to leave.

        What has left may still be lost if the receiver is at its bound just then: libzmq gives up a connection whose
        other end has gone before it reads on. So stages stop in flow order, when nothing is on its way any more.
        """
        self._socket.close(linger=round(timeout_s * 1000))

    def close(self) -> None:
        self._socket.close()
