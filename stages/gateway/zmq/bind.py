"""Binds the sockets for ZeroMQ clients: tcp:// or ipc://"""

import asyncio
import contextlib
import logging
import socket
import time
from pathlib import Path

from pipeline.client.connection.zmq_address import check_free, old_address, refusal
from pipeline.errors import UserError

LISTEN_BACKLOG = 1024
RETRY_S = 0.02
"""Time between two looks whether an address is free."""
LATE_S = 5.0
"""An address is usually free a moment after the server that has it was asked to leave it."""


def listen(address: str) -> list[socket.socket]:
    """The bound socket, and one of the address's old name if it has one and nothing listens there. Raises UserError."""
    sockets = [_listen(address)]
    if old := old_address(address):
        try:
            sockets.append(_listen(old))
        except UserError as error:
            logging.getLogger("pipeline").warning("clients that know the old address can't connect: %s", error)
    return sockets


async def until_free(address: str) -> None:
    """Wait until no server listens at an address: the one that this one replaces is about to leave it."""
    begun_s, has_warned = time.monotonic(), False
    while True:
        try:
            check_free(address)
            return
        except OSError as error:
            if not has_warned and time.monotonic() - begun_s > LATE_S:
                has_warned = True
                logging.getLogger("pipeline").warning("ZeroMQ clients have to wait: %s", error)
        await asyncio.sleep(RETRY_S)


def _listen(address: str) -> socket.socket:
    try:
        check_free(address)
        if address.startswith("ipc://"):
            return _listen_ipc(address.removeprefix("ipc://"))
        return _listen_tcp(address.removeprefix("tcp://"))
    except OSError as error:
        words = str(error)  # of check_free, without errno
        why = error.strerror or words
        raise UserError(refusal(address, why) if error.errno else words) from error


def _listen_ipc(name: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        if name.startswith("@"):
            listener.bind("\0" + name[1:])
        else:
            with contextlib.suppress(FileNotFoundError):
                Path(name).unlink()  # a stale socket: nothing listens there
            listener.bind(name)
        listener.listen(LISTEN_BACKLOG)
    except BaseException:
        listener.close()
        raise
    return listener


def _listen_tcp(host_port: str) -> socket.socket:
    host, _, port = host_port.rpartition(":")
    is_v6 = host.startswith("[")
    host = "" if host == "*" else host.strip("[]")
    listener = socket.create_server(
        (host, int(port)),
        family=socket.AF_INET6 if is_v6 else socket.AF_INET,
        backlog=LISTEN_BACKLOG,
        dualstack_ipv6=is_v6 and host == "::",
    )
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # connections inherit it
    return listener
