"""ZeroMQ addresses of the gateways, from the setting `gateway.zmq`.

auto           ipc://@pipeline/<HTTP port>/zmq      an abstract Unix socket, for this user's processes
ipc://…        a path, or an abstract name after @; further replicas append .1, .2 …
tcp://host:port                                     further replicas use the following ports
off
"""

import errno
import os
import re
import socket
import stat
from collections.abc import Sequence
from pathlib import Path

from pipeline.config.values.zmq_setting import AUTO, OFF, problem_of
from pipeline.errors import UserError

CONNECT_S = 1.0
"""Maximum time to wait for a listener at the address to accept a connection."""


def address_of(setting: str, http_port: int, replica: int = 0) -> str | None:
    """A gateway's ZeroMQ address; None if it is off. Raises UserError if the setting is invalid."""
    if setting == OFF:
        return None
    if problem := problem_of(setting):
        raise UserError(problem)
    address = f"ipc://@pipeline/{http_port}/zmq" if setting == AUTO else setting
    address = address.replace("tcp://localhost:", "tcp://127.0.0.1:")  # libzmq can't bind to names
    if replica == 0:
        return address
    if address.startswith("ipc://"):
        return f"{address}.{replica}"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + replica}"


def old_address(address: str) -> str | None:
    """Where clients of older releases look for the gateway at `address`; None if that is no address of `auto`. The next
    release does without."""
    match = re.fullmatch(r"(ipc://@pipeline/[0-9]+)/zmq(\.[0-9]+)?", address)
    return f"{match[1]}/door{match[2] or ''}" if match else None


def others_of(address: str, addresses: Sequence[str], gateway: int) -> list[tuple[int, str]]:
    """Index and address of a server's other gateways, as they are reached from here: at `tcp://`, by the host that this
    process uses. `address` is that of a gateway, which has named the `addresses` of all, as they are bound, and its
    index in them. Empty if a proxy or a forwarded port is between: its other ports are unknown."""
    others = [(index, other) for index, other in enumerate(addresses) if index != gateway]
    if not others or not address.startswith("tcp://"):
        return others
    host, _, port = address.rpartition(":")
    if port != addresses[gateway].rpartition(":")[2]:
        return []
    return [(index, f"{host}:{other.rpartition(':')[2]}") for index, other in others]


def check_free(address: str) -> None:
    """Check early in the start that an address is free. Raises OSError with a message for the user."""
    why = _ipc_taken(address.removeprefix("ipc://")) if address.startswith("ipc://") else _tcp_taken(address)
    if why:
        raise OSError(refusal(address, why))


def refusal(address: str, why: str) -> str:
    """The message for the user if an address can't be bound."""
    return f"cannot listen on {address}: {why}; choose another gateway.zmq"


def _ipc_taken(name: str) -> str:
    """Why a Unix socket can't be bound there; empty if it can. Checked here because libzmq replaces existing files."""
    if not name.startswith("@"):
        path = Path(name)
        if not path.parent.is_dir():
            return os.strerror(errno.ENOENT)
        try:
            if not stat.S_ISSOCK(path.stat().st_mode):
                return os.strerror(errno.EEXIST)
        except FileNotFoundError:
            return ""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(CONNECT_S)
        try:
            probe.connect("\0" + name[1:] if name.startswith("@") else name)
        except (ConnectionRefusedError, FileNotFoundError):
            return ""  # no listener; at most a stale file
        except OSError as error:
            return error.strerror or str(error)
    return os.strerror(errno.EADDRINUSE)


def _tcp_taken(address: str) -> str:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if host == "*":
        host = ""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host.strip("[]"), int(port)), family=family):
            return ""
    except OSError as error:
        return os.strerror(error.errno) if error.errno in (errno.EADDRINUSE, errno.EACCES) else str(error.strerror)
