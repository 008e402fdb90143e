"""Where the ZeroMQ door listens: `gateway.zmq` in the words of libzmq, one address for each gateway.

auto           ipc://@pipeline/<HTTP port>/door     an abstract Unix socket, for this user's processes
ipc://…        a path, or an abstract name behind @; replicas after the first append .1, .2 …
tcp://host:port                                     replicas after the first take the ports behind it
off
"""

import errno
import os
import socket
import stat
from pathlib import Path

from pipeline.config.zmq_setting import AUTO, OFF, problem_of
from pipeline.errors import UserError

CONNECT_S = 1.0
"""Longest that a listener may take to show that it is there."""


def address_of(setting: str, http_port: int, replica: int = 0) -> str | None:
    """The address of a gateway's door; None where there is none. Raises UserError for what is no address."""
    if setting == OFF:
        return None
    if problem := problem_of(setting):
        raise UserError(problem)
    address = f"ipc://@pipeline/{http_port}/door" if setting == AUTO else setting
    address = address.replace("tcp://localhost:", "tcp://127.0.0.1:")  # libzmq binds to no names
    if replica == 0:
        return address
    if address.startswith("ipc://"):
        return f"{address}.{replica}"
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + replica}"


def check_free(address: str) -> None:
    """See whether an address can be listened on, before anything that takes time. Raises OSError in words for the
    user."""
    why = _ipc_taken(address.removeprefix("ipc://")) if address.startswith("ipc://") else _tcp_taken(address)
    if why:
        raise OSError(refusal(address, why))


def refusal(address: str, why: str) -> str:
    """That an address can't be listened on, in words for the user."""
    return f"cannot listen on {address}: {why}; choose another gateway.zmq"


def _ipc_taken(name: str) -> str:
    """Why a Unix socket can't be opened there. libzmq would take the place of a file without asking."""
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
            return ""  # nobody listens, though a file may have been left behind
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
