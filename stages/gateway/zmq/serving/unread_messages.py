"""Counts what connections of ZeroMQ clients have been given and have not sent: like replies over HTTP that clients have
not taken, besides those of open requests. A request may be over while its last messages, such as the vectors of a long
text, are still in its connection."""

import asyncio
from collections.abc import Callable

from pipeline.http_server.sockets.deliveries import Delivery, client_of
from pipeline.http_server.sockets.slow_clients import HIGH_BYTES, UnreadReplies
from pipeline.stages.gateway.zmq.listener import ZmtpListener
from pipeline.stages.gateway.zmq.peer import ClientPeer

LOOK_S = 0.1
"""How often it is looked whether a connection has sent what it has."""


class UnreadMessages:
    """Those of one server."""

    def __init__(self, listener: ZmtpListener, unread: UnreadReplies, on_crowded: Callable[[ClientPeer], None]) -> None:
        """`on_crowded` must disconnect a peer."""
        self._listener = listener
        self._unread = unread
        self._on_crowded = on_crowded
        self._loop = asyncio.get_running_loop()
        self._of_peer: dict[ClientPeer, tuple[Delivery, asyncio.TimerHandle]] = {}

    def given(self, peer: ClientPeer, num_bytes: int) -> None:
        """A peer's connection was given a message."""
        peer.num_given += num_bytes
        num_unsent = self._listener.num_unsent(peer.connection)
        if num_unsent <= HIGH_BYTES:
            return
        if (found := self._of_peer.get(peer)) is not None:
            self._unread.update(found[0], num_unsent)
            return
        delivery = Delivery(
            client_of(peer.scope, peer.connection.address),
            lambda: peer.num_given - self._listener.num_unsent(peer.connection),
            lambda: self._loop.call_soon(self._end, peer),  # the caller may be about to send to it
            lambda: self._listener.num_unsent(peer.connection),
        )
        self._of_peer[peer] = delivery, self._loop.call_later(LOOK_S, self._look, peer)
        self._unread.count(delivery, num_unsent)

    def forget(self, peer: ClientPeer) -> None:
        """A peer leaves. Idempotent."""
        if (found := self._of_peer.pop(peer, None)) is not None:
            delivery, timer = found
            timer.cancel()
            self._unread.remove(delivery)

    def _end(self, peer: ClientPeer) -> None:
        if peer in self._of_peer:
            self._on_crowded(peer)

    def _look(self, peer: ClientPeer) -> None:
        delivery, _ = self._of_peer[peer]
        if (num_unsent := self._listener.num_unsent(peer.connection)) <= HIGH_BYTES:
            self.forget(peer)
            return
        self._of_peer[peer] = delivery, self._loop.call_later(LOOK_S, self._look, peer)
        self._unread.update(delivery, num_unsent)
