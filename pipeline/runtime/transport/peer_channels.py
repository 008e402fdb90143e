"""The channels of a stage to its peers: made at its start, and changed when a process is replaced, added or removed."""

import os
import socket
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from pipeline.errors import UserError
from pipeline.runtime import messages as m
from pipeline.runtime.messages import Envelope
from pipeline.runtime.messages.lifecycle import EPOCH
from pipeline.runtime.replay_context import ReplayContext
from pipeline.runtime.topology import RING_BYTES
from pipeline.runtime.transport.arrays import Arrays
from pipeline.runtime.transport.curve import ClientKeys, CurveKeys
from pipeline.runtime.transport.inbox import Inbox
from pipeline.runtime.transport.memories import Memories
from pipeline.runtime.transport.outbox import Outbox
from pipeline.runtime.transport.ring_edge import RingEdge
from pipeline.shm import segment
from pipeline.shm.ring import POSITION_BYTES, RingReader, RingWriter

MAX_FDS = 64
"""More than one restart brings."""
DESCRIPTORS_S = 10.0
"""Maximum time for descriptors to arrive. The supervisor sends them before it sends `PeerRestarted`."""


class RingEnds(msgspec.Struct):
    """The ends of the rings that a process shares with one peer."""

    reader: RingEdge | None = None
    writer: RingWriter | None = None
    event_fds: list[int] = []


def ring_ends(rings: list[m.Ring], peer: str, incarnation: int) -> RingEnds:
    """Map the rings between this process and a peer's process of this incarnation."""
    ends = RingEnds()
    for ring in rings:
        if ring.peer != peer:
            continue
        data = segment.attach(ring.data_fd, ring.num_bytes, writable=ring.sends)
        position = segment.attach(ring.position_fd, POSITION_BYTES, writable=not ring.sends)
        ends.event_fds.append(ring.event_fd)
        if ring.sends:
            ends.writer = RingWriter(data, position, ring.event_fd, ring.num_bytes - RING_BYTES)
        else:
            ends.reader = RingEdge(Envelope(peer, incarnation), RingReader(data, position, ring.event_fd))
    return ends


class PeerChannels:
    """Owns the inbox, the outboxes and the mapped memory of a process: its `stage.Channels`."""

    def __init__(
        self,
        launch: m.Launch,
        union: Any,
        control_requests: Callable[[m.ControlRequest], None],
    ) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self.replay_context = ReplayContext()
        peers = {ring.peer for ring in launch.rings}
        self._rings = {name: ring_ends(launch.rings, name, launch.incarnations.get(name, 1)) for name in peers}
        readers = [ends.reader for ends in self._rings.values() if ends.reader is not None]
        self.inbox: Inbox[Any] = Inbox(
            self._context,
            launch.address,
            union,
            control_requests,
            readers,
            incarnations=launch.incarnations,
            tcp=launch.tcp,
        )
        self._own_keys = None if launch.tcp is None else CurveKeys(launch.tcp.public_key, launch.tcp.secret_key)
        self.inbox.on_peer_restarted = self._renew
        self._envelope = Envelope(launch.name, launch.incarnation)
        self.on_added: Callable[[str], None] = lambda _: None
        """Called with the name of a new peer when it has an outbox."""
        self.outboxes: dict[str, Outbox[Any]] = {
            peer.name: Outbox(
                self._context, peer.address, self._envelope, peer.bound, self._writer_to(peer.name), self._keys_to(peer)
            )
            for peer in launch.peers
        }
        self.memories = Memories()
        for one in launch.segments:
            memory = segment.attach(one.fd, one.num_bytes, writable=one.writable)
            self.memories.add(one.name, memory, one.incarnation)
        self.arrays = Arrays(self.memories, launch.name, launch.incarnation)
        self.arrays.remote = frozenset(peer.name for peer in launch.peers if peer.public_key)
        self._control = socket.socket(fileno=launch.control_fd) if launch.control_fd >= 0 else None
        if self._control is not None:
            self._control.settimeout(DESCRIPTORS_S)
            # Mapped by now. Open descriptors would keep the memory of peers that are gone.
            for fd in (fd for ring in launch.rings for fd in (ring.data_fd, ring.position_fd)):
                os.close(fd)
            for one in launch.segments:
                if not one.writable:
                    os.close(one.fd)

    def _writer_to(self, peer: str) -> RingWriter | None:
        ends = self._rings.get(peer)
        return None if ends is None else ends.writer

    def _keys_to(self, peer: m.PeerInbox) -> ClientKeys | None:
        """The keys of the connection to a peer, if it is on another host."""
        if not peer.public_key:
            return None
        assert self._own_keys is not None, f"{peer.name} is on another host, and this process has no keys"
        return ClientKeys(peer.public_key, self._own_keys)

    def _renew(self, message: m.PeerRestarted) -> None:
        """Called when the message is taken from the inbox: all that was received before is of the process before."""
        name, incarnation = message.peer.name, message.incarnation
        if message.is_removed:
            self._remove(name, incarnation)
            return
        fds = self._descriptors(message.epoch) if message.rings or message.segment is not None else []
        before = self._rings.pop(name, RingEnds())
        self._rings[name] = ends = ring_ends([_with_fds(ring, fds) for ring in message.rings], name, incarnation)
        if (shared := message.segment) is not None:
            memory = segment.attach(fds[shared.fd], shared.num_bytes, writable=False)
            self.memories.add(name, memory, incarnation)
        self.arrays.lost(name)
        if message.peer.public_key and self.inbox.allowlist is not None:
            self.inbox.allowlist.allow(name, message.peer.public_key)
        if (outbox := self.outboxes.get(name)) is not None:
            outbox.reconnect(message.peer.address, ends.writer, self._keys_to(message.peer))
        elif message.peer.address:
            peer = message.peer
            self.outboxes[name] = Outbox(
                self._context, peer.address, self._envelope, peer.bound, ends.writer, self._keys_to(peer)
            )
            self.on_added(name)
        self.inbox.replaced(name, incarnation, ends.reader)
        for fd in {*before.event_fds, *fds} - {*ends.event_fds}:
            os.close(fd)

    def _remove(self, name: str, incarnation: int) -> None:
        """A process is gone. Its segment stays until `forget`: messages that were taken before may still be read."""
        before = self._rings.pop(name, RingEnds())
        self.arrays.lost(name)
        if (outbox := self.outboxes.get(name)) is not None:
            outbox.detach()
        self.inbox.removed(name, incarnation)
        for fd in before.event_fds:
            os.close(fd)

    def forget(self, name: str) -> None:
        """Everything that a process has sent, which is gone, was handled: free its segment."""
        self.arrays.lost(name)
        self.memories.remove(name)

    def _descriptors(self, epoch: int) -> list[int]:
        """Receive the descriptors of a restart. Raises UserError if they don't arrive."""
        assert self._control is not None, "this process has no control socket"
        data, fds, _, _ = socket.recv_fds(self._control, EPOCH.size, MAX_FDS)
        if len(data) < EPOCH.size:
            raise UserError("the supervisor has closed the control socket")
        assert EPOCH.unpack(data) == (epoch,), f"descriptors of restart {EPOCH.unpack(data)} came, not of {epoch}"
        return fds

    def close(self, linger_s: float) -> None:
        """Close all sockets. Queued messages have `linger_s` to be sent."""
        self.inbox.close()
        if self._control is not None:
            self._control.close()
            for fd in (fd for ends in self._rings.values() for fd in ends.event_fds):
                os.close(fd)  # of a stage that ends before its process
            self._rings.clear()
        for outbox in self.outboxes.values():
            outbox.flush(linger_s)
        self._context.term()


def _with_fds(ring: m.Ring, fds: list[int]) -> m.Ring:
    return msgspec.structs.replace(
        ring, data_fd=fds[ring.data_fd], position_fd=fds[ring.position_fd], event_fd=fds[ring.event_fd]
    )
