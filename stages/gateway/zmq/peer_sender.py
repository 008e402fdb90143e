"""Sends messages to ZeroMQ clients, and keeps small ones for clients whose connections are full, within bounds."""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping

import msgspec

from pipeline.client import protocol as p
from pipeline.http_server.sockets.deliveries import Client, client_of
from pipeline.http_server.sockets.slow_clients import UnreadReplies
from pipeline.stages.gateway.zmq.connection import Connection
from pipeline.stages.gateway.zmq.listener import ZmtpListener
from pipeline.stages.gateway.zmq.peer import ClientPeer
from pipeline.stages.gateway.zmq.serving.unread_messages import UnreadMessages

MAX_RETRY_S = 0.3
"""Longest delay before a full connection is tried again."""
MAX_PENDING_MESSAGES = 2048
"""Small messages to a client that wait for it."""
MAX_PENDING_BYTES = 32 * 1024**2
"""Of all messages to all clients that wait for them: an error that names much of a request may be as large as it."""


class PeerSender:
    """Owns the messages that wait for the clients of a server."""

    def __init__(
        self,
        listener: ZmtpListener,
        peers: Mapping[Connection, ClientPeer],
        unread: UnreadReplies,
        *,
        on_stuck: Callable[[ClientPeer], None],
        on_crowded: Callable[[ClientPeer], None],
    ) -> None:
        """`unread` counts what connections have not sent. `on_stuck` is called with a peer that has too many messages
        waiting, `on_crowded` with one that must go because those of all peers take too much room. Both must disconnect
        it."""
        self._listener = listener
        self._peers = peers
        self._on_stuck = on_stuck
        self._on_crowded = on_crowded
        self._loop = asyncio.get_running_loop()
        self._encoder = msgspec.msgpack.Encoder()
        self._unread = UnreadMessages(listener, unread, on_crowded)
        self.num_pending_bytes = 0
        """Of all peers."""

    def send(self, peer: ClientPeer, message: p.ServerMessage) -> int:
        """Send now and return the message's bytes, or 0; the peer's streams are woken when it may take more."""
        if peer.full_s is not None:
            return 0
        data = self._encoder.encode(message)
        if self._listener.send(peer.connection, data) == "full":
            self._is_full(peer)
            return 0
        self._given(peer, data)
        return len(data)  # or it is gone, and the listener says so next

    def post(self, peer: ClientPeer, message: p.ServerMessage) -> None:
        """Send now or as soon as the connection takes it, in order."""
        data = self._encoder.encode(message)
        if peer.full_s is None and self._listener.send(peer.connection, data) != "full":
            self._given(peer, data)
            return
        peer.pending.append(data)
        self._count(peer, len(data))
        self._is_full(peer)
        if len(peer.pending) > MAX_PENDING_MESSAGES:
            self._on_stuck(peer)
        elif self.num_pending_bytes > MAX_PENDING_BYTES:
            self._loop.call_soon(self._make_room)  # the caller may be in a loop over the peers

    def send_last(self, peer: ClientPeer, message: p.ServerMessage) -> None:
        """Send the last message of a connection, unless others wait."""
        if not peer.pending:
            self._listener.send(peer.connection, self._encoder.encode(message))

    def flush(self, peer: ClientPeer) -> bool:
        """Send what waits for a peer. Returns whether all was sent."""
        while peer.pending:
            if self._listener.send(peer.connection, peer.pending[0]) == "full":
                return False
            self._given(peer, data := peer.pending.popleft())
            self._count(peer, -len(data))
        peer.full_s = None
        return True

    def forget(self, peer: ClientPeer) -> None:
        """Drop what waits for a peer that leaves."""
        peer.pending.clear()
        self._count(peer, -peer.pending_bytes)
        self._unread.forget(peer)
        if peer.retry is not None:
            peer.retry.cancel()

    def _given(self, peer: ClientPeer, data: bytes) -> None:
        """A peer's connection has taken a message."""
        peer.sent()
        self._unread.given(peer, len(data))

    def _count(self, peer: ClientPeer, num_bytes: int) -> None:
        peer.pending_bytes += num_bytes
        self.num_pending_bytes += num_bytes

    def _make_room(self) -> None:
        """End connections that don't take their messages, those of the key for which most are kept."""
        while self.num_pending_bytes > MAX_PENDING_BYTES:
            kept: Counter[str] = Counter()
            for peer in self._peers.values():
                kept[peer.scope] += peer.pending_bytes
            ((scope, _),) = kept.most_common(1)
            of_scope = (peer for peer in self._peers.values() if peer.scope == scope)
            self._on_crowded(max(of_scope, key=lambda peer: peer.pending_bytes))

    def _is_full(self, peer: ClientPeer) -> None:
        if peer.full_s is None:
            peer.full_s = self._loop.time()
        if peer.retry is None:
            peer.retry = self._loop.call_later(peer.retry_s, self._retry, peer)
            peer.retry_s = min(2 * peer.retry_s, MAX_RETRY_S)

    def _retry(self, peer: ClientPeer) -> None:
        peer.retry = None
        if not self.flush(peer):
            self._is_full(peer)
            return
        for stream, _ in peer.streams.values():
            stream.wake()


class PeerChannel:
    """The `ClientChannel` of one peer."""

    def __init__(self, sender: PeerSender, peer: ClientPeer) -> None:
        self._sender = sender
        self._peer = peer

    @property
    def is_full(self) -> bool:
        return self._peer.full_s is not None

    @property
    def client(self) -> Client:
        return client_of(self._peer.scope, self._peer.connection.address)

    def send(self, message: p.ServerMessage) -> int:
        return self._sender.send(self._peer, message)

    def post(self, message: p.ServerMessage) -> None:
        self._sender.post(self._peer, message)
