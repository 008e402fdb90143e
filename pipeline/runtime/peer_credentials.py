"""Who serves at a Unix socket. Any user can bind an abstract name that is free, so a client makes sure that its own
user serves there before it says anything, at every connection: it connects itself, as libzmq would connect again
unasked.

    connect ──CONNECTED, fd──► SO_PEERCRED ──same user──► hello, or a question
       ▲                                   └──another───► an error that names both
       └────── after a while ◄── CLOSED, DISCONNECTED
"""

import contextlib
import os
import pwd
import socket
import struct
from collections.abc import Iterator

import zmq

NEVER_MS = 24 * 3600 * 1000
"""When libzmq connects again by itself: never soon. -1, its never, drops what has come and is not received yet."""

_CREDENTIALS = struct.Struct("=iII")
"""pid, uid, gid"""
_EVENT = struct.Struct("=Hi")


def uid_of_peer(fd: int) -> int:
    """The effective user at the other end of a Unix socket: of who listened or connected there. Raises OSError."""
    with socket.socket(fileno=os.dup(fd)) as same:
        return int(_CREDENTIALS.unpack(same.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[1])


def problem_of(fd: int, address: str) -> str:
    """Why nothing may be said by this connection to `address`; empty where its server is of our own user. Raises
    OSError where it has ended."""
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
    """Events of a socket's one connection."""

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
        """What has happened since the last time: events and the descriptors that they are about."""
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
    """What was queued for the last connection is dropped."""
    with contextlib.suppress(zmq.ZMQError):  # it has given up by itself
        client.disconnect(address)
    client.connect(address)
