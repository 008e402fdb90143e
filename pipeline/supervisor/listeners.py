"""The listening sockets, which the supervisor opens before it starts any stage, and the addresses of a server."""

import errno
import os
import socket

from pipeline.client.connection.zmq_address import address_of
from pipeline.config.settings import Settings

LISTEN_BACKLOG = 1024


def listen(host: str, port: int, num_sockets: int = 1, keys: str = "gateway.") -> list[socket.socket]:
    """Open the HTTP sockets, one for each gateway; the kernel divides connections among them. This comes first, so
    that a taken port is reported at once. `keys` is the prefix of the settings that name host and port.

    Raises OSError, in words for the user, if the address is not available.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sockets: list[socket.socket] = []
    try:
        # A shared port could also be shared with another server of this user, so take it exclusively first.
        sockets.append(socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG))
        if num_sockets > 1:
            exclusive = sockets.pop()
            port = exclusive.getsockname()[1]
            exclusive.close()
            for _ in range(num_sockets):
                one = socket.create_server((host, port), family=family, backlog=LISTEN_BACKLOG, reuse_port=True)
                sockets.append(one)
        return sockets
    except OSError as error:
        for one in sockets:
            one.close()
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        why = os.strerror(error.errno) if is_port and error.errno else (error.strerror or str(error))
        key = f"{keys}{'port' if is_port else 'host'}"
        flag = f" (--{key.removeprefix('gateway.')})" if keys == "gateway." else ""
        raise OSError(f"cannot listen on {host}:{port}: {why}; choose another {key}{flag}") from error


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def zmq_address(settings: Settings, listeners: list[socket.socket], replica: int = 0) -> str | None:
    """The ZeroMQ address of a gateway; None if gateway.zmq is off."""
    return address_of(settings.gateway.zmq, listeners[0].getsockname()[1], replica)
