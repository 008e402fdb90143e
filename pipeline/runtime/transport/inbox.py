"""Typed inboxes and outboxes over ZeroMQ, and over shared memory where a hop must be fast.

A process has one inbox, whose address contains its incarnation, and an outbox for each peer. Sockets are abstract Unix
sockets: no file is left behind after a crash, and libzmq refuses other users by the kernel's peer credentials. A peer
on another host is reached at tcp (curve.py).

    Outbox.send  ──►  PUSH, bounded, never blocks  ──►  PULL  ──►  Inbox.receive / AsyncInbox.receive

A send never blocks: it returns False if the outbox is full, and the owner decides what to do. An edge holds up to the
outbox's bound at the sender, `INBOX_BOUND` at the receiver, and the kernel's buffer between them.

When a peer's process has been replaced, `Outbox.reconnect` and `Inbox.replaced` turn an edge to the successor. Messages
of the dead process that arrive later are dropped. Those of the successor that arrive earlier wait.
"""

import os
import select
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar, get_args

import msgspec
import zmq

from pipeline.runtime.messages import ControlRequest, Envelope, PeerRestarted, Tcp
from pipeline.runtime.replay_context import ReplayContext
from pipeline.runtime.transport import curve
from pipeline.runtime.transport.ring_edge import RingEdge

T = TypeVar("T")

INBOX_BOUND = 1024
"""Maximum number of queued messages per sender at a receiver. Without it, the I/O thread of a stage that hangs would
keep reading, and no sender would reach its bound."""

AWAKE_S = 0.0003
"""How long a receiver waits awake after `Outbox.wake`. The sender's message takes about a third of it."""

CONTROL_REQUESTS = frozenset(get_args(ControlRequest))


def address_of(server: str, name: str, incarnation: int) -> str:
    """The inbox address of one incarnation of `name`. `server` distinguishes servers on one machine."""
    return f"ipc://@pipeline/{server}/{name}.{incarnation}"


class MessageDecoder(Generic[T]):
    """Decodes MessagePack of one type or union. For invalid bytes it only raises msgspec.DecodeError."""

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
    """Receives a stage's messages; `union` is their type.

    It looks only at what a poll found readable, so a turn costs one poll, and for messages from a ring one read.

        poll ──► notice(readable descriptors) ──► take … take ──► poll

    With `control_request`, the inbox also accepts every `ControlRequest` and passes it to that function instead of the
    owner. With a `replay_context`, received messages are recorded. In a replay, the inbox is a subclass.
    """

    is_replayed = False
    replay_context: ReplayContext | None = None
    allowlist: "curve.Allowlist | None" = None
    """Of the peers on other hosts."""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        union: Any,
        control_request: Callable[[ControlRequest], None] | None = None,
        rings: Sequence[RingEdge] = (),
        incarnations: Mapping[str, int] | None = None,
        tcp: Tcp | None = None,
    ) -> None:
        """`incarnations` are those of the peers' processes. A peer that it does not name has the incarnation of its
        first message. With `tcp`, peers on other hosts can connect too; if `address` is at tcp, only those."""
        self._edges = tuple(rings)
        self._rings = {edge.envelope.sender: edge for edge in rings}
        self._socket = context.socket(zmq.PULL)
        self._socket.set_hwm(INBOX_BOUND)
        self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        self._socket.setsockopt(zmq.LINGER, 0)
        try:
            if not address.startswith("tcp://"):
                self._socket.bind(address)
            if tcp is not None:
                self.allowlist = curve.Allowlist(context, tcp.allowed)
                curve.bind(self._socket, tcp)
        except zmq.ZMQError:
            self._socket.close()
            raise
        self._readers = {edge.reader.fileno(): edge.reader for edge in rings}
        self._wake_fds: set[int] = set()
        self._was_woken = False
        """By a sender whose message has not arrived yet."""
        self._may_have_message = False
        """The socket had a message when its descriptor was readable, and was not found empty since."""
        self._poll = select.poll()
        for fd in self.filenos():
            self._poll.register(fd, select.POLLIN)
        self._envelopes: MessageDecoder[Envelope] = MessageDecoder(Envelope)
        self._messages: MessageDecoder[T] = MessageDecoder(union if control_request is None else union | ControlRequest)
        self._control_request = control_request
        self.on_peer_restarted: Callable[[PeerRestarted], None] | None = None
        """Called with this message before it is returned."""
        self.on_filenos_changed: Callable[[int, int], None] | None = None
        """Called with a descriptor that is watched no longer, and the one in its place; -1 for none."""
        self._incarnations = dict(incarnations or {})
        self._early: deque[tuple[Envelope, bytes]] = deque()
        """Messages of processes whose predecessor is not known to be dead yet."""
        self._released: deque[tuple[Envelope, bytes]] = deque()
        """Those that can be taken now, before any that arrives later."""
        self.num_received = 0
        self.num_stale = 0
        """Messages from earlier incarnations, which are dropped."""
        self.last_sender = ""
        self.wait_s = 0.0
        """How long the owner has waited here. In an asyncio stage: how long messages have waited for the loop."""
        self.num_wakes = 0

    @property
    def num_early(self) -> int:
        """Messages that wait because their sender's predecessor is not known to be dead."""
        return len(self._early)

    def fileno(self) -> int:
        """The descriptor that becomes readable after an event, perhaps a message.

        It is edge-triggered: using the socket makes it unreadable even if messages are queued. So call `has_message`
        after each turn, and again before each wait.
        """
        return int(self._socket.get(zmq.FD))

    def filenos(self) -> list[int]:
        """The descriptors of the socket and of the rings. `notice` makes them unreadable."""
        return [self.fileno(), *self._readers]

    def wake_by(self, fd: int) -> None:
        """Make `wait` also return when this descriptor is readable. There may be several."""
        self._wake_fds.add(fd)
        self._poll.register(fd, select.POLLIN)

    def notice(self, fd: int) -> None:
        """Look at a readable descriptor: afterwards `take` returns what has arrived there, and what other senders have
        put into rings without a wake. Makes it unreadable until the next event."""
        if (reader := self._readers.get(fd)) is not None:
            reader.count()
            self._was_woken |= reader.was_woken
            for other in self._readers.values():
                other.look()
        elif fd not in self._wake_fds:
            self._may_have_message = bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLIN)

    def is_ready(self) -> bool:
        """Whether a message that was noticed waits."""
        if self._may_have_message or self._released:
            return True
        for edge in self._edges:  # noqa: SIM110 - once per turn: no generator, and no call for each edge
            if edge.early if edge.awaits_socket else edge.reader.num_waiting:
                return True
        return False

    def has_message(self) -> bool:
        """Whether a message is queued. Makes the descriptors unreadable until the next event."""
        self._look()
        return self.is_ready()

    def _look(self) -> None:
        """Notice what has arrived, without waiting."""
        for fd, _ in self._poll.poll(0):
            self.notice(fd)

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for a message or for `wake_by`'s descriptor. Returns whether either is ready."""
        begun = now = time.monotonic()
        end, is_ready, is_woken = begun + timeout_s, self.is_ready(), False
        while not (is_ready or is_woken):
            for fd, _ in self._poll.poll(max(0, (end - now) * 1000)):
                self.notice(fd)
                is_woken |= fd in self._wake_fds
            is_ready = self.is_ready() or self._wait_awake()
            now = time.monotonic()
            if now >= end:
                break
        self.wait_s += now - begun
        self.num_wakes += 1
        return is_ready or is_woken

    def _wait_awake(self) -> bool:
        """If a sender has announced a message by a wake, look for it without sleeping. Returns whether any came."""
        if not self._was_woken:
            return False
        self._was_woken = False
        end = time.monotonic() + AWAKE_S
        while not (is_ready := self.is_ready()) and time.monotonic() < end:
            self._look()
        self._was_woken = False
        return is_ready

    async def replayed(self) -> list[T]:
        """In a replay: wait for the turn of the next received messages, and return them."""
        raise NotImplementedError

    def end_turn(self) -> None:
        """Record that the messages since the last call were taken in one turn."""
        if self.replay_context is not None:
            self.replay_context.end_turn()

    def receive(self) -> T | None:
        """The next message, or None if none is queued. Raises msgspec.DecodeError as `take` does."""
        if not self.is_ready():
            self._look()
        message = self.take()
        if message is not None:
            self.end_turn()
        return message

    def take(self) -> T | None:
        """The next message that was noticed, for one of several messages of a turn. Call `end_turn` after the last.

        Raises msgspec.DecodeError for a message that is not in `union`. Peers are our own stages, so this is a bug and
        ends the stage.
        """
        while (arrival := self._arrival()) is not None:
            envelope, body = arrival
            if envelope.incarnation != (known := self._incarnations.setdefault(envelope.sender, envelope.incarnation)):
                if envelope.incarnation > known:
                    self._early.append(arrival)
                else:
                    self.num_stale += 1
                continue
            self.num_received += 1
            self.last_sender = envelope.sender
            message = self._messages.decode(body)
            if self._control_request is not None and type(message) in CONTROL_REQUESTS:
                self._control_request(message)  # type: ignore[arg-type]
                continue
            if self.replay_context is not None:
                self.replay_context.received(envelope.sender, envelope.incarnation, body, message)
            if type(message) is PeerRestarted and self.on_peer_restarted is not None:
                self.on_peer_restarted(message)  # type: ignore[arg-type]
            return message
        return None

    def _arrival(self) -> tuple[Envelope, bytes] | None:
        """The next message that was noticed, undecoded; None if there is none."""
        if self._released:
            return self._released.popleft()
        for edge in self._edges:
            if (edge.reader.num_waiting or edge.awaits_socket) and (body := edge.take()) is not None:
                return edge.envelope, body
        while self._may_have_message:
            try:
                head, *bodies = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._may_have_message = False
                break
            envelope = self._envelopes.decode(head)
            edge_of_sender = self._rings.get(envelope.sender)
            if edge_of_sender is None or edge_of_sender.envelope.incarnation != envelope.incarnation:
                body, *others = bodies
                if others:  # sent together
                    self._released.extend((envelope, other) for other in others)
                return envelope, body
            edge_of_sender.early.extend(bodies)
            if (found := edge_of_sender.take()) is not None:
                return envelope, found
        return None

    def replaced(self, sender: str, incarnation: int, edge: RingEdge | None = None) -> None:
        """The process of a peer has been replaced. `edge` is the ring from its successor, if they share one."""
        self._incarnations[sender] = incarnation
        released, self._early = self._early, deque()
        for arrival in released:
            envelope = arrival[0]
            if envelope.sender != sender or envelope.incarnation > incarnation:
                self._early.append(arrival)
            elif envelope.incarnation < incarnation:
                self.num_stale += 1
            elif edge is None:
                self._released.append(arrival)
            else:
                edge.early.append(arrival[1])  # too large for the ring, which announces it
        before = self._rings.pop(sender, None)
        if edge is not None:
            self._rings[sender] = edge
        self._edges = tuple(self._rings.values())
        self._watch(before, edge)

    def removed(self, sender: str, incarnation: int) -> None:
        """A peer's process is gone: what it has sent is dropped. A later process of this name gets a number above the
        next one, which no process has."""
        self.replaced(sender, incarnation + 1)

    def early_of(self, sender: str) -> list[T]:
        """The messages of a process that has not replaced `sender` yet. They stay until `replaced` or `drop_early`."""
        return [self._messages.decode(body) for envelope, body in self._early if envelope.sender == sender]

    def drop_early(self, sender: str) -> None:
        """Forget the messages of a successor that will not replace `sender`."""
        self._early = deque(arrival for arrival in self._early if arrival[0].sender != sender)

    def _watch(self, before: RingEdge | None, edge: RingEdge | None) -> None:
        """Watch the descriptor of a ring instead of another one's."""
        old, new = -1 if before is None else before.reader.fileno(), -1 if edge is None else edge.reader.fileno()
        if old >= 0:
            del self._readers[old]
            self._poll.unregister(old)
        if edge is not None:
            self._readers[new] = edge.reader
            self._poll.register(new, select.POLLIN)
        if self.on_filenos_changed is not None:
            self.on_filenos_changed(old, new)

    def receive_all(self) -> list[T]:
        """All queued messages."""
        self._look()
        return self._take_all()

    def _take_all(self) -> list[T]:
        messages = []
        while (message := self.take()) is not None:
            messages.append(message)
        self.end_turn()
        return messages

    def wait_all(self, timeout_s: float) -> list[T]:
        """Wait at most `timeout_s` for a message, then return all that have arrived."""
        self.wait(timeout_s)
        return self._take_all()

    def close(self) -> None:
        self._socket.close()
