"""The listening sockets, which the supervisor opens before it starts any stage, and the addresses of a server.

There is one for each gateway, on the same port (SO_REUSEPORT). The connections that wait in a socket are lost when it
is closed. So before a gateway goes, a small program in the kernel (`set_active_listeners`) gives new connections to the
others, and then this gateway accepts those that wait.
"""

import contextlib
import ctypes
import errno
import os
import socket
import struct
from collections.abc import Sequence

from pipeline.client.connection.zmq_address import address_of
from pipeline.config.settings import Settings

LISTEN_BACKLOG = 1024

SO_ATTACH_REUSEPORT_CBPF = 51
BPF_INSTRUCTION = struct.Struct("HBBI")
BPF_PROGRAM = struct.Struct("HxxxxxxP")
BPF_LD_W_ABS, BPF_ALU_MOD_K, BPF_RET_A = 0x20, 0x94, 0x16
BPF_RANDOM = 0xFFFFF000 + 56
"""SKF_AD_OFF + SKF_AD_RANDOM: a random number."""


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
        if error.errno == errno.EACCES:
            why = f"{why}: ports below 1024 need root or CAP_NET_BIND_SERVICE"
        key = f"{keys}{'port' if is_port else 'host'}"
        flag = f" (--{key.removeprefix('gateway.')})" if keys == "gateway." else ""
        raise OSError(f"cannot listen on {host}:{port}: {why}; choose another {key}{flag}") from error


def add_listener(sockets: list[socket.socket], setting: str = "gateway.replicas") -> None:
    """Open one more socket on the port of these. Raises OSError, in words for the user."""
    first = sockets[0]
    first.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # a single one does not share its port until now
    address = first.getsockname()[:2]
    try:
        one = socket.create_server(address, family=first.family, backlog=LISTEN_BACKLOG, reuse_port=True)
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        raise OSError(f"{setting}: cannot open another socket on port {address[1]}: {why}") from error
    sockets.append(one)


def remove_listener(sockets: list[socket.socket]) -> None:
    """Close the last one, from which all connections were accepted."""
    sockets.pop().close()


def set_active_listeners(sockets: Sequence[socket.socket], num: int) -> None:
    """Give new connections to the first `num` sockets only, each the same share. A kernel that can't divides them among
    all, which loses connections only if a gateway goes at the moment when they come."""
    code = ((BPF_LD_W_ABS, BPF_RANDOM), (BPF_ALU_MOD_K, num), (BPF_RET_A, 0))
    data = b"".join(BPF_INSTRUCTION.pack(operation, 0, 0, value) for operation, value in code)
    buffer = ctypes.create_string_buffer(data, len(data))
    with contextlib.suppress(OSError):
        program = BPF_PROGRAM.pack(len(code), ctypes.addressof(buffer))
        sockets[0].setsockopt(socket.SOL_SOCKET, SO_ATTACH_REUSEPORT_CBPF, program)


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    host, port = listener.getsockname()[:2]
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"


def zmq_address(settings: Settings, listeners: list[socket.socket], replica: int = 0) -> str | None:
    """The ZeroMQ address of a gateway; None if gateway.zmq is off."""
    return address_of(settings.gateway.zmq, listeners[0].getsockname()[1], replica)
