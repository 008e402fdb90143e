"""The sending end of an edge between two stages; see `inbox.py`."""

import os
from collections.abc import Sequence
from typing import Generic, TypeVar

import msgspec
import zmq

from pipeline.runtime.messages import Envelope
from pipeline.runtime.replay_context import ReplayContext
from pipeline.runtime.transport.curve import ClientKeys, use_keys
from pipeline.shm.ring import RingWriter

T = TypeVar("T")


class Outbox(Generic[T]):
    """Sends to one peer. With a `replay_context`, sent messages are recorded under the name `peer`."""

    replay_context: ReplayContext | None = None
    peer = ""

    def __init__(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        address: str,
        envelope: Envelope,
        bound: int,
        ring: RingWriter | None = None,
        keys: ClientKeys | None = None,
    ) -> None:
        """With a `ring`, messages go through it; the socket is for those that do not fit. A peer on another host, at
        tcp, needs `keys`."""
        self._context = context
        self._bound = bound
        self._ring = ring
        self._socket = self._connected(address, keys)
        self._may_wake = len(os.sched_getaffinity(0)) > 1
        """On a single core, a peer that waits awake would only delay the message."""
        self._encoder = msgspec.msgpack.Encoder()
        self._head = self._encoder.encode(envelope)
        self.num_sent = 0
        self.num_refused = 0
        self.is_detached = False
        """The peer is gone, and messages to it are dropped."""

    def _connected(self, address: str, keys: ClientKeys | None) -> zmq.Socket[bytes]:
        assert (keys is not None) == address.startswith("tcp://"), f"{address} is reached without encryption"
        sock = self._context.socket(zmq.PUSH)
        sock.set_hwm(self._bound)
        sock.setsockopt(zmq.LINGER, 0)
        # Peers start in any order. libzmq's default of 100 ms would slow the start.
        sock.setsockopt(zmq.RECONNECT_IVL, 5)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 50)
        if keys is not None:
            use_keys(sock, address, keys)
        sock.connect(address)
        return sock

    def reconnect(self, address: str, ring: RingWriter | None = None, keys: ClientKeys | None = None) -> None:
        """Send to the successor of the peer's process from now on. What waits for the dead process is dropped."""
        self._socket.close()
        self._socket = self._connected(address, keys)
        self._ring = ring
        self.is_detached = False

    def detach(self) -> None:
        """The peer is gone for good: drop messages from now on."""
        self._socket.close()
        self._ring = None
        self.is_detached = True

    def send(self, message: T) -> bool:
        """Send a message. Returns False if the outbox is full. Never blocks."""
        return True if self.is_detached else self.send_encoded(self.encoded(message), message)

    def encoded(self, message: T) -> bytes:
        """A message as `send_encoded` takes it, also that of another outbox."""
        return self._encoder.encode(message)

    def send_encoded(self, body: bytes, message: T) -> bool:
        """The same for a message that was encoded already."""
        if self.is_detached:
            return True
        if not self._deliver(body):
            self._refused()
            return False
        self.num_sent += 1
        if self.replay_context is not None:
            self.replay_context.sent(self.peer, body, message)
        return True

    def send_all(self, messages: Sequence[T], *, wakes: bool = True) -> bool:
        """Send messages as one of the transport, which costs a fraction of as many. Returns False, and sends none of
        them, if the outbox is full. Never blocks. Unless this `wakes` the peer, `notify` must follow."""
        if self.is_detached or not messages:
            return True
        bodies = [self._encoder.encode(message) for message in messages]
        if not self._deliver(*bodies, wakes=wakes):
            self._refused()
            return False
        self.num_sent += len(bodies)
        if self.replay_context is not None:
            for body, message in zip(bodies, messages, strict=True):
                self.replay_context.sent(self.peer, body, message)
        return True

    def _refused(self) -> None:
        self.num_refused += 1
        if self.replay_context is not None:
            self.replay_context.refused(self.peer)

    def wake(self) -> None:
        """Wake the peer, because a message to it follows in a moment: then it is awake when the message comes. Does
        nothing if this process has a single core."""
        if not self.is_detached and self._may_wake and self._ring is not None:
            self._ring.wake()

    def notify(self) -> None:
        """Wake the peer for messages that were sent without a wake."""
        if not self.is_detached and self._ring is not None:
            self._ring.notify()

    def _deliver(self, *bodies: bytes, wakes: bool = True) -> bool:
        """Send these messages, together, or none of them. Returns whether it did."""
        if self._ring is not None:
            if self._ring.put(*bodies, wakes=wakes):
                return True
            if not self._ring.can_announce(len(bodies)):
                return False
        if not (self._put(*bodies) or (self._has_room() and self._put(*bodies))):
            return False
        if self._ring is not None:
            self._ring.announce(len(bodies))
        return True

    def _put(self, *bodies: bytes) -> bool:
        try:
            self._socket.send_multipart((self._head, *bodies), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _has_room(self) -> bool:
        """Whether the peer has made room. A send notices that at most once in a millisecond or so (`max_command_delay`
        of libzmq), and refuses messages meanwhile; asking for events notices it now."""
        return bool(int(self._socket.get(zmq.EVENTS)) & zmq.POLLOUT)

    def flush(self, timeout_s: float) -> None:
        """Close the socket; queued messages have `timeout_s` to be sent.

        A sent message is still lost if the receiver's queue is full: libzmq drops a closed connection before it reads
        the rest. So stages stop in flow order, when no messages are in transit.
        """
        self._socket.close(linger=round(timeout_s * 1000))

    def close(self) -> None:
        self._socket.close()


class RankOutboxes(Generic[T]):
    """Sends each message to all ranks of a stage, and encodes it once."""

    def __init__(self, outboxes: Sequence[Outbox[T]]) -> None:
        self._outboxes = tuple(outboxes)
        self._num_woken = max(1, min(len(outboxes), len(os.sched_getaffinity(0)) - 1))

    def send(self, message: T) -> bool:
        """Send a message. Returns False if an outbox is full: then only some ranks have the message."""
        body, is_sent = self._outboxes[0].encoded(message), True
        for outbox in self._outboxes:
            is_sent &= outbox.send_encoded(body, message)
        return is_sent

    def wake(self) -> None:
        """Wake the ranks, as `Outbox.wake`, but leave a core for this process: they wait awake."""
        for outbox in self._outboxes[: self._num_woken]:
            outbox.wake()


class GoneOutbox(Outbox[T]):
    """To a process that is gone for good, and was before its user started: drops messages."""

    def __init__(self) -> None:
        self.is_detached = True
