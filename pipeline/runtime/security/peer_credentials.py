"""Check which user listens on a Unix socket. Any user can bind a free abstract name, so at each connection a client
checks that its own user listens before it sends anything. It reconnects by itself, because libzmq would reconnect
without a check.

    connect ──CONNECTED, fd──► SO_PEERCRED ──same user───► first message
       ▲                                   └──other user─► an error that names both
       └────── after a pause ◄── CLOSED, DISCONNECTED
"""

import contextlib
import os
import pwd
import socket
import struct
from collections.abc import Iterator

import zmq

NEVER_MS = 24 * 3600 * 1000
"""libzmq's reconnect interval: practically never. -1, libzmq's own "never", drops received messages that are not read
yet."""

_CREDENTIALS = struct.Struct("=iII")
"""pid, uid, gid"""
_EVENT = struct.Struct("=Hi")


def uid_of_peer(fd: int) -> int:
    """The effective uid of the process at the other end of a Unix socket. Raises OSError."""
    with socket.socket(fileno=os.dup(fd)) as same:
        return _of_peer(same)[1]


def is_listening(name: str, pid: int) -> bool:
    """Whether this process, of our own user, listens at an abstract name. False also if so many wait for it that it
    takes no further connection."""
    with socket.socket(socket.AF_UNIX) as one:
        one.setblocking(False)
        try:
            one.connect(f"\0{name}")
            return _of_peer(one) == (pid, os.geteuid())
        except OSError:
            return False


def _of_peer(connected: socket.socket) -> tuple[int, int]:
    """The pid and effective uid of who listens, as of when it began to."""
    pid, uid, _ = _CREDENTIALS.unpack(connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


def problem_of(fd: int, address: str) -> str:
    """Why this connection to `address` must not be used; empty if the server's user is our own. Raises OSError if the
    connection has ended."""
    server, own = uid_of_peer(fd), os.geteuid()
    if server == own:
        return ""
    return f"The server at {address} runs as user {_name(server)} (uid {server}), not as you (uid {own})"


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return "without a name"


class Monitor:
    """The events of a socket with one connection."""

    EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED

    def __init__(self, context: "zmq.Context[zmq.Socket[bytes]]", watched: "zmq.Socket[bytes]") -> None:
        address = f"inproc://monitor-{id(watched)}"
        self._watched = watched
        watched.monitor(address, self.EVENTS)
        self.socket = context.socket(zmq.PAIR)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(address)

    def fileno(self) -> int:
        return int(self.socket.get(zmq.FD))

    def take(self) -> Iterator[tuple[int, int]]:
        """The events since the last call, each with its descriptor."""
        while True:
            try:
                data, _ = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield _EVENT.unpack(data)

    def close(self) -> None:
        self._watched.monitor(None, 0)
        self.socket.close()


def connect_again(client: "zmq.Socket[bytes]", address: str) -> None:
    """Reconnect. Messages queued for the last connection are dropped."""
    with contextlib.suppress(zmq.ZMQError):  # not connected any more
        client.disconnect(address)
    client.connect(address)
