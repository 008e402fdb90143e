"""The door's socket: a ROUTER that knows its connections one by one, can end them, and sees them end.

libzmq shows a ROUTER's user only routing ids, and only of those who have sent something. Its monitor tells of each
connection that opens and closes, by descriptor, and every message says by which descriptor it came. Together they give
what a server needs: connections that say nothing are found and closed, a client that vanishes is known at once, and
what a hostile one sends costs it its connection.

    accepted ──first message──► bound to a routing id ──► ended
        └──────────── no hello in time ────────────────────►┘

The socket has a context, and so an I/O thread, of its own: clients do not slow down the messages between stages.
"""

import asyncio
import os
import resource
import socket
import stat
import struct
from collections.abc import Callable, Iterator
from typing import Literal

import zmq

from pipeline.door_address import check_free, refusal
from pipeline.errors import UserError

MAX_CONNECTIONS = 1024
"""At most; fewer where the process may have few descriptors."""
RECEIVE_BOUND = 16
"""Messages of one connection that wait to be read."""
SEND_BOUND = 256
"""Messages that wait to be sent to one connection; what is more waits in its requests, merged."""
HANDSHAKE_MS = 5_000
"""Longest that the handshake of ZMTP may take."""
MAX_WAKE_MESSAGES = 64
"""Messages taken in one turn of the loop, so that others have theirs."""
GRACE_S = 0.1
"""How long last words may take to leave before their connection is ended."""

_EVENT = struct.Struct("=HI")
Sent = Literal["sent", "full", "gone"]


class Connection:
    """One client's connection, as the socket knows it."""

    def __init__(self, fd: int, now_s: float) -> None:
        self.fd = fd
        self.inode = _inode(fd)
        """Tells this connection from another one that gets the same descriptor later."""
        self.opened_s = now_s
        self.routing_id = b""
        """Empty until it has said something."""
        self.is_ending = False
        """What it still says is not heard."""


class DoorSocket:
    """Owns the ROUTER, its context and its connections. `on_wake` is called when there may be messages to receive,
    `on_end` with each connection that has ended."""

    def __init__(
        self,
        address: str,
        max_message_bytes: int,
        on_wake: Callable[[], None],
        on_end: Callable[[Connection], None],
    ) -> None:
        """Listen. Raises UserError where the address can't be listened on."""
        self._on_wake = on_wake
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, RECEIVE_BOUND)
        self._socket.setsockopt(zmq.SNDHWM, SEND_BOUND)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_message_bytes)
        self._socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        # A send to a client that is gone or takes nothing says so, rather than dropping the message.
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # Nobody can take over a connection by calling himself like another one: who comes second is never heard.
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        # The kernel reports the effective user of who connects by a Unix socket; others are refused.
        self._socket.setsockopt(zmq.IPC_FILTER_UID, os.geteuid())
        if address.startswith("tcp://["):
            self._socket.setsockopt(zmq.IPV6, 1)
        monitor = f"inproc://{id(self)}"
        self._socket.monitor(monitor, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._monitor = self._context.socket(zmq.PAIR)
        self._monitor.set_hwm(0)  # else the I/O thread would wait for us
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.connect(monitor)
        self._by_fd: dict[int, Connection] = {}
        self._by_id: dict[bytes, Connection] = {}
        self._is_wake_due = False
        self._is_closed = False
        self._max_connections = min(MAX_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
        try:
            self._bind(address)
        except UserError:
            self._socket.monitor(None, 0)
            self._monitor.close()
            self._socket.close()
            self._context.term()
            raise
        self._loop.add_reader(int(self._socket.get(zmq.FD)), self._wake)
        self._loop.add_reader(int(self._monitor.get(zmq.FD)), self._wake)
        self._loop.call_soon(self._wake)  # what came before is no news to a descriptor

    def _bind(self, address: str) -> None:
        try:
            check_free(address)
            self._socket.bind(address)
        except zmq.ZMQError as error:
            raise UserError(refusal(address, error.strerror)) from error
        except OSError as error:
            raise UserError(str(error)) from error

    @property
    def num_connections(self) -> int:
        return len(self._by_fd)

    @property
    def connections(self) -> list[Connection]:
        return list(self._by_fd.values())

    # ------------------------------------------------------------------------------------------------------ receive

    def receive(self) -> Iterator[tuple[Connection, list[bytes]]]:
        """What has come, a turn's worth: connections and the frames of a message. The rest follows in later turns."""
        self._is_wake_due = False
        for _ in range(MAX_WAKE_MESSAGES):
            if self._is_closed:
                return
            try:
                routing_id, *frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            connection = self._find(routing_id.bytes, frames)
            if connection is not None and not connection.is_ending:
                yield connection, [frame.bytes for frame in frames]
        else:
            self.wake_soon()
        self._watch()

    def _find(self, routing_id: bytes, frames: list[zmq.Frame]) -> Connection | None:
        """The connection that a message came by; None where it has ended since."""
        connection = self._by_id.get(routing_id)
        if connection is not None or not frames:
            return connection
        fd = int(frames[0].get(zmq.SRCFD))
        # Its opening may still be waiting in the monitor, and before that the end of another with the same descriptor.
        while (connection := self._by_fd.get(fd)) is None or connection.routing_id:
            if not self._watch_one():
                if connection is not None:
                    self.end(connection)  # two ids by one descriptor: one of them is of the past
                return None
        connection.routing_id = routing_id
        self._by_id[routing_id] = connection
        return connection

    def _wake(self) -> None:
        # Asking is also what makes the descriptors unreadable.
        self._monitor.get(zmq.EVENTS)
        self._socket.get(zmq.EVENTS)
        self._on_wake()

    def wake_soon(self) -> None:
        """See in the loop's next turn what has come: every use of the socket takes away the news of its descriptor."""
        if not self._is_wake_due and not self._is_closed:
            self._is_wake_due = True
            self._loop.call_soon(self._on_wake)

    def _watch(self) -> None:
        while not self._is_closed and self._watch_one():
            pass

    def _watch_one(self) -> bool:
        """Take one of the monitor's events. Returns whether there was one."""
        try:
            data, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        event, fd = _EVENT.unpack(data)
        before = self._by_fd.pop(fd, None)
        if before is not None:
            self._by_id.pop(before.routing_id, None)
            self._on_end(before)
        if event == zmq.EVENT_ACCEPTED:
            connection = self._by_fd[fd] = Connection(fd, self._loop.time())
            if len(self._by_fd) > self._max_connections:
                self._shut(connection)
        return True

    # --------------------------------------------------------------------------------------------------------- send

    def send(self, connection: Connection, data: bytes) -> Sent:
        """Send one message. Never blocks: says where the client takes nothing, or is gone."""
        if self._is_closed or self._by_id.get(connection.routing_id) is not connection:
            return "gone"
        self.wake_soon()
        try:
            self._socket.send_multipart((connection.routing_id, data), zmq.NOBLOCK)
        except zmq.Again:
            return "full"
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return "gone"
        return "sent"

    def end(self, connection: Connection) -> None:
        """End a connection; what was sent to it has a moment to leave. `on_end` follows."""
        if not connection.is_ending:
            connection.is_ending = True
            self._loop.call_later(GRACE_S, self._shut, connection)

    def _shut(self, connection: Connection) -> None:
        """Let libzmq find that this client has nothing more to say. There is no other way to end one connection."""
        connection.is_ending = True
        if self._is_closed:
            return
        self._watch()
        if self._by_fd.get(connection.fd) is not connection or _inode(connection.fd) != connection.inode:
            return
        with socket.socket(fileno=os.dup(connection.fd)) as same:
            try:
                same.shutdown(socket.SHUT_RD)
            except OSError:
                return  # the client was quicker

    def close(self, linger_s: float = 0.0) -> None:
        """Close all; what is queued has `linger_s` to leave, for which `wait_closed` waits."""
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(int(self._socket.get(zmq.FD)))
        self._loop.remove_reader(int(self._monitor.get(zmq.FD)))
        self._socket.monitor(None, 0)
        self._monitor.close()
        self._socket.close(linger=round(linger_s * 1000))

    def wait_closed(self) -> None:
        """Wait, blocking, until what was queued has left or its time is up."""
        self._context.term()


def _inode(fd: int) -> int:
    """Which socket a descriptor stands for; 0 where it is none any more."""
    try:
        facts = os.fstat(fd)
    except OSError:
        return 0
    return facts.st_ino if stat.S_ISSOCK(facts.st_mode) else 0
