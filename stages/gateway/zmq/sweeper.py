"""Ends connections of ZeroMQ clients that say nothing, or take nothing, for too long; and of those that have nothing
open, if another server has taken over."""

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus

from pipeline.runtime.process import suspension
from pipeline.stages.gateway.errors import ApiError
from pipeline.stages.gateway.zmq.connection import Connection
from pipeline.stages.gateway.zmq.listener import ZmtpListener
from pipeline.stages.gateway.zmq.peer import ClientPeer
from pipeline.stages.gateway.zmq.stream import STALL_S

HELLO_S = 5.0
"""Time for hello on a new connection."""
SILENCE_S = 30.0
"""Longest time between messages of a client."""
MESSAGE_S = 60.0
"""Time for a message to arrive completely, like a body over HTTP."""
SWEEP_S = 0.5
"""Interval of the check."""


class Sweeper:
    """Checks the peers of a server while there are connections."""

    def __init__(
        self,
        listener: ZmtpListener,
        peers: Mapping[Connection, ClientPeer],
        *,
        drop: Callable[[ClientPeer, ApiError], None],
        disconnect: Callable[[ClientPeer], None],
    ) -> None:
        """`drop` sends an error before it disconnects."""
        self._listener = listener
        self._peers = peers
        self._drop = drop
        self._disconnect = disconnect
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        """Set while there are connections."""
        self._is_closed = self._is_leaving = False

    def start(self) -> None:
        """There is a connection. Idempotent."""
        if self._timer is None and self._listener.num_connections and not self._is_closed:
            self._timer = self._loop.call_later(SWEEP_S, self._sweep)

    def leave(self) -> None:
        """From now on, disconnect each client that has nothing open here: another server is at this address."""
        self._is_leaving = True
        for peer in list(self._peers.values()):
            self._leave(peer)

    def _leave(self, peer: ClientPeer) -> None:
        if not (peer.streams or peer.waiting or peer.pending or peer.parsing or peer.connection.is_waiting):
            self._disconnect(peer)

    def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _sweep(self) -> None:
        now_s = self._loop.time()
        assert self._timer is not None
        late_s, was_suspended = now_s - self._timer.when(), suspension.missed(self._timer.when())
        self._timer = None
        for peer in list(self._peers.values()):
            if was_suspended:
                peer.suspended(late_s)
            elif late_s <= max(SWEEP_S, 1.0):  # else the loop was blocked and has not read yet
                self._check(peer, now_s)
            if self._is_leaving and self._peers.get(peer.connection) is peer:
                self._leave(peer)
        if not was_suspended and late_s <= max(SWEEP_S, 1.0):
            self._listener.give_up_slow()
        self.start()

    def _check(self, peer: ClientPeer, now_s: float) -> None:
        connection = peer.connection
        if not peer.is_welcome:
            if now_s - connection.opened_s > HELLO_S and not peer.waiting:
                self._disconnect(peer)
        elif peer.full_s is not None and now_s - peer.full_s > STALL_S:
            self._disconnect(peer)
        elif connection.is_waiting or peer.parsing is not None:
            peer.heard_s = now_s  # it has input that was not read yet
        elif connection.begun_s is None:
            if now_s - peer.heard_s > SILENCE_S:
                message = f"no message from the client for {SILENCE_S:g} s"
                self._drop(peer, ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="silent"))
        elif now_s - connection.begun_s > MESSAGE_S:
            message = f"a message took more than {MESSAGE_S:g} s to arrive"
            self._drop(peer, ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="silent"))
